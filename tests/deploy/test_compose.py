"""The compose files: which worker has which GPU, and what an image for GPUs needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import yaml

ROOT = Path(__file__).parents[2]
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
Service = dict[str, object]


def services(name: str) -> dict[str, Service]:
    """The services of a compose file; a tag that only compose knows keeps its value."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_constructor("!reset", lambda loader, node: "reset")
    made = yaml.load((ROOT / name).read_text(encoding="utf-8"), Loader)
    return cast(dict[str, Service], made["services"])


def at(service: Service, path: str) -> object:
    """What lies at ``a.b.0`` of a service."""
    found: object = service
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else cast(Service, found)[part]
    return found


def test_every_worker_has_a_gpu_of_its_own_by_a_variable_of_its_own() -> None:
    """A count of one would be the first GPU for each of them."""
    found = {}
    for name in WORKERS:
        device = cast(
            Service,
            at(services("docker-compose.yml")[name], "deploy.resources.reservations.devices.0"),
        )
        assert "count" not in device
        assert device["capabilities"] == ["gpu"]
        (text,) = cast(list[str], device["device_ids"])
        match = re.fullmatch(r"\$\{([A-Z0-9_]+):-(\d)\}", text)
        assert match is not None, text
        found[name] = match.groups()
    variables, defaults = zip(*found.values(), strict=True)
    assert variables == ("PREFILL_0_GPU", "PREFILL_1_GPU", "DECODE_0_GPU", "DECODE_1_GPU")
    assert defaults == ("0", "1", "2", "3")


def test_nothing_else_has_a_gpu() -> None:
    for name, service in services("docker-compose.yml").items():
        assert ("deploy" in service) == (name in WORKERS), name


def test_a_worker_that_finds_no_gpu_fails() -> None:
    """With ``auto`` it would compute on the CPU, and only be slow."""
    for name in WORKERS:
        environment = cast(Service, services("docker-compose.yml")[name]["environment"])
        assert environment["KVRELAY_DEVICE"] == "${DEVICE:-cuda}"


def test_on_the_cpu_no_gpu_is_reserved_and_the_memory_is_shared() -> None:
    made = services("deploy/cpu.yml")
    for name in WORKERS:
        assert made[name]["deploy"] == "reset"
        assert at(made[name], "environment.KVRELAY_DEVICE") == "cpu"
        assert at(made[name], "environment.KVRELAY_KV_SHARE") == "${KV_SHARE:-0.2}"
    for name, service in services("docker-compose.yml").items():
        if "build" in service:
            assert at(service, "build.args.EXTRAS") == "${EXTRAS:-all,cuda}"
            assert at(made[name], "build.args.EXTRAS") == "all"


def test_the_image_for_gpus_has_a_compiler() -> None:
    """Triton compiles launchers with it; the other images do without."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    step = next(step for step in text.replace("\\\n", "").split("\n") if "gcc" in step)
    assert step.startswith('RUN case ",${EXTRAS}," in *,cuda,*)')
    assert "libc6-dev" in step
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {"all", "cuda"} <= set(extras)
