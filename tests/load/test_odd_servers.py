"""Answers that no server should give cost one request each, never the run or what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.load import openai_server
from kvrelay.load.metrics_page import MIGRATIONS
from tests.load.rig import LoadCommand, OddServer, refusing_server, serve

SMALL = ("--prompt", 8, "--output", 4, "--requests", 2)


def choice(**fields: object) -> str:
    return json.dumps({"choices": [{"index": 0, "text": "a", **fields}]})


def usage(**counts: int) -> str:
    return json.dumps({"choices": [], "usage": counts})


END = choice(finish_reason="length")
DEEP = "[" * 200_000
ODD = {
    "ids that are texts": (choice(token_ids=["7"]), "that are not token ids: ['7']"),
    "a negative id": (choice(token_ids=[1, -1]), "that are not token ids: [1, -1]"),
    "an id of 70 bits": (choice(token_ids=[1 << 70]), "that are not token ids"),
    "ids that are true": (choice(token_ids=[True]), "that are not token ids: [True]"),
    "deep JSON": (DEEP, "an event that is not JSON: b'[[["),
    "an error that is no Unicode": ('{"error": {"message": "x\\ud800y"}}', "error: x?y"),
    "a usage of 400 digits": (usage(prompt_tokens=10**400), "a number of 401 digits"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_answer_that_cannot_be_used_has_failed(load: LoadCommand, kind: str) -> None:
    event, said = ODD[kind]
    with serve(OddServer(event, END)) as url:
        found = load(url, *SMALL, "--check", "first-run")
    assert found.levels[0]["requests"]["failed"] == 2
    assert found.status == 1
    (error,) = found.levels[0]["errors"]
    assert said in error
    assert said.split()[0] in found.out


@pytest.mark.parametrize(
    "event",
    [
        '{"choices": [{"index": 0, "text": "a\\ud800"}]}',
        choice(logprobs={"tokens": ["a"], "token_logprobs": [-(10**400)]}),
        choice(logprobs={"content": [{"token": "a", "logprob": "none"}]}),
    ],
)
def test_an_odd_detail_costs_nothing(load: LoadCommand, event: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    usual = usage(prompt_tokens=8, completion_tokens=4)
    with serve(OddServer(event, END, usual)) as url:
        found = load(url, *SMALL, "--check", "first-run", "--html", page)
    assert found.levels[0]["requests"]["done"] == 2
    assert (found.status, found.check["mismatches"]) == (0, 0), found.out
    assert page.stat().st_size


@pytest.mark.parametrize("delay", ["nan", "inf", "1e400", "-1", "soon"])
def test_a_delay_that_is_none_is_the_usual_one(load: LoadCommand, delay: str) -> None:
    with serve(OddServer('{"error": {"message": "full"}}', status=429, retry_after=delay)) as url:
        found = load(url, *SMALL)
    assert found.levels[0]["requests"]["refused"] == 2
    assert found.levels[0]["retry_after_seconds"]["mean"] == 1.0


def test_numbers_of_a_metrics_page_that_are_none_are_left_out(load: LoadCommand) -> None:
    odd = OddServer(END, usage(prompt_tokens=8, completion_tokens=4))
    name = "request_queue_time_seconds"
    lines = f"{name}_count x", f"{name}_sum NaN", f'{name}_bucket{{le="y"}} 3', f"{MIGRATIONS} inf"
    odd.pages["/metrics"] = "\n".join(lines)
    with serve(odd) as url:
        found = load(url, *SMALL)
    assert found.status == 0
    assert found.levels[0]["migrations"] is None


def test_the_key_opens_the_metrics_page_too(
    load: LoadCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_API_KEY", "of-the-operator")
    odd = OddServer(END, usage(prompt_tokens=8, completion_tokens=4))
    with serve(odd) as url:
        load(url, *SMALL)
    assert odd.keys == dict.fromkeys(("/v1/models", "/metrics"), "Bearer of-the-operator")


def test_a_page_that_never_comes_is_not_waited_for(
    load: LoadCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "PAGE_SECONDS", 0.2)
    odd = OddServer(END, usage(prompt_tokens=8, completion_tokens=4))
    odd.pages["/metrics"] = None
    with serve(odd) as url:
        found = load(url, *SMALL, "--model", "odd")
    assert (found.status, found.levels[0]["requests"]["done"]) == (0, 2)
    silent = OddServer(END)
    silent.pages["/v1/models"] = None
    with serve(silent) as url:
        found = load(url, *SMALL)
    assert found.status != 0
    assert "no answer to /v1/models within 0.2 s" in found.err


@pytest.mark.parametrize("status", [404, 503])
def test_a_server_without_the_page_of_models(load: LoadCommand, status: int) -> None:
    with refusing_server(status, "not now") as url:
        found = load(url, *SMALL)
    assert found.status != 0
    assert ("--model" in found.err) is (status == 404)
    assert ("HTTP 503: not now" in found.err) is (status == 503)


def test_a_broken_line_of_a_trace_keeps_what_was_measured(
    load: LoadCommand, tmp_path: Path
) -> None:
    trace, rows = tmp_path / "trace.jsonl", tmp_path / "rows.csv"
    line = '{"timestamp": 0, "input_length": 8, "output_length": 4, "hash_ids": [1]}\n'
    trace.write_text(line * 40 + "no line\n")
    with serve(OddServer(END, usage(prompt_tokens=8, completion_tokens=4))) as url:
        found = load(url, "--trace", trace, "--csv", rows)
    assert found.status == 2
    assert f"{trace}:41: not a request" in found.err
    (level,) = found.levels
    assert sum(level["requests"].values()) == len(rows.read_text().splitlines()) - 1


def test_one_file_cannot_be_two(load: LoadCommand, tmp_path: Path) -> None:
    same = tmp_path / "load.json"
    with serve(OddServer(END)) as url:
        found = load(url, *SMALL, "--csv", same)
    assert found.status == 2
    assert f"csv: {same} is the file of --json too" in found.err
