"""vLLM workers behind the router: the same tokens as one vLLM process, whoever dies."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import threading
import time

import pytest

from kvrelay import Client
from kvrelay.errors import Rejected
from kvrelay.structured import StructuredOutput
from kvrelay.usage import Usage
from kvrelay.v1 import types_pb2
from tests.failures.streams import Parameters, Query, Stream, run_all
from tests.vllm.serving.rig import BLOCK, BLOCKS, WAIT, VllmCluster, busy, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.cluster, pytest.mark.timeout(600)]

RULES: list[dict[str, float | int | tuple[int, ...]]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 2**63 + 5, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.3, "seed": 1, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 9, "min_tokens": 30, "stop_token_ids": (11, 12)},
]
ROUNDS = 5
SALT = bytes(range(32))


def leg_of(tokens: tuple[int, ...], count: int, **sampling: object) -> types_pb2.Leg:
    given = types_pb2.Sampling(ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return types_pb2.Leg(
        request_id=f"direct-{time.monotonic_ns()}",
        prompt_token_ids=tokens,
        max_tokens=count,
        sampling=given,
    )


def check_legs(usage: Usage) -> None:
    """Every leg that ended has an account that adds up."""
    for leg in usage.legs:
        assert leg.length == leg.local + leg.external + leg.computed, leg
        if not leg.lost:
            assert leg.executed == leg.computed + leg.recomputed + max(leg.generated - 1, 0), leg


@pytest.mark.parametrize("number", range(len(RULES)))
def test_handed_over_tokens_are_those_of_one_process(served: VllmCluster, number: int) -> None:
    """One worker computes the whole request in a tenant of its own, which shares no block."""
    rules = RULES[number]
    tokens = prompt(200 + number, 300 + 37 * number)
    leg = leg_of(tokens, 64, **rules)
    leg.tenant_salt = SALT
    alone, account = served.decode(served.cluster.addresses("decode")[0], leg)
    assert (account.local, account.external, account.computed) == (0, 0, len(tokens))
    with Client(served.router) as client:
        for turn in (1, 2):
            got = client.complete(token_ids=tokens, max_tokens=64, ignore_eos=True, **rules)  # type: ignore[arg-type]
            assert list(got.token_ids) == [token.id for token in alone]
            check_legs(got.usage)
            if turn == 1:
                first, second = got.usage.legs
                assert (first.computed, first.saved) == (len(tokens), len(tokens))
                assert second.external == len(tokens)
                assert sum(one.tokens for one in second.external_by_store) == len(tokens)
            else:
                assert got.usage.cached_prompt_tokens == len(tokens) - 1


def test_tenants_share_no_block(served: VllmCluster) -> None:
    """vLLM's own prefix cache is salted too, so a second tenant finds nothing in the pool."""
    address = served.cluster.addresses("decode")[1]
    tokens = prompt(300, 200)
    first, second = leg_of(tokens, 4, temperature=0.0), leg_of(tokens, 4, temperature=0.0)
    first.tenant_salt = bytes(32 * [1])
    second.tenant_salt = bytes(32 * [2])
    _, cold = served.decode(address, first)
    again, warm = served.decode(address, first)
    other, apart = served.decode(address, second)
    assert (cold.local, cold.external) == (0, 0)
    assert warm.local == len(tokens) // BLOCK * BLOCK
    assert (apart.local, apart.external) == (0, 0)
    assert [one.id for one in again] == [one.id for one in other]


def test_log_probabilities_are_those_before_temperature(served: VllmCluster) -> None:
    with Client(served.router) as client:
        got = client.complete(
            token_ids=prompt(310, 50), max_tokens=6, ignore_eos=True, temperature=0.5, logprobs=3
        )
        alone = client.complete(
            token_ids=prompt(310, 50), max_tokens=6, ignore_eos=True, temperature=0.5, seed=got.seed
        )
    assert alone.token_ids == got.token_ids, "asking for them changes no token"
    assert len(got.logprobs) == 6
    for one in got.logprobs:
        values = [item.logprob for item in one.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert one.chosen.logprob <= values[0] <= 0.0


def test_stop_strings_end_the_answer(served: VllmCluster) -> None:
    text = "The copper mask stands in Boston. Where is"
    with Client(served.router) as client:
        whole = client.complete(prompt=text, max_tokens=60, ignore_eos=True, temperature=0.0)
        stop = whole.text[20:24]
        cut = client.complete(
            prompt=text, max_tokens=60, ignore_eos=True, temperature=0.0, stop=(stop,)
        )
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_structured_output_continues_on_the_decode_worker(served: VllmCluster) -> None:
    """The prefill leg samples the first token, the decode leg replays it into its matcher."""
    with Client(served.router) as client:
        got = client.complete(
            prompt="A colour and a number: ",
            max_tokens=60,
            temperature=0.0,
            structured_output=StructuredOutput(regex="(red|blue)-[0-9]{12}"),
        )
    assert re.fullmatch("(red|blue)-[0-9]{12}", got.text)
    assert got.finish_reason == "stop"
    assert [leg.role for leg in got.usage.legs] == ["prefill", "decode"]


def test_a_request_longer_than_a_worker_can_serve_is_refused(served: VllmCluster) -> None:
    with Client(served.router) as client, pytest.raises(Rejected):
        client.complete(token_ids=prompt(320, 100), max_tokens=5000)


def test_a_cancelled_stream_frees_its_blocks(served: VllmCluster) -> None:
    with Client(served.router) as client:
        stream = client.generate(token_ids=prompt(330, 300), max_tokens=2000, ignore_eos=True)
        for _ in range(30):
            next(stream)
        stream.close()
        served.settle()
        for address in served.workers():
            assert served.load(address).free_blocks == BLOCKS
            assert not served.audit(address)


def test_the_role_of_a_worker_changes(served: VllmCluster) -> None:
    address = served.cluster.addresses("decode")[1]
    served.settle()
    info = served.set_role(address, types_pb2.ROLE_PREFILL)
    assert info.role == types_pb2.ROLE_PREFILL
    assert info.numeric_profile.startswith("vllm-0.32")
    with Client(served.router) as client:
        got = client.complete(token_ids=prompt(340, 90), max_tokens=5, ignore_eos=True)
    assert len(got.token_ids) == 5
    served.set_role(address, types_pb2.ROLE_DECODE)
    served.settle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stream_survives_its_decode_worker(served: VllmCluster, number: int) -> None:
    """SIGKILL loses the worker at once; after SIGTERM it drains, and its streams move."""
    query = Parameters(token_ids=prompt(400, 611), max_tokens=400, ignore_eos=True, seed=99)
    workers: set[str] = set()
    with Client(served.router) as client:
        whole = client.complete(**query)
        for _ in range(ROUNDS):
            served.settle()
            tokens: list[int] = []
            for chunk in client.generate(**query):
                if len(tokens) < 60 <= len(tokens) + len(chunk.token_ids):
                    for index in served.streaming():
                        served.cluster.kill("decode", index, number)
                tokens += chunk.token_ids
            assert tuple(tokens) == whole.token_ids
            assert chunk.usage is not None
            check_legs(chunk.usage)
            assert sum(leg.generated for leg in chunk.usage.legs) == 400
            workers = {leg.worker_id for leg in chunk.usage.legs if leg.role == "decode"}
            if len(workers) == 2:
                break  # else the stream had ended before the signal arrived: once more
    assert len(workers) == 2
    served.settle()


def test_a_stream_survives_the_prefill_worker(served: VllmCluster) -> None:
    """It dies while it computes the prompt; the next one computes it again."""
    served.settle()
    query = Parameters(token_ids=prompt(410, 3000), max_tokens=8, ignore_eos=True, temperature=0.0)
    address = served.cluster.addresses("prefill")[0]
    answer: list[tuple[int, ...]] = []

    def ask() -> None:
        with Client(served.router) as client:
            answer.append(client.complete(**query).token_ids)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + WAIT
    while not served.load(address).running and time.monotonic() < deadline:
        pass
    served.cluster.kill("prefill", 0)
    thread.join(300.0)
    served.settle()
    ask()
    assert answer[0] == answer[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_answers_survive_the_store(served: VllmCluster, number: int) -> None:
    """A store that died or hangs is a miss: the tokens are computed."""
    served.settle()
    query = Parameters(token_ids=prompt(420 + number, 500), max_tokens=40, ignore_eos=True, seed=3)
    with Client(served.router) as client:
        before = client.complete(**query)
        served.cluster.kill("store", 0, number)
        try:
            during = client.complete(**query)
        finally:
            if number == signal.SIGSTOP:
                served.cluster.kill("store", 0, signal.SIGCONT)
    assert during.token_ids == before.token_ids
    check_legs(during.usage)
    served.settle()


def test_streams_under_chaos_lose_no_token(served: VllmCluster) -> None:
    """200 streams while every process of the cluster is killed in turn; then all is at rest."""
    served.settle()
    chance = random.Random(20)
    queries = [
        Query(prompt(1000 + number, chance.randrange(40, 200)), 24, number if number % 2 else None)
        for number in range(200)
    ]
    calm = [Stream(query) for query in queries]
    asyncio.run(run_all(served.router, calm))
    streams = [Stream(query) for query in queries]
    stopping = threading.Event()
    victims = [("decode", 0), ("prefill", 0), ("store", 0), ("decode", 1)]
    killed: list[str] = []

    def kill() -> None:
        for role, index in victims:
            if stopping.wait(1.5):
                return
            served.cluster.kill(role, index)
            killed.append(f"{role}-{index}")

    killer = threading.Thread(target=kill)
    killer.start()
    asyncio.run(run_all(served.router, streams, may_break=True))
    stopping.set()
    killer.join()
    assert killed, "the streams ended before anything was killed"
    different = [
        number
        for number, (one, other) in enumerate(zip(calm, streams, strict=True))
        if one.tokens != other.tokens
    ]
    assert not different
    served.settle()
    for address in served.workers():
        assert not served.audit(address)
        assert not busy(served.load(address))
