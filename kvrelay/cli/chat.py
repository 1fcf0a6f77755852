"""``kvrelay chat``: a conversation with a running cluster, turn by turn.

Each turn is sent with all turns before it, so the prefix cache and the store are used. An answer
whose router dies is resumed where it stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvrelay.cli.router_options import AnswerOptions, AnswerWriter, advised, router_client
from kvrelay.cli.screen import paint, print_err, print_out
from kvrelay.cli.usage import cached_of
from kvrelay.client.chunk import Chunk
from kvrelay.client.client import Client, Stream
from kvrelay.config.reader import load, option
from kvrelay.errors import KvrelayError, Rejected, Unavailable

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
  kvrelay chat --system "You are terse." --temperature 0.8 --seed 7
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(AnswerOptions):
    """The router, the parameters of each answer, and its system message."""

    system: str | None = option(None, "a system message before the first turn")


class Conversation:
    """The turns so far. A message whose answer failed is left out."""

    def __init__(self, client: Client, config: ChatConfig) -> None:
        self._client = client
        self._config = config
        self._turns: list[tuple[str, str]] = []
        self.restart()

    def restart(self) -> None:
        """Forget all turns."""
        self._turns = [] if self._config.system is None else [("system", self._config.system)]

    def ask(self, text: str) -> None:
        """One turn: the answer is written as it streams. Raises ``KvrelayError``."""
        chunks: list[Chunk] = []
        turns = [*self._turns, ("user", text)]
        stream = self._stream(turns)
        try:
            self._read(stream, chunks)
        except KeyboardInterrupt:
            stream.close()
            print_out()
            print_err(paint("(stopped)", "dim", sys.stderr))
        answer = "".join(chunk.text for chunk in chunks)
        self._turns = [*turns, ("assistant", answer)]

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

    def _read(self, stream: Stream, chunks: list[Chunk]) -> None:
        """Read to the end. A broken stream is resumed, ``RETRIES`` times in a row at most."""
        left, writer = RETRIES, AnswerWriter()
        while True:
            try:
                for chunk in stream:
                    left = RETRIES
                    chunks.append(chunk)
                    writer.write(chunk)
                break
            except Unavailable:
                if not chunks or not left:
                    raise
                left -= 1
                time.sleep(RETRY_SECONDS)
                stream = self._client.resume(stream, self._config.timeout)
        print_out()
        usage = chunks[-1].usage if chunks else None
        if usage is not None and sys.stderr.isatty():
            cached, prompt = cached_of(usage), usage.prompt_tokens
            ended = "; cut at --max-tokens" if chunks[-1].finish_reason == "length" else ""
            note = f"({cached} of {prompt} prompt tokens were cached{ended})"
            print_err(paint(note, "dim", sys.stderr))


def main(argv: Sequence[str]) -> int:
    config = load(ChatConfig, argv, "kvrelay chat", DESCRIPTION, epilog=EPILOG)
    with router_client(config.address()) as client:
        return _talk(Conversation(client, config))


def _talk(conversation: Conversation) -> int:
    """Answer every line. With input from a pipe the first error ends it, with status 1."""
    interactive = sys.stdin.isatty()
    while (line := _line(interactive)) is not None:
        if line == "/quit":
            break
        if line == "/new":
            conversation.restart()
        elif line:
            try:
                with advised():
                    conversation.ask(line)
            except KvrelayError as error:
                if not interactive:
                    raise
                print_err(f"kvrelay chat: {error}")
    return 0


def _line(interactive: bool) -> str | None:
    """The next line, stripped; ``None`` at the end. Ctrl-C discards the line."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        if interactive:
            print_out()
        return None
    except KeyboardInterrupt:
        if not interactive:
            raise
        print_out()
        return ""
    except UnicodeDecodeError as error:
        raise Rejected("standard input", f"is not UTF-8: {error}") from None
