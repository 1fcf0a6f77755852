"""Grammars of structured output for the logits processor, by the id that a request carries.

vLLM passes plain values to a logits processor. The worker runs vLLM's engine in its own process, so
the grammar itself can stay here. A request of another program may not ask for one (``rules``).
"""

from __future__ import annotations

from kvrelay.engine.core.updates import OutputGrammar
from kvrelay.errors import KvrelayError


class GrammarRegistry:
    """Grammars of open requests, and the errors of rows that could not be sampled."""

    def __init__(self) -> None:
        self._grammars: dict[str, OutputGrammar | None] = {}
        self._failures: dict[str, KvrelayError] = {}

    def add(self, id: str, grammar: OutputGrammar | None) -> None:
        """Before the request is given to vLLM."""
        self._grammars[id] = grammar

    def get(self, id: str) -> OutputGrammar | None:
        """The grammar of a request that has one."""
        return self._grammars.get(id)

    def fail(self, id: str, error: KvrelayError) -> None:
        """Note that a request has no possible token; vLLM still gets one, which is not used.

        Does nothing for a request that was not added in this process.
        """
        if id in self._grammars:
            self._failures.setdefault(id, error)

    def failure(self, id: str) -> KvrelayError | None:
        """Why a request had no token."""
        return self._failures.get(id)

    def remove(self, id: str) -> None:
        """After the request has left."""
        self._grammars.pop(id, None)
        self._failures.pop(id, None)


GRAMMARS = GrammarRegistry()
