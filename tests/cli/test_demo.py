"""``kvrelay demo`` and ``kvrelay generate`` against real clusters of the shipped model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvrelay.cli.demo import kill
from kvrelay.cli.demo.kill import Killer, kill_demo, prompt_of
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.supervisor import Cluster
from kvrelay.recall.facts import Document, document, question
from kvrelay.recall.prompt import prompt

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def kvrelay(*argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvrelay", *argv],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        timeout=110,
        check=False,
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterConfig(port=0, prefill=0)) as made:
        yield made


def test_every_answer_of_the_demo_is_right() -> None:
    done = kvrelay("demo", "--json")
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()
    report = json.loads(done.stdout)
    assert report["right"] == report["asked"] == 6
    first, *others = report["questions"]
    assert first["source"] == "cold"
    assert {one["source"] for one in others} == {"local", "store"}
    for one in report["questions"]:
        for hop in one["hops"]:
            assert hop["local"] + hop["external"] + hop["computed"] == hop["length"]
            assert hop["failed"] == 0
    assert any(hop["lost"] for hop in report["questions"][-1]["hops"])


@pytest.mark.parametrize("target", ["decode", "prefill", "store"])
def test_a_killed_process_changes_no_token_of_the_demo(target: str) -> None:
    done = kvrelay("demo", "--kill", target, "--json")
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()
    report = json.loads(done.stdout)
    assert report["same"]
    assert report["tokens"] == 320
    assert report["killed"].startswith(target)
    assert any(hop["lost"] for hop in report["hops"]) == (target != "store")
    if target == "decode":  # 0 if the last block was full at the kill
        *_, lost, taken_over = report["hops"]
        assert lost["lost"]
        assert report["computed_again"] == taken_over["computed"] - 1


def test_a_demo_that_kills_too_late_takes_another_prompt(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[str] = []

    class Late(Killer):
        def on_tokens(self, count: int) -> None:
            if len(prompts) == 3:
                super().on_tokens(count)

    def recorded(text: Document, target: str, attempt: int) -> str:
        prompts.append(prompt_of(text, target, attempt))
        return prompts[-1]

    monkeypatch.setattr(kill, "Killer", Late)
    monkeypatch.setattr(kill, "prompt_of", recorded)
    assert kill_demo("store", cluster, document(1, 200), quiet=True) == 0
    assert json.loads(capsys.readouterr().out)["killed"] == "store"
    assert len({text[:32] for text in prompts}) == 3, "no try finds blocks of another"


def test_generate_streams_text_from_standard_input(cluster: Cluster) -> None:
    made = document(1, 20)
    asked = question(made.facts[3])
    flags = ("--router", cluster.router, "--temperature", "0")
    done = kvrelay("generate", *flags, stdin=prompt(made, asked).encode())
    assert done.stdout.decode().strip() == asked.answer
    assert done.stderr == b""


def test_generate_takes_token_ids_and_prints_the_usage(cluster: Cluster) -> None:
    flags = ("--router", cluster.router, "--max-tokens", "5", "--ignore-eos", "--json", "--usage")
    done = kvrelay("generate", "--token-ids", "10,11,12", *flags)
    report = json.loads(done.stdout)
    assert len(report["token_ids"]) == 5
    assert report["finish_reason"] == "length"
    assert report["usage"]["prompt_tokens"] == 3
    assert b"3 prompt tokens" in done.stderr


def test_generate_chats(cluster: Cluster) -> None:
    made = document(1, 20)
    asked = question(made.facts[0])
    flags = ("--router", cluster.router, "--system", made.text, "--chat", "--temperature", "0")
    assert kvrelay("generate", asked.text, *flags).stdout.decode().strip() == asked.answer


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (("--top-p", "2"), 2, "top_p"),
        (("--token-ids", "99999999"), 2, "99999999"),
        (("x", "--max-tokens", "99999999"), 2, "max_tokens"),
    ],
)
def test_what_the_cluster_refuses_is_one_line(
    cluster: Cluster, flags: tuple[str, ...], status: int, words: str
) -> None:
    text = () if "x" in flags or "--token-ids" in flags else ("x",)
    done = kvrelay("generate", *text, *flags, "--router", cluster.router)
    assert done.returncode == status
    assert done.stderr.count(b"\n") == 1
    assert words in done.stderr.decode()
    assert done.stdout.strip() == b""
