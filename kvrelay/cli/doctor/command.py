"""``kvrelay doctor``: what this machine has, what would be used, what is missing."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from google.protobuf import json_format

from kvrelay.cli.doctor.machine import Diagnosis, audit, examine
from kvrelay.cli.doctor.vllm import check_vllm
from kvrelay.cli.screen import paint, print_out
from kvrelay.cluster.endpoints import authorized, processes_of
from kvrelay.config.reader import load, option
from kvrelay.installation import CLUSTER, command, install_line, lacking, require
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.worker.config import DEVICES

DESCRIPTION = """\
Checks this machine: what kvrelay would use, what is absent without harm, and what is missing. With
--store it also checks that stores (Redis too) are reachable and set up for blocks, with --endpoints
that no process of a running cluster keeps dying. With --device it checks what a GPU computes
instead, with --audit every invariant of the accounting of a running worker. Ends with status 1 only
if something needed is missing, a check fails or an invariant is broken."""
INDENT = " " * 2  # of all lines of a finding but the first
MARKS = {"ok": ("+", "green"), "absent": ("-", "yellow"), "missing": ("!", "red")}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig(SecurityOptions):
    """What to check, and how to show the findings."""

    json: bool = option(False, "print the findings as JSON")
    audit: str | None = option(
        None,
        "check the accounting of this worker",
        metavar="HOST:PORT",
        environ=False,  # KVRELAY_AUDIT is a switch of workers
    )
    device: str | None = option(
        None,
        "check what this device computes instead: kernels, CUDA graphs, copies of blocks",
        choices=DEVICES,
        environ=False,  # KVRELAY_DEVICE is that of workers
    )
    store: str | None = option(None, "check this store too, or several with commas", metavar="URL")
    vllm_python: str | None = option(
        None,
        "check the vLLM of this interpreter, as kvrelay up takes it",
        metavar="PATH",
        environ=False,
    )
    endpoints: str | None = option(
        None,
        "check the processes of the kvrelay up that wrote this file too",
        metavar="FILE",
        environ=False,  # KVRELAY_ENDPOINTS may name a file that kvrelay up has not written yet
    )


def main(argv: Sequence[str]) -> int:
    config = load(DoctorConfig, argv, "kvrelay doctor", DESCRIPTION)
    if config.audit is not None:
        policy.install(authorized(config, None, config.audit), ADMIN_FIRST)
        return show_audit(config.audit, config.json)
    if config.device is not None:
        require("worker")
        from kvrelay.cli.doctor.device import show_device  # imports torch

        return show_device(config.device, config.json)
    policy.install(config)
    findings = []
    checks = (
        examine(),
        _vllm(config.vllm_python),
        _stores(config.store),
        _processes(config.endpoints),
    )
    for finding in chain.from_iterable(checks):
        findings.append(finding)
        if not config.json:
            print_out(line(finding))
    missing = [finding for finding in findings if finding.state == "missing"]
    if config.json:
        print_out(
            json.dumps({"ok": not missing, "findings": [asdict(one) for one in findings]}, indent=2)
        )
    elif missing:
        print_out(f"\nMissing: {', '.join(finding.name for finding in missing)}.")
    else:
        print_out("\n" + next_step())
    return 1 if missing else 0


def next_step() -> str:
    """What can be done with what is installed, and how to install the rest."""
    absent = lacking(*CLUSTER)
    if not absent:
        return f"Nothing needed is missing. Try: {command('demo')}"
    here = ", ".join(("the client", *(f"[{name}]" for name in CLUSTER if name not in absent)))
    return (
        f"Nothing is missing from what is installed: {here}.\n"
        f"Try: {command('generate --router HOST:PORT PROMPT')}\n"
        f"For a whole cluster on this machine: {install_line(*CLUSTER)}"
    )


def _vllm(python: str | None) -> Iterator[Diagnosis]:
    if python is not None or not lacking(*CLUSTER):
        yield from check_vllm(python)


def _stores(urls: str | None) -> Iterator[Diagnosis]:
    if not urls:
        return
    require("store")
    from kvrelay.cli.doctor.stores import check_stores  # needs the packages of that extra

    yield from check_stores(urls)


def _processes(path: str | None) -> Iterator[Diagnosis]:
    for one in processes_of(Path(path)) if path else ():
        if one.failing is not None:
            yield Diagnosis(one.name, "missing", one.failing, "its log is that of kvrelay up")
        elif one.pid is None:
            yield Diagnosis(one.name, "absent", "it is being restarted")
        else:
            yield Diagnosis(one.name, "ok", f"process {one.pid} at {one.address}")


def show_audit(address: str, as_json: bool) -> int:
    """Print the findings of a worker's ``Audit``; 1 if there are any."""
    found = audit(address)
    if as_json:
        print_out(json_format.MessageToJson(found, always_print_fields_with_no_presence=True))
        return 1 if found.findings else 0
    for one in found.findings:
        place = one.request_id or "the pool"
        print_out(f"{paint('!', 'red')} {one.invariant} {place}: {one.message}")
    count = len(found.findings)
    broken = f"{count} invariant{' is' if count == 1 else 's are'} broken"
    result = broken if count else "all invariants hold"
    print_out(f"{address}: {found.requests} requests, {found.blocks} blocks: {result}.")
    return 1 if found.findings else 0


def line(finding: Diagnosis) -> str:
    """One finding for people: a line, on a terminal as many as it takes."""
    mark, colour = MARKS[finding.state]
    means = f"; {finding.means}" if finding.means else ""
    text = f"{finding.name:<14} {finding.found}{means}"
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - len(INDENT)
        text = f"\n{INDENT}".join(textwrap.wrap(text, max(room, 40), break_on_hyphens=False))
    return f"{paint(mark, colour)} {text}"
