"""``kvrelay demo --kill``: one long answer, a party killed in the middle of it, and the comparison.

The same is asked once more when everything is back and left alone. Every token has to be the same;
they are sampled, with a seed.
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
from kvrelay.rpc.protocol import ROLES

TARGETS = ("decode", "prefill", "store")
TOKENS, SEED, TEMPERATURE = 320, 7, 0.7
KILL_AT = TOKENS // 8  # what the client sees is some way behind what the worker does
PROMPT_CHARACTERS = 2000
LONG_PROMPT = 4500  # a prefill worker is to be met in the middle of it, in some 80 ms
LOOK_EVERY = 0.002


@dataclass(slots=True)
class TimedAnswer:
    """What came, and when, in seconds of ``time.perf_counter``."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    hops: tuple[DemoLeg, ...] = ()

    @property
    def gap(self) -> float:
        """Usual seconds between two tokens."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    def pause(self, since: float) -> float:
        """The longest silence from a moment on."""
        heard = [since, *(at for at in self.times if at > since)]
        return max((b - a for a, b in pairwise(heard)), default=0.0)


class Killer:
    """Kills one process, once: the store, or the worker that has the request at that moment."""

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
        self._over = threading.Event()
        self.struck: SupervisedProcess | None = None
        self.at = 0.0

    def on_tokens(self, count: int) -> None:
        """In the middle of the answer."""
        if self._target != "prefill" and self.struck is None and count >= KILL_AT:
            self._strike(self._serving())

    def watch(self) -> threading.Thread:
        """In the middle of the prompt, where a prefill worker is meant; until ``over``."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        return thread

    def over(self) -> None:
        """Nobody is killed any more."""
        self._over.set()

    def _watch(self) -> None:
        while self._target == "prefill" and self.struck is None:
            self._strike(self._serving())
            if self._over.wait(LOOK_EVERY):
                return

    def _serving(self) -> SupervisedProcess | None:
        if self._target == "store":
            return self._cluster.process("store")
        busy = [w for w in self._client.workers() if w.in_flight and w.role == ROLES[self._target]]
        return self._cluster.named(self._names[busy[0].address]) if busy else None

    def _strike(self, process: SupervisedProcess | None) -> None:
        if process is not None:
            self.struck = process
            self.at = time.perf_counter()
            process.send(SIGKILL)
            self._flow.write(f" [kill -9 {process.spec.name}]", "red")


def kill_demo(
    target: str, cluster: Cluster, document: Document, names: Mapping[str, str], quiet: bool
) -> int:
    """0 if the disturbed and the undisturbed run gave the same tokens."""
    tell: Callable[[str], None] = (lambda text: None) if quiet else print_out
    characters = LONG_PROMPT if target == "prefill" else PROMPT_CHARACTERS
    prompt, flow = whole_sentences(document.text[:characters]), WrappedOutput(quiet)
    with Client(cluster.router) as client:
        tell(introduction(prompt))
        killer = Killer(target, cluster, names, client, flow)
        watching = killer.watch()
        disturbed = ask(client, prompt, names, flow, killer.on_tokens)
        killer.over()
        watching.join()
        tell("\n" + "\n".join(f"  {describe(hop)}" for hop in disturbed.hops))
        cluster.wait()
        tell("\nThe same again, and nobody is killed ...")
        undisturbed = ask(client, prompt, names, WrappedOutput(quiet=True), lambda count: None)
    right = killer.struck is not None and disturbed.tokens == undisturbed.tokens
    print_out(json.dumps(report(killer, disturbed, right), indent=2)) if quiet else None
    tell("\n" + verdict(killer, disturbed, undisturbed, right))
    return 0 if right else 1


def whole_sentences(text: str) -> str:
    """Up to the last full stop."""
    return text[: text.rindex(".") + 1]


def introduction(prompt: str) -> str:
    """What is asked."""
    lines = textwrap.wrap(prompt, 74)
    shown = [
        f"    ... {len(lines) - 2} lines of it, then:",
        *(f"    {line}" for line in lines[-2:]),
    ]
    head = f"The model goes on with a document of {len(prompt):,} characters: {TOKENS} tokens,"
    told = "\n".join(paint(line, "dim") for line in shown)
    return f"\n{head}\nsampled at temperature {TEMPERATURE} with seed {SEED}.\n\n{told}\n"


def ask(
    client: Client,
    prompt: str,
    names: Mapping[str, str],
    flow: WrappedOutput,
    on_tokens: Callable[[int], None],
) -> TimedAnswer:
    """Ask; the text goes to ``flow`` as it comes, the count of tokens to ``on_tokens``."""
    answer = TimedAnswer()
    pieces = client.generate(
        prompt=prompt, max_tokens=TOKENS, temperature=TEMPERATURE, seed=SEED, ignore_eos=True
    )
    for piece in pieces:
        answer.tokens += piece.token_ids
        answer.times += [time.perf_counter()] * len(piece.token_ids)
        flow.write(piece.text)
        if piece.usage is not None:
            answer.hops = tuple(hops_of(piece.usage, names))
        on_tokens(len(answer.tokens))
    flow.end()
    return answer


def computed_again(hops: Sequence[DemoLeg]) -> int:
    """Positions that legs after the first computed, beside the one that each of them must."""
    legs = [hop for hop in hops if not hop.lost]
    return sum(max(0, leg.computed - 1) for leg in legs[1:])


def verdict(killer: Killer, disturbed: TimedAnswer, undisturbed: TimedAnswer, right: bool) -> str:
    """The last lines."""
    if killer.struck is None:
        return paint("  Nobody was killed: the answer was there too soon. Try again.", "red")
    same = sum(a == b for a, b in zip(disturbed.tokens, undisturbed.tokens, strict=False))
    pause, gap = disturbed.pause(killer.at) * 1e3, disturbed.gap * 1e3
    told = (
        f"{killer.struck.spec.name} was killed: the longest pause after it {pause:.0f} ms (a token"
        f" usually {gap:.1f} ms), {again(disturbed.hops)}."
    )
    compared = f"{same} of {TOKENS} tokens are those of the undisturbed run."
    return "\n".join([textwrap.fill(told, 78), paint(compared, "green" if right else "red")])


def again(hops: Sequence[DemoLeg]) -> str:
    """What had to be done twice, in words."""
    first = next(hop for hop in hops if not hop.lost)
    if hops[0].lost:  # what it had computed, nobody knows
        return f"{first.computed} positions of the prompt computed by the one that took over"
    count = computed_again(hops)
    return f"{count} position{'' if count == 1 else 's'} computed again"


def report(killer: Killer, answer: TimedAnswer, right: bool) -> dict[str, object]:
    """The figures for scripts."""
    return {
        "killed": None if killer.struck is None else killer.struck.spec.name,
        "same": right,
        "tokens": len(answer.tokens),
        "computed_again": computed_again(answer.hops),
        "pause_seconds": answer.pause(killer.at),
        "usual_gap_seconds": answer.gap,
        "hops": [asdict(hop) for hop in answer.hops],
    }
