"""Each alert fires for its cause and for no other, says ``promtool test rules``.

Prometheus's promtool is in Debian's package ``prometheus``. Where it is not on the path, name it in
``PROMTOOL``; without it the tests that run it are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.rig import OBSERVABILITY
from tests.deploy.rule_cases import CASES, QUIET, STEPS, promtool_file

RULES = OBSERVABILITY / "rules.yml"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is missing: apt-get install prometheus, or set PROMTOOL"
)


def alerts() -> list[str]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROMTOOL), *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == set(alerts())
    assert all(values.endswith(f"x{STEPS}") for values in QUIET.values())


@needs_promtool
@pytest.mark.parametrize("kind", ["rules", "config"])
def test_promtool_accepts_the_files(kind: str) -> None:
    file = RULES if kind == "rules" else OBSERVABILITY / "prometheus.yml"
    checked = promtool("check", kind, str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "FAILED" not in checked.stdout


@needs_promtool
def test_alerts_fire_for_their_cause_only(tmp_path: Path) -> None:
    file = tmp_path / "cases.yml"
    file.write_text(promtool_file(RULES, alerts()))
    tested = promtool("test", "rules", str(file))
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
def test_a_rule_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    """Worker states spelled otherwise, thresholds of zero: promtool tells of each."""
    rules, file = tmp_path / "rules.yml", tmp_path / "cases.yml"
    text = RULES.read_text(encoding="utf-8")
    for right, wrong, title in (
        ('state="unreachable"', 'state="gone"', "KvrelayWorkerDown"),
        ("[10m])) > 0.1", "[10m])) > 0", "KvrelayWorkerSuspect"),
        ("> 2.5", "> 0", "KvrelayFirstTokenSlow"),
        ("> 0.1\n", ">= 0\n", "KvrelayStoreEvictsYoungBlocks"),
    ):
        assert right in text
        rules.write_text(text.replace(right, wrong))
        file.write_text(promtool_file(rules, alerts()))
        tested = promtool("test", "rules", str(file))
        assert tested.returncode != 0
        assert title in tested.stdout + tested.stderr
