"""What a journal adds up to, by arithmetic that shares nothing with the product's own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]


class Sums:
    """The counters of a worker whose journal this is, by the names of the fields of ``Totals``."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.found = Counter[str]()
        self._lengths: dict[str, int] = {}
        self._begun: dict[tuple[str, int], tuple[int, int]] = {}  # local and external
        self._ordered: dict[tuple[str, int], int] = {}
        self._largest = Counter[str]()  # question of each leg
        self._settled: set[str] = set()  # the legs whose first admission has counted
        self._entries: list[list[Any]] = []
        for record in map(json.loads, list(lines)[1:]):
            take = getattr(self, f"_{record['call']}", None)
            if take is not None:
                take(record["given"], record["result"])
            self.found["preemptions"] = record["result"]["preemptions"]

    def _submit(self, given: Record, result: Record) -> None:
        if "rejected" not in result:
            self._lengths[given["id"]] = len(given["tokens"])

    def _schedule(self, given: Record, result: Record) -> None:
        for name, epoch, local, external, _ in result["loads"]:
            self._begun[name, epoch] = local, external
            self._count_question(name, local)
            self._ordered[name, epoch] = external
        self._entries = result["entries"]
        for name, epoch, start, *_ in self._entries:
            self._begun.setdefault((name, epoch), (start, 0))
            self._count_question(name, start)
            self._settled.add(name)

    def _count_question(self, name: str, local: int) -> None:
        """Up to the leg's first admission that counts, the largest question counts."""
        asked = self._lengths.get(name, 0) - local
        if name not in self._settled and asked > max(self._largest[name], 1):
            self.found["asked"] += asked - self._largest[name]
            self._largest[name] = asked

    def _loaded(self, given: Record, result: Record) -> None:
        key = given["id"], given["epoch"]
        ordered = self._ordered.pop(key, 0)
        valid = min(max(given["valid"], 0), ordered)
        if result["heard"]:
            self._settled.add(given["id"])
            self.found["failed"] += ordered - valid
            self._begun[key] = self._begun[key][0], valid
        else:
            self.found["late"] += valid

    def _commit(self, given: Record, result: Record) -> None:
        epochs = {name: epoch for name, epoch, *_ in self._entries}
        self.found["executed"] += sum(entry[3] for entry in self._entries)
        for name, *_ in result["outputs"]:
            self.found["generated"] += 1
            if name in self._lengths:  # its first token
                local, external = self._begun[name, epochs[name]]
                length = self._lengths.pop(name)
                self.found.update(prompt=length, local=local, external=external)
