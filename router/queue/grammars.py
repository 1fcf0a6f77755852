"""Checks the structured output of a request before it is admitted: by compiling it, in a thread."""

from __future__ import annotations

from kvrelay.rpc.protocol import structured_of
from kvrelay.rpc.security.identity import Tenant
from kvrelay.structured import StructuredOutput
from kvrelay.text.structured import GrammarCompiler
from kvrelay.v1 import types_pb2
from router.queue.prompts import TextThreads

WEIGHT = 32  # a byte of a grammar takes as long as so many of a prompt, or longer


class GrammarChecks:
    """Shares the threads of long prompts, so that no tenant takes all of them."""

    def __init__(self, compiler: GrammarCompiler, threads: TextThreads) -> None:
        self._compiler = compiler
        self._threads = threads

    async def check(self, sampling: types_pb2.Sampling, tenant: Tenant) -> None:
        """``Rejected`` for a grammar that cannot be used; the message says where it is wrong."""
        if not sampling.HasField("structured_output"):
            return
        await self.compiled(structured_of(sampling.structured_output), tenant)

    async def compiled(self, wanted: StructuredOutput, tenant: Tenant) -> None:
        """The same for what the output must be."""
        wanted.check()
        if not self._compiler.knows(wanted):
            size = WEIGHT * wanted.size
            await self._threads.run(tenant, size, lambda: self._compiler.compile(wanted))
