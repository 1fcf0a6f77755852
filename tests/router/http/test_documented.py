"""The examples of the pages, run as printed, but for the ports."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.supervisor import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PAGES = ("README.md", "docs/http.md", "docs/client.md")
PROGRAMS = [
    (page, number, text)
    for page in PAGES
    for number, text in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
    )
]
ASKING = ("kvrelay generate", "kvrelay chat")
COMMANDS = [
    line.partition(" #")[0].strip()
    for line in (ROOT / "README.md").read_text("utf-8").splitlines()
    if line.startswith(ASKING)
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = ClusterConfig(port=0, http_port=0, threads=1, store_budget=64 << 20)
    with Cluster(config) as made:
        yield made


def run(command: list[str], folder: Path, said: str = "") -> str:
    done = subprocess.run(
        command, cwd=folder, input=said, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_examples() -> None:
    assert {page for page, _, _ in PROGRAMS} == set(PAGES)
    assert len(COMMANDS) == len(ASKING)


@pytest.mark.parametrize(
    ("page", "number", "text"), PROGRAMS, ids=[f"{page}-{number}" for page, number, _ in PROGRAMS]
)
def test_a_program(cluster: Cluster, tmp_path: Path, page: str, number: int, text: str) -> None:
    """Each prints an answer. One that goes on from another's ``client`` gets one."""
    if "Client(" not in text and "OpenAI(" not in text:
        text = f'from kvrelay import Client\nclient = Client("127.0.0.1:50051")\n{text}'
    text = text.replace("http://127.0.0.1:8000", cluster.http or "")
    text = text.replace("127.0.0.1:50051", cluster.router)
    file = tmp_path / "example.py"
    file.write_text(text, "utf-8")
    assert run([sys.executable, str(file)], ROOT).strip()


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command(cluster: Cluster, tmp_path: Path, line: str) -> None:
    name, *words = shlex.split(line)
    command = [sys.executable, "-m", name, *words, "--router", cluster.router]
    assert run(command, ROOT, "Who are you?\n").strip()
