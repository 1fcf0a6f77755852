"""What the commands of ``kvrelay store`` have in common: which stores, and how they are reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.config import option
from common.errors import Rejected
from kvrelay.endpoints import store_of
from kvstore.base import Store
from kvstore.client.browse import Browser, browse
from kvstore.opening import connect
from kvstore.urls import alone, public_name, urls_of
from rpc import security
from rpc.credentials import ADMIN_FIRST
from rpc.options import SecurityOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StoresConfig(SecurityOptions):
    """Which stores."""

    store: str | None = option(None, "URL of the store, or several with commas", metavar="URL")
    endpoints: str | None = option(None, "take the store from kvrelay up's file", metavar="FILE")
    timeout: float = option(30.0, "seconds for one answer of a store", low=0.01, high=600.0)
    json: bool = option(False, "print JSON")

    def __post_init__(self) -> None:
        if (self.store is None) == (self.endpoints is None):
            raise Rejected("store", "give one of --store URL and --endpoints FILE")

    def urls(self) -> list[str]:
        """The stores, once this process shows who it is."""
        security.install(self, ADMIN_FIRST)
        text = store_of(Path(self.endpoints)) if self.endpoints is not None else self.store
        if not text:
            raise Rejected("store", "is empty: give a URL such as kvrelay://HOST:PORT")
        urls = urls_of(text)
        twice = [name for name, count in Counter(map(public_name, urls)).items() if count > 1]
        if twice:
            raise Rejected("store", f"{twice[0]} stands twice in the list")
        return urls


@contextmanager
def connected(url: str) -> Iterator[Store]:
    """A store, for a while."""
    with closing(connect(alone(url))) as store:
        yield store


@contextmanager
def browsing(url: str) -> Iterator[Browser]:
    """The same for those who look after it."""
    with closing(browse(alone(url))) as browser:
        yield browser
