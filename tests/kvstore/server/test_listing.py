"""What those see who look after the store: every block, and one in detail."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvrelay.block.header import decode
from kvrelay.errors import NotFound, Rejected
from kvrelay.v1 import store_pb2 as pb
from kvstore import Offer, PutStatus
from kvstore.base import NameQuery
from kvstore.client.admin import StoreAdmin
from kvstore.client.remote import RemoteStore
from kvstore.server.responses import PAGE
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import TIMEOUT, make, name_of, put


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    process, url = start_service("--budget=8MiB")
    yield url.removeprefix("kvrelay://")
    stop(process)


@pytest.fixture
def store(address: str) -> Iterator[RemoteStore]:
    made = RemoteStore(address)
    made.clear(TIMEOUT)
    yield made
    made.clear(TIMEOUT)
    made.close()


@pytest.fixture
def admin(address: str) -> Iterator[StoreAdmin]:
    made = StoreAdmin(address)
    yield made
    made.close()


def test_every_block_is_listed_with_what_it_is(store: RemoteStore, admin: StoreAdmin) -> None:
    assert list(admin.list(TIMEOUT)) == []
    whole, part = make(5000, count=7), make(10, count=3)
    put(store, whole)
    assert store.put([Offer(name_of(part), part.size, True, lambda: part)], TIMEOUT)[0].present
    held = store.lookup(NameQuery([name_of(whole)], ttl=60), TIMEOUT)
    first, second = admin.list(TIMEOUT)
    assert (first.name, first.size, first.tokens) == (name_of(whole), whole.size, 7)
    assert (first.partial, first.leases, first.memory, first.disk) == (False, 1, True, False)
    assert (second.name, second.tokens, second.partial, second.leases) == (
        name_of(part),
        3,
        True,
        0,
    )
    assert held.lease is not None
    store.release([held.lease], TIMEOUT)


def test_a_list_comes_in_pages_and_may_be_narrowed(
    store: RemoteStore, admin: StoreAdmin, address: str
) -> None:
    blocks = [make(1) for _ in range(2 * PAGE + 5)]
    for start in range(0, len(blocks), 500):
        assert set(put(store, *blocks[start : start + 500])) == {PutStatus.STORED}
    assert [one.name for one in admin.list(TIMEOUT)] == [name_of(block) for block in blocks]
    assert len(list(admin.list(TIMEOUT, limit=PAGE + 1))) == PAGE + 1
    name = name_of(blocks[9])
    assert name in [one.name for one in admin.list(TIMEOUT, prefix=name[:1])]
    assert [one.name for one in admin.list(TIMEOUT, prefix=name)] == [name]
    assert next(admin.list(TIMEOUT)).name == name_of(blocks[0])  # who stops early leaves nothing
    with pytest.raises(Rejected, match="prefix"):
        list(admin.list(TIMEOUT, prefix=bytes(33)))
    with grpc.insecure_channel(address) as channel:
        call: grpc.UnaryStreamMultiCallable[pb.ListRequest, pb.ListResponse] = channel.unary_stream(
            "/kvrelay.v1.StoreService/List",
            pb.ListRequest.SerializeToString,
            pb.ListResponse.FromString,
        )
        pages = [len(page.blocks) for page in call(pb.ListRequest(), timeout=TIMEOUT)]
    assert pages == [PAGE, PAGE, 5]


def test_one_block_is_shown_with_its_header(store: RemoteStore, admin: StoreAdmin) -> None:
    block = make(300, count=5)
    put(store, block)
    shown, header = admin.inspect(name_of(block), TIMEOUT)
    assert (shown.name, shown.size, shown.tokens) == (name_of(block), block.size, 5)
    assert header == decode(block.header)
    served = store.stats(TIMEOUT).counters.served
    admin.inspect(name_of(block), TIMEOUT)
    assert store.stats(TIMEOUT).counters.served == served  # to look is not to use
    with pytest.raises(NotFound, match="no block"):
        admin.inspect(bytes(32), TIMEOUT)
    with pytest.raises(Rejected, match="name"):
        admin.inspect(b"short", TIMEOUT)
