"""A core without vLLM: one prompt chunk or one token of each request in a step; saves end later.

It keeps accounts as the connector does, and token ``n`` of a request is ``n``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.engine.core.audit import Finding
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Admission, Order, Run
from kvrelay.engine.core.updates import OutputGrammar, Sampled
from kvrelay.engine.vllm.kv.account import RequestAccount
from kvrelay.engine.vllm.serving.engine import CoreLoad, CoreOutput, StepListener
from kvrelay.errors import KvrelayError
from kvrelay.sampling import Sampling

LIMITS = EngineLimits(
    num_blocks=8, block_size=4, max_model_len=24, max_num_seqs=4, max_num_batched_tokens=8
)


@dataclass(slots=True)
class Stepped:
    """One request: its runs as lists of local, external, length, frontier."""

    order: Order
    external: int
    runs: list[list[int]] = field(default_factory=list)
    generated: int = 0
    preemptions: int = 0
    finished: bool = False


class FakeCore:
    """``externals`` are the tokens that each request finds in the store; ``log`` what happened."""

    def __init__(self, externals: dict[str, int] | None = None) -> None:
        self.requests: dict[str, Stepped] = {}
        self.externals = externals or {}
        self.errors: dict[str, KvrelayError] = {}
        self.preempt: set[str] = set()  # in the next step
        self.saves = False  # whether a save of a finished request is still open
        self.failed: dict[str, int] = {}  # tokens of loads that failed
        self.aborted: list[str] = []
        self.log: list[str] = []
        self.broken: Exception | None = None
        self.hangs: threading.Event | None = None
        self.findings: list[Finding] = []
        self.closed_in = ""  # the name of the thread
        self._listener: StepListener | None = None

    def listen(self, listener: StepListener) -> None:
        self._listener = listener

    @property
    def listener(self) -> StepListener:
        assert self._listener is not None
        return self._listener

    def add(self, order: Order, sampling: Sampling, grammar: OutputGrammar | None) -> None:
        external = self.externals.get(order.request_id, 0)
        self.requests[order.request_id] = Stepped(order, external)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        request = self.requests.get(request_id)
        if request is not None and not request.finished:
            self._finish(request)

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def step(self) -> Sequence[CoreOutput]:
        if self.broken is not None:
            raise self.broken
        if self.hangs is not None:
            self.hangs.wait()
        for request in [one for one in self.requests.values() if one.finished and not self.saves]:
            self._leave(request)
        running = [one for one in self.requests.values() if not one.finished]
        preempted = [one for one in running if one.order.request_id in self.preempt and one.runs]
        self.preempt.clear()
        counts = {}
        for request in running:
            request_id = request.order.request_id
            length = len(request.order.tokens) + request.generated
            if not request.runs or request in preempted:
                request.preemptions += request in preempted
                found = 0 if request.runs else request.external
                request.runs.append([0, found, length, found])
                if len(request.runs) == 1:
                    self.listener.admitted(request_id, self.account(request_id))
            counts[request_id] = length - request.runs[-1][3]
            request.runs[-1][3] = length
        names = [request.order.request_id for request in preempted]
        self.listener.scheduled(counts, names)
        self.log.append("executed")
        return [self._sample(self.requests[request_id]) for request_id in counts]

    def _sample(self, request: Stepped) -> CoreOutput:
        request.generated += 1
        order = request.order
        reached = len(order.tokens) + request.generated >= order.prompt_len + order.max_tokens
        last = order.prefill_only or reached or request.generated in order.ending
        if last:
            self._finish(request)
        error = self.errors.get(order.request_id)
        return CoreOutput(order.request_id, Sampled(request.generated, error=error), last)

    def _finish(self, request: Stepped) -> None:
        request.finished = True
        if not self.saves:
            self._leave(request)

    def _leave(self, request: Stepped) -> None:
        request_id = request.order.request_id
        account = self.account(request_id)
        del self.requests[request_id]
        self.listener.left(request_id, account)

    def account(self, request_id: str, saves: bool = True) -> RequestAccount:
        request = self.requests[request_id]
        runs = tuple(
            Run(Admission(number, length, local, external), frontier)
            for number, (local, external, length, frontier) in enumerate(request.runs, 1)
        )
        return RequestAccount(
            length=len(request.order.tokens),
            runs=runs,
            failed=self.failed.get(request_id, 0),
            preemptions=request.preemptions,
            asked=len(request.order.tokens),
            sources={"store": request.external} if request.external else {},
            missed=None,
            saved=len(request.order.tokens) if request.finished and not self.saves else 0,
            last_name=None,
        )

    def load(self) -> CoreLoad:
        waiting = sum(not one.runs for one in self.requests.values())
        running = sum(not one.finished for one in self.requests.values()) - waiting
        return CoreLoad(waiting, 0, 0, running, 0, LIMITS.num_blocks - running)

    def audit(self) -> list[Finding]:
        return self.findings

    def close(self) -> None:
        self.closed_in = threading.current_thread().name
