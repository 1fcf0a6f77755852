"""One server: its connections, and whether it is to be asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvstore.client.circuit import Circuit
from kvstore.redis.link import Link
from kvstore.redis.settings import Settings
from kvstore.ways.line import Lines
from rpc.address import Address
from rpc.deadline import Deadline


class Unwilling(Unavailable):
    """A server answered with an error that asking again does not mend, ``NOPERM`` for one."""

    def __init__(self, address: Address, line: bytes) -> None:
        super().__init__(f"{address}: {line.lstrip(b'-')[:200].decode('utf-8', 'replace')}")


def is_old(link: Link | None, error: KvrelayError) -> bool:
    """Whether ``link`` had been at rest, and may have ended long ago.

    All do when a server is started anew: that says nothing of a new connection.
    """
    ended = isinstance(error, Unavailable) and not isinstance(error, Unwilling)
    return link is not None and link.used and ended


class Node:
    """Thread-safe."""

    def __init__(self, address: Address, settings: Settings) -> None:
        self.address = address
        self.circuit = Circuit()
        self._links: Lines[Link] = Lines(lambda deadline: Link(address, settings, deadline))

    def take(self, deadline: Deadline, stall: float | None) -> Link:
        """A link for the caller alone, to be ended with ``give`` or ``failed``."""
        link = self._links.take(deadline)
        try:
            link.pipe.limit(deadline.remaining(), stall)
        except KvrelayError:
            self._links.drop(link)
            raise
        return link

    def give(self, link: Link) -> None:
        """Everything asked has been answered."""
        link.used = True
        self.circuit.answered()
        self._links.give(link)

    def drop(self, link: Link) -> None:
        """It was left in the middle, and that is not the server's fault."""
        self._links.drop(link)

    def failed(self, link: Link | None, error: KvrelayError) -> None:
        """``link`` broke, or there was none to be had. With an old one all at rest are ended."""
        if link is not None:
            self._links.drop(link)
        if is_old(link, error):
            self._links.clear()
        elif isinstance(error, Unavailable | DeadlineExceeded):
            self.circuit.failed(isinstance(error, Unavailable))

    def close(self) -> None:
        """Calls under way fail."""
        self._links.close()


@contextmanager
def guarded(node: Node) -> Iterator[None]:
    """For what is asked through the library."""
    try:
        yield
    except KvrelayError as error:
        node.failed(None, error)
        raise
    node.circuit.answered()
