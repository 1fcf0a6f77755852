"""Tool calls: the same from any pieces of the text, and the grammar that forces one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from benchmarks.random_model import byte_tokenizer
from kvrelay.errors import Rejected
from kvrelay.text.output import OutputText
from kvrelay.text.structured import GrammarCompiler
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.text.tools import (
    CLOSE,
    MARKS,
    OPEN,
    CallPart,
    ToolFormat,
    ToolParser,
    calls_grammar,
    format_of,
    takes_tools,
)
from kvrelay.tools import FunctionTool, ToolOptions
from tests.text.grammars import walk

EOS = 256
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/small"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = (FunctionTool("add", "Adds.", json.dumps(ADD)), FunctionTool("stop"))
Call = tuple[str, str]  # name, arguments


def read(form: ToolFormat, pieces: list[str], single: bool = False) -> tuple[str, list[Call]]:
    """The content and the calls."""
    parser = ToolParser(form, single)
    content, calls = "", list[Call]()
    for part in [*(one for piece in pieces for one in parser.push(piece)), *parser.flush()]:
        if isinstance(part, str):
            content += part
        elif part.name:
            assert part == CallPart(len(calls), part.name, "")
            calls.append((part.name, ""))
        else:
            assert part.index == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
    return content, calls


CASES: list[tuple[ToolFormat, str, str, list[Call]]] = [
    ("hermes", "plain <tool", "plain <tool", []),
    ("hermes", " plain\n", " plain\n", []),
    (
        "hermes",
        'a \n<tool_call>\n{"name": "f", "arguments": {"x": "é</b>"}}\n</tool_call>b',
        "ab",
        [("f", '{"x": "é</b>"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{ "s" : "}\\"</tool_call>{" }}</tool_call>',
        "",
        [("f", '{ "s" : "}\\"</tool_call>{" }')],
    ),
    (
        "hermes",
        '\n<tool_call>{"name":"f"}</tool_call>\n<tool_call>{"name":"g"}</tool_call>\n',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"b": [1, {}]}, "name": "f"}</tool_call>',
        "",
        [("f", '{"b": [1, {}]}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
        "",
        [("f", '{"x": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
    ("hermes", "a <tool_call>{broken</tool_call>!", "a <tool_call>{broken</tool_call>!", []),
    ("hermes", "<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}} <tool_call>{"name": "g", "arguments": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama", "Hello {", "Hello {", []),
    ("llama", " ", " ", []),
    ("llama", '{"name": "f", "parameters": {"x": [1]}}', "", [("f", '{"x": [1]}')]),
    (
        "llama",
        '\n{"type": "function", "name": "f", "parameters": {"x": {}}, "more": "}"}\n',
        "",
        [("f", '{"x": {}}')],
    ),
    (
        "llama",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama", '{"answer": 1} {"name": "f"}', '{"answer": 1} {"name": "f"}', []),
    ("llama", '{"name": "f"} and more', " and more", [("f", "{}")]),
    ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama", '<|python_tag|> {"a": 1}', '<|python_tag|> {"a": 1}', []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_and_content(form: ToolFormat, text: str, content: str, calls: list[Call]) -> None:
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == (content, calls)


def test_arguments_arrive_as_they_are_written() -> None:
    parser = ToolParser("hermes")
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {"a') == [
        CallPart(0, "f", ""),
        CallPart(0, "", '{"a'),
    ]
    assert parser.push('": 1') == [CallPart(0, "", '": 1')]
    assert parser.push("}}") == [CallPart(0, "", "}")]
    assert parser.push("\n</tool_call>\n") == parser.flush() == []


def test_a_single_call() -> None:
    text = "".join(f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in "fgh")
    assert read("hermes", [f"{text}x"], single=True) == ("x", [("f", "{}")])


MARKED = [
    *(OPEN, CLOSE, '{"name": "f"}', '{"name": "f", "arguments": {', '"x": "', "}}", '"'),
    *("{", "<", "x", ";", "<|python_tag|>", " ", "\n", "\\", "[", "]"),
]


@given(
    form=st.sampled_from(["hermes", "llama"]),
    text=st.lists(st.sampled_from(MARKED), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 120)),
)
@settings(max_examples=600, deadline=None)
def test_any_pieces_give_the_same(form: ToolFormat, text: str, cuts: list[int]) -> None:
    """Also what was shown at each cut: a stream continues there."""
    places = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert read(form, pieces) == read(form, [text])
    steps, whole = ToolParser(form), ToolParser(form)
    one_by_one = [part for char in text for part in steps.push(char)]
    assert shown(one_by_one) == shown(whole.push(text))
    assert steps.calls == whole.calls


def shown(parts: list[str | CallPart]) -> tuple[str, list[tuple[int, str, str]]]:
    calls = [part for part in parts if isinstance(part, CallPart)]
    indices = sorted({part.index for part in calls})
    return "".join(part for part in parts if isinstance(part, str)), [
        (
            index,
            "".join(part.name for part in calls if part.index == index),
            "".join(part.arguments for part in calls if part.index == index),
        )
        for index in indices
    ]


def model(folder: Path, marks: bool, special: bool = False) -> Tokenizer:
    """A byte-level tokenizer, in which the marks of calls may be tokens."""
    backend = byte_tokenizer(288)
    if marks:
        backend.add_tokens([AddedToken(mark, special=special) for mark in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


@pytest.mark.parametrize("kind", ["text", "tokens", "special", "llama"])
def test_a_forced_answer_is_calls_of_the_tools(kind: str, tmp_path: Path) -> None:
    form: ToolFormat = "llama" if kind == "llama" else "hermes"
    tokenizer = model(tmp_path, kind in ("tokens", "special"), kind == "special")
    compiler = GrammarCompiler(tokenizer, (EOS,))
    seen: set[tuple[str, ...]] = set()
    for seed in range(30):
        wanted = calls_grammar(ToolOptions(TOOLS, "required"), form, tokenizer.added_ids)
        output = walk(compiler.compile(wanted), EOS, seed, most=3000)
        assert len(output) < 3000
        assert (288 in output) == (kind in ("tokens", "special"))
        made = OutputText(tokenizer)
        text = "".join(made.push(token).text for token in output) + made.flush()
        content, calls = read(form, [text])
        assert content == ""
        seen.add(tuple(name for name, _ in calls))
        for name, arguments in calls:
            value = json.loads(arguments)
            assert value == {} if name == "stop" else 0 <= value["a"] <= 99
    assert {("add",), ("stop",)} <= seen
    assert any(len(names) > 1 for names in seen)


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_one_tool_or_one_call(form: ToolFormat, tmp_path: Path) -> None:
    tokenizer = model(tmp_path, marks=True)
    compiler = GrammarCompiler(tokenizer, (EOS,))
    named = ToolOptions(TOOLS, function="add")
    for options in (named, ToolOptions(TOOLS, "required", parallel=False)):
        wanted = compiler.compile(calls_grammar(options, form, tokenizer.added_ids))
        names = set()
        for seed in range(20):
            output = walk(wanted, EOS, seed, most=200)
            _, calls = read(form, [tokenizer.backend.decode(output, skip_special_tokens=False)])
            assert len(calls) == 1
            names.add(calls[0][0])
            wanted = compiler.compile(calls_grammar(options, form, tokenizer.added_ids))
        assert names == ({"add"} if options is named else {"add", "stop"})


SCHEMA_FIELD = "chat.tools[0].function.parameters"
WRONG: list[tuple[ToolOptions, str, str]] = [
    (ToolOptions((), "required"), "chat.tool_choice", "'required' needs tools"),
    (ToolOptions((), function="f"), "chat.tool_choice", "'f' needs tools"),
    (ToolOptions(TOOLS, function="f"), "chat.tool_choice", "'f' is none of the tools: add, stop"),
    (
        ToolOptions(tuple(FunctionTool(f"f{i}") for i in range(129))),
        "chat.tools",
        "at most 128, got 129",
    ),
    (
        ToolOptions((FunctionTool("f", "x" * (256 << 10)),)),
        "chat.tools",
        "262145 bytes, more than the limit of 262144",
    ),
    (ToolOptions((FunctionTool("a b"),)), "chat.tools[0].function.name", "got 'a b'"),
    (ToolOptions((FunctionTool("x" * 65),)), "chat.tools[0].function.name", "1 to 64 letters"),
    (
        ToolOptions((*TOOLS, FunctionTool("add"))),
        "chat.tools[2].function.name",
        r"'add' is tools\[0\] too",
    ),
    (ToolOptions((FunctionTool("f", None, "{"),)), SCHEMA_FIELD, "is not JSON"),
    (ToolOptions((FunctionTool("f", None, "[]"),)), SCHEMA_FIELD, r"got '\[\]'"),
    (
        ToolOptions((FunctionTool("f", None, '{"type": "array"}'),)),
        SCHEMA_FIELD,
        'a JSON schema with type "object"',
    ),
    (ToolOptions((FunctionTool("f", None, '{"a": NaN}'),)), SCHEMA_FIELD, "NaN is no JSON number"),
    (ToolOptions((FunctionTool("f", None, '{"a": "\\ud800"}'),)), SCHEMA_FIELD, "surrogate"),
    (
        ToolOptions((FunctionTool("f", None, '{"a":' * 33 + "1" + "}" * 33),)),
        SCHEMA_FIELD,
        "at most 32 levels deep, got 33",
    ),
    (ToolOptions((FunctionTool("f", None, '{"a":' + "[" * 30_000),)), SCHEMA_FIELD, "deep|JSON"),
]


@pytest.mark.parametrize(("options", "field", "message"), WRONG)
def test_bounds(options: ToolOptions, field: str, message: str) -> None:
    with pytest.raises(Rejected, match=message) as caught:
        options.check()
    assert caught.value.field == field


def test_what_a_template_says() -> None:
    hermes = "{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{% endif %}"
    assert format_of(hermes) == "hermes"
    assert takes_tools(hermes)
    assert format_of("{{ tools }}<tool_call>\n<function=x>") is None
    assert format_of('<|start_header_id|>{{ tools }} \'{"name": x, "parameters": y}\'') == "llama"
    assert format_of("[AVAILABLE_TOOLS]{{ tools }}") is None
    assert not takes_tools("{% for m in messages %}{{ m.content }}{% endfor %}")
