"""From a URL to a store."""

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
from kvstore.multi.backend import StoreBackend
from kvstore.multi.store import MultiStore
from kvstore.urls import public_url, query_parameters, split_urls

Parameters = dict[str, str]

ESCAPES = "write / ? # @ within a part of a URL as %2F %3F %23 %40"


def _memory(parts: SplitResult, parameters: Parameters) -> Store:
    _known(parameters, ())
    return MemoryStore(parts.netloc)


def _kvrelay(parts: SplitResult, parameters: Parameters) -> Store:
    _known(parameters, ("transport",))
    return BreakerStore(RemoteStore(str(Address.parse(parts.netloc)), parameters.get("transport")))


def _kvrelays(parts: SplitResult, parameters: Parameters) -> Store:
    if installed().tls is None:
        raise Rejected("store", "is to be reached by TLS: give --tls-ca")
    return _kvrelay(parts, parameters)


def _redis(parts: SplitResult, parameters: Parameters) -> Store:
    _known(parameters, redis.PARAMETERS)
    return redis.RedisStore(redis.settings_of(parts, parameters))


def _known(parameters: Parameters, known: tuple[str, ...]) -> None:
    for name in parameters:
        if name not in known:
            raise Rejected(name, f"is no parameter here; these are: {', '.join(known) or 'none'}")


SCHEMES: dict[str, Callable[[SplitResult, Parameters], Store]] = {
    "memory": _memory,
    "kvrelay": _kvrelay,
    "kvrelays": _kvrelays,
    **dict.fromkeys(redis.SCHEMES, _redis),
}


def connect(url: str) -> Store:
    """The store at ``url``; ``Rejected`` for the field ``store`` if it names none.

    ``kvrelay://HOST:PORT?transport=shm``, ``socket`` or ``grpc`` forces a transport. It is
    connected to as this process is set up (``kvrelay.rpc.security.policy``); ``kvrelays://``
    insists on TLS. ``redis://[USER:PASSWORD@]HOST:PORT[/DB]`` is a Redis, ``unix:///PATH`` one by
    its socket, ``redis+cluster://HOST:PORT,HOST:PORT`` a cluster as these of its servers tell it;
    ``rediss://`` and ``rediss+cluster://`` go by TLS. Their parameters are in
    ``kvstore/README.md``.

    A list of URLs with commas between them is several stores in one, the first one preferred.
    Those after it are only read, unless they say ``write=yes`` (what is saved goes there too) or
    ``promote=yes`` (what is read there is put into the first).

    Nothing is sent yet: a store that is not there is found out, and waited for, by its users.
    """
    urls = split_urls(url)
    if len(urls) == 1:
        return _one(url.strip())
    return MultiStore([_arm(one, index) for index, one in enumerate(urls)])


def _arm(url: str, index: int) -> StoreBackend:
    name = public_url(url)
    with _naming(url):
        parts, parameters = _parsed(url)
        chosen = {name: parameters.pop(name) for name in ("write", "promote") if name in parameters}
        for word, value in chosen.items():
            if value not in ("yes", "no"):
                raise Rejected("store", f"{word}={value} is neither yes nor no")
            if not index:
                raise Rejected("store", f"the first store has no {word}=")
        store = _made(parts, parameters)
    yes = {word for word, value in chosen.items() if value == "yes"}
    return StoreBackend(name, store, "write" in yes, "promote" in yes)


def _one(url: str) -> Store:
    with _naming(url):
        return _made(*_parsed(url))


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Every error says which URL it is about."""
    try:
        yield
    except Rejected as error:
        why = error.message if error.field == "store" else error
        raise Rejected("store", f"{public_url(url)!r}: {why}") from error


def _made(parts: SplitResult, parameters: Parameters) -> Store:
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise Rejected("store", f"has none of the schemes {known}")
    return SCHEMES[parts.scheme](parts, parameters)


def _parsed(url: str) -> tuple[SplitResult, Parameters]:
    """A password that ended too soon is found out before anything of its rest is shown."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise Rejected("store", "is no URL" if "@" in url else f"is no URL: {error}") from None
    if parts.fragment or "@" in parts.path + parts.query:
        raise Rejected("store", f"has a # or, after its host, an @: {ESCAPES}")
    return parts, query_parameters(parts.query)
