"""A broken stream goes on with ``Last-Event-ID``: the same bytes, at any router, from any event."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from dataclasses import replace

import pytest

from kvrelay.rpc.deadline import Deadline
from router.http.resume import event_id, parse_event_id, with_checksum
from router.queue.inbox import Inbox, Read, Sender
from tests.router.fakes import Behaviour, answer, decode_worker, namespace, prefill_worker
from tests.router.http.rig import SEED, Event, door, events, moved
from tests.router.rig import PROMPT

BODY: dict[str, object] = {
    "prompt": PROMPT,
    "max_tokens": 12,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
}


def tokens_of(found: list[Event]) -> list[int]:
    """The token ids of events."""
    chunks = [json.loads(data) for _, data in found if data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


@pytest.mark.parametrize("seeded", [True, False])
async def test_from_every_event_at_another_router(seeded: bool) -> None:
    body = {**BODY, "seed": SEED} if seeded else BODY
    worker = decode_worker()
    async with door([worker]) as (_, client):
        whole = await events(client, body)
        assert len(whole) >= 14
    if seeded:
        assert tokens_of(whole) == answer(PROMPT, 12, SEED)
    async with door([decode_worker("d1")]) as (_, client):
        for cut, (last, _) in enumerate(whole[:-2], 1):
            rest = await events(client, body, last=last)
            assert tokens_of(whole[:cut]) + tokens_of(rest) == tokens_of(whole)
            assert [data for _, data in rest[:-2]] == [data for _, data in whole[cut:-2]]
            assert rest[-1] == whole[-1]
            usage = json.loads(rest[-2][1])["usage"]
            assert usage["completion_tokens"] == 12


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("samples", [1, 3])
async def test_nothing_is_told_twice_after_the_usage(prompts: int, samples: int) -> None:
    """The event with the usage had the id of the one before: resumed there, it came again."""
    body = {**BODY, "prompt": [PROMPT] * prompts, "seed": SEED, "n": samples, "max_tokens": 4}
    async with door() as (_, client):
        whole = await events(client, body)
        (finish, _), (usage, _), done = whole[-3:]
        assert finish != usage
        assert await events(client, body, last=usage) == [("", "[DONE]")]
        again, last = await events(client, body, last=finish)
        assert [again[0], last[1]] == [usage, done[1]]
        positions = usage.partition("-")[0].replace("e", "", 1)
        early = {"last-event-id": moved(usage, positions)}
        made = await client.post("/v1/completions", json=body, headers=early)
        assert made.status_code == 400
        assert "is no id of an event" in made.json()["error"]["message"]


@pytest.mark.parametrize("samples", [1, 2])
async def test_what_is_generated_again_is_no_cache_hit(samples: int) -> None:
    """The hit was that of the continuing leg: KV that this request had just computed itself."""
    worker = decode_worker(behaviour=Behaviour(hits=2))
    body = {**BODY, "seed": SEED, "n": samples}
    async with door([worker]) as (router, client):
        whole = await events(client, body)
        assert usage_of(whole)["prompt_tokens_details"] == {"cached_tokens": 2}
    does = Behaviour(hits=2, tokens=asyncio.Event())
    worker = decode_worker(behaviour=does)
    async with door([worker]) as (router, client):
        resumed = asyncio.ensure_future(events(client, body, last=whole[6][0]))
        assert does.tokens is not None
        await asyncio.wait_for(worker.entered.wait(), 20)
        does.hits = len(PROMPT)
        does.tokens.set()
        rest = await resumed
        assert usage_of(rest) == usage_of(whole)
        assert router.service.totals.cached_prompt_tokens == 2
        for last, _ in whole[1:-2]:
            assert usage_of(await events(client, body, last=last)) == usage_of(whole)
        positions = re.sub("h[0-9]+", "", whole[6][0].partition("-")[0])  # as if it was not known
        found = usage_of(await events(client, body, last=moved(whole[6][0], positions)))
        assert found["prompt_tokens_details"] is None


CHAT: dict[str, object] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": SEED,
}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("page", "body"),
    [
        (COMPLETIONS, {**BODY, "seed": SEED}),
        (COMPLETIONS, {**BODY, "seed": SEED, "n": 3, "max_tokens": 1}),
        (CHATS, {**CHAT, "max_tokens": 6}),
    ],
)
async def test_hits_that_are_not_known_are_not_told(page: str, body: dict[str, object]) -> None:
    """A leg was lost before its admission, so what the next one finds may be its work."""
    killed = prefill_worker(behaviour=Behaviour(die_after=0))
    workers = [killed, decode_worker(behaviour=Behaviour(hits=8))]
    async with door(workers, disaggregate="always") as (_, client):
        whole = await events(client, body, page)
        assert usage_of(whole)["prompt_tokens_details"] is None
        for last, _ in whole[:-2]:
            assert usage_of(await events(client, body, page, last)) == usage_of(whole)


async def test_hits_of_prompts_that_had_not_begun_are_not_known() -> None:
    """The call before may have computed them, with no event to show for it."""
    body = {**BODY, "seed": SEED, "prompt": [PROMPT, PROMPT[:-2]]}
    async with door([decode_worker(behaviour=Behaviour(hits=0))]) as (_, client):
        whole = await events(client, body)
    assert usage_of(whole)["prompt_tokens_details"] == {"cached_tokens": 0}
    async with door([decode_worker("d1", behaviour=Behaviour(hits=8))]) as (_, client):
        for last, _ in whole[:-2]:
            told = usage_of(await events(client, body, last=last))["prompt_tokens_details"]
            known = last.partition("-")[0].count("h") == 2
            assert told == ({"cached_tokens": 0} if known else None), last


async def test_the_length_of_a_chat_is_that_of_its_first_call() -> None:
    """Without max_tokens it follows from the largest worker, which may be another one now."""
    first, larger, smaller = (
        decode_worker(f"d{size}", max_model_len=size, behaviour=Behaviour(hits=0))
        for size in (60, 90, 40)
    )
    async with door([first]) as (_, client):
        whole = await events(client, CHAT, CHATS)
    async with door([larger]) as (_, client):
        for cut, (last, _) in enumerate(whole[:-2], 1):
            assert await events(client, CHAT, CHATS, last) == whole[cut:]
    async with door([smaller]) as (_, client):
        for last, told in (
            (whole[4][0], "the largest worker has 40"),
            (changed(whole[4][0], "max_tokens", -1), "must be at least 1"),
        ):
            made = await client.post(CHATS, json=CHAT, headers={"last-event-id": last})
            assert made.status_code == 400
            error = made.json()["error"]
            assert told in error["message"]
            assert error["param"] == "last-event-id"


def usage_of(found: list[Event]) -> dict[str, object]:
    """The usage of a stream."""
    usage: dict[str, object] = json.loads(found[-2][1])["usage"]
    return usage


async def test_a_chat_does_not_begin_again() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "stream": True}
    page = "/v1/chat/completions"
    async with door([prefill_worker(), decode_worker()], disaggregate="always") as (_, client):
        whole = await events(client, body, page)
        assert json.loads(whole[0][1])["choices"][0]["delta"]["role"] == "assistant"
        for cut, (last, _) in enumerate(whole[:-1], 1):
            rest = await events(client, body, page, last)
            assert [data for _, data in rest] == [data for _, data in whole[cut:]]


async def test_a_client_that_kept_its_tokens_sends_them() -> None:
    """Then they are not generated again."""
    worker = decode_worker()
    body = {**BODY, "seed": SEED}
    async with door([worker]) as (_, client):
        whole = await events(client, body)
        worker.legs.clear()
        so_far = tokens_of(whole[:5])
        rest = await events(client, {**body, "output_token_ids": so_far}, last=whole[4][0])
        assert so_far + tokens_of(rest) == tokens_of(whole)
        (leg,) = worker.legs
        assert list(leg.output_token_ids) == so_far
        wrong = {**body, "output_token_ids": so_far[:-1]}
        refused = await client.post(
            "/v1/completions", json=wrong, headers={"last-event-id": whole[4][0]}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "output_token_ids"


def changed(last: str, name: str, value: int) -> str:
    """An event id with another number in it."""
    given = parse_event_id(last, 1)
    return event_id(given.samples, str(replace(given.stream, **{name: value})))  # type: ignore[arg-type]


async def test_ids_of_other_streams_are_refused() -> None:
    async with door() as (router, client):
        whole = await events(client, {**BODY, "seed": SEED})
        last = whole[3][0]
        for body, header, status in (
            ({**BODY, "seed": SEED + 1}, last, 412),
            ({**BODY, "seed": SEED, "temperature": 0.5}, last, 412),
            ({**BODY, "seed": SEED, "prompt": PROMPT[:-1]}, last, 412),
            ({**BODY, "seed": SEED}, "nonsense", 400),
            ({**BODY, "seed": SEED}, last[:20], 400),
            *(({**BODY, "seed": SEED}, last[:-cut], 400) for cut in range(1, 35)),
            ({**BODY, "seed": SEED}, moved(last, "13"), 412),
            ({**BODY, "seed": SEED}, moved(last, "3h12"), 400),
            ({**BODY, "seed": SEED}, changed(last, "seed", SEED ^ 2), 400),
            ({**BODY, "seed": SEED}, changed(last, "created", (1 << 64) - 1), 400),
            ({**BODY, "seed": SEED}, changed(last, "prompt_hash", 5), 412),
        ):
            made = await client.post(
                "/v1/completions", json=body, headers={"last-event-id": header}
            )
            assert made.status_code == status, (header, made.text)
            assert made.json()["error"]["param"] == "last-event-id"
        assert router.service.queue_status().running == 0


async def test_a_damaged_id_is_refused() -> None:
    """Of a body without a seed the id has it: another one would lead into another answer."""
    async with door() as (_, client):
        last = (await events(client, BODY))[3][0]
        flipped = [
            last[:at] + ("1" if character == "2" else "2") + last[at + 1 :]
            for at, character in enumerate(last)
        ]
        cut = [last[at:] for at in range(1, 20)]
        for header in flipped + cut:
            made = await client.post(
                "/v1/completions", json=BODY, headers={"last-event-id": header}
            )
            assert made.status_code == 400, header
            assert made.json()["error"]["param"] == "last-event-id"


async def test_only_a_stream_is_resumed() -> None:
    """A whole answer after a position would lack its beginning."""
    body = {**BODY, "seed": SEED}
    async with door() as (_, client):
        last = (await events(client, body))[3][0]
        made = await client.post(
            "/v1/completions",
            json={**body, "stream": False, "stream_options": None},
            headers={"last-event-id": last},
        )
    assert made.status_code == 400
    error = made.json()["error"]
    assert error["param"] == "last-event-id"
    assert "set stream to true" in error["message"]


async def test_other_weights_are_refused() -> None:
    body = {**BODY, "seed": SEED}
    async with door() as (_, client):
        last = (await events(client, body))[3][0]
    other = decode_worker(namespace=namespace(revision="other"))
    async with door([other], worker_wait=0.2) as (_, client):
        made = await client.post("/v1/completions", json=body, headers={"last-event-id": last})
        assert made.status_code == 412
        assert "weights" in made.json()["error"]["message"]


async def test_several_samples_and_their_resumption() -> None:
    """Sample i has the seed and i; every cut of the interleaved stream continues each of them."""
    body = {**BODY, "n": 3, "seed": SEED, "max_tokens": 5}
    async with door([decode_worker()]) as (_, client):
        made = await client.post("/v1/completions", json={**body, "stream": False, **PLAIN})
        choices = made.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        expected = {i: answer(PROMPT, 5, SEED + i) for i in range(3)}
        assert {one["index"]: one["token_ids"] for one in choices} == expected
        assert made.json()["usage"]["completion_tokens"] == 15
        whole = await events(client, body)
        assert by_index(whole) == expected
        for cut, (last, _) in enumerate(whole[:-2], 1):
            rest = await events(client, body, last=last)
            first, second = by_index(whole[:cut]), by_index(rest)
            joined = {i: first.get(i, []) + second.get(i, []) for i in range(3)}
            assert joined == expected, cut
            assert finishes(whole[:cut]) + finishes(rest) == 3
            assert json.loads(rest[-2][1])["usage"]["completion_tokens"] == 15


PLAIN = {"stream_options": None}


def by_index(found: list[Event]) -> dict[int, list[int]]:
    """The token ids of each choice."""
    made: dict[int, list[int]] = {}
    for _, data in found:
        for choice in json.loads(data)["choices"] if data != "[DONE]" else ():
            made.setdefault(choice["index"], []).extend(choice["token_ids"])
    return made


def finishes(found: list[Event]) -> int:
    """How many choices ended."""
    chunks = [json.loads(data) for _, data in found if data != "[DONE]"]
    return sum(choice["finish_reason"] is not None for one in chunks for choice in one["choices"])


@pytest.mark.parametrize("name", ["two\nlines", "", "\x1b[31m", "x" * 129])
async def test_an_id_whose_request_no_client_could_name_is_refused(name: str) -> None:
    """Clients can forge ids: what they name a request is written to logs and answers."""
    body = {**BODY, "seed": SEED}
    async with door() as (_, client):
        (last, _), *_ = await events(client, body)
        positions, _, token = last.rpartition("-")[0].partition("-")
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        named = json.loads((await events(client, body, last=last))[0][1])["id"]
        own = named.removeprefix("cmpl-").encode()
        assert raw.endswith(own)
        forged = base64.urlsafe_b64encode(raw.removesuffix(own) + name.encode()).decode()
        made = await client.post(
            "/v1/completions",
            json=body,
            headers={"last-event-id": with_checksum(f"{positions}-{forged.rstrip('=')}")},
        )
        assert made.status_code == 400
        assert "is no id of an event" in made.json()["error"]["message"]


async def test_a_message_that_goes_on_counts_as_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made of a body that has been read: the memory for it is that of its own size."""
    sizes: list[int | None] = []
    usual = Inbox.received

    def received(inbox: Inbox, read: Read, sender: Sender, deadline: Deadline) -> object:
        sizes.append(sender.nbytes)
        return usual(inbox, read, sender, deadline)

    monkeypatch.setattr(Inbox, "received", received)
    async with door() as (_, client):
        body = {**BODY, "seed": SEED}
        whole = await events(client, body)
        await events(client, body, last=whole[4][0])
    first, again, rest = sizes
    assert first == again == len(json.dumps(body, separators=(",", ":")))
    assert rest is not None
    assert rest > 4 * len(PROMPT)
