"""Another user of the machine who takes ports: ``python -m tests.cluster.thief``, driven by lines.

Becomes the user 65534 if it may. Each line on stdin is an order, ports and addresses, as JSON:
``steal`` binds and listens in every way, ``bind`` binds with ``SO_REUSEADDR`` without listening,
``listen`` listens on what was bound, ``besiege`` steals over and over until the next line. Each is
answered by the list of successes.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from types import TracebackType

from kvrelay.cluster.layout import ROOT

NOBODY = 65534
OVERLAPPING = ("127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1")
"""Addresses at which a socket takes connections to 127.0.0.1."""

HARMLESS = ("127.0.0.2", "::1")
"""A socket bound there marks the kernel's record of the port as shareable."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a socket is bound."""

    host: str
    reuse_address: bool
    reuse_port: bool

    def bind(self, port: int) -> socket.socket | None:
        made = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, self.reuse_address)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, self.reuse_port)
            made.bind((self.host, port))
        except OSError:
            made.close()
            return None
        return made

    def named(self, port: int) -> str:
        options = ["address"] * self.reuse_address + ["port"] * self.reuse_port
        return f"{self.host} {port} reuse {'+'.join(options) or 'nothing'}"


def ways(hosts: Sequence[str], another: bool) -> list[Way]:
    """Every way. The same user may share by ``SO_REUSEPORT``, which is no theft."""
    made = [Way(*each) for each in product(hosts, (False, True), (False, True))]
    return [way for way in made if another or not way.reuse_port]


def listens(made: socket.socket) -> bool:
    try:
        made.listen()
    except OSError:
        return False
    return True


def steal(ports: Sequence[int], hosts: Sequence[str], another: bool) -> list[str]:
    found = []
    for port, way in product(ports, ways(hosts, another)):
        if (made := way.bind(port)) is not None:
            with made:
                if listens(made):
                    found.append(way.named(port))
    return found


def main() -> None:
    another = os.getuid() == 0
    if another:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    bound: list[tuple[str, socket.socket]] = []
    print(json.dumps(another), flush=True)
    while line := sys.stdin.readline():
        order, ports, hosts = json.loads(line)
        found: list[str] = []
        if order == "steal":
            found = steal(ports, hosts, another)
        elif order == "bind":
            for port, way in product(ports, ways(hosts, another)):
                if way.reuse_address and (made := way.bind(port)) is not None:
                    bound.append((way.named(port), made))
            found = [name for name, _ in bound]
        elif order == "listen":
            found = [name for name, made in bound if listens(made)]
        elif order == "besiege":
            rounds = 0
            while not select.select([sys.stdin], [], [], 0.0)[0]:
                found += steal(ports, hosts, another)
                rounds += 1
                if rounds == 1:
                    print(json.dumps([]), flush=True)
            sys.stdin.readline()
        print(json.dumps(found), flush=True)


class Thief:
    """The process, as a context manager."""

    def __enter__(self) -> Thief:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.thief"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.another_user = bool(self._answer())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(
        self, order: str, ports: Sequence[int], hosts: Sequence[str] = OVERLAPPING
    ) -> list[str]:
        """The successes of one order; of ``besiege`` an empty list, once it has begun."""
        self._say([order, list(ports), list(hosts)])
        return self._answer()

    def relent(self) -> list[str]:
        """End ``besiege``. Returns its successes."""
        self._say([])
        return self._answer()

    def _say(self, words: list[object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        found: list[str] = json.loads(self._process.stdout.readline())
        return found


if __name__ == "__main__":
    main()
