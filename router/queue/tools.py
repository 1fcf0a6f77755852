"""Checks what a conversation offers, and says how its answers are read and what forces a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from kvrelay.errors import Rejected
from kvrelay.rpc.protocol import REASONING_VALUES, structured_message
from kvrelay.rpc.security.identity import Tenant
from kvrelay.rpc.tool_messages import options_of
from kvrelay.structured import MAX_BYTES, ReasoningStart, StructuredOutput
from kvrelay.text.structured import GrammarCompiler
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.text.tools import ToolFormat, calls_grammar, format_of, takes_tools
from kvrelay.tools import CHOICE, FIELD, ToolOptions, parameters_field
from kvrelay.v1 import router_pb2, types_pb2
from router.queue.grammars import WEIGHT, GrammarChecks
from router.queue.prompts import LONG_TEXT, TextThreads

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the answers of a request are read. ``named``: they are calls of one function.

    ``calls``: the grammar of calls, if the answer must be such or ``forced`` is not set and it may
    be instead of a text that is bound by a grammar. It is empty if the model chooses freely.
    """

    form: ToolFormat
    single: bool
    named: bool
    forced: bool
    calls: str = ""


def constrain(
    sampling: types_pb2.Sampling, tools: ToolUse | None, reasoning: ReasoningStart
) -> None:
    """Set what the whole output must be: reasoning, and then the text or calls."""
    if tools is not None and tools.forced:
        sampling.structured_output.CopyFrom(
            structured_message(StructuredOutput(grammar=tools.calls))
        )
    if sampling.HasField("structured_output"):
        wanted = sampling.structured_output
        wanted.reasoning = REASONING_VALUES[reasoning]
        wanted.calls = tools.calls if tools is not None and not tools.forced else ""


class ToolSupport:
    """Of one model. ``wanted``: the format of its calls, or ``auto`` for that of its template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        wanted: str,
        compiler: GrammarCompiler,
        threads: TextThreads,
    ) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._checks = GrammarChecks(compiler, threads)
        self._threads = threads
        template = tokenizer.tool_template
        known = format_of(template) if wanted == AUTO else cast("ToolFormat", wanted)
        self._form = known
        self._refusal = ""
        if not takes_tools(template):
            self._refusal = "this model's chat template takes no tools: leave them out"
        elif known is None:
            self._refusal = (
                "the format of this model's calls is not known: the router needs --tool-format"
            )

    async def use(self, message: router_pb2.GenerateRequest, tenant: Tenant) -> ToolUse | None:
        """``None`` if no calls are looked for. ``Rejected`` naming the field that is wrong."""
        if not message.HasField("chat"):
            return None
        options = options_of(message.chat)
        if not options.tools and not options.forced:
            return None
        if options.tools and (self._refusal or self._form is None):
            raise Rejected(FIELD, self._refusal)
        if options.size > LONG_TEXT:
            await self._threads.run(tenant, options.size, options.check)
        else:
            options.check()
        if options.mode == "none" and not options.function:
            return None
        assert self._form is not None, "checked above: there are tools"
        bound = message.sampling.HasField("structured_output")
        if bound and not options.forced and self._form == "llama":
            raise Rejected(
                "sampling.structured_output",
                "cannot go with tools that the model may call or not: the calls of this model begin"
                ' as JSON does; set tool_choice to "none", to "required" or to a function',
            )
        use = ToolUse(self._form, not options.parallel, bool(options.function), options.forced)
        return await self._bound(use, options, tenant) if bound or options.forced else use

    async def _bound(self, use: ToolUse, options: ToolOptions, tenant: Tenant) -> ToolUse:
        """The same with the grammar of the calls, which compiles."""
        wanted = calls_grammar(options, use.form, self._tokenizer.added_ids)
        if wanted.size > MAX_BYTES:
            raise Rejected(
                CHOICE,
                f"a call of these tools takes a grammar of {wanted.size} bytes, more than the limit"
                f" of {MAX_BYTES}: name one function, {_way_out(options)}",
            )
        try:
            await self._checks.compiled(wanted, tenant)
        except Rejected as error:
            size = WEIGHT * wanted.size
            cause = partial(self._cause, options, error.message)
            raise await self._threads.run(tenant, size, cause) from None
        return replace(use, calls=wanted.grammar or "")

    def _cause(self, options: ToolOptions, reason: str) -> Rejected:
        """The error with the tool whose schema is wrong."""
        for index, tool in options.chosen:
            if tool.parameters:
                try:
                    self._compiler.compile(StructuredOutput(json_schema=tool.parameters))
                except Rejected as found:
                    message = f"cannot be enforced: {found.message}: change it, {_way_out(options)}"
                    return Rejected(parameters_field(index), message)
        return Rejected(FIELD, f"cannot be enforced together: {reason}")


def _way_out(options: ToolOptions) -> str:
    """What a client can do instead."""
    return "or use auto" if options.forced else "or leave out response_format"
