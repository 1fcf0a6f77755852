"""``kvrelay conform``: examines whether a server's answers are exact."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from textwrap import fill

from kvrelay.cli.load.output import LiveLine, as_json, claim, given, wrapped, write
from kvrelay.cli.screen import paint, print_err, print_out
from kvrelay.config.reader import check, load, option, required
from kvrelay.conform.abilities import Abilities, door_of
from kvrelay.conform.checks import KINDS, NAMES
from kvrelay.conform.exam import ConformPlan
from kvrelay.conform.report import abilities_line, details, html_page, report_json, verdict
from kvrelay.conform.suite import DIFFERED, NO_VERDICT, ConformRun, ConformWatcher, Row
from kvrelay.conform.tally import ConformOutcome
from kvrelay.errors import KvrelayError, Rejected
from kvrelay.load.draws import LengthDraw
from kvrelay.load.driver import in_background
from kvrelay.load.openai_server import Json
from kvrelay.process.sigint import INTERRUPTED_STATUS
from kvrelay.rpc.security.options import TlsFiles
from kvrelay.rpc.security.tls import https_client
from kvrelay.version import VERSION

TITLE, CELL = 28, 24
TICK = 0.5  # seconds
STYLES = {
    ConformOutcome.EXACT: "green",
    ConformOutcome.DIFFERS: "red",
    ConformOutcome.FAILED: "yellow",
}
CLOSING = (
    "Every answer and every count that was compared is exact.",
    "The server is not exact.",
    "There is no verdict.",
)
DESCRIPTION = """\
Asks an OpenAI server the same requests alone, among others, after hits,
evictions, aborted requests and restarts, and compares the answers token by
token. Nobody else should use the server meanwhile. Status 0: all that could be
compared is exact; 1: something differs; 2: there is no verdict."""
EPILOG = f"""\
{fill(f"CHECK is one of {', '.join(NAMES)}.", 78)}

examples:
  kvrelay conform http://127.0.0.1:8000
  kvrelay conform http://127.0.0.1:8000 --check neighbours --check long
  kvrelay conform http://127.0.0.1:8000 --restart-command ./restart.sh
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformConfig(TlsFiles):
    """What to ask of which server."""

    url: str = required(str, "the server", metavar="URL", positional=True)
    model: str = option("", "the model's name; default the server's first", environ=False)
    api_key: str | None = option(None, "the bearer token", secret=True)
    check: tuple[str, ...] = option((), "only this check", metavar="CHECK", choices=NAMES)
    seed: int | None = option(
        None, "of all prompts; by default another one each time, which is printed", low=0
    )
    prompts: int = option(4, "prompts of each kind of sampling", low=1, high=1024)
    prompt: str = option("24-400", "tokens of a prompt, as kvrelay load has them", metavar="LENGTH")
    output: int = option(32, "max_tokens of an answer", low=2, high=1 << 20)
    sampled: bool = option(True, "leave out sampled requests")
    temperature: float = option(1.0, "of sampled answers", low=0.01)
    vocabulary: int = option(256, "token ids of prompts are below N", low=2)
    neighbours: int = option(8, "other requests at once", low=1, high=4096)
    flood: int = option(16384, "most tokens to send until a prompt is evicted", low=512)
    timeout: float = option(300.0, "most time of an answer", unit="seconds", low=0.1)
    restart_command: str | None = option(
        None,
        "shell command that restarts the server and returns; KVRELAY_RESTART is its number, for"
        " other flags each time",
        metavar="COMMAND",
        environ=False,
    )
    restarts: int = option(1, "how often to run it", low=1, high=100)
    restart_timeout: float = option(600.0, "most time of one", unit="seconds", low=1)
    json: str | None = option(None, "write all findings", metavar="FILE")
    html: str | None = option(None, "write a page", metavar="FILE")
    progress: bool = option(True, "print no live progress")

    def __post_init__(self) -> None:
        check(self)

    def plan(self) -> ConformPlan:
        return ConformPlan(
            prompt=LengthDraw.parse("prompt", self.prompt),
            output=self.output,
            prompts=self.prompts,
            neighbours=self.neighbours,
            flood=self.flood,
            vocabulary=self.vocabulary,
            sampled=self.sampled,
            temperature=self.temperature,
            seed=self.seed or 0,
            timeout=self.timeout,
            restart_command=self.restart_command,
            restarts=self.restarts,
            restart_timeout=self.restart_timeout,
        )


class ConformScreen(ConformWatcher):
    """A row of the table when its check has ended; on a terminal also what is being done."""

    def __init__(self, progress: bool) -> None:
        self.abilities: Abilities | None = None
        self.run: ConformRun | None = None
        self._line = LiveLine(progress)
        self._step = ("", time.monotonic())

    def begins(self, abilities: Abilities, model: str) -> None:
        self.abilities = abilities
        self._line.clear()
        for line in wrapped(f"{model}, {abilities.engine}: {abilities_line(abilities)}"):
            print_out(line)
        print_out("\n" + paint(_cells("check", KINDS), "bold"))

    def works_at(self, what: str) -> None:
        self._step = (what, time.monotonic())

    def ends(self, row: Row) -> None:
        self._line.clear()
        cells = [verdict(tally) for tally in row.cells()]
        outcomes = {tally.outcome for tally in row.tallies.values()}
        style = next((s for o, s in reversed(STYLES.items()) if o in outcomes), "dim")
        if ConformOutcome.DIFFERS in outcomes:
            style = STYLES[ConformOutcome.DIFFERS]
        print_out(paint(_cells(row.title, cells), style))

    async def watch(self) -> None:
        """What is being done; never ends."""
        while self._line.live:
            await asyncio.sleep(TICK)
            what, begun = self._step
            exam = None if self.run is None else self.run.exam
            asked = f", {exam.asked:,} requests so far" if exam is not None else ""
            self._line.show(f"{what}: {time.monotonic() - begun:.0f} s{asked}")


def main(argv: Sequence[str]) -> int:
    config = load(ConformConfig, argv, "kvrelay conform", DESCRIPTION, epilog=EPILOG)
    if config.seed is None:
        config = replace(config, seed=secrets.randbits(32))
    plan = config.plan()
    began = datetime.now(UTC).isoformat(timespec="seconds")
    claim(config.json, config.html)
    print_out(f"kvrelay conform {config.url} --seed {plan.seed}")
    screen = ConformScreen(config.progress)
    run = ConformRun(
        door_of(config.url, config.model, config.api_key, https_client(config)),
        plan,
        screen,
        config.check or NAMES,
    )
    screen.run = run
    status = _run(run, screen)
    closing = CLOSING[status] if status < len(CLOSING) else "Interrupted."
    print_out()
    for row in run.rows:
        for outcome, line in details(row):
            for part in wrapped(line, STYLES.get(outcome, "dim")):
                print_out(part)
    print_out(paint(closing, ("green", "red", "yellow")[min(status, NO_VERDICT)]))
    head: Json = {
        "kvrelay": VERSION,
        "target": config.url,
        "began": began,
        "options": given(config),
    }
    write(config.json, as_json(report_json(head, screen.abilities, run.rows, status)))
    write(config.html, html_page(head, screen.abilities, run.rows, closing, status))
    return status


def _run(run: ConformRun, screen: ConformScreen) -> int:
    """The exit status. A server that does not answer gives no verdict."""

    async def session() -> None:
        try:
            await run.door.find_model()
            async with in_background(screen.watch()):
                await run.run()
        finally:
            await run.door.close()

    try:
        asyncio.run(session())
    except KeyboardInterrupt:
        return DIFFERED if run.status() == DIFFERED else INTERRUPTED_STATUS
    except Rejected:
        raise
    except KvrelayError as error:
        print_err(f"kvrelay conform: {error}")
        return DIFFERED if run.status() == DIFFERED else NO_VERDICT
    return run.status()


def _cells(title: str, cells: Sequence[str]) -> str:
    return f"  {title:<{TITLE}}" + "".join(f"{cell:<{CELL}}" for cell in cells).rstrip()
