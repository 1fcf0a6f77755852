"""Deliberate mistakes, one line each; every one must be caught by a test.

``old`` stands exactly once in its file. ``survives`` explains a mutation that no test can catch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    name: str
    module: str
    old: str
    new: str
    survives: str | None = None

    @property
    def path(self) -> Path:
        return ROOT / f"{self.module.replace('.', '/')}.py"

    def apply(self, source: str) -> str:
        """The mutated source. Raises ``ValueError`` unless ``old`` stands exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {source.count(self.old)} times")
        return source.replace(self.old, self.new)


def _request(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, "kvrelay.engine.core.request", old, new)


def _blocks(name: str, old: str, new: str, survives: str | None = None) -> Mutation:
    return Mutation(name, "kvrelay.engine.core.blocks", old, new, survives)


def _scheduler(name: str, old: str, new: str, survives: str | None = None) -> Mutation:
    return Mutation(name, "kvrelay.engine.core.scheduler", old, new, survives)


def _plan(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, "kvrelay.engine.core.plan", old, new)


def _foresight(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, "kvrelay.engine.core.foresight", old, new)


def _usage(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, "kvrelay.engine.core.usage", old, new)


MUTATIONS = (
    # --- one request ---
    _request(
        "blocks needed are rounded down",
        "-((resident.computed + count) // -block_size)",
        "((resident.computed + count) // block_size)",
    ),
    _request(
        "blocks needed are counted from the length",
        "-((resident.computed + count) // -block_size)",
        "-((self.length + count) // -block_size)",
    ),
    _request(
        "next block when len % B == 0",
        "return -((resident.computed + count) // -block_size) - len(resident.blocks)",
        "return int(self.length % block_size == 0)",
    ),
    _request(
        "work from what the admission found",
        "return self.length - self.resident.computed",
        "return self.length - self.resident.admission.hit",
    ),
    _request(
        "an admission with nothing to compute",
        "min(self.local, self.external, self.fresh - 1)",
        "min(self.local, self.external, self.fresh)",
    ),
    _request(
        "any change of state is allowed", "if state not in TRANSITIONS[self.state]:", "if False:"
    ),
    _request(
        "a load is not waited for",
        "RequestState.LOADING if residency.admission.external else RequestState.RUNNING",
        "RequestState.RUNNING",
    ),
    _request(
        "the log says more than was computed",
        "self.runs.append(Run(residency.admission, residency.computed))",
        "self.runs.append(Run(residency.admission, self.length))",
    ),
    _request(
        "a load that never ran is in the log",
        "if residency is not None and self.state is RequestState.RUNNING:",
        "if residency is not None:",
    ),
    _request(
        "one token too many",
        "if self.length >= self.order.prompt_len + self.order.max_tokens:",
        "if self.length > self.order.prompt_len + self.order.max_tokens:",
    ),
    _request(
        "the newest comes first",
        "return self.arrival < other.arrival",
        "return self.arrival > other.arrival",
    ),
    _request("an ending token is overlooked", "if token in self.order.ending:", "if False:"),
    _request(
        "a partial block is named like a full one",
        "range(first, self.length - block_size + 1, block_size)",
        "range(first, self.length, block_size)",
    ),
    _request(
        "names do not chain", "parent = self.names[-1] if self.names else name.root", "parent = b''"
    ),
    _request(
        "a run is one position longer than it was",
        "return self.frontier - self.admission.hit",
        "return self.frontier - self.admission.local",
    ),
    _request(
        "the last token is never a stop",
        "if token in self.order.ending:",
        "if token in self.order.ending and self.length < self.stored_positions:",
    ),
    # --- the pool ---
    _blocks(
        "held and still free",
        "            self.free.pop(block, None)\n",
        "            pass\n",
    ),
    _blocks(
        "a second holder is not counted",
        "self.references[block] += 1",
        "self.references[block] = 1",
    ),
    _blocks(
        "new content under an old name",
        "            self._forget(block)\n            self.references[block] = 1",
        "            self.references[block] = 1",
    ),
    _blocks("the newest free block goes first", "popitem(last=False)", "popitem(last=True)"),
    _blocks(
        "the first block of a sequence goes first",
        "for block in reversed(blocks):",
        "for block in blocks:",
    ),
    _blocks(
        "nameless blocks wait like the others",
        "last=self.names[block] is not None",
        "last=True",
    ),
    _blocks(
        "free with a holder left",
        "if self.references[block] == 0:",
        "if self.references[block] <= 1:",
    ),
    _blocks("a block nobody holds is dropped", "if self.references[block] < 1:", "if False:"),
    _blocks(
        "a name moves to the newest block",
        "first = self.by_name.setdefault(name, block)",
        "first = self.by_name[name] = block",
    ),
    _blocks(
        "only the first block of a content is named",
        "        if self.names[block] == name:\n",
        "        if name in self.by_name:\n",
    ),
    _blocks("a name is lost with its first block", "elif copies:", "elif False:"),
    _blocks(
        "a copy is lost with its first block",
        "self.by_name[name] = copies.pop(0)",
        "self.by_name[name] = copies.pop()\n            copies.clear()",
    ),
    _blocks(
        "a copy that becomes free keeps its name",
        "if self.names[block] in self.copies:",
        "if False:",
    ),
    _blocks(
        "a free block keeps the name of a held one", "if self.references[first] == 0:", "if False:"
    ),
    _blocks(
        "a free block without its name waits like the others",
        "self.free.move_to_end(first, last=False)",
        "self.free.move_to_end(first)",
    ),
    _blocks(
        "a forgotten name is still found",
        "            del self.by_name[name]\n",
        "            pass\n",
    ),
    _blocks(
        "a block that gets a name keeps the old one",
        "        self._forget(block)\n        self.names[block] = name",
        "        self.names[block] = name",
    ),
    _blocks("a hit of any length", "min(limit, len(names))", "len(names)"),
    _blocks("a hit with holes", "                break\n", "                continue\n"),
    _blocks("a remembered hit does not grow", "range(first, min(", "range(len(names), min("),
    _blocks("a remembered hit is never shorter", "len(places) > first", "False"),
    _blocks("a lost block is not noted", "self.lost.append(block)", "pass"),
    _blocks("a loss is not counted", "self.losses += 1", "pass"),
    _blocks(
        "the oldest loss is overlooked",
        "self.losses - run.losses",
        "max(self.losses - run.losses - 1, 0)",
    ),
    _blocks("losses beyond those noted are overlooked", "0 if since > len(self.lost) else ", ""),
    _blocks(
        "a hit is cut at its last lost block",
        "else min(cuts",
        "else max(cuts",
    ),
    _blocks(
        "every step walks the hits again",
        "0 if since > len(self.lost) else min(cuts, default=len(places))",
        "0",
    ),
    _blocks(
        "losses are looked at again and again",
        "        run.losses = self.losses\n",
        "        pass\n",
    ),
    _request(
        "a resident request keeps what it found",
        "        self.found = LeadingRun()\n",
        "        pass\n",
    ),
    _blocks(
        "blocks of the hit count as room",
        "return len(self.free) - sum(block in self.free for block in beside)",
        "return len(self.free)",
    ),
    # --- lookups and admission ---
    _scheduler(
        "the store's answer is believed",
        "external = min(max(answer, 0), request.length - 1 - local)",
        "external = answer",
    ),
    _scheduler(
        "no clamp from above",
        "external = min(max(answer, 0), request.length - 1 - local)",
        "external = max(answer, 0)",
    ),
    _scheduler(
        "no clamp from below",
        "external = min(max(answer, 0), request.length - 1 - local)",
        "external = min(answer, request.length - 1 - local)",
    ),
    _scheduler(
        "a full hit leaves nothing to compute",
        "request.length - 1 - local)",
        "request.length - local)",
    ),
    _scheduler(
        "the local hit may cover the last position",
        "(request.length - 1) // size, request.found)",
        "request.length // size, request.found)",
    ),
    _scheduler(
        "the hit is not held",
        "        self.pool.hold(hits)\n        self._epoch",
        "        self._epoch",
    ),
    _scheduler("epochs do not advance", "self._epoch += 1", "self._epoch = 1"),
    _scheduler(
        "an admission remembers a stale length",
        "Admission(self._epoch, request.length, local, external)",
        "Admission(self._epoch, len(request.order.tokens), local, external)",
    ),
    _scheduler(
        "blocks for the fresh tokens only",
        "self.pool.take(request.need(request.work, self.limits.block_size))",
        "self.pool.take(request.need(residency.admission.fresh, self.limits.block_size))",
    ),
    _scheduler(
        "places without those that load",
        "self.limits.max_num_seqs - len(self.running) - self.loading, 0)",
        "self.limits.max_num_seqs - len(self.running), 0)",
    ),
    _scheduler(
        "all waiting requests are asked about",
        "list(islice(self.waiting, places))",
        "list(self.waiting) if places else []",
    ),
    _scheduler(
        "a whole queue is named in one step",
        "self._naming(request), size, most)",
        "self._naming(request), size)",
    ),
    _scheduler(
        "every request may have all the names of a step",
        "most = self.limits.names_per_step - self._named",
        "most = self.limits.names_per_step",
    ),
    _scheduler(
        "a request is admitted before it is named",
        "                self._unnamed = True\n                break\n",
        "                self._unnamed = True\n",
    ),
    _scheduler(
        "the engine may sleep while a request is named",
        "                self._unnamed = True\n                break\n",
        "                break\n",
    ),
    _scheduler(
        "a plan calls all later ones unnamed",
        "        self._unnamed = False\n        preempted",
        "        preempted",
    ),
    _scheduler(
        "a plan counts the names of all plans before it",
        "        self._named = 0\n        self._unnamed = False\n        preempted",
        "        self._unnamed = False\n        preempted",
    ),
    _scheduler(
        "those that pass do not count what they become",
        "growth += self._missing(request, request.resident.blocks, to_end=True)",
        "growth += 0",
    ),
    _scheduler(
        "a request that leaves the queue goes on counting",
        "self.waiting_tokens -= request.length",
        "self.waiting_tokens -= 0",
    ),
    _scheduler(
        "a preempted request does not count as waiting",
        "self.waiting, request)\n        self.waiting_tokens += request.length\n",
        "self.waiting, request)\n",
    ),
    _scheduler(
        "one resident too many",
        "places = max(self.limits.max_num_seqs - len(self.running) - self.loading, 0)",
        "places = max(self.limits.max_num_seqs - len(self.running) - self.loading, 0) + 1",
    ),
    _scheduler(
        "one that must ask later blocks the queue",
        "                continue\n",
        "                break\n",
    ),
    _scheduler(
        "a large request is overtaken",
        "                break\n            self._begin(",
        "                continue\n            self._begin(",
    ),
    _scheduler(
        "admitted without budget",
        "if (not external and budget < 1) or wanted >",
        "if wanted >",
    ),
    _scheduler(
        "the room for the hit is counted twice",
        "return -(length // -self.limits.block_size) - len(hits)",
        "return -(length // -self.limits.block_size) - 2 * len(hits)",
    ),
    _scheduler(
        "no watermark",
        "max(self.limits.headroom * residents, growth)",
        "growth",
    ),
    _scheduler(
        "a watermark for one resident only",
        "self.limits.headroom * residents,",
        "self.limits.headroom * (residents > 0),",
    ),
    _scheduler(
        "no watermark for those that load",
        "self.limits.headroom * residents,",
        "self.limits.headroom * len(self.running),",
    ),
    _scheduler(
        "who passes leaves no room",
        "self._missing(request, hits, to_end=skipped) + reserved",
        "self._missing(request, hits, to_end=skipped)",
    ),
    _scheduler(
        "who passes leaves no place",
        "len(self.running) + self.loading + skipped",
        "len(self.running) + self.loading",
    ),
    _scheduler(
        "who passes does not count what the others become",
        "growth = self._growth()",
        "growth = 0",
    ),
    _scheduler(
        "who passes grows into the room it left",
        "self._missing(request, hits, to_end=skipped)",
        "self._missing(request, hits, to_end=False)",
    ),
    _scheduler(
        "what is reserved for a skipped request counts as room",
        "available({*hits, *held_hits})",
        "available(hits)",
    ),
    _scheduler(
        "a preempted request waits for room for all it may need",
        "self._missing(request, hits, to_end=skipped)",
        "self._missing(request, hits, to_end=skipped or bool(residents and request.runs))",
    ),
    _scheduler(
        "admission in the step of a preemption",
        "self._admit(budget) if not preempted else ([], [], [])",
        "self._admit(budget)",
    ),
    _scheduler(
        "a lookup after the last one",
        "if request.lookups_left == 0 or local",
        "if local",
    ),
    _scheduler(
        "a lookup that cannot add a token",
        "if request.lookups_left == 0 or local == request.length - 1:",
        "if request.lookups_left == 0:",
    ),
    _scheduler(
        "lookups are not used up", "max(request.lookups_left - 1, 0)", "request.lookups_left"
    ),
    _scheduler("two more lookups", "request.lookups_left = 1", "request.lookups_left = 2"),
    _scheduler(
        "every failure earns a lookup",
        "            if request.lookups_left is None:\n",
        "            if True:\n",
    ),
    # --- loads and saves ---
    _request(
        "the epoch of an event is not looked at",
        "residency is not None and residency.admission.epoch == epoch",
        "residency is not None",
    ),
    _scheduler("a load does not hold its blocks", "        self.pool.hold(blocks)\n", ""),
    _scheduler(
        "a finished load goes on holding",
        "self.pool.drop(self.loads.pop((request_id, epoch), ()))",
        "self.loads.pop((request_id, epoch), ())",
    ),
    _scheduler("a save does not hold its blocks", "        self.pool.hold(save.blocks)\n", ""),
    _scheduler(
        "a finished save goes on holding",
        "            self.pool.drop(blocks)\n",
        "            pass\n",
    ),
    _scheduler(
        "a load one block short",
        "-(admission.hit // -size)",
        "admission.hit // size",
    ),
    _scheduler(
        "a load beyond what was promised",
        "valid = min(max(valid, 0), admission.external)",
        "valid = max(valid, 0)",
    ),
    _scheduler(
        "a load of less than nothing",
        "valid = min(max(valid, 0), admission.external)",
        "valid = min(valid, admission.external)",
    ),
    _scheduler(
        "a short load counts in full",
        "residency.computed = admission.local + valid",
        "residency.computed = admission.hit",
    ),
    _scheduler(
        "a short load is rounded up to blocks",
        "residency.computed = admission.local + valid",
        "residency.computed = min(-((admission.local + valid) // -self.limits.block_size)"
        " * self.limits.block_size, admission.hit)",
    ),
    _scheduler(
        "the admission keeps the promise",
        "residency.admission = replace(admission, external=valid)",
        "pass",
    ),
    _scheduler(
        "named as promised, not as loaded",
        "self._name(request, admission.local, residency.computed)",
        "self._name(request, admission.local, admission.hit)",
    ),
    _scheduler(
        "a late load is not counted",
        "            self.late_events += 1\n            return None\n        self._settle",
        "            return None\n        self._settle",
    ),
    _scheduler(
        "a load that cannot be cancelled returns its blocks",
        "if key in self.loads and self._cancel(*key):",
        "if key in self.loads and (self._cancel(*key) or True):",
    ),
    _scheduler("no load is cancelled", "if key in self.loads and self._cancel(*key):", "if False:"),
    _scheduler(
        "only loads of preempted requests are cancelled",
        "if key in self.loads and self._cancel(*key):",
        "if key in self.loads and state is RequestState.WAITING and self._cancel(*key):",
    ),
    _scheduler(
        "loads of preempted requests are not cancelled",
        "if key in self.loads and self._cancel(*key):",
        "if key in self.loads and state is RequestState.FINISHED and self._cancel(*key):",
    ),
    _scheduler(
        "a cancelled load keeps its blocks",
        "            self.pool.drop(self.loads.pop(key))\n",
        "            pass\n",
    ),
    _scheduler(
        "a cancelled load is forgotten with its blocks",
        "self.pool.drop(self.loads.pop(key))",
        "self.loads.pop(key)",
    ),
    _scheduler(
        "a cancelled load goes on holding up the others",
        "return key not in self.loads",
        "return self.loads.get(key) is None and request.given_up != key[1]",
    ),
    _scheduler(
        "blocks that a load holds count as returned", "return key not in self.loads", "return True"
    ),
    # --- a step and its commit ---
    _plan(
        "a step starts where the admission did",
        "resident.admission.epoch, resident.computed, count, count == work)",
        "resident.admission.epoch, resident.admission.hit, count, count == work)",
    ),
    _plan(
        "every entry samples",
        "resident.computed, count, count == work)",
        "resident.computed, count, True)",
    ),
    _foresight(
        "a chunk is foreseen to be the last",
        "if not entry.samples or not request.resides(",
        "if not request.resides(",
    ),
    _foresight(
        "a request that has ended is foreseen",
        "not entry.samples or not request.resides(entry.epoch, RequestState.RUNNING)",
        "not entry.samples",
    ),
    _foresight(
        "a block that is not there is foreseen",
        "start < len(request.resident.blocks) * block_size",
        "start <= len(request.resident.blocks) * block_size",
    ),
    _foresight(
        "the position that was computed is foreseen",
        "Entry(request, entry.epoch, start, 1, True)",
        "Entry(request, entry.epoch, start - 1, 1, True)",
    ),
    _scheduler(
        "a full block goes without a name",
        "residency.computed // size > entry.start // size:",
        "residency.computed // size > entry.start // size + 1:",
    ),
    _scheduler(
        "a tail is not saved",
        "if last or residency.computed // size",
        "if residency.computed // size",
    ),
    _scheduler(
        "named before the commit",
        "self._name(request, entry.start, residency.computed)",
        "self._name(request, entry.start, request.length)",
    ),
    _scheduler(
        "a partial block is named",
        "range(start // size, stop // size):",
        "range(start // size, -(-stop // size)):",
    ),
    _scheduler(
        "the last block filled is not named",
        "range(start // size, stop // size):",
        "range(start // size, stop // size - 1):",
    ),
    _scheduler(
        "committed to whoever has the id now",
        "            if entry.request.resides(entry.epoch, RequestState.RUNNING):\n",
        "            if entry.request.residency is not None or not self.requests:\n",
    ),
    _scheduler("a commit of any plan", "if plan is not self._plan or len(", "if len("),
    _scheduler(
        "computed counts to the length",
        "residency.computed += entry.count",
        "residency.computed = request.length",
    ),
    _scheduler("a prefill leg goes on", "if finish or request.order.prefill_only:", "if finish:"),
    _scheduler(
        "no partial block for the hand-over",
        "end = stop if tail else stop // size * size",
        "end = stop // size * size",
    ),
    _scheduler(
        "partial blocks are saved",
        "end = stop if tail else stop // size * size",
        "end = stop",
    ),
    _scheduler(
        "a saved block begins at the step's start",
        "range(start // size * size, end, size)",
        "range(start, end, size)",
    ),
    _scheduler(
        "a saved block is named after its parent",
        "name = request.names[index] if full",
        "name = parent if full",
    ),
    _scheduler(
        "blocks are taken that are not there",
        "if missing <= len(self.pool.free):",
        "if missing <= len(self.pool.free) + 1:",
    ),
    _scheduler(
        "one block is enough for any step",
        "missing = request.need(request.work, self.limits.block_size)",
        "missing = request.need(1, self.limits.block_size)",
    ),
    _scheduler(
        "the last runner is preempted for itself",
        "                if newest is request:\n",
        "                if False:\n",
    ),
    _scheduler(
        "an older request is preempted for a newer one that loads",
        "newest = max(self._residents())",
        "newest = self.running[-1]",
    ),
    _scheduler(
        "requests that load are preempted before newer ones that run",
        "newest = max(self._residents())",
        "newest = max(set(self._residents()) - set(self.running) or self._residents())",
    ),
    _scheduler(
        "all loads are given up at once",
        "while missing > len(self.pool.free) and returned:",
        "while missing > len(self.pool.free):",
    ),
    _scheduler(
        "a request loads the same tokens twice at once",
        "if (request.id, request.given_up) in self.loads:",
        "if False:",
    ),
    _request(
        "a load that was given up is forgotten",
        "self.given_up = residency.admission.epoch",
        "pass",
    ),
    _scheduler(
        "a load of a request that has left counts as one that loads",
        "*(one for one in known if one.state is RequestState.LOADING)",
        "*known",
    ),
    _scheduler(
        "a request that lacks blocks holds up all newer ones",
        "                ready.append(request)\n",
        "                ready.append(request)\n            else:\n                break\n",
    ),
    _scheduler(
        "preempted to the end of the queue",
        "insort(self.waiting, request)",
        "self.waiting.append(request)",
    ),
    _scheduler(
        "preempted to the front of the queue",
        "insort(self.waiting, request)",
        "self.waiting.appendleft(request)",
    ),
    _scheduler(
        "who comes from a load runs last",
        "(RequestState.RUNNING)\n        insort(self.running, request)",
        "(RequestState.RUNNING)\n        self.running.append(request)",
    ),
    _scheduler(
        "short prefills before long ones",
        "key=lambda one: one not in foreseen and one.work > 1)",
        "key=lambda one: one.work)",
    ),
    _scheduler(
        "prefills before decodes",
        "sorted(ready, key=lambda one: one not in foreseen and one.work > 1)",
        "ready",
    ),
    _scheduler(
        "running requests do not use up the budget",
        "                budget -= entries[-1].count\n        return entries\n",
        "        return entries\n",
    ),
    _scheduler(
        "admitted requests do not use up the budget",
        "                budget -= entries[-1].count\n        return entries, loads, saves",
        "        return entries, loads, saves",
    ),
    # --- the end, and the door ---
    _scheduler(
        "a finished request keeps its blocks",
        "self._release(request, RequestState.FINISHED)",
        "request.end(RequestState.FINISHED)",
    ),
    _scheduler(
        "an aborted request stays in the queue",
        "            self._dequeue(request)\n        elif",
        "            pass\n        elif",
    ),
    _scheduler(
        "a discarded plan stays",
        "plan = self._plan\n        self._plan = None\n",
        "plan = self._plan\n",
    ),
    _plan(
        "what never fits is accepted",
        "if positions > min(self.max_model_len, capacity):",
        "if positions > self.max_model_len:",
    ),
    _plan(
        "what is longer than the model is accepted",
        "if positions > min(self.max_model_len, capacity):",
        "if positions > capacity:",
    ),
    _plan(
        "what just fits is refused",
        "positions = stored_positions(order.prompt_len, order.max_tokens)",
        "positions = order.prompt_len + order.max_tokens",
    ),
    _scheduler("one id twice", "if order.request_id in self.requests:", "if False:"),
    _scheduler(
        "one tenant finds what another left behind",
        "return self.naming.of(request.order.space)",
        "return self.naming",
    ),
    _scheduler(
        "the store is asked in nobody's name",
        "request.names, local, order.space)",
        "request.names, local)",
    ),
    _scheduler(
        "a load is nobody's",
        "            blocks,\n            request.order.space,\n",
        "            blocks,\n",
    ),
    _scheduler("a save is nobody's", "self._serial, contents, space)", "self._serial, contents)"),
    _scheduler(
        "a tenant's partial block is named like anybody's",
        "else naming.child(parent, tokens)",
        "else self.naming.child(parent, tokens)",
    ),
    _scheduler(
        "a tenant's first block follows anybody's root",
        "if index else naming.root",
        "if index else self.naming.root",
    ),
    # --- usage ---
    _usage(
        "a request's own KV is a hit after a preemption",
        "(runs[0].admission.local, runs[0].admission.external)",
        "(runs[-1].admission.local, runs[-1].admission.external)",
    ),
    _usage(
        "hits of the admission that made the first token",
        "(runs[0].admission.local, runs[0].admission.external) if runs else",
        "next(((r.admission.local, r.admission.external) for r in runs if r.frontier >= length),"
        " (runs[-1].admission.local, runs[-1].admission.external)) if runs else",
    ),
    _usage(
        "decoded positions are called recomputed",
        "computed_positions(runs, 0, furthest)",
        "computed_positions(runs, 0, min(furthest, length))",
    ),
    _usage(
        "decoded positions are called prompt",
        "computed=min(furthest, length) - local",
        "computed=furthest - local",
    ),
    _usage(
        "recomputed is what the first admission did not compute",
        "executed - computed_positions(runs, 0, furthest)",
        "executed - (furthest - local - external)",
    ),
    _usage(
        "positions of two runs are counted twice",
        "max(run.admission.hit, counted_to), min(run.frontier, stop)",
        "max(run.admission.hit, start), min(run.frontier, stop)",
    ),
    _usage(
        "a gap between two runs counts as computed",
        "max(run.admission.hit, counted_to), min(run.frontier, stop)",
        "counted_to, min(run.frontier, stop)",
    ),
    _usage(
        "runs are merged in the order of their epochs",
        "in sorted(runs, key=lambda run: run.admission.hit):",
        "in runs:",
    ),
    _scheduler(
        "the log counts what a step has just computed as recomputed",
        "entry.request.runs, entry.start,",
        "entry.request.all_runs, 0,",
    ),
    _request(
        "a run under way is no run",
        "return (*self.runs, Run(residency.admission, residency.computed))",
        "return tuple(self.runs)",
    ),
    _usage(
        "a block found in part is called missed",
        "admission.hit // -block_size",
        "-(admission.hit // block_size)",
    ),
    _usage(
        "the position computed here is called missed",
        "(admission.length - 1) // -block_size",
        "admission.length // -block_size",
    ),
    # --- the positions formula (D5) ---
    Mutation(
        "the KV of the last token is stored",
        "kvrelay.sampling",
        "return prompt_tokens + max_tokens - 1",
        "return prompt_tokens + max_tokens",
    ),
)
