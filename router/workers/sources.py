"""Where the list of workers comes from: flags, a file, names that are looked up, announcements."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from kvrelay.errors import Rejected
from kvrelay.rpc.security.policy import installed
from router.config import RouterConfig
from router.workers.announcements import Announcements, check_announcement
from router.workers.dns import SCHEME, DnsNames, check_name
from router.workers.workers_file import WorkerAddresses, read_workers_file


class WorkerSources:
    """The list as it is now; ``announced`` is what workers said themselves."""

    def __init__(self, config: RouterConfig, names: DnsNames | None = None) -> None:
        self._config = config
        self._names = names or DnsNames(config.dns_interval)
        self._announced = Announcements()
        self._listed = WorkerAddresses((), ())

    async def read(self) -> WorkerAddresses:
        """All sources; ``Rejected`` for the workers file, or a name in it that is none."""
        listed = await asyncio.to_thread(self._read)
        now = time.monotonic()
        self._names.keep((*listed.prefill, *listed.decode))
        self._listed = WorkerAddresses(
            await self._names.expand(listed.prefill, now),
            await self._names.expand(listed.decode, now),
        )
        return self.now()

    def now(self) -> WorkerAddresses:
        """What was read last, with who is announced at this moment."""
        known = {*self._listed.prefill, *self._listed.decode}
        announced = self._announced.listed(time.monotonic())
        return WorkerAddresses(
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

    def _read(self) -> WorkerAddresses:
        config, file = self._config, WorkerAddresses((), ())
        if config.workers_file is not None:
            file = read_workers_file(Path(config.workers_file))
        listed = WorkerAddresses((*config.prefill, *file.prefill), (*config.decode, *file.decode))
        for role, entries in (("prefill", listed.prefill), ("decode", listed.decode)):
            for entry in entries:
                check_name(role, entry)
                if not entry.startswith(SCHEME):
                    installed().check_call(entry)
        return listed
