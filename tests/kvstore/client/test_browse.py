"""Any store by its URL, for those who look after it: listed, inspected, read back and checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrelay.block.header import decode
from kvrelay.errors import Corrupt, NotFound, Rejected
from kvstore import Offer, Store, connect
from kvstore.base import StoreBrowser
from kvstore.client.browse import blocks_by_digits, browse, resolve_digits
from kvstore.client.verify import verify_blocks
from tests.kvstore.conftest import url_of
from tests.kvstore.redis.redisserver import Server
from tests.kvstore.rig import TIMEOUT, make, name_of, put


@pytest.fixture(params=["shm", "redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    return url_of(request.param, request)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    made = connect(url)
    made.clear(TIMEOUT)
    yield made
    made.clear(TIMEOUT)
    made.close()


@pytest.fixture
def browser(url: str) -> Iterator[StoreBrowser]:
    made = browse(url)
    yield made
    made.close()


def test_every_block_is_listed_inspected_and_verified(store: Store, browser: StoreBrowser) -> None:
    assert list(browser.list(TIMEOUT)) == []
    blocks = {name_of(b): b for b in (make(100 + i, count=i) for i in range(1, 40))}
    put(store, *blocks.values())
    listed = list(browser.list(TIMEOUT))
    assert {(one.name, one.size, one.tokens) for one in listed} == {
        (name, block.size, decode(block.header).count) for name, block in blocks.items()
    }
    assert len(list(browser.list(TIMEOUT, limit=7))) == 7
    name, block = next(iter(blocks.items()))
    one, header = browser.inspect(name, TIMEOUT)
    assert (one.name, header) == (name, decode(block.header))
    with pytest.raises(NotFound):
        browser.inspect(bytes(32), TIMEOUT)
    assert [(c.error, c.removed) for c in verify_blocks(store, listed, TIMEOUT)] == [
        (None, False)
    ] * 39


def test_names_may_be_shortened_as_long_as_they_are_unique(
    store: Store, browser: StoreBrowser
) -> None:
    blocks = [make() for _ in range(40)]
    put(store, *blocks)
    names = [name_of(block).hex() for block in blocks]
    for name in names[:10]:
        digits = next(n for n in range(1, 65) if sum(o.startswith(name[:n]) for o in names) == 1)
        assert resolve_digits(browser, name[:digits], TIMEOUT).name.hex() == name
        assert resolve_digits(browser, name[: digits + 1].upper(), TIMEOUT).name.hex() == name
    many = max(names, key=lambda name: sum(other[0] == name[0] for other in names))
    assert {one.name.hex() for one in blocks_by_digits(browser, many[0], TIMEOUT)} == {
        name for name in names if name[0] == many[0]
    }
    with pytest.raises(Rejected, match="begins the names of several blocks"):
        resolve_digits(browser, many[0], TIMEOUT)
    with pytest.raises(NotFound, match="no block"):
        resolve_digits(browser, "0" * 64, TIMEOUT)
    for wrong in ("", "xyz", "z", "0é", "0 1", "0" * 66):
        with pytest.raises(Rejected) as caught:
            resolve_digits(browser, wrong, TIMEOUT)
        assert caught.value.field == "name"


def test_what_is_gone_when_it_is_read_is_no_fault(store: Store, browser: StoreBrowser) -> None:
    kept, gone = make(count=3), make(count=3)
    put(store, kept, gone)
    listed = sorted(browser.list(TIMEOUT), key=lambda one: one.name == name_of(gone))
    store.clear(TIMEOUT)
    put(store, kept)
    assert [(c.error, c.removed) for c in verify_blocks(store, listed, TIMEOUT)] == [
        (None, False),
        (None, True),
    ]


@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_what_is_no_block_in_redis_is_listed_and_wrong(
    store: Store, browser: StoreBrowser, redis_server: Server
) -> None:
    names = [bytes([n]) * 32 for n in range(3)]
    with redis_server.client() as client:
        client.set(f"kvrelay:{names[0].hex()}", "x")
        client.rpush(f"kvrelay:{names[1].hex()}", "x")
        client.set(f"kvrelay:other:{names[2].hex()}", "of another store")
    listed = sorted(browser.list(TIMEOUT), key=lambda one: one.name)
    assert [(one.name, one.size) for one in listed] == [(names[0], 1), (names[1], 0)]
    assert all(isinstance(c.error, Corrupt) for c in verify_blocks(store, listed, TIMEOUT))
    assert not any(c.removed for c in verify_blocks(store, listed, TIMEOUT))
    for name in names[:2]:
        with pytest.raises(Corrupt):
            browser.inspect(name, TIMEOUT)


def test_what_is_to_go_by_tls_is_not_looked_into_without() -> None:
    with pytest.raises(Rejected, match="--tls-ca"):
        browse("kvrelays://127.0.0.1:1")


@pytest.mark.parametrize("url", ["memory://x", "s3://x", "kvrelay"])
def test_what_cannot_be_looked_into_is_refused(url: str) -> None:
    with pytest.raises(Rejected) as caught:
        browse(url)
    assert caught.value.field == "store"


def test_a_partial_block_is_told_by_the_service(service_url: str) -> None:
    store, browser = connect(service_url), browse(service_url)
    block = make(count=2)
    store.put([Offer(name_of(block), block.size, True, lambda: block)], TIMEOUT)
    assert resolve_digits(browser, name_of(block).hex(), TIMEOUT).partial
    store.clear(TIMEOUT)
    store.close()
    browser.close()
