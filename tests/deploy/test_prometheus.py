"""Every query of the dashboards and alerts, asked of a real Prometheus that scrapes a real cluster.

Prometheus is in Debian's package ``prometheus``. Where it is not on the path, name it in
``PROMETHEUS``; without it this test is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay import Client
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import process_specs
from kvrelay.cluster.ports import free_ports
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import Cluster
from tests.cluster.processes import free_beside, until
from tests.deploy.rig import OBSERVABILITY
from tests.deploy.test_observability import DASHBOARDS, alerts, at, items, queries
from tests.forked import all_forked
from tests.models import tiny_model
from tests.secured import BOB, CREDENTIALS, write_credentials

PROMETHEUS = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(
        PROMETHEUS is None,
        reason="prometheus is missing: apt-get install prometheus, or set PROMETHEUS",
    ),
]
OF_BOB = 'store-bytes = "8MiB"\n'
COMPONENTS: Mapping[str, str] = {"prefill": "worker", "decode": "worker"}
ASK_SECONDS = 90.0
REFUSED = (400, 422)  # statuses of a query that is wrong


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def healthy(self, targets: int) -> bool:
        """Whether it scrapes so many targets, and each answers."""
        try:
            found = items(self._get("targets"), "data", "activeTargets")
        except OSError:
            return False
        return [at(one, "health") for one in found] == ["up"] * targets

    def values(self, query: str) -> list[float]:
        """Of each series of an answer; a query that Prometheus refuses fails the test."""
        answer = self._get("query?" + urllib.parse.urlencode({"query": query}))
        assert at(answer, "status") == "success", answer
        return [float(str(at(one, "value", 1))) for one in items(answer, "data", "result")]

    def _get(self, path: str) -> object:
        try:
            with urllib.request.urlopen(self._url + path, timeout=20) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code not in REFUSED:
                raise  # it is still starting
            return json.loads(error.read())


@contextmanager
def prometheus(folder: Path, ports: Mapping[str, int]) -> Iterator[Prometheus]:
    """Our configuration and rules, with these targets in place of names in the containers' DNS."""
    text = (OBSERVABILITY / "prometheus.yml").read_text(encoding="utf-8")
    text, names = re.subn(r"    dns_sd_configs:\n(      .*\n)+", "", text)
    text, paces = re.subn("(scrape|evaluation)_interval: 5s", r"\1_interval: 1s", text)
    assert (names, paces) == (1, 2)
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(OBSERVABILITY / "rules.yml", folder)
    targets = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {"component": COMPONENTS.get(role := name.split("-")[0], role)},
        }
        for name, port in ports.items()
    ]
    (folder / "targets").mkdir()
    (folder / "targets" / "here.yml").write_text(json.dumps(targets))
    (port,) = free_ports(1)
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            made = Prometheus(port)
            until(
                lambda: made.healthy(len(ports)),
                lambda: f"scraping: {(folder / 'log').read_text()[-2000:]}",
                ASK_SECONDS,
            )
            yield made
        finally:
            process.kill()


def measured(config: ClusterConfig, ports: dict[str, int]) -> tuple[ProcessSpec, ...]:
    """The processes, each with a metrics port, entered in ``ports`` by name."""
    specs = all_forked(process_specs(config))
    free = free_beside(specs, len(specs))
    ports |= zip((spec.name for spec in specs), free, strict=True)
    return tuple(
        replace(spec, args=(*spec.args, "--metrics-port", str(ports[spec.name]))) for spec in specs
    )


def shown() -> Iterator[tuple[str, str]]:
    """Every query of a dashboard, its variables set to everything."""
    for path in DASHBOARDS:
        for title, query in queries(json.loads(path.read_text(encoding="utf-8"))):
            query = query.replace("$__rate_interval", "1m")
            yield f"{path.stem}: {title}: {query}", re.sub(r"\$\w+", ".+", query)


def serve(cluster: Cluster, turn: int) -> None:
    """Each turn two new prompts, which a decode worker loads, and one that was there before."""
    with Client(cluster.router, token=BOB) as client:
        for first in (2 * turn % 250, (2 * turn + 1) % 250, 251):
            prompt = [first, *range(60)]
            client.complete(token_ids=prompt, max_tokens=8, ignore_eos=True, temperature=0.0)


def test_prometheus_answers_every_query_with_numbers(tmp_path: Path) -> None:
    config = ClusterConfig(
        model=str(tiny_model("llama", tmp_path / "llama", eos_token_id=None)),
        port=0,
        http_port=0,
        dtype="float32",
        prefill=1,
        decode=1,
        block_size=16,
        num_blocks=64,
        disaggregate="always",
        store_budget=1 << 25,
        store_disk=str(tmp_path / "disk"),
        credentials=write_credentials(tmp_path, CREDENTIALS + OF_BOB),  # Bob's is the last table
    )
    ports: dict[str, int] = {}
    with (
        Cluster(config, layout=lambda given: measured(given, ports)) as cluster,
        prometheus(tmp_path, ports) as asked,
    ):
        missing, turn = dict(shown()), 0

        def answered() -> bool:
            nonlocal missing, turn
            serve(cluster, turn)
            turn += 1
            missing = {
                title: query
                for title, query in missing.items()
                if not any(value == value for value in asked.values(query))  # not NaN
            }
            return not missing

        until(answered, lambda: "numbers for\n" + "\n".join(missing), ASK_SECONDS)
        for name, rule in alerts():
            values = asked.values(str(at(rule, "expr")))
            assert not values, f"{name} would fire: {values}"
