"""Where the list of workers comes from: flags, a file, names that are looked up, announcements."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from common.errors import Rejected
from router.announced import Announced, check_announcement
from router.config import RouterConfig
from router.names import SCHEME, Names, check_name
from router.workersfile import Workers, read_workers
from rpc.security import installed


class Sources:
    """The list as it is now; ``announced`` is what workers said themselves."""

    def __init__(self, config: RouterConfig, names: Names | None = None) -> None:
        self._config = config
        self._names = names or Names(config.dns_interval)
        self._announced = Announced()
        self._listed = Workers((), ())

    async def read(self) -> Workers:
        """All sources; ``Rejected`` for the workers file, or a name in it that is none."""
        listed = await asyncio.to_thread(self._read)
        now = time.monotonic()
        self._names.keep((*listed.prefill, *listed.decode))
        self._listed = Workers(
            await self._names.expand(listed.prefill, now),
            await self._names.expand(listed.decode, now),
        )
        return self.now()

    def now(self) -> Workers:
        """What was read last, with who is announced at this moment."""
        known = {*self._listed.prefill, *self._listed.decode}
        announced = self._announced.listed(time.monotonic())
        return Workers(
            self._listed.prefill,
            self._listed.decode,
            tuple(address for address in announced if address not in known),
        )

    def hear(self, address: str, ttl: float) -> str:
        """A worker announced itself, ``Rejected`` unless that is allowed; the address listed."""
        if not self._config.announce:
            raise Rejected("announce", "this router takes no announcements: start it --announce")
        listed = check_announcement(address, ttl)
        installed().check_call(listed)
        known = {*self._listed.prefill, *self._listed.decode}
        if listed not in known:
            limit = self._config.max_workers - len(known)
            self._announced.hear(listed, ttl, time.monotonic(), limit)
        return listed

    def close(self) -> None:
        """Read nothing more."""
        self._names.close()

    def _read(self) -> Workers:
        config, file = self._config, Workers((), ())
        if config.workers_file is not None:
            file = read_workers(Path(config.workers_file))
        listed = Workers((*config.prefill, *file.prefill), (*config.decode, *file.decode))
        for role, entries in (("prefill", listed.prefill), ("decode", listed.decode)):
            for entry in entries:
                check_name(role, entry)
                if not entry.startswith(SCHEME):
                    installed().check_call(entry)
        return listed
