"""``kvrelay generate`` at a router."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvrelay.cli.generate import main
from tests.router.fakes import answer, decode_worker, running, text_of
from tests.router.rig import PROMPT

ARGS = ["--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", "6", "--seed", "5"]


async def test_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text_of(answer(PROMPT, 6, 5 + index)) for index in range(3)]
    async with running([decode_worker()], disaggregate="never") as router:
        args = [*ARGS, "--router", router.address]
        assert await asyncio.to_thread(main, [*args, "--n", "3"]) == 0
        shown = capsys.readouterr().out
        assert [shown.index(text) for text in texts] == sorted(shown.index(text) for text in texts)
        assert "--- answer 2, seed 7: length" in shown
        assert await asyncio.to_thread(main, [*args, "--n", "3", "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert [one["text"] for one in made["choices"]] == texts
        assert [one["token_ids"] for one in made["choices"]][1] == answer(PROMPT, 6, 6)
        assert made["usage"]["completion_tokens"] == 18
        assert await asyncio.to_thread(main, [*args, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == texts[0]
