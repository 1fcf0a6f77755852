"""Hints over the wire: who may send them, what is refused, what a tenant's hints keep at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc
import pytest

from kvrelay.errors import KvrelayError, Rejected
from kvrelay.rpc.channel import open_sync_channel
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.policy import Security
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import store_pb2 as pb
from kvrelay.v1 import store_pb2_grpc
from kvstore import Block
from kvstore.client.remote import RemoteStore
from kvstore.limits import MAX_HINTS, MAX_LATE_MS, MAX_NAMES, MAX_SOON_MS
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import TIMEOUT, address_of, make, name_of, present, put
from tests.secured import ADMIN, ALICE, SERVICE, write_credentials

SIZE = 64 << 10
QUOTA = 8
"""Blocks that fit into the quota of alice, less one for their headers."""
TOKENS = f"""
service = "{SERVICE}"
admin = "{ADMIN}"
fleet = "fleet-secret-of-the-test"
[tenants.alice]
token = "{ALICE}"
store-bytes = "512KiB"
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    credentials = write_credentials(tmp_path_factory.mktemp("hints"), TOKENS)
    process, url = start_service("--budget=4MiB", "--eviction=lru", f"--credentials={credentials}")
    yield address_of(url)
    stop(process)


def stub(
    address: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> store_pb2_grpc.StoreServiceStub:
    monkeypatch.setattr(policy, "_installed", Security(credentials=Credentials(token)))
    return store_pb2_grpc.StoreServiceStub(open_sync_channel(address))


def soon(blocks: Sequence[Block], tenant: str) -> pb.BlockHint:
    names = [name_of(block) for block in blocks]
    return pb.BlockHint(names=names, reuse=pb.REUSE_SOON, life_ms=60_000, tenant=tenant)


def test_a_tenants_hints_keep_its_quota_and_no_more(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice its quota is hinted, block by block; then the store is filled with other blocks."""
    hints = stub(address, SERVICE, monkeypatch)
    store = RemoteStore(address, "grpc")
    hinted = [make(SIZE) for _ in range(2 * QUOTA)]
    put(store, *hinted)
    response = hints.Hint(pb.HintRequest(hints=[soon([block], "alice") for block in hinted]))
    assert response.boot == store.stats(TIMEOUT).boot
    for _ in range(32):
        put(store, make(SIZE), make(SIZE))
    assert sum(present(store, *hinted)) == QUOTA - 1
    counters = store.stats(TIMEOUT).counters
    assert (counters.hints_received, counters.hints_refused) == (2 * QUOTA, QUOTA + 1)
    store.close()


@pytest.mark.parametrize("token", [ALICE, ""])
def test_only_services_may_hint(token: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub(address, token, monkeypatch).Hint(pb.HintRequest())
    assert caught.value.code() in (
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    )


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.HintRequest(hints=[pb.BlockHint()] * (MAX_HINTS + 1)), "hints"),
        (
            pb.HintRequest(hints=[pb.BlockHint(names=[b"n" * 32] * (MAX_NAMES // 2 + 1))] * 2),
            "hints.names",
        ),
        (pb.HintRequest(hints=[pb.BlockHint(names=[b"short"])]), "hints[0].names[0]"),
        (
            pb.HintRequest(hints=[pb.BlockHint(life_ms=MAX_SOON_MS + 1, reuse=pb.REUSE_SOON)]),
            "hints[0].life_ms",
        ),
        (
            pb.HintRequest(hints=[pb.BlockHint(life_ms=MAX_LATE_MS + 1, reuse=pb.REUSE_LATE)]),
            "hints[0].life_ms",
        ),
        (pb.HintRequest(hints=[pb.BlockHint(tenant="t" * 300)]), "hints[0].tenant"),
    ],
)
def test_a_bad_hint_is_refused_by_field(
    request_: pb.HintRequest, field: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub(address, SERVICE, monkeypatch).Hint(request_)
    error: KvrelayError = from_rpc_error(caught.value)
    assert isinstance(error, Rejected)
    assert error.field == field


def test_a_reuse_that_is_unknown_is_ignored(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hints = stub(address, SERVICE, monkeypatch)
    store = RemoteStore(address, "grpc")
    before = store.stats(TIMEOUT).counters.hints_received
    later = pb.BlockHint(names=[b"n" * 32], life_ms=1000)
    later.reuse = 7  # type: ignore[assignment]
    hints.Hint(pb.HintRequest(hints=[later]))
    assert store.stats(TIMEOUT).counters.hints_received == before
    store.close()
