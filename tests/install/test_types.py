"""A user's program against the installed wheel, as ``mypy --strict`` sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.install.conftest import Installed

PROGRAM = """
import asyncio
from typing import assert_type

from kvrelay import (
    AsyncClient,
    Chunk,
    Client,
    Completion,
    Exhausted,
    KvrelayError,
    LegUsage,
    Logprobs,
    Miss,
    Rejected,
    Sampling,
    Unavailable,
    Usage,
    WorkerStatus,
)


def show(usage: Usage) -> int:
    assert_type(usage.cached_prompt_tokens, int | None)
    assert_type(usage.legs, tuple[LegUsage, ...])
    for leg in usage.legs:
        assert_type(leg.role, str)
        assert_type(leg.saved, int | None)
        for missed in leg.missed:
            assert_type(missed.reason, Miss)
    return sum(leg.computed for leg in usage.legs)


def ask(prompt: str) -> str:
    text = ""
    with Client("127.0.0.1:50051", token="secret") as client:
        try:
            stream = client.generate(
                timeout=30.0, prompt=prompt, max_tokens=64, temperature=0.8, stop="x"
            )
            for chunk in stream:
                assert_type(chunk, Chunk)
                assert_type(chunk.logprobs, tuple[Logprobs, ...])
                text += chunk.text
                if chunk.usage is not None:
                    show(chunk.usage)
        except Rejected as error:
            assert_type(error.field, str)
        except Exhausted as error:
            assert_type(error.retry_after, float)
        except Unavailable:
            for chunk in client.resume(stream):
                text += chunk.text
        except KvrelayError:
            raise
        answer = client.complete(
            messages=[("user", "Hi"), {"role": "user", "content": "Hi"}],
            sampling=Sampling(top_k=3),
            timeout=5,
        )
        assert_type(answer, Completion)
        assert_type(client.workers(), tuple[WorkerStatus, ...])
        for worker in client.fleet().workers:
            assert_type(worker.address, str)
            assert_type(worker.load.free_blocks, int)
            if worker.info is not None:
                assert_type(worker.info.namespace.model, str)
        assert_type(client.fleet().queue.waiting, int)
        return text + answer.text


async def ask_async(ids: list[int]) -> Completion:
    async with AsyncClient() as client:
        async with client.generate(token_ids=ids) as stream:
            async for chunk in stream:
                assert_type(chunk.token_ids, tuple[int, ...])
        assert_type((await client.fleet()).queue.running, int)
        return await client.complete(token_ids=ids, seed=7)


if __name__ == "__main__":
    print(ask("Once"), asyncio.run(ask_async([1, 2])))
"""
WRONG = {
    'client.generate(prompt="x", stream=True)': 'Unexpected keyword argument "stream"',
    'client.complete(promt="x")': 'Unexpected keyword argument "promt"',
    "client.generate(prompt=3)": "incompatible type",
    'client.complete(prompt="x").usage.prompt_token': 'has no attribute "prompt_token"',
    'client.complete(prompt="x").usage.legs[0].length = 3': "read-only",
    "client.workers()[0].adress": 'has no attribute "adress"',
    "client.fleet().queue.waitng": 'has no attribute "waitng"',
    'client.workers()[0].state == "redy"': "Non-overlapping equality check",
    'open_client: AsyncClient = Client("x")': "Incompatible types",
}


@pytest.fixture(scope="module")
def check(client_only: Installed, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of the program, which is right, and of some lines that are wrong."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "right.py").write_text(PROGRAM)
    lines = ["from kvrelay import AsyncClient, Client", 'client = Client("x")', *WRONG]
    (folder / "wrong.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    flags = ["--python-executable", str(client_only.python), "--cache-dir", str(folder / "cache")]
    done = subprocess.run(
        [*command, *flags, "right.py", "wrong.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_a_program_is_typed(check: list[str]) -> None:
    assert not [line for line in check if not line.startswith("wrong.py")]


@pytest.mark.parametrize(("line", "told"), WRONG.items())
def test_what_is_wrong_is_told(check: list[str], line: str, told: str) -> None:
    number = 3 + list(WRONG).index(line)
    told_there = [text for text in check if text.startswith(f"wrong.py:{number}: error: ")]
    assert told_there, check
    assert any(told in text for text in told_there), told_there
