"""The table of mutations cannot rot: every text still stands once, and some are run here."""

from __future__ import annotations

import sys

import pytest

from tests.accounting.mutate import catch
from tests.accounting.mutations import MUTATIONS, Mutation

RUN_HERE = {
    "next block when len % B == 0": "tests/accounting/test_founding_bugs.py",
    "the epoch of an event is not looked at": "tests/accounting/test_core.py",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_applied(mutation: Mutation) -> None:
    source = mutation.path.read_text(encoding="utf-8")
    mutated = mutation.apply(source)
    assert mutated != source
    compile(mutated, str(mutation.path), "exec")


def test_no_mutation_is_counted_twice() -> None:
    assert len({(one.module, one.old, one.new) for one in MUTATIONS}) == len(MUTATIONS)
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_mutation_is_caught(name: str) -> None:
    """The machinery works: the test that fails is told, and without a mutation none does."""
    number = [one.name for one in MUTATIONS].index(name)
    assert catch(number, RUN_HERE[name]) is not None


def test_a_mutation_that_nobody_looks_at_survives() -> None:
    number = [one.name for one in MUTATIONS].index("positions of two runs are counted twice")
    assert catch(number, "tests/accounting/test_mock.py") is None


def test_a_process_without_a_verdict_is_no_survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="status 1"):
        catch(0)
