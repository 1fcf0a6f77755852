"""KV and logits are the same to the bit wherever a prompt is cut and whatever is beside it."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import gelu, silu

from kvrelay.engine.attention import sdpa
from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.choice import choose_attention
from kvrelay.engine.attention.index import TILE, keys_computed, queries_computed
from kvrelay.engine.attention.pool import DTYPES, KVPool, PoolShape
from kvrelay.engine.attention.sdpa import SdpaBackend, attend
from kvrelay.engine.core.updates import Logprob, Work
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.elementwise import Vectorising, padded, vectorised
from kvrelay.engine.model.forward import TransformersModel
from kvrelay.engine.model.loading import LoadedModel, load_model
from kvrelay.engine.runner import Runner
from kvrelay.process.shared_cores import WORKERS, CoresView, SharedCores
from kvrelay.sampling import Sampling
from tests.engine.torch.drive import prompts
from tests.models import KINDS, VOCAB, tiny_model

TOP = Sampling(temperature=0.0, logprobs=VOCAB)
LENGTHS = (1, 2, 33, 150, 201, 391, 530, 700)  # runs of 32 queries and 512 keys, 193 to 383 keys
BACKENDS = ("sdpa", "native")
EXPERTS = ("mixtral", "qwen3-moe")  # each expert computes as many rows as chose it
# All of them: the slow tests.
FEW = [("llama", "float32"), ("gpt2", "float32"), ("lfm2", "float32"), ("qwen3", "bfloat16")]


def computed(
    runner: Runner, tokens: Sequence[int], counts: Sequence[int], beside: Sequence[Work]
) -> tuple[torch.Tensor, tuple[Logprob, ...]]:
    """KV of all positions, and all log probabilities after the last, computed in such counts."""
    size = runner.pool.shape.block_size
    table = list(range(len(tokens) // size, -1, -1))
    start, answers = 0, []
    for count in counts:
        wanted = TOP if start + count == len(tokens) else None
        work = Work(tokens, start, count, table, len(tokens), wanted)
        answers = runner.execute([*beside, work])
        start += count
    assert start == len(tokens)
    assert answers[-1] is not None
    kv = runner.pool.by_position[table].transpose(0, 2).flatten(2, 3)  # [k|v, layer, position, ..
    return kv[:, :, : len(tokens)].clone(), answers[-1].top


def cuts(rng: random.Random, length: int) -> Iterator[list[int]]:
    """Ways to cut so many positions: token by token at the end, and by chance."""
    ones = min(length, 40)
    yield [length - ones] * (length > ones) + [1] * ones
    for most in (4, 60, 300):
        counts: list[int] = []
        while (left := length - sum(counts)) > 0:
            counts.append(min(left, rng.randint(1, most)))
        yield counts


def neighbours(rng: random.Random, runner: Runner) -> list[Work]:
    """Decode entries and a chunk of other sequences, in the last blocks of the pool."""
    made, free, size = [], runner.pool.shape.num_blocks, runner.pool.shape.block_size
    for _ in range(rng.randint(0, 3)):
        length = rng.randint(2, 600)
        (tokens,) = prompts(rng.randrange(1 << 31), [length], VOCAB)
        free -= length // size + 1
        table = list(range(free, free + length // size + 1))
        runner.execute([Work(tokens, 0, length, table, length, None)])
        count = rng.choice((1, 1, rng.randint(1, length)))
        made.append(Work(tokens, length - count, count, table, length, TOP))
    return made


def check(
    loaded: LoadedModel, block_size: int, threads: int, seed: int, attention: str = "sdpa"
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    runner = Runner(loaded, 3200 // block_size, block_size, attention, threads)
    for tokens in prompts(seed, LENGTHS, VOCAB):
        kv, top = computed(runner, tokens, [len(tokens)], ())
        assert len(top) == VOCAB
        for counts in cuts(rng, len(tokens)):
            beside = neighbours(rng, runner)
            kv_cut, top_cut = computed(runner, tokens, counts, beside)
            told = f"{len(tokens)} tokens cut into {counts}, {len(beside)} beside them"
            assert torch.equal(kv_cut, kv), told
            assert top_cut == top, told


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(("kind", "dtype"), FEW)
def test_models(compiled: None, tmp_path: Path, kind: str, dtype: str, attention: str) -> None:
    path = tiny_model(kind, tmp_path / kind, DTYPES[dtype])
    check(load_model(path, dtype, "cpu"), 16, 1, random.randrange(1 << 31), attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXPERTS])
def test_every_dense_model(
    compiled: None, tmp_path: Path, kind: str, dtype: str, attention: str
) -> None:
    test_models(compiled, tmp_path, kind, dtype, attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 12])
def test_sizes_of_blocks_and_two_threads(
    compiled: None, tmp_path: Path, block_size: int, attention: str
) -> None:
    path = tiny_model("llama", tmp_path / "llama")
    check(load_model(path, "float32", "cpu"), block_size, 2, random.randrange(1 << 31), attention)


class ChangingCores(SharedCores):
    """Another number of threads for each step, and for layers of it while ``changing``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._bytes = (ctypes.c_uint8 * WORKERS)()
        self.view = CoresView(ctypes.addressof(self._bytes), WORKERS, 1, 8, 8)

    def compute(self, most: int) -> int:
        return self._rng.randint(1, 8)

    @contextmanager
    def changing(self) -> Iterator[None]:
        ended = threading.Event()

        def change() -> None:
            while not ended.wait(0.0005):
                self._bytes[self._rng.randrange(8)] ^= 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def check_threads(
    kind: str, dtype: str, attention: str, folder: Path, seeds: int, **sizes: object
) -> None:
    """KV and logits, whole on one thread, and cut by chance on one to eight beside others.

    700 rows of a feed-forward are several times what torch computes in one thread.
    """
    loaded = load_model(tiny_model(kind, folder / kind, DTYPES[dtype], 0, **sizes), dtype, "cpu")
    before = torch.get_num_threads()
    try:
        for _ in range(seeds):
            seed = random.randrange(1 << 31)
            print(f"seed {seed}")
            rng = random.Random(seed)
            (tokens,) = prompts(seed, [700], VOCAB)
            kv, top = computed(Runner(loaded, 200, 16, attention, 1), tokens, [700], ())
            for threads in range(1, 9):
                runner = Runner(loaded, 200, 16, attention, threads)
                middle = rng.randint(1, 698)
                for counts in ([700], [middle, 699 - middle, 1]):
                    again = computed(runner, tokens, counts, neighbours(rng, runner))
                    told = f"{threads} threads, {counts}"
                    assert torch.equal(again[0], kv), told
                    assert again[1] == top, told
            runner = Runner(loaded, 200, 16, attention, 1)
            cores = ChangingCores(rng)
            runner.share(cores)
            with cores.changing():
                again = computed(runner, tokens, [35] * 20, neighbours(rng, runner))
            assert torch.equal(again[0], kv), "threads change at every step"
            assert again[1] == top, "threads change at every step"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(("kind", "dtype"), FEW)
def test_one_to_eight_threads(
    compiled: None, tmp_path: Path, kind: str, dtype: str, attention: str
) -> None:
    check_threads(kind, dtype, attention, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXPERTS])
def test_every_dense_model_on_one_to_eight_threads(
    compiled: None, tmp_path: Path, kind: str, dtype: str, attention: str
) -> None:
    """Also a feed-forward of a width that is no multiple of a vector."""
    check_threads(kind, dtype, attention, tmp_path / "usual", 3)
    check_threads(kind, dtype, attention, tmp_path / "odd", 2, **odd(kind))


def odd(kind: str) -> dict[str, object]:
    """Settings of a feed-forward of 100 elements."""
    return {"n_inner": 100} if kind == "gpt2" else {"intermediate_size": 100}


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu-tanh", "sigmoid", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_element_of_an_activation_does_not_depend_on_its_place(
    name: str, dtype: torch.dtype
) -> None:
    """On one to eight threads, at any place of tensors of any size and stride."""
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "silu": silu,
        "gelu": gelu,
        "gelu-tanh": gelu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }
    function = functions[name]
    named = {"approximate": "tanh"} if name == "gelu-tanh" else {}
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    rng, before = random.Random(seed), torch.get_num_threads()
    given = (torch.randn(160_000, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)
    try:
        torch.set_num_threads(1)
        whole = vectorised(function, given, **named)
        torch.testing.assert_close(whole, function(given, **named))
        for threads in range(1, 9):
            torch.set_num_threads(threads)
            for most in (40, 40, 70_000, 160_000):
                count = rng.randint(1, most)
                first = rng.randint(0, len(given) - count)
                part = given[first : first + count]
                wanted = whole[first : first + count]
                assert torch.equal(vectorised(function, part, **named), wanted)
            columns = given.view(400, 400)[:, 7:107]
            wanted = whole.view(400, 400)[:, 7:107]
            assert torch.equal(vectorised(function, columns, **named), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("threads", [1, 7, 89, 1024])
def test_a_thread_adds_at_most_a_vector(threads: int, gelu: bool) -> None:
    for count in (1, 20_000, 200_000, 10_000_000):
        assert count <= padded(count, threads, gelu) < count + 64 * threads


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "float32"), ("llama", "float16"), ("gpt2", "bfloat16")]
)
def test_positions_before_one_that_is_no_number(
    compiled: None, tmp_path: Path, kind: str, dtype: str, wrong: float, attention: str
) -> None:
    """Their KV has the same bits: its blocks are named by the tokens before it alone."""
    loaded = load_model(tiny_model(kind, tmp_path / kind, DTYPES[dtype]), dtype, "cpu")
    embedding(loaded)[0] = wrong
    runner = Runner(loaded, 100, 16, attention)
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    rng, length, table = random.Random(seed), 700, list(range(44))
    (tokens,) = prompts(seed, [length], VOCAB)
    sound = [token or 1 for token in tokens]

    def kv(tokens: list[int], *ends: int) -> torch.Tensor:
        for start, end in pairwise(sorted({0, *ends, length})):
            runner.execute([Work(tokens, start, end - start, table, length, None)])
        return runner.pool.by_position[table].transpose(0, 2).flatten(2, 3)[:, :, :length]

    whole = kv(sound)
    assert whole.isfinite().all()
    for at in (1, 255, 256, rng.randrange(1, length)):
        found = kv([*sound[:at], 0, *sound[at + 1 :]], rng.randrange(at + 1))
        assert torch.equal(found[:, :, :at], whole[:, :, :at]), at
        assert not found[:, :, at:].isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_key_whose_score_overflows_spoils_no_row_before_it(dtype: str) -> None:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn((300, 4, 32), generator=generator).to(DTYPES[dtype]) * 1e10
    key, value = torch.randn((2, 300, 2, 32), generator=generator).to(DTYPES[dtype])
    batch = pack([Work([0] * 300, 0, 300, list(range(19)), 300, None)], 16)

    def attended() -> torch.Tensor:
        backend = SdpaBackend(KVPool(PoolShape(19, 1, 16, 2, 32, dtype)))
        return backend.step(batch).attend(0, query, key, value, None)

    sound = attended()
    assert sound.isfinite().all()
    key[200] = 1e30
    assert torch.equal(attended()[:200], sound[:200])


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("length", [40, 300])
def test_a_result_depends_only_on_what_it_sees(compiled: None, attention: str, length: int) -> None:
    """Among infinities, NaN and large numbers; cut anywhere, beside a longer context or alone.

    In float32: in the others SDPA makes a row that sees an infinite score 0 or NaN by its keys.
    """
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(20):
        query = torch.randn((length, 4, 32), generator=generator)
        key, value = torch.randn((2, length, 2, 32), generator=generator)
        for row in rng.sample(range(1, length), rng.randrange(5)):
            wrong = rng.choice([torch.nan, torch.inf, -torch.inf, 1e9, 1e18])
            # No two large keys are alike, whose scores would differ in float64 alone.
            rng.choice([key, value])[row, :, : rng.choice([1, 32])] = wrong * (1 + row)
        given = (query, key, value)
        cut = rng.randrange(1, length)
        whole = attended(attention, given, [length], beside=False)
        for counts in ([cut, length - cut], [cut] + [1] * (length - cut)):
            for beside in (False, True):
                again = attended(attention, given, counts, beside)
                torch.testing.assert_close(again, whole, rtol=0, atol=0, equal_nan=True)
        wanted = definition(*given)
        torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("place", "wrong", "most"),
    [(1, torch.nan, 1.1), (2, torch.nan, 1.1), (1, torch.inf, 18), (2, torch.inf, 18)],
)
def test_rows_of_large_numbers_cost_a_few_rows_each(
    monkeypatch: pytest.MonkeyPatch, place: int, wrong: float, most: float
) -> None:
    """None after the first from which everything is NaN."""
    given = torch.randn((3, 600, 4, 32), generator=torch.Generator().manual_seed(6))
    given[place] = wrong
    queries: list[int] = []

    def counted(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        queries.append(query.shape[2])
        return attend(query, keys, values, mask, scaling)

    monkeypatch.setattr(sdpa, "attend", counted)
    query, key, value = given
    batch = pack([Work([0] * 600, 0, 600, list(range(38)), 600, None)], 16)
    backend = SdpaBackend(KVPool(PoolShape(38, 1, 16, 4, 32, "float32")))
    backend.step(batch).attend(0, query, key, value, None)
    assert sum(queries) <= most * 600


def attended(
    attention: str, given: Sequence[torch.Tensor], counts: Sequence[int], beside: bool
) -> torch.Tensor:
    """The results of Q, K and V, so many rows in a step; a longer context may be beside them."""
    length = len(given[0])
    pool = KVPool(PoolShape(38, 1, 16, 2, 32, "float32"))
    pool.tensor.fill_(torch.nan)
    backend, start, found = choose_attention(attention, pool).backend, 0, []
    for count in counts:
        works = [Work([0] * length, start, count, list(range(19)), length, None)]
        parts = [each[start : start + count] for each in given]
        if beside:
            works.insert(0, Work([0] * 301, 300, 1, list(range(19, 38)), 301, None))
            parts = [torch.cat((each[:1], each)) for each in parts]
        query, key, value = parts
        step = backend.step(pack(works, 16))
        found.append(step.attend(0, query, key, value, None)[int(beside) :])
        start += count
    return torch.cat(found)


def definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention, row by row over what it sees, in float64."""
    rows = []
    for row in range(len(query)):
        keys, values = (each[: row + 1].double().repeat_interleave(2, 1) for each in (key, value))
        scores = torch.einsum("hd,khd->hk", query[row].double(), keys) * 32**-0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(1), values))
    return torch.stack(rows).float()


def embedding(loaded: LoadedModel) -> torch.Tensor:
    """Of the tokens, as the forward pass reads it."""
    forward = loaded.forward
    if isinstance(forward, TransformersModel):
        found = forward.model.get_input_embeddings().weight
        assert isinstance(found, torch.Tensor)
        return found.detach()
    assert isinstance(forward, Decoder)
    return forward.weights.embedding


def test_the_sizes() -> None:
    assert [queries_computed(n) for n in (1, 3, 4, 7, 32, 33, 35, 36, 64)] == [
        *(16, 16, 16, 16, 32, 48, 48, 48, 64)
    ]
    assert [keys_computed(n) for n in (1, 16, 17, 192, 193, 384, 385, 512, 513, 705)] == [
        *(16, 16, 32, 192, 512, 512, 512, 512, 528, 1024)
    ]


@pytest.mark.parametrize(
    "called",
    [
        *(functional.silu, functional.gelu, torch.nn.SiLU(), torch.nn.GELU("tanh")),
        *(torch.nn.Softplus(), torch.nn.Sigmoid(), torch.sigmoid, torch.Tensor.sigmoid),
        *(lambda x: torch.sigmoid(input=x), lambda x: functional.gelu(input=x, approximate="tanh")),
        *(lambda x: functional.softplus(x, beta=2.0), lambda x: x.rsqrt(), torch.exp2),
    ],
)
def test_every_way_to_call_an_activation(called: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A row alone has the bits that it has among others; ``out`` keeps its size."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.rand((50, 37), generator=generator)
    plain, wanted = called(rows), torch.empty(50, 37)
    with Vectorising():
        whole = called(rows)
        for i in range(50):
            assert torch.equal(called(rows[i]), whole[i])
        assert torch.sigmoid(rows, out=wanted) is wanted
        assert functional.silu(rows.clone(), inplace=True).shape == rows.shape
    assert torch.allclose(whole, plain)
    assert wanted.shape == rows.shape


@pytest.mark.parametrize("width", [1, 5, 8, 11, 16, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_any_width(width: int, dtype: torch.dtype) -> None:
    """SDPA by the sizes above: rows of a tile, and the same rows in calls of their own."""
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    rng, generator, length = random.Random(seed), torch.Generator().manual_seed(seed), 700
    query, key, value = torch.randn(3, 1, 1, 1024, width, generator=generator).to(dtype)

    def attended(first: int, last: int) -> torch.Tensor:
        rows, keys = queries_computed(last - first), keys_computed(last)
        ends = torch.arange(first, first + rows).clamp(max=last - 1)
        mask = torch.arange(keys)[None] <= ends[:, None]
        padded = torch.zeros(1, 1, rows, width, dtype=dtype)
        padded[:, :, : last - first] = query[:, :, first:last]
        out = attend(padded, key[:, :, :keys], value[:, :, :keys], mask, None)
        return out[0, 0, : last - first]

    tiles = [attended(at, min(at + TILE, length)) for at in range(0, length, TILE)]
    whole = torch.cat(tiles)
    for _ in range(60):
        first = rng.randrange(length)
        last = min(first + rng.choice((1, 1, 2, 3, 5, 15, 31, 33, 100, TILE)), length)
        assert torch.equal(attended(first, last), whole[first:last]), (first, last)
