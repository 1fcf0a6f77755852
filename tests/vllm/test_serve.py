"""A real ``vllm serve``: with the connector on its command line, and unmodified behind our router.

Its answers must be those of ``vllm serve`` alone, whatever store and connections do. The prompts
have no near ties: the two most likely tokens of plain vLLM lie ``GAP`` apart at every position.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvrelay.block import Namer, Namespace
from kvrelay.block.namespace import LAYOUT
from kvrelay.cluster.ports import free_ports
from kvrelay.v1 import router_pb2, types_pb2
from tests.cluster.processes import alive, until
from tests.failures.proxy import Faults, Proxy
from tests.kvstore.conftest import start_service, stop
from tests.router.fakes import running
from tests.vllm.conftest import NAMESPACE
from tests.vllm.environment import WorkerEnvironment
from tests.vllm.rig import BLOCK, CALL_SECONDS, SAMPLER, StoreProcess, prompt, with_store
from tests.vllm.serve_rig import HttpAnswer, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

GAP = 1e-4
"""Forty times what other cuts change."""

LENGTHS = (31, 32, 64, 200, 333, 777)
PROMPTS = [prompt(700 + length, length) for length in LENGTHS]
HITS = [min(length // BLOCK * BLOCK, length - 1) for length in LENGTHS]
LONG = 200
"""Tokens of the answer during which the store dies."""
CUT = 20_000
"""Bytes of the answer after which its connection is cut."""

SPACE = Namespace(
    NAMESPACE["model"],
    NAMESPACE["revision"],
    "float32",
    LAYOUT,
    BLOCK,
    numerics=NAMESPACE["numerics"],
)


class OwnStore:
    """A store on one port, which dies and comes back."""

    def __init__(self) -> None:
        self._port = free_ports(1)[0]
        self.url = f"kvrelay://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        process, _ = start_service(f"--port={self._port}", "--budget=64MiB")
        self.running = StoreProcess(process, self.url)

    def kill(self) -> None:
        stop(self.running.process)


@pytest.fixture(scope="module")
def store(vllm: WorkerEnvironment) -> Iterator[OwnStore]:
    made = OwnStore()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def stock(
    vllm: WorkerEnvironment, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """``vllm serve`` without the connector."""
    log = tmp_path_factory.mktemp("stock") / "log"
    server = VllmServer(tiny, log, None, "--enable-scale-out", "--enable-prompt-tokens-details")
    yield server
    server.close()


@pytest.fixture(scope="module")
def plain(stock: VllmServer) -> list[list[int]]:
    """What it answers to ``PROMPTS``, and at length to the last one."""
    asks = [*((tokens, 16) for tokens in PROMPTS), (PROMPTS[-1], LONG)]
    found = [
        stock.complete(tokens, count, logprobs=2, return_tokens_as_token_ids=True)
        for tokens, count in asks
    ]
    for number, answer in enumerate(found):
        for candidates in answer.candidates:
            best = sorted(candidates.values(), reverse=True)
            assert best[0] - best[1] > GAP, f"near tie in prompt {number}: choose another seed"
    return [answer.tokens for answer in found]


@pytest.fixture(scope="module")
def served(
    store: OwnStore, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    transfer = with_store(store.url, {"namespace": NAMESPACE})
    sampler = ("--logits-processors", SAMPLER, "--no-async-scheduling")
    server = VllmServer(tiny, tmp_path_factory.mktemp("served") / "log", transfer, *sampler)
    yield server
    server.close()


@pytest.fixture(scope="module")
def between(store: OwnStore) -> Iterator[Proxy]:
    """The network between a server and the store."""
    with Proxy(store.url.removeprefix("kvrelay://")) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def far(
    between: Proxy, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """All bytes between it and the store go over the network. It names its blocks by itself."""
    url = f"kvrelay://{between.address}?transport=grpc"
    log = tmp_path_factory.mktemp("far") / "log"
    server = VllmServer(tiny, log, with_store(url, {}))
    yield server
    server.close()


async def test_our_router_drives_unmodified_servers(
    plain: list[list[int]], stock: VllmServer, tiny: Path
) -> None:
    """Two ways to one server, whose connections end after ``CUT`` bytes: the answer is the same."""
    asked = router_pb2.GenerateRequest(max_tokens=LONG)
    asked.token_ids.ids.extend(PROMPTS[-1])
    asked.sampling.CopyFrom(types_pb2.Sampling(temperature=0.0, ignore_eos=True, logprobs=1))
    stock.forget()
    with Proxy(stock.address) as one, Proxy(stock.address) as two:
        urls = tuple(f"http://{proxy.address}" for proxy in (one, two))
        async with running([], 2, decode=urls, model=str(tiny), disaggregate="auto") as router:
            one.down.faults = two.down.faults = Faults(cut_after=CUT)
            responses = [response async for response in router.call(asked, 120.0)]
    made = [token for response in responses for token in response.tokens]
    assert [token.id for token in made] == plain[-1]
    assert all(token.logprobs.top[0].token_id == token.id for token in made)
    *lost, last = responses[-1].usage.legs
    assert len(lost) >= 2
    assert all(leg.admission_unknown for leg in lost)
    assert sum(leg.generated for leg in responses[-1].usage.legs) == LONG
    assert last.length == len(PROMPTS[-1]) + LONG - last.generated
    assert last.local >= LENGTHS[-1] // BLOCK * BLOCK


def ask_all(server: VllmServer) -> list[HttpAnswer]:
    """All prompts at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(server.complete, PROMPTS))


def external(answers: Sequence[HttpAnswer]) -> list[int | str]:
    return [answer.account["external"] for answer in answers]


def test_answers_are_those_of_plain_vllm(plain: list[list[int]], served: VllmServer) -> None:
    """Computed, then loaded; the counters on the metrics page are the sums of the accounts."""
    cold = ask_all(served)
    assert [answer.tokens for answer in cold] == plain[:-1]
    assert external(cold) == [0] * len(PROMPTS)
    served.forget()
    warm = ask_all(served)
    assert [answer.tokens for answer in warm] == plain[:-1]
    assert external(warm) == HITS
    for answer, length in zip(warm, LENGTHS, strict=True):
        account = answer.account
        assert (account["local"], account["failed"], account["recomputed"]) == (0, 0, 0)
        assert account["computed"] == length - int(account["external"])
        assert account["executed"] == int(account["computed"]) + 15
    names = ("local", "external", "computed")
    sums = {name: sum(int(one.account[name]) for one in cold + warm) for name in names}
    until(
        lambda: sums == {name: served.counter(f"prompt_tokens_{name}") for name in names},
        f"{sums} on the metrics page",
    )


def test_a_changed_block_is_computed_again(
    plain: list[list[int]], served: VllmServer, store: OwnStore
) -> None:
    """The load fails in the rank's process, and the scheduler's hears of it."""
    tokens = PROMPTS[-1]
    served.complete(tokens)
    served.forget()
    store.running.flip(Namer(SPACE).chain(tokens, BLOCK), 5)
    answer = served.complete(tokens)
    assert answer.tokens == plain[-2]
    assert answer.account["missed"] == "failed_verification"
    assert answer.account["external"] == 5 * BLOCK
    assert answer.account["failed"] == HITS[-1] - 5 * BLOCK
    assert answer.account["computed"] == LENGTHS[-1] - 5 * BLOCK


def test_other_tokens_under_a_name_are_computed(
    plain: list[list[int]], served: VllmServer, store: OwnStore
) -> None:
    """The block's checksums are right, and its tokens are others than the wanted ones."""
    tokens = PROMPTS[-2]
    served.complete(tokens)
    served.forget()
    store.running.retell(Namer(SPACE).chain(tokens, BLOCK), 3)
    answer = served.complete(tokens)
    assert answer.tokens == plain[-3]
    assert answer.account["missed"] == "failed_verification"
    assert (answer.account["external"], answer.account["failed"]) == (3 * BLOCK, 7 * BLOCK)


def test_a_seeded_stream_continues(served: VllmServer) -> None:
    """With kvrelay's sampler: its fields are a text in ``vllm_xargs``."""
    tokens, count = prompt(41, 150), 40
    rules: dict[str, object] = {"temperature": 1.0, "seed": 7, "top_p": 0.9}
    whole = [
        token
        for event in served.stream(tokens, count, vllm_xargs={"kvrelay": json.dumps(rules)})
        for token in event
    ]
    assert len(set(whole)) > 10
    for cut in (1, 17, 39):
        served.forget()
        fields = json.dumps({**rules, "prompt_len": len(tokens)})
        rest = served.complete([*tokens, *whole[:cut]], count - cut, vllm_xargs={"kvrelay": fields})
        assert rest.tokens == whole[cut:]
        assert int(rest.account["external"]) >= len(tokens) // BLOCK * BLOCK
    other = json.dumps({**rules, "seed": 8})
    assert served.complete(tokens, count, vllm_xargs={"kvrelay": other}).tokens != whole


def test_the_store_dies_during_a_stream_and_comes_back(
    plain: list[list[int]], served: VllmServer, store: OwnStore
) -> None:
    made: list[int] = []
    for event in served.stream(PROMPTS[-1], LONG):
        if len(made) < 60 <= len(made) + len(event):
            store.kill()
        made += event
    assert made == plain[-1]
    served.forget()
    without = ask_all(served)
    assert [answer.tokens for answer in without] == plain[:-1]
    assert external(without) == [0] * len(PROMPTS)
    assert [answer.account["computed"] for answer in without] == list(LENGTHS)

    store.start()

    def loads_again() -> bool:
        served.forget()
        again = ask_all(served)
        assert [answer.tokens for answer in again] == plain[:-1]
        return again[-1].account["external"] == HITS[-1]

    until(loads_again, "blocks are saved and loaded again", 60.0)


def test_no_process_outlives_a_killed_api_server(served: VllmServer) -> None:
    """Engine and rank would hold a GPU."""
    processes = served.processes()
    assert len(processes) >= 3
    served.process.send_signal(signal.SIGKILL)
    served.process.wait()
    until(lambda: not any(map(alive, processes)), lambda: f"{served.processes()} run", 30.0)


def loads_all(server: VllmServer, plain: list[list[int]]) -> None:
    """Wait until a server saves and loads the whole of ``PROMPTS``; every answer is right."""

    def once() -> bool:
        server.forget()
        answers = ask_all(server)
        assert [answer.tokens for answer in answers] == plain[:-1]
        return external(answers) == HITS

    until(once, "every prompt is loaded", CALL_SECONDS)


def test_a_store_that_answers_after_two_seconds(
    plain: list[list[int]], far: VllmServer, between: Proxy
) -> None:
    loads_all(far, plain)
    between.down.faults = Faults(delay=2.0)
    far.forget()
    late = ask_all(far)
    assert [answer.tokens for answer in late] == plain[:-1]
    assert external(late) == [0] * len(PROMPTS)
    between.heal()
    loads_all(far, plain)


def test_a_connection_that_breaks_in_the_middle_of_loads(
    plain: list[list[int]], far: VllmServer, between: Proxy
) -> None:
    far.forget()
    between.cut()
    between.down.faults = Faults(cut_after=40_000)
    broken = ask_all(far)
    assert [answer.tokens for answer in broken] == plain[:-1]
    assert external(broken) != HITS
    for answer, length in zip(broken, LENGTHS, strict=True):
        account = answer.account
        assert account["computed"] == length - int(account["external"])
    between.heal()
    loads_all(far, plain)


def shared_memory_of(pid: int) -> Iterator[Path]:
    """The files of shared memory that a process has open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            path = link.readlink()
            if path.is_relative_to("/dev/shm"):
                yield path


def test_nothing_outlives_a_killed_engine(plain: list[list[int]], far: VllmServer) -> None:
    """Its streams end, with tokens that are right, and so do all processes of the server."""
    processes = far.processes()
    shared = [path for pid in processes for path in shared_memory_of(pid)]
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes}
    (engine,) = [pid for pid, title in titles.items() if title.startswith(b"VLLM::EngineCore")]
    made: list[list[int]] = [[] for _ in range(4)]

    def stream(into: list[int]) -> None:
        with suppress(AssertionError, OSError, ValueError, http.client.HTTPException):
            for event in far.stream(PROMPTS[-1], LONG):
                into += event
                if len(into) >= LONG // 4:
                    with suppress(ProcessLookupError):
                        os.kill(engine, signal.SIGKILL)

    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(stream, made))
    assert all(tokens == plain[-1][: len(tokens)] for tokens in made)
    assert max(map(len, made)) >= LONG // 4
    until(lambda: not any(map(alive, processes)), lambda: f"{far.processes()} run", 60.0)
    assert not [path for path in shared if path.exists()]
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", int(far.address.rpartition(":")[2])))
