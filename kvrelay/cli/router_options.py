"""The options of commands that talk to a router: its address, credentials, and of an answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cli.screen import paint
from kvrelay.client.chunk import Chunk
from kvrelay.client.client import Client
from kvrelay.cluster.endpoints import authorized, router_of
from kvrelay.config.reader import option
from kvrelay.errors import Rejected, Unavailable
from kvrelay.installation import command
from kvrelay.rpc.address import DEFAULT_ROUTER
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.status import NothingListens
from kvrelay.sampling import DEFAULT_MAX_TOKENS, DEFAULT_TEMPERATURE

# Control characters, with which a model could steer a terminal, as characters that show them.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(SecurityOptions):
    """The router to use."""

    router: str | None = option(None, f"the router; else {DEFAULT_ROUTER}", metavar="HOST:PORT")
    endpoints: str | None = option(
        None, "read the router from the file of kvrelay up", metavar="FILE"
    )

    def __post_init__(self) -> None:
        if self.router is not None and self.endpoints is not None:
            raise Rejected("router", "give either --router or --endpoints")

    def address(self, *others: str) -> str:
        """The router's address, after installing credentials for it and for ``others``."""
        router = self.router or DEFAULT_ROUTER
        if self.endpoints is not None:
            router = router_of(Path(self.endpoints))
        policy.install(authorized(self, self.endpoints, router, *others), ADMIN_FIRST)
        return router


@contextmanager
def router_client(address: str) -> Iterator[Client]:
    """A client of the router; if no router runs there, the error says what to do."""
    try:
        with advised(), Client(address) as client:
            yield client
    except Rejected as error:
        field = "router" if error.field == "address" else error.field  # of the client, as called
        raise Rejected(field, error.message) from None


@contextmanager
def advised() -> Iterator[None]:
    """If no router runs where one was called, the error says what to do."""
    try:
        yield
    except NothingListens as error:
        up = command("up")
        raise Unavailable(
            f"{error}: start a cluster with `{up}`, or name its router with --router"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions(RouterOptions):
    """The router, and the parameters of an answer that every command has."""

    max_tokens: int = option(DEFAULT_MAX_TOKENS, "most tokens of an answer", low=1)
    temperature: float = option(DEFAULT_TEMPERATURE, "0 takes the likeliest token", low=0)
    top_p: float | None = option(
        None, "sample from the likeliest tokens of this total probability", metavar="P"
    )
    seed: int | None = option(None, "the same seed gives the same answer", low=0)
    timeout: float = option(600.0, "time limit of an answer", unit="seconds", low=0.001)


class AnswerWriter:
    """Writes an answer as it streams; on a terminal without control characters.

    Reasoning is dim, and on a terminal only.
    """

    def __init__(self) -> None:
        self._reasons = False

    def write(self, chunk: Chunk) -> None:
        """Write the next part."""
        terminal = sys.stdout.isatty()
        if chunk.reasoning and terminal:
            self._reasons = True
            sys.stdout.write(paint(chunk.reasoning.translate(VISIBLE), "dim"))
        if chunk.text and self._reasons:
            self._reasons = False
            sys.stdout.write("\n\n")
        sys.stdout.write(chunk.text.translate(VISIBLE) if terminal else chunk.text)
        sys.stdout.flush()
