"""Tool calls in the text of a chat: what a model writes, and what makes it write one. Pure.

Two formats. ``hermes`` (Hermes, Qwen): ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
anywhere in the text. ``llama`` (Llama 3): the text is ``{"name": ..., "parameters": {...}}`` alone,
or several of them with ``;`` between; its python tag is a special token and leaves no text.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvrelay.structured import StructuredOutput
from kvrelay.text.stop import overlap
from kvrelay.tools import ToolOptions, parameters_field

ToolFormat: TypeAlias = Literal["hermes", "llama"]
OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MARKS = (OPEN, CLOSE)
PYTHON_TAG = "<|python_tag|>"
ARGUMENTS: Mapping[ToolFormat, str] = {"hermes": "arguments", "llama": "parameters"}
SEPARATOR: Mapping[ToolFormat, str] = {"hermes": "\n", "llama": "; "}
OTHER_FORMATS = ("<function=", "<arg_key>")  # Qwen3-Coder's and GLM's, between the same tags
HEADER_CHARS = 256
_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([\w.-]{1,64})"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OUTSIDE = frozenset(' \t\r\n{}[]:,"+-.' + string.ascii_letters + string.digits)
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class CallPart:
    """The next part of call ``index``: the first one has the name and no arguments."""

    index: int
    name: str
    arguments: str


Part: TypeAlias = str | CallPart


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches, ``None`` if it is another one."""
    if OPEN in template and not any(one in template for one in OTHER_FORMATS):
        return "hermes"
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama"
    return None


def takes_tools(template: str) -> bool:
    """Whether a chat template shows the tools to the model."""
    return re.search(r"\btools\b", template) is not None


class ToolParser:
    """Push the text of an answer in pieces of any length, then ``flush`` once.

    All parts so far follow from the text so far, however it was cut, so a resumed stream continues.
    A call begins when its name and the beginning of its arguments are known; its arguments are the
    model's own text. What looks like a call before that and is none remains content. Blanks
    between calls are no content. ``single``: calls after the first one are left out.
    """

    def __init__(self, form: ToolFormat, single: bool = False) -> None:
        self.calls = 0
        self._form = form
        self._single = single
        self._held = ""  # not decided yet
        self._gap = ""  # text before it, which is content unless a call begins
        self._scan = _Scan()
        self._step: Callable[[list[Part]], bool] = self._start if form == "llama" else self._text

    @property
    def in_call(self) -> bool:
        """Whether the arguments of a call have begun and not ended."""
        return self._step == self._arguments

    def push(self, text: str) -> list[Part]:
        """The content and the calls that this text adds."""
        self._held += text
        parts: list[Part] = []
        while self._held and self._step(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The rest, at the end of the answer."""
        rest = self._gap + self._held
        inside = self._step in (self._arguments, self._skip, self._outer, self._after)
        blank = self.calls > 0 and not rest.strip()
        self._held = ""
        self._gap = ""
        return [] if inside or blank or not rest else [rest]

    def _text(self, parts: list[Part]) -> bool:
        """Hermes: content, up to the beginning of a call."""
        held = self._held
        start = held.find(OPEN)
        found = start >= 0
        shown = held[: start if found else len(held) - overlap(held, OPEN)].rstrip()
        if shown:
            parts.append(shown)
        if not found:
            self._held = held[len(shown) :]
            return False
        self._expect(start + len(OPEN), len(shown))
        return True

    def _start(self, parts: list[Part]) -> bool:
        """Llama: whether the answer begins with a call."""
        body = self._held.lstrip()
        if PYTHON_TAG.startswith(body):
            return False
        if body.startswith(PYTHON_TAG):
            body = body.removeprefix(PYTHON_TAG).lstrip()
            if not body:
                return False
        return self._begins(body)

    def _after(self, parts: list[Part]) -> bool:
        """Llama: behind a call."""
        body = self._held.lstrip(" \t\r\n;")
        return bool(body) and self._begins(body)

    def _begins(self, body: str) -> bool:
        if body.startswith("{"):
            self._expect(len(self._held) - len(body))
        else:
            self._step = self._content
        return True

    def _content(self, parts: list[Part]) -> bool:
        parts.append(self._held)
        self._held = ""
        return False

    def _expect(self, at: int, since: int = 0) -> None:
        """A call may begin at ``at``; from ``since`` on it is content if none does."""
        self._gap = self._held[since:at]
        self._held = self._held[at:]
        self._scan = _Scan()
        self._step = self._head

    def _head(self, parts: list[Part]) -> bool:
        """The object of a call, up to its arguments, or whole if its parts are in another order."""
        body = self._held.lstrip()
        if not body:
            return False
        header = _HEADER.match(self._held, 0, HEADER_CHARS)
        if header is not None:
            self._begin(parts, header[1])
            self._held = self._held[header.end() :]
            self._scan = _Scan()
            self._step = self._arguments
            return True
        if body[0] == "{" and self._scan.feed(self._held) and not self._scan.ended:
            return False
        whole = self._held[: self._scan.at]
        call = _whole(whole) if self._scan.ended else None
        if call is None:
            parts.append(self._gap)
            self._gap = ""
            self._step = self._text if self._form == "hermes" else self._content
            return True
        self._begin(parts, call[0])
        self._add(parts, call[1])
        self._held = self._held[len(whole) :]
        self._step = self._skip if self._form == "hermes" else self._after
        return True

    def _begin(self, parts: list[Part], name: str) -> None:
        self._gap = ""
        self.calls += 1
        if not self._single or self.calls == 1:
            parts.append(CallPart(self.calls - 1, name, ""))

    def _add(self, parts: list[Part], arguments: str) -> None:
        if arguments and (not self._single or self.calls == 1):
            parts.append(CallPart(self.calls - 1, "", arguments))

    def _arguments(self, parts: list[Part]) -> bool:
        whole = self._scan.feed(self._held)
        self._add(parts, self._held[: self._scan.at])
        self._held = self._held[self._scan.at :]
        self._scan.at = 0
        if whole and not self._scan.ended:
            return False
        if self._form == "hermes":
            self._step = self._skip
        else:
            self._step = self._outer if whole else self._content
            self._scan = _Scan(depth=1)
        return True

    def _skip(self, parts: list[Part]) -> bool:
        """Hermes: to the end of the call, or to the beginning of the next one."""
        held = self._held
        end, start = held.find(CLOSE), held.find(OPEN)
        if end < 0 and start < 0:
            keep = max(overlap(held, CLOSE), overlap(held, OPEN))
            self._held = held[len(held) - keep :]
            return False
        if end >= 0 and not 0 <= start < end:
            self._held = held[end + len(CLOSE) :]
        else:
            self._held = held[start:]
        self._step = self._text
        return True

    def _outer(self, parts: list[Part]) -> bool:
        """Llama: the rest of a call's object."""
        whole = self._scan.feed(self._held)
        self._held = self._held[self._scan.at :]
        self._scan.at = 0
        if whole and not self._scan.ended:
            return False
        self._step = self._after if whole else self._content
        return True


class _Scan:
    """Finds the end of a JSON object; ``at``: characters of the text that were read."""

    def __init__(self, depth: int = 0) -> None:
        self.at = 0
        self.ended = False
        self._depth = depth
        self._quoted = False
        self._escaped = False

    def feed(self, text: str) -> bool:
        """Read on, to the end of the object at most. Returns whether it may be JSON."""
        for char in text[self.at :]:
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char not in _OUTSIDE:
                return False
            else:
                self._quoted = char == '"'
                self._depth += (char in "{[") - (char in "}]")
                self.ended = self._depth == 0 and char in "}]"
            self.at += 1
            if self.ended:
                break
        return True


def calls_grammar(
    options: ToolOptions, form: ToolFormat, marks: Mapping[str, int]
) -> StructuredOutput:
    """The grammar of a call of the tools chosen, or of several calls.

    ``marks``: the ids of ``OPEN`` and ``CLOSE``, if they are tokens of their own.
    """
    names = [f"call_{index}" for index, _ in options.chosen]
    several = options.parallel and not options.function
    more = f" ({json.dumps(SEPARATOR[form])} one)*" if several else ""
    lines = [f"start: one{more}", f"calls: {' | '.join(names)}"]
    if form == "hermes":
        begin, end = (f"<[{marks[mark]}]>" if mark in marks else f'"{mark}"' for mark in MARKS)
        lines.append(f'one: {begin} "\\n" calls "\\n" {end}')
    else:
        lines.append("one: calls")
    for index, tool in options.chosen:
        head = json.dumps(f'{{"name": "{tool.name}", "{ARGUMENTS[form]}": ')
        schema = {"type": "object", **tool.schema(parameters_field(index))}
        schema.setdefault("x-guidance", _SPACING)
        lines.append(f'call_{index}: {head} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return StructuredOutput(grammar="\n".join(lines) + "\n")


def _whole(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    given = value.get("arguments", value.get("parameters"))
    if isinstance(given, str):  # some models quote the object
        return (name, given) if _is_object(given) else None
    if given is not None and not isinstance(given, dict):
        return None
    return name, json.dumps(given or {}, ensure_ascii=False)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
