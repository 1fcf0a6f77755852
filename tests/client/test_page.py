"""The programs of docs/client.md run as they stand there, but for the address."""

from __future__ import annotations

import asyncio
import re

import pytest

from kvrelay import Client
from tests.house.sources import ROOT
from tests.router.fakes import decode_worker, prefill_worker, running


async def test_the_programs_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 2
    async with running([prefill_worker(), decode_worker()]) as router:

        def use() -> None:
            with Client(router.address) as client:
                for program in programs:
                    exec(program.replace("127.0.0.1:50051", router.address), {"client": client})

        await asyncio.to_thread(use)
    shown = capsys.readouterr().out
    assert "prefill" in shown
    assert "decode ready " in shown
