"""``connect``: from a URL to a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import SplitResult, urlsplit

from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.security.policy import installed
from kvstore import redis
from kvstore.base import Store
from kvstore.breaker import BreakerStore
from kvstore.client.memory import MemoryStore
from kvstore.client.remote import RemoteStore
from kvstore.client.traced import TracedStore
from kvstore.device import MemoryRegistrar
from kvstore.multi.backend import StoreBackend
from kvstore.multi.store import MultiStore
from kvstore.urls import public_url, query_parameters, split_urls

Parameters = dict[str, str]

ESCAPES = "write / ? # @ within a part of a URL as %2F %3F %23 %40"


def _memory(parts: SplitResult, parameters: Parameters, registrar: MemoryRegistrar | None) -> Store:
    _check_names(parameters, ())
    return MemoryStore(parts.netloc)


def _kvrelay(
    parts: SplitResult, parameters: Parameters, registrar: MemoryRegistrar | None
) -> Store:
    _check_names(parameters, ("transport",))
    address = str(Address.parse(parts.netloc))
    return TracedStore(BreakerStore(RemoteStore(address, parameters.get("transport"), registrar)))


def _kvrelays(
    parts: SplitResult, parameters: Parameters, registrar: MemoryRegistrar | None
) -> Store:
    if installed().tls is None:
        raise Rejected("store", "needs TLS: give --tls-ca")
    return _kvrelay(parts, parameters, registrar)


def _redis(parts: SplitResult, parameters: Parameters, registrar: MemoryRegistrar | None) -> Store:
    _check_names(parameters, redis.PARAMETERS)
    return TracedStore(redis.RedisStore(redis.settings_of(parts, parameters)))


def _check_names(parameters: Parameters, known: tuple[str, ...]) -> None:
    for name in parameters:
        if name not in known:
            raise Rejected(name, f"is not a parameter; known: {', '.join(known) or 'none'}")


SCHEMES: dict[str, Callable[[SplitResult, Parameters, MemoryRegistrar | None], Store]] = {
    "memory": _memory,
    "kvrelay": _kvrelay,
    "kvrelays": _kvrelays,
    **dict.fromkeys(redis.SCHEMES, _redis),
}


def connect(url: str, registrar: MemoryRegistrar | None = None) -> Store:
    """The store at ``url``; ``Rejected`` for the field ``store`` if it names none.

    ``kvrelay://HOST:PORT?transport=shm``, ``socket`` or ``grpc`` forces a transport. TLS and
    credentials are those of this process (``kvrelay.rpc.security.policy``); ``kvrelays://``
    requires TLS. ``redis://[USER:PASSWORD@]HOST:PORT[/DB]`` is a Redis server, ``unix:///PATH``
    one by its Unix socket, ``redis+cluster://HOST:PORT,HOST:PORT`` the cluster of these servers;
    ``rediss://`` and ``rediss+cluster://`` use TLS. Parameters are in ``kvstore/README.md``.

    URLs with commas between them are several stores in one, the first one preferred. Later ones
    are only read, unless they say ``write=yes`` (puts also go to them) or ``promote=yes`` (blocks
    read from them are put into the first).

    ``registrar``: registers memory that is shared with a store on this host, for a GPU's copies.

    Connects at the first call, which raises ``Unavailable`` if the store cannot be reached.
    """
    urls = split_urls(url)
    if len(urls) == 1:
        return _one(url.strip(), registrar)
    return MultiStore([_backend(one, index, registrar) for index, one in enumerate(urls)])


def _backend(url: str, index: int, registrar: MemoryRegistrar | None) -> StoreBackend:
    name = public_url(url)
    with _url_in_errors(url):
        parts, parameters = _parse(url)
        chosen = {name: parameters.pop(name) for name in ("write", "promote") if name in parameters}
        for word, value in chosen.items():
            if value not in ("yes", "no"):
                raise Rejected("store", f"{word}={value} is neither yes nor no")
            if not index:
                raise Rejected("store", f"the first store has no {word}=")
        store = _make(parts, parameters, registrar)
    yes = {word for word, value in chosen.items() if value == "yes"}
    return StoreBackend(name, store, "write" in yes, "promote" in yes)


def _one(url: str, registrar: MemoryRegistrar | None) -> Store:
    with _url_in_errors(url):
        return _make(*_parse(url), registrar)


@contextmanager
def _url_in_errors(url: str) -> Iterator[None]:
    """Add the URL to every error."""
    try:
        yield
    except Rejected as error:
        why = error.message if error.field == "store" else error
        raise Rejected("store", f"{public_url(url)!r}: {why}") from error


def _make(parts: SplitResult, parameters: Parameters, registrar: MemoryRegistrar | None) -> Store:
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise Rejected("store", f"has none of the schemes {known}")
    return SCHEMES[parts.scheme](parts, parameters, registrar)


def _parse(url: str) -> tuple[SplitResult, Parameters]:
    """Refuses a URL with an unescaped password before any part of the password is shown."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise Rejected("store", "is no URL" if "@" in url else f"is no URL: {error}") from None
    if parts.fragment or "@" in parts.path + parts.query:
        raise Rejected("store", f"has a # or, after its host, an @: {ESCAPES}")
    return parts, query_parameters(parts.query)
