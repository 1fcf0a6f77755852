"""A run as values for JSON, as rows for CSV, and as a page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.load import plots
from kvrelay.load.check import AnswerCheck
from kvrelay.load.figures import ENDS, QUANTILES, LevelFigures, Objectives
from kvrelay.load.openai_server import Json
from kvrelay.load.pages import page, paragraph, rows_table
from kvrelay.load.request import LoadAnswer

LATENCIES = (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E"), ("queue", "queue"))
PLACES = [(name, part, f"{title} {part}") for name, title in LATENCIES for part in ("p50", "p99")]
COLUMNS = (
    *("level", "number", "turn", "tenant", "ended", "due_seconds", "lateness_seconds"),
    *("ttft_seconds", "itl_seconds", "e2e_seconds", "queue_seconds"),
    *("prompt_tokens", "output_tokens", "sources", "migrations", "error"),
)


def seconds_of(figures: LevelFigures) -> dict[str, Mapping[str, float | None]]:
    """Latencies from the moment of sending; the queue as the server reports it."""
    found = {name: figures.times[name].summary() for name, _ in LATENCIES}
    if figures.queue_page is not None and not figures.times["queue"].count:
        return {**found, "queue": figures.queue_page}
    return dict(found)


def level_json(figures: LevelFigures, peak: float) -> Json:
    """One level. ``peak``: the best goodput of all levels, in tokens a second."""
    seconds = figures.seconds or 1e-9
    good = figures.good_tokens / seconds
    return {
        "label": figures.label,
        "loop": "open" if figures.is_open else "closed",
        "seconds": figures.seconds,
        "requests": dict(figures.ends),
        "requests_per_second": figures.ends["done"] / seconds,
        "output_tokens": figures.tokens,
        "output_tokens_per_second": figures.tokens / seconds,
        "prompt_tokens": figures.prompt_tokens,
        "prompt_tokens_per_second": figures.prompt_tokens / seconds,
        "goodput": {
            "requests": figures.good,
            "share": figures.good / figures.sent() if figures.sent() else None,
            "tokens_per_second": good,
            "of_peak": good / peak if peak else None,
        },
        "seconds_from_sent": seconds_of(figures),
        "seconds_from_due": {name: one.summary() for name, one in figures.due_times.items()},
        "prompt_tokens_by_source": dict(figures.sources),
        "migrations": figures.migrations,
        "retry_after_seconds": figures.retry_after.summary(),
        "output_tokens_by_tenant": dict(figures.tenants),
        "errors": dict(figures.errors),
        "generator": {
            "kept_up": figures.behind() is None,
            "behind": figures.behind(),
            "core_share": figures.busy,
            "lateness_seconds": figures.times["lateness"].summary(),
            "loop_delay_seconds": figures.loop_delay.summary(),
        },
        "course": [
            {
                "at": at,
                "ttft_p50": period.ttft.quantile(0.5),
                "ttft_p99": period.ttft.quantile(0.99),
                "e2e_p50": period.e2e.quantile(0.5),
                "output_tokens": period.tokens,
            }
            for at, period in figures.course.periods()
        ],
    }


def check_json(check: AnswerCheck) -> Json:
    return {
        "reference": check.reference,
        "compared": check.compared,
        "verified": check.verified,
        "mismatches": check.mismatches,
        "unanswered": check.unanswered,
        "not_kept": check.unkept,
        "usages": check.usages,
        "usage_faults": check.faults,
        "shown": list(check.shown),
    }


def peak_of(levels: Sequence[LevelFigures]) -> float:
    """The best goodput, in tokens a second."""
    return max((one.good_tokens / one.seconds for one in levels if one.seconds), default=0.0)


def report_json(head: Json, levels: Sequence[LevelFigures], check: AnswerCheck) -> Json:
    peak = peak_of(levels)
    rows = [level_json(figures, peak) for figures in levels]
    return {**head, "levels": rows, "check": check_json(check)}


def csv_row(label: str, answer: LoadAnswer, begun: float) -> Sequence[object]:
    """The cells of ``COLUMNS``; ``begun`` is the start of the level."""
    account, first, last = answer.account, answer.first, answer.last
    sources = account.sources if account is not None else {}
    return (
        label,
        answer.request.number,
        answer.request.turn,
        answer.request.tenant,
        answer.ended,
        f"{answer.due - begun:.6f}",
        f"{answer.sent - answer.due:.6f}",
        "" if first is None else f"{first - answer.sent:.6f}",
        "" if (gap := answer.token_gap()) is None else f"{gap:.6f}",
        "" if last is None or answer.ended != "done" else f"{last - answer.sent:.6f}",
        "" if account is None or account.queue_seconds is None else account.queue_seconds,
        "" if account is None else account.prompt_tokens,
        answer.tokens,
        " ".join(f"{name}={count}" for name, count in sources.items()),
        "" if account is None or account.migrations is None else account.migrations,
        answer.error,
    )


def html_page(
    head: Json, levels: Sequence[LevelFigures], check: AnswerCheck, objectives: Objectives
) -> str:
    """One page: verdict, a table of all levels, plots."""
    wrong = "bad" if check.failed else "good"
    parts = [
        paragraph(verdict(check), wrong),
        *(paragraph(line, "bad") for line in check.shown),
        _levels_table(levels, objectives),
        *_figures(levels),
    ]
    return page("kvrelay load", head, parts)


def verdict(check: AnswerCheck) -> str:
    """One sentence about tokens and usages."""
    usage = f"{check.usages:,} usages, {check.faults:,} wrong"
    if check.reference is None:
        return f"tokens not checked; {usage}"
    unkept = f", {check.unkept:,} not kept" if check.unkept else ""
    silent = f", {check.unanswered:,} not answered by the reference" if check.unanswered else ""
    return (
        f"{check.compared:,} answers compared ({check.reference}),"
        f" {check.mismatches:,} differ{silent}{unkept}; {usage}"
    )


def _levels_table(levels: Sequence[LevelFigures], objectives: Objectives) -> str:
    limits = ", ".join(f"{name} at most {most:g} s" for name, most in objectives.limits.items())
    rows = []
    for one in levels:
        seconds, times = one.seconds or 1e-9, seconds_of(one)
        counts = (one.sent(), *one.ends.values())
        rates = (one.tokens / seconds, one.good_tokens / seconds)
        cells = (one.label, *(f"{n:,}" for n in counts), *(f"{rate:,.0f}" for rate in rates))
        rows.append((*cells, *(_ms(times[name].get(part)) for name, part, _ in PLACES)))
    head = ("load", "sent", *ENDS, "tokens/s", "goodput", *(title for *_, title in PLACES))
    note = f"Goodput: {limits or 'every whole answer'}. Latencies in ms."
    return paragraph(note) + rows_table(head, rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _figures(levels: Sequence[LevelFigures]) -> list[str]:
    made = []
    if len(levels) > 1:
        for name, title in LATENCIES[:3]:
            lines = {
                f"p{part * 100:g}": [
                    (index + 1.0, value)
                    for index, one in enumerate(levels)
                    if (value := one.times[name].quantile(part)) is not None
                ]
                for part in QUANTILES
            }
            marks = [one.label for one in levels]
            made.append(plots.lines(f"{title} against load", "s", lines, marks))
    for one in levels:
        course = list(one.course.periods())
        lines = {
            "TTFT p50": [(at, x) for at, p in course if (x := p.ttft.quantile(0.5)) is not None],
            "TTFT p99": [(at, x) for at, p in course if (x := p.ttft.quantile(0.99)) is not None],
            "E2E p50": [(at, x) for at, p in course if (x := p.e2e.quantile(0.5)) is not None],
        }
        made.append(plots.lines(f"Latency over time: {one.label}", "s", lines))
    bars = [(one.label, dict(one.sources)) for one in levels]
    made.append(plots.bars("Prompt tokens by source", bars))
    return made
