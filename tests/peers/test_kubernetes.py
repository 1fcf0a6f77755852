"""deploy/kubernetes against the schemas of Kubernetes, unknown fields refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy import manifests
from tests.peers.pins import KUBERNETES
from tests.peers.rig import environment_of

pytestmark = pytest.mark.peer
VERSION = "1.37"


def validated(*files: Path) -> subprocess.CompletedProcess[str]:
    program = environment_of(KUBERNETES).program("kubernetes-validate")
    command = [program, "-k", VERSION, "--strict", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_object_is_valid() -> None:
    (kustomization,) = manifests.read("kustomization.yaml")
    files = [manifests.FOLDER / name for name in kustomization["resources"].texts]
    found = validated(*files)
    said = found.stdout + found.stderr
    assert found.returncode == 0, said
    assert said.count(f"against version {VERSION}") == len(manifests.resources())


def test_the_workers_over_vllm_are_valid(tmp_path: Path) -> None:
    for name, made in manifests.with_vllm().items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(made.value))
        found = validated(file)
        assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("containerPort: 50060", "containerPort: grpc"),
        ("enableServiceLinks:", "enableServiceLink:"),
        ("terminationGracePeriodSeconds: 60", 'terminationGracePeriodSeconds: "60"'),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, right: str, wrong: str) -> None:
    text = (manifests.FOLDER / "decode.yaml").read_text(encoding="utf-8")
    assert right in text
    file = tmp_path / "decode.yaml"
    file.write_text(text.replace(right, wrong))
    assert validated(file).returncode != 0
