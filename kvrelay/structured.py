"""What the text of an output must be: JSON, JSON of a schema, a regular expression, a choice, or
the sentences of a grammar. The names are those of vLLM's ``StructuredOutputsParams``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvrelay.errors import Rejected

MAX_BYTES = 64 << 10
MAX_CHOICES = 1024
FIELD = "sampling.structured_output"
NAMES = ("json", "json_object", "regex", "choice", "grammar")
KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")
JSON_KINDS = ("json_object", "json_schema")

ReasoningStart: TypeAlias = Literal["", "optional", "open"]
"""Whether an answer begins with reasoning: no; if it has the tag; yes, the prompt has the tag."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Exactly one of the first five fields is set.

    ``json_object``: any JSON object. ``json_schema``: JSON of this schema (draft 2020-12, as text);
    a keyword that cannot be enforced is refused. ``regex``: the whole output matches it; no
    look-around. ``choice``: the output is one of these texts. ``grammar``: a context-free grammar
    in Lark's syntax (with llguidance's extensions) or in GBNF (``root ::= ...``).
    ``disable_any_whitespace``: JSON in one line; without it, JSON has at most one line break in a
    place. ``reasoning`` and ``calls``, which the router sets: what may come before the text, and a
    grammar of the tool calls that may come in its place.
    """

    json_object: bool = False
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    disable_any_whitespace: bool = False
    reasoning: ReasoningStart = ""
    calls: str = ""

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        given = [name for name in KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            raise Rejected(FIELD, f"set exactly one field, got {', '.join(given) or 'none'}")
        return given[0]

    @property
    def size(self) -> int:
        """Bytes of its texts."""
        given = (self.json_schema, self.regex, self.grammar, self.calls, *self.choice)
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in given if text)

    def check(self) -> None:
        """Raise ``Rejected`` naming the field that is out of bounds. Compiles nothing."""
        field = f"{FIELD}.{self.kind}"
        if self.disable_any_whitespace and self.kind not in JSON_KINDS:
            raise Rejected(f"{FIELD}.disable_any_whitespace", f"is for JSON, not for {self.kind}")
        if len(self.choice) > MAX_CHOICES:
            raise Rejected(field, f"at most {MAX_CHOICES} choices, got {len(self.choice)}")
        if self.choice and not all(self.choice):
            raise Rejected(f"{field}[{self.choice.index('')}]", "is empty")
        if self.size > MAX_BYTES:
            raise Rejected(field, f"{self.size} bytes, more than the limit of {MAX_BYTES}")


def of_mapping(value: Mapping[str, object], name: str = "structured_output") -> StructuredOutput:
    """What a mapping with vLLM's names asks for: ``json``, ``json_object``, ``regex``, ``choice``
    or ``grammar``; with JSON also ``disable_any_whitespace``. ``None`` means absent. ``Rejected``
    for the parameter ``name``.
    """
    given = {key: entry for key, entry in value.items() if entry is not None}
    compact = given.pop("disable_any_whitespace", False)
    for key in given.keys() - {*NAMES, "json_schema"}:
        if given.pop(key) is not False:  # a client may send every field of vLLM's class
            raise Rejected(f"{name}.{key}", "is not served here: leave it out")
    if not isinstance(compact, bool):
        raise Rejected(
            f"{name}.disable_any_whitespace", f"must be true or false, got {compact!r:.80}"
        )
    match given:
        case {"json": schema} | {"json_schema": schema} if len(given) == 1:
            text = _text_of(schema, f"{name}.json")
            return StructuredOutput(json_schema=text, disable_any_whitespace=compact)
        case {"json_object": bool(wanted)} if len(given) == 1:
            return StructuredOutput(json_object=wanted, disable_any_whitespace=compact)
        case _ if compact:
            raise Rejected(f"{name}.disable_any_whitespace", "needs json or json_object")
        case {"regex": str(regex)} if len(given) == 1:
            return StructuredOutput(regex=regex)
        case {"grammar": str(grammar)} if len(given) == 1:
            return StructuredOutput(grammar=grammar)
        case {"choice": list([_, *_] as texts) | tuple([_, *_] as texts)} if len(given) == 1:
            if all(isinstance(text, str) for text in texts):
                return StructuredOutput(choice=tuple(map(str, texts)))
    raise Rejected(name, f"give one of {', '.join(NAMES)} with its value, got {dict(given)!r:.80}")


def of_response_format(value: object, name: str = "response_format") -> StructuredOutput | None:
    """What OpenAI's ``response_format`` asks for, ``None`` for plain text."""
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutput(json_object=True)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return StructuredOutput(json_schema=_text_of(schema, f"{name}.json_schema.schema"))
    wanted = "type text, json_object, or json_schema with json_schema.schema"
    raise Rejected(name, f"must be an object with {wanted}, got {value!r:.80}")


def _text_of(schema: object, name: str) -> str:
    """A JSON schema as text."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping | bool):
        raise Rejected(name, f"must be a JSON schema, got {schema!r:.80}")
    try:
        return json.dumps(dict(schema) if isinstance(schema, Mapping) else schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Rejected(name, f"must be a JSON schema: {error}") from None
