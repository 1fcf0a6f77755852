"""Unmodified vLLM servers as decode workers: streams, resumes, refusals, accounts.

A stand-in replies as vLLM does; tests/vllm asks the real one.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from kvrelay.errors import KvrelayError, Rejected, Unavailable, Unservable
from kvrelay.v1 import router_pb2, types_pb2
from router.workers.stock_rules import SEED_BITS, request_of
from tests.router.fakes import ids, model, running
from tests.router.rig import PROMPT, failing, request, until
from tests.router.stock_server import MODEL, VOCAB, StockServer, answer, started

COUNT = 40


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    """A model folder, whose config has the size of the vocabulary."""
    folder = shutil.copytree(model(), tmp_path / MODEL)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return {"model": str(folder), "disaggregate": "auto"}


def body_length(body: dict[str, object]) -> int:
    return len(body["token_ids"])  # type: ignore[arg-type]


def greedy(count: int = COUNT, **sampling: object) -> router_pb2.GenerateRequest:
    return request(count, temperature=0.0, ignore_eos=True, **sampling)


async def test_an_answer_and_its_account(settings: dict[str, object]) -> None:
    server = StockServer()
    async with (
        started(server) as urls,
        running([], 1, decode=urls, **settings) as router,
    ):
        responses = await router.generate(greedy())
        (listed,) = router.registry.workers
    assert ids(responses) == answer(PROMPT, COUNT)
    assert responses[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert not responses[0].HasField("cached_prompt_tokens")  # such a server tells it at the end
    usage = responses[-1].usage
    (leg,) = usage.legs
    assert (usage.cached_prompt_tokens, usage.recomputed) == (3, 0)
    assert (leg.length, leg.local, leg.computed) == (len(PROMPT), 3, len(PROMPT) - 3)
    assert (leg.generated, leg.executed, leg.lost) == (COUNT, len(PROMPT) - 3 + COUNT - 1, False)
    assert listed.info is not None
    assert listed.info.numeric_profile == "stock-vllm-0.32.0"


async def test_a_server_that_tells_no_hits_has_no_account(settings: dict[str, object]) -> None:
    server = StockServer(details=False)
    async with started(server) as urls, running([], 1, decode=urls, **settings) as router:
        responses = await router.generate(greedy())
    usage = responses[-1].usage
    (leg,) = usage.legs
    assert (leg.generated, leg.lost, leg.admission_unknown) == (COUNT, True, True)
    assert not usage.HasField("cached_prompt_tokens")


@pytest.mark.parametrize("after", [1, 17, COUNT - 1])
async def test_a_stream_continues_on_another_server(
    settings: dict[str, object], after: int
) -> None:
    deaths = [after]
    servers = [StockServer(deaths=deaths), StockServer(deaths=deaths)]
    async with started(*servers) as urls, running([], 2, decode=urls, **settings) as router:
        responses = await router.generate(greedy(min_tokens=COUNT))
    assert ids(responses) == answer(PROMPT, COUNT)
    first, second = responses[-1].usage.legs
    assert (first.generated, first.lost, second.generated) == (after, True, COUNT - after)
    resumed = max((body for server in servers for body in server.bodies), key=body_length)
    assert resumed["token_ids"] == PROMPT + answer(PROMPT, after)
    params = resumed["sampling_params"]
    assert isinstance(params, dict)
    assert (params["max_tokens"], params["min_tokens"]) == (COUNT - after, COUNT - after)


async def test_a_sampled_stream_continues_where_seeds_decide(settings: dict[str, object]) -> None:
    deaths = [5]
    servers = [StockServer(deaths=deaths), StockServer(deaths=deaths)]
    async with (
        started(*servers) as urls,
        running([], 2, decode=urls, stock_seeds=True, **settings) as router,
    ):
        responses = await router.generate(request(10, temperature=1.0, ignore_eos=True))
    assert ids(responses) == answer(PROMPT, 10)
    bodies = [body for server in servers for body in server.bodies]
    assert [body["sampling_params"]["seed"] for body in bodies] == [5, 5]  # type: ignore[index]


async def test_a_sampled_stream_ends_where_they_do_not(settings: dict[str, object]) -> None:
    deaths = [5]
    servers = [StockServer(deaths=deaths), StockServer(deaths=deaths)]
    async with started(*servers) as urls, running([], 2, decode=urls, **settings) as router:
        error = await failing(router.generate(request(10, temperature=1.0, ignore_eos=True)))
    assert isinstance(error, Unservable)
    assert "sampling without --stock-seeds" in str(error)
    (body,) = (body for server in servers for body in server.bodies)
    assert body["sampling_params"]["seed"] is None  # type: ignore[index]


async def test_a_client_that_leaves_closes_the_connection(settings: dict[str, object]) -> None:
    server = StockServer(hangs=True)
    async with started(server) as urls, running([], 1, decode=urls, **settings) as router:
        call = router.call(greedy())
        await call.read()
        assert server.open == 1
        call.cancel()
        async with asyncio.timeout(10):
            await server.left.wait()


async def test_log_probabilities_are_passed_on_likeliest_first(
    settings: dict[str, object],
) -> None:
    server = StockServer()
    async with started(server) as urls, running([], 1, decode=urls, **settings) as router:
        responses = await router.generate(greedy(2, logprobs=2))
    tokens = [token for response in responses for token in response.tokens]
    assert len(tokens) == 2
    for token in tokens:
        assert token.logprobs.chosen.token_id == token.id
        assert [one.logprob for one in token.logprobs.top] == [-0.5, -0.7]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [((400, '{"error": "max_tokens"}'), Rejected), ((500, "oops"), Unavailable)],
)
async def test_refusals_of_the_server_reach_the_client(
    settings: dict[str, object], reply: tuple[int, str], kind: type[KvrelayError]
) -> None:
    server = StockServer(reply=reply)
    async with started(server) as urls, running([], 1, decode=urls, **settings) as router:
        error = await failing(router.generate(greedy()))
    assert type(error) is kind
    assert reply[1] in str(error)


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (StockServer(version="0.31.2"), "vLLM 0.31.2 was not tested"),
        (StockServer(model="other"), "does not serve 'model'"),
        (StockServer(scale_out=False), "start it with --enable-scale-out"),
    ],
)
async def test_a_server_that_does_not_fit_is_listed_and_not_used(
    settings: dict[str, object], server: StockServer, reason: str
) -> None:
    async with started(server) as urls, running([], 0, decode=urls, **settings) as router:
        (listed,) = router.registry.workers
        assert reason in str(listed.problem)


def leg(*so_far: int, **sampling: object) -> types_pb2.Leg:
    return types_pb2.Leg(
        request_id="r",
        prompt_token_ids=[1, 2],
        output_token_ids=so_far,
        max_tokens=10,
        sampling=types_pb2.Sampling(**sampling),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"temperature": 1.0}, "sampling without --stock-seeds"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"stop": ["x"]}, "stop strings"),
    ],
)
def test_what_counts_output_tokens_is_refused_across_a_resume(
    sampling: dict[str, object], reason: str
) -> None:
    given = {"temperature": 0.0, **sampling}
    request_of(leg(**given), False)
    with pytest.raises(Unservable, match=reason):
        request_of(leg(7, **given), False)


@pytest.mark.parametrize("so_far", [(), (7,)])
def test_what_such_a_server_never_serves(so_far: tuple[int, ...]) -> None:
    words = [types_pb2.TokenSequence(ids=[3])]
    for given in ({"bad_word_ids": words}, {"structured_output": {"json_object": True}}):
        with pytest.raises(Unservable, match="does not serve"):
            request_of(leg(*so_far, temperature=0.0, **given), True)


def test_the_request_has_every_field_that_was_given() -> None:
    given = leg(
        7,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        seed=2**64 - 1,
        stop_token_ids=[3],
        min_tokens=4,
        logit_bias={9: 1.5},
    )
    given.tenant_salt = b"s" * 32
    made = request_of(given, True)
    params = made["sampling_params"]
    assert isinstance(params, dict)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert params[name] == getattr(given.sampling, name)
    assert params["stop_token_ids"] == (3,)
    assert (params["seed"], params["min_tokens"], params["max_tokens"]) == (SEED_BITS, 3, 9)
    assert params["logit_bias"] == {"9": 1.5}
    assert made["token_ids"] == [1, 2, 7]
    assert made["cache_salt"] == (b"s" * 32).hex()


@pytest.mark.parametrize(
    ("field", "entry"), [("prefill", "http://127.0.0.1:8000"), ("decode", "http://127.0.0.1:x")]
)
async def test_addresses_that_are_refused_at_start(
    settings: dict[str, object], field: str, entry: str
) -> None:
    with pytest.raises(Rejected, match=field):
        async with running([], 0, **{"decode": ("127.0.0.1:1",), **settings, field: (entry,)}):
            pass


@pytest.mark.parametrize("version", [None, 3, ["0.32.0"]])
async def test_a_server_that_answers_oddly_is_asked_again(
    settings: dict[str, object], version: object
) -> None:
    """A proxy may answer in its place; the watcher goes on."""
    server = StockServer(version=version)  # type: ignore[arg-type]
    async with started(server) as urls, running([], 0, decode=urls, **settings) as router:
        (listed,) = router.registry.workers
        await until(lambda: "cannot be read" in str(listed.problem))
        server.version = "0.32.0"
        await router.settled(1)
        assert ids(await router.generate(greedy())) == answer(PROMPT, COUNT)


async def test_a_server_that_was_started_again_is_another_worker(
    settings: dict[str, object],
) -> None:
    server = StockServer()
    async with started(server) as urls, running([], 1, decode=urls, **settings) as router:
        (listed,) = router.registry.workers
        before = listed.key
        await server.stop()
        await router.settled(0)
        await server.restart()
        await router.settled(1)
        assert listed.key != before
        assert ids(await router.generate(greedy())) == answer(PROMPT, COUNT)
