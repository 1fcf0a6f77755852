"""``kvrelay demo``: a small cluster, one document, some questions, and what they cost."""

from __future__ import annotations

import json
import signal
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvrelay.cli.demo.flow import WIDTH, WrappedOutput
from kvrelay.cli.demo.kill import KILL_TRIES, TARGETS, Killer, kill_demo, names_of
from kvrelay.cli.demo.questions import AnsweredQuestion, DemoPlan, describe, legs_json, read_answer
from kvrelay.cli.demo.warm_up import warm_up
from kvrelay.cli.screen import paint, print_out, table
from kvrelay.cli.signals import Signals, end_now
from kvrelay.client.client import Client
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import Cluster, with_cluster_token
from kvrelay.config.reader import load, option
from kvrelay.errors import Rejected
from kvrelay.installation import command, make
from kvrelay.recall.facts import FactQuestion
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST

DESCRIPTION = """\
Starts a store, prefill workers, decode workers and a router on free ports, and asks questions
over one long document. Shows for each answer which workers it passed, how many tokens of the
prompt they found in their own pool, loaded from the store or had to compute, and whether the
answer is right. Kills workers on the way. Ends with status 0 only if every answer is right.
With --kill it shows one long answer instead, kills a process in the middle of it, and compares
it, token for token, with an undisturbed run."""
MAX_TOKENS = 16
NOTICE_SECONDS = 10.0
KIND = {
    "cold": ("computed", "yellow"),
    "local": ("found in its pool", "green"),
    "store": ("loaded from the store", "cyan"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The cluster to start and the questions to ask."""

    prefill: int = option(2, "prefill workers; with 0 the decode workers do it", low=0, high=16)
    decode: int = option(2, "decode workers", low=1, high=16)
    model: str = option("recall", "another model that was trained for it", metavar="DIR")
    questions: int = option(6, "questions to ask", low=1, high=100)
    facts: int = option(118, "facts in the document, of about 8.4 tokens each", low=1, high=400)
    seed: int = option(2, "which document", low=0)
    kill: str | None = option(
        None,
        "kill one of these in the middle of one long answer, and compare; none: kill no process",
        choices=(*TARGETS, "none"),
    )
    json: bool = option(False, "print the figures as JSON, and nothing else")

    def __post_init__(self) -> None:
        if self.kill == "prefill" and not self.prefill:
            raise Rejected("kill", "'prefill' needs --prefill of at least 1: there is none to kill")


def main(argv: Sequence[str]) -> int:
    config = load(DemoConfig, argv, "kvrelay demo", DESCRIPTION)
    plan = DemoPlan.draw(config.seed, config.facts, min(config.questions, config.facts))
    demo = Demo(config, plan)
    with Signals(demo.on_signal):
        return demo.run()


class Demo:
    """One run of the demonstration and what is written about it."""

    def __init__(self, config: DemoConfig, plan: DemoPlan) -> None:
        self._config = config
        self._plan = plan
        self._kills = config.kill is None
        size = with_cluster_token(
            ClusterConfig(
                model=config.model,
                prefill=config.prefill,
                decode=config.decode,
                port=0,
                disaggregate="always",  # the demo shows the handoff
            )
        )
        policy.install(size, ADMIN_FIRST)
        self._cluster = Cluster(size, on_change=self._on_change)
        self._names = names_of(self._cluster)
        self._flow = WrappedOutput(quiet=config.json)
        self._starting = True

    def run(self) -> int:
        config = self._config
        self._say(paint("kvrelay demo", "bold") + f": {self._size()}")
        self._say()
        since = time.monotonic()
        with self._cluster as cluster, Client(cluster.router) as client:
            self._starting = False
            took = time.monotonic() - since
            self._say(f"  every process serves after {took:.1f} s")
            warm_up(cluster)
            if config.kill in TARGETS:
                return kill_demo(config.kill, cluster, self._plan.document, config.json)
            self._introduce()
            asked = self._ask_all(client)
        print_out(
            json.dumps(report(asked, self._names, took), indent=2)
            if config.json
            else summary(asked)
        )
        return 0 if all(one.right for one in asked) else 1

    def on_signal(self, number: int) -> None:
        """End at once: the cluster holds nothing worth saving."""
        end_now(self._cluster, number)

    def _size(self) -> str:
        sizes = {"prefill": self._config.prefill, "decode": self._config.decode}
        parts = (f"{n} {role} worker{'' if n == 1 else 's'}" for role, n in sizes.items())
        return ", ".join((*parts, "a store and a router"))

    def _introduce(self) -> None:
        document = self._plan.document
        lines = textwrap.wrap(document.text, WIDTH - 4)
        self._say(
            f"\nA document of {len(document.facts)} facts, {len(document.text):,} characters:\n"
        )
        for line in lines[:3]:
            self._say(paint(f"    {line}", "dim"))
        self._say(paint(f"    ... {len(lines) - 3} more lines", "dim") if len(lines) > 3 else "")

    def _ask_all(self, client: Client) -> list[AnsweredQuestion]:
        done: list[AnsweredQuestion] = []
        last = len(self._plan.questions)
        for number, asked in enumerate(self._plan.questions, 1):
            if self._kills and number == last // 2 + 1 and done:
                self._kill_prefill(client, done[-1])
            self._say(f"\n{paint(f'{number}. {asked.text}', 'bold')}")
            kills = self._kills and number == last and done and self._config.decode > 1
            done.append((self._ask_and_kill if kills else self._ask)(client, asked))
        return done

    def _ask(self, client: Client, asked: FactQuestion) -> AnsweredQuestion:
        """Ask one question greedily, and show the answer and its cost."""
        prompt = self._plan.prompt(asked)
        stream = client.generate(prompt=prompt, max_tokens=MAX_TOKENS, temperature=0.0)
        answer = read_answer(stream, self._flow)
        done = AnsweredQuestion(asked, answer)
        self._show_cost(done)
        return done

    def _ask_and_kill(self, client: Client, asked: FactQuestion) -> AnsweredQuestion:
        """Kill the decode worker that got the request; ask again if none was lost."""
        for _ in range(KILL_TRIES):
            killer = Killer("decode", self._cluster, client, self._flow)
            with killer.watch(hold=True):
                done = self._ask(client, asked)
            if done.answer.lost:
                break
            self._say("   No worker was lost with the answer; the same question again:")
            self._cluster.wait()
        return done

    def _show_cost(self, asked: AnsweredQuestion) -> None:
        answer = asked.answer
        self._flow.end(*(("right", "green") if asked.right else ("WRONG", "red")))
        if not asked.right:
            self._say(f"   expected: {asked.question.answer}")
        for leg in answer.legs:
            self._say(f"   {describe(leg, self._names[leg.address])}")
        what, colour = KIND[answer.source]
        first = paint(f"first token {answer.first_token * 1e3:.0f} ms", colour)
        lost = "\n   (with the migration)" if answer.lost else ""
        self._say(f"   {first} (prompt {what}), then {answer.gap * 1e3:.1f} ms a token{lost}")

    def _kill_prefill(self, client: Client, asked: AnsweredQuestion) -> None:
        """Kill the prefill worker that holds the document, if there is another one."""
        leg = asked.answer.legs[0]
        if leg.role != "prefill" or self._config.prefill < 2:
            return
        process = self._cluster.named(self._names[leg.address])
        what = f"*  kill -9 {process.pid}: {process.spec.name}, which holds the document"
        self._say("\n" + paint(what, "red"))
        process.send(signal.SIGKILL)
        wait_until_noticed(client, process.spec.address)

    def _on_change(self, spec: ProcessSpec, what: str) -> None:
        if self._starting:
            self._say(f"  {spec.name:<10} {spec.address:<16} {what}")

    def _say(self, text: str = "") -> None:
        if not self._config.json:
            print_out(text)


def wait_until_noticed(client: Client, address: str) -> None:
    """Wait until the router knows that a worker died, so that no figure contains the delay."""
    deadline = time.monotonic() + NOTICE_SECONDS
    while time.monotonic() < deadline:
        if not any(one.healthy for one in client.workers() if one.address == address):
            return
        time.sleep(0.05)


def summary(asked: Sequence[AnsweredQuestion]) -> str:
    """The end: times by source of the prompt, the result, and the next commands."""
    answers = [one.answer for one in asked]
    cold = [one.first_token for one in answers if one.source == "cold"]
    rows = []
    for kind, (what, _) in KIND.items():
        times = [one.first_token for one in answers if one.source == kind]
        if times:
            ratio = f"{median(cold) / median(times):.1f} x" if cold else "-"
            rows.append((what, str(len(times)), f"{median(times) * 1e3:.0f} ms", ratio))
    head = ("prompt was", "questions", "first token", "against computed")
    right = sum(one.right for one in asked)
    verdict = f"{right} of {len(asked)} answers right."
    legs = [one.first_leg for one in answers]
    total, computed = sum(leg.length for leg in legs), sum(leg.computed for leg in legs)
    local, external = sum(leg.local for leg in legs), sum(leg.external for leg in legs)
    return "\n".join(
        [
            "",
            table(head, rows, frozenset({1, 2, 3})),
            "",
            f"Prompts: {total:,} tokens = {local:,} local + {external:,} from the store"
            f" + {computed:,} computed.",
            paint(verdict, "green" if right == len(asked) else "red"),
            "",
            *next_commands(),
        ]
    )


def next_commands() -> Iterator[str]:
    """What to try next, as typed here: from a clone or from a wheel."""
    yield "Next:"
    yield f"  {make('up') or command('up')}"
    yield "leaves such a cluster serving. Then, from another terminal:"
    yield f"  {command('generate --usage --temperature 0')} --chat \\"
    yield '      --system "The copper mask stands in Boston. The kite dates from 1850." \\'
    yield '      "Where is the copper mask?"'
    if tests := make("test"):
        yield "The tests, those of exactness among them:"
        yield f"  {tests}"


def report(
    asked: Sequence[AnsweredQuestion], names: Mapping[str, str], start_seconds: float
) -> dict[str, object]:
    """The figures for scripts."""
    return {
        "right": sum(one.right for one in asked),
        "asked": len(asked),
        "start_seconds": start_seconds,
        "questions": [_as_json(one, names) for one in asked],
    }


def _as_json(asked: AnsweredQuestion, names: Mapping[str, str]) -> dict[str, object]:
    answer = asked.answer
    return {
        "question": asked.question.text,
        "expected": asked.question.answer,
        "answer": answer.text,
        "hops": legs_json(answer, names),
        "first_token": answer.first_token,
        "token_gap": answer.gap,
        "tokens": len(answer.tokens),
        "right": asked.right,
        "source": answer.source,
    }
