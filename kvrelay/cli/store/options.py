"""The options of every ``kvrelay store`` command: the stores, and how they are reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvrelay.cluster.endpoints import authorized, store_of
from kvrelay.config.reader import option
from kvrelay.errors import Rejected
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST
from kvrelay.rpc.security.options import SecurityOptions
from kvstore.base import ListedBlock, Store, StoreBrowser
from kvstore.client.browse import browse
from kvstore.client.connect import connect
from kvstore.urls import public_url, split_urls, standalone_url


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSelection(SecurityOptions):
    """The stores to use."""

    store: str | None = option(None, "URL of the store, or several with commas", metavar="URL")
    endpoints: str | None = option(
        None, "read the store from the file of kvrelay up", metavar="FILE"
    )
    timeout: float = option(30.0, "seconds for one answer of a store", low=0.01, high=600.0)
    json: bool = option(False, "print JSON")

    def __post_init__(self) -> None:
        if (self.store is None) == (self.endpoints is None):
            raise Rejected("store", "give one of --store URL and --endpoints FILE")

    def urls(self) -> list[str]:
        """The stores' URLs, after installing this process's credentials."""
        text = store_of(Path(self.endpoints)) if self.endpoints is not None else self.store
        if not text:
            raise Rejected("store", "is empty: give a URL such as kvrelay://HOST:PORT")
        urls = split_urls(text)
        addresses = (urlsplit(url).netloc for url in urls)
        policy.install(authorized(self, self.endpoints, *addresses), ADMIN_FIRST)
        twice = [name for name, count in Counter(map(public_url, urls)).items() if count > 1]
        if twice:
            raise Rejected("store", f"{twice[0]} is in the list twice")
        return urls


@contextmanager
def connected(url: str) -> Iterator[Store]:
    """A connection to a store, closed at the end of the block."""
    with closing(connect(standalone_url(url))) as store:
        yield store


@contextmanager
def browsing(url: str) -> Iterator[StoreBrowser]:
    """A connection for administration, closed at the end of the block."""
    with closing(browse(standalone_url(url))) as browser:
        yield browser


def as_json(listed: ListedBlock) -> dict[str, object]:
    """Every field as JSON."""
    found = asdict(listed)
    found["name"] = listed.name.hex()
    found["bytes"] = found.pop("size")
    return found


def places(listed: ListedBlock) -> str:
    """Where the block is: memory, disk or both."""
    found = [name for name, held in (("memory", listed.memory), ("disk", listed.disk)) if held]
    return ", ".join(found) or "-"
