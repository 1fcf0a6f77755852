"""Structured output: which tokens may come next, so that the text is what the client asked for.

A matcher's state follows from the output tokens alone: replaying them on any worker gives the same
masks. ``llguidance`` compiles and matches; its bounds are amounts of work, not times, so a grammar
that exceeds them does so on every machine.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from kvrelay.errors import KvrelayError, Rejected, Unservable
from kvrelay.structured import FIELD, StructuredOutput
from kvrelay.text.detokenizer import token_bytes
from kvrelay.text.reasoning import CLOSE, OPEN
from kvrelay.text.schema_bounds import check_multiples, check_schema, schemas_in
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

CACHE_BYTES = 64 << 20
OVERHEAD_BYTES = 64 << 10  # of a compiled grammar, in any case
BYTES_PER_BYTE = 32  # more for each byte of its text
BYTES_PER_SECOND = 160 << 20  # more for the time that it took: both grow with what the lexer makes
MASK_WORD = 32  # bits: a mask has whole words
MAX_MESSAGE = 400  # characters of the library's messages
ANSWER = "answer"
CALLS = "calls"
MAX_GAP = 8  # blanks between reasoning and answer
WHITESPACE = r"[ ]?|\r?\n[ \t]{0,80}"
"""Between the parts of JSON. Greedy models tend to write blanks for ever where they may."""

_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

# Bounds of the parser: on a vocabulary of 152,000 tokens the masks of hostile grammars took 1.9 ms
# of processor time at most, those of JSON schemas 1.4 ms, and 40 ms to compile. To compile one with
# its first mask may take a tenth of a second and 16 MiB; "(a{1000}){1000}" took 1.7 s and 174 MiB
# with the library's own bound. A grammar that is more ambiguous than usual is hostile.
MAX_ITEMS = 10_000  # for one mask
MAX_ITEMS_OF_GRAMMAR = 500
MAX_ROW = 2000  # for one byte
MAX_ROW_OF_GRAMMAR = 500
MAX_FUEL = 60_000  # of the lexer, for one mask
MAX_FIRST_FUEL = 100_000  # of the lexer, to compile a grammar
MAX_LEXER_STATES = 50_000  # about 500 bytes each, for one request
MAX_SYMBOLS = 200_000  # of the grammar


class OffGrammar(KvrelayError):
    """A token does not follow from the grammar: it was not sampled with the grammar's mask."""


class TokenGrammar:
    """The matcher of one output. One thread at a time."""

    def __init__(self, matcher: LLMatcher, field: str, vocab_size: int) -> None:
        self._matcher = matcher
        self._field = field
        self._vocab_size = vocab_size  # of the library, which a mask must have
        self._consumed = 0

    def follow(self, tokens: Sequence[int], first: int, last: int) -> None:
        """Consume what is new of the output ``tokens[first:last]``.

        Raises ``OffGrammar`` if a token does not follow.
        """
        new = tokens[first + self._consumed : last]
        taken = self._matcher.try_consume_tokens(list(new)) if new else 0
        self._consumed += taken
        self._check_complexity()
        if taken < len(new):
            raise OffGrammar(f"output token {self._consumed} does not follow from the grammar")

    def allowed(self, tokens: Sequence[int], first: int, last: int) -> bytes:
        """One bit for each token, lowest first: those that may follow ``tokens[first:last]``.

        The end-of-sequence tokens may if the text is complete. Raises ``Rejected`` if the grammar
        is too complex at this place, or if no token of the vocabulary can continue the text.
        """
        self.follow(tokens, first, last)
        mask = self._matcher.compute_bitmask()
        self._check_complexity()
        return mask

    @classmethod
    def masks(
        cls, grammars: Sequence[TokenGrammar], threads: int
    ) -> tuple[bytearray, list[KvrelayError | None]]:
        """What ``allowed`` gives for several outputs, row behind row, and the errors of the rows.

        The library computes the rows in parallel and holds no lock of the interpreter meanwhile.
        """
        size = -(-grammars[0]._vocab_size // MASK_WORD) * (MASK_WORD // 8)
        rows = bytearray(len(grammars) * size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(rows))
        matchers = [(one._matcher, row) for row, one in enumerate(grammars)]
        _executor(threads).unsafe_compute_mask_ptr(matchers, address, size, len(grammars))
        return rows, [one._complexity() for one in grammars]

    def _check_complexity(self) -> None:
        if (error := self._complexity()) is not None:
            raise error

    def _complexity(self) -> Rejected | None:
        matcher = self._matcher
        if matcher.is_error():
            return Rejected(
                self._field,
                f"is too complex, or cannot be continued, after {self._consumed} output tokens:"
                f" {brief(matcher.get_error())}",
            )
        if matcher.is_stopped() and not matcher.is_accepting():
            return Rejected(
                self._field,
                f"no token of this model continues the text after {self._consumed} output tokens",
            )
        return None


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher at the beginning of an output, and its estimated size in bytes."""

    matcher: LLMatcher
    cost: int


class GrammarCompiler:
    """Compiles the grammars of requests for one model, and keeps those used last.

    ``compile`` may take a tenth of a second, its first call some seconds for a large vocabulary:
    not on an event loop. It is safe to use from several threads at once.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, _Compiled] = OrderedDict()
        self._bytes = 0

    @property
    def loaded(self) -> bool:
        """Whether the vocabulary is in the library's form."""
        return self._vocabulary is not None

    def load_ahead(self) -> None:
        """Load the vocabulary in a thread of its own, when the process starts.

        The library holds the interpreter's lock meanwhile, for 0.4 s with 152,000 tokens: the first
        request with a grammar would stop every stream for so long.
        """
        if not isinstance(self._tokenizer, NoTokenizer):
            threading.Thread(target=self._try_load, name="vocabulary").start()

    def _try_load(self) -> None:
        with suppress(Rejected):  # each request with a grammar is told
            self._loaded(FIELD)

    @property
    def cached_bytes(self) -> int:
        """The estimated size of the compiled grammars that are kept."""
        return self._bytes

    def knows(self, wanted: StructuredOutput) -> bool:
        """Whether ``compile`` returns at once."""
        with self._lock:
            return wanted in self._compiled

    def compile(self, wanted: StructuredOutput) -> TokenGrammar:
        """A matcher at the beginning of an output; ``Rejected`` naming the field, and where."""
        wanted.check()
        field = f"{FIELD}.{wanted.kind}"
        with self._lock:
            found = self._compiled.get(wanted)
            if found is not None:
                self._compiled.move_to_end(wanted)
                return self._grammar(found.matcher, field)
        self._loaded(field)
        begun = time.thread_time()
        matcher = self._compile(wanted, field)
        seconds = time.thread_time() - begun
        with self._lock:
            if wanted not in self._compiled:
                self._keep(wanted, _Compiled(matcher, _cost(wanted, seconds)))
            return self._grammar(matcher, field)

    def _grammar(self, matcher: LLMatcher, field: str) -> TokenGrammar:
        assert self._vocabulary is not None, "a matcher was compiled for it"
        return TokenGrammar(matcher.deep_copy(), field, self._vocabulary.vocab_size)

    def _keep(self, wanted: StructuredOutput, made: _Compiled) -> None:
        self._compiled[wanted] = made
        self._bytes += made.cost
        while self._bytes > CACHE_BYTES:
            _, oldest = self._compiled.popitem(last=False)
            self._bytes -= oldest.cost

    def _compile(self, wanted: StructuredOutput, field: str) -> LLMatcher:
        from llguidance import LLMatcher

        vocabulary = self._loaded(field)
        try:
            source = _whole(wanted, self._tokenizer.added_ids)
        except (ValueError, RecursionError, KvrelayError) as error:
            raise Rejected(field, brief(str(error))) from error
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=_limits(wanted.kind))
        if matcher.is_error():
            raise Rejected(field, brief(matcher.get_error()))
        TokenGrammar(matcher, field, vocabulary.vocab_size).allowed((), 0, 0)
        return matcher

    def _loaded(self, field: str) -> LLTokenizer:
        if isinstance(self._tokenizer, NoTokenizer):
            raise self._tokenizer.refusal(FIELD)
        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = vocabulary_of(self._tokenizer, self._eos)
                except Unservable as error:
                    raise Rejected(field, f"this model cannot do it: {error}") from error
            return self._vocabulary


def vocabulary_of(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The library's form of a vocabulary.

    Raises ``Unservable`` unless each token stands there for the bytes that the detokenizer gives
    it. Special tokens stand for no text: only a grammar that names one allows it.
    """
    from llguidance import LLTokenizer

    endings = [token for token in eos_token_ids if token < tokenizer.vocab_size]
    if not endings:
        raise Unservable("it names no end-of-sequence token")
    try:
        made = LLTokenizer(tokenizer.backend.to_str(), eos_token=endings)
    except ValueError as error:
        raise Unservable(f"its tokens do not stand for bytes: {brief(str(error))}") from error
    bytes_of = token_bytes(tokenizer)
    for token in range(made.vocab_size):
        if made.is_special_token(token) or token in tokenizer.special_ids:
            continue
        if made.decode_bytes([token]) != bytes_of(token):
            raise Unservable(f"token {token} stands for other bytes than its text has")
    return made


def brief(message: str) -> str:
    """A message of the library as one line, without what it says about its own code."""
    text = message.split("<backtrace>")[0].split("<state>")[0].split("<non-verbose/>")[0]
    text = re.sub(r"(\S{40})\S{20,}", r"\1...", text)
    if text.startswith("panic"):
        text = "is too large or too deep"
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."


@lru_cache(maxsize=1)
def _executor(threads: int) -> LLExecutor:
    """The threads of the library; a process has one number of them."""
    from llguidance import LLExecutor

    return LLExecutor(threads)


def _limits(kind: str) -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=MAX_ROW_OF_GRAMMAR if kind == "grammar" else MAX_ROW,
        step_max_items=MAX_ITEMS_OF_GRAMMAR if kind == "grammar" else MAX_ITEMS,
        initial_lexer_fuel=MAX_FIRST_FUEL,
        step_lexer_fuel=MAX_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_SYMBOLS,
        verbose_errors=False,
    )


def _whole(wanted: StructuredOutput, marks: Mapping[str, int]) -> str:
    """The grammar in the library's own form; ``ValueError`` if it cannot be read.

    With reasoning, with calls, they and the text are grammars of their own, named by the first one.
    ``marks``: the ids of the tags, if they are tokens of their own.
    """
    text = _text(wanted)
    for schema in schemas_in(f"{wanted.grammar or ''}\n{wanted.calls}"):
        check_multiples(schema)
    if not wanted.reasoning and not wanted.calls:
        return json.dumps({"grammars": [text]})
    answer = f"(@{CALLS} | @{ANSWER})" if wanted.calls else f"@{ANSWER}"
    begin = f"<[{marks[OPEN]}]>" if OPEN in marks else f'"{OPEN}"'
    before = {"": "", "open": "reasoning ", "optional": f"({begin} reasoning)? "}
    lines = [f"start: {before[wanted.reasoning]}{answer}"]
    if wanted.reasoning:
        lines.append(f"GAP: /[ \\t\\r\\n]{{0,{MAX_GAP}}}/")
        if CLOSE in marks:
            lines.append(f"reasoning: THOUGHTS <[{marks[CLOSE]}]> GAP")
            lines.append(r"THOUGHTS: /(?s:.*)/ & ~/(?s:.*<\/think>.*)/")
        else:
            lines.append("reasoning: thoughts GAP")
            lines.append(f'thoughts[suffix="{CLOSE}"]: /(?s:.*)/')
    made: list[Mapping[str, object]] = [
        {"lark_grammar": "\n".join(lines)},
        {**text, "name": ANSWER},
    ]
    if wanted.calls:
        made.append({"lark_grammar": wanted.calls, "name": CALLS})
    return json.dumps({"grammars": made})


def _text(wanted: StructuredOutput) -> Mapping[str, object]:
    """The grammar of the text itself."""
    from llguidance import LLMatcher

    compact = wanted.disable_any_whitespace
    if wanted.json_object:
        return {"json_schema": _json_schema('{"type": "object"}', compact)}
    if wanted.json_schema is not None:
        return {"json_schema": _json_schema(wanted.json_schema, compact)}
    if wanted.regex is not None:
        (made,) = json.loads(LLMatcher.grammar_from_regex(wanted.regex))["grammars"]
        return cast("Mapping[str, object]", made)
    if wanted.choice:
        return {"lark_grammar": "start: " + " | ".join(map(_literal, wanted.choice))}
    return {"lark_grammar": _lark(wanted.grammar or "")}


def _lark(text: str) -> str:
    """The grammar in Lark's syntax; one with rules like ``root ::= ...`` is translated."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    if not _GBNF.search(text):
        return text
    try:
        return any_to_lark(text)
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        if type(error) is not Exception:  # what the translator raises for rules that are missing
            raise
        raise ValueError(str(error)) from error


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _json_schema(text: str, compact: bool) -> Mapping[str, object] | bool:
    """The schema, which must be a JSON object or a boolean, with what may stand between its parts.

    Its own ``x-guidance`` wins.
    """
    schema = json.loads(text)
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a JSON schema is an object, got {text[:40]}")
    check_schema(schema)
    if schema is False:
        return False
    given = schema if isinstance(schema, dict) else {}
    spacing = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITESPACE}
    return {"x-guidance": spacing, **given}


def _cost(wanted: StructuredOutput, seconds: float) -> int:
    """Bytes of a grammar that took so many seconds of processor time to compile."""
    return OVERHEAD_BYTES + BYTES_PER_BYTE * wanted.size + round(BYTES_PER_SECOND * seconds)
