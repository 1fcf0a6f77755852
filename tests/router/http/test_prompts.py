"""Several prompts in one request: as many requests of one prompt would have given the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from kvrelay.rpc.address import Address
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions
from router.http.access import Access
from router.http.app import make_app
from router.http.connection.table import HttpLimits
from router.http.server import HttpServer
from tests.router.fakes import (
    Behaviour,
    Running,
    answer,
    decode_worker,
    namespace,
    running,
    text_of,
    tokenizer,
)
from tests.router.http.rig import SEED, door, events, openai_of
from tests.router.http.test_resume import by_index, finishes
from tests.router.rig import PROMPT
from tests.secured import CREDENTIALS

OTHERS = [[30 + number, 31, 32, 33, 34] for number in range(3)]
PROMPTS = [PROMPT, *OTHERS]
BODY: dict[str, object] = {"prompt": PROMPTS, "max_tokens": 6, "seed": SEED, "n": 2}
STREAM: dict[str, object] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
}
PAGE = "/v1/completions"
EXPECTED = {
    2 * p + i: answer(prompt, 6, SEED + i) for p, prompt in enumerate(PROMPTS) for i in range(2)
}


async def test_choices_are_in_the_order_of_prompts_and_samples() -> None:
    async with door() as (router, _), openai_of(router) as sdk:
        made = await sdk.completions.create(
            model="tiny", prompt=PROMPTS, max_tokens=6, seed=SEED, n=2
        )
        assert [one.index for one in made.choices] == list(range(8))
        assert {one.index: one.text for one in made.choices} == {
            index: text_of(tokens) for index, tokens in EXPECTED.items()
        }
        assert made.usage is not None
        assert made.usage.prompt_tokens == sum(map(len, PROMPTS))
        assert made.usage.completion_tokens == 48
        made = await sdk.completions.create(
            model="tiny", prompt=["Hello there", "Once"], max_tokens=4, seed=SEED, echo=True
        )
        for text, choice in zip(("Hello there", "Once"), made.choices, strict=True):
            prompt = tokenizer().encode(text)
            assert choice.text == text + text_of(answer(prompt, 4, SEED))
        stream = await sdk.completions.create(
            model="tiny", prompt=PROMPTS, max_tokens=6, seed=SEED, n=2, stream=True
        )
        found: dict[int, str] = {}
        async for chunk in stream:
            for one in chunk.choices:
                found[one.index] = found.get(one.index, "") + one.text
        assert found == {index: text_of(tokens) for index, tokens in EXPECTED.items()}


@pytest.mark.parametrize("seeded", [True, False])
async def test_every_cut_of_the_stream_resumes_at_another_router(seeded: bool) -> None:
    body = {**BODY, **STREAM}
    if not seeded:
        del body["seed"]
        body["prompt"] = [PROMPT, PROMPT]  # equal prompts, but not equal answers
    async with door([decode_worker(behaviour=Behaviour(hits=2))]) as (_, client):
        whole = await events(client, body)
    expected = by_index(whole)
    if seeded:
        assert expected == EXPECTED
    else:
        assert len({tuple(tokens) for tokens in expected.values()}) == 4
    count = len(expected)
    async with door([decode_worker("d1", behaviour=Behaviour(hits=2))]) as (router, client):
        for cut, (last, _) in enumerate(whole[:-2], 1):
            rest = await events(client, body, last=last)
            first, second = by_index(whole[:cut]), by_index(rest)
            joined = {i: first.get(i, []) + second.get(i, []) for i in range(count)}
            assert joined == expected, cut
            assert finishes(whole[:cut]) + finishes(rest) == count
            begun = {index // 2 for index in by_index(whole[:cut])}
            wanted = json.loads(whole[-2][1])["usage"]
            if len(begun) < count // 2:
                wanted["prompt_tokens_details"] = None
            assert json.loads(rest[-2][1])["usage"] == wanted
        for changed in (
            {**body, "prompt": PROMPTS[:-1]},
            {**body, "prompt": [*PROMPTS[1:], PROMPT]},
        ):
            made = await client.post(PAGE, json=changed, headers={"last-event-id": whole[3][0]})
            assert made.status_code in (400, 412)
            assert made.json()["error"]["param"] == "last-event-id"
        assert router.service.queue_status().running == 0


async def test_a_stream_on_two_numeric_profiles_is_refused_to_resume() -> None:
    """Its later events bind both profiles, and no request runs on both."""
    workers = [
        decode_worker(f"d{number}", namespace=namespace(numerics=name), max_num_seqs=1)
        for number, name in enumerate(("one", "two"))
    ]
    body = {**BODY, **STREAM, "n": 1}
    async with door(workers) as (_, client):
        whole = await events(client, body)
        prints = {json.loads(data)["system_fingerprint"] for _, data in whole[:-1]}
        assert len(prints) == 1
        legs = [len(worker.legs) for worker in workers]
        made = await client.post(PAGE, json=body, headers={"last-event-id": whole[-3][0]})
        assert all(legs)
        assert made.status_code == 412
        assert "numeric profile" in made.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompts", "changes", "field"),
    [
        (["a", ""], {}, "prompt[1]"),
        (["a", 5], {}, "prompt[1]"),
        ([[1], [2, -1]], {}, "prompt[1][1]"),
        ([[1], [2, 99_999]], {}, "prompt[1][1]"),
        ([[1], []], {}, "prompt[1]"),
        ([[1], ["a"]], {}, "prompt[1][0]"),
        (["a", "\ud800"], {}, "prompt[1]"),
        (["a"] * 129, {}, "prompt"),
        (["a"] * 65, {"n": 2}, "prompt"),
        (["a", "b"], {"n": 0}, "n"),
        (["a", "b"], {"max_tokens": 5000}, "max_tokens"),
        (["a", "b"], {"output_token_ids": [1]}, "output_token_ids"),
        (["a", [1]], {"temperature": -1}, "temperature"),
        (["a"] * 40, {"stream": True}, "prompt"),  # more than --max-requests
    ],
)
async def test_what_is_refused_names_its_prompt(
    prompts: object, changes: dict[str, object], field: str
) -> None:
    worker = decode_worker()
    async with door([worker], max_requests=39) as (router, client):
        body = json.dumps({"prompt": prompts, "max_tokens": 2, **changes})
        made = await client.post(PAGE, content=body, headers={"content-type": "application/json"})
        assert made.status_code == 400, made.text
        assert made.json()["error"]["param"] == field, made.text
        async with asyncio.timeout(5):
            while router.service.queue_status().running:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)


@asynccontextmanager
async def limited(folder: Path, limits: str) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """A door whose one tenant, alice, has limits."""
    path = folder / "credentials.toml"
    path.write_text(CREDENTIALS.replace("[tenants.bob]", f"{limits}\n[tenants.bob]"))
    path.chmod(0o600)
    security = policy.load(SecurityOptions(credentials=str(path)))
    async with running([decode_worker()], disaggregate="never") as router:
        app = make_app(
            router.service, Access(lambda: security.credentials, 16), HttpLimits(), bytes
        )
        server = HttpServer(app, Address("127.0.0.1", 0), HttpLimits())
        url = await server.start()
        key = {"authorization": "Bearer alice-secret-of-the-test"}
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=20, headers=key) as client:
                yield router, client
        finally:
            await server.stop()


async def test_the_quota_is_charged_for_every_prompt(tmp_path: Path) -> None:
    body = {"prompt": PROMPTS, "max_tokens": 6, "seed": SEED}
    needed = sum(map(len, PROMPTS)) + 24
    async with limited(tmp_path, f"tokens-per-minute = {needed}") as (router, client):
        assert (await client.post(PAGE, json=body)).status_code == 200
        refused = await client.post(PAGE, json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 10
        assert router.service.queue_status().running == 0
        account = router.service.quotas._accounts["alice"]
        account.spent = len(PROMPTS[0]) + 6  # one prompt finds no more tokens, others do
        late = await client.post(PAGE, json={**body, "stream": True})
        assert late.status_code == 429
        assert router.service.queue_status().running == 0
        assert not account.open
    async with limited(tmp_path, f"tokens-per-minute = {needed - 1}") as (router, client):
        never = await client.post(PAGE, json={**body, "stream": True})
        assert never.status_code == 400  # all or nothing: no prompt is answered alone
        assert never.json()["error"]["param"] == "max_tokens"
        assert f"may need {needed} tokens" in never.json()["error"]["message"]
        assert router.service.queue_status().running == 0
    async with limited(tmp_path, "max-requests = 3") as (_, client):
        never = await client.post(PAGE, json=body)
        assert never.status_code == 400
        assert never.json()["error"]["param"] == "prompt"
        assert (await client.post(PAGE, json={**body, "prompt": PROMPTS[:3]})).status_code == 200


async def test_a_prompt_that_fails_ends_the_request_and_frees_all_slots() -> None:
    step = asyncio.Semaphore(5)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with door([worker], max_failures=0) as (router, client):
        body = {**BODY, **STREAM, "n": 1, "max_tokens": 50}
        async with client.stream("POST", PAGE, json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if line.startswith("data:"):
                    break
            await worker.stop()
            rest = [line async for line in lines if line.startswith("data:")]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        async with asyncio.timeout(5):
            while router.service.queue_status().running:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)


async def test_a_client_that_leaves_cancels_every_prompt() -> None:
    step = asyncio.Semaphore(3)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with door([worker]) as (router, client):
        body = {**BODY, "stream": True, "max_tokens": 50}
        async with client.stream("POST", PAGE, json=body) as response:
            async for _ in response.aiter_lines():
                break
        async with asyncio.timeout(20):
            while not router.service.ended["cancelled"]:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        assert router.service.ended == {"cancelled": 1}
        assert router.service.queue_status().running == 0


async def test_the_second_sample_of_a_resumed_chat_begins_with_its_role() -> None:
    """Its first event had not been sent at the cut, although that of the first sample was."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "stream": True,
        "n": 2,
        "seed": SEED,
    }
    page = "/v1/chat/completions"
    async with door() as (_, client):
        whole = await events(client, body, page)
        for cut, (last, _) in enumerate(whole[:-1], 1):
            rest = await events(client, body, page, last)
            roles = [
                choice["index"]
                for _, data in (*whole[:cut], *rest)
                if data != "[DONE]"
                for choice in json.loads(data)["choices"]
                if "role" in choice["delta"]
            ]
            assert sorted(roles) == [0, 1], cut
