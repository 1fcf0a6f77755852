"""What ``kvrelay up`` gives each process: flags, ports and environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvrelay.cli.dispatch import main
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import LEAST_POOL, environ_of, pool_bytes, process_specs
from kvrelay.cluster.process import ProcessSpec
from kvrelay.config.option import options
from kvrelay.config.reader import read
from kvrelay.errors import Rejected
from kvrelay.process.memory import HostMemory
from kvrelay.worker.config import WorkerConfig
from kvstore.config import StoreConfig
from router.config import RouterConfig


def test_a_cluster_serves_http_only_if_it_is_asked_to() -> None:
    spec = by_name(ClusterConfig(port=0))["router"]
    assert spec.http_port is None
    assert "--http-port" not in spec.args
    origins = ("https://a.example", "http://b.example:3000")
    config = ClusterConfig(port=0, http_port=0, strict_fields=True, cors_origin=origins)
    spec = by_name(config)["router"]
    given = [spec.args[at + 1] for at, one in enumerate(spec.args) if one == "--cors-origin"]
    assert tuple(given) == origins
    assert spec.args[spec.args.index("--served-model") + 1] == "recall"
    assert spec.http_port
    assert spec.args[spec.args.index("--http-port") + 1] == str(spec.http_port)
    assert "--strict-fields" in spec.args


def flags_of(spec: ProcessSpec) -> dict[str, str]:
    """Every ``--flag value`` of a process; the last one where a flag is repeated."""
    words = [word for word in spec.args if word not in ("--no-tls-mutual", "--restore")]
    return dict(zip(words[::2], words[1::2], strict=True))


def by_name(config: ClusterConfig) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in process_specs(config)}


def test_flags_are_passed_on_to_the_processes_that_have_them() -> None:
    config = ClusterConfig(
        port=0,
        prefill=2,
        decode=1,
        kv_memory=3 << 20,
        metrics_port=9100,
        log_level="debug",
        log_format="json",
        grace=25.0,
        queue_tokens=123,
        queue_seconds=4.5,
        served_model="mine",
        eviction="lru",
        store_port=14567,
    )
    specs = by_name(config)
    flags = {name: flags_of(spec) for name, spec in specs.items()}
    workers = ("prefill-0", "prefill-1", "decode-0")
    assert {name: flags[name].get("--metrics-port") for name in specs} == {
        "store": "9104",
        "prefill-0": "9101",
        "prefill-1": "9102",
        "decode-0": "9103",
        "router": "9100",
    }
    assert all(flags[name]["--log-level"] == "debug" for name in specs)
    assert all(flags[name]["--log-format"] == "json" for name in specs)
    assert all(flags[name]["--kv-memory"] == str(3 << 20) for name in workers)
    assert all(flags[name]["--served-model"] == "mine" for name in (*workers, "router"))
    assert all(flags[name]["--grace"] == "25.0" for name in (*workers, "router"))
    assert flags["router"]["--queue-tokens"] == "123"
    assert flags["router"]["--queue-seconds"] == "4.5"
    assert flags["store"]["--eviction"] == "lru"
    assert specs["store"].port == 14567
    assert all(flags[name]["--store"] == "kvrelay://127.0.0.1:14567" for name in workers)


def test_every_process_accepts_its_flags() -> None:
    config = ClusterConfig(
        port=0, kv_memory=1 << 20, metrics_port=9100, queue_seconds=1.0, grace=1.0, eviction="lru"
    )
    kinds = {"store": StoreConfig, "router": RouterConfig}
    for spec in process_specs(config):
        read(kinds.get(spec.role, WorkerConfig), spec.args, spec.name, "", {})


def test_the_router_alone_has_an_access_log() -> None:
    specs = by_name(ClusterConfig(port=0, access_log=True))
    assert {name for name, spec in specs.items() if "--access-log" in spec.args} == {"router"}
    assert "--access-log" not in by_name(ClusterConfig(port=0))["router"].args


def test_every_process_has_the_collector() -> None:
    specs = by_name(ClusterConfig(port=0, otlp_endpoint="http://h:4317", trace_ratio=0.25))
    flags = {name: flags_of(spec) for name, spec in specs.items()}
    having = {name for name in flags if flags[name].get("--otlp-endpoint") == "http://h:4317"}
    assert having == {"store", "router", "prefill-0", "decode-0"}
    assert all(flags[name]["--trace-ratio"] == "0.25" for name in having)
    assert "--trace-ratio" not in flags_of(by_name(ClusterConfig(port=0))["router"])


def test_the_ports_for_metrics_must_exist() -> None:
    with pytest.raises(Rejected, match="metrics_port: the last process would have port 65537"):
        ClusterConfig(metrics_port=65534)


OUTER = {
    "PATH": "/bin",
    "KVRELAY_METRICS_PORT": "9100",  # of the cluster: passed on as flags
    "KVRELAY_ROUTER": "h:1",  # of clients
    "KVRELAY_HEALTH_TIMEOUT": "20",
    "KVRELAY_AUDIT": "true",
    "KVRELAY_PREFAULT": "no",
    "KVRELAY_REDIS_PASSWORD": "hush",  # no option of a service
    "KVRELAY_DECODE_1_LOG_LEVEL": "debug",
    "KVRELAY_ROUTER_GRACE": "3",
}


def test_a_variable_reaches_only_the_processes_that_have_the_option() -> None:
    config = ClusterConfig(port=0, decode=2)
    found = {
        spec.name: {
            name.removeprefix("KVRELAY_")
            for name in environ_of(config, spec, OUTER)
            if name.startswith("KVRELAY_") and not name.startswith(ADDRESSED)
        }
        for spec in process_specs(config)
    }
    assert found == {
        "store": {"PREFAULT", "REDIS_PASSWORD"},
        "prefill-0": {"AUDIT", "REDIS_PASSWORD"},
        "decode-0": {"AUDIT", "REDIS_PASSWORD"},
        "decode-1": {"AUDIT", "LOG_LEVEL", "REDIS_PASSWORD"},
        "router": {"HEALTH_TIMEOUT", "GRACE", "REDIS_PASSWORD"},
    }


ADDRESSED = ("KVRELAY_DECODE_1_", "KVRELAY_ROUTER_")


def test_a_variable_for_one_child_sets_its_option() -> None:
    config = ClusterConfig(port=0, decode=2)
    specs = by_name(config)
    levels = {}
    for name in ("decode-0", "decode-1"):
        environ = environ_of(config, specs[name], OUTER)
        worker = read(WorkerConfig, specs[name].args, name, "", environ)
        levels[name] = (worker.log_level, worker.metrics_port)
    assert levels == {"decode-0": ("info", None), "decode-1": ("debug", None)}


def test_workers_do_not_share_a_journal() -> None:
    outer = {"KVRELAY_JOURNAL": "/tmp/j"}
    config = ClusterConfig(port=0)
    files = {name: environ_of(config, spec, outer) for name, spec in by_name(config).items()}
    assert files["prefill-0"]["KVRELAY_JOURNAL"] == "/tmp/j.prefill-0"
    assert files["decode-0"]["KVRELAY_JOURNAL"] == "/tmp/j.decode-0"
    assert "KVRELAY_JOURNAL" not in files["router"]
    alone = ClusterConfig(port=0, prefill=0)
    assert environ_of(alone, by_name(alone)["decode-0"], outer)["KVRELAY_JOURNAL"] == "/tmp/j"


def test_the_options_of_the_cluster_mean_what_they_mean_for_its_processes() -> None:
    """A choice or a bound that a process has must be the cluster's too: it is checked at once."""
    own = {item.name: item for item in options(ClusterConfig)}
    for kind in (StoreConfig, RouterConfig, WorkerConfig):
        for item in options(kind):
            same = own.get(item.name)
            if same is None or item.name in ("prefill", "decode", "store", "model", "host", "port"):
                continue
            assert same.rules.choices == item.rules.choices, item.name
            assert (same.rules.low, same.rules.high) == (item.rules.low, item.rules.high), item.name


GIB = 1 << 30


def test_the_workers_of_a_host_share_its_free_memory(tmp_path: Path) -> None:
    """Half of what the store and the weights leave, the same part for each worker."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(GIB)
    memory = HostMemory(total=64 * GIB, free=21 * GIB)
    config = ClusterConfig(model=str(tmp_path), device="cpu", prefill=2, decode=2, port=0)
    assert pool_bytes(config, memory) == (20 - 4) * GIB // 2 // 4
    wide = ClusterConfig(model=str(tmp_path), device="cpu", dtype="float32", port=0)
    assert pool_bytes(wide, memory) == (20 - 2 * 2) * GIB // 2 // 2
    elsewhere = ClusterConfig(model=str(tmp_path), device="cpu", store="kvrelay://h:1", port=0)
    assert pool_bytes(elsewhere, memory) == (21 - 2) * GIB // 2 // 2
    assert pool_bytes(config, HostMemory(total=64 * GIB, free=GIB)) == LEAST_POOL
    assert pool_bytes(config, None) is None
    given = ClusterConfig(model=str(tmp_path), device="cpu", kv_memory=7, port=0)
    assert pool_bytes(given, memory) == 7


def test_every_worker_gets_the_same_pool() -> None:
    specs = process_specs(ClusterConfig(port=0, prefill=2, decode=2, device="cpu"))
    pools = {flags_of(spec)["--kv-memory"] for spec in specs if spec.role in ("prefill", "decode")}
    assert len(pools) == 1


def test_each_worker_sees_one_gpu() -> None:
    """In turn, prefill workers first; those that share one share its memory."""
    config = ClusterConfig(port=0, prefill=1, decode=2, devices="3, GPU-5f")
    specs = by_name(config)
    seen = {name: spec.environ.get("CUDA_VISIBLE_DEVICES") for name, spec in specs.items()}
    assert seen == {
        **dict.fromkeys(("store", "router"), os.environ.get("CUDA_VISIBLE_DEVICES")),
        "prefill-0": "3",
        "decode-0": "GPU-5f",
        "decode-1": "3",
    }
    for name in ("prefill-0", "decode-0", "decode-1"):
        flags = flags_of(specs[name])
        assert (flags["--device"], float(flags["--kv-share"])) == ("cuda", 0.4)
        assert not specs[name].forked  # CUDA does not survive a fork
        assert "--kv-memory" not in flags


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"devices": ","}, "names no GPU"),
        ({"devices": "0,1,0"}, "twice"),
        ({"devices": "0", "device": "cpu"}, "not to cpu"),
        ({"devices": "0", "device": "cuda:1"}, "not to cuda:1"),
    ],
)
def test_gpus_that_cannot_be_meant(given: dict[str, str], reason: str) -> None:
    with pytest.raises(Rejected, match=f"devices: .*{reason}"):
        ClusterConfig(**given)  # type: ignore[arg-type]


def test_an_absent_vllm_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers died of an import after store and router had started."""
    monkeypatch.setattr("kvrelay.cluster.config.find_spec", lambda name: None)
    with pytest.raises(Rejected, match="engine: vllm is not installed here: give --vllm-python"):
        ClusterConfig(engine="vllm")


ELSEWHERE = {"store": "kvrelay://elsewhere:1"}


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"cors_origin": ("https://a.b", "*")}, "cors_origin", r"https://a.b,\*: .*--no-http"),
        ({"strict_fields": True}, "strict_fields", "yes: needs the HTTP API: give --http-port"),
        ({**ELSEWHERE, "store_budget": 1 << 30 | 1 << 20}, "store_budget", "1025MiB: .* --store"),
        ({**ELSEWHERE, "store_port": 7}, "store_port", "7: applies to the store that is started"),
        ({**ELSEWHERE, "eviction": "lru"}, "eviction", "lru: .*not to --store"),
        ({**ELSEWHERE, "store_disk": "/disk"}, "store_disk", "/disk: .*not to --store"),
        ({**ELSEWHERE, "restore": False}, "restore", "no: .*not to --store"),
        ({"restore": False}, "restore", "no: needs --store-disk"),
        ({"store_disk_budget": 1 << 20}, "store_disk_budget", "1MiB: needs --store-disk"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(
    given: dict[str, str], field: str, message: str
) -> None:
    """They were accepted: a web page, for one, was refused although its origin had been given."""
    with pytest.raises(Rejected, match=f"{field}: {message}") as caught:
        ClusterConfig(**given)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_options_of_http_without_it_are_refused_before_a_process_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["up", "--no-http", "--cors-origin", "https://a.example"]) == 2
    said = capsys.readouterr().err
    assert "cors_origin: https://a.example: needs the HTTP API" in said
    assert "leave out --no-http" in said
    with pytest.raises(Rejected, match="strict_fields: yes: needs the HTTP API"):
        RouterConfig(model="x", announce=True, strict_fields=True)


def test_vllm_workers_run_in_the_interpreter_that_has_vllm() -> None:
    """The store and the router stay in this one, and nothing forks a process that has no vLLM."""
    config = ClusterConfig(
        port=0, engine="vllm", vllm_python="/v/bin/python", vllm_option=("enforce_eager=true",)
    )
    specs = by_name(config)
    for name in ("prefill-0", "decode-0"):
        assert specs[name].python == "/v/bin/python"
        assert not specs[name].forked
        assert flags_of(specs[name])["--engine"] == "vllm"
        assert flags_of(specs[name])["--vllm-option"] == "enforce_eager=true"
    assert specs["router"].python is specs["store"].python is None
    with pytest.raises(Rejected, match="engine"):
        ClusterConfig(vllm_python="/v/bin/python")
