"""Stop strings: the text of an output is made only for requests that name some."""

from __future__ import annotations

from pathlib import Path

from kvrelay.engine.core.request import Order
from kvrelay.errors import Rejected, Unservable
from kvrelay.sampling import Sampling
from kvrelay.text.output import OutputText
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer


class StopStringChecker:
    """The ``StopChecker`` of one output."""

    def __init__(self, text: OutputText) -> None:
        self._text = text

    def stops_at(self, token: int) -> bool:
        return self._text.push(token).stopped


class StopCheckers:
    """Makes stop checkers. Requests without stop strings are served without a tokenizer too."""

    def __init__(self, folder: str | Path) -> None:
        """Read the tokenizer now: later it would block the event loop."""
        self.tokenizer: Tokenizer | None = None
        self._reason = ""
        try:
            self.tokenizer = load_tokenizer(folder)
        except Unservable as error:
            self._reason = str(error)

    def of(self, order: Order, sampling: Sampling) -> StopStringChecker | None:
        """The checker of a request, after its output so far; ``None`` without stop strings."""
        if not sampling.stop:
            return None
        if self.tokenizer is None:
            raise Rejected("sampling.stop", f"this worker has no tokenizer: {self._reason}")
        text = OutputText(self.tokenizer, sampling.stop, sampling.min_tokens)
        if text.replay(order.tokens[order.prompt_len :]):
            raise Rejected("leg.output_token_ids", "they already contain a stop string")
        return StopStringChecker(text)
