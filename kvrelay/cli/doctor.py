"""``kvrelay doctor``: what this machine has, what would be used, what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from common.config import load, option
from kvrelay.cli.screen import paint, say
from kvrelay.doctor import Finding, examine

DESCRIPTION = """\
Looks at this machine and says what kvrelay would use, what is absent without harm, and what is
missing. Ends with status 1 only if something needed is missing."""
MARKS = {"ok": ("+", "green"), "absent": ("-", "yellow"), "missing": ("!", "red")}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """How to show the findings."""

    json: bool = option(False, "print the findings as JSON")


def main(argv: Sequence[str]) -> int:
    config = load(DoctorConfig, argv, "kvrelay doctor", DESCRIPTION)
    findings = []
    for finding in examine():
        findings.append(finding)
        if not config.json:
            say(line(finding))
    missing = [finding for finding in findings if finding.state == "missing"]
    if config.json:
        say(
            json.dumps({"ok": not missing, "findings": [asdict(one) for one in findings]}, indent=2)
        )
    else:
        names = ", ".join(finding.name for finding in missing)
        say(f"\nMissing: {names}." if missing else "\nNothing needed is missing.")
    return 1 if missing else 0


def line(finding: Finding) -> str:
    """One finding as a person reads it."""
    mark, colour = MARKS[finding.state]
    means = f"; {finding.means}" if finding.means else ""
    return f"{paint(mark, colour)} {finding.name:<14} {finding.found}{means}"
