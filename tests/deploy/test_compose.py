"""docker-compose.yml and deploy/Dockerfile against the programs, as compose would read them."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath

import pytest
import yaml

from kvrelay.cluster.layout import CONFIGS
from kvrelay.config.option import options
from kvrelay.config.reader import read as read_config
from kvrelay.rpc.address import HTTP_PORT, ROUTER_PORT, Address
from kvrelay.worker.config import WorkerConfig
from kvstore.config import StoreConfig
from kvstore.urls import split_urls
from router.config import RouterConfig
from router.workers import dns
from tests.deploy.manifests import Node
from tests.deploy.rig import ROOT
from tests.deploy.services import DOCKERFILE, Service, read_service, role_of

FILE = "docker-compose.yml"
GPU_WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PROFILES = {
    "": {"store", "router"},
    "cpu": {"prefill", "decode"},
    "gpu": {*GPU_WORKERS},
    "redis": {"redis"},
    "observability": {"prometheus", "grafana"},
}
OWN = sorted(PROFILES[""] | PROFILES["cpu"] | PROFILES["gpu"])
NEEDED = {"store": "store", "router": "router", "prefill": "worker", "decode": "worker"}
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)(:?)-([^}]*)\}")

each_service = pytest.mark.parametrize("name", OWN)


@cache
def read(name: str = FILE) -> Node:
    """The services of a compose file."""
    return Node(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")), name)["services"]


def filled(text: str, **given: str) -> str:
    """The text with compose's ``${NAME:-default}`` and ``${NAME-default}`` replaced."""

    def value(match: re.Match[str]) -> str:
        name, colon, default = match.groups()
        return default if name not in given or (colon and not given[name]) else given[name]

    return _VARIABLE.sub(value, text)


def config_of(name: str, **given: str) -> Service:
    """What the process of a service reads from its command and its environment."""
    service = read()[name]
    command = [filled(word, **given) for word in service["command"].texts]
    environment = {key: filled(value.text, **given) for key, value in environ(service)}
    return read_service(command, environment, name)


def environ(service: Node) -> Iterator[tuple[str, Node]]:
    return service["environment"].items()


def arguments(file: str, name: str) -> dict[str, str]:
    """Of the build of a service's image, with the defaults of the Dockerfile."""
    image = read(file)[name]["image"].text
    (service,) = (
        each
        for _, each in read(file).items()
        if each["image"].text == image and each.get("build").value
    )
    defaults = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)', DOCKERFILE, re.MULTILINE))
    given = {key: value.text for key, value in service["build"]["args"].items()}
    assert given.keys() <= defaults.keys()
    return defaults | given


def steps() -> list[str]:
    """Of the last image of the Dockerfile."""
    (*_, last) = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    return [line for line in last.splitlines()[1:] if line and not line.startswith("#")]


@cache
def requirements(extra: str) -> frozenset[str]:
    """Distributions of an extra, and of the extras that it names."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found: set[str] = set()
    for line in table[extra]:
        if nested := re.fullmatch(r"kvrelay\[(.*)\]", line):
            found |= set().union(*map(requirements, nested[1].split(",")))
        else:
            found.add(re.split(r"[<>=;\[ ]", line)[0])
    return frozenset(found)


def test_profiles_start_what_they_say() -> None:
    found: dict[str, set[str]] = {}
    for name, service in read().items():
        (profile,) = service.get("profiles").texts or [""]
        found.setdefault(profile, set()).add(name)
    assert found == PROFILES


@each_service
def test_the_process_accepts_its_flags_and_variables(name: str) -> None:
    config = config_of(name)
    assert config.host == config.metrics_host == "0.0.0.0"
    assert config.allow_insecure
    known = {item.variable for kind in CONFIGS.values() for item in options(kind)}
    assert {key for key, _ in environ(read()[name])} <= known


@each_service
def test_the_health_check_asks_the_port_of_the_process(name: str) -> None:
    kind, *command, address = read()[name]["healthcheck"]["test"].texts
    assert (kind, command) == ("CMD", ["python3", "-P", "deploy/healthcheck.py"])
    assert f"COPY {command[-1]} {command[-1]}" in steps()
    assert Address.parse(address).port == config_of(name).port


def test_the_router_finds_every_worker_by_its_name() -> None:
    """Each container behind a name or an alias: scaling a service needs no other change."""
    router = config_of("router")
    assert isinstance(router, RouterConfig)
    named = {"prefill": router.prefill, "decode": router.decode}
    for name in sorted(PROFILES["cpu"] | PROFILES["gpu"]):
        config = config_of(name)
        role = role_of(read()[name]["command"][0].text)
        networks = read()[name]["networks"].value
        aliases = (
            read()[name]["networks"]["inside"]["aliases"].texts if networks != ["inside"] else []
        )
        (entry,) = named[role]
        target = dns.parse_name("decode", entry)
        assert entry.startswith(dns.SCHEME)
        assert target.host in {name, *aliases}
        assert target.port == config.port
        assert isinstance(config, WorkerConfig)
        assert config.advertise is None, "one address for every container of the service"
        assert not {"container_name", "ports", "hostname"} & dict(read()[name].items()).keys()


@pytest.mark.parametrize(
    "given", ["", "redis://redis", "kvrelay://store:50051,redis://redis?write=yes"]
)
def test_every_process_names_the_same_store(given: str) -> None:
    found = set()
    for name in OWN:
        config = config_of(name, STORE=given)
        if not isinstance(config, StoreConfig):
            found.add(config.store)
    (store,) = found
    assert store is not None
    for url in split_urls(store):
        scheme, _, rest = url.partition("://")
        host, _, port = rest.partition("?")[0].partition(":")
        assert host in dict(read().items())
        if scheme == "kvrelay":
            assert int(port) == config_of(host).port


def test_store_and_workers_share_the_folder_of_the_socket() -> None:
    store = config_of("store")
    assert isinstance(store, StoreConfig)
    assert store.shared_socket is not None
    mount = f"shared:{PurePosixPath(store.shared_socket).parent}"
    sharing = {name for name in OWN if mount in read()[name]["volumes"].texts}
    assert sharing == {*OWN} - {"router"}
    folder = mount.partition(":")[2]
    assert f"install -d -o kvrelay {folder}" in DOCKERFILE, "a new volume has the folder's owner"


def test_the_workers_of_the_cpu_divide_its_cores() -> None:
    """Otherwise each of them takes all the cores for a large model."""
    workers = {name: config_of(name) for name in sorted(PROFILES["cpu"] | PROFILES["gpu"])}
    for name, config in workers.items():
        assert isinstance(config, WorkerConfig)
        if name in PROFILES["gpu"]:
            assert (config.threads, config.shared_cores) == (None, None)
            continue
        assert (config.threads, config.shared_cores) == (None, "/run/kvrelay/cores")
        assert "shared:/run/kvrelay" in read()[name]["volumes"].texts
    more = config_of("decode", THREADS="4")
    assert isinstance(more, WorkerConfig)
    assert more.threads == 4


@each_service
def test_the_model_is_where_the_process_looks_for_it(name: str) -> None:
    config = config_of(name)
    if not isinstance(config, StoreConfig):
        (source,) = (each for each in read()[name]["volumes"].texts if each.endswith(":/model:ro"))
        assert config.model == "/model"
        assert (ROOT / filled(source).partition(":")[0] / "config.json").is_file()


def test_only_the_loopback_address_is_published() -> None:
    published = {}
    for name, service in read().items():
        for port in service.get("ports").texts:
            address, outer, inner = filled(port).split(":")
            assert address == "127.0.0.1"
            published[int(outer)] = (name, int(inner))
    router = config_of("router")
    assert isinstance(router, RouterConfig)
    assert published[HTTP_PORT] == ("router", router.http_port)
    assert published[ROUTER_PORT] == ("router", router.port)
    assert {name for name, _ in published.values()} == {"router", "prometheus", "grafana"}


def test_a_service_waits_only_for_what_always_starts() -> None:
    for name in OWN:
        waits = read()[name].get("depends_on")
        for other, row in waits.items() if waits.value else ():
            assert other in PROFILES[""]
            assert row["condition"].text == "service_healthy"
            assert read()[other]["healthcheck"]["test"].texts


# GPUs ---------------------------------------------------------------------------------------------


def test_every_worker_has_a_gpu_of_its_own_by_a_variable_of_its_own() -> None:
    """A count of one would be the first GPU for each of them."""
    found = {}
    for name in GPU_WORKERS:
        (device,) = read()[name]["deploy"]["resources"]["reservations"]["devices"]
        assert dict(device.items()).keys() == {"driver", "device_ids", "capabilities"}
        assert device["driver"].text == "nvidia"
        assert device["capabilities"].texts == ["gpu"]
        (text,) = device["device_ids"].texts
        assert filled(text, **{f"{name.upper().replace('-', '_')}_GPU": "7"}) == "7"
        found[name] = filled(text)
    assert list(found.values()) == ["0", "1", "2", "3"]


def test_nothing_else_has_a_gpu() -> None:
    for name, service in read().items():
        assert bool(service.get("deploy").value) == (name in GPU_WORKERS), name


def test_a_worker_computes_where_its_profile_says() -> None:
    """With ``auto`` a worker without its GPU would compute on the CPU, and only be slow."""
    for profile, device in (("cpu", "cpu"), ("gpu", "cuda")):
        for name in PROFILES[profile]:
            config = config_of(name)
            assert isinstance(config, WorkerConfig)
            assert config.device == device
    shared = [config_of(name) for name in PROFILES["cpu"]]
    workers = sum(read()[name]["scale"].number for name in PROFILES["cpu"])
    assert workers * max(each.kv_share for each in shared if isinstance(each, WorkerConfig)) < 1


# Images -------------------------------------------------------------------------------------------


@each_service
def test_the_image_has_what_the_process_needs(name: str) -> None:
    service = read()[name]
    role = role_of(service["command"][0].text)
    extras = arguments(FILE, name)["EXTRAS"].split()
    installed = frozenset().union(*map(requirements, extras))
    assert requirements(NEEDED[role]) <= installed
    assert ("torch" in installed) == (name not in PROFILES[""]), "store and router are small"
    assert ("triton" in installed) == (name in GPU_WORKERS)


def test_an_image_is_built_once() -> None:
    """Compose builds for each service that has a ``build``; the others wait for the image."""
    built = [read()[name]["image"].text for name in OWN if read()[name].get("build").value]
    assert sorted(built) == ["kvrelay", "kvrelay-gpu", "kvrelay-worker"]
    assert {read()[name]["image"].text for name in OWN} == {*built}
    assert {read()[name]["pull_policy"].text for name in OWN} == {"never"}


def test_an_edit_of_the_code_installs_nothing_again() -> None:
    """What is copied before the packages are installed is pyproject.toml alone."""
    lines = steps()
    install = next(at for at, line in enumerate(lines) if "uv pip install" in line)
    assert [line for line in lines[:install] if line.startswith("COPY")] == [
        "COPY pyproject.toml ./"
    ]
    assert not [line for line in lines[install + 1 :] if "pip install" in line]


def test_everything_of_the_wheel_is_in_the_image() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    lines = steps()
    for package in packages:
        assert f"COPY {package} {package}" in lines
    assert lines.index("RUN python3 -m compileall -q .") > max(
        map(lines.index, (f"COPY {p} {p}" for p in packages))
    )
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "**/*.so" in ignored, "kernels that the host compiled do not replace those of the image"
    entry = next(line for line in lines if line.startswith("ENTRYPOINT"))
    assert yaml.safe_load(entry.removeprefix("ENTRYPOINT ")) == ["python3", "-P", "-m"]


def test_only_the_image_for_gpus_has_a_compiler() -> None:
    """Triton compiles launchers with it; the kernels of the CPU come from another stage."""
    (step,) = (line for line in steps() if "gcc" in line)
    assert step.startswith('RUN case " ${EXTRAS} " in *" cuda "*) ')
    assert "libc6-dev" in shlex.split(step)
    for name in OWN:
        extras = arguments(FILE, name)["EXTRAS"].split()
        assert ("cuda" in extras) == (name in GPU_WORKERS)


# vLLM ---------------------------------------------------------------------------------------------


def test_vllm_replaces_the_workers_of_the_profile_gpu() -> None:
    assert "\nFROM ${BASE}\n" in DOCKERFILE
    over = read("deploy/vllm.yml")
    assert dict(over.items()).keys() == PROFILES["gpu"]
    for name, service in over.items():
        given = arguments("deploy/vllm.yml", name)
        assert given["EXTRAS"] == "worker-vllm"
        assert given["BASE"].startswith("vllm/vllm-openai:v0.32")
        table = {**dict(environ(read()[name])), **dict(environ(service))}
        filled_in = {key: filled(value.text) for key, value in table.items()}
        config = read_config(WorkerConfig, [], name, "", filled_in)
        assert (config.engine, config.vllm_option, config.block_size) == ("vllm", (), 32)
