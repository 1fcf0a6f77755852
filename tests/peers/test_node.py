"""Node's clients: OpenAI's SDK at the HTTP door, ``@grpc/grpc-js`` at the gRPC door."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai import OpenAI

from benchmarks.random_model import make_model
from kvrelay import Client
from kvrelay.cluster.layout import ROOT
from tests.peers.nodejs import MESSAGES, PAIRS, command, go_on, read, talking
from tests.peers.rig import ENDLESS, LEFT_SECONDS, Served, run, seconds_until_idle, up

pytestmark = pytest.mark.peer
TRIES = 3


def test_the_sdk_reads_what_the_python_sdk_reads(served: Served, tmp_path: Path) -> None:
    words = command(tmp_path, "chat.mjs", f"{served.http}/v1", served.model, MESSAGES)
    said = json.loads(run(words, tmp_path).stdout)
    with OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        ours = client.chat.completions.create(
            model=served.model, messages=json.loads(MESSAGES), temperature=0, max_tokens=40
        )
    text, usage = ours.choices[0].message.content, ours.usage
    assert text is not None
    assert "Boston" in text
    assert usage is not None
    whole, streamed = said["whole"], said["streamed"]
    assert whole["choices"][0]["message"]["content"] == streamed["text"] == text
    assert whole["choices"][0]["finish_reason"] == streamed["finish"] == "stop"
    assert streamed["chunks"] > 1, "tokens that come at once may share a chunk; usage has its own"
    for theirs in (whole["usage"], streamed["usage"]):
        assert theirs["prompt_tokens"] == usage.prompt_tokens
        assert theirs["completion_tokens"] == usage.completion_tokens
    assert said["refused"] == {"name": "BadRequestError", "status": 400, "param": "top_p"}
    assert said["models"] == [served.model]


def test_the_sdk_parses_json(served: Served, tmp_path: Path) -> None:
    words = command(tmp_path, "parse.mjs", f"{served.http}/v1", served.model, MESSAGES)
    value = json.loads(run(words, tmp_path).stdout)
    assert set(value) == {"city", "count"}
    assert value["city"] in ("Boston", "Lisbon")
    assert value["count"] in (1, 2, 3)


def test_the_sdk_calls_functions(tmp_path: Path) -> None:
    """Of a model with random weights: the chat template of the shipped one takes no tools."""
    model = make_model("llama-tiny", tmp_path / "tiny", "float32")
    with up(tmp_path, "--model", str(model)) as served:
        words = command(tmp_path, "tools.mjs", f"{served.http}/v1", "tiny", MESSAGES)
        said = json.loads(run(words, tmp_path).stdout)
    (call,), (streamed,) = (said[name]["message"]["tool_calls"] for name in ("whole", "streamed"))
    assert call["id"] == streamed["id"]
    assert call["function"]["name"] == streamed["function"]["name"] == "place"
    assert call["function"]["arguments"] == streamed["function"]["arguments"]
    value = json.loads(call["function"]["arguments"])
    assert value["city"] in ("Boston", "Lisbon")
    assert value["count"] in (1, 2, 3)
    assert said["whole"]["finish_reason"] == said["streamed"]["finish_reason"] == "stop"
    assert said["parts"] > 3
    assert value in said["called"]
    assert said["turns"] >= 3


def test_a_stream_that_the_sdk_leaves_ends_within_a_second(served: Served, tmp_path: Path) -> None:
    """The best of three, for a machine with other work."""
    words = command(tmp_path, "leave.mjs", f"{served.http}/v1", served.model)
    took = []
    for _ in range(TRIES):
        before = served.generated
        with talking(words, tmp_path) as process:
            assert read(process) == "first"
            assert served.running == 1
            go_on(process)
            assert read(process) == "left"
            took.append(seconds_until_idle(served))
        assert served.generated - before < ENDLESS, "the answer was not generated to its end"
        if took[-1] < LEFT_SECONDS:
            break
    assert min(took) < LEFT_SECONDS, took


def test_grpc_js_gets_the_same_tokens(served: Served, tmp_path: Path) -> None:
    words = command(tmp_path, "grpc.mjs", str(ROOT / "protos"), served.grpc, MESSAGES)
    with Client(served.grpc) as client:
        ours = client.complete(messages=PAIRS, temperature=0, max_tokens=40)
    before = served.generated
    with talking(words, tmp_path) as process:
        said = json.loads(read(process))
        answer = said["answer"]
        assert said["error"] is None
        assert answer["tokens"] == list(ours.token_ids)
        assert answer["text"] == ours.text
        assert answer["finish"] == "FINISH_REASON_STOP"
        assert answer["usage"]["completionTokens"] == ours.usage.completion_tokens
        assert said["refused"]["code"] == 3, "INVALID_ARGUMENT"
        assert "max_tokens" in said["refused"]["details"]
        assert served.generated - before == ours.usage.completion_tokens

        assert read(process) == "first"
        assert served.running == 1
        go_on(process)
        assert json.loads(read(process))["left"]["code"] == 1, "CANCELLED"
        seconds_until_idle(served)
    assert served.generated - before < ENDLESS
