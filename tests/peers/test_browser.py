"""A page in headless Chromium: it streams, resumes a stream it has broken off, and leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.peers.nodejs import MESSAGES, command, go_on, read, talking
from tests.peers.rig import ENDLESS, Served, seconds_until_idle, up

pytestmark = pytest.mark.peer
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
Event = dict[str, str]


def browser() -> str:
    """The path of a Chromium that this machine has."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)} is on the path")
    return found


def text_of(events: list[Event]) -> str:
    """The text of a stream that ends as it should."""
    assert events[-1]["data"] == "[DONE]"
    chunks = [json.loads(event["data"]) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def usage(events: list[Event]) -> dict[str, int]:
    """The usage of the last event before the end."""
    found: dict[str, int] = json.loads(events[-2]["data"])["usage"]
    return found


def test_a_page_streams_resumes_and_leaves(served: Served, tmp_path: Path) -> None:
    words = command(tmp_path, "page.mjs", browser(), served.http, served.model, MESSAGES)
    with talking(words, tmp_path) as process:
        said = json.loads(read(process))
        whole, begun, resumed = (said[name]["events"] for name in ("whole", "begun", "resumed"))
        assert said["whole"]["type"].startswith("text/event-stream")
        assert "Boston" in text_of(whole)
        assert len({event["id"] for event in whole}) > len(begun) == 2
        assert text_of([*begun, *resumed]) == text_of(whole)
        for name in ("prompt_tokens", "completion_tokens"):
            assert usage(resumed)[name] == usage(whole)[name] > 0
        assert said["refused"]["status"] == 400
        assert said["refused"]["error"]["param"] == "top_p"

        for _ in ("abort", "close"):
            before = served.generated
            assert read(process) == "first"
            assert served.running == 1
            go_on(process)
            assert read(process) == "left"
            seconds_until_idle(served)
            assert served.generated - before < ENDLESS
            go_on(process)


def content(events: str) -> str:
    """The text of a stream, however many tokens each of its events has."""
    lines = [line.removeprefix("data: ") for line in events.splitlines()]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_a_page_of_another_origin(tmp_path: Path) -> None:
    """The router that lists its origin serves it, resumed streams too; another one does not."""
    words = command(tmp_path, "cors.mjs", browser(), "recall", MESSAGES)
    with talking(words, tmp_path) as process:
        origin = read(process)
        folders = tmp_path / "ours", tmp_path / "other"
        for folder in folders:
            folder.mkdir()
        with up(folders[0], "--cors-origin", origin) as ours, up(folders[1]) as other:
            go_on(process, json.dumps([ours.http, other.http]))
            said = json.loads(read(process))
    whole, resumed = said["whole"], said["resumed"]
    assert whole["status"] == resumed["status"] == 200
    assert whole["id"]
    assert whole["text"].endswith("data: [DONE]\n\n")
    assert content(resumed["text"])
    assert content(whole["text"]).endswith(content(resumed["text"]))
    assert said["refused"] == {"refused": "TypeError"}
