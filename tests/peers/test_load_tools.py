"""The field's load tools, unchanged: their counts are those of the server, to the token."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.door.vllm import COMMAND
from tests.peers.pins import AIPERF, GUIDELLM, VLLM
from tests.peers.rig import MODEL, OFFLINE, RUN_SECONDS, Served, environment_of, foreign, run

pytestmark = pytest.mark.peer
REQUESTS = 24
STREAMS = 4
PROMPT_TOKENS = 64
NEW_TOKENS = 20
ALL = REQUESTS * NEW_TOKENS
TEMPLATE_TOKENS = 4
"""What the chat template adds to a message of the user."""


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(served: Served, tmp_path: Path, kind: str) -> None:
    aiperf = environment_of(AIPERF)
    before = served.generated
    folder = tmp_path / "out"
    given = {
        "model": served.model,
        "url": served.http,
        "endpoint-type": kind,
        "tokenizer": MODEL,
        "synthetic-input-tokens-mean": PROMPT_TOKENS,
        "synthetic-input-tokens-stddev": 0,
        "output-tokens-mean": NEW_TOKENS,
        "extra-inputs": "ignore_eos:true",
        "request-count": REQUESTS,
        "concurrency": STREAMS,
        "random-seed": 7,
        "ui": "none",
        "artifact-dir": folder,
    }
    # With HF_HUB_OFFLINE, even of 0, it takes a folder for the name of a model.
    online = dict.fromkeys(OFFLINE, "")
    run([aiperf.program("aiperf"), "profile", "--streaming", *flags(given)], tmp_path, online)
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert found["is_complete"]
    assert not found["error_summary"]
    assert found["completed_request_count"]["avg"] == REQUESTS
    assert found["request_error_rate"]["avg"] == 0
    assert found["total_usage_completion_tokens"]["avg"] == ALL == served.generated - before
    assert found["usage_prompt_tokens"]["count"] == REQUESTS
    if kind == "chat":
        assert found["usage_prompt_tokens"]["avg"] == PROMPT_TOKENS + TEMPLATE_TOKENS
    for name in ("time_to_first_token", "inter_token_latency"):
        assert found[name]["count"] == REQUESTS
        assert found[name]["avg"] > 0


def test_guidellm(served: Served, tmp_path: Path) -> None:
    guidellm = environment_of(GUIDELLM)
    before = served.generated
    path = tmp_path / "report.json"
    given = {
        "backend": f"kind=openai_http,target={served.http},model={served.model}",
        "tokenizer": f"kind=huggingface_auto,model={MODEL}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
        "profile": f"kind=concurrent,streams={STREAMS}",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "output": f"kind=json,path={path}",
    }
    run([guidellm.program("guidellm"), "run", "--disable-console", *flags(given)], tmp_path)
    (found,) = json.loads(path.read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["request_totals"] == totals
    assert metrics["output_token_count"]["successful"]["total_sum"] == ALL
    assert served.generated - before == ALL
    prompts = metrics["prompt_token_count"]["successful"]
    assert prompts["total_sum"] == REQUESTS * (PROMPT_TOKENS + TEMPLATE_TOKENS)
    assert metrics["time_to_first_token_ms"]["successful"]["count"] == REQUESTS
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
    assert metrics["inter_token_latency_ms"]["successful"]["count"] == ALL - REQUESTS
    assert all(one["output"] for one in found["requests"]["successful"])


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_vllm_bench_serve(served: Served, tmp_path: Path, backend: str, endpoint: str) -> None:
    vllm = environment_of(VLLM)
    before = served.generated
    given = {
        "backend": backend,
        "endpoint": endpoint,
        "base-url": served.http,
        "model": served.model,
        "tokenizer": MODEL,
        "dataset-name": "random",
        "random-input-len": PROMPT_TOKENS,
        "random-output-len": NEW_TOKENS,
        "num-prompts": REQUESTS,
        "max-concurrency": STREAMS,
        "seed": 7,
        "result-dir": tmp_path,
        "result-filename": "result.json",
        "percentile-metrics": "ttft,tpot,itl,e2el",
    }
    words = ["bench", "serve", "--ignore-eos", "--save-result", "--save-detailed", *flags(given)]
    run([vllm.program("python"), "-c", COMMAND, *words], tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())
    assert [error for error in found["errors"] if error] == []
    assert found["completed"] == REQUESTS
    assert found["failed"] == 0
    assert found["output_lens"] == [NEW_TOKENS] * REQUESTS
    # Its own trial request, before the others, is not in the result.
    assert served.generated - before in (ALL, ALL + NEW_TOKENS)
    assert min(found["ttfts"]) > 0
    assert all(found["itls"])
    assert found["mean_itl_ms"] > 0
    assert all(found["generated_texts"])


def test_the_workarounds_for_vllm_are_still_needed(tmp_path: Path) -> None:
    """The command of the package for CPUs; the parser for which the door leaves ids out."""
    vllm = environment_of(VLLM)
    done = _said(tmp_path, vllm.program("vllm"), "--version")
    assert "PackageNotFoundError" in done.stderr
    parse = (
        "from vllm.benchmarks.lib.endpoint_request_func import StreamedResponseHandler as Handler\n"
        "print(Handler().add_chunk(b'id: 1\\ndata: {}\\n\\n'))"
    )
    done = _said(tmp_path, vllm.program("python"), "-c", parse)
    assert done.stdout.splitlines()[-1] == r"['id: 1\ndata: {}']", done.stderr


def _said(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=foreign(folder),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )


def flags(given: Mapping[str, object]) -> list[str]:
    """The command line of options."""
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]
