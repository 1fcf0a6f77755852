"""Structured output: tokens and bytes, masks that follow from the tokens, bounds and errors."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from kvrelay.errors import Rejected, Unservable
from kvrelay.structured import (
    MAX_BYTES,
    MAX_CHOICES,
    StructuredOutput,
    of_mapping,
    of_response_format,
)
from kvrelay.text import structured
from kvrelay.text.detokenizer import detokenizer, token_bytes
from kvrelay.text.structured import GrammarCompiler, OffGrammar, vocabulary_of
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer
from tests.text.grammars import bits, walk
from tests.text.kinds import KINDS, write

EOS = 1  # of the byte-level kind; 2 of those with an unknown token
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "bc", "ü 漢"]},
        "marks": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "kind", "marks"],
    "additionalProperties": False,
}
WANTED = {
    "json_object": StructuredOutput(json_object=True),
    "json_schema": StructuredOutput(json_schema=json.dumps(SCHEMA)),
    "regex": StructuredOutput(regex=r"(\d{1,4}-)?[a-fü]{2,9}( 漢)*"),
    "choice": StructuredOutput(
        choice=("yes", "yes, but", 'a "quoted"\nline\\', "漢字 👩‍👧", "/x/")
    ),
    "lark": StructuredOutput(grammar='start: "(" start ")" | /[0-9]+/'),
    "gbnf": StructuredOutput(grammar='root ::= "<" item ("," item)* ">"\nitem ::= [a-c]+'),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write(kind, tmp_path_factory.mktemp(kind) / kind) for kind in KINDS}


@pytest.fixture(params=["byte_level", "llama2", "gemma"], scope="module")
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer(folders[request.param])


@pytest.fixture(scope="module")
def compiler(model: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(model, eos_of(model))


def eos_of(model: Tokenizer) -> tuple[int, ...]:
    token = model.backend.token_to_id("</s>")
    assert token is not None
    return (token,)


def accepts(name: str, text: str) -> bool:
    """Whether a complete text is what was asked for, by means of our own."""
    import re

    match name:
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "json_schema":
            value = json.loads(text)
            return (
                set(value) - {"more"} == {"name", "kind", "marks"}
                and isinstance(value["name"], str)
                and len(value["name"]) <= 12
                and value["kind"] in ("a", "bc", "ü 漢")
                and len(value["marks"]) <= 3
                and all(type(mark) is int and mark >= 0 for mark in value["marks"])
                and value.get("more") in (None, True, False)
            )
        case "regex":
            return re.fullmatch(WANTED["regex"].regex or "", text) is not None
        case "choice":
            return text in WANTED["choice"].choice
        case "lark":
            depth = len(text) - len(text.lstrip("("))
            return re.fullmatch(r"\(*[0-9]+\)*", text) is not None and text.endswith(")" * depth)
        case _:
            return re.fullmatch(r"<[a-c]+(,[a-c]+)*>", text) is not None


@pytest.mark.parametrize("name", WANTED)
def test_a_random_walk_is_what_was_asked_for(
    name: str, model: Tokenizer, compiler: GrammarCompiler
) -> None:
    ended = 0
    for seed in range(12):
        output = walk(compiler.compile(WANTED[name]), eos_of(model)[0], seed)
        if len(output) == 200:
            continue  # a JSON object of random tokens need not end
        ended += 1
        raw = b"".join(map(token_bytes(model), output))
        assert accepts(name, raw.decode()), raw
        text = detokenizer(model)
        shown = "".join(map(text.push, output)) + text.flush()
        assert shown == raw.decode()
    assert ended or name == "json_object"


@pytest.mark.parametrize("name", WANTED)
def test_the_masks_follow_from_the_tokens_at_every_cut(
    name: str, model: Tokenizer, compiler: GrammarCompiler
) -> None:
    """Replayed anywhere, without the masks before: what a migration and a resume do."""
    made = compiler.compile(WANTED[name])
    output = walk(compiler.compile(WANTED[name]), eos_of(model)[0], seed=7, most=60)
    masks = [made.allowed(output, 0, cut) for cut in range(len(output) + 1)]
    for cut, mask in enumerate(masks):
        fresh = compiler.compile(WANTED[name])
        fresh.follow(output, 0, cut)
        assert fresh.allowed(output, 0, cut) == mask
        unshared = GrammarCompiler(model, eos_of(model)).compile(WANTED[name])
        assert unshared.allowed([5, *output], 1, 1 + cut) == mask  # behind a prompt of one token


def test_a_token_that_does_not_follow_is_refused(
    model: Tokenizer, compiler: GrammarCompiler
) -> None:
    made = compiler.compile(WANTED["choice"])
    wrong = model.encode("no", add_special_tokens=False)
    with pytest.raises(OffGrammar, match="token"):
        made.follow(wrong, 0, len(wrong))


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9),
        min_size=1,
        max_size=5,
        unique=True,
    ),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_any_choice_is_taken_literally(texts: list[str], seed: int) -> None:
    model = byte_level()
    made = byte_compiler().compile(StructuredOutput(choice=tuple(texts)))
    output = walk(made, EOS, seed)
    assert b"".join(map(token_bytes(model), output)).decode() in texts


_MADE: list[Tokenizer | GrammarCompiler] = []


def byte_level() -> Tokenizer:
    _make()
    model = _MADE[0]
    assert isinstance(model, Tokenizer)
    return model


def byte_compiler() -> GrammarCompiler:
    _make()
    made = _MADE[1]
    assert isinstance(made, GrammarCompiler)
    return made


def _make() -> None:
    import tempfile

    if not _MADE:
        model = Tokenizer(
            write("byte_level", Path(tempfile.mkdtemp(prefix="kvrelay-tests-")) / "m")
        )
        _MADE.extend((model, GrammarCompiler(model, (EOS,))))


def test_every_token_stands_for_the_bytes_of_its_text(model: Tokenizer) -> None:
    made = vocabulary_of(model, eos_of(model))
    known = 0
    bytes_of = token_bytes(model)
    for token in range(made.vocab_size):
        if not made.is_special_token(token):
            assert made.decode_bytes([token]) == bytes_of(token)
            known += bool(bytes_of(token))
    assert known > 300
    assert [token for token in model.special_ids if not made.is_special_token(token)] == []


@pytest.mark.parametrize("kind", ["unigram", "word_piece"])
def test_a_vocabulary_that_is_not_made_of_bytes_is_refused(
    kind: str, folders: dict[str, Path]
) -> None:
    made = GrammarCompiler(Tokenizer(folders[kind]), (2,))
    with pytest.raises(Rejected, match=r"json_object: this model cannot do it: its tokens do not"):
        made.compile(WANTED["json_object"])


def test_a_token_with_other_bytes_than_its_text_is_refused(folders: dict[str, Path]) -> None:
    model = Tokenizer(folders["llama2"])
    model.backend.decoder = decoders.Sequence([decoders.Replace("e", "E"), model.backend.decoder])
    with pytest.raises(Unservable, match=r"token \d+ stands for other bytes"):
        vocabulary_of(model, (2,))


def test_without_tokenizer_or_end_token() -> None:
    with pytest.raises(Rejected, match=r"^sampling.structured_output: needs a tokenizer.*leave"):
        GrammarCompiler(NoTokenizer(), (1,)).compile(WANTED["regex"])
    with pytest.raises(Rejected, match=r"names no end-of-sequence token"):
        GrammarCompiler(byte_level(), ()).compile(WANTED["regex"])


WRONG = {
    "json_schema": [
        ('{"type":', r"json_schema: Expecting value: line 1 column 9"),
        ("[1]", r"json_schema: a JSON schema is an object"),
        ('{"not": {}}', r'json_schema: Unimplemented keys: \["not"\]'),
        ('{"type": "string", "format": "idn-email"}', r"json_schema: Unknown format"),
        ('{"$ref": "http://127.0.0.1/x"}', r"json_schema: Resource .* does not fetch"),
        ('{"type": "integer", "minimum": 3, "maximum": 2}', r"json_schema: Unsatisfiable"),
        ('{"items":' * 3000 + "{}" + "}" * 3000, r"json_schema: maximum recursion depth"),
        ("", r"json_schema: Expecting value: line 1 column 1"),
    ],
    "regex": [
        ("a(b", r"regex: at .* unclosed group"),
        ("a(?=b)c", r"regex: at .* look-around"),
        ("(" * 20000 + ")" * 20000, r"regex: at .* exceed the maximum number of nested"),
    ],
    "grammar": [
        ("start: x", r'grammar: at 1\(8\): unknown name: "x"'),
        ('root ::= "a', r"grammar: .* at line 1"),
        ("root ::= " + "(" * 20000, r"grammar: maximum recursion depth"),
        ('start: <no_such_token> "a"', r"grammar: at 1\(8\): unknown special token"),
        ("", r"grammar: "),
        ('root ::= "a" other', r"grammar: .*'other' not found"),
        ('x ::= "a"', r"grammar: No 'root' rule found"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [(kind, *case) for kind, cases in WRONG.items() for case in cases],
    ids=lambda value: str(value)[:24],
)
def test_errors_name_the_field_and_the_place(kind: str, text: str, message: str) -> None:
    with pytest.raises(Rejected, match=rf"^sampling.structured_output.{message}") as caught:
        byte_compiler().compile(StructuredOutput(**{kind: text}))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_bounds() -> None:
    for wrong, message in (
        (StructuredOutput(), "set exactly one field, got none"),
        (StructuredOutput(regex="a", grammar="b"), "got regex, grammar"),
        (StructuredOutput(regex="x" * (MAX_BYTES + 1)), r"regex: 65537 bytes"),
        (StructuredOutput(choice=("a",) * (MAX_CHOICES + 1)), r"choice: at most 1024"),
        (StructuredOutput(choice=("a", "")), r"choice\[1\]: is empty"),
    ):
        with pytest.raises(Rejected, match=message):
            wrong.check()


HOSTILE = {
    "ambiguous": StructuredOutput(grammar='start: e\ne: e e e e | e e e | e e | "a" | "b" | '),
    "recursive": StructuredOutput(grammar='start: start start | "a"'),
    "states": StructuredOutput(regex="(.|..)*a.{300}b"),
    "products": StructuredOutput(regex="((a{0,100}){0,100}){0,100}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_with_an_error_and_soon(name: str) -> None:
    """Bounds of work, not of time: a busy machine changes nothing."""
    model = byte_level()
    letters = [model.encode(letter, add_special_tokens=False)[0] for letter in "ab"]
    made = byte_compiler().compile(HOSTILE[name])
    output: list[int] = []
    chance = random.Random(3)
    match = r"is too complex, or cannot be continued, after \d+"
    with pytest.raises(Rejected, match=match):  # noqa: PT012 - the place is the library's
        for _ in range(4000):
            allowed = bits(made.allowed(output, 0, len(output)))
            output.append(chance.choice([token for token in letters if token in allowed]))


MULTIPLES: Mapping[str, object] = {
    "one": {"type": "integer", "multipleOf": 999_999_937},
    "two": {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    "decimals": {"type": "number", "multipleOf": 1234.5678},
    "scales": {"type": "number", "allOf": [{"multipleOf": 0.0009}, {"multipleOf": 1117}]},
    "nested": {"type": "array", "items": {"properties": {"a": {"multipleOf": 10_007}}}},
}


@pytest.mark.parametrize("before", ["", "start: %json ", "start: %json // {} {\n"])
@pytest.mark.parametrize("name", MULTIPLES)
def test_a_large_multiple_is_refused_before_its_lexer_is_made(name: str, before: str) -> None:
    """The library has a state for each remainder: a schema of 50 bytes took the router's memory."""
    text = json.dumps(MULTIPLES[name])
    wanted = StructuredOutput(grammar=before + text) if before else None
    with pytest.raises(Rejected, match="the least common multiple of every multipleOf"):
        byte_compiler().compile(wanted or StructuredOutput(json_schema=text))


@pytest.mark.parametrize("multiple", [1, 7, 5000, 0.01, 0.25, 100_000, 1e9, 1e-9])
def test_usual_multiples_are_served(multiple: float) -> None:
    schema = {"type": "number", "multipleOf": multiple, "minimum": 0}
    made = byte_compiler().compile(StructuredOutput(json_schema=json.dumps(schema)))
    assert bits(made.allowed((), 0, 0))


@pytest.mark.parametrize("nested", [False, True])
def test_too_many_optional_properties_are_refused_before_the_first_token(nested: bool) -> None:
    """Required ones are no choice: they may be as many as fit."""

    def schema(optional: int, required: int = 0) -> StructuredOutput:
        names = [f"p{number}" for number in range(optional + required)]
        one: dict[str, object] = {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in names},
            "required": names[optional:],
            "additionalProperties": False,
        }
        if nested:
            one = {"type": "object", "properties": {"o": {"type": "array", "items": one}}}
        return StructuredOutput(json_schema=json.dumps(one))

    with pytest.raises(Rejected, match=r"json_schema: an object has 481 optional properties"):
        byte_compiler().compile(schema(481))
    for wanted in (schema(480), schema(0, 600)):
        made = byte_compiler().compile(wanted)
        text = '{"o":[{' if nested else "{"
        output = byte_level().encode(text, add_special_tokens=False)
        for end in range(len(output) + 1):
            assert bits(made.allowed(output, 0, end))


def test_a_grammar_without_a_first_mask_is_refused_when_it_is_compiled() -> None:
    choices = " | ".join(f"/[ab]{{0,{number}}}x?/ a" for number in range(1, 600))
    with pytest.raises(Rejected, match=r"grammar: is too complex.* after 0 output tokens"):
        byte_compiler().compile(StructuredOutput(grammar=f'start: a\na: {choices} | "b"'))


def test_the_cache_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "CACHE_BYTES", 5 * structured.OVERHEAD_BYTES)
    monkeypatch.setattr(structured, "BYTES_PER_SECOND", 0)
    made = GrammarCompiler(byte_level(), (EOS,))
    for number in range(20):
        made.compile(StructuredOutput(regex=f"a{{{number}}}b"))
        assert made.cached_bytes <= structured.CACHE_BYTES
    assert made.knows(StructuredOutput(regex="a{19}b"))
    assert not made.knows(StructuredOutput(regex="a{0}b"))


def test_a_grammar_counts_for_the_memory_that_its_compilation_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 0.125, 1.0, 1.5, 2.0, 2.0])
    monkeypatch.setattr("kvrelay.text.structured.time.thread_time", lambda: next(times))
    made, first = GrammarCompiler(byte_level(), (EOS,)), StructuredOutput(regex="a{1}b")
    made.compile(first)
    assert 20 << 20 <= made.cached_bytes < 21 << 20
    made.compile(StructuredOutput(regex="a{2}b"))  # more than the cache has: 80 MiB
    assert made.cached_bytes == 0
    assert not made.knows(first)
    made.compile(first)
    assert made.knows(first)


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "(ab){1000000}", "[ab]{0,400000}c{50000}"])
def test_what_a_pattern_repeats_is_bounded_when_it_is_compiled(pattern: str) -> None:
    """Memory grows with the fuel: 15 bytes of a pattern took 174 MiB."""
    program = (
        "import resource\n"
        "from kvrelay.structured import StructuredOutput\n"
        "from kvrelay.errors import KvrelayError\n"
        "from tests.text.test_structured import byte_compiler\n"
        "made = byte_compiler()\n"
        "made.compile(StructuredOutput(regex='z'))\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before = peak()\n"
        "try:\n"
        f"    made.compile(StructuredOutput(regex={pattern!r}))\n"
        "except KvrelayError:\n"
        "    pass\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64


def test_several_threads_compile_and_match_at_once() -> None:
    made = GrammarCompiler(byte_level(), (EOS,))
    alone = {name: walk(byte_compiler().compile(WANTED[name]), EOS, 5) for name in WANTED}
    wrong: list[str] = []

    def run() -> None:
        for name, wanted in WANTED.items():
            if walk(made.compile(wanted), EOS, 5) != alone[name]:
                wrong.append(name)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def mappings() -> Iterator[tuple[dict[str, object], StructuredOutput]]:
    schema = {"type": "null"}
    yield {"json": schema}, StructuredOutput(json_schema='{"type": "null"}')
    yield {"json": '{"a": 1}', "regex": None}, StructuredOutput(json_schema='{"a": 1}')
    yield {"json": True}, StructuredOutput(json_schema="true")
    yield {"json_object": True}, StructuredOutput(json_object=True)
    yield {"regex": "a"}, StructuredOutput(regex="a")
    yield {"choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))
    yield {"grammar": "start: x"}, StructuredOutput(grammar="start: x")


def test_the_names_of_vllm() -> None:
    for value, wanted in mappings():
        assert of_mapping(value) == wanted
    for wrong in ({}, {"regex": "a", "json": {}}, {"regex": 3}, {"choice": ["a", 1]}):
        with pytest.raises(Rejected, match=r"^structured_output: give one of json"):
            of_mapping(wrong)
    with pytest.raises(Rejected, match=r"^structured_output.x: is not served"):
        of_mapping({"x": 1})
    with pytest.raises(Rejected, match=r"^structured_output.json: must be a JSON schema"):
        of_mapping({"json": [1]})


def test_the_response_format_of_openai() -> None:
    assert of_response_format({"type": "text"}) is None
    assert of_response_format({"type": "json_object"}) == StructuredOutput(json_object=True)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}
    assert of_response_format(schema) == StructuredOutput(json_schema="{}")
    for wrong in ({}, {"type": "x"}, {"type": "json_schema"}, "json"):
        with pytest.raises(Rejected, match=r"^response_format: must be an object with type"):
            of_response_format(wrong)
