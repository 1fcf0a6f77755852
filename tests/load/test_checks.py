"""Every wrong token and every wrong usage is found; what is right is not complained about."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import warnings

import pytest

from benchmarks.stub_server import GOOD, Behave, StubManners, stub
from kvrelay.client.convert import usage_of
from kvrelay.errors import Unavailable
from kvrelay.load.check import usage_faults
from kvrelay.load.grpc_door import account_of
from kvrelay.load.http_door import DoorOptions, HttpDoor
from kvrelay.load.openai_server import OpenAIServer
from kvrelay.load.request import LoadAnswer, LoadRequest
from kvrelay.v1 import types_pb2
from tests.load.rig import LoadCommand

REQUESTS, TOKENS, PROMPT = 12, 8, 16
SMALL = ("--prompt", PROMPT, "--output", TOKENS, "--requests", REQUESTS, "--concurrency", 3)


def once(number: int, manners: StubManners) -> Behave:
    """These manners for one request, good ones for all others."""
    return lambda at: manners if at == number else GOOD


def test_a_good_server_has_exact_counts(load: LoadCommand) -> None:
    with stub(lambda at: StubManners(delay=0.05)) as server:
        found = load(server.url, *SMALL, "--check", "first-run")
    assert (found.status, server.requests, server.most_open) == (0, 2 * REQUESTS, 3), found.out
    (level,) = found.levels
    assert level["requests"] == {"done": REQUESTS, "refused": 0, "late": 0, "left": 0, "failed": 0}
    assert level["output_tokens"] == REQUESTS * TOKENS
    assert level["prompt_tokens"] == REQUESTS * PROMPT
    assert level["seconds_from_sent"]["ttft"]["mean"] > 0
    assert found.check["verified"] == found.check["compared"] == REQUESTS
    assert found.check["mismatches"] == found.check["usage_faults"] == 0
    assert {len(prompt) for prompt in server.prompts()} == {PROMPT}


def test_a_token_that_differs_later_is_found_with_its_position(load: LoadCommand) -> None:
    """No request is repeated under load, so the run asks each one once more."""
    with stub(once(5, StubManners(wrong_at=3))) as server:
        found = load(server.url, *SMALL, "--check", "first-run")
        unchecked = load(server.url, *SMALL)
    assert found.status == 1
    assert found.check["mismatches"] == 1
    (line,) = found.check["shown"]
    assert "token 3: here [" in line
    assert "the reference [" in line
    assert "token 3" in found.out
    assert unchecked.status == 0


def test_repeated_requests_are_compared_under_load(load: LoadCommand) -> None:
    with stub(once(11, StubManners(wrong_at=7))) as server:
        found = load(server.url, *SMALL, "--distinct", 3, "--check", "first-run")
    assert server.requests == REQUESTS  # none had to be asked again
    assert found.check["compared"] == REQUESTS - 3
    assert found.check["mismatches"] == 1
    assert "token 7: here [" in found.check["shown"][0]
    assert found.status == 1


def test_a_cut_answer_is_compared_as_far_as_it_came(load: LoadCommand) -> None:
    with stub(once(11, StubManners(wrong_at=2, cut_after=5))) as server:
        found = load(server.url, *SMALL, "--distinct", 3, "--check", "first-run")
    assert found.levels[0]["requests"]["failed"] == 1
    assert (found.status, found.check["mismatches"]) == (1, 1)
    assert "token 2: here [" in found.check["shown"][0]
    with stub(once(11, StubManners(cut_after=5))) as server:
        found = load(server.url, *SMALL, "--distinct", 3, "--check", "first-run")
    assert found.levels[0]["requests"]["failed"] == 1
    assert (found.status, found.check["mismatches"]) == (0, 0)


def test_a_shorter_answer_differs(load: LoadCommand) -> None:
    with stub(once(11, StubManners(short_by=1))) as server:
        found = load(server.url, *SMALL, "--distinct", 3, "--check", "first-run")
    assert found.status == 1
    assert "token 7: here 7 tokens, the first answer has 8" in found.check["shown"][-1]


@pytest.mark.parametrize("wrong", [0, 5])
def test_another_server_is_the_reference(load: LoadCommand, wrong: int) -> None:
    manners = StubManners(wrong_at=6) if wrong else GOOD
    with stub() as server, stub(once(wrong, manners)) as other:
        found = load(server.url, *SMALL, "--check", other.url, "--check-concurrency", 4)
    assert (server.requests, other.requests) == (REQUESTS, REQUESTS)
    assert found.check["verified"] == REQUESTS
    assert found.check["mismatches"] == found.status == (1 if wrong else 0)
    assert not wrong or "token 6: here [" in found.check["shown"][0]


def test_a_reference_that_fails_is_no_success(load: LoadCommand) -> None:
    with stub() as server, stub(once(0, StubManners(status=500))) as other:
        found = load(server.url, *SMALL, "--check", other.url)
    assert (found.status, found.check["mismatches"], found.check["unanswered"]) == (1, 0, 1)
    assert "0 differ, 1 not answered by the reference" in " ".join(found.out.split())
    assert "the reference gave no answer: HTTP 500: the stub refuses" in found.check["shown"][0]


@pytest.mark.parametrize("form", ["--chat", "--plain"])
def test_text_is_compared_by_characters(load: LoadCommand, form: str) -> None:
    plain = StubManners(token_ids=False)
    wrong = StubManners(token_ids=False, wrong_at=2)
    with stub(lambda at: wrong if at == 11 else plain) as server:
        found = load(server.url, *SMALL, form, "--distinct", 3, "--check", "first-run")
    assert found.status == 1
    assert "character " in found.check["shown"][0]
    assert found.check["usage_faults"] == 0
    assert found.levels[0]["output_tokens"] == REQUESTS * TOKENS
    (body, *_) = server.bodies
    assert ("messages" in body, "ignore_eos" in body) == (form == "--chat", form == "--chat")


@pytest.mark.parametrize(
    ("manners", "said"),
    [
        (StubManners(usage_error=1), "completion_tokens is 9, and 8 tokens came"),
        (StubManners(total_error=-1), "total_tokens is 23, not 16 + 8"),
        (StubManners(cached=17), "a source is negative"),
        (StubManners(usage=False), "it is missing"),
    ],
)
def test_a_wrong_usage_is_found(load: LoadCommand, manners: StubManners, said: str) -> None:
    with stub(once(5, manners)) as server:
        found = load(server.url, *SMALL)
    assert found.status == 1
    assert found.check["usages"] == REQUESTS
    assert found.check["usage_faults"] >= 1
    assert any(said in line for line in found.check["shown"]), found.check


def test_a_leg_that_died_unheard_is_not_where_the_prompt_came_from() -> None:
    """The router's ``cached_prompt_tokens`` leaves it out as well."""
    lost = types_pb2.LegUsage(role=types_pb2.ROLE_DECODE, lost=True, admission_unknown=True)
    run = types_pb2.LegUsage(role=types_pb2.ROLE_DECODE, length=16, local=4, computed=12)
    account = account_of(usage_of(types_pb2.Usage(prompt_tokens=16, legs=[lost, run])))
    assert account.sources == {"local": 4, "external": 0, "computed": 12}
    assert (account.migrations, account.faults) == (1, ())


@pytest.mark.parametrize(
    "leg",
    [
        types_pb2.LegUsage(lost=True),  # zeros that are said to be known
        types_pb2.LegUsage(length=16, local=4, computed=11),
        types_pb2.LegUsage(admission_unknown=True),  # of a leg that was not lost
        types_pb2.LegUsage(lost=True, admission_unknown=True, length=16, computed=16),
        types_pb2.LegUsage(lost=True, admission_unknown=True, generated=1),
        types_pb2.LegUsage(lost=True, admission_unknown=True, admissions=[types_pb2.Admission()]),
    ],
)
def test_only_a_lost_leg_may_have_no_account(leg: types_pb2.LegUsage) -> None:
    leg.role = types_pb2.ROLE_DECODE
    run = types_pb2.LegUsage(role=types_pb2.ROLE_DECODE, length=16, local=4, computed=12)
    usage = usage_of(types_pb2.Usage(prompt_tokens=16, completion_tokens=2, legs=[run, leg]))
    request = LoadRequest(number=0, parts=((1, 2),), max_tokens=2, seed=0)
    answer = LoadAnswer(request, due=0.0, sent=0.0, ids=None, account=account_of(usage))
    assert len(account_of(usage).faults) == 1
    (fault,) = usage_faults(answer, ids_sent=False)
    assert "leg" in fault


def test_failures_are_counted_by_kind_and_shown(load: LoadCommand) -> None:
    kinds = {
        1: StubManners(status=429),
        2: StubManners(status=503),
        3: StubManners(status=504),
        4: StubManners(status=500),
        5: StubManners(cut_after=3),
        6: StubManners(error_after=2),
    }
    with stub(lambda at: kinds.get(at, GOOD)) as server:
        found = load(server.url, *SMALL, "--rate", 100, "--concurrency", 1)
        assert found.status == 2  # one or the other
        found = load(server.url, *SMALL[:-2], "--rate", 100)
    (level,) = found.levels
    assert level["requests"] == {"done": 6, "refused": 2, "late": 1, "left": 0, "failed": 3}
    assert level["retry_after_seconds"]["mean"] == 2.0
    for said in (
        "HTTP 429: the stub refuses",
        "the server closed the connection before its answer ended",
        "the stream ended with an error: the stub broke",
    ):
        assert level["errors"][said] == 1
    assert found.status == 0


def test_no_answer_at_all_is_a_failure(load: LoadCommand) -> None:
    with stub(lambda at: StubManners(status=500)) as server:
        found = load(server.url, *SMALL)
    assert found.status == 1
    found = load("http://127.0.0.1:9", *SMALL)
    assert found.status == 1
    assert found.err == "kvrelay load: nothing listens at 127.0.0.1:9\n"


def test_a_server_that_is_not_there_leaves_no_session_open() -> None:
    """aiohttp would say so on standard error, after the command's own line."""

    async def find_model() -> None:
        with pytest.raises(Unavailable, match=r"nothing listens at 127\.0\.0\.1:9$"):
            await HttpDoor("http://127.0.0.1:9", DoorOptions()).find_model()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(find_model())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_a_late_answer_is_given_up(load: LoadCommand) -> None:
    with stub(once(2, StubManners(delay=30))) as server:
        found = load(server.url, *SMALL, "--timeout", 1)
    assert found.levels[0]["requests"]["late"] == 1
    assert found.levels[0]["requests"]["done"] == REQUESTS - 1


def test_a_connection_that_the_server_has_closed_is_replaced(load: LoadCommand) -> None:
    """As llama.cpp's server does, without saying so."""
    with stub(lambda at: StubManners(drops=True)) as server:
        found = load(server.url, *SMALL)
    assert found.levels[0]["requests"]["done"] == server.requests == REQUESTS
    assert found.status == 0


def test_of_several_closed_connections_each_request_replaces_one() -> None:
    body: dict[str, object] = {"prompt": [1, 2], "max_tokens": 2, "stream": True}

    async def answer(server: OpenAIServer) -> int:
        return len([event async for event in server.events("/v1/completions", body, None)])

    async def answers(url: str) -> None:
        server = OpenAIServer(url)
        try:
            await asyncio.gather(*(answer(server) for _ in range(3)))
            assert await answer(server) > 1  # three idle connections, each closed when it is used
        finally:
            await server.close()

    with stub(lambda at: StubManners(drops=True)) as server:
        asyncio.run(answers(server.url))


def test_a_reset_connection_was_closed_by_the_server() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        made = writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def find_model() -> None:
        async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(Unavailable, match="the server closed the connection"):
                await HttpDoor(f"http://127.0.0.1:{port}", DoorOptions()).find_model()

    asyncio.run(find_model())
