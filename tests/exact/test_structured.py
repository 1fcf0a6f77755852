"""Structured output: valid, and the same bytes from any cluster, any preemption, resumption and
migration.

The model has random weights: what makes its output valid is the grammar alone.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping

import pytest

from kvrelay import AsyncClient, Chunk, Completion
from kvrelay.client.chunk import completion_of
from kvrelay.cluster.supervisor import Cluster
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle
from tests.exact.queries import Query, Sampling, check_usage, complete_all, prompts
from tests.models import VOCAB

KIND = "llama"
MADE = 160
ROUNDS = 5
COLOURS = ["red", "ruby", "green", "deep blue"]
SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "colour": {"enum": COLOURS},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 2,
            "maxItems": 4,
        },
        "inner": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}, "none": {"type": "null"}},
            "required": ["yes", "none"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "colour", "sizes", "inner"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ \\n]{1,3}"},
}
CONSTRAINTS: Mapping[str, Mapping[str, object]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": r"([A-Z][a-z]{2,5}|[0-9]{3})(, ([a-z]{1,4}|é))+\."},
    "choice": {"choice": COLOURS},
    "grammar": {"grammar": 'root ::= "<" item ("," item)? ">"\nitem ::= [a-c]{2,6} | root'},
}
RICH: Sampling = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "min_tokens": 3,
    "logit_bias": {34: -2.0},
}


def is_json(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "colour", "sizes", "inner"]
        and len(value["name"]) <= 9
        and value["colour"] in COLOURS
        and 2 <= len(value["sizes"]) <= 4
        and all(type(size) is int and 0 <= size <= 999 for size in value["sizes"])
        and list(value["inner"]) == ["yes", "none"]
        and type(value["inner"]["yes"]) is bool
        and value["inner"]["none"] is None
    )


def is_nested(text: str) -> bool:
    while (shorter := re.sub(r"<([a-c]{2,6}|@)(,([a-c]{2,6}|@))?>", "@", text)) != text:
        text = shorter
    return text == "@"


VALID: Mapping[str, Callable[[str], bool]] = {
    "json": is_json,
    "regex": lambda text: re.fullmatch(str(CONSTRAINTS["regex"]["regex"]), text) is not None,
    "choice": lambda text: text in COLOURS,
    "grammar": is_nested,
}


def make_queries() -> list[Query]:
    made = prompts(20, 4, VOCAB, seed=41, longest=60)
    return [Query(prompt, MADE, seed=3000 + index) for index, prompt in enumerate(made)]


def answers(up: Cluster, queries: list[Query], name: str, at_once: int = 16) -> list[Completion]:
    sampling: Sampling = {**RICH, "structured_output": CONSTRAINTS[name]}
    made = complete_all(up.router, queries, at_once, **sampling)
    for query, answer in zip(queries, made, strict=True):
        check_usage(query, answer)
    return made


def tokens(made: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(answer.token_ids) for answer in made]


@pytest.fixture(scope="module")
def both_roles(models: Models) -> Iterator[Cluster]:
    """One worker that does everything."""
    with cluster(models(KIND), prefill=0, decode=1, block_size=4, num_blocks=1024) as up:
        yield up


@pytest.fixture(scope="module")
def relayed(models: Models) -> Iterator[Cluster]:
    """Two workers of each role."""
    with cluster(models(KIND), prefill=2, decode=2, block_size=4, num_blocks=1024) as up:
        yield up


@pytest.mark.parametrize("count", [10, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_valid_and_the_same_when_disaggregated(
    both_roles: Cluster, relayed: Cluster, name: str, count: int
) -> None:
    queries = make_queries()[-count:]
    alone = answers(both_roles, queries, name)
    ended = [answer for answer in alone if answer.finish_reason == "stop"]
    assert len(ended) > len(alone) // 2
    assert all(VALID[name](answer.text) for answer in ended), [one.text for one in ended]
    assert len({answer.text for answer in ended}) > 2
    assert tokens(answers(relayed, queries, name)) == tokens(alone)
    assert tokens(answers(relayed, queries[::-1], name, at_once=3)) == tokens(alone)[::-1]
    check_idle(relayed)


@pytest.mark.slow
def test_greedy_beside_free_requests(both_roles: Cluster, relayed: Cluster) -> None:
    """A structured row changes no other row of its batch."""
    queries = make_queries()[:12]
    free = complete_all(both_roles.router, queries)
    wanted: Sampling = {"structured_output": CONSTRAINTS["json"]}
    alone = complete_all(both_roles.router, queries, at_once=1, **wanted)

    async def mixed() -> list[Completion]:
        async with AsyncClient(relayed.router) as client:
            return await asyncio.gather(
                *(
                    client.complete(
                        token_ids=query.prompt,
                        max_tokens=query.max_tokens,
                        temperature=0.0,
                        structured_output=constraint,
                    )
                    for query in queries
                    for constraint in (None, CONSTRAINTS["json"])
                )
            )

    made = asyncio.run(mixed())
    assert tokens(made[::2]) == tokens(free)
    assert tokens(made[1::2]) == tokens(alone)


@pytest.mark.parametrize("name", ["json", "regex"])
def test_preempted(both_roles: Cluster, models: Models, name: str) -> None:
    queries = make_queries()
    alone = tokens(answers(both_roles, queries, name))
    with cluster(models(KIND), block_size=4, num_blocks=58) as up:
        for _ in range(ROUNDS):
            made = answers(up, queries, name, at_once=64)
            assert tokens(made) == alone
            check_idle(up)
            if sum(leg.preemptions for answer in made for leg in answer.usage.legs):
                return  # else few requests ran at once: the machine was busy
    raise AssertionError(f"no request was preempted, {ROUNDS} times")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("json", marks=pytest.mark.slow),
        *(name for name in CONSTRAINTS if name != "json"),
    ],
)
def test_resumed_at_every_position(both_roles: Cluster, relayed: Cluster, name: str) -> None:
    chosen = make_queries()[8:11]
    alone = tokens(answers(both_roles, chosen, name))
    again = [
        Query(query.prompt, MADE, query.seed, made[:position])
        for query, made in zip(chosen, alone, strict=True)
        for position in range(len(made))
    ]
    rest = tokens(answers(relayed, again, name))
    assert rest == [made[position:] for made in alone for position in range(len(made))]
    check_idle(relayed)


async def killed(up: Cluster, role: str, queries: list[Query]) -> list[Completion]:
    """The answers of streams of which a worker is killed in the middle of an object."""
    struck = asyncio.Event()
    sampling: Sampling = {**RICH, "structured_output": CONSTRAINTS["json"]}

    async def one(client: AsyncClient, query: Query) -> Completion:
        chunks: list[Chunk] = []
        async with client.generate(
            token_ids=query.prompt,
            max_tokens=MADE,
            seed=query.seed,
            **sampling,
        ) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if sum(len(made.text) for made in chunks) > 12 and not struck.is_set():
                    struck.set()
                    up.kill(role)
        return completion_of(chunks)

    async with AsyncClient(up.router) as client:
        return await asyncio.gather(*(one(client, query) for query in queries))


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_killed_in_the_middle_of_an_object(both_roles: Cluster, models: Models, role: str) -> None:
    """A worker gets SIGKILL in the middle of JSON objects; the client sees a pause."""
    queries = make_queries()[:10]
    alone = answers(both_roles, queries, "json")
    with cluster(models(KIND), prefill=2, decode=2, block_size=4, num_blocks=1024) as up:
        for _ in range(ROUNDS):
            made = asyncio.run(killed(up, role, queries))
            assert [one.text for one in made] == [one.text for one in alone]
            assert tokens(made) == tokens(alone)
            legs = [leg for one in made for leg in one.usage.legs if leg.role == "decode"]
            if role != "decode" or len(legs) > len(made):
                return
            up.wait()  # its streams had ended before the signal arrived: once more
    raise AssertionError(f"no stream was on the worker that was killed, {ROUNDS} times")
