"""Bounds of JSON schemas that the grammar library lacks: what would take too much of it is refused.

The errors are ``ValueError``: the caller knows the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction

MAX_OPTIONAL = 480  # properties of one object: each takes four items of a row of the parser
MAX_MULTIPLE = 10_000  # the lexer has a state for each remainder, which no bound of it counts


def check_schema(schema: object) -> None:
    """Refuse what no mask could be made for, and what the lexer would be too large for."""
    _check_optional(schema)
    check_multiples(schema)


def schemas_in(grammar: str) -> Iterator[object]:
    """All JSON objects in a grammar that has schemas, whatever stands before them."""
    decoder = json.JSONDecoder()
    at = grammar.find("%json")
    while at >= 0 and (at := grammar.find("{", at)) >= 0:
        try:
            schema, at = decoder.raw_decode(grammar, at)
        except ValueError:
            at += 1
        else:
            yield schema


def _objects(schema: object) -> Iterator[Mapping[str, object]]:
    """All objects in a schema."""
    left: list[object] = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        if isinstance(one, dict):
            left += one.values()
            yield one


def check_multiples(schema: object) -> None:
    """Refuse numbers whose lexer would be too large, as it is for all of an ``allOf`` together.

    Powers of ten cost it nothing.
    """
    given = {
        str(one["multipleOf"]) for one in _objects(schema) if _is_number(one.get("multipleOf"))
    }
    if not given:
        return
    exact = [Fraction(text) for text in given]
    scale = math.lcm(*(each.denominator for each in exact))
    common = math.lcm(*(int(each * scale) for each in exact))
    while common and common % 10 == 0:
        common //= 10
    if common > MAX_MULTIPLE:
        raise ValueError(
            f"the least common multiple of every multipleOf, {', '.join(sorted(given)):.200}, is"
            f" more than {MAX_MULTIPLE} without its zeros at the end: use fewer or smaller ones"
        )


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _check_optional(schema: object) -> None:
    """Refuse an object with so many optional properties that no mask could be made inside it."""
    for one in _objects(schema):
        properties, required = one.get("properties"), one.get("required")
        if isinstance(properties, dict):
            needed = [str(name) for name in required] if isinstance(required, list) else []
            optional = len(properties.keys() - set(needed))
            if optional > MAX_OPTIONAL:
                raise ValueError(
                    f"an object has {optional} optional properties, more than {MAX_OPTIONAL}: make"
                    " some of them required"
                )
