"""The conversation of a chat: its turns, its tools, the arguments of its template."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvrelay.errors import Rejected
from kvrelay.rpc.tool_messages import set_calls, set_tools
from kvrelay.v1 import router_pb2
from router.http.fields import Fields, checked_text, shown, wrong

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of ``reasoning_effort``; as in vLLM, templates get it, and that the first one is off."""

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
    chat.SetInParent()
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        match turn:
            case {"role": role, **rest} if "content" in rest or rest.get("tool_calls"):
                made = chat.messages.add()
                made.role = checked_text(f"{where}.role", role)
                _read_turn(made, where, rest)
            case _:
                raise wrong(where, "an object with role and content", turn)
    set_tools(chat, *(fields.raw(name) for name in TOOLS))
    arguments = fields.raw("chat_template_kwargs") or {}
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


def _read_turn(made: router_pb2.ChatMessage, where: str, given: Mapping[object, object]) -> None:
    calls, content, call = given.get("tool_calls"), given.get("content"), given.get("tool_call_id")
    if calls is not None:
        set_calls(made, calls, f"{where}.tool_calls")
    if content is not None or not calls:
        made.content = _content(f"{where}.content", content)
    for name in ("reasoning_content", "reasoning"):  # the second is vLLM's, and wins
        if (thoughts := given.get(name)) is not None:
            made.reasoning = checked_text(f"{where}.{name}", thoughts)
    if call is not None:
        made.tool_call_id = checked_text(f"{where}.tool_call_id", call)


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise Rejected("chat_template_kwargs", "is nested too deeply") from None


def _content(where: str, content: object) -> str:
    """Text, or parts of type text; as in vLLM, a line each."""
    if not isinstance(content, list):
        return checked_text(where, content)
    parts = []
    for index, part in enumerate(content):
        match part:
            case {"type": "text" | "input_text", "text": text}:
                parts.append(checked_text(f"{where}[{index}].text", text))
            case str():
                parts.append(checked_text(f"{where}[{index}]", part))
            case {"type": kind}:
                raise Rejected(
                    f"{where}[{index}].type", f"{shown(kind)} is not served: parts are of type text"
                )
            case _:
                raise wrong(f"{where}[{index}]", "a part of type text", part)
    return "\n".join(parts)
