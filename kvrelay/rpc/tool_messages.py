"""Function calling in messages: from OpenAI's JSON, as both doors' clients give it, and back."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Never

from kvrelay.errors import Rejected
from kvrelay.tools import CHOICE, FunctionTool, ToolMode, ToolOptions, arguments_of
from kvrelay.v1 import router_pb2

MODES: Mapping[ToolMode, router_pb2.ToolChoiceMode.ValueType] = {
    "none": router_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": router_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": router_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
TOOL = "tool"
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = 80
_BRIEF.maxother = 80
CHOICES = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'


def set_tools(chat: router_pb2.Chat, tools: object, choice: object, parallel: object) -> None:
    """Set what a conversation offers; ``None`` is absent. ``Rejected`` for a value of other type.

    Bounds are the router's to check.
    """
    if tools is not None:
        if not isinstance(tools, list | tuple):
            _wrong("tools", "a list of functions", tools)
        for index, tool in enumerate(tools):
            _add_tool(chat.tools.add().function, f"tools[{index}]", tool)
    if choice is not None:
        _set_choice(chat.tool_choice, choice)
    if parallel is not None:
        if not isinstance(parallel, bool):
            _wrong("parallel_tool_calls", "true or false", parallel)
        chat.parallel_tool_calls = parallel


def set_calls(message: router_pb2.ChatMessage, calls: object, where: str) -> None:
    """Set the calls that a message of the assistant made."""
    if not isinstance(calls, list | tuple):
        _wrong(where, "a list of calls", calls)
    for index, call in enumerate(calls):
        field = f"{where}[{index}]"
        match call:
            case {"type": kind} if kind != "function":
                raise Rejected(f"{field}.type", f"{_brief(kind)} is not served: must be function")
            case {"id": known, "function": {"name": name, "arguments": arguments}}:
                made = message.tool_calls.add()
                made.id = _text(f"{field}.id", known)
                made.function.name = _text(f"{field}.function.name", name)
                made.function.arguments = _text(f"{field}.function.arguments", arguments)
            case _:
                _wrong(field, "an object with id and function, which has name, arguments", call)


def options_of(chat: router_pb2.Chat) -> ToolOptions:
    """What a conversation offers, not checked but for an unknown mode."""
    given = chat.tool_choice.mode
    if given not in router_pb2.ToolChoiceMode.values():
        names = ", ".join(router_pb2.ToolChoiceMode.keys())
        raise Rejected(CHOICE, f"{given} is unknown here; known: {names}")
    known: dict[router_pb2.ToolChoiceMode.ValueType, ToolMode]
    known = {one: name for name, one in MODES.items()}
    return ToolOptions(
        tools=tuple(_tool(one.function) for one in chat.tools),
        mode=known.get(given, "auto"),
        function=chat.tool_choice.function,
        parallel=not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls,
    )


def turns_of(chat: router_pb2.Chat) -> list[dict[str, object]]:
    """The messages as chat templates take them. ``Rejected`` naming a field that is wrong."""
    calls = set[str]()
    return [
        _turn(message, f"chat.messages[{index}]", calls)
        for index, message in enumerate(chat.messages)
    ]


def _turn(message: router_pb2.ChatMessage, field: str, calls: set[str]) -> dict[str, object]:
    """``calls`` are the ids of the calls before this message; it adds its own."""
    made: dict[str, object] = {"role": message.role, "content": message.content}
    if message.HasField("reasoning"):  # templates know it by either name
        made["reasoning_content"] = made["reasoning"] = message.reasoning
    if message.role == TOOL:
        if message.tool_call_id not in calls:
            raise Rejected(
                f"{field}.tool_call_id",
                f"must be the id of a call of an earlier message, got {message.tool_call_id!r:.80}",
            )
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(
                        call.function.arguments, f"{field}.tool_calls[{index}].function.arguments"
                    ),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
        calls |= {call.id for call in message.tool_calls}
    return made


def _tool(message: router_pb2.FunctionDefinition) -> FunctionTool:
    description = message.description if message.HasField("description") else None
    return FunctionTool(message.name, description, message.parameters)


def _add_tool(message: router_pb2.FunctionDefinition, where: str, tool: object) -> None:
    match tool:
        case {"type": kind} if kind != "function":
            raise Rejected(f"{where}.type", f"{_brief(kind)} is not served: must be function")
        case {"function": {"name": name, **given}}:
            field = f"{where}.function"
            message.name = _text(f"{field}.name", name)
            if (description := given.get("description")) is not None:
                message.description = _text(f"{field}.description", description)
            if (parameters := given.get("parameters")) is not None:
                message.parameters = _schema(f"{field}.parameters", parameters)
            if (strict := given.get("strict")) is not None and not isinstance(strict, bool):
                _wrong(f"{field}.strict", "true or false", strict)
        case _:
            _wrong(where, "an object with type and function, which has a name", tool)


def _set_choice(message: router_pb2.ToolChoice, choice: object) -> None:
    match choice:
        case "none" | "auto" | "required" as mode:
            message.mode = MODES[mode]
        case {"type": "function", "function": {"name": str(name)}} if name:
            message.function = _text("tool_choice.function.name", name)
        case _:
            _wrong("tool_choice", CHOICES, choice)


def _schema(field: str, schema: object) -> str:
    """The text of a JSON schema."""
    if not isinstance(schema, Mapping):
        _wrong(field, "a JSON schema", schema)
    try:
        return _text(field, json.dumps(dict(schema), ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise Rejected(field, f"must be a JSON schema: {error}") from None
    except RecursionError:
        raise Rejected(field, "is nested too deeply") from None


def _text(field: str, value: object) -> str:
    """A string that can be encoded."""
    if not isinstance(value, str):
        _wrong(field, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Rejected(field, f"has half of a surrogate pair at {error.start}") from None
    return value


def _brief(value: object) -> str:
    """A value of any size and depth in an error."""
    return _BRIEF.repr(value)


def _wrong(field: str, wanted: str, value: object) -> Never:
    raise Rejected(field, f"must be {wanted}, got {_brief(value)}")
