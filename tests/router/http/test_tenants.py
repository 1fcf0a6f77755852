"""Tenants at both doors: one account of quotas, and no use of another's event ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from kvrelay import AsyncClient
from kvrelay.errors import Exhausted
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.identity import Tenant
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.v1 import router_pb2
from router.generate.record import RequestRecord
from router.generate.request import InboundCall
from router.queue.gate import HeldRequest
from router.service import RouterService
from tests.router.fakes import Behaviour, Running, decode_worker
from tests.router.http.rig import SEED, door, events, expected, raw
from tests.router.rig import PROMPT, until
from tests.secured import ALICE, BOB, SERVICE, write_credentials

PAGE, CHATS = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, object] = {"prompt": PROMPT, "max_tokens": 8, "seed": SEED}
NEEDED = len(PROMPT) + 8


@asynccontextmanager
async def tenants(
    folder: Path, limits: str = "", step: asyncio.Semaphore | None = None
) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """A router with both doors and credentials; ``limits`` are those of alice."""
    text = f"""
service = "{SERVICE}"
[tenants.alice]
token = "{ALICE}"
salt = "salt-of-the-tenant-alice"
{limits}
[tenants.bob]
token = "{BOB}"
salt = "salt-of-the-tenant-bob"
"""
    options = SecurityOptions(credentials=write_credentials(folder, text))
    worker = decode_worker(behaviour=Behaviour(step=step))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "_installed", policy.load(options))
        async with door([worker]) as found:
            yield found


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("page", ["/tokenize", "/detokenize"])
async def test_a_conversion_counts_before_its_body_is_read(page: str, tmp_path: Path) -> None:
    """Against the tenant's requests, and against the memory of the router."""
    async with tenants(tmp_path, "max-requests = 1") as (router, http):
        _, writer = await raw(http)
        writer.write(
            f"POST {page} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {ALICE}\r\ncontent-length: 1000000\r\n\r\n".encode()
            + b" " * 100_000
        )
        await until(lambda: router.service.inbox.semaphore.held(Tenant("alice")) >= 1_000_000)
        for key, status in ((ALICE, 429), (BOB, 400)):
            made = await http.post(page, json={}, headers=bearer(key))
            assert made.status_code == status, made.text
        writer.close()


async def test_requests_at_once_are_counted_over_both_doors(tmp_path: Path) -> None:
    step = asyncio.Semaphore(0)
    async with (
        tenants(tmp_path, "max-requests = 2", step) as (router, http),
        AsyncClient(router.address, token=ALICE) as grpc,
        asyncio.timeout(60),
    ):
        key = bearer(ALICE)
        for _ in range(2):
            of_http = asyncio.ensure_future(http.post(PAGE, json=BODY, headers=key))
            of_grpc = asyncio.ensure_future(grpc.complete(token_ids=PROMPT, max_tokens=8))
            while router.service.queue_status().running < 2:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
            refused = await http.post(PAGE, json=BODY, headers=key)
            assert refused.status_code == 429
            assert "'alice' has 2 requests open" in refused.json()["error"]["message"]
            with pytest.raises(Exhausted, match="'alice' has 2 requests open"):
                await grpc.complete(token_ids=PROMPT, max_tokens=8)
            for _ in range(16):
                step.release()
            assert (await of_http).status_code == 200
            assert len((await of_grpc).token_ids) == 8


@pytest.mark.parametrize(
    ("page", "body", "needed"),
    [
        (PAGE, BODY, NEEDED),
        (PAGE, {**BODY, "n": 3}, len(PROMPT) + 24),
        (PAGE, {**BODY, "n": 2, "prompt": [PROMPT, PROMPT[:-2]]}, 2 * len(PROMPT) - 2 + 32),
        (CHATS, {"messages": [{"role": "user", "content": "Hi"}], "seed": SEED}, 60),  # it fills it
    ],
)
async def test_a_resumed_stream_needs_no_more_of_a_quota_than_a_whole_one(
    tmp_path: Path, page: str, body: dict[str, object], needed: int
) -> None:
    """What the client has is generated again, and charged once."""
    body = {**body, "stream": True}
    async with tenants(tmp_path, f"tokens-per-minute = {needed}") as (router, http):
        accounts = router.service.quotas._accounts
        http.headers.update(bearer(ALICE))
        whole = await events(http, body, page)
        for last, _ in whole[:-1]:
            accounts.clear()  # a minute passes
            told = await events(http, body, page, last)
            assert told[-1][1] == "[DONE]", last
            assert needed / 2 < accounts["alice"].spent <= needed
            assert not accounts["alice"].open
        refused = await http.post(page, json=body)
        assert refused.status_code == 429


@pytest.mark.parametrize("samples", [1, 3])
async def test_a_resumed_stream_keeps_its_places_between_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    """Another request took them, and the resumed one was refused after its work was done."""
    seen: list[tuple[int, int]] = []
    usual = RouterService.serve

    def serve(
        service: RouterService, call: InboundCall, record: RequestRecord, held: HeldRequest
    ) -> AsyncGenerator[router_pb2.GenerateResponse]:
        seen.append((service.quotas.requests(call.tenant), service.gate._open))
        return usual(service, call, record, held)

    monkeypatch.setattr(RouterService, "serve", serve)
    body = {**BODY, "n": samples, "stream": True}
    async with tenants(tmp_path, f"max-requests = {samples}") as (router, http):
        http.headers.update(bearer(ALICE))
        whole = await events(http, body)
        seen.clear()
        await events(http, body, last=whole[3][0])
        assert seen == [(1, 1), (samples, samples)]
        assert router.service.gate._open == 0


async def test_tokens_of_a_minute_are_counted_over_both_doors(tmp_path: Path) -> None:
    limits = f"tokens-per-minute = {2 * NEEDED}"
    for first in ("http", "grpc"):
        async with AsyncExitStack() as stack:
            router, http = await stack.enter_async_context(tenants(tmp_path, limits))
            grpc = await stack.enter_async_context(AsyncClient(router.address, token=ALICE))
            key = bearer(ALICE)
            for name in (first, {"http": "grpc", "grpc": "http"}[first]):
                if name == "http":
                    assert (await http.post(PAGE, json=BODY, headers=key)).status_code == 200
                else:
                    assert (await grpc.complete(token_ids=PROMPT, max_tokens=8)).token_ids
            refused = await http.post(PAGE, json=BODY, headers=key)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 1
            with pytest.raises(Exhausted, match="tokens of this minute"):
                await grpc.complete(token_ids=PROMPT, max_tokens=8)
            other = await http.post(PAGE, json=BODY, headers=bearer(BOB))
            assert other.json()["choices"][0]["text"] == expected(8)


async def test_an_event_id_of_another_tenant_is_that_of_another_request(tmp_path: Path) -> None:
    """With the same body as with another one: the answer does not tell whether it is one."""
    body = {**BODY, "stream": True}
    async with tenants(tmp_path) as (_, http):
        http.headers.update(bearer(ALICE))
        whole = await events(http, body)
        last = whole[3][0]
        assert [data for _, data in await events(http, body, last=last)] == [
            data for _, data in whole[4:]
        ]
        http.headers.update(bearer(BOB))
        answers = [
            await http.post(PAGE, json=one, headers={"last-event-id": last})
            for one in (body, {**body, "seed": SEED + 1}, {**body, "prompt": "x"})
        ]
    assert [one.status_code for one in answers] == [412] * 3
    assert len({one.text for one in answers}) == 1
    assert "began with another request" in answers[0].json()["error"]["message"]
