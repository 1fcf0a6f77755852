"""The client library used in unexpected ways: the errors are typed and of kvrelay."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest

from kvrelay import AsyncClient, Client
from kvrelay.client.aio import AsyncStream
from kvrelay.client.chunk import Chunk
from kvrelay.client.parameters import Parameters, seconds_of
from kvrelay.errors import (
    Corrupt,
    DeadlineExceeded,
    Draining,
    Exhausted,
    KvrelayError,
    Mismatch,
    NotFound,
    NotInstalled,
    Rejected,
    Unavailable,
    Unservable,
)
from kvrelay.rpc.channel import ChannelOptions
from kvrelay.sampling import Sampling
from tests.router.fakes import Behaviour, decode_worker, running

PROMPT = [5, 6, 7]


async def _read(stream: AsyncStream) -> list[Chunk]:
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("closed", ["stream", "client"])
async def test_closed_by_another_task(closed: str) -> None:
    worker = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(0)))
    async with running([worker]) as router, AsyncClient(router.address) as client:
        stream = client.generate(token_ids=PROMPT, max_tokens=50, seed=1)
        reading = asyncio.create_task(_read(stream))
        await asyncio.wait_for(worker.entered.wait(), 10)
        if closed == "stream":
            stream.cancel()
            assert await asyncio.wait_for(reading, 10) == []
        else:
            await client.close()
            with pytest.raises(Unavailable):
                await asyncio.wait_for(reading, 10)


async def test_a_task_that_is_cancelled_stays_cancelled() -> None:
    worker = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(0)))
    async with running([worker]) as router, AsyncClient(router.address) as client:
        reading = asyncio.create_task(_read(client.generate(token_ids=PROMPT, max_tokens=50)))
        await asyncio.wait_for(worker.entered.wait(), 10)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_after_close() -> None:
    client, other = Client("127.0.0.1:1"), AsyncClient("127.0.0.1:1")
    client.close()
    await other.close()
    for use in (lambda: client.complete(token_ids=PROMPT), client.workers):
        with pytest.raises(Unavailable, match="closed"):
            use()
    with pytest.raises(Unavailable, match="closed"):
        await other.complete(token_ids=PROMPT)
    with pytest.raises(Unavailable, match="closed"):
        await other.workers()


async def test_a_fleet_is_asked_with_a_number_of_seconds() -> None:
    with Client("127.0.0.1:1") as client:
        fleet: Callable[..., object] = client.fleet  # a type checker refuses a text
        with pytest.raises(Rejected, match="timeout: must be a number of seconds, got 'x'"):
            fleet("x")


@pytest.mark.parametrize(
    "address", ["", 5, None, "http://127.0.0.1:1", "a\nb:1", "host", "host:99999", "host:x"]
)
async def test_what_is_no_address_is_rejected(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(Rejected, match=r"^address: must be HOST:PORT or unix:PATH, got "):
            kind(address)


@pytest.mark.parametrize("name", ["token", "tls_ca", "tls_cert", "tls_key", "tls_name"])
def test_an_option_of_another_type_is_named_and_not_shown(name: str) -> None:
    make: Callable[..., object] = Client
    with pytest.raises(Rejected, match=f"^{name}: must be text") as caught:
        make("127.0.0.1:1", **{name: 987654321})
    assert "987654321" not in str(caught.value)


def test_only_streams_are_resumed() -> None:
    with Client("127.0.0.1:1") as client:
        resume: Callable[..., object] = client.resume
        with pytest.raises(Rejected, match=r"^stream: must be a stream of generate\(\), got None"):
            resume(None)


def test_timeouts() -> None:
    assert seconds_of(None) is None
    assert seconds_of(math.inf) is None
    assert seconds_of(1e300) is None
    assert seconds_of(2.5) == 2.5
    assert seconds_of(-1.0) == -1.0
    with pytest.raises(Rejected, match="timeout"):
        seconds_of(math.nan)
    with pytest.raises(Rejected, match="timeout: must be a number of seconds, got True"):
        seconds_of(True)


def test_arrays_and_what_is_no_sequence() -> None:
    ids = np.array([1, 2, 3])
    assert list(Parameters(token_ids=ids).message().token_ids.ids) == [1, 2, 3]  # type: ignore[arg-type]
    for field in ("token_ids", "stop"):
        ask = {"prompt": "a", field: 5} if field == "stop" else {field: 5}
        with pytest.raises(Rejected, match=field):
            Parameters(**ask).message()


def test_biases_and_bad_words() -> None:
    made = Parameters(
        messages=[("user", "x")],
        logit_bias={5: 1, "7": -2.5},  # type: ignore[dict-item]  # keys as JSON has them
        bad_words="one",
        bad_word_ids=[[1, 2], np.array([3])],  # type: ignore[list-item]
        chat_template_kwargs={"enable_thinking": False, "names": ["é"]},
    ).message()
    assert dict(made.sampling.logit_bias) == {5: 1.0, 7: -2.5}
    assert list(made.sampling.bad_words) == ["one"]
    assert [list(one.ids) for one in made.sampling.bad_word_ids] == [[1, 2], [3]]
    given = json.loads(made.chat.template_kwargs)
    assert given == {"enable_thinking": False, "names": ["é"]}
    base = Sampling(logit_bias={1: 2.0}, bad_words=("a",), bad_word_ids=((4,),))
    whole = Parameters(prompt="x", sampling=base, bad_words=["b"]).message().sampling
    assert dict(whole.logit_bias) == {1: 2.0}
    assert list(whole.bad_words) == ["b"]
    assert [list(one.ids) for one in whole.bad_word_ids] == [[4]]
    assert hash(base) == hash(Sampling(bad_words=("a",), bad_word_ids=((4,),)))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"logit_bias": [1]}, "logit_bias: must be a mapping of token ids to numbers, got [1]"),
        ({"logit_bias": {1: "x"}}, "logit_bias[1]: must be a number, got 'x'"),
        ({"logit_bias": {1: True}}, "logit_bias[1]: must be a number, got True"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias[-1]: must be for an integer from 0 to 42949672"),
        ({"logit_bias": {"a": 2.0}}, "logit_bias['a']: must be for an integer from 0 to 42949672"),
        ({"bad_words": [5]}, "bad_words[0]: must be text (a str)"),
        ({"bad_word_ids": [5]}, "bad_word_ids[0]: must be a list, each an integer"),
        ({"bad_word_ids": [[-5]]}, "bad_word_ids[0][0]: must be an integer from 0"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs: goes with messages"),
        (
            {"messages": [("user", "x")], "chat_template_kwargs": [1]},
            "chat_template_kwargs: must be a mapping that JSON can express, got [1]",
        ),
        (
            {"messages": [("user", "x")], "chat_template_kwargs": {"a": math.nan}},
            "chat_template_kwargs: must be a mapping that JSON can express: ",
        ),
        (
            {"messages": [("user", "x")], "chat_template_kwargs": {"a": {1, 2}}},
            "chat_template_kwargs: must be a mapping that JSON can express: ",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(given: dict[str, object], told: str) -> None:
    source = {} if "messages" in given else {"prompt": "x"}
    make: Callable[..., Parameters] = Parameters
    with pytest.raises(Rejected, match=re.escape(told)):
        make(**source, **given).message()


async def test_the_routers_refusals_name_the_parameter() -> None:
    async with running([decode_worker()]) as router, AsyncClient(router.address) as client:
        turns = [("user", "x")]
        with pytest.raises(Rejected, match=r"^chat_template_kwargs\.tools: is set by"):
            await client.complete(messages=turns, chat_template_kwargs={"tools": []})
        with pytest.raises(Rejected, match=r"^logit_bias\[9\]: must lie in \[-100, 100\], got 200"):
            await client.complete(prompt="x", logit_bias={9: 200})
        with pytest.raises(Rejected, match=r"^bad_words\[0\]: ' ' has no token"):
            await client.complete(prompt="x", bad_words=" ")


def test_an_unset_seed_is_drawn_whether_or_not_a_sampling_is_given() -> None:
    plain = Parameters(prompt="a").message()
    given = Parameters(prompt="a", sampling=Sampling()).message()
    assert not given.sampling.HasField("seed")
    assert not plain.sampling.HasField("seed")
    assert Parameters(prompt="a", sampling=Sampling(seed=0)).message().sampling.seed == 0
    assert Parameters(prompt="a", sampling=Sampling(seed=0)).message().sampling.HasField("seed")


async def test_parameters_of_other_types_are_named() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        generate: Callable[..., object] = client.generate  # a type checker refuses all of these
        with pytest.raises(TypeError, match="the prompt too: prompt="):
            generate("Once")
        with pytest.raises(Rejected, match=r"^sampling: must be a kvrelay\.Sampling, got \{"):
            generate(prompt="a", sampling={"seed": 1})
        with pytest.raises(Rejected, match=r"^timeout: must be a number of seconds, got 'x'"):
            generate(prompt="a", timeout="x")


def test_a_request_that_is_too_large_names_its_input() -> None:
    """The channel's own words for it are gRPC's."""
    with Client("127.0.0.1:1", ChannelOptions(max_message_bytes=100)) as client:
        generate: Callable[..., object] = client.generate
        for given in (
            {"prompt": "x" * 200},
            {"token_ids": [1] * 200},
            {"messages": [("u", "x" * 99)]},
        ):
            (name,) = given
            with pytest.raises(
                Rejected, match=r"the request has \d+ bytes, more than 100"
            ) as caught:
                generate(**given)
            assert caught.value.field == name


ERRORS = [
    Rejected("field", "message"),
    NotFound("message"),
    Mismatch("field", "message"),
    Exhausted("message", 2.5),
    Unavailable("message"),
    Draining("message"),
    DeadlineExceeded("message"),
    Corrupt("field", "message"),
    Unservable("message"),
    NotInstalled("message"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_cross_process_pools(error: KvrelayError) -> None:
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301 - its own bytes
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
