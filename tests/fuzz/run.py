"""``python -m tests.fuzz.run --messages N --seed N``: so many messages to every port of a cluster.

Where gRPC listens half of them are mutated messages of every method, half raw bytes. Then the same
for a cluster with mutual TLS. It ends with status 0 only if no process ended, none holds anything,
memory stopped growing, and every answer given meanwhile was right.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from tests.fuzz.http import HttpBytes, HttpPort, is_served
from tests.fuzz.memory import AT_ONCE_MIB, Memory, Readings, allowed_mib, at_rest
from tests.fuzz.ports import Bytes, Calls, Port, besiege, calls, flood
from tests.fuzz.stand import SECONDS, Stand, Witness, standing, tracebacks
from tests.fuzz.wire import SocketBytes, claimed, http1, http2, noise
from tests.secured import SERVICE

ROLES = ("router", "prefill", "decode", "store")
ROUNDS = 10
IDLE_SECONDS = 60.0


async def fuzz(
    stand: Stand, messages: int, seed: int, siege: float, rests: bool = False
) -> list[str]:
    """What went wrong with so many messages to each port; empty if nothing did.

    ``rests``: memory is read after a rest (``at_rest``), else at once.
    """
    before = stand.pids()

    async def memory() -> Memory:
        return await at_rest(stand.memory) if rests else stand.memory()

    witness, over = Witness(stand), asyncio.Event()
    await witness.begin()
    start = half = await memory()
    witnessing = asyncio.ensure_future(witness.go_on(over))
    async with AsyncExitStack() as stack:
        ports = await _ports(stand, stack, seed)
        share = max(messages // ROUNDS, 2)
        begun = time.monotonic()
        for number in range(ROUNDS):
            if number == ROUNDS // 2:
                half = await memory()
            await asyncio.gather(*(flood(port, share // port.turns) for port in ports))
            sent, seconds = share * (number + 1), time.monotonic() - begun
            print(
                f"{sent} to each port, {seconds:.0f} s, {witness.rounds} requests beside them;"
                f" MiB: {stand.memory()}",
                flush=True,
            )
        sieged = (port.address for port in ports if isinstance(port, Bytes | HttpPort))
        await asyncio.gather(*(besiege(address, siege) for address in sieged))
        took = time.monotonic() - begun
        over.set()
        problems = await _problems(stand, ports, witnessing)
    if witness.rounds == 0:
        problems.append("no request was answered beside it")
    if stand.pids() != before:
        problems.append(f"processes ended: {before} are now {stand.pids()}")
    problems += await _settled(stand)
    readings = Readings(start, half, await memory())
    problems += readings.problems(allowed_mib(messages // 2) if rests else AT_ONCE_MIB)
    print(readings.table())
    _tell(ports, took, witness.rounds)
    return problems


async def _ports(stand: Stand, stack: AsyncExitStack, seed: int) -> list[Port]:
    """Each twice where gRPC listens: as methods, and as bytes."""
    ports: list[Port] = []
    for number, role in enumerate(ROLES):
        address = stand.address(role)
        called = calls(role, role, address, seed + number, stand.options)
        ports.append(await stack.enter_async_context(called))
        raw = _either(http2, noise, seed - number)
        ports.append(Bytes(f"{role}, bytes", address, raw, 2, stand.tls()))
    door = HttpBytes(random.Random(seed))
    ports.append(HttpPort("router, HTTP", stand.http, door, tls=stand.tls()))
    transports = await asyncio.to_thread(stand.transports)
    grant = await asyncio.to_thread(stand.grant, b"f" * 32)
    socket_bytes = SocketBytes(random.Random(seed), [claimed(grant)])
    for name, where in (
        (
            "socket",
            transports.socket_port and f"127.0.0.1:{transports.socket_port}",
        ),  # none with TLS
        ("Unix socket", transports.unix_socket and f"@{transports.unix_socket}"),
    ):
        if where:
            ports.append(
                Bytes(name, where, _either(lambda _: socket_bytes.connection(), noise, seed))
            )
    for role, where in stand.metrics.items():
        ports.append(Bytes(f"metrics of {role}", where, _either(http1, http1, seed)))
    return ports


def _either(
    one: Callable[[random.Random], bytes], other: Callable[[random.Random], bytes], seed: int
) -> Callable[[], bytes]:
    chance = random.Random(seed)
    return lambda: (one if chance.random() < 0.8 else other)(chance)


async def _problems(
    stand: Stand, ports: Sequence[Port], witnessing: asyncio.Future[None]
) -> list[str]:
    problems = []
    try:
        await asyncio.wait_for(witnessing, SECONDS)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever it is, it is told
        problems.append(f"a request beside it went wrong: {error!r}")
    for role in ROLES:
        async with open_channel(stand.address(role), stand.options(SERVICE)) as channel:
            if not await is_serving(channel, Deadline.after(IDLE_SECONDS)):
                problems.append(f"{role} serves no more")
    if not await is_served(stand.http, stand.tls()):
        problems.append("the HTTP door serves no more")
    for port in ports:
        problems += [f"{port.name}: {how}" for how in port.ended if " of " in how]
    return problems + [f"{count} times {text}" for text, count in tracebacks(stand.lines).items()]


async def _settled(stand: Stand) -> list[str]:
    """What is still held after a grace period."""
    deadline, found = Deadline.after(IDLE_SECONDS), ["not asked"]
    while found and not deadline.expired:
        found = await asyncio.to_thread(stand.findings)
        if found:
            await asyncio.sleep(0.2)
    return found


def _tell(ports: Sequence[Port], took: float, rounds: int) -> None:
    sent = sum(sum(port.ended.values()) for port in ports)
    print(f"{sent} messages in {took:.0f} s, {rounds} requests beside them as they should be")
    for port in ports:
        kind = "methods" if isinstance(port, Calls) else "bytes"
        kind = "requests" if isinstance(port, HttpPort) else kind
        ended = ", ".join(f"{how} {count}" for how, count in port.ended.most_common(8))
        print(f"  {port.name} ({kind}), {sum(port.ended.values())}: {ended}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="to each port")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--only", choices=("plain", "tls"), help="one cluster, not both")
    chosen = parser.parse_args(argv)
    problems = []
    for kind in (chosen.only,) if chosen.only else ("plain", "tls"):
        print(f"{kind}, seed {chosen.seed}", flush=True)
        with tempfile.TemporaryDirectory() as folder, standing(Path(folder), kind == "tls") as one:
            problems += asyncio.run(fuzz(one, chosen.messages, chosen.seed, 5.0, rests=True))
    for problem in problems:
        print(f"! {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
