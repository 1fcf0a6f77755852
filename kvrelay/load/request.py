"""One request and its answer, whichever door they pass."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Part: TypeAlias = "tuple[int, ...] | str"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """``parts``: what the user and the model said in turn, beginning and ending with the user.

    Each is token ids, or text if the server is sent text. ``leave_after``: the client leaves after
    so many tokens. ``read_rate``: it reads so many tokens a second. ``fields``: of the HTTP body,
    instead of those of every request; ``None`` leaves one out.
    """

    number: int
    parts: tuple[Part, ...]
    max_tokens: int
    seed: int
    tenant: str = ""
    turn: int = 0
    leave_after: int | None = None
    read_rate: float | None = None
    fields: Mapping[str, object] = field(default_factory=dict)

    def ids(self) -> list[int] | None:
        """The token ids of the prompt, ``None`` for text."""
        ids: list[int] = []
        for part in self.parts:
            if isinstance(part, str):
                return None
            ids += part
        return ids

    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    def messages(self) -> list[dict[str, str]]:
        """A chat."""
        roles = ("user", "assistant")
        return [
            {"role": roles[index % 2], "content": part if isinstance(part, str) else ""}
            for index, part in enumerate(self.parts)
        ]

    def key(self) -> bytes:
        """Requests of one key must have the same answer, whoever sends them and whenever."""
        asked = repr((self.parts, self.max_tokens, self.seed))
        return hashlib.blake2b(asked.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccount:
    """The usage that the server reported; ``None`` where it did not say.

    ``sources``: prompt tokens by where their KV came from. ``faults``: what is wrong with its legs.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int | None = None
    sources: Mapping[str, int] = field(default_factory=dict)
    queue_seconds: float | None = None
    migrations: int | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token as the server writes it, and its log probability."""

    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Part of an answer; ``at`` is when its bytes were read, by ``time.perf_counter``.

    ``ids`` is ``None`` if the server sends no token ids. ``choice``: which one of ``n`` samples.
    """

    at: float
    text: str = ""
    ids: Sequence[int] | None = ()
    finish: str | None = None
    account: ServerAccount | None = None
    choice: int = 0
    chosen: Sequence[ChosenToken] = ()


class LoadDoor(Protocol):
    """The way to a server. Errors are ``KvrelayError``; ``Exhausted`` is a refusal."""

    def ask(self, request: LoadRequest, timeout: float) -> AsyncGenerator[AnswerPiece, None]:
        """Send a request and stream its answer; closing the generator cancels the request."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class LoadAnswer:
    """What became of a request. Times by ``time.perf_counter``; ``due`` is when it was to be sent.

    ``ended``: done, refused, late, left or failed. ``ids`` is ``None`` once a piece with text had
    none, and at the end if no piece had any.
    """

    request: LoadRequest
    due: float
    sent: float
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)  # between two tokens
    tokens: int = 0
    ids: list[int] | None = field(default_factory=list)
    has_ids: bool = False  # a piece had a list of them
    text: str = ""
    chosen: list[ChosenToken] = field(default_factory=list)  # if log probabilities were asked for
    finish: str | None = None
    account: ServerAccount | None = None
    ended: str = "failed"
    error: str = ""
    retry_after: float | None = None

    def take(self, piece: AnswerPiece) -> None:
        """Add a piece. One without token ids counts as one token until the usage comes.

        The tokens of a piece share the time since the last one: as in the router's histogram.
        """
        count = int(bool(piece.text)) if piece.ids is None else len(piece.ids)
        if piece.ids is None:
            self.ids = None if count else self.ids
        else:
            self.has_ids = True
            if self.ids is not None:
                self.ids += piece.ids
        self.text += piece.text
        self.chosen += piece.chosen
        if count:
            if self.last is None:
                self.first = piece.at
            else:
                self.gaps += [(piece.at - self.last) / count] * count
            self.last = piece.at
            self.tokens += count
        self.finish = piece.finish or self.finish
        if self.finish is not None and not self.has_ids:
            self.ids = None
        if piece.account is not None:
            self.account = piece.account
            if self.ids is None:
                self.tokens = piece.account.completion_tokens

    def content(self) -> Part:
        """The answer as a part of the next prompt."""
        return self.text if self.ids is None else tuple(self.ids)

    def token_gap(self) -> float | None:
        """Mean seconds between two tokens."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)
