"""Unchanged clients at a real cluster: OpenAI's SDK, sync and async, and curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionMessageParam
from openai.types.chat.chat_completion import Choice

from benchmarks.random_model import make_model
from kvrelay import Client
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.supervisor import Cluster
from tests.router.http.rig import events

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SAID = "The copper mask stands in Boston."
ASKED = "Where is the copper mask?"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": SAID},
    {"role": "user", "content": ASKED},
]

PARAMETERS = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["days", "unit"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}
    for name, parameters in (("weather", PARAMETERS), ("stop", NOTHING))
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = ClusterConfig(port=0, http_port=0, threads=1, store_budget=64 << 20)
    with Cluster(config) as made:
        yield made


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of random weights, whose chat template takes tools."""
    model = make_model("llama-tiny", tmp_path_factory.mktemp("model"), "float32")
    config = ClusterConfig(
        model=str(model), port=0, http_port=0, num_blocks=256, store_budget=64 << 20, threads=1
    )
    with (
        Cluster(config) as made,
        OpenAI(base_url=f"{made.http}/v1", api_key="none", max_retries=0) as sdk,
    ):
        yield sdk


@pytest.fixture
def sdk(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_same_tokens_as_through_grpc(cluster: Cluster, sdk: OpenAI) -> None:
    with Client(cluster.router) as client:
        pairs = [("system", SAID), ("user", ASKED)]
        ours = client.complete(messages=pairs, temperature=0, max_tokens=40)
    theirs = sdk.chat.completions.create(
        model="recall",
        messages=MESSAGES,
        temperature=0,
        max_tokens=40,
        logprobs=True,
        top_logprobs=2,
    )
    choice = theirs.choices[0]
    assert choice.message.content == ours.text
    assert "Boston" in ours.text
    assert choice.finish_reason == ours.finish_reason == "stop"
    assert theirs.usage is not None
    assert theirs.usage.completion_tokens == ours.usage.completion_tokens
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == ours.usage.completion_tokens
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)


def test_the_shipped_model_has_a_name(cluster: Cluster, sdk: OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert model.id == "recall"
    assert sdk.models.retrieve("recall").id == "recall"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("model")


def test_streams_and_errors(sdk: OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="recall", messages=MESSAGES, temperature=0, max_tokens=40, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "Boston" in text
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="recall", messages=MESSAGES, top_p=7)
    assert caught.value.param == "top_p"


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["auto", "none", "required", "weather", "stop"])
def test_the_client_s_own_stream_has_the_calls_of_the_whole_answer(
    caller: OpenAI, choice: str, parallel: bool
) -> None:
    """Its helper puts the deltas together; a forced call is one of the schema."""
    forced = choice in ("required", "weather", "stop")
    named = {"type": "function", "function": {"name": choice}}
    body: dict[str, object] = {
        "model": caller.models.list().data[0].id,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": named if choice in ("weather", "stop") else choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 600,
        "seed": 2,
    }
    if not forced:
        body["stop"] = [" n", " k"]  # such a model does not end by itself
    whole = caller.chat.completions.create(**body).choices[0]  # type: ignore[call-overload]
    with caller.chat.completions.stream(**body) as stream:  # type: ignore[arg-type]
        assembled = stream.get_final_completion().choices[0]
    assert calls_of(assembled) == calls_of(whole)
    assert assembled.finish_reason == whole.finish_reason
    assert (assembled.message.content or None) == (whole.message.content or None)
    assert bool(whole.message.content) != forced
    assert bool(calls_of(whole)) == forced
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    if choice in ("weather", "stop"):
        assert [name for _, name, _ in calls_of(whole)] == [choice]
    if not parallel:
        assert len(calls_of(whole)) <= 1
    for _, name, arguments in calls_of(whole):
        fields = {"weather": {"days", "unit"}, "stop": set[str]()}
        assert json.loads(arguments).keys() == fields[name]


def calls_of(choice: Choice) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call."""
    calls = choice.message.tool_calls or ()
    functions = [one for one in calls if isinstance(one, ChatCompletionMessageFunctionToolCall)]
    return [(one.id, one.function.name, one.function.arguments) for one in functions]


async def test_a_stream_that_is_left_frees_its_slot(cluster: Cluster) -> None:
    """By the router's own count."""
    url = cluster.http or ""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="recall",
            prompt="The",
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        assert await _running(url) == 1
        await stream.close()
        async with asyncio.timeout(20):
            while await _running(url):
                pass


async def _running(url: str) -> int:
    async with httpx2.AsyncClient(base_url=url) as client:
        page = (await client.get("/metrics")).text
    (line,) = [
        one for one in page.splitlines() if one.startswith("kvrelay:router_running_requests{")
    ]
    return int(float(line.split()[1]))


async def test_log_probabilities_and_offsets_continue_after_a_resume(cluster: Cluster) -> None:
    body = {
        "prompt": SAID,
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 2,
    }
    async with httpx2.AsyncClient(base_url=cluster.http or "", timeout=60) as client:
        whole = await events(client, body)
        expected = _logprobs(whole)
        assert len(expected) == 60
        offsets = [offset for _, _, offset in expected]
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        # An event has several tokens if they were made faster than it was written.
        cuts = [number for number, event in enumerate(whole, 1) if _logprobs([event])][:-1]
        for cut in {cuts[0], cuts[len(cuts) // 2], cuts[-1]}:
            rest = await events(client, body, last=whole[cut - 1][0])
            assert _logprobs(whole[:cut]) + _logprobs(rest) == expected


def test_log_probabilities_of_parts_of_characters_have_their_bytes(sdk: OpenAI) -> None:
    """The shipped model has tokens of single bytes: joined, they are the text."""
    wanted = "日é😀x"
    body = {"structured_outputs": {"choice": [wanted]}, "return_token_ids": True}
    chat = sdk.chat.completions.create(
        model="recall", messages=MESSAGES, logprobs=True, top_logprobs=1, extra_body=body
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    content = logprobs.content[:-1]  # the last one is the end of the answer
    assert b"".join(bytes(one.bytes or ()) for one in content).decode() == wanted
    assert content[0].token == r"\xe6"
    assert content[-1].token == "x"
    assert all(one.top_logprobs[0].bytes == one.bytes for one in content)
    made = sdk.completions.create(model="recall", prompt="The", logprobs=3, extra_body=body)
    columns = made.choices[0].logprobs
    assert columns is not None
    assert columns.tokens is not None
    assert columns.tokens[:3] == [r"bytes:\xe6", r"bytes:\x97", r"bytes:\xa5"]
    assert columns.text_offset == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert made.choices[0].text == wanted


def _logprobs(found: list[tuple[str, str]]) -> list[tuple[str, float, int]]:
    """Token, log probability and offset of each token."""
    chunks = [json.loads(data) for _, data in found if data != "[DONE]"]
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    columns = "tokens", "token_logprobs", "text_offset"
    return [
        row for one in parts if one for row in zip(*(one[name] for name in columns), strict=True)
    ]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(cluster: Cluster) -> None:
    body = json.dumps({"messages": MESSAGES, "temperature": 0, "stream": True})
    done = subprocess.run(
        [
            *("curl", "-sS", "-N", f"{cluster.http}/v1/chat/completions", "-d", body),
            *("-H", "Content-Type: application/json"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert "Boston" in text


def test_the_first_example_of_the_readme(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word by word, but for the port."""
    page = (ROOT / "README.md").read_text()
    before, _, rest = page.partition("```python\n")
    assert "`make up`" in before.rpartition("##")[2]
    example = rest.partition("```")[0]
    assert "http://127.0.0.1:8000/v1" in example
    names: dict[str, openai.types.Completion] = {}
    exec(example.replace("http://127.0.0.1:8000", cluster.http or ""), names)
    answer = names["answer"]
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 64
    assert capsys.readouterr().out == f"{answer.choices[0].text}\n"
