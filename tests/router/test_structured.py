"""Structured output at the router: compiled before admission, off the event loop, by the field."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import openai
import pytest

from kvrelay import AsyncClient
from kvrelay.errors import DeadlineExceeded, Rejected
from kvrelay.structured import StructuredOutput
from kvrelay.text.structured import GrammarCompiler, TokenGrammar
from kvrelay.text.tokenizer import load_tokenizer
from tests.router import fakes
from tests.router.fakes import answer, decode_worker, prefill_worker, running
from tests.router.http.rig import openai_of
from tests.text.kinds import write

PROMPT = [5, 6, 7]
EOS = 1
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"json": SCHEMA}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with an end-of-sequence token."""
    made = tmp_path / "tiny"
    made.mkdir()
    write("byte_level", made)
    (made / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return made


async def test_every_leg_carries_it(folder: Path) -> None:
    workers = [prefill_worker(), decode_worker()]
    async with (
        running(workers, model=str(folder)) as router,
        AsyncClient(router.address) as client,
    ):
        for given in ({"structured_output": JSON}, {"response_format": wrapped()}):
            made = await client.complete(token_ids=PROMPT, max_tokens=4, seed=3, **given)
            assert made.token_ids == tuple(answer(PROMPT, 4, 3))
    for worker in workers:
        for leg in worker.legs:
            assert json.loads(leg.sampling.structured_output.json_schema) == SCHEMA


def wrapped() -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("wanted", "field", "message"),
    [
        ({"json": {"not": {}}}, "json_schema", r'Unimplemented keys: \["not"\]'),
        ({"json": '{"type"'}, "json_schema", r"line 1 column 8"),
        ({"regex": "a(b"}, "regex", "unclosed group"),
        ({"grammar": "start: x"}, "grammar", r"at 1\(8\): unknown name"),
        (StructuredOutput(choice=("a", "")), "choice[1]", "is empty"),
        (StructuredOutput(regex="x" * 70_000), "regex", "70000 bytes, more than the limit"),
    ],
)
async def test_a_wrong_one_reaches_no_worker(
    folder: Path, wanted: dict[str, object] | StructuredOutput, field: str, message: str
) -> None:
    workers = [prefill_worker(), decode_worker()]
    async with (
        running(workers, model=str(folder)) as router,
        AsyncClient(router.address) as client,
    ):
        with pytest.raises(Rejected, match=message) as caught:
            await client.complete(token_ids=PROMPT, structured_output=wanted)
        assert caught.value.field == f"structured_output.{field}"
        assert not router.service.queue_status().running
    assert not any(worker.legs for worker in workers)


async def test_a_slow_grammar_delays_its_own_request_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, compiling = threading.Event(), threading.Event()
    compile_now = GrammarCompiler.compile

    def slow(self: GrammarCompiler, wanted: StructuredOutput) -> TokenGrammar:
        compiling.set()
        go.wait()
        return compile_now(self, wanted)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    async with (
        running([prefill_worker(), decode_worker()], model=str(folder)) as router,
        AsyncClient(router.address) as client,
    ):
        try:
            waits = asyncio.ensure_future(
                client.complete(token_ids=PROMPT, max_tokens=3, seed=1, structured_output=JSON)
            )
            await asyncio.to_thread(compiling.wait)
            done = await client.complete(token_ids=PROMPT, max_tokens=3, seed=2)
            assert done.token_ids == tuple(answer(PROMPT, 3, 2))
            assert not waits.done()
            with pytest.raises(DeadlineExceeded):
                await client.complete(token_ids=PROMPT, structured_output=JSON, timeout=0.3)
        finally:
            go.set()
        assert (await waits).token_ids == tuple(answer(PROMPT, 3, 1))


async def test_an_output_that_has_ended_needs_no_worker(folder: Path) -> None:
    """The end of the text ends the request, also before ``min_tokens`` and with ``ignore_eos``."""
    workers = [prefill_worker(), decode_worker()]
    async with (
        running(workers, model=str(folder)) as router,
        AsyncClient(router.address) as client,
    ):
        made = await client.complete(
            token_ids=PROMPT,
            output_token_ids=[40, EOS],
            max_tokens=20,
            min_tokens=9,
            ignore_eos=True,
            seed=1,
            structured_output=JSON,
        )
        assert (made.token_ids, made.finish_reason) == ((), "stop")
    assert not any(worker.legs for worker in workers)


async def test_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "tokenizer", lambda: load_tokenizer(tmp_path))
    async with (
        running([prefill_worker(), decode_worker()]) as router,
        AsyncClient(router.address) as client,
    ):
        with pytest.raises(Rejected, match=r"structured_output: needs a tokenizer, .* leave it"):
            await client.complete(token_ids=PROMPT, structured_output=JSON)


async def test_one_way_to_ask(folder: Path) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Rejected, match=r"response_format: structured_output is given too"):
            await client.complete(
                prompt="x", structured_output=JSON, response_format={"type": "text"}
            )
        with pytest.raises(TypeError, match="use structured_output"):
            await client.complete(prompt="x", guided_json=SCHEMA)  # type: ignore[call-arg]


async def test_over_http(folder: Path) -> None:
    """Under the names of OpenAI and of vLLM, for completions and chats."""
    worker = decode_worker()
    async with (
        running([worker], model=str(folder), http_port=0, disaggregate="never") as router,
        openai_of(router) as client,
    ):
        await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3, extra_body={"structured_outputs": JSON}
        )
        await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=3,
            extra_body={"response_format": wrapped()},
        )
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(
                model="tiny",
                prompt=PROMPT,
                extra_body={"structured_outputs": {"regex": "a(b"}},
            )
        assert caught.value.param == "structured_outputs.regex"
        assert "unclosed group" in caught.value.message
    assert len(worker.legs) == 2
    for leg in worker.legs:
        assert json.loads(leg.sampling.structured_output.json_schema) == SCHEMA
