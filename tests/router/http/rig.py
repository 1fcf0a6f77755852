"""A router with an HTTP door in front of fake workers, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx2
from openai import AsyncOpenAI

from tests.router.fakes import FakeWorker, Running, answer, decode_worker, running, text_of
from tests.router.rig import PROMPT

SEED = 5


@asynccontextmanager
async def door(
    workers: Sequence[FakeWorker] = (), **changes: object
) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """A router with a door, and a plain client of it."""
    given = {"http_port": 0, "disaggregate": "never", **changes}
    async with (
        running(workers or [decode_worker()], **given) as router,  # type: ignore[arg-type]
        httpx2.AsyncClient(base_url=router.http, timeout=20) as client,
    ):
        yield router, client


def openai_of(router: Running, key: str = "none", **options: object) -> AsyncOpenAI:
    """OpenAI's own client of the door; it does not retry by itself."""
    url = f"{router.http}/v1"
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20, **options)  # type: ignore[arg-type]


def expected(max_tokens: int, seed: int = SEED) -> str:
    """The text of an undisturbed answer to ``PROMPT``."""
    return text_of(answer(PROMPT, max_tokens, seed))
