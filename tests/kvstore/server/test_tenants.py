"""Tenants: whatever one of them writes into a request, it reaches its own blocks and no others."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrelay.block.header import decode
from kvrelay.block.name import FAMILY_MASK
from kvrelay.cli.dispatch import main
from kvrelay.errors import Exhausted, KvrelayError, NotFound, Rejected
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import Credentials, load
from kvrelay.rpc.security.identity import Caller, CallerKind, Tenant
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.security.policy import Security
from kvrelay.usage import Miss
from kvrelay.v1 import store_pb2 as pb
from kvstore import Block, Lease, PutStatus, Tail
from kvstore.base import NameQuery
from kvstore.claims import Claim, prefix_of
from kvstore.client.admin import StoreAdmin
from kvstore.client.remote import RemoteStore
from kvstore.limits import StoreLimits
from kvstore.server.block_store import ENTRY_BYTES, BlockStore
from kvstore.server.tenants import OPEN_SCOPE, TenantScope, TenantTable
from kvstore.wire.buffers import data_messages
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import TIMEOUT, get, make, name_of, present, put
from tests.secured import ADMIN, ALICE, BOB, SERVICE, write_credentials

CAROL = "carol-secret-of-the-test"
TOKENS = f"""
service = "{SERVICE}"
admin = "{ADMIN}"
fleet = "fleet-secret-of-the-test"
[tenants.alice]
token = "{ALICE}"
store-bytes = "2MiB"
[tenants.bob]
token = "{BOB}"
store-bytes = "1MiB"
[tenants.carol]
token = "{CAROL}"
"""
Connect = Callable[..., RemoteStore]


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_credentials(tmp_path_factory.mktemp("tenants"), TOKENS)


@pytest.fixture(scope="module")
def address(credentials: str) -> Iterator[str]:
    process, url = start_service("--budget=8MiB", f"--credentials={credentials}")
    yield url.removeprefix("kvrelay://")
    stop(process)


def showing(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels opened from now on show this token."""
    monkeypatch.setattr(policy, "_installed", Security(credentials=Credentials(token)))


@pytest.fixture
def connect(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    stores: list[RemoteStore] = []

    def make_store(token: str, transport: str | None = None) -> RemoteStore:
        showing(token, monkeypatch)
        stores.append(RemoteStore(address, transport))
        return stores[-1]

    make_store(ADMIN).clear(TIMEOUT)
    yield make_store
    for store in stores:
        store.close()


@pytest.mark.parametrize("transport", ["socket", "grpc"])
def test_two_tenants_have_two_blocks_of_one_name(connect: Connect, transport: str) -> None:
    alice, bob, fleet = (
        connect(ALICE, transport),
        connect(BOB, transport),
        connect(SERVICE, transport),
    )
    ours = make(300_000)
    theirs = make(300_000, like=ours)
    assert name_of(ours) == name_of(theirs)
    assert put(alice, ours) == [PutStatus.STORED]
    for other in (bob, fleet):
        assert present(other, ours) == [False]
        assert other.survey(NameQuery([name_of(ours)], ttl=1.0), TIMEOUT).sizes == (None,)
        assert other.lookup(NameQuery([], [Tail(0, name_of(ours))], ttl=1.0), TIMEOUT).tail is None
        assert get(other, ours)[0].header is None
    assert put(bob, theirs) == [PutStatus.STORED]
    assert get(alice, ours)[0].header == ours.header
    assert get(bob, theirs)[0].header == theirs.header
    assert present(fleet, ours) == [False]


def test_a_tenant_may_have_a_block_looked_at_again(connect: Connect) -> None:
    alice, block = connect(ALICE), make(1000)
    put(alice, block)
    request = pb.RecheckRequest(name=name_of(block))
    assert not alice._calls.stub.Recheck(request, timeout=TIMEOUT).removed
    assert present(alice, block) == [True]


def test_why_a_block_is_missing_says_nothing_of_others(connect: Connect) -> None:
    alice, bob, admin = connect(ALICE), connect(BOB), connect(ADMIN)
    block, first_block_hash = make(), 7
    offered = pb.Claim(name=name_of(block), length=block.size, first_block_hash=first_block_hash)
    assert raw_put(alice, offered, block) == pb.VERDICT_STORED
    other = make()
    other_model = first_block_hash ^ FAMILY_MASK
    for asked, known in (
        (first_block_hash, Miss.OTHER_NUMERICS),
        (other_model, Miss.OTHER_NAMESPACE),
    ):
        for tenant, reason in ((alice, known), (bob, Miss.NEVER_STORED)):
            query = NameQuery([name_of(other)], first_block_hashes=[asked])
            assert tenant.lookup(query, TIMEOUT).missing is reason
    admin.clear(TIMEOUT)
    for tenant, reason in ((alice, Miss.CLEARED), (bob, Miss.NEVER_STORED)):
        assert tenant.lookup(NameQuery([name_of(block)]), TIMEOUT).missing is reason


def channel(address: str, token: str, monkeypatch: pytest.MonkeyPatch) -> StoreAdmin:
    showing(token, monkeypatch)
    return StoreAdmin(address)


def raw_put(store: RemoteStore, claim: pb.Claim, block: Block, ticket: int = 0) -> int:
    """A ``Put`` made by hand; the verdict."""
    head = pb.PutRequest(head=pb.PutHead(ticket=ticket, claims=[claim])).SerializeToString()
    messages = [head, *data_messages([memoryview(block.header), block.payload])]
    return store._calls.put(iter(messages), timeout=TIMEOUT).verdicts[0]


def test_numbers_of_leases_and_tickets_are_of_no_use_to_others(connect: Connect) -> None:
    alice, bob = connect(ALICE), connect(BOB)
    block = make(100_000)
    put(alice, block)
    held = alice.lookup(NameQuery([name_of(block)], ttl=60.0), TIMEOUT)
    assert held.lease is not None
    bob.release([held.lease], TIMEOUT)
    admin = connect(ADMIN)
    assert admin.stats(TIMEOUT).leases == 1
    new = make(1000)
    claim = pb.Claim(name=name_of(new), length=new.size)
    grant = alice._calls.stub.Reserve(pb.ReserveRequest(claims=[claim]), timeout=TIMEOUT)
    assert raw_put(bob, claim, new, grant.ticket) == pb.VERDICT_EXPIRED
    assert admin.stats(TIMEOUT).reservations == 1  # and what it was given up for stands
    assert raw_put(alice, claim, new, grant.ticket) == pb.VERDICT_STORED
    alice.release([held.lease], TIMEOUT)
    assert admin.stats(TIMEOUT).leases == 0


def test_memory_is_shared_with_nobody_where_there_are_tenants(connect: Connect) -> None:
    for token in (ALICE, SERVICE, ADMIN):
        offered = connect(token)._calls.stub.GetTransports(
            pb.GetTransportsRequest(), timeout=TIMEOUT
        )
        assert (offered.unix_socket, offered.arena_bytes) == ("", 0)
        assert offered.socket_port


def test_who_looks_after_the_store_needs_another_credential(
    address: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, fleet, admin = connect(ALICE), connect(SERVICE), connect(ADMIN)
    block, other = make(), make()
    put(alice, block)
    put(fleet, other)
    for token in (ALICE, SERVICE):
        hand = channel(address, token, monkeypatch)
        for attempt in (
            lambda hand=hand: list(hand.list(TIMEOUT)),
            lambda hand=hand: next(hand.watch(TIMEOUT)),
            lambda hand=hand: hand.inspect(name_of(block), TIMEOUT, "alice"),
        ):
            with pytest.raises(KvrelayError, match="may not call"):
                attempt()
        hand.close()
    for store in (alice, fleet):
        with pytest.raises(KvrelayError, match="may not call"):
            store.clear(TIMEOUT)
    with pytest.raises(KvrelayError, match="may not call"):
        present(connect(CAROL), block)  # she has no place in this store
    with pytest.raises(KvrelayError, match="no token that this server knows"):
        present(connect("somebody-elses-token"), block)
    looking = channel(address, ADMIN, monkeypatch)
    listed = {(one.tenant, one.name) for one in looking.list(TIMEOUT)}
    assert listed == {("alice", name_of(block)), ("", name_of(other))}
    assert looking.inspect(name_of(block), TIMEOUT, "alice")[1] == decode(block.header)
    with pytest.raises(NotFound):
        looking.inspect(name_of(block), TIMEOUT)
    with pytest.raises(NotFound, match="no tenant 'carol'"):
        looking.inspect(name_of(block), TIMEOUT, "carol")
    told = next(looking.watch(TIMEOUT)).page.blocks
    assert {(info.tenant, info.name) for info in told} == listed
    looking.close()
    assert present(admin, block) == [False]  # an admin acts for no tenant


def test_each_sees_its_own_figures(connect: Connect) -> None:
    alice, bob, admin = connect(ALICE), connect(BOB), connect(ADMIN)
    put(alice, make(1000), make(2000))
    rows = {row.name: row for row in figures(admin).tenants}
    assert set(rows) == {"", "alice", "bob"}
    assert (rows["alice"].entries, rows["alice"].quota) == (2, 2 << 20)
    assert (rows["bob"].entries, rows["bob"].bytes) == (0, 0)
    assert rows[""].quota == (8 - 3) << 20
    for store, name in ((alice, "alice"), (bob, "bob")):
        mine = figures(store)
        assert [row.name for row in mine.tenants] == [name]
        assert (mine.entries, mine.stored, mine.budget) == (0, 0, 0)  # nothing of all the others
    assert list(figures(connect(SERVICE)).tenants) == []


def test_who_looks_after_the_store_sees_what_each_tenant_has(
    connect: Connect, credentials: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alice = connect(ALICE)
    put(alice, make(1000), make(2000))
    words = ["store", "stats", "--store", alice.url, "--credentials", credentials]
    assert main([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert set(found["tenants"]) == {"services", "alice", "bob"}
    assert (found["tenants"]["alice"]["entries"], found["tenants"]["bob"]["quota"]) == (2, 1 << 20)
    assert main(words) == 0
    assert "tenants: alice: quota" in capsys.readouterr().out


def figures(store: RemoteStore) -> pb.GetStatsResponse:
    return store._calls.stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT)


def test_a_flood_takes_nothing_from_others_within_their_quotas(connect: Connect) -> None:
    alice, bob, fleet = connect(ALICE), connect(BOB), connect(SERVICE)
    ours, theirs, many = ([make(90_000) for _ in range(n)] for n in (10, 20, 40))
    put(bob, *ours)
    put(alice, *theirs)
    put(fleet, *many)
    for flooder in (bob, fleet, alice):
        for _ in range(12):
            put(flooder, *(make(90_000) for _ in range(10)))
            for store, blocks in ((bob, ours), (alice, theirs), (fleet, many)):
                assert store is flooder or all(present(store, *blocks))
        if flooder is bob:  # what is over its quota goes as soon as others want the room
            ours = [make(90_000) for _ in range(10)]
            put(bob, *ours)
        elif flooder is fleet:
            many = []


def test_blocks_on_disk_are_their_tenants_still(
    credentials: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ["--budget=4MiB", f"--credentials={credentials}", f"--disk={tmp_path}", "--restore"]
    block = make(50_000)
    for turn in range(2):
        process, url = start_service(*disk)
        showing(ALICE, monkeypatch)
        alice = RemoteStore(url.removeprefix("kvrelay://"))
        showing(BOB, monkeypatch)
        bob = RemoteStore(url.removeprefix("kvrelay://"))
        try:
            if not turn:
                assert put(alice, block) == [PutStatus.STORED]
            assert present(bob, block) == [False]
            assert get(bob, block)[0].header is None
            assert get(alice, block)[0].header == block.header
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            alice.close()
            bob.close()
            stop(process)


def tenant(name: str, store_bytes: int | None, salt: bytes = b"") -> Tenant:
    return Tenant(name, salt or name.encode(), store_bytes=store_bytes)


def test_quotas_must_fit_and_salts_must_differ() -> None:
    with pytest.raises(Rejected, match="larger budget"):
        TenantTable.of([tenant("a", 60), tenant("b", 50)], 100)
    with pytest.raises(Rejected, match="the same salt"):
        TenantTable.of([tenant("a", 6, b"x"), tenant("b", 5, b"x")], 100)
    assert not TenantTable.of([tenant("a", None)], 100).owners
    known = TenantTable.of([tenant("a", 60), tenant("b", None)], 100)
    assert {owner.name: owner.quota for owner in known.owners.values()} == {"": 40, "a": 60}
    scope = known.scope(Caller(CallerKind.CLIENT, tenant("a", 60)))
    assert (scope, OPEN_SCOPE) == (known.named("a"), known.scope(Caller(CallerKind.SERVICE)))
    assert known.title(scope.key(b"n" * 32)) == "a"
    stranger = TenantScope(b"s" * 16).key(b"n" * 32)
    assert known.title(stranger) == prefix_of(stranger).hex()


def test_store_bytes_in_the_file(tmp_path: Path) -> None:
    known = load(SecurityOptions(credentials=write_credentials(tmp_path, TOKENS)))
    assert {t.name: t.store_bytes for t in known.tenants} == {
        "alice": 2 << 20,
        "bob": 1 << 20,
        "carol": None,
    }
    for bad in ('"much"', "0", "true", "1.5"):
        path = write_credentials(tmp_path, TOKENS.replace('"2MiB"', bad))
        with pytest.raises(Rejected, match=r"alice\.store-bytes"):
            load(SecurityOptions(credentials=path))


@pytest.mark.parametrize("disk_budget", [None, 1 << 20])
def test_random_floods_evict_only_from_those_over_their_quota(disk_budget: int | None) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    budget = 400_000
    names = ["a", "b", "c"]
    tenants = TenantTable.of([tenant(name, 100_000) for name in names], budget)
    block_store = BlockStore(StoreLimits(budget, disk_budget=disk_budget), tenants)
    scopes = [OPEN_SCOPE, *(tenants.named(name) for name in names)]
    quota = {scope.prefix: tenants.owners[scope.prefix].quota for scope in scopes}
    leases: list[int] = []
    for _ in range(1500):
        scope = source.choice(scopes)
        block = make(source.choice([100, 3000, 20_000]))
        before = {owner.prefix: (count, size) for owner, count, size in block_store.usage()}
        grant = block_store.reserve(
            scope.claims([Claim(name_of(block), block.size, partial=False)])
        )
        if grant.ticket is not None:
            (slot,) = block_store.slots(grant.ticket, [scope.key(name_of(block))])
            assert slot is not None
            slot.copy_from(memoryview(block.header + bytes(block.payload)))
            assert block_store.settle([slot])[0].status is PutStatus.STORED
        for owner, count, size in block_store.usage():
            if owner.prefix != scope.prefix and count < before[owner.prefix][0]:
                # Up to one block below: the last one that went was over the quota in part.
                assert size > quota[owner.prefix] - 21_000 - ENTRY_BYTES
                assert before[owner.prefix][1] > quota[owner.prefix]
        if source.random() < 0.1:
            lease = block_store.lookup([scope.key(name_of(block))], [], 60.0).lease
            leases += [] if lease is None else [lease.id]
        if len(leases) > 5:
            block_store.release([leases.pop(0)])
    block_store.release(leases)
    assert block_store.stats().counters.evicted > 0
    block_store.clear()
    assert all((count, size) == (0, 0) for _, count, size in block_store.usage())


def test_what_one_tenant_reserves_leaves_the_others_their_part() -> None:
    """A reservation needs no bytes, so it would be the cheapest way to keep others from writing."""
    budget = 300_000
    block_store = BlockStore(
        StoreLimits(budget), TenantTable.of([tenant("a", 1000), tenant("b", 1000)], budget)
    )

    def reserve(name: str, size: int) -> PutStatus:
        claim = Claim(name_of(make()), size, partial=False)
        return block_store.reserve(block_store.tenants.named(name).claims([claim])).verdicts[0]

    greedy = [reserve("a", 10_000) for _ in range(10)]
    assert greedy == [PutStatus.RESERVED] * 5 + [PutStatus.NO_ROOM] * 5
    assert [reserve(name, 25_000) for name in ("b", "", "b", "")] == [PutStatus.RESERVED] * 4
    assert reserve("b", 1000) is PutStatus.NO_ROOM


def test_the_leases_of_a_tenant_are_bounded_and_cost_others_nothing() -> None:
    budget = 1 << 20
    tenants = TenantTable.of([tenant("a", 1000), tenant("b", 1000)], budget)
    block_store = BlockStore(StoreLimits(budget, leased=10_000), tenants)
    names: dict[str, list[bytes]] = {}
    for name in ("a", "b"):
        block, scope = make(100), tenants.named(name)
        grant = block_store.reserve(
            scope.claims([Claim(name_of(block), block.size, partial=False)])
        )
        (slot,) = block_store.slots(grant.ticket or 0, [scope.key(name_of(block))])
        assert slot is not None
        slot.copy_from(memoryview(block.header + bytes(block.payload)))
        assert block_store.settle([slot])[0].status is PutStatus.STORED
        names[name] = [scope.key(name_of(block))]
    calls: list[tuple[Callable[[list[bytes]], Lease | None], int]] = [
        (lambda names: block_store.lookup(names * 900, [], 60.0).lease, 10),
        (lambda names: block_store.survey(names, 60.0).lease, 154),
        (lambda names: block_store.locate(names, 60.0).lease, 154),
    ]
    for call, most in calls:
        held = [call(names["a"]) for _ in range(most)]
        with pytest.raises(Exhausted, match="give some back"):
            call(names["a"])
        held.append(call(names["b"]))
        assert None not in held
        assert block_store.lookup(names["a"], [], 0.0).lead == 1  # without a lease it may ask
        block_store.release(lease.id for lease in held if lease is not None)
    assert block_store.stats().leases == 0


def test_a_header_of_another_name_is_refused_for_tenants_too(connect: Connect) -> None:
    alice, block, other = connect(ALICE), make(), make()
    claim = pb.Claim(name=name_of(other), length=block.size)
    assert raw_put(alice, claim, block) == pb.VERDICT_CORRUPT
