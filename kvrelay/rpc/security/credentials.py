"""The credentials file: which token identifies which caller, and the token of this process.

TOML, readable by its owner only. Every part is optional, and each process may have its own file::

    service = "..."          # token among router, workers and store
    admin = "..."            # token for drain, audit, clear
    metrics = "..."          # token that only reads metrics pages
    fleet = "..."            # key that signs handoffs and blocks; tenants' salts derive from it
    token = "..."            # the token to send, if it is neither of the two above

A token may be a list, ``["new", "old"]``: all of them are accepted, the first is sent, so a token
can be changed while processes with either one run::

    [tenants.alice]
    token = "..."
    salt = "..."             # default: derived from the fleet key and the name
    max-requests = 8         # at once
    tokens-per-minute = 100000
    weight = 1.0
    store-bytes = "4GiB"     # of a store's memory; lets this tenant call the store itself
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.config.values import size
from kvrelay.errors import Rejected
from kvrelay.rpc.security.identity import Caller, CallerKind, Tenant
from kvrelay.rpc.security.options import SecurityOptions

log = logging.getLogger("kvrelay.rpc")
FIELD = "credentials"
MAX_BYTES = 4 << 20
MIN_SECRET, MAX_SECRET = 16, 1024  # characters of a token or key
SERVICE_FIRST = (CallerKind.SERVICE, CallerKind.ADMIN)
ADMIN_FIRST = (CallerKind.ADMIN, CallerKind.SERVICE)
_SALT = b"kvrelay.tenant-salt.v1\0"
_TOP = frozenset({"service", "admin", "metrics", "fleet", "token", "tenants"})
_TENANT = frozenset({"token", "salt", "max-requests", "tokens-per-minute", "weight", "store-bytes"})


@dataclass(frozen=True, slots=True)
class Credentials:
    """``token`` is what this process sends; ``fleet_key`` signs handoffs and blocks.

    Without a token of its own, a process sends ``cluster_token``, but not to other machines.
    ``open``: clients need no token, because only the cluster's is known here.
    """

    token: str | None = field(default=None, repr=False)
    fleet_key: bytes | None = field(default=None, repr=False)
    cluster_token: str | None = field(default=None, repr=False)
    open: bool = False
    _known: Mapping[bytes, Caller] = field(default_factory=dict, repr=False)
    _key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    @property
    def required(self) -> bool:
        """Whether callers must send a token; with ``open``, all but clients."""
        return bool(self._known)

    @property
    def fleet_key_id(self) -> bytes:
        """Identifies the fleet key without revealing it; empty without a key."""
        key = self.fleet_key
        return b"" if key is None else hmac.digest(key, b"kvrelay.fleet-key-id.v1", "sha256")[:8]

    @property
    def tenants(self) -> list[Tenant]:
        """The tenants with a token in this file."""
        every = (known.tenant for known in self._known.values() if known.kind is CallerKind.CLIENT)
        return list(dict.fromkeys(every))

    def identify(self, token: str) -> Caller | None:
        """The caller with this token, ``None`` if it is unknown.

        The lookup is by a digest under a random key, so its duration reveals nothing of a token.
        """
        return self._known.get(_digest(self._key, token))


def load(options: SecurityOptions, shows: Sequence[CallerKind] = SERVICE_FIRST) -> Credentials:
    """The credentials in the options and in the file they name.

    This process sends ``token``, else the file's ``token``, else the first token of ``shows`` in
    the file. The file's fleet key precedes that of the options.
    """
    path = options.credentials
    for name in ("token", "cluster_token", "fleet_key"):
        given = getattr(options, name)
        if given is not None and (wrong := _wrong(given)) is not None:
            raise Rejected(name, f"{wrong}; does it end with a newline?")
    table = {} if path is None else _table(path)
    _check_names("", table, _TOP)
    fleet = _fleet(_secret(table, "fleet", "fleet") or options.fleet_key)
    key = os.urandom(32)
    known: dict[bytes, Caller] = {}
    for secret, identity in _identities(table, fleet):
        digest = _digest(key, secret)
        if digest in known:
            raise Rejected(FIELD, f"{path}: two of its tokens are equal")
        known[digest] = identity
    cluster = options.cluster_token
    opened = not known and cluster is not None
    if cluster is not None:
        known[_digest(key, cluster)] = Caller(CallerKind.ADMIN)
    names = ("token", *(kind.value for kind in shows))
    firsts = (first for name in names for first in _tokens(table, name, name)[:1])
    own = next(filter(None, (options.token, *firsts)), None)
    return Credentials(own, fleet, cluster, opened, known, key)


def _digest(key: bytes, token: str) -> bytes:
    return hmac.digest(key, token.encode("utf-8", "replace"), "sha256")


def _fleet(key: str | None) -> bytes | None:
    return None if key is None else hashlib.sha256(key.encode()).digest()


def _identities(table: Mapping[str, object], fleet: bytes | None) -> Iterator[tuple[str, Caller]]:
    for kind in (CallerKind.SERVICE, CallerKind.ADMIN, CallerKind.METRICS):
        for token in _tokens(table, kind.value, kind.value):
            yield token, Caller(kind)
    tenants = table.get("tenants", {})
    if not isinstance(tenants, dict):
        raise Rejected(FIELD, "tenants: must be one table for each tenant, [tenants.NAME]")
    for name, entry in tenants.items():
        yield from _tenant(name, entry, fleet)


def _tenant(name: str, entry: object, fleet: bytes | None) -> Iterator[tuple[str, Caller]]:
    where = f"tenants.{name}"
    if not isinstance(entry, dict):
        raise Rejected(FIELD, f"{where}: must be a table with a token")
    _check_names(f"{where}.", entry, _TENANT)
    tokens = _tokens(entry, "token", f"{where}.token")
    salt = _secret(entry, "salt", f"{where}.salt")
    if not tokens:
        raise Rejected(FIELD, f"{where}.token: missing")
    if salt is None and fleet is None:
        raise Rejected(FIELD, f"{where}.salt: missing, and there is no fleet key to derive it from")
    made = b"" if fleet is None else hmac.digest(fleet, _SALT + name.encode(), "sha256")
    tenant = Tenant(
        name,
        made if salt is None else hashlib.sha256(_SALT + salt.encode()).digest(),
        _count(entry, "max-requests", where),
        _count(entry, "tokens-per-minute", where),
        _bytes(entry, "store-bytes", where),
        _weight(entry, where),
    )
    for token in tokens:
        yield token, Caller(CallerKind.CLIENT, tenant)


def _table(path: str) -> Mapping[str, object]:
    """Parse the file. Errors name the place, never the content: a line may hold a secret."""
    try:
        with Path(path).open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                log.warning("%s can be read by other users: chmod 600 it", path)
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise Rejected(FIELD, f"{path} is larger than {MAX_BYTES} bytes")
        return tomllib.loads(raw.decode())
    except OSError as error:
        raise Rejected(FIELD, f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise Rejected(FIELD, f"{path} is not TOML in UTF-8; see docs/security.md") from None


def _check_names(where: str, table: Mapping[str, object], known: frozenset[str]) -> None:
    for name in table.keys() - known:
        raise Rejected(FIELD, f"{where}{name}: no such entry; there are {', '.join(sorted(known))}")


def _tokens(table: Mapping[str, object], name: str, where: str) -> list[str]:
    """All tokens under a name; this process sends the first."""
    value = table.get(name)
    if not isinstance(value, list):
        one = _secret(table, name, where)
        return [] if one is None else [one]
    if not value:
        raise Rejected(FIELD, f"{where}: an empty list; remove the line, or name a token")
    return [_checked(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _secret(table: Mapping[str, object], name: str, where: str) -> str | None:
    value = table.get(name)
    return None if value is None else _checked(value, where)


def _checked(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise Rejected(FIELD, f"{where}: must be text of printable ASCII")
    if (wrong := _wrong(value)) is not None:
        raise Rejected(FIELD, f"{where}: {wrong}")
    return value


def _wrong(secret: str) -> str | None:
    """Why this cannot be a token or key; ``None`` if it can."""
    if not (secret.isascii() and secret.isprintable()):
        return "must be text of printable ASCII"
    if not MIN_SECRET <= len(secret) <= MAX_SECRET:
        return f"must have {MIN_SECRET} to {MAX_SECRET} characters"
    return None


def _count(table: Mapping[str, object], name: str, where: str) -> int | None:
    value = table.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise Rejected(FIELD, f"{where}.{name}: must be a whole number above 0")


def _bytes(table: Mapping[str, object], name: str, where: str) -> int | None:
    value = table.get(name)
    if not isinstance(value, str):
        return _count(table, name, where)
    try:
        return size(value)
    except ValueError as error:
        raise Rejected(FIELD, f"{where}.{name}: {error}") from None


def _weight(table: Mapping[str, object], where: str) -> float:
    value = table.get("weight", 1.0)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0.01 <= value <= 100:
        return float(value)
    raise Rejected(FIELD, f"{where}.weight: must be a number from 0.01 to 100")
