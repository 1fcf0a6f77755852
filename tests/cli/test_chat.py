"""``kvrelay chat`` against a router and a fake worker: each turn contains all before it."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from kvrelay import AsyncClient
from kvrelay.cli.router_options import AnswerWriter
from kvrelay.client.chunk import Chunk
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.ports import free_ports
from tests.router.fakes import decode_worker, running

Turns = list[tuple[str, str]]
MAX_TOKENS = 6


async def _chat(router: str, lines: str, *flags: str) -> tuple[int | None, str, str]:
    bounds = ("--max-tokens", str(MAX_TOKENS), "--temperature", "0")
    words = ["chat", "--router", router, *bounds, *flags]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrelay", *words),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(lines.encode()), 60.0)
    return process.returncode, out.decode(), err.decode()


async def _answer(client: AsyncClient, turns: Turns) -> str:
    done = await client.complete(messages=turns, max_tokens=MAX_TOKENS, temperature=0.0, seed=3)
    return done.text


async def test_every_turn_knows_those_before_it_until_a_new_conversation() -> None:
    async with running([decode_worker()]) as router:
        status, out, err = await _chat(
            router.address, "one\n\ntwo\n/new\ntwo\n/quit\nthree\n", "--system", "s", "--seed", "3"
        )
        async with AsyncClient(router.address) as client:
            system = ("system", "s")
            first = await _answer(client, [system, ("user", "one")])
            both: Turns = [system, ("user", "one"), ("assistant", first), ("user", "two")]
            second = await _answer(client, both)
            alone = await _answer(client, [system, ("user", "two")])
    assert (status, err) == (0, "")
    assert second != alone
    assert out == f"{first}\n{second}\n{alone}\n"


async def test_without_a_router_the_error_is_one_line_and_status_1() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    status, out, err = await _chat(address, "one\ntwo\n", "--timeout", "5")
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("kvrelay chat: ")


def test_a_terminal_shows_control_characters_and_does_not_obey_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b[2J\tb\r\x9b\n"
    for terminal, shown in ((False, text), (True, "a\u241b[2J\tb\u240d\ufffd\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        AnswerWriter().write(Chunk(text, (), (), None, None, 1, "r"))
        assert capsys.readouterr().out == shown


def test_reasoning_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [("Hm", ""), (".", ""), ("", "Yes"), ("", ".")]
    for terminal, shown in ((False, "Yes."), (True, "Hm.\n\nYes.")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        writer = AnswerWriter()
        for reasoning, text in parts:
            writer.write(Chunk(text, (), (), None, None, 1, "r", reasoning=reasoning))
        assert re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out) == shown
