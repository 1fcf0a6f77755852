"""The runner against plain `transformers`: the same tokens, however the work is cut and mixed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrelay.engine.core.updates import Work
from kvrelay.engine.runner import Runner
from kvrelay.errors import Rejected
from tests.engine.torch.conftest import Pair
from tests.engine.torch.drive import GREEDY, generate, prompts, streams
from tests.models import KINDS, VOCAB

NEW = 8


@pytest.mark.parametrize("attention", ["sdpa", "native"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_generate(
    compiled: None, pair: Callable[[str], Pair], kind: str, block_size: int, attention: str
) -> None:
    loaded, oracle = pair(kind)
    seed = 100 * list(KINDS).index(kind) + block_size
    print(f"seed {seed}")
    b = block_size
    asked = prompts(seed, [1, max(1, b - 1), b, b + 1, 2 * b, 2 * b + 1, 40, 67], VOCAB)
    runner = Runner(loaded, 400 // b + 20, b, attention)
    want = [oracle.generate(prompt, NEW) for prompt in asked]
    got = generate(runner, asked, NEW, chunk=13, seed=seed)
    assert [s.tokens[s.prompt_len :] for s in got] == want
    assert len({token for tokens in want for token in tokens}) > NEW, "degenerate output"


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 11, 19, 64])
def test_every_chunk_size(pair: Callable[[str], Pair], chunk: int) -> None:
    loaded, oracle = pair("llama")
    asked = prompts(chunk, [61, 33], VOCAB)
    runner = Runner(loaded, num_blocks=60, block_size=4)
    got = generate(runner, asked, NEW, chunk=chunk, seed=chunk)
    assert [s.tokens[s.prompt_len :] for s in got] == [oracle.generate(p, NEW) for p in asked]


def test_cut_at_every_offset(pair: Callable[[str], Pair]) -> None:
    loaded, oracle = pair("qwen3")
    (prompt,) = prompts(3, [18], VOCAB)
    want = oracle.generate(prompt, 1)
    for cut in range(1, len(prompt)):
        runner = Runner(loaded, num_blocks=8, block_size=4)
        (stream,) = streams(runner, [prompt], 1, GREEDY, cut)
        for count in (cut, len(prompt) - cut):
            stream.commit(count, runner.execute([stream.work(count)])[0])
        assert stream.tokens[stream.prompt_len :] == want, f"cut at {cut}"


def test_many_decodes_of_mixed_length(pair: Callable[[str], Pair]) -> None:
    """Groups of the batched decode: lengths that differ by more than half, 40 streams at once."""
    loaded, oracle = pair("qwen3")
    lengths = [1 + (37 * i) % 150 for i in range(40)]
    asked = prompts(7, lengths, VOCAB)
    runner = Runner(loaded, num_blocks=1200, block_size=4)
    made = streams(runner, asked, NEW, GREEDY, 7)
    for _ in range(NEW):
        counts = [len(s.tokens) - s.computed for s in made]
        answers = runner.execute([s.work(n) for s, n in zip(made, counts, strict=True)])
        for stream, count, answer in zip(made, counts, answers, strict=True):
            stream.commit(count, answer)
    assert [s.tokens[s.prompt_len :] for s in made] == [oracle.generate(p, NEW) for p in asked]


def test_logprobs_equal_the_models(pair: Callable[[str], Pair]) -> None:
    loaded, oracle = pair("llama")
    sampling = type(GREEDY)(temperature=0.0, logprobs=5)
    asked = prompts(11, [9, 30], VOCAB)
    runner = Runner(loaded, num_blocks=40, block_size=4)
    for stream in generate(runner, asked, NEW, sampling=sampling, chunk=7, seed=11):
        own = oracle.logits(stream.tokens).log_softmax(-1)[stream.prompt_len - 1 :]
        for row, sampled in zip(own, stream.sampled, strict=False):
            assert sampled.logprob == pytest.approx(row[sampled.token].item(), abs=1e-4)
            assert [one.token for one in sampled.top] == row.topk(5).indices.tolist()


@pytest.mark.parametrize("attention", ["sdpa", "native"])
def test_stale_memory_is_never_read(
    compiled: None, pair: Callable[[str], Pair], attention: str
) -> None:
    """A pool full of NaN changes nothing: only what was written is read."""
    loaded, oracle = pair("mistral")
    asked = prompts(13, [1, 5, 22, 41], VOCAB)
    runner = Runner(loaded, 60, 4, attention)
    runner.pool.tensor.fill_(torch.nan)
    runner.execute([Work([1] * 8, 0, 8, [0, 1], 8, None)])
    got = generate(runner, asked, NEW, chunk=6, seed=13)
    assert [s.tokens[s.prompt_len :] for s in got] == [oracle.generate(p, NEW) for p in asked]


def test_step_without_samples(pair: Callable[[str], Pair]) -> None:
    loaded, _ = pair("llama")
    runner = Runner(loaded, num_blocks=4, block_size=4)
    assert runner.execute([]) == []
    assert runner.execute([Work([1, 2, 3], 0, 2, [1], 3, None)]) == [None]
    assert runner.executed_positions == 2


def test_short_table_is_refused(pair: Callable[[str], Pair]) -> None:
    loaded, _ = pair("llama")
    runner = Runner(loaded, num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="table of 1 blocks does not cover 2"):
        runner.execute([Work([1] * 5, 0, 5, [1], 5, GREEDY)])


def test_backend_is_named(pair: Callable[[str], Pair]) -> None:
    loaded, _ = pair("llama")
    assert Runner(loaded, 4, 4, "sdpa").attention_profile == "sdpa-5"
    with pytest.raises(Rejected, match="attention_backend: 'magic' is not known"):
        Runner(loaded, 4, 4, attention_backend="magic")


def test_memory_that_runs_out_is_an_error_of_the_step(
    pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step may need less."""
    loaded, _ = pair("llama")
    runner = Runner(loaded, num_blocks=8, block_size=4)

    def fail(*given: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(type(loaded.forward), "logits", fail)
    monkeypatch.setattr(type(runner._forward), "logits", fail)
    work = Work([1, 2], 0, 2, [0], 2, GREEDY)
    with pytest.raises(torch.OutOfMemoryError):
        runner.execute([work])
