"""The connector's counters on vLLM's own metrics page, through its ``KVConnectorStats``.

Each side tells what was added since the last step. vLLM adds up the sides of all ranks and keeps
one series for each engine. The names are those of a kvrelay worker, with ``kvrelay:`` before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from kvrelay.connector.counters import ConnectorCounters
from kvrelay.engine.vllm.kv.account import RequestAccount

ACCOUNT: Mapping[str, str] = {
    "prompt_tokens_local": "Tokens of first admissions found in vLLM's own cache.",
    "prompt_tokens_external": "Tokens of first admissions loaded and verified from the store.",
    "prompt_tokens_computed": "Tokens of first admissions computed here.",
    "recomputed_tokens": "Positions computed again after a preemption.",
    "failed_tokens": "Tokens that a lookup found and the load did not give.",
}
"""Counters of the accounts, each with its help; they move when a request ends."""


class CounterDeltas:
    """What a reading of counters added to the one before."""

    def __init__(self) -> None:
        self._before = ConnectorCounters()

    def take(self, reading: ConnectorCounters) -> dict[str, int]:
        """The changes since the last call, by field, without zeros."""
        before = self._before
        self._before = reading
        changes = {
            field.name: getattr(reading, field.name) - getattr(before, field.name)
            for field in fields(reading)
        }
        return {name: change for name, change in changes.items() if change}


def add_up(readings: Sequence[ConnectorCounters]) -> ConnectorCounters:
    """The sum of several connectors' counters."""
    names = [one.name for one in fields(ConnectorCounters)]
    return ConnectorCounters(
        **{name: sum(getattr(reading, name) for reading in readings) for name in names}
    )


def ended(account: RequestAccount) -> dict[str, int]:
    """What the account of an ended request adds, by the names of ``ACCOUNT``; without zeros."""
    changes = {
        "prompt_tokens_local": account.local,
        "prompt_tokens_external": account.external,
        "prompt_tokens_computed": account.computed,
        "recomputed_tokens": account.recomputed,
        "failed_tokens": account.failed,
    }
    return {name: change for name, change in changes.items() if change}


def add_changes(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The sums by name."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def described() -> dict[str, tuple[str, str, bool]]:
    """Of every field: the metric's name, its help, and whether it is a gauge."""
    known = {
        field.name: (
            str(field.metadata["metric"]),
            str(field.metadata["text"]),
            bool(field.metadata["gauge"]),
        )
        for field in fields(ConnectorCounters)
    }
    return known | {name: (name, text, False) for name, text in ACCOUNT.items()}
