"""Node with a script of ``tests/peers/node``, and the conversation that the scripts have."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copy

from tests.peers.pins import NODE
from tests.peers.rig import environment_of, foreign

SCRIPTS = Path(__file__).parent / "node"
PAIRS = [("system", "The copper mask stands in Boston."), ("user", "Where is the copper mask?")]
MESSAGES = json.dumps([{"role": role, "content": content} for role, content in PAIRS])


def command(folder: Path, script: str, *words: str) -> list[str]:
    """Node with a script; it finds its packages beside the script."""
    environment = environment_of(NODE)
    copy(SCRIPTS / script, folder)
    (folder / "node_modules").symlink_to(environment.modules / "node_modules")
    return [environment.program("node"), str(folder / script), *words]


@contextmanager
def talking(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A script that waits for a line where the test has to look at the server."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, cwd=folder, env=foreign(folder), stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str], line: str = "") -> None:
    """End its wait."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
