"""deploy/observability names only series, labels and values that processes export."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.rig import OBSERVABILITY, ROOT, Exported, exported, metrics_named

DASHBOARDS = sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json"))
COLUMNS = 24


def read_yaml(path: Path) -> object:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def at(value: object, *keys: str | int) -> object:
    """An item of nested mappings and lists."""
    for key in keys:
        value = value[key]  # type: ignore[index]
    return value


def items(value: object, *keys: str | int) -> list[object]:
    """A list among nested mappings and lists."""
    found = at(value, *keys)
    assert isinstance(found, list), f"{keys}: {found!r}"
    return found


def alerts() -> Iterator[tuple[str, object]]:
    for group in items(read_yaml(OBSERVABILITY / "rules.yml"), "groups"):
        for rule in items(group, "rules"):
            yield str(at(rule, "alert")), rule


def queries(board: object) -> Iterator[tuple[str, str]]:
    """Title and PromQL of every target and of every variable of a dashboard."""
    for panel in items(board, "panels"):
        for target in items(panel, "targets"):
            yield str(at(panel, "title")), str(at(target, "expr"))
    for variable in items(board, "templating", "list"):
        text = str(at(variable, "query", "query"))
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", text)
        assert asked, text
        yield f"variable {at(variable, 'name')}", f"count by ({asked[2]}) ({asked[1]})"


@pytest.fixture(scope="module", name="series")
def exported_series() -> Exported:
    return asyncio.run(exported())


def test_alerts_name_what_is_exported(series: Exported) -> None:
    wrong = [
        f"{name}: {problem}"
        for name, rule in alerts()
        for problem in series.problems(str(at(rule, "expr")))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_name_what_is_exported(path: Path, series: Exported) -> None:
    wrong = [
        f"{title}: {problem}"
        for title, query in queries(json.loads(path.read_text(encoding="utf-8")))
        for problem in series.problems(query)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(kvrelay:router_requests[5m])", "no process exports kvrelay:router_requests"),
        ("kvrelay:no_such_metric_total > 0", "no process exports kvrelay:no_such_metric_total"),
        ("kvrelay:router_slots_total", "no process exports kvrelay:router_slots_total"),
        (
            'kvrelay:router_worker_in_flight{status="ready"}',
            "kvrelay:router_worker_in_flight has no label status",
        ),
        (
            'kvrelay:router_worker_in_flight{state="dead"}',
            "kvrelay:router_worker_in_flight never has state=dead",
        ),
        (
            'rate(kvrelay:missed_blocks_total{reason=~"evicted|lost"}[5m])',
            "kvrelay:missed_blocks_total never has reason=~evicted|lost",
        ),
        ("sum by (tenant) (kvrelay:router_slots)", "no series of the query has the label tenant"),
    ],
)
def test_a_wrong_query_is_noticed(query: str, problem: str, series: Exported) -> None:
    assert list(series.problems(query)) == [problem]


def test_dashboards_are_well_formed() -> None:
    assert len(DASHBOARDS) == 4
    source = at(
        read_yaml(OBSERVABILITY / "grafana/provisioning/datasources/prometheus.yml"),
        *("datasources", 0, "uid"),
    )
    uids = Counter[object]()
    for path in DASHBOARDS:
        board = json.loads(path.read_text(encoding="utf-8"))
        uids[at(board, "uid")] += 1
        names = {at(variable, "name") for variable in items(board, "templating", "list")}
        panels = items(board, "panels")
        assert len({at(panel, "id") for panel in panels}) == len(panels)
        for panel in panels:
            assert at(panel, "datasource", "uid") == source
            assert items(panel, "targets"), f"{path.stem}: {at(panel, 'title')} shows nothing"
        for title, query in queries(board):
            used = set(re.findall(r"\$(\w+)", query)) - {"__rate_interval"}
            assert used <= names, f"{path.stem}: {title}: {used - names}"
            assert query.count("(") == query.count(")")
            assert query.count("{") == query.count("}")
        places = [(x, y) for panel in panels for x, y in _places(at(panel, "gridPos"))]
        assert len(places) == len(set(places)), f"{path.stem}: panels overlap"
        assert max(x for x, _ in places) < COLUMNS
    assert set(uids.values()) == {1}


def _places(grid: object) -> Iterator[tuple[int, int]]:
    x, y, width, height = (int(str(at(grid, key))) for key in "xywh")
    yield from ((x + i, y + j) for i in range(width) for j in range(height))


def test_what_matters_is_on_a_dashboard(series: Exported) -> None:
    """Every histogram of the router, and every counter of the store, is shown somewhere."""
    shown = {
        name
        for path in DASHBOARDS
        for _, query in queries(json.loads(path.read_text(encoding="utf-8")))
        for name in metrics_named(query)
    }
    wanted = {
        "kvrelay:time_to_first_token_seconds_bucket",
        "kvrelay:inter_token_latency_seconds_bucket",
        "kvrelay:prompt_tokens_by_source_total",
        "kvrelay:missed_blocks_total",
        "kvrelay:router_migrations_total",
        "kvrelay:kvstore_evicted_blocks_total",
        "kvrelay:kvstore_tenant_bytes",
    }
    assert wanted <= shown <= {*series.labels}


def test_alerts_say_what_is_wrong() -> None:
    found = dict(alerts())
    assert len(found) == len(list(alerts())) >= 15
    for name, rule in found.items():
        assert re.fullmatch(r"Kvrelay[A-Za-z]+", name)
        assert at(rule, "labels", "severity") in ("critical", "warning", "info")
        assert at(rule, "annotations", "summary")


def test_prometheus_reads_files_that_exist() -> None:
    config = read_yaml(OBSERVABILITY / "prometheus.yml")
    for name in items(config, "rule_files"):
        assert (OBSERVABILITY / str(name)).is_file()
    for job in items(config, "scrape_configs"):
        for pattern in items(job, "file_sd_configs", 0, "files"):
            assert list(OBSERVABILITY.glob(str(pattern)))


def test_compose_runs_what_is_scraped() -> None:
    """Every target, and every name that is looked up, is a service with a metrics port."""
    services = at(read_yaml(ROOT / "docker-compose.yml"), "services")
    assert isinstance(services, dict)
    targets = {
        str(target).rpartition(":")[::2]
        for group in items(read_yaml(OBSERVABILITY / "targets" / "compose.yml"))
        for target in items(group, "targets")
    }
    (job,) = items(read_yaml(OBSERVABILITY / "prometheus.yml"), "scrape_configs")
    (looked_up,) = items(job, "dns_sd_configs")
    targets |= {(str(name), str(at(looked_up, "port"))) for name in items(looked_up, "names")}
    own = {
        (name, at(service, "environment", "KVRELAY_METRICS_PORT"))
        for name, service in services.items()
        if service.get("profiles", ["cpu"]) == ["cpu"]  # the workers of `gpu` have these aliases
    }
    assert targets == own
    assert at(looked_up, "type") == "A"
    (named,) = items(job, "relabel_configs")
    assert named == {
        "source_labels": ["component"],
        "regex": "",
        "target_label": "component",
        "replacement": "worker",
    }
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observability"]
        for volume in services[name]["volumes"]:
            assert (ROOT / volume.split(":")[0]).exists(), volume


def test_the_page_says_what_to_do_for_each_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").split("## Alerts\n")[1]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted({name for name, _ in alerts()})
