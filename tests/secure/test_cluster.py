"""Every port of a secured cluster, called by peers that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvrelay import Client
from kvrelay.cli.authority import CertificateAuthority
from kvrelay.errors import KvrelayError, Mismatch, Rejected, Unavailable
from kvrelay.rpc.channel import ChannelOptions, open_sync_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.security.policy import Security
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    store_pb2,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from kvstore.client.calls import StoreCalls
from kvstore.client.remote import RemoteStore
from tests.secure.secured_cluster import SECONDS, Secured
from tests.secured import ADMIN, ALICE, SECRETS, SERVICE

pytestmark = pytest.mark.cluster
PROMPT = list(range(40))


def doors(secured: Secured) -> list[str]:
    return [spec.address for spec in secured.cluster.specs]


def refused(secured: Secured, address: str, options: ChannelOptions) -> grpc.StatusCode:
    """How a call to one port ends."""
    with open_sync_channel(address, options) as channel:
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        method = channel.unary_unary("/kvrelay.v1.WorkerService/GetInfo")
        code = method.future(b"", timeout=SECONDS).code()
    assert isinstance(code, grpc.StatusCode)
    return code


def expired(secured: Secured) -> Security:
    """Of a client that does not look at its own certificate, as ours do."""
    files, good = secured.party("late", secured.authority, -1), secured.options(SERVICE).security
    assert good is not None
    assert good.tls is not None
    cert, key = Path(files.cert).read_bytes(), Path(files.key).read_bytes()
    return replace(good, tls=replace(good.tls, cert=cert, key=key))


@pytest.mark.parametrize("case", ["plain", "no certificate", "wrong authority", "expired"])
def test_every_door_wants_a_certificate(secured: Secured, case: str) -> None:
    other = secured.party("other", CertificateAuthority())
    made: dict[str, Callable[[], Security]] = {
        "plain": lambda: policy.load(SecurityOptions(token=SERVICE)),
        "no certificate": lambda: policy.load(
            SecurityOptions(tls_ca=secured.files.ca, token=SERVICE)
        ),
        "wrong authority": lambda: policy.load(other.options(token=SERVICE)),
        "expired": lambda: expired(secured),
    }
    options = ChannelOptions(security=made[case]())
    for address in doors(secured):
        assert refused(secured, address, options) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("token", "code"),
    [
        (None, grpc.StatusCode.UNAUTHENTICATED),
        ("wrong-secret-of-the-test", grpc.StatusCode.UNAUTHENTICATED),
        (ALICE, grpc.StatusCode.PERMISSION_DENIED),
    ],
)
def test_every_door_wants_a_token(
    secured: Secured, token: str | None, code: grpc.StatusCode
) -> None:
    for address in doors(secured):
        assert refused(secured, address, secured.options(token)) is code


def test_the_right_token_and_the_wrong_one(secured: Secured) -> None:
    assert len(secured.complete(ALICE, PROMPT).token_ids) == 8
    with pytest.raises(Rejected, match="credentials"):
        secured.complete(ALICE[:-1], PROMPT)
    with pytest.raises(Unavailable), Client(secured.cluster.router, token=ALICE) as plain:
        plain.complete(timeout=SECONDS, token_ids=PROMPT)
    files = secured.files
    with Client(
        secured.cluster.router,
        token=ALICE,
        tls_ca=files.ca,
        tls_cert=files.cert,
        tls_key=files.key,
    ) as client:
        assert client.complete(timeout=SECONDS, token_ids=PROMPT, max_tokens=2).token_ids
        with pytest.raises(Rejected, match="may not call"):
            client.workers()


def test_what_only_admins_may(secured: Secured) -> None:
    address = secured.cluster.addresses("decode")[0]
    for token, allowed in ((SERVICE, False), (ADMIN, True)):
        with open_sync_channel(address, secured.options(token)) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                found = stub.Audit(worker_pb2.AuditRequest(), timeout=SECONDS)
            except grpc.RpcError as error:
                meant: KvrelayError | None = from_rpc_error(error)
            else:
                meant = None
                assert not found.findings
        assert (meant is None) is allowed


def handed_over(secured: Secured, number: int) -> tuple[types_pb2.Leg, types_pb2.Handoff]:
    """A prefill leg of our own, as a router would ask for it."""
    leg = types_pb2.Leg(
        request_id=f"leg-{number}",
        prompt_token_ids=[number, *PROMPT],
        max_tokens=4,
        sampling=types_pb2.Sampling(temperature=0.0, ignore_eos=True),
        generation_id=number,
    )
    address = secured.cluster.addresses("prefill")[0]
    with open_sync_channel(address, secured.options(SERVICE)) as channel:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(
            prefill_pb2.PrefillRequest(leg=leg), timeout=SECONDS
        )
        _, first, last = list(call)
    leg.output_token_ids.append(first.first_token.token.id)
    leg.leg_index = 1
    return leg, last.handoff


def decode(secured: Secured, leg: types_pb2.Leg, handoff: types_pb2.Handoff) -> int:
    """Tokens that a decode worker makes of it."""
    request = decode_pb2.DecodeRequest(
        leg=leg,
        handoff=handoff,
    )
    address = secured.cluster.addresses("decode")[0]
    with open_sync_channel(address, secured.options(SERVICE)) as channel:
        try:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(request, timeout=SECONDS)
            return sum(len(response.tokens) for response in call)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def test_hand_offs_that_are_not_for_this_leg(secured: Secured) -> None:
    leg, handoff = handed_over(secured, 1)
    other, another = handed_over(secured, 2)
    assert len(handoff.signature) == 32
    unsigned = types_pb2.Handoff(
        saved_tokens=handoff.saved_tokens, last_block_name=handoff.last_block_name
    )
    cut = types_pb2.Handoff(
        saved_tokens=handoff.saved_tokens - 1,
        last_block_name=handoff.last_block_name,
        signature=handoff.signature,
    )
    huge = types_pb2.Handoff(
        saved_tokens=handoff.saved_tokens,
        last_block_name=b"x" * (1 << 20),
        signature=handoff.signature,
    )
    for whose, forged in ((leg, another), (other, handoff), (leg, unsigned), (leg, cut)):
        with pytest.raises(Mismatch, match=r"handoff\.signature"):
            decode(secured, whose, forged)
    with pytest.raises(Rejected, match=r"handoff\.last_block_name"):
        decode(secured, leg, huge)
    assert decode(secured, leg, handoff) == 3
    assert decode(secured, other, another) == 3


def test_the_store_offers_no_lane_and_keeps_shared_memory(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = policy.load(secured.files.options(token=SERVICE))
    monkeypatch.setattr(policy, "_installed", mine)
    address = secured.cluster.addresses("store")[0]
    calls = StoreCalls(address)
    offered = calls.transports(Deadline.after(SECONDS))
    calls.close()
    assert offered.socket_port == 0
    assert offered.arena_bytes > 0
    store = RemoteStore(address, "socket")
    try:
        with pytest.raises(Unavailable, match="socket"):
            next(iter(store.get([], SECONDS)))
    finally:
        store.close()


def test_a_store_by_tls_streams(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_installed", policy.load(secured.files.options(token=SERVICE)))
    store = RemoteStore(secured.cluster.addresses("store")[0], "grpc")
    try:
        assert store.stats(SECONDS).budget == 1 << 26
        with pytest.raises(Rejected, match="may not call"):
            store.clear(SECONDS)
    finally:
        store.close()


def test_secrets_are_told_nowhere(secured: Secured) -> None:
    with pytest.raises(Rejected):
        secured.complete("wrong-secret-of-the-test", PROMPT)
    told = "\n".join(secured.lines)
    assert "ready" in told
    commands = []
    for spec in secured.cluster.specs:
        pid = secured.cluster.process(spec.role, spec.index).pid
        commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " "))
    shown = (told, *commands, repr(secured.cluster.config), repr(secured.cluster.specs))
    shown += (repr(secured.cluster.describe()), repr(secured.cluster.security))
    fleet = secured.cluster.config.fleet_key
    key = Path(secured.files.key).read_text().splitlines()[1]
    for secret in (*SECRETS, fleet, key, "wrong-secret-of-the-test"):
        assert secret is not None
        assert not any(secret in text for text in shown)


def test_health_needs_a_certificate_and_no_token(secured: Secured) -> None:
    for address in doors(secured):
        with open_sync_channel(address, secured.options(None)) as channel:
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            method = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert method(b"", timeout=SECONDS) == b"\x08\x01"


def test_messages_of_the_store_are_not_for_clients(secured: Secured) -> None:
    address = secured.cluster.addresses("store")[0]
    with open_sync_channel(address, secured.options(ALICE)) as channel:
        for name in (
            "Lookup",
            "Reserve",
            "Locate",
            "GetTransports",
            "GetStats",
            "Clear",
            "PutSmall",
        ):
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            method = channel.unary_unary(f"/kvrelay.v1.StoreService/{name}")
            call = method.future(store_pb2.LookupRequest().SerializeToString(), timeout=SECONDS)
            assert call.code() is grpc.StatusCode.PERMISSION_DENIED
