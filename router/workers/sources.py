"""The addresses of workers: from flags, a file, DNS names and announcements of the workers."""

from __future__ import annotations

import asyncio
import json
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import Exhausted, Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.security.policy import installed
from router.config import RouterConfig
from router.workers.dns import SCHEME, DnsNames, parse_name

FILE_FIELD = "workers_file"
MAX_FILE_BYTES = 1 << 20
HTTP = "http://"
"""Before the address of an unmodified ``vllm serve``."""
MIN_TTL, MAX_TTL = 1.0, 300.0  # seconds that an announcement holds


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """By role; announced workers report their role when they are checked."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    announced: tuple[str, ...] = ()


class WorkerSources:
    """Reads all sources."""

    def __init__(self, config: RouterConfig, names: DnsNames | None = None) -> None:
        self._config = config
        self._names = names or DnsNames(config.dns_interval)
        self._announcements = Announcements()
        self._listed = WorkerAddresses((), ())

    async def read(self) -> WorkerAddresses:
        """Read all sources; ``Rejected`` for an invalid workers file or address."""
        listed = await asyncio.to_thread(self._read)
        now = time.monotonic()
        self._names.keep((*listed.prefill, *listed.decode))
        self._listed = WorkerAddresses(
            await self._names.expand(listed.prefill, now),
            await self._names.expand(listed.decode, now),
        )
        return self.now()

    def now(self) -> WorkerAddresses:
        """The result of the last ``read`` with the announcements that hold at this moment."""
        known = {*self._listed.prefill, *self._listed.decode}
        announced = self._announcements.listed(time.monotonic())
        return WorkerAddresses(
            self._listed.prefill,
            self._listed.decode,
            tuple(address for address in announced if address not in known),
        )

    def announce(self, address: str, ttl: float) -> str:
        """Record an announcement. Returns the address as listed. ``Rejected``, ``Exhausted``."""
        self._check_announcing()
        listed = check_announcement(address, ttl)
        installed().check_call(listed)
        known = {*self._listed.prefill, *self._listed.decode}
        if listed not in known:
            limit = self._config.max_workers - len(known)
            self._announcements.add(listed, ttl, time.monotonic(), limit)
        return listed

    def forget(self, address: str) -> None:
        """End an announcement before its time. ``Rejected`` as ``announce``."""
        self._check_announcing()
        self._announcements.remove(address)

    def _check_announcing(self) -> None:
        if not self._config.announce:
            raise Rejected("announce", "not accepted by this router: start it with --announce")

    def close(self) -> None:
        """Stop looking up names."""
        self._names.close()

    def _read(self) -> WorkerAddresses:
        config = self._config
        file = WorkerAddresses((), ())
        if config.workers_file is not None:
            file = read_workers_file(Path(config.workers_file))
        listed = WorkerAddresses((*config.prefill, *file.prefill), (*config.decode, *file.decode))
        for role, entries in (("prefill", listed.prefill), ("decode", listed.decode)):
            for entry in entries:
                stock = entry.startswith(HTTP)
                if stock and role == "prefill":
                    raise Rejected(role, f"{entry} is unmodified vLLM: list it as a decode worker")
                parse_name(role, entry.removeprefix(HTTP))
                if not stock and not entry.startswith(SCHEME):
                    installed().check_call(entry)
        return listed


class Announcements:
    """Announced addresses, and when each expires. Pure; time is passed in."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, address: str, ttl: float, now: float, limit: int) -> None:
        """Add or renew an announcement; ``Exhausted`` beyond ``limit`` addresses."""
        known = self.listed(now)
        if address not in known and len(known) >= limit:
            raise Exhausted(f"{len(known)} announced workers are listed: raise --max-workers", ttl)
        self._until[address] = now + ttl

    def remove(self, address: str) -> None:
        """Without effect on an address that is not announced."""
        self._until.pop(address, None)

    def listed(self, now: float) -> tuple[str, ...]:
        """The addresses that have not expired."""
        self._until = {key: until for key, until in self._until.items() if until > now}
        return tuple(self._until)


def check_announcement(address: str, ttl: float) -> str:
    """The address as it is listed; ``Rejected`` for an invalid announcement."""
    parsed = Address.parse(address)
    if not parsed.port:
        raise Rejected("address", f"{address!r} is not the HOST:PORT at which others reach it")
    if not MIN_TTL <= ttl <= MAX_TTL:
        raise Rejected("ttl_seconds", f"must be {MIN_TTL:g} to {MAX_TTL:g}, got {ttl:g}")
    return str(parsed)


def read_workers_file(path: Path) -> WorkerAddresses:
    """``{"prefill": ["host:port"], "decode": [...]}``, JSON or TOML; ``Rejected`` for others."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise Rejected(FILE_FIELD, f"{path} is larger than {MAX_FILE_BYTES} bytes")
        text = raw.decode()
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise Rejected(FILE_FIELD, f"{path}: {error}") from error
    if not (isinstance(content, dict) and content and content.keys() <= {"prefill", "decode"}):
        raise Rejected(
            FILE_FIELD, f"{path}: must hold the lists `prefill` and `decode`, nothing else"
        )
    return WorkerAddresses(
        _addresses(path, content, "prefill"), _addresses(path, content, "decode")
    )


def _addresses(path: Path, content: dict[str, object], role: str) -> tuple[str, ...]:
    value = content.get(role, [])
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(dict.fromkeys(value))
    raise Rejected(FILE_FIELD, f"{path}: `{role}` must be a list of addresses, got {value!r}")
