"""The text of one request's output, token by token, with its stop strings.

Workers use it to end a request at the token that completes a stop string, the router to produce the
text. The state is a function of the tokens, so a leg resumes by replaying the tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.text.detokenizer import detokenizer
from kvrelay.text.stop import StopStrings
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text to send now; ``stopped`` if this token completes a stop string."""

    text: str
    stopped: bool


class OutputText:
    """Push the output tokens in order, then ``flush`` once unless a stop string ended the request.

    Like a stop token, a stop string ends the request only with a token after the first
    ``min_tokens``; one that is complete earlier is ordinary text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        if stops and isinstance(tokenizer, NoTokenizer):
            raise tokenizer.refusal("sampling.stop")
        self._detokenizer = detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._ignored = min_tokens

    def push(self, token: int, ends: bool = False) -> TextDelta:
        """The text that this token adds, and whether it completes a stop string.

        ``ends``: the token ends the request, so its text is left out.
        """
        armed = self._ignored <= 0
        self._ignored -= 1
        if ends:
            return TextDelta("", stopped=False)
        return TextDelta(*self._stops.push(self._detokenizer.push(token), armed))

    def replay(self, tokens: Iterable[int]) -> bool:
        """Push tokens whose text was sent before. Returns whether they complete a stop string."""
        return any(self.push(token).stopped for token in tokens)

    def flush(self) -> str:
        """The text still held back, for a request that ended without a stop string."""
        shown, _ = self._stops.push(self._detokenizer.flush(), armed=False)
        return shown + self._stops.flush()
