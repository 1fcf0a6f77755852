"""Another user of the machine: ``python -m tests.secure.stranger``, with a target as JSON on stdin.

Becomes the user 65534 if it may, tries everything, and prints what became of each attempt as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from kvrelay.block.header import checksums, decode, encode, seal
from kvrelay.block.mac import BlockKey
from kvrelay.block.name import child_name, root_name
from kvrelay.errors import KvrelayError
from kvrelay.rpc.bearer import HEADER, SCHEME
from kvrelay.rpc.channel import open_sync_channel
from kvrelay.v1 import decode_pb2, prefill_pb2, router_pb2, store_pb2, types_pb2, worker_pb2
from kvstore import Block, Offer
from kvstore.client.remote import RemoteStore
from kvstore.client.transports.selector import TRANSPORTS
from kvstore.wire.frames import Op, RequestFrame
from kvstore.wire.sockets import unix_address
from tests.kvstore.rig import make, put

NOBODY = 65534
SECONDS = 5.0
CALL_SECONDS = 60.0
INVENTED = "a-token-that-this-user-invented"
BLOCKS = 12
Call = tuple[str, str, Message]
"""The role that is called, the method, the message."""

SERVICES = {
    "store": [store_pb2.DESCRIPTOR.services_by_name["StoreService"]],
    "prefill": [
        worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
        prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
    ],
    "decode": [
        worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
        decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
    ],
    "router": [router_pb2.DESCRIPTOR.services_by_name["RouterService"]],
}


def become_nobody() -> bool:
    """Whether this process has another user than its parent now."""
    if os.getuid() != 0:
        return False
    "loaded while it can be read".encode("idna")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return True


def _codes(address: str, services: list[ServiceDescriptor]) -> dict[str, str]:
    """The code of the status of each method, called with an empty message."""
    codes = {}
    with open_sync_channel(address) as channel:
        for service in services:
            for name in service.methods_by_name:
                make_call: grpc.UnaryStreamMultiCallable[bytes, bytes]
                make_call = channel.unary_stream(f"/{service.full_name}/{name}")
                call = make_call(b"", timeout=SECONDS)
                codes[name] = _code(call)
    return codes


def _code(call: Iterator[bytes]) -> str:
    """``OK`` as soon as there is an answer.

    A failed call is its own exception: with the traceback it would be in a cycle and be freed when
    the interpreter ends. Then it waits for its lock, for ever if a thread of gRPC that the
    interpreter has ended holds it.
    """
    try:
        next(call, None)
    except grpc.RpcError as error:
        return cast(grpc.Call, error.with_traceback(None)).code().name
    cast(grpc.Call, call).cancel()
    return "OK"


def poison(address: str, transport: str) -> Counter[str]:
    """The outcomes of puts of small and of large blocks, by a transport."""
    outcomes = Counter[str]()
    store = RemoteStore(address, transport)
    for number in range(BLOCKS):
        try:
            (status,) = put(store, make(4096 if number % 2 else 1 << 20))
            outcomes[status.value] += 1
        except KvrelayError:
            outcomes["refused"] += 1
    store.close()
    return outcomes


def valid_calls(target: Mapping[str, str]) -> dict[str, str]:
    """Calls that an admin could make, without a token and with one that this user invents."""
    calls: dict[str, Call] = {
        "prefill becomes decode": (
            "prefill",
            "WorkerService/SetRole",
            worker_pb2.SetRoleRequest(role=types_pb2.ROLE_DECODE),
        ),
        "decode becomes prefill": (
            "decode",
            "WorkerService/SetRole",
            worker_pb2.SetRoleRequest(role=types_pb2.ROLE_PREFILL),
        ),
        "announce": (
            "router",
            "RouterService/Announce",
            router_pb2.AnnounceRequest(address=target["announced"], ttl_seconds=60.0),
        ),
        "announce that decode leaves": (
            "router",
            "RouterService/Announce",
            router_pb2.AnnounceRequest(address=target["decode"], leaving=True),
        ),
        "drain prefill": ("prefill", "WorkerService/Drain", worker_pb2.DrainRequest()),
        "drain decode": ("decode", "WorkerService/Drain", worker_pb2.DrainRequest()),
        "clear": ("store", "StoreService/Clear", store_pb2.ClearRequest()),
    }
    codes = {}
    for name, (role, method, message) in calls.items():
        with open_sync_channel(target[role]) as channel:
            make_call: grpc.UnaryStreamMultiCallable[bytes, bytes]
            make_call = channel.unary_stream(f"/kvrelay.v1.{method}")
            for token in (None, INVENTED):
                metadata = () if token is None else ((HEADER, SCHEME + token),)
                sent = message.SerializeToString()
                call = make_call(sent, timeout=CALL_SECONDS, metadata=metadata)
                codes[f"{name}, {'a' if token else 'no'} token"] = _code(call)
    return codes


def forge(address: str, transport: str, like: bytes, tokens: Sequence[int]) -> list[str]:
    """Put zeros as the KV of a prompt, signed with a key of this user: what became of each block.

    ``like`` is the header of a block of the cluster: namespace, shape and names are the cluster's.
    """
    real = decode(like)
    size, key = real.count, BlockKey(b"a key of this user's own, 32 bytes")
    payload = memoryview(bytes(real.payload_bytes))
    parent, offers = root_name(real.namespace), []
    for start in range(0, len(tokens), size):
        held = tuple(tokens[start : start + size])
        name = child_name(real.namespace, parent, held)
        summed = checksums(payload, real.heads)
        header = replace(real, parent=parent, name=name, tokens=held, checksums=summed)
        block = Block(seal(encode(header), payload, summed, key), payload)
        offers.append(Offer(name, block.size, False, partial(Block, block.header, payload)))
        parent = name
    with closing(RemoteStore(address, transport)) as store:
        try:
            return [outcome.status.value for outcome in store.put(offers, CALL_SECONDS)]
        except KvrelayError:
            return ["refused"]


def attach() -> list[str]:
    """What every shared-memory socket of a store on this machine answers to an ``ATTACH``."""
    names = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    answers = []
    for name in (name for name in names if name.startswith("@kvrelay-store-")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.settimeout(SECONDS)
                sock.connect(unix_address(name[1:]))
                sock.sendall(RequestFrame(Op.ATTACH).encode())
                answers.append("attached" if sock.recv(1) else "closed")
            except OSError:
                answers.append("closed")
    return answers


def read(path: str) -> str:
    """Whether a file, or a folder of processes' descriptors, can be read."""
    try:
        os.listdir(path) if path.endswith("fd") else Path(path).read_bytes()
    except OSError:
        return "refused"
    return "read"


def main() -> int:
    target = json.load(sys.stdin)
    attempts: dict[str, Callable[[], object]] = {
        **{role: partial(_codes, target[role], services) for role, services in SERVICES.items()},
        **{
            f"poison {transport}": partial(poison, target["store"], transport)
            for transport in TRANSPORTS
        },
        **{
            f"forge {transport}": partial(
                forge, target["store"], transport, bytes.fromhex(target["like"]), prompt
            )
            for transport, prompt in zip(TRANSPORTS, target["prompts"], strict=True)
        },
        "valid": partial(valid_calls, target),
        "attach": attach,
        "files": lambda: {path: read(path) for path in target["files"]},
    }
    another, only = become_nobody(), tuple(target["only"])
    made = {name: t() for name, t in attempts.items() if name.startswith(only)}
    print(json.dumps({"another user": another, **made}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
