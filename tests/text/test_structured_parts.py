"""Structured output: blanks of JSON, reasoning before it, calls in its place; what it may cost."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from benchmarks.random_model import save_tokenizer
from kvrelay.errors import Rejected
from kvrelay.structured import FIELD, ReasoningStart, StructuredOutput, of_mapping
from kvrelay.text import structured
from kvrelay.text.structured import GrammarCompiler, OffGrammar
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer
from kvrelay.text.tools import calls_grammar
from kvrelay.tools import FunctionTool, ToolOptions
from kvrelay.worker.grammars import LegGrammars
from tests.text.grammars import bits

EOS = 256
OPEN, CLOSE = 257, 258
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
VALUE = StructuredOutput(json_schema=SCHEMA)
CALLS = calls_grammar(
    ToolOptions((FunctionTool("f", None, SCHEMA),), "required"), "hermes", {}
).grammar
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module", params=["text", "tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tags as text of several tokens, and as tokens of their own."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tokenizer(folder, 288)
    if request.param == "tokens":
        path = folder / "tokenizer.json"
        state = json.loads(path.read_text("utf-8"))
        vocabulary: dict[str, int] = state["model"]["vocab"]
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token, tag in ((OPEN, "<think>"), (CLOSE, "</think>")):
            (old,) = (word for word, number in vocabulary.items() if number == token)
            del vocabulary[old]
            vocabulary[tag] = token
            # Some models list them among the special tokens, which else have no text.
            state["added_tokens"].append({"id": token, "content": tag, "special": True, **plain})
        path.write_text(json.dumps(state), "utf-8")
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def compiler(model: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(model, (EOS,))


def ends(model: Tokenizer, compiler: GrammarCompiler, wanted: StructuredOutput, text: str) -> bool:
    """Whether the text may be the whole output."""
    tokens = model.encode(text, add_special_tokens=False)
    made = compiler.compile(wanted)
    try:
        return EOS in bits(made.allowed(tokens, 0, len(tokens)))
    except OffGrammar:
        return False


@pytest.mark.parametrize(
    ("text", "free", "compact"),
    [
        ('{"a":1}', True, True),
        ('{"a": 1}', True, False),
        ('{ "a" : 1 }', True, False),
        ('{\n    "a": 1\n}', True, False),
        ('{\r\n\t"a": 1\r\n}', True, False),
        ('{"a":\n\n1}', False, False),
        ('{"a":  1}', False, False),
        (' {"a":1}', False, False),
    ],
)
def test_blanks_of_json(
    model: Tokenizer, compiler: GrammarCompiler, text: str, free: bool, compact: bool
) -> None:
    """At most one line break in a place, and none on request: no model writes blanks for ever."""
    given = {"json": json.loads(SCHEMA), "disable_any_whitespace": True}
    own = {**json.loads(SCHEMA), "x-guidance": {"whitespace_pattern": r"[ \r\n\t]{0,9}"}}
    assert ends(model, compiler, VALUE, text) == free
    assert ends(model, compiler, of_mapping(given), text) == compact
    assert ends(model, compiler, of_mapping({"json": own}), text) == (text[0] != " ")


@pytest.mark.parametrize(
    ("reasoning", "calls", "text", "whole"),
    [
        ("open", "", 'a < b </ </thin </think>\n\n{"a":1}', True),
        ("open", "", '</think>{"a":1}', True),
        ("open", "", '{"a":1}', False),
        ("open", "", 'a</think>b{"a":1}', False),
        ("optional", "", '{"a":1}', True),
        ("optional", "", '<think>\né\n</think>\n\n{"a":1}', True),
        ("optional", "", '<think>never {"a":1}', False),
        ("optional", "", "x", False),
        ("", "", '<think></think>{"a":1}', False),
        ("", CALLS, '{"a":1}', True),
        ("", CALLS, CALL, True),
        ("", CALLS, f"{CALL}\n{CALL}", True),
        ("", CALLS, f'{CALL}{{"a":1}}', False),
        ("optional", CALLS, f"<think>a</think>\n{CALL}", True),
        ("optional", CALLS, '<think>a</think>\n{"a":1}', True),
        ("open", CALLS, f"{CALL}</think>{CALL}", True),
        ("open", CALLS, CALL, False),
    ],
)
def test_reasoning_and_calls(
    model: Tokenizer,
    compiler: GrammarCompiler,
    reasoning: ReasoningStart,
    calls: str,
    text: str,
    whole: bool,
) -> None:
    wanted = StructuredOutput(json_schema=SCHEMA, reasoning=reasoning, calls=calls)
    assert ends(model, compiler, wanted, text) == whole


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput(json_object=True),
        StructuredOutput(regex="[{]}?"),
        StructuredOutput(choice=("{", "a")),
        StructuredOutput(grammar='root ::= "{" "}"?'),
    ],
)
def test_each_kind_goes_behind_reasoning(
    model: Tokenizer, compiler: GrammarCompiler, wanted: StructuredOutput
) -> None:
    text = "{}" if wanted.kind != "choice" else "a"
    for start, before in (("open", "x</think>\n"), ("optional", "<think>x</think>"), ("", "")):
        one = replace(wanted, reasoning=start)  # type: ignore[arg-type]
        assert ends(model, compiler, one, before + text)


def test_blanks_are_for_json() -> None:
    with pytest.raises(Rejected, match="is for JSON, not for regex"):
        StructuredOutput(regex="a", disable_any_whitespace=True).check()
    with pytest.raises(Rejected, match=r"x.disable_any_whitespace: must be true or false, got 1"):
        of_mapping({"json": {}, "disable_any_whitespace": 1}, "x")
    with pytest.raises(Rejected, match=r"x.disable_any_whitespace: needs json or json_object"):
        of_mapping({"regex": "a", "disable_any_whitespace": True}, "x")


def test_an_ambiguous_grammar_is_refused_before_its_masks_are_slow(model: Tokenizer) -> None:
    """By the work of a mask: 1.3 ms with 152,000 tokens; ordinary grammars take a tenth of that."""
    made = GrammarCompiler(model, (EOS,))
    grammar = made.compile(
        StructuredOutput(grammar='start: e\ne: e e e e | e e e | e e | "a" | "b" | ')
    )
    tokens = model.encode("ab" * 50, add_special_tokens=False)
    with pytest.raises(Rejected, match="too complex") as caught:  # noqa: PT012
        for end in range(len(tokens)):
            grammar.allowed(tokens, 0, end)
    assert 10 < int(caught.value.message.split(" output tokens")[0].split()[-1]) < 40
    query = """start: query
query: "SELECT " cols " FROM " name where?
cols: "*" | col (", " col)*
col: name | ("COUNT" | "SUM" | "MAX") "(" name ")"
name: /[a-z_][a-z0-9_]{0,30}/
where: " WHERE " cond (" AND " cond | " OR " cond)*
cond: name op value | "(" cond (" AND " cond | " OR " cond)* ")"
op: " = " | " < " | " > " | " LIKE "
value: /[0-9]+/ | /'[^']{0,50}'/ | "(" query ")"
"""
    text = "SELECT a, COUNT(b) FROM t WHERE (b > 'x' OR c = (SELECT d FROM e)) AND e = 3"
    assert ends(model, made, StructuredOutput(grammar=query), text)
    tools = tuple(
        FunctionTool(
            f"f{index}",
            None,
            json.dumps({"type": "object", "properties": {f"p{at}": {} for at in range(20)}}),
        )
        for index in range(40)
    )
    forced = calls_grammar(ToolOptions(tools, "required"), "hermes", {})
    assert ends(model, made, forced, CALL.replace('"f"', '"f7"').replace('"a": 1', '"p3": 1'))


def test_the_vocabulary_is_loaded_when_a_worker_starts(
    model: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the first request with a grammar: the library stops all threads for that."""
    loaded = threading.Event()
    real = structured.vocabulary_of

    def load(*given: object) -> object:
        made = real(*given)  # type: ignore[arg-type]
        loaded.set()
        return made

    monkeypatch.setattr(structured, "vocabulary_of", load)
    LegGrammars(model, (EOS,))
    assert loaded.wait(60)
    made = GrammarCompiler(model, (EOS,))
    assert not made.loaded
    made.load_ahead()
    assert made.compile(StructuredOutput(regex="a")).allowed((), 0, 0)
    assert made.loaded
    for broken in (GrammarCompiler(NoTokenizer(), (EOS,)), GrammarCompiler(model, ())):
        broken.load_ahead()
        with pytest.raises(Rejected) as caught:
            broken.compile(StructuredOutput(regex="a"))
        assert caught.value.field.startswith(FIELD)
