"""Replaces certificates and credentials while a process serves, when their files change.

A thread looks at the files once a second and reads them when they have changed and rest. New
connections and calls have the new ones; open calls go on. What cannot be used is logged, and the
process keeps what it has.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrelay.errors import KvrelayError, Rejected
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import FIELD, Credentials
from kvrelay.rpc.security.identity import Tenant
from kvrelay.rpc.security.options import SecurityOptions

log = logging.getLogger("kvrelay.rpc")

LOOK_SECONDS = 1.0
RESULTS = ("ok", "failed")

FileState = tuple[int, int, int] | None  # inode, bytes, time of change; ``None``: no such file
FixedTenants = Callable[[Credentials], frozenset[Tenant]]

_results = Counter[str](dict.fromkeys(RESULTS, 0))


def runs() -> bool:
    """Whether this process renews what it has installed."""
    return bool(_running)


def no_tenants(known: Credentials) -> frozenset[Tenant]:
    """For a process that takes new tenants at any time."""
    return frozenset()


def results() -> Counter[str]:
    """Reloads of this process, by result."""
    return Counter(_results)


class Renewal:
    """Looks at the files of ``options``.

    ``fixed``: the tenants to which a process can add none without a restart.
    """

    def __init__(self, options: SecurityOptions, fixed: FixedTenants = no_tenants) -> None:
        self._options = options
        self._fixed = fixed
        named = (options.tls_cert, options.tls_key, options.tls_ca, options.credentials)
        self.files = [path for path in named if path is not None]
        self._used = self._seen = self._states()
        self._stopped = threading.Event()

    def run(self, seconds: float = LOOK_SECONDS) -> None:
        """Look until ``stop``."""
        while not self._stopped.wait(seconds):
            self.look()

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        """Read the files if they have changed since they were used, and rest since the last look:
        a certificate and its key are written one after the other."""
        states = self._states()
        rest = states == self._seen
        self._seen = states
        if not rest or states == self._used:
            return
        self._used = states
        try:
            policy.renew(self._options, self._check)
        except KvrelayError as error:
            _results["failed"] += 1
            log.error("certificates and credentials stay as they were: %s", error)
        else:
            _results["ok"] += 1
            log.info("certificates and credentials were read again")

    def _check(self, before: Credentials, after: Credentials) -> None:
        if new := self._fixed(after) - self._fixed(before):
            names = ", ".join(sorted(tenant.name for tenant in new))
            raise Rejected(
                FIELD, f"{names}: new or with other store-bytes or salt: restart the store"
            )

    def _states(self) -> list[FileState]:
        return [_state(path) for path in self.files]


_running = set[Renewal]()


def _state(path: str) -> FileState:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def renewed(options: SecurityOptions, fixed: FixedTenants = no_tenants) -> Iterator[None]:
    """Renew what this process has installed, inside the block."""
    renewal = Renewal(options, fixed)
    if not renewal.files:
        yield
        return
    thread = threading.Thread(target=renewal.run, name="renewal", daemon=True)
    thread.start()
    _running.add(renewal)
    try:
        yield
    finally:
        _running.discard(renewal)
        renewal.stop()
        thread.join()
