"""News that come from any thread and are waited for on one event loop."""

from __future__ import annotations

import asyncio


class ChangeSignal:
    """``tell`` in any thread wakes those in ``wait``."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Something has changed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def listen(self) -> None:
        """From now on nothing is missed: call it, look whether to wait, and ``wait``."""
        self._loop = asyncio.get_running_loop()

    async def wait(self, seconds: float) -> None:
        """Until the next change, at most so long."""
        self.listen()
        try:
            async with asyncio.timeout(seconds):
                await self._next.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
