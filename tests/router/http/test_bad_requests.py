"""Bad input through HTTP: a clear 4xx that names the field, nothing held, others undisturbed."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.server import families
from kvrelay.rpc.server.authorization import refused
from router.http.access import Access
from router.http.app import make_app
from router.http.connection.table import HttpLimits
from router.http.errors import HttpRefusal
from router.http.fields import Fields
from router.http.server import HttpServer
from router.queue import inbox
from tests.router.fakes import Behaviour, Running, decode_worker, running
from tests.router.http.rig import SEED, bounded, door, expected, raw
from tests.router.rig import PROMPT, until
from tests.secured import ALICE, BOB, CREDENTIALS, SERVICE, write_credentials, write_files

GOOD: dict[str, object] = {"prompt": PROMPT, "max_tokens": 3, "seed": SEED}
TALK: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}

COMPLETION: dict[str, tuple[dict[str, object], str]] = {
    "no prompt": ({"prompt": None}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "no ids": ({"prompt": []}, "prompt"),
    "prompt number": ({"prompt": 5}, "prompt"),
    "prompt object": ({"prompt": {}}, "prompt"),
    "id negative": ({"prompt": [1, -1]}, "prompt[1]"),
    "id text": ({"prompt": [1, "a"]}, "prompt[1]"),
    "id true": ({"prompt": [1, True]}, "prompt[1]"),
    "id outside": ({"prompt": [1, 2**32 - 1]}, "prompt[1]"),
    "half a pair": ({"prompt": "\ud800"}, "prompt"),
    "model number": ({"model": 1}, "model"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens true": ({"max_tokens": True}, "max_tokens"),
    "max_tokens half": ({"max_tokens": 1.5}, "max_tokens"),
    "max_tokens huge": ({"max_tokens": 2**40}, "max_tokens"),
    "max_tokens beyond": ({"max_tokens": 5000}, "max_tokens"),
    "temperature text": ({"temperature": "hot"}, "temperature"),
    "temperature negative": ({"temperature": -1}, "temperature"),
    "temperature huge": ({"temperature": 10**400}, "temperature"),
    "top_p 2": ({"top_p": 2}, "top_p"),
    "top_k -2": ({"top_k": -2}, "top_k"),
    "min_p 2": ({"min_p": 2}, "min_p"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, "repetition_penalty"),
    "presence_penalty 3": ({"presence_penalty": 3}, "presence_penalty"),
    "frequency_penalty 3": ({"frequency_penalty": 3}, "frequency_penalty"),
    "seed text": ({"seed": "x"}, "seed"),
    "seed -2": ({"seed": -2}, "seed"),
    "stop number": ({"stop": 1}, "stop"),
    "stop empty": ({"stop": [""]}, "stop[0]"),
    "stop list of numbers": ({"stop": [1]}, "stop[0]"),
    "stop_token_ids text": ({"stop_token_ids": "x"}, "stop_token_ids"),
    "stop_token_ids outside": ({"stop_token_ids": [99_999]}, "stop_token_ids[0]"),
    "min_tokens": ({"min_tokens": 4}, "min_tokens"),
    "ignore_eos 1": ({"ignore_eos": 1}, "ignore_eos"),
    "logprobs 21": ({"logprobs": 21}, "logprobs"),
    "priority 9": ({"priority": 9}, "priority"),
    "retention soon": ({"retention": "soon"}, "retention"),
    "retention 1": ({"retention": 1}, "retention"),
    "stream text": ({"stream": "yes"}, "stream"),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "stream_options list": ({"stream": True, "stream_options": []}, "stream_options"),
    "include_usage": (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    "best_of": ({"best_of": 2}, "best_of"),
    "n 0": ({"n": 0}, "n"),
    "n 129": ({"n": 129}, "n"),
    "n text": ({"n": "2"}, "n"),
    "logit_bias list": ({"logit_bias": [1]}, "logit_bias"),
    "logit_bias name": ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    "logit_bias value": ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    "bad_words text": ({"bad_words": "no"}, "bad_words"),
    "bad_words number": ({"bad_words": [1]}, "bad_words[0]"),
    "cache_salt number": ({"cache_salt": 1}, "cache_salt"),
    "echo text": ({"echo": "yes"}, "echo"),
    "output_token_ids alone": ({"output_token_ids": [1]}, "output_token_ids"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "prompt_logprobs": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "prompt_embeds": ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    "tokens as ids": ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    "a bias of null": ({"logit_bias": {"5": None}}, "logit_bias.5"),
    "response_format text": ({"response_format": "json"}, "response_format"),
    "response_format kind": ({"response_format": {"type": "xml"}}, "response_format"),
    "json_schema list": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        "response_format.json_schema.schema",
    ),
    "structured_outputs list": ({"structured_outputs": []}, "structured_outputs"),
    "structured_outputs two": (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
    ),
    "structured_outputs json": ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
    "structured_outputs empty": (
        {"structured_outputs": {"choice": ["a", ""]}},
        "structured_outputs.choice[1]",
    ),
}
CHAT: dict[str, tuple[dict[str, object], str]] = {
    "no messages": ({"messages": None}, "messages"),
    "messages text": ({"messages": "hi"}, "messages"),
    "empty": ({"messages": []}, "messages"),
    "turn text": ({"messages": ["hi"]}, "messages[0]"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0]"),
    "role number": ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    "content number": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    "part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    "nothing said": (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
        "messages[0].content",
    ),
    "template arguments": ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    "strict text": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {}, "strict": "x"},
            }
        },
        "response_format.json_schema.strict",
    ),
    "part number": ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
    "top_logprobs alone": ({"top_logprobs": 3}, "top_logprobs"),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "max_completion_tokens": ({"max_completion_tokens": -1}, "max_completion_tokens"),
    "audio": ({"audio": {"voice": "x"}}, "audio"),
}


async def undisturbed(router: Running, client: httpx2.AsyncClient) -> None:
    """The door answers a good request, and nothing is left of the bad ones."""
    good = await client.post("/v1/completions", json=GOOD)
    assert good.json()["choices"][0]["text"] == expected(3)
    await until(lambda: not router.service.queue_status().running)


def test_a_wrong_type_is_not_told_a_range() -> None:
    with pytest.raises(Rejected, match=r'^n: must be an integer, got "2"$'):
        Fields({"n": "2"}).whole("n", 1, 128)


async def test_each_wrong_field_is_named() -> None:
    async with door() as (router, client):
        for page, base, cases in (
            ("/v1/completions", GOOD, COMPLETION),
            ("/v1/chat/completions", TALK, CHAT),
        ):
            for name, (change, field) in cases.items():
                body = json.dumps({**base, **change}).encode()
                made = await client.post(
                    page, content=body, headers={"content-type": "application/json"}
                )
                assert made.status_code == 400, (name, made.text)
                error = made.json()["error"]
                assert error["param"] == field, (name, error)
                assert error["message"].startswith(f"{field}: "), (name, error)
        await undisturbed(router, client)


BODIES: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, "is not JSON"),
    "broken": (b'{"prompt": "x"', 400, "is not JSON"),
    "a list": (b"[]", 400, "must be a JSON object"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', 400, "NaN is no number"),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, "is not UTF-8 at byte 12"),
    "deep": (b'{"prompt": ' + b"[" * 200_000, 400, "nested too deeply"),
    "a long number": (b'{"seed": ' + b"9" * 10_000 + b"}", 400, "4,300 digits"),
    "a byte order mark": (b'\xef\xbb\xbf{"prompt": "x"}', 400, "byte order mark: leave it out"),
    "10 MB": (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413, "more than"),
}


@pytest.mark.parametrize("case", BODIES)
async def test_bodies(case: str) -> None:
    body, status, said = BODIES[case]
    async with door() as (router, client):
        for content in (body, _in_chunks(body)):
            made = await client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert made.status_code == status
            assert said in made.json()["error"]["message"]
        await undisturbed(router, client)


async def _in_chunks(body: bytes) -> AsyncIterator[bytes]:
    """Without a content-length."""
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]


async def test_other_types_of_content_are_refused() -> None:
    """A page of another site can send the first two without asking the browser's user first."""
    kinds = {
        "text/plain": 415,
        "application/x-www-form-urlencoded": 415,
        "application/jsonl": 415,
        "application/json; charset=latin-1": 415,
        "application/json; profile=x; Charset=utf-16": 415,
        'Application/JSON; charset="UTF-8"; profile=x': 200,
        "application/json;charset=utf8;": 200,
    }
    async with door() as (_, client):
        for kind, status in kinds.items():
            made = await client.post(
                "/v1/completions", content=json.dumps(GOOD), headers={"content-type": kind}
            )
            assert made.status_code == status, kind


async def test_null_is_absent_and_the_last_of_equal_names_counts() -> None:
    """As pydantic reads the bodies of vLLM."""
    async with door(strict_fields=True) as (router, client):
        names = ("n", "stop", "logprobs", "stream", "stream_options", "top_p", "user", "tools")
        body: dict[str, object] = {**GOOD, **dict.fromkeys(names), "suffix": None, "no_field": None}
        made = await client.post("/v1/completions", json=body)
        assert made.json()["choices"][0]["text"] == expected(3)
        text = json.dumps(GOOD)[:-1] + ', "max_tokens": 5, "max_tokens": 2}'
        made = await client.post(
            "/v1/completions", content=text, headers={"content-type": "application/json"}
        )
        assert made.json()["usage"]["completion_tokens"] == 2
        await undisturbed(router, client)


async def test_unknown_fields() -> None:
    body = {**GOOD, "no_such_field": 1}
    async with door() as (_, client):
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    async with door(strict_fields=True) as (_, client):
        made = await client.post("/v1/completions", json=body)
        assert made.json()["error"]["param"] == "no_such_field"
        assert (await client.post("/v1/completions", json=GOOD)).status_code == 200


async def test_heads_that_are_slow_or_large() -> None:
    async with bounded(head_bytes=4096) as (router, client, server):
        for sent, status in (
            (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1000, b"431"),
            (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000, b"431"),
            (b"GET /" + b"y" * 100_000, b"431"),
            (b"nonsense\r\n\r\n", b"400"),
        ):
            await refused_head(client, sent, status)
        await undisturbed(router, client)
        await until(lambda: server.connections.open <= 1)
    async with bounded(head_seconds=0.3) as (_, client, server):
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nx: "):
            await refused_head(client, sent, b"408")
        await until(lambda: not server.connections.open)


async def refused_head(client: httpx2.AsyncClient, sent: bytes, status: bytes) -> None:
    """The answer to these bytes has this status and says why; then the connection ends."""
    reader, writer = await raw(client)
    writer.write(sent)
    async with asyncio.timeout(20):
        answer = await reader.read()
    assert answer.split()[1] == status, answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    writer.close()


async def test_a_body_that_is_slow() -> None:
    async with bounded(body_seconds=0.3) as (router, client, _):
        reader, writer = await raw(client)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        async with asyncio.timeout(10):
            line = await reader.readline()
        assert b" 408 " in line
        writer.close()
        await undisturbed(router, client)


async def test_slow_bodies_take_no_place_of_complete_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router has memory for one message here, and waits for ever for those that it reads."""
    monkeypatch.setattr(inbox, "INBOX_BYTES", 1)
    monkeypatch.setattr(inbox, "READ_SECONDS", 1000.0)
    async with bounded() as (router, client, _):
        slow = [await raw(client) for _ in range(8)]
        for number, (_, writer) in enumerate(slow):
            length = (b"content-length: 100", b"transfer-encoding: chunked")[number % 2]
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                + length
                + b"\r\n\r\n1\r\n{\r\n"
            )
        await undisturbed(router, client)
        for _, writer in slow:
            writer.close()


async def test_slow_large_bodies_take_no_memory_of_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All come from one address. The router never ends the read of a slow body here."""
    monkeypatch.setattr(inbox, "INBOX_BYTES", 1)
    monkeypatch.setattr(inbox, "READ_SECONDS", 1000.0)
    async with bounded() as (router, client, _):
        slow = [await raw(client) for _ in range(8)]
        begun = b" " * (inbox.SMALL_BYTES + 1)
        for number, (_, writer) in enumerate(slow):
            size = b"%x" % len(begun)
            told = (b"content-length: 1000000", b"transfer-encoding: chunked")[number % 2]
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                + told
                + b"\r\n\r\n"
                + (size + b"\r\n" if number % 2 else b"")
                + begun
            )
            await writer.drain()
        await until(lambda: router.service.inbox.semaphore.waiting == 7)
        await undisturbed(router, client)
        for _, writer in slow:
            writer.close()
        await until(lambda: router.service.inbox.semaphore.waiting == 0)


async def test_a_length_of_thousands_of_digits_is_a_length() -> None:
    async with bounded() as (router, client, _):
        for digits, status in ((b"0" * 5000 + b"2", b"400"), (b"9" * 5000, b"413")):
            reader, writer = await raw(client)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: " + digits + b"\r\n\r\n{}"
            )
            async with asyncio.timeout(20):
                line = await reader.readline()
            assert line.split()[1] in (status, b"400"), line
            writer.close()
        await undisturbed(router, client)


async def test_idle_connections_make_room() -> None:
    """New ones are served however many are idle, and no more stay open than may."""
    async with bounded(connections=60, connections_per_host=40) as (router, client, server):
        idle = [await raw(client) for _ in range(100)]
        await undisturbed(router, client)
        assert server.connections.open <= 41
        for _, writer in idle:
            writer.close()


async def test_a_burst_of_connections_makes_room_for_each() -> None:
    """They are accepted before the first that makes room is closed."""
    async with bounded(connections=60, connections_per_host=40) as (router, client, server):
        where = client.base_url.host, client.base_url.port
        made = [socket.create_connection(where) for _ in range(100)]
        await until(lambda: server.connections.open >= 30)
        await undisturbed(router, client)
        assert server.connections.open <= 31  # half of all places are for one host
        for one in made:
            one.close()


async def test_a_lost_connection_ends_the_request_before_a_pipelined_one() -> None:
    worker = decode_worker(max_model_len=1 << 20, num_blocks=1 << 20)
    async with door([worker]) as (router, client):
        reader, writer = await raw(client)
        body = json.dumps({**GOOD, "max_tokens": 200_000, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        async with asyncio.timeout(20):
            await worker.cancelled.wait()
        await until(lambda: router.service.ended["cancelled"] == 1)


@pytest.mark.slow  # the buffers of the kernel and of the server fill first: 10 s of a core
async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    worker = decode_worker(max_model_len=1 << 20, num_blocks=1 << 20)
    async with door([worker], stuck_after=0.4) as (router, client):
        reader, writer = await raw(client)
        body = json.dumps({**GOOD, "max_tokens": 200_000, "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        async with asyncio.timeout(60):
            await worker.cancelled.wait()
        await until(lambda: router.service.ended["cancelled"] == 1)
        writer.close()
        reader.feed_eof()


def test_a_token_for_metrics_reads_that_page_only(tmp_path: Path) -> None:
    token = "metrics-secret-of-the-test"
    table = write_credentials(tmp_path, f'metrics = "{token}"' + CREDENTIALS)
    known = policy.load(SecurityOptions(credentials=table)).credentials
    access = Access(lambda: known, 16)
    headers = {"authorization": f"Bearer {token}"}
    access.check_operator(headers)
    with pytest.raises(HttpRefusal) as caught, access.admitted(headers):
        pytest.fail("admitted")
    assert caught.value.status == 403


async def test_keys_are_the_tokens_of_tenants(tmp_path: Path) -> None:
    options = SecurityOptions(credentials=write_credentials(tmp_path))
    security = policy.load(options)
    step = asyncio.Semaphore(0)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with running([worker], disaggregate="never") as router:
        access = Access(lambda: security.credentials, 16)
        server = HttpServer(
            make_app(router.service, access, HttpLimits(), bytes),
            Address("127.0.0.1", 0),
            HttpLimits(),
        )
        url = await server.start()
        try:
            before = refused.copy()
            async with httpx2.AsyncClient(base_url=url, timeout=20) as client:
                for key in ("", "Bearer wrong", f"Basic {ALICE}"):
                    made = await client.post(
                        "/v1/completions", json=GOOD, headers={"authorization": key}
                    )
                    assert made.status_code == 401
                    assert made.headers["www-authenticate"] == "Bearer"
                    assert made.json()["error"]["code"] == "invalid_api_key"
                assert (await client.get("/v1/models")).status_code == 401
                assert (await client.get("/health")).status_code == 200
                bearer = {"authorization": f"Bearer {ALICE}"}
                assert (await client.get("/metrics", headers=bearer)).status_code == 403
                assert refused - before == {"unauthenticated": 4, "forbidden": 1}
                page = "\n".join(str(family) for family in families.security())
                assert f"'reason': 'unauthenticated'}}, value={refused['unauthenticated']}" in page
                assert not worker.legs
                for _ in range(9):
                    step.release()
                for key in (ALICE, BOB, SERVICE):
                    bearer = {"authorization": f"Bearer {key}"}
                    made = await client.post("/v1/completions", json=GOOD, headers=bearer)
                    assert made.json()["choices"][0]["text"] == expected(3)
        finally:
            await server.stop()
    salts = [leg.tenant_salt for leg in worker.legs]
    assert len(set(salts)) == 3
    assert salts[2] == b""


async def test_tls(tmp_path: Path) -> None:
    authority = CertificateAuthority()
    files = write_files(tmp_path, "router", authority)
    for mutual in (False, True):
        options = replace(files.options(), tls_mutual=mutual)
        security = policy.load(options)
        async with running([decode_worker()], disaggregate="never") as router:
            access = Access(lambda: policy.INSECURE.credentials, 16)
            app = make_app(router.service, access, HttpLimits(), bytes)
            server = HttpServer(app, Address("127.0.0.1", 0), HttpLimits())
            url = await server.start(security)
            assert url.startswith("https://")
            try:
                trust = ssl.create_default_context(cafile=files.ca)
                if mutual:
                    async with httpx2.AsyncClient(base_url=url, verify=trust) as stranger:
                        with pytest.raises((httpx2.TransportError, ssl.SSLError)):
                            await stranger.get("/health")
                    trust.load_cert_chain(files.cert, files.key)
                async with httpx2.AsyncClient(base_url=url, verify=trust) as client:
                    made = await client.post("/v1/completions", json=GOOD)
                    assert made.json()["choices"][0]["text"] == expected(3)
            finally:
                await server.stop()
