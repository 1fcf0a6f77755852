"""Cases for promtool: a quiet cluster, and for each alert what makes it fire, and it alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

STEPS = 80  # of 15 seconds
ROUTER = 'model_name="m",instance="r:9100"'
WORKER = 'model_name="m",worker="w:50060",role="decode",instance="w:9100"'
STORE = 'instance="s:9100"'
EVICTED = f'missed_blocks_total{{{WORKER},reason="evicted"}}'
ALIVE = f'router_worker_in_flight{{{ROUTER},role="decode",state="ready",worker="w:50060"}}'
FIRST_TOKEN = f"time_to_first_token_seconds_bucket{{{ROUTER},le="

QUIET: Mapping[str, str] = {
    'up{component="router",instance="r:9100",job="kvrelay"}': "1x80",
    ALIVE: "3x80",
    f'router_worker_in_flight{{{ROUTER},role="prefill",state="draining",worker="p:50060"}}': "0x80",
    f"router_slots{{{ROUTER}}}": "32x80",
    f"certificate_expiry_timestamp_seconds{{{ROUTER}}}": "9e6x80",
    f'credential_reloads_total{{{ROUTER},result="ok"}}': "0+1x80",
    f'credential_reloads_total{{{ROUTER},result="failed"}}': "0+0x80",
    f'router_lost_workers_total{{{ROUTER},role="decode"}}': "0+0x80",
    f"router_migrations_total{{{ROUTER}}}": "0+0x80",
    f"router_mixed_numerics_legs_total{{{ROUTER}}}": "0+0x80",
    f"router_waiting_requests{{{ROUTER}}}": "2x80",
    f"router_waiting_tokens{{{ROUTER}}}": "1000x80",
    f"router_drained_tokens_per_second{{{ROUTER}}}": "500x80",
    f'router_requests_total{{{ROUTER},ended="finished"}}': "0+15x80",
    f'router_requests_total{{{ROUTER},ended="cancelled"}}': "0+1x80",
    f'router_requests_total{{{ROUTER},ended="unavailable"}}': "0+0x80",
    f'router_refused_requests_total{{{ROUTER},reason="queue_full"}}': "0+0x80",
    f'router_refused_requests_total{{{ROUTER},reason="tenant_tokens"}}': "0+0x80",
    f'{FIRST_TOKEN}"1.0"}}': "0+15x80",
    f'{FIRST_TOKEN}"2.5"}}': "0+15x80",
    f'{FIRST_TOKEN}"5.0"}}': "0+15x80",
    f'{FIRST_TOKEN}"+Inf"}}': "0+15x80",
    f'missed_blocks_total{{{WORKER},reason="never_stored"}}': "0+40x80",
    EVICTED: "0+2x80",
    f'missed_blocks_total{{{WORKER},reason="other_numerics"}}': "0+0x80",
    f"store_lookups_total{{{WORKER}}}": "0+15x80",
    f"store_lookup_failures_total{{{WORKER}}}": "0+0x80",
    f"store_corrupt_blocks_total{{{WORKER}}}": "0+0x80",
    f"kvstore_bytes{{{STORE}}}": "4e9x80",
    f"kvstore_budget_bytes{{{STORE}}}": "4e9x80",
    f"kvstore_leased_bytes{{{STORE}}}": "1e8x80",
    f"kvstore_reserved_bytes{{{STORE}}}": "1e7x80",
    f"kvstore_rejected_blocks_total{{{STORE}}}": "0+0x80",
    f"kvstore_received_bytes_total{{{STORE}}}": "0+1.5e7x80",  # 67 minutes for all memory
    f"kvstore_evicted_blocks_total{{{STORE}}}": "0+30x80",
    f"kvstore_lookup_hits_total{{{STORE}}}": "0+60x80",
    f"kvstore_lookup_misses_total{{{STORE}}}": "0+42x80",
    f"kvstore_corrupt_blocks_total{{{STORE}}}": "0+0x80",
    f"kvstore_disk_bytes{{{STORE}}}": "5e9x80",
    f"kvstore_disk_budget_bytes{{{STORE}}}": "9e9x80",
    f"kvstore_disk_dropped_blocks_total{{{STORE}}}": "0+0x80",
    f"kvstore_disk_failed_writes_total{{{STORE}}}": "0+0x80",
    f"kvstore_disk_corrupt_blocks_total{{{STORE}}}": "0+0x80",
}
"""Series without the prefix of kvrelay, and their values in promtool's notation.

The store is full and evicts, a worker drains, clients leave and requests wait: all of it is usual.
"""

OF_MODEL = {"model_name": "m"}
OF_ROUTER = {"model_name": "m", "instance": "r:9100"}
OF_STORE = {"instance": "s:9100"}
OF_OTHER = {"model_name": "m", "role": "decode", "worker": "d:50060"}


@dataclass(frozen=True, slots=True)
class RuleCase:
    """``changes``: series by the beginning of their name, or whole; a value of "" removes one.

    Without an ``alert`` none may fire.
    """

    title: str
    changes: Mapping[str, str]
    alert: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    severity: str = "warning"
    summary: str = ""

    def series(self) -> dict[str, str]:
        """All series of the case."""
        changed = {_whole(name): values for name, values in self.changes.items()}
        return {name: values for name, values in {**QUIET, **changed}.items() if values}


def _whole(name: str) -> str:
    """The quiet series that begins so, or a series that a quiet cluster does not have."""
    found = [each for each in QUIET if each.startswith(name)]
    assert len(found) == 1 or "}" in name, f"{name} begins {found}"
    return found[0] if len(found) == 1 else name


def _in(state: str) -> str:
    """The series of a second decode worker in this state."""
    return f'router_worker_in_flight{{{ROUTER},role="decode",state="{state}",worker="d:50060"}}'


CASES = (
    RuleCase(
        "a process dies",
        {'up{component="worker",instance="w:9100",job="kvrelay"}': "1x40 0x40"},
        "KvrelayTargetDown",
        {"component": "worker", "instance": "w:9100", "job": "kvrelay"},
        "critical",
        "worker w:9100 does not answer scrapes",
    ),
    RuleCase(
        "one of two decode workers is killed",
        {_in("unreachable"): "0x80"},
        "KvrelayWorkerDown",
        OF_OTHER,
        summary="decode worker d:50060 is unreachable",
    ),
    RuleCase(
        "a worker that announced itself is killed",
        {"router_lost": "0x50 1x30"},
        "KvrelayWorkerLost",
        {"model_name": "m", "role": "decode"},
        summary="a decode worker of m died or hung",
    ),
    RuleCase(
        "a worker hangs again and again",
        {_in("suspect"): "_x49 0x9 _x21", _in("ready"): "0x49 _x9 0x21"},
        "KvrelayWorkerSuspect",
        OF_OTHER,
        summary="decode worker d:50060 is silent 23.81% of the time",
    ),
    RuleCase(
        "a worker of another fleet is listed",
        {_in("starting"): "0x80"},
        "KvrelayWorkerNotAccepted",
        OF_OTHER,
        summary="decode worker d:50060 is listed and not used",
    ),
    RuleCase(
        "the only decode worker drains",
        {ALIVE: "", ALIVE.replace("ready", "draining"): "3x80"},
        "KvrelayNoDecodeWorker",
        OF_ROUTER,
        "critical",
        "router r:9100 has no decode worker that is ready",
    ),
    RuleCase(
        "one leg a second migrates",
        {"router_migrations": "0+15x80"},
        "KvrelayMigrations",
        OF_MODEL,
        summary="1 legs a second of m migrate",
    ),
    RuleCase(
        "the store holds blocks of another numeric profile",
        {f'missed_blocks_total{{{WORKER},reason="other_numerics"': "0+15x80"},
        "KvrelayNumericsMismatch",
        OF_MODEL,
        summary="workers of m compute different bits",
    ),
    RuleCase(
        "streams continue on another numeric profile",
        {"router_mixed": "0+15x80"},
        "KvrelayNumericsMismatch",
        OF_MODEL,
        summary="workers of m compute different bits",
    ),
    RuleCase(
        "the queue takes 200 seconds to drain",
        {"router_waiting_tokens": "100000x80"},
        "KvrelayQueueLong",
        OF_ROUTER,
        summary="the queue of router r:9100 needs more than 30 s to drain",
    ),
    RuleCase(
        "the queue does not drain",
        {"router_drained": "0x80"},
        "KvrelayQueueLong",
        OF_ROUTER,
        summary="the queue of router r:9100 needs more than 30 s to drain",
    ),
    RuleCase(
        "every first token takes 2.5 to 5 seconds",
        {f'{FIRST_TOKEN}"1.0"': "0+0x80", f'{FIRST_TOKEN}"2.5"': "0+0x80"},
        "KvrelayFirstTokenSlow",
        OF_MODEL,
        summary="TTFT p99 of m is 4.975s",
    ),
    RuleCase(
        "requests fail",
        {f'router_requests_total{{{ROUTER},ended="unavailable"': "0+1x80"},
        "KvrelayRequestsFail",
        {**OF_MODEL, "ended": "unavailable"},
        "critical",
        "requests of m end with unavailable",
    ),
    RuleCase(
        "the queue is full",
        {f'router_refused_requests_total{{{ROUTER},reason="queue_full"': "0+3x80"},
        "KvrelayRequestsRefused",
        {**OF_MODEL, "reason": "queue_full"},
        summary="requests of m are refused: queue_full",
    ),
    RuleCase(
        "a tenant exceeds its quota",
        {f'router_refused_requests_total{{{ROUTER},reason="tenant_tokens"': "0+3x80"},
        "KvrelayTenantRefused",
        {**OF_MODEL, "reason": "tenant_tokens"},
        "info",
        "a tenant exceeds its quota: tenant_tokens",
    ),
    RuleCase(
        "readers lease nearly all of the store",
        {"kvstore_leased": "3.8e9x80"},
        "KvrelayStoreHasNoRoom",
        OF_STORE,
        summary="store s:9100 cannot evict enough for new blocks",
    ),
    RuleCase(
        "the store refuses blocks",
        {"kvstore_rejected": "0+3x80"},
        "KvrelayStoreHasNoRoom",
        OF_STORE,
        summary="store s:9100 cannot evict enough for new blocks",
    ),
    RuleCase(
        "40 MB/s are put into a store of 4 GB, and a fifth of what is looked up was evicted",
        {"kvstore_received": "0+6e8x80", EVICTED: "0+20x80"},
        "KvrelayStoreEvictsYoungBlocks",
        OF_STORE,
        summary="store s:9100 replaces all blocks in 1m 40s, and evicted blocks are missed",
    ),
    RuleCase(
        "every lookup fails",
        {"store_lookup_failures": "0+15x80"},
        "KvrelayStoreUnreachable",
        {**OF_MODEL, "worker": "w:50060"},
        summary="worker w:50060 gets no answers from its store",
    ),
    RuleCase(
        "a worker gets a damaged block",
        {"store_corrupt": "0x40 1x40"},
        "KvrelayCorruptBlocks",
        {**OF_MODEL, "worker": "w:50060", "role": "decode", "instance": "w:9100"},
        "critical",
        "w:9100 found damaged blocks; they were not used",
    ),
    RuleCase(
        "a block is damaged on disk",
        {"kvstore_disk_corrupt": "0x40 1x40"},
        "KvrelayCorruptBlocks",
        OF_STORE,
        "critical",
        "s:9100 found damaged blocks; they were not used",
    ),
    RuleCase(
        "the disk is full",
        {"kvstore_disk_bytes": "8.9e9x80", "kvstore_disk_dropped": "0+15x80"},
        "KvrelayDiskTierFull",
        OF_STORE,
        "info",
        "the disk of store s:9100 is full: it drops blocks",
    ),
    RuleCase(
        "the disk refuses writes",
        {"kvstore_disk_failed": "0+1x80"},
        "KvrelayDiskWritesFail",
        OF_STORE,
        "critical",
        "the system refuses writes of store s:9100",
    ),
    RuleCase(
        "a certificate has a day left",
        {f"certificate_expiry_timestamp_seconds{{{ROUTER}}}": "1e5x80"},
        "KvrelayCertificateExpires",
        OF_ROUTER,
        "critical",
        "the certificate of r:9100 ends in 1d 3h 31m 40s",
    ),
    RuleCase(
        "a new file cannot be read",
        {f'credential_reloads_total{{{ROUTER},result="failed"}}': "0x50 1x30"},
        "KvrelayCredentialsNotRead",
        {**OF_ROUTER, "result": "failed"},
        "warning",
        "r:9100 cannot use its new certificates or credentials and keeps the old ones",
    ),
)

SILENT = (
    RuleCase(
        "a small store replaces blocks that are not asked for again",
        {"kvstore_bytes": "6e7x80", "kvstore_budget": "6.7e7x80", "kvstore_leased": "1e6x80"}
        | {"kvstore_reserved": "1e6x80", "kvstore_received": "0+3e6x80"},
    ),
    RuleCase(
        "a worker hangs for half a minute",
        {_in("suspect"): "_x49 0x1 _x29", _in("ready"): "0x49 _x1 0x29"},
    ),
    RuleCase("evicted blocks are asked for after a long time", {EVICTED: "0+20x80"}),
)


def promtool_file(rules: Path, alerts: Iterable[str]) -> str:
    """What ``promtool test rules`` reads. JSON, which is YAML."""
    names = sorted(set(alerts))
    tests = [_test("a quiet cluster", QUIET, names, None)]
    tests += [_test(case.title, case.series(), names, case) for case in (*CASES, *SILENT)]
    made = {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}
    return json.dumps(made, indent=1)


def _test(
    title: str, series: Mapping[str, str], alerts: Iterable[str], case: RuleCase | None
) -> dict[str, object]:
    return {
        "name": title,
        "interval": "15s",
        "input_series": [
            {"series": name if name.startswith("up") else f"kvrelay:{name}", "values": values}
            for name, values in series.items()
        ],
        "alert_rule_test": [
            {"eval_time": "15m", "alertname": name, "exp_alerts": list(_firing(name, case))}
            for name in alerts
        ],
    }


def _firing(alert: str, case: RuleCase | None) -> Iterator[dict[str, object]]:
    if case is not None and case.alert == alert:
        yield {
            "exp_labels": {**case.labels, "severity": case.severity},
            "exp_annotations": {"summary": case.summary},
        }
