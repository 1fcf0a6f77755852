"""deploy/kubernetes against the programs: flags, variables, ports, probes, files, rules."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from kvrelay.cluster.layout import CONFIGS
from kvrelay.config.option import options
from kvrelay.config.reader import read as read_config
from kvrelay.rpc.address import Address
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.worker.config import WorkerConfig
from kvstore.config import StoreConfig
from kvstore.main import GRACE_SECONDS
from router.config import RouterConfig
from router.workers import dns
from tests.deploy import manifests
from tests.deploy.manifests import Node
from tests.deploy.rig import ROOT, exported
from tests.deploy.services import DOCKERFILE, Service, read_service

PODS = manifests.pods()
FIELDS = {"status.podIP": "10.1.2.3"}

each_pod = pytest.mark.parametrize("name", PODS)


def environment(name: str) -> dict[str, str]:
    """Of the container: what its map gives it, and what is written in it."""
    found = manifests.container(PODS[name])
    maps = manifests.of_kind("ConfigMap")
    given: dict[str, str] = {}
    for each in found.get("envFrom"):
        table = maps[each["configMapRef"]["name"].text]["data"]
        given |= {key: value.text for key, value in table.items()}
    return given


def arguments(container: Node) -> list[str]:
    """With what ``env`` says of the pod and of the container's resources filled in."""
    known = {}
    for each in container.get("env"):
        if not each.get("valueFrom").value:
            continue
        ((kind, source),) = each["valueFrom"].items()
        if kind == "fieldRef":
            value = FIELDS[source["fieldPath"].text]
        else:
            part, _, resource = source["resource"].text.partition(".")
            value = container["resources"][part][resource].text
        known[each["name"].text] = value
    words = container["args"].texts
    return [re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], word) for word in words]


def config_of(name: str) -> Service:
    """What the process in a container reads from its arguments and environment."""
    return read_service(arguments(manifests.container(PODS[name])), environment(name), name)


def ports_of(config: Service) -> dict[str, int | None]:
    ports = {"grpc": config.port, "metrics": config.metrics_port}
    return {**ports, "http": config.http_port} if isinstance(config, RouterConfig) else ports


def listening(name: str) -> dict[str, int]:
    """Ports of the container, by name."""
    rows = manifests.container(PODS[name])["ports"]
    return {row["name"].text: row["containerPort"].number for row in rows}


def mounts(name: str) -> dict[str, Node]:
    """The volume at each path."""
    spec = PODS[name]["spec"]
    volumes = {each["name"].text: each for each in spec["volumes"]}
    owner = manifests.of_kind(*manifests.WORKLOADS)[name]["spec"]
    volumes |= {each["metadata"]["name"].text: each for each in owner.get("volumeClaimTemplates")}
    rows = manifests.container(PODS[name])["volumeMounts"]
    return {row["mountPath"].text: volumes[row["name"].text] for row in rows}


def test_every_file_is_applied() -> None:
    (kustomization,) = manifests.read("kustomization.yaml")
    files = {path.name for path in manifests.FOLDER.glob("*.yaml")}
    assert files == {*kustomization["resources"].texts, "kustomization.yaml", "adapter.yaml"}
    assert set(PODS) == {"store", "prefill", "decode", "router"}


@each_pod
def test_the_process_accepts_its_flags_and_listens_for_other_machines(name: str) -> None:
    config = config_of(name)
    assert config.host == config.metrics_host == "0.0.0.0"
    assert config.log_format == "json"
    assert not config.allow_insecure


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_worker_has_as_many_threads_as_cores_are_kept_for_it(name: str) -> None:
    """By itself it would take the cores of the node's other pods, too."""
    config = config_of(name)
    assert isinstance(config, WorkerConfig)
    requests = manifests.container(PODS[name])["resources"]["requests"]
    assert str(config.threads) == requests["cpu"].text


@each_pod
def test_every_variable_is_an_option(name: str) -> None:
    known = {item.variable for kind in CONFIGS.values() for item in options(kind)}
    assert environment(name).keys() <= known
    assert PODS[name]["spec"]["enableServiceLinks"].value is False, "would set KVRELAY_..._PORT"


@each_pod
def test_the_ports_are_those_of_the_process(name: str) -> None:
    assert listening(name) == ports_of(config_of(name))


@each_pod
def test_the_image_is_the_one_that_is_built(name: str) -> None:
    (kustomization,) = manifests.read("kustomization.yaml")
    images = [image["name"].text for image in kustomization["images"]]
    assert images == ["kvrelay", "kvrelay-worker"]
    worker = isinstance(config_of(name), WorkerConfig)
    assert manifests.container(PODS[name])["image"].text == images[worker]
    uid = re.search(r"useradd .*--uid (\d+)", DOCKERFILE)
    assert uid is not None
    context = PODS[name]["spec"]["securityContext"]
    assert context["runAsUser"].number == int(uid[1])
    assert context["runAsNonRoot"].value is True


def probes(name: str) -> Iterator[Node]:
    found = manifests.container(PODS[name])
    return (found[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe"))


@each_pod
def test_probes_ask_what_the_process_answers(name: str) -> None:
    config = config_of(name)
    pages = set(re.findall(r'route\("(/\w+)", "GET"', (ROOT / "router/http/app.py").read_text()))
    for probe in probes(name):
        table = dict(probe.items())
        if "exec" in table:
            *command, address = table["exec"]["command"].texts
            assert command == ["python3", "-P", "deploy/healthcheck.py"]
            assert f"COPY {command[-1]}" in DOCKERFILE
            assert Address.parse(address).port == config.port
        elif "httpGet" in table:
            assert table["httpGet"]["path"].text in pages
            assert table["httpGet"]["scheme"].text == "HTTPS"
            assert table["httpGet"]["port"].text in listening(name)
            assert not config.tls_mutual, "kubelet has no certificate"
        else:
            assert table["tcpSocket"]["port"].text in listening(name)


@each_pod
def test_files_of_the_process_are_mounted(name: str) -> None:
    config, found = config_of(name), mounts(name)
    (kustomization,) = manifests.read("kustomization.yaml")
    secrets = {
        each["name"].text: {PurePosixPath(file).name for file in each["files"].texts}
        for each in kustomization["secretGenerator"]
    }
    for path in (config.tls_cert, config.tls_key, config.tls_ca, config.credentials):
        assert path is not None
        file = PurePosixPath(path)
        assert file.name in secrets[found[str(file.parent)]["secret"]["secretName"].text]
    folder = config.disk if isinstance(config, StoreConfig) else config.model
    assert folder in found
    assert kustomization["generatorOptions"]["disableNameSuffixHash"].value is True


@each_pod
def test_a_process_has_time_to_drain(name: str) -> None:
    config, found = config_of(name), manifests.container(PODS[name])
    if isinstance(config, StoreConfig):
        needed = GRACE_SECONDS + config.flush_seconds
    else:
        *_, seconds = found["lifecycle"]["preStop"]["exec"]["command"].texts
        needed = float(seconds) + config.grace
    assert PODS[name]["spec"]["terminationGracePeriodSeconds"].number >= needed + 10


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_worker_has_the_name_in_its_metrics_that_routers_have_for_it(name: str) -> None:
    config = config_of(name)
    assert isinstance(config, WorkerConfig)
    assert config.advertise == f"{FIELDS['status.podIP']}:{config.port}"


def test_services_lead_to_ports_of_pods() -> None:
    for name, service in manifests.of_kind("Service").items():
        selector = {key: value.text for key, value in service["spec"]["selector"].items()}
        (pod,) = (pod for pod in PODS if selector.items() <= manifests.labels_of(PODS[pod]).items())
        assert pod == name
        for port in service["spec"]["ports"]:
            assert listening(pod)[port["targetPort"].text] == port["port"].number


def test_processes_name_services_that_exist() -> None:
    router = config_of("router")
    assert isinstance(router, RouterConfig)
    services = manifests.of_kind("Service")
    named = [each.removeprefix(dns.SCHEME) for each in (*router.prefill, *router.decode)]
    for name in ("router", "prefill", "decode"):
        config = config_of(name)
        assert isinstance(config, RouterConfig | WorkerConfig)
        assert config.store is not None
        assert config.store.startswith("kvrelays://")
        named.append(config.store.removeprefix("kvrelays://"))
    for target in named:
        host, port = target.split(":")
        assert int(port) in {each["port"].number for each in services[host]["spec"]["ports"]}
        assert services[host]["spec"]["clusterIP"].text == "None", "each pod has an address"


def allowed(source: str | None, target: str) -> set[str]:
    """The ports of a pod that another pod, or a client outside (``None``), may connect to."""
    found: set[str] = set()
    for policy in manifests.of_kind("NetworkPolicy").values():
        if not manifests.selects(policy["spec"]["podSelector"], manifests.labels_of(PODS[target])):
            continue
        for rule in policy["spec"]["ingress"]:
            peers = [each for each in rule.get("from") if "podSelector" in dict(each.items())]
            anyone = not rule.get("from").value
            if anyone or any(source and _matches(each, source) for each in peers):
                found |= {port["port"].text for port in rule["ports"]}
    return found


def _matches(peer: Node, source: str) -> bool:
    return manifests.selects(peer["podSelector"], manifests.labels_of(PODS[source]))


def test_only_who_must_may_connect() -> None:
    workers = ("prefill", "decode")
    expected: dict[tuple[str | None, str], set[str]] = {
        **{("router", worker): {"grpc"} for worker in workers},
        **{(each, "store"): {"grpc"} for each in ("router", *workers)},
        **{(each, "router"): {"http", "grpc"} for each in (None, "store", *workers)},
        ("router", "router"): {"http", "grpc"},
    }
    pairs = [(source, target) for source in (None, *PODS) for target in PODS]
    assert {pair: allowed(*pair) for pair in pairs if allowed(*pair)} == expected


def test_budgets_and_autoscalers_are_of_what_exists() -> None:
    (rules,) = manifests.read("adapter.yaml")
    metrics = {each["name"]["as"].text for each in rules["external"]}
    asked: set[str] = set()
    for name, scaler in manifests.of_kind("HorizontalPodAutoscaler").items():
        target = scaler["spec"]["scaleTargetRef"]
        deployment = manifests.of_kind(target["kind"].text)[target["name"].text]
        assert target["name"].text == name
        assert "replicas" not in dict(deployment["spec"].items()), "an apply would undo its number"
        assert scaler["spec"]["minReplicas"].number >= 2
        asked |= {each["external"]["metric"]["name"].text for each in scaler["spec"]["metrics"]}
    assert asked == metrics
    for name, budget in manifests.of_kind("PodDisruptionBudget").items():
        labels = manifests.labels_of(PODS[name])
        assert manifests.selects(budget["spec"]["selector"], labels)


def test_autoscalers_ask_for_what_is_exported() -> None:
    known = asyncio.run(exported())
    (rules,) = manifests.read("adapter.yaml")
    for rule in rules["external"]:
        for query in (rule["seriesQuery"].text, rule["metricsQuery"].text):
            assert not list(known.problems(query)), query


def test_the_probes_of_pods_have_the_certificates() -> None:
    """The health check reads its options from the environment alone."""
    made = read_config(SecurityOptions, [], "healthcheck", "", environment("store"))
    assert made.tls_cert is not None
    assert made.tls_name == "kvrelay"


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_workers_over_vllm_are_patched_workers(name: str) -> None:
    """The process accepts its flags; what it writes has a volume; nothing else differs."""
    plain, made = PODS[name], manifests.with_vllm()[name]["spec"]["template"]
    found, before = manifests.container(made), manifests.container(plain)
    config = read_service(arguments(found), environment(name), name)
    assert isinstance(config, WorkerConfig)
    assert (config.engine, config.block_size) == ("vllm", 32)
    known = {name: value.value for name, value in before.items()}
    changed = {key for key, value in found.items() if known[key] != value.value}
    assert changed == {"args", "env", "resources", "volumeMounts"}
    assert found["resources"]["limits"]["nvidia.com/gpu"].number == 1
    volumes = {each["name"].text: each for each in made["spec"]["volumes"]}
    mounted = {each["mountPath"].text: each["name"].text for each in found["volumeMounts"]}
    assert volumes.keys() == set(mounted.values())
    assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"].text == "Memory"
    folders = [each["value"].text for each in found["env"] if "value" in dict(each.items())]
    assert {folder.split("/")[1] for folder in folders} == {mounted["/cache"]}


def test_the_image_of_vllm_replaces_that_of_workers() -> None:
    overlay = manifests.overlay()
    (image,) = overlay["images"]
    (kustomization,) = manifests.read("kustomization.yaml")
    workers = {each["newName"].text for each in kustomization["images"]}
    assert image["name"].text in workers
    text = manifests.VLLM.read_text(encoding="utf-8")
    assert f"-t {image['newName'].text.rpartition('/')[2]} " in text
    assert overlay["resources"].texts == [f"../{manifests.FOLDER.name}"]
    for argument in re.findall(r"--build-arg (\w+)=", text):
        assert f"ARG {argument}" in DOCKERFILE
