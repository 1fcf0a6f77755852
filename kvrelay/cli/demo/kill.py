"""``kvrelay demo --kill``: one long answer, a process killed in the middle, and a comparison.

When the cluster is whole again the same prompt is sent once more, undisturbed. Every token must be
the same; they are sampled, with a seed.
"""

from __future__ import annotations

import json
import math
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGSTOP

from kvrelay.cli.demo.flow import WrappedOutput
from kvrelay.cli.demo.questions import TimedAnswer, describe, legs_json, read_answer
from kvrelay.cli.screen import paint, print_out
from kvrelay.client.client import Client
from kvrelay.cluster.process import SupervisedProcess
from kvrelay.cluster.supervisor import Cluster
from kvrelay.errors import KvrelayError
from kvrelay.recall.facts import Document

TARGETS = ("decode", "prefill", "store")
TOKENS, SEED, TEMPERATURE = 320, 7, 0.7
KILL_AT = TOKENS // 8  # the client is some tokens behind the worker
PROMPT_CHARACTERS = 2000
LONG_PROMPT = 4500  # takes some 80 ms, long enough to kill its prefill worker
POLL_SECONDS = 0.002
HOLD_SECONDS = 1.0  # at most, should no worker get the request
KILL_TRIES = 5


@dataclass(slots=True)
class Killer:
    """Kills one process, once: the store, or the worker that serves the request then.

    The killer must be the only one with a request in the cluster.
    """

    target: str
    cluster: Cluster
    client: Client
    flow: WrappedOutput
    killed: SupervisedProcess | None = None
    at: float = 0.0

    def on_tokens(self, count: int) -> None:
        """Kill in the middle of a long answer."""
        if self.killed is None and count >= KILL_AT:
            self._kill()

    @contextmanager
    def watch(self, hold: bool = False) -> Iterator[None]:
        """Kill the worker that gets the request which is sent inside this block.

        ``hold`` stops the role's workers until then, so that no answer can end before.
        """
        named, specs = self.cluster.named, self.cluster.specs
        held = [named(one.name) for one in specs if hold and one.role == self.target]
        ended = threading.Event()
        thread = threading.Thread(target=self._poll, args=(ended, held), daemon=True)
        try:
            for process in held:
                process.send(SIGSTOP)
            thread.start()
            yield
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
            _go_on(held)

    def struck(self, answer: TimedAnswer) -> bool:
        """Whether the process was killed while it served the request."""
        return self.killed is not None and (self.target == "store" or answer.lost)

    def _poll(self, ended: threading.Event, held: Sequence[SupervisedProcess]) -> None:
        last = time.monotonic() + (HOLD_SECONDS if held else math.inf)
        with suppress(KvrelayError):  # then nothing is killed
            while self.killed is None and time.monotonic() < last and not ended.wait(POLL_SECONDS):
                self._kill()
        _go_on(held)

    def _serving(self) -> SupervisedProcess | None:
        if self.target == "store":
            return self.cluster.process("store")
        known = self.client.workers()
        busy = [one.address for one in known if one.in_flight and one.role == self.target]
        return self.cluster.named(names_of(self.cluster)[busy[0]]) if busy else None

    def _kill(self) -> None:
        process = self._serving()
        if process is not None:
            self.killed = process
            self.at = time.perf_counter()
            process.send(SIGKILL)
            self.flow.write(f" [kill -9 {process.spec.name}]", "red")


def _go_on(held: Sequence[SupervisedProcess]) -> None:
    for process in held:
        process.send(SIGCONT)


def names_of(cluster: Cluster) -> dict[str, str]:
    """The name of each process by its address."""
    return {spec.address: spec.name for spec in cluster.specs}


def kill_demo(target: str, cluster: Cluster, document: Document, quiet: bool) -> int:
    """Run it; 0 if the disturbed and the undisturbed run gave the same tokens."""
    show: Callable[[str], None] = (lambda text: None) if quiet else print_out
    names = names_of(cluster)
    with Client(cluster.router) as client:
        for attempt in range(KILL_TRIES):
            if attempt:
                show("\nThe request had left the process before the kill; another prompt:")
            prompt, flow = prompt_of(document, target, attempt), WrappedOutput(quiet)
            show(introduction(prompt))
            killer = Killer(target, cluster, client, flow)
            if target == "prefill":
                with killer.watch():
                    disturbed = ask(client, prompt, flow)
            else:
                disturbed = ask(client, prompt, flow, killer.on_tokens)
            flow.end()
            lines = (f"  {describe(leg, names[leg.address])}" for leg in disturbed.legs)
            show("\n" + "\n".join(lines))
            cluster.wait()
            if killer.struck(disturbed):
                break
        show("\nThe same again, without a kill ...")
        undisturbed = ask(client, prompt, WrappedOutput(quiet=True))
    right = killer.struck(disturbed) and disturbed.tokens == undisturbed.tokens
    if quiet:
        print_out(json.dumps(report(killer, disturbed, names, right), indent=2))
    show("\n" + verdict(killer, disturbed, undisturbed, right))
    return 0 if right else 1


def prompt_of(document: Document, target: str, attempt: int) -> str:
    """The document's first sentences without the first ``attempt``: no try finds another's KV."""
    characters = LONG_PROMPT if target == "prefill" else PROMPT_CHARACTERS
    return whole_sentences(document.text[:characters].split(". ", attempt)[-1])


def whole_sentences(text: str) -> str:
    """The text up to its last full stop."""
    return text[: text.rindex(".") + 1]


def introduction(prompt: str) -> str:
    """The first lines: the prompt and the sampling."""
    lines = textwrap.wrap(prompt, 74)
    shown = [f"... {len(lines) - 2} lines of it, then:", *lines[-2:]]
    head = f"The model continues a document of {len(prompt):,} characters: {TOKENS} tokens,"
    body = "\n".join(paint(f"    {line}", "dim") for line in shown)
    return f"\n{head}\nsampled at temperature {TEMPERATURE} with seed {SEED}.\n\n{body}\n"


def ask(
    client: Client,
    prompt: str,
    flow: WrappedOutput,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> TimedAnswer:
    """Ask for one long answer; see ``read_answer``."""
    stream = client.generate(
        prompt=prompt, max_tokens=TOKENS, temperature=TEMPERATURE, seed=SEED, ignore_eos=True
    )
    return read_answer(stream, flow, on_tokens)


def computed_again(answer: TimedAnswer) -> int:
    """Positions that legs after the first computed, except the one that each must compute."""
    legs = [leg for leg in answer.legs if not leg.lost]
    return sum(max(0, leg.computed - 1) for leg in legs[1:])


def verdict(killer: Killer, disturbed: TimedAnswer, undisturbed: TimedAnswer, right: bool) -> str:
    """The last lines: the pause and the comparison."""
    if killer.killed is None or not killer.struck(disturbed):
        return paint("  Each answer ended before the kill: nothing was compared.", "red")
    same = sum(a == b for a, b in zip(disturbed.tokens, undisturbed.tokens, strict=False))
    pause, gap = disturbed.pause(killer.at) * 1e3, disturbed.gap * 1e3
    body = (
        f"{killer.killed.spec.name} was killed: the longest pause after it {pause:.0f} ms (a token"
        f" usually {gap:.1f} ms), {again(disturbed)}."
    )
    compared = f"{same} of {TOKENS} tokens are those of the undisturbed run."
    return "\n".join([textwrap.fill(body, 78), paint(compared, "green" if right else "red")])


def again(answer: TimedAnswer) -> str:
    """The work that was done twice, in words."""
    if answer.legs[0].lost:  # its work is unknown
        return f"{answer.first_leg.computed} positions of the prompt computed by its successor"
    count = computed_again(answer)
    return f"{count} position{'' if count == 1 else 's'} computed again"


def report(
    killer: Killer, answer: TimedAnswer, names: Mapping[str, str], right: bool
) -> dict[str, object]:
    """The figures as JSON."""
    return {
        "killed": None if killer.killed is None else killer.killed.spec.name,
        "same": right,
        "tokens": len(answer.tokens),
        "computed_again": computed_again(answer),
        "pause_seconds": None if killer.killed is None else answer.pause(killer.at),
        "usual_gap_seconds": answer.gap,
        "hops": legs_json(answer, names),
    }
