"""``kvrelay chat``: a conversation with a running cluster, turn by turn.

Each turn is sent with all before it, so the prefix cache and the store do what they are for; an
answer whose router dies is gone on with where it stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvrelay.cli.router_options import RouterOptions
from kvrelay.cli.screen import paint, print_err, print_out
from kvrelay.client.chunk import Chunk
from kvrelay.client.client import Client, Stream
from kvrelay.config.reader import load, option
from kvrelay.errors import KvrelayError, Rejected, Unavailable
from kvrelay.sampling import DEFAULT_MAX_TOKENS, DEFAULT_TEMPERATURE

with suppress(ImportError):  # not in every build of Python
    import readline  # noqa: F401 - gives input() a line to edit

RETRIES = 5
RETRY_SECONDS = 0.5
DESCRIPTION = """\
A conversation with a running cluster. Ctrl-C stops an answer, Ctrl-D or /quit ends the
conversation, /new begins another one. Lines may also come from a pipe."""
EPILOG = """\
examples:
  kvrelay chat --max-tokens 500
  kvrelay chat --max-tokens 500 --system "You are terse." --temperature 0.8 --seed 7
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(RouterOptions):
    """Whom to talk to, and how."""

    system: str | None = option(None, "a system message before the first turn")
    max_tokens: int = option(DEFAULT_MAX_TOKENS, "length of an answer at most", low=1)
    temperature: float = option(DEFAULT_TEMPERATURE, "0 takes the likeliest token", low=0)
    top_p: float | None = option(None, "sample from that much of the probability", metavar="P")
    seed: int | None = option(None, "the same seed gives the same answers", low=0)
    timeout: float = option(600.0, "give up an answer after that", unit="seconds", low=0.001)


class Conversation:
    """The turns so far. What could not be answered is no part of them."""

    def __init__(self, client: Client, config: ChatConfig) -> None:
        self._client = client
        self._config = config
        self._turns: list[tuple[str, str]] = []
        self.restart()

    def restart(self) -> None:
        """Forget all turns."""
        self._turns = [] if self._config.system is None else [("system", self._config.system)]

    def ask(self, text: str) -> None:
        """One turn: the answer is written as it comes. Raises ``KvrelayError``."""
        pieces: list[Chunk] = []
        asked = [*self._turns, ("user", text)]
        stream = self._stream(asked)
        try:
            self._read(stream, pieces)
        except KeyboardInterrupt:
            stream.close()
            print_out()
            print_err(paint("(stopped)", "dim", sys.stderr))
        answer = "".join(piece.text for piece in pieces)
        self._turns = [*asked, ("assistant", answer)]

    def _stream(self, messages: Sequence[tuple[str, str]]) -> Stream:
        config = self._config
        return self._client.generate(
            messages=messages,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed,
            timeout=config.timeout,
        )

    def _read(self, stream: Stream, pieces: list[Chunk]) -> None:
        """To the end; a stream that breaks off is resumed, so many times in a row."""
        left = RETRIES
        while True:
            try:
                for piece in stream:
                    left = RETRIES
                    pieces.append(piece)
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
                break
            except Unavailable:
                if not pieces or not left:
                    raise
                left -= 1
                time.sleep(RETRY_SECONDS)
                stream = self._client.resume(stream, self._config.timeout)
        print_out()
        usage = pieces[-1].usage if pieces else None
        if usage is not None and sys.stderr.isatty():
            cached, prompt = usage.cached_prompt_tokens, usage.prompt_tokens
            ended = "; cut at --max-tokens" if pieces[-1].finish_reason == "length" else ""
            note = f"({cached} of {prompt} prompt tokens were cached{ended})"
            print_err(paint(note, "dim", sys.stderr))


def main(argv: Sequence[str]) -> int:
    config = load(ChatConfig, argv, "kvrelay chat", DESCRIPTION, epilog=EPILOG)
    with Client(config.address()) as client:
        return _talk(Conversation(client, config))


def _talk(conversation: Conversation) -> int:
    """Until there are no more lines. From a pipe the first error ends it, with status 1."""
    asked_by_person = sys.stdin.isatty()
    while (line := _line(asked_by_person)) is not None:
        if line == "/quit":
            break
        if line == "/new":
            conversation.restart()
        elif line:
            try:
                conversation.ask(line)
            except KvrelayError as error:
                if not asked_by_person:
                    raise
                print_err(f"kvrelay chat: {error}")
    return 0


def _line(asked_by_person: bool) -> str | None:
    """The next line without its blanks; ``None`` at the end. Ctrl-C empties it."""
    try:
        return input("> " if asked_by_person else "").strip()
    except EOFError:
        if asked_by_person:
            print_out()
        return None
    except KeyboardInterrupt:
        if not asked_by_person:
            raise
        print_out()
        return ""
    except UnicodeDecodeError as error:
        raise Rejected("standard input", f"is not UTF-8: {error}") from None
