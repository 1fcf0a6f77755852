"""What is offered to the store: right names, right bytes, the whole prompt on a prefill leg."""

from __future__ import annotations

import pytest

from kvrelay.engine.core.request import Order, Request
from tests.accounting.bench import Bench, limits
from tests.engine.fakes import chain, naming


def saved(bench: Bench, request: Request) -> list[int]:
    """The tokens of all saves of a request, in order; names, parents and bytes are checked."""
    names, found = naming(), list[int]()
    parent = names.root
    for save in bench.saves:
        for content in save.contents if save.request_id == request.id else ():
            assert (content.parent, content.name) == (parent, names.child(parent, content.tokens))
            found += content.tokens
            here = bench.runner.slots[content.block][: len(content.tokens)]
            assert here == chain(found)[-len(content.tokens) :]
            parent = content.name
    return found


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_a_prefill_leg_saves_its_whole_prompt(length: int, size: int, budget: int) -> None:
    """In full blocks as they fill, and the partial last one with the first token."""
    bench = Bench(limits(20, size, budget=budget))
    request = bench.submit("p", range(length), 5, prefill_only=True)
    while bench.scheduler.requests:
        bench.step()
    assert saved(bench, request) == list(range(length))
    sizes = [len(content.tokens) for save in bench.saves for content in save.contents]
    assert sizes == [size] * (length // size) + [length % size] * (length % size > 0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_decode_leg_saves_full_blocks_only(size: int) -> None:
    bench = Bench(limits(20, size))
    request = bench.resume("d", range(5), 1, 9)
    while bench.scheduler.requests:
        bench.step()
    stored = request.length - 1  # the last token's KV is never computed
    assert saved(bench, request) == request.tokens[: stored // size * size]


def test_what_was_found_here_is_offered_too_and_what_was_loaded_is_not() -> None:
    """The store may lack what this worker has; it does not lack what it has just given."""
    bench = Bench(limits(20, 4), lambda query: 4 if query.request_id == "b" else 0)
    bench.submit("a", range(5), 1)
    bench.run()
    request = bench.submit("b", range(14), 1, prefill_only=True)
    bench.step()
    bench.end_load(bench.loads[0])
    while bench.scheduler.requests:
        bench.step()
    contents = [list(content.tokens) for save in bench.saves for content in save.contents]
    assert contents == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13]]
    assert request.runs[0].admission.hit == 8


def test_a_save_keeps_its_blocks_after_the_request_is_gone() -> None:
    """Its bytes stay what they are, whoever asks for blocks meanwhile."""
    bench = Bench(limits(4, 4, headroom=0))
    first = bench.submit("first", range(8), 1)
    while bench.scheduler.requests:
        bench.step()
    held = {block for save in bench.saves for block in save.blocks}
    assert len(held) == 2
    bench.submit("second", range(20, 28), 9)
    for _ in range(4):
        bench.step()
        assert saved(bench, first) == list(range(8))
    assert len(bench.scheduler.pool.free) == 0, "the second waits for the blocks being saved"
    bench.run()


def test_nothing_is_saved_for_who_does_not_want_it() -> None:
    bench = Bench(limits(20, 4))
    bench.add(Order("p", tuple(range(9)), 9, 5, prefill_only=True, save=False))
    while bench.scheduler.requests:
        bench.step()
    assert not bench.saves


def test_saves_of_one_residency_are_told_apart() -> None:
    """They may end in any order, each once."""
    bench = Bench(limits(20, 2, budget=2))
    bench.submit("p", range(8), 1)
    while bench.scheduler.requests:
        bench.step()
    assert len(bench.saves) == 4
    for save in reversed(bench.saves[:]):
        free = len(bench.scheduler.pool.free)
        bench.end_save(save)
        assert len(bench.scheduler.pool.free) == free + 1
