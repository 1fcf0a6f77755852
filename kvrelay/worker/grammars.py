"""The grammars of legs with structured output, compiled and replayed in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvrelay.errors import Rejected
from kvrelay.rpc.protocol import structured_of
from kvrelay.structured import FIELD, StructuredOutput
from kvrelay.text.structured import GrammarCompiler, OffGrammar, TokenGrammar
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import types_pb2

THREADS = 2  # the router has compiled each grammar before: what comes here compiles


class LegGrammars:
    """Makes the matcher of a leg. Models without a tokenizer serve all other requests."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self._compiler = None if tokenizer is None else GrammarCompiler(tokenizer, eos_token_ids)
        if self._compiler is not None:
            self._compiler.load_ahead()
        self._free = asyncio.Semaphore(THREADS)

    async def of(self, leg: types_pb2.Leg) -> TokenGrammar | None:
        """The matcher behind the leg's output so far; ``None`` without structured output."""
        if not leg.sampling.HasField("structured_output"):
            return None
        wanted = structured_of(leg.sampling.structured_output)
        wanted.check()
        if self._compiler is None:
            raise Rejected(FIELD, "this worker has no tokenizer for it")
        compiler, output = self._compiler, list(leg.output_token_ids)
        async with self._free:
            return await asyncio.to_thread(_replayed, compiler, wanted, output)


def _replayed(
    compiler: GrammarCompiler, wanted: StructuredOutput, output: list[int]
) -> TokenGrammar:
    made = compiler.compile(wanted)
    try:
        made.follow(output, 0, len(output))
    except OffGrammar as error:
        raise Rejected("leg.output_token_ids", f"not of this request: {error}") from error
    return made
