"""The text of an output, for requests that name stop strings; the rest pay nothing for it."""

from __future__ import annotations

from pathlib import Path

from kvrelay.engine.core.request import Order
from kvrelay.errors import Rejected, Unservable
from kvrelay.sampling import Sampling
from kvrelay.text.output import OutputText
from kvrelay.text.tokenizer import Tokenizer


class StopStringChecker:
    """Watches one output for its stop strings (``kvrelay.engine.core.legs.StopText``)."""

    def __init__(self, text: OutputText) -> None:
        self._text = text

    def stops_at(self, token: int) -> bool:
        return self._text.push(token).stopped


class StopCheckers:
    """Makes the watch of a request. A folder without a tokenizer can still serve token ids."""

    def __init__(self, folder: str | Path) -> None:
        """Read at start: later it would block the event loop."""
        self._tokenizer: Tokenizer | None = None
        self._why_not = ""
        try:
            self._tokenizer = Tokenizer(folder)
        except Unservable as error:
            self._why_not = str(error)

    def of(self, order: Order, sampling: Sampling) -> StopStringChecker | None:
        """``None`` without stop strings; the tokens so far are replayed."""
        if not sampling.stop:
            return None
        if self._tokenizer is None:
            raise Rejected("sampling.stop", f"this worker has no tokenizer: {self._why_not}")
        text = OutputText(self._tokenizer, sampling.stop, sampling.min_tokens)
        if text.replay(order.tokens[order.prompt_len :]):
            raise Rejected("leg.output_token_ids", "a stop string is complete in them already")
        return StopStringChecker(text)
