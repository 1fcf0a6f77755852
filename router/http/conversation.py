"""The conversation of a chat: its turns, its tools, the arguments of its template."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvrelay.errors import Rejected
from kvrelay.rpc.tool_messages import set_calls, set_tools
from kvrelay.tools import check_count as check_tool_count
from kvrelay.v1 import router_pb2
from router.generate.request import check_turns
from router.http.fields import Fields, checked_text, shown, wrong

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of ``reasoning_effort``; as in vLLM, templates get it, and that the first one is off."""

THOUGHTS = ("reasoning_content", "reasoning")  # the second is vLLM's, and wins
INSTEAD = ("tool_calls", *THOUGHTS)
"""Fields of a message that make up for its content, as of answers of this server."""

SILENT_OF_MESSAGES = ("annotations", "name", "refusal")
"""Fields of OpenAI's messages that change no answer here."""

FUNCTION = ("name", "description", "parameters", "strict")
"""Fields of a function that is a tool."""

TOOLS: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
"""Fields of chats, and their values that change nothing elsewhere."""


def read_messages(fields: Fields, chat: router_pb2.Chat) -> None:
    """Set the turns, the tools and the arguments of the template."""
    turns = fields.items("messages", "messages")
    if turns is None:
        raise Rejected("messages", "missing: give the conversation")
    check_turns(len(turns))
    chat.SetInParent()
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        match turn:
            case dict() if "role" in turn and ("content" in turn or any(map(turn.get, INSTEAD))):
                _read_turn(chat.messages.add(), fields.part(where, turn), where)
            case _:
                raise wrong(where, "an object with role and content", turn)
    offered = [fields.raw(name) for name in TOOLS]
    if isinstance(offered[0], list):
        check_tool_count(len(offered[0]))
    set_tools(chat, *offered)
    _note_tools(fields, offered[0])
    arguments = fields.raw("chat_template_kwargs")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise wrong("chat_template_kwargs", "an object", arguments)
    effort = fields.text("reasoning_effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise wrong("reasoning_effort", f"one of {', '.join(EFFORTS)}", effort)
        own = {"reasoning_effort": effort, "enable_thinking": effort != EFFORTS[0]}
        arguments = {**own, **arguments}
    if arguments:
        chat.template_kwargs = checked_text("chat_template_kwargs", _as_json(arguments))


def _note_tools(fields: Fields, tools: object) -> None:
    """Find what is unknown of tools that are otherwise right."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        known = fields.part(f"tools[{index}]", tool)
        known.raw("type")
        if (function := known.table("function")) is not None:
            for name in FUNCTION:
                function.raw(name)


def _read_turn(made: router_pb2.ChatMessage, given: Fields, where: str) -> None:
    made.role = checked_text(f"{where}.role", given.raw("role"))
    content, calls = given.raw("content"), given.raw("tool_calls")
    if calls is not None:
        set_calls(made, calls, f"{where}.tool_calls")
    for name in THOUGHTS:
        if (thoughts := given.text(name)) is not None:
            made.reasoning = thoughts
    if content is not None or not (calls or made.reasoning):
        made.content = _content(given, where, content)
    if (call := given.text("tool_call_id")) is not None:
        made.tool_call_id = call
    for name in SILENT_OF_MESSAGES:
        given.raw(name)


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise Rejected("chat_template_kwargs", "is nested too deeply") from None


def _content(turn: Fields, where: str, content: object) -> str:
    """Text, or parts of type text; as in vLLM, a line each."""
    if not isinstance(content, list):
        return checked_text(f"{where}.content", content)
    parts = []
    for index, part in enumerate(content):
        name = f"content[{index}]"
        field = f"{where}.{name}"
        match part:
            case {"type": "text" | "input_text"}:
                known = turn.part(name, part)
                parts.append(checked_text(f"{field}.text", known.raw("text")))
                known.raw("type")
            case str():
                parts.append(checked_text(field, part))
            case {"type": kind}:
                raise Rejected(
                    f"{field}.type", f"{shown(kind)} is not served: parts are of type text"
                )
            case _:
                raise wrong(field, "a part of type text", part)
    return "\n".join(parts)
