"""Function calling: the tools that a request offers, which of them an answer must call, its calls.

The names are those of OpenAI's API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias, cast

from kvrelay.errors import Rejected

MAX_TOOLS = 128
MAX_BYTES = 256 << 10  # of all tools as JSON
MAX_DEPTH = 32  # of a schema
SHOWN = 8  # names in an error
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
FIELD = "chat.tools"
CHOICE = "chat.tool_choice"
NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'

ToolMode: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an answer, or of an earlier turn. ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of call ``index`` of an answer. The first part has ``id`` and ``name``; the
    ``arguments`` of all parts together are those of the call.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that a model may call; ``parameters`` is a JSON schema as text, or empty."""

    name: str
    description: str | None = None
    parameters: str = ""

    @property
    def size(self) -> int:
        """Bytes of its texts."""
        texts = (self.name, self.description or "", self.parameters)
        return sum(len(text.encode("utf-8", "replace")) for text in texts)

    def schema(self, field: str) -> dict[str, object]:
        """Its parameters; ``Rejected`` for ``field`` unless they are the schema of an object."""
        text = self.parameters or NO_PARAMETERS
        try:
            value = json.loads(text, parse_constant=_no_number)
        except RecursionError:
            raise Rejected(field, f"at most {MAX_DEPTH} levels deep, got hundreds") from None
        except ValueError as error:
            raise Rejected(field, f"is not JSON: {error}, got {text!r:.80}") from None
        if not isinstance(value, dict) or value.get("type", "object") != "object":
            raise Rejected(field, f'must be a JSON schema with type "object", got {text!r:.80}')
        if (depth := depth_of(value)) > MAX_DEPTH:
            raise Rejected(field, f"at most {MAX_DEPTH} levels deep, got {depth}")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Rejected(field, "has half of a surrogate pair: send whole characters") from None
        return cast("dict[str, object]", value)


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a request. ``function``: the answer is a call of it, whatever ``mode`` says.

    ``parallel``: an answer may have several calls.
    """

    tools: tuple[FunctionTool, ...] = ()
    mode: ToolMode = "auto"
    function: str = ""
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.function) or self.mode == "required"

    @property
    def size(self) -> int:
        """Bytes of the tools."""
        return sum(tool.size for tool in self.tools)

    @property
    def chosen(self) -> Iterator[tuple[int, FunctionTool]]:
        """The tools that a forced answer may call, with their positions."""
        for index, tool in enumerate(self.tools):
            if self.function in ("", tool.name):
                yield index, tool

    def check(self) -> None:
        """Raise ``Rejected`` naming the field that is out of bounds."""
        if self.forced and not self.tools:
            raise Rejected(CHOICE, f"{self.function or self.mode!r} needs tools: give some")
        check_count(len(self.tools))
        if self.size > MAX_BYTES:
            raise Rejected(FIELD, f"{self.size} bytes, more than the limit of {MAX_BYTES}")
        names: dict[str, int] = {}
        for index, tool in enumerate(self.tools):
            field = f"{FIELD}[{index}].function.name"
            if not NAME.fullmatch(tool.name):
                raise Rejected(
                    field, f"must have 1 to 64 letters, digits, _ and -, got {tool.name!r:.80}"
                )
            if tool.name in names:
                raise Rejected(field, f"{tool.name!r} is tools[{names[tool.name]}] too: rename one")
            names[tool.name] = index
            tool.schema(parameters_field(index))
        if self.function and self.function not in names:
            known = ", ".join(list(names)[:SHOWN])
            raise Rejected(CHOICE, f"{self.function!r:.80} is none of the tools: {known}")

    def for_template(self) -> list[dict[str, object]]:
        """What a chat template gets, as OpenAI's API has it."""
        made: list[dict[str, object]] = []
        for index, tool in enumerate(self.tools):
            function: dict[str, object] = {"name": tool.name}
            if tool.description is not None:
                function["description"] = tool.description
            schema = tool.schema(parameters_field(index))
            empty = {"type": "object", "properties": {}}
            function["parameters"] = schema if tool.parameters else empty
            made.append({"type": "function", "function": function})
        return made


def check_count(tools: int) -> None:
    """Raise ``Rejected`` for more tools than a request may offer."""
    if tools > MAX_TOOLS:
        raise Rejected(FIELD, f"at most {MAX_TOOLS}, got {tools}: offer fewer")


def parameters_field(index: int) -> str:
    """The name of the schema of a tool."""
    return f"{FIELD}[{index}].function.parameters"


def arguments_of(text: str, field: str) -> Mapping[str, object]:
    """The arguments of a call of an earlier turn, as chat templates take them."""
    try:
        value = json.loads(text or "{}", parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Rejected(field, f"is not JSON: {error}, got {text!r:.80}") from None
    if not isinstance(value, dict):
        raise Rejected(field, f"must be a JSON object as text, got {text!r:.80}")
    if (depth := depth_of(value)) > MAX_DEPTH:
        raise Rejected(field, f"at most {MAX_DEPTH} levels deep, got {depth}")
    return cast("dict[str, object]", value)


def depth_of(value: object) -> int:
    """Levels of nested lists and objects; ``json.loads`` has bounded them."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    return depth


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
