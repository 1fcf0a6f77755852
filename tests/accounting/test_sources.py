"""External tokens by store: whatever is told, the sum is what the admission has."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from kvrelay.connector.mock import MockEnd, Script
from kvrelay.engine.core.external import (
    UNKNOWN_STORE,
    Loaded,
    TransferEvent,
    add_counts,
    apportion,
)
from kvrelay.worker.metrics import WorkerHistograms, registry_of
from tests.accounting.bench import limits
from tests.accounting.served import Served

TOLD = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-50, 200)), max_size=6)


@given(TOLD, st.integers(0, 300))
def test_the_sum_by_store_is_the_admissions(told: list[tuple[str, int]], external: int) -> None:
    found = apportion(told, external)
    assert sum(found.values()) == external
    assert min(found.values(), default=1) > 0
    claimed = sum(max(tokens, 0) for _, tokens in told)
    assert found.get(UNKNOWN_STORE, 0) == max(external - claimed, 0)


@given(TOLD, TOLD)
def test_sums_are_added_by_store(one: list[tuple[str, int]], other: list[tuple[str, int]]) -> None:
    first, second = apportion(one, 100), apportion(other, 70)
    both = add_counts(first, second)
    assert sum(both.values()) == 170
    assert all(both[name] == first.get(name, 0) + second.get(name, 0) for name in both)


class Telling(Served):
    """The mock's loads with these sources told, one line a load."""

    def tell(self, *lines: tuple[tuple[str, int], ...]) -> None:
        rest, inner = iter(lines), self.connector.poll

        def poll() -> list[TransferEvent]:
            return [
                replace(event, sources=next(rest, ())) if isinstance(event, Loaded) else event
                for event in inner()
            ]

        self.connector.poll = poll  # type: ignore[method-assign]


def test_usage_and_metrics_tell_tokens_by_store() -> None:
    script = Script(lookups={"*": [8]}, loads={"lied": [MockEnd(5)], "*": [MockEnd()]})
    served = Telling(limits(40, 4, budget=16), script)
    with served:
        served.tell((("a", 5), ("b", 3)), (("a", 8),), (("b", 99), ("a", -4)))
        for number, name in enumerate(("shared", "one", "lied", "silent")):
            served.submit(name, range(20 * number, 20 * number + 11), 4)
            served.wait(name)
        sources = {name: dict(served.check(name).sources) for name in served.orders}
        assert sources == {
            "shared": {"a": 5, "b": 3},
            "one": {"a": 8},
            "lied": {"b": 5},
            "silent": {UNKNOWN_STORE: 8},
        }
        served.settle()
        text = generate_latest(
            registry_of(served.engine, {"role": "decode"}, WorkerHistograms())
        ).decode()
        lines = [line for line in text.splitlines() if "external_tokens_by_store_total{" in line]
        assert [line.partition("{")[2] for line in lines] == [
            'role="decode",store="a"} 13.0',
            'role="decode",store="b"} 8.0',
            'role="decode",store="unknown"} 8.0',
        ]
        assert 'source="external_kv_transfer"} 29.0' in text
