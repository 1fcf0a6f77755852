"""The access log: one line for each request of both doors, without its text."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import httpx2
import pytest

from kvrelay.v1 import router_pb2
from tests.router.fakes import Behaviour, Running, decode_worker, prefill_worker
from tests.router.http.rig import door
from tests.router.rig import PROMPT, json_log, request

Line = dict[str, object]
Doors = tuple[Running, httpx2.AsyncClient]


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    with json_log() as made:
        yield made


def lines_of(stream: io.StringIO) -> list[Line]:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["logger"] == "kvrelay.access"]


@asynccontextmanager
async def doors(step: asyncio.Semaphore | None = None) -> AsyncIterator[Doors]:
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with door([worker], access_log=True) as found:
        yield found


def named(request_id: str, max_tokens: int = 3) -> router_pb2.GenerateRequest:
    message = request(max_tokens)
    message.request_id = request_id
    return message


async def test_a_request_of_either_door_has_one_line(stream: io.StringIO) -> None:
    async with doors() as (router, client):
        await router.generate(named("of-grpc"))
        body = {"prompt": PROMPT, "max_tokens": 5}
        made = await client.post("/v1/completions", json=body, headers={"x-request-id": "of-http"})
        assert made.status_code == 200
    grpc_line, http_line = lines_of(stream)
    for line, door_name, tokens in ((grpc_line, "grpc", 3), (http_line, "http", 5)):
        assert line["request_id"] == f"of-{door_name}"
        assert line["door"] == door_name
        assert line["ended"] == "finished"
        assert line["prompt_tokens"] == len(PROMPT)
        assert line["completion_tokens"] == tokens
        assert line["legs"] == 1
        assert 0 < line["first_token_seconds"] <= line["seconds"] < 600  # type: ignore[operator]
        assert "127.0.0.1" in str(line["peer"])


async def test_a_request_without_an_id_has_the_one_its_client_learns(stream: io.StringIO) -> None:
    async with doors() as (router, client):
        responses = await router.generate(request(2))
        made = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
    ids = [line["request_id"] for line in lines_of(stream)]
    assert ids == [responses[0].request_id, made.headers["x-request-id"]]
    assert all(ids)


async def test_how_it_ended(stream: io.StringIO) -> None:
    async with doors(asyncio.Semaphore(2)) as (router, client):
        with pytest.raises(grpc.aio.AioRpcError):
            await router.generate(named("refused", 100_000))
        no_kind = {"x-request-id": "no-kind"}
        untyped = await client.post("/v1/completions", content=b"{", headers=no_kind)
        assert untyped.status_code == 415
        json_body = {"content-type": "application/json", "x-request-id": "no-json"}
        wrong = await client.post("/v1/completions", content=b"{", headers=json_body)
        assert wrong.status_code == 400
        call = router.call(named("left", 300))
        await call.read()
        call.cancel()
        for _ in range(2000):
            if len(lines_of(stream)) == 4:
                break
            await asyncio.sleep(0.01)
    ends = {str(line["request_id"]): line for line in lines_of(stream)}
    assert {name: line["ended"] for name, line in ends.items()} == {
        "refused": "invalid_argument",
        "no-kind": "invalid_argument",
        "no-json": "invalid_argument",
        "left": "cancelled",
    }
    assert ends["refused"]["first_token_seconds"] is None
    assert ends["left"]["completion_tokens"]
    for name in ("prompt_tokens", "cached_prompt_tokens", "legs"):  # no usage has come
        assert ends["left"][name] is None


async def test_an_id_cannot_forge_a_field_of_a_text_line(caplog: pytest.LogCaptureFixture) -> None:
    forged = 'r1 door=grpc tenant="admin" ended=finished'
    async with doors() as (_, client):
        body = {"prompt": PROMPT, "max_tokens": 1}
        await client.post("/v1/completions", json=body, headers={"x-request-id": forged})
    (line,) = [one.getMessage() for one in caplog.records if one.name == "kvrelay.access"]
    word, name, *fields = shlex.split(line)
    assert (word, name) == ("access", forged)
    assert [field.partition("=")[0] for field in fields].count("ended") == 1
    assert "door=http" in fields


async def test_hits_that_are_not_known_are_null(stream: io.StringIO) -> None:
    workers = [
        prefill_worker(behaviour=Behaviour(die_after=0)),
        decode_worker(behaviour=Behaviour(hits=8)),
    ]
    async with door(workers, access_log=True, disaggregate="always") as (router, _):
        for _ in range(2):
            await router.generate(request(3))
    assert [line["cached_prompt_tokens"] for line in lines_of(stream)] == [None, 8]


async def test_no_text_of_a_request_is_written(stream: io.StringIO) -> None:
    async with doors() as (_, client):
        body = {"prompt": "the launch code is 4711", "max_tokens": 3}
        made = (await client.post("/v1/completions", json=body)).json()
    assert len(lines_of(stream)) == 1
    assert "4711" not in stream.getvalue()
    assert made["choices"][0]["text"] not in stream.getvalue()


async def test_without_the_flag_there_is_none(stream: io.StringIO) -> None:
    async with door() as (router, _):
        await router.generate(request(2))
    assert not lines_of(stream)
