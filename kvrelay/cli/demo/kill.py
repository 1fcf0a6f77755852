"""``kvrelay demo --kill``: one long answer, a process killed in the middle, and a comparison.

When the cluster is whole again the same prompt is sent once more, undisturbed. Every token must be
the same; they are sampled, with a seed.
"""

from __future__ import annotations

import json
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from signal import SIGKILL

from kvrelay.cli.demo.flow import WrappedOutput
from kvrelay.cli.demo.questions import DemoLeg, describe, hops_of
from kvrelay.cli.screen import paint, print_out
from kvrelay.client.client import Client
from kvrelay.cluster.process import SupervisedProcess
from kvrelay.cluster.supervisor import Cluster
from kvrelay.recall.facts import Document

TARGETS = ("decode", "prefill", "store")
TOKENS, SEED, TEMPERATURE = 320, 7, 0.7
KILL_AT = TOKENS // 8  # the client is some tokens behind the worker
PROMPT_CHARACTERS = 2000
LONG_PROMPT = 4500  # takes some 80 ms, long enough to kill its prefill worker
POLL_SECONDS = 0.002


@dataclass(slots=True)
class TimedAnswer:
    """The tokens and their arrival, in seconds of ``time.perf_counter``."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    hops: tuple[DemoLeg, ...] = ()

    @property
    def gap(self) -> float:
        """Mean seconds between two tokens."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    def pause(self, since: float) -> float:
        """The longest pause after a moment."""
        arrivals = [since, *(at for at in self.times if at > since)]
        return max((b - a for a, b in pairwise(arrivals)), default=0.0)


class Killer:
    """Kills one process, once: the store, or the worker that serves the request then."""

    def __init__(
        self,
        target: str,
        cluster: Cluster,
        names: Mapping[str, str],
        client: Client,
        flow: WrappedOutput,
    ) -> None:
        self._target = target
        self._cluster = cluster
        self._names = names
        self._client = client
        self._flow = flow
        self._stopped = threading.Event()
        self.killed: SupervisedProcess | None = None
        self.at = 0.0

    def on_tokens(self, count: int) -> None:
        """Kill in the middle of the answer."""
        if self._target != "prefill" and self.killed is None and count >= KILL_AT:
            self._kill(self._serving())

    def watch(self) -> threading.Thread:
        """Kill in the middle of the prompt, for a prefill worker; until ``stop``."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """Kill no process from now on."""
        self._stopped.set()

    def _watch(self) -> None:
        while self._target == "prefill" and self.killed is None:
            self._kill(self._serving())
            if self._stopped.wait(POLL_SECONDS):
                return

    def _serving(self) -> SupervisedProcess | None:
        if self._target == "store":
            return self._cluster.process("store")
        busy = [w for w in self._client.workers() if w.in_flight and w.role == self._target]
        return self._cluster.named(self._names[busy[0].address]) if busy else None

    def _kill(self, process: SupervisedProcess | None) -> None:
        if process is not None:
            self.killed = process
            self.at = time.perf_counter()
            process.send(SIGKILL)
            self._flow.write(f" [kill -9 {process.spec.name}]", "red")


def kill_demo(
    target: str, cluster: Cluster, document: Document, names: Mapping[str, str], quiet: bool
) -> int:
    """Run it; 0 if the disturbed and the undisturbed run gave the same tokens."""
    show: Callable[[str], None] = (lambda text: None) if quiet else print_out
    characters = LONG_PROMPT if target == "prefill" else PROMPT_CHARACTERS
    prompt, flow = whole_sentences(document.text[:characters]), WrappedOutput(quiet)
    with Client(cluster.router) as client:
        show(introduction(prompt))
        killer = Killer(target, cluster, names, client, flow)
        watching = killer.watch()
        disturbed = ask(client, prompt, names, flow, killer.on_tokens)
        killer.stop()
        watching.join()
        show("\n" + "\n".join(f"  {describe(hop)}" for hop in disturbed.hops))
        cluster.wait()
        show("\nThe same again, without a kill ...")
        undisturbed = ask(client, prompt, names, WrappedOutput(quiet=True), lambda count: None)
    right = killer.killed is not None and disturbed.tokens == undisturbed.tokens
    print_out(json.dumps(report(killer, disturbed, right), indent=2)) if quiet else None
    show("\n" + verdict(killer, disturbed, undisturbed, right))
    return 0 if right else 1


def whole_sentences(text: str) -> str:
    """The text up to its last full stop."""
    return text[: text.rindex(".") + 1]


def introduction(prompt: str) -> str:
    """The first lines: the prompt and the sampling."""
    lines = textwrap.wrap(prompt, 74)
    shown = [
        f"    ... {len(lines) - 2} lines of it, then:",
        *(f"    {line}" for line in lines[-2:]),
    ]
    head = f"The model continues a document of {len(prompt):,} characters: {TOKENS} tokens,"
    body = "\n".join(paint(line, "dim") for line in shown)
    return f"\n{head}\nsampled at temperature {TEMPERATURE} with seed {SEED}.\n\n{body}\n"


def ask(
    client: Client,
    prompt: str,
    names: Mapping[str, str],
    flow: WrappedOutput,
    on_tokens: Callable[[int], None],
) -> TimedAnswer:
    """Ask; passes the text to ``flow`` and the number of tokens to ``on_tokens``."""
    answer = TimedAnswer()
    chunks = client.generate(
        prompt=prompt, max_tokens=TOKENS, temperature=TEMPERATURE, seed=SEED, ignore_eos=True
    )
    for chunk in chunks:
        answer.tokens += chunk.token_ids
        answer.times += [time.perf_counter()] * len(chunk.token_ids)
        flow.write(chunk.text)
        if chunk.usage is not None:
            answer.hops = tuple(hops_of(chunk.usage, names))
        on_tokens(len(answer.tokens))
    flow.end()
    return answer


def computed_again(hops: Sequence[DemoLeg]) -> int:
    """Positions that legs after the first computed, except the one that each must compute."""
    legs = [hop for hop in hops if not hop.lost]
    return sum(max(0, leg.computed - 1) for leg in legs[1:])


def verdict(killer: Killer, disturbed: TimedAnswer, undisturbed: TimedAnswer, right: bool) -> str:
    """The last lines: the pause and the comparison."""
    if killer.killed is None:
        return paint("  Nothing was killed: the answer ended too soon. Try again.", "red")
    same = sum(a == b for a, b in zip(disturbed.tokens, undisturbed.tokens, strict=False))
    pause, gap = disturbed.pause(killer.at) * 1e3, disturbed.gap * 1e3
    body = (
        f"{killer.killed.spec.name} was killed: the longest pause after it {pause:.0f} ms (a token"
        f" usually {gap:.1f} ms), {again(disturbed.hops)}."
    )
    compared = f"{same} of {TOKENS} tokens are those of the undisturbed run."
    return "\n".join([textwrap.fill(body, 78), paint(compared, "green" if right else "red")])


def again(hops: Sequence[DemoLeg]) -> str:
    """The work that was done twice, in words."""
    first = next(hop for hop in hops if not hop.lost)
    if hops[0].lost:  # its work is unknown
        return f"{first.computed} positions of the prompt computed by its successor"
    count = computed_again(hops)
    return f"{count} position{'' if count == 1 else 's'} computed again"


def report(killer: Killer, answer: TimedAnswer, right: bool) -> dict[str, object]:
    """The figures as JSON."""
    return {
        "killed": None if killer.killed is None else killer.killed.spec.name,
        "same": right,
        "tokens": len(answer.tokens),
        "computed_again": computed_again(answer.hops),
        "pause_seconds": answer.pause(killer.at),
        "usual_gap_seconds": answer.gap,
        "hops": [asdict(hop) for hop in answer.hops],
    }
