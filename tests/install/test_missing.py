"""What is missing is said by name, with the line that installs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.stub_server import stub
from kvrelay import installation
from kvrelay.cli.dispatch import main
from kvrelay.installation import CLUSTER, EXTRAS
from tests.house.test_dependencies import declared
from tests.install.conftest import Installed

COMMANDS = {
    ("up",): ("all", CLUSTER),
    ("demo",): ("all", CLUSTER),
    ("replay", "journal"): ("worker", ("worker",)),
    ("store", "stats"): ("store", ("store",)),
    ("make-certs", "certs"): ("certs", ("certs",)),
    ("load",): ("load", ("load",)),
    ("conform", "http://127.0.0.1:9"): ("load", ("load",)),
}
SERVICES = {
    "kvstore": "store",
    "router": "router",
    "prefill_service": "worker",
    "decode_service": "worker",
}


def lacks(*extras: str) -> set[str]:
    return {name for extra in extras for name in EXTRAS[extra].values()} - declared()


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_names_it(client_only: Installed, tmp_path: Path, words: tuple[str, ...]) -> None:
    extra, needed = COMMANDS[words]
    done = client_only.run(client_only.kvrelay, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"kvrelay {words[0]}: ")
    assert f"pip install 'kvrelay[{extra}]'" in done.stderr
    assert all(name in done.stderr for name in lacks(*needed))


def test_the_load_generator_needs_one_extra(load_only: Installed, tmp_path: Path) -> None:
    """But for a reference of ``transformers``."""
    with stub() as server:
        words = (load_only.kvrelay, "load", server.url, "--requests", "4")
        done = load_only.run(*words, "--check", "first-run", "--html", "load.html", cwd=tmp_path)
        assert (done.returncode, server.requests) == (0, 8), done.stdout + done.stderr
        done = load_only.run(*words, "--check", "transformers:model", cwd=tmp_path)
        assert (done.returncode, server.requests) == (1, 8)
        assert "pip install 'kvrelay[worker]'" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        words = (load_only.kvrelay, "conform", server.url, "--check", "repeat")
        done = load_only.run(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", SERVICES)
def test_a_service_names_it(client_only: Installed, tmp_path: Path, module: str) -> None:
    done = client_only.run(client_only.python, "-P", "-m", module, cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"pip install 'kvrelay[{SERVICES[module]}]'" in done.stderr
    assert all(name in done.stderr for name in lacks(SERVICES[module]))


def test_what_pip_installed_from_a_folder_is_installed_from_there_again(
    client_only: Installed, tmp_path: Path
) -> None:
    """pip would find nothing by the name alone."""
    told = json.dumps({"url": tmp_path.as_uri(), "dir_info": {}})
    program = f"""if True:
        import importlib.metadata
        importlib.metadata.Distribution.read_text = lambda *given: {told!r}
        importlib.metadata.PathDistribution.read_text = lambda *given: {told!r}
        from kvrelay import installation as it
        print(it.install_line("store"))
    """
    done = client_only.run(client_only.python, "-c", program, cwd=tmp_path.parent)
    assert done.stdout.rstrip().endswith(f"pip install '{tmp_path}[store]'"), done.stderr


def test_an_environment_without_pip_is_filled_by_uv(client_only: Installed, tmp_path: Path) -> None:
    """As uv makes them. In the folder of the commands too, what is printed can be typed."""
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    folder, program = client_only.python.parent, "from kvrelay import installation as it; print("
    program += "it.install_line('store'), it.command('up'), sep='\\n')"
    done = client_only.run("env", f"PATH={tmp_path}", client_only.python, "-c", program, cwd=folder)
    assert done.stdout.splitlines() == [
        "uv pip install --python ./python 'kvrelay[store]'",
        "./kvrelay up",
    ]


@pytest.mark.parametrize("words", COMMANDS)
def test_its_help_is_not_refused(
    client_only: Installed, tmp_path: Path, words: tuple[str, ...]
) -> None:
    extra, _ = COMMANDS[words]
    done = client_only.run(client_only.kvrelay, *words, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith(f"usage: kvrelay {words[0]} ")
    assert f"pip install 'kvrelay[{extra}]'" in done.stdout


@pytest.mark.parametrize("module", SERVICES)
def test_help_of_a_service_is_not_refused(
    client_only: Installed, tmp_path: Path, module: str
) -> None:
    done = client_only.run(client_only.python, "-P", "-m", module, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith(f"usage: python -m {module} ")
    assert f"pip install 'kvrelay[{SERVICES[module]}]'" in done.stdout


def test_doctor_of_a_client_says_what_else_can_be_installed(
    client_only: Installed, tmp_path: Path
) -> None:
    done = client_only.run(client_only.kvrelay, "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert told["ok"]
    findings = {one["name"]: one for one in told["findings"]}
    assert all(one["state"] != "missing" for one in findings.values())
    for extra in (*CLUSTER, "certs", "load", "otel", "worker-vllm"):
        assert findings[f"[{extra}]"]["state"] == "absent"
        assert f"pip install 'kvrelay[{extra}]'" in findings[f"[{extra}]"]["means"]
        assert all(name in findings[f"[{extra}]"]["found"] for name in lacks(extra))
    page = client_only.run(client_only.kvrelay, "doctor", cwd=tmp_path)
    assert page.returncode == 0
    assert page.stdout.count("pip install") == 8  # of each extra, and of all
    assert "pip install 'kvrelay[all]'" in page.stdout.splitlines()[-1]
    assert "demo" not in page.stdout


def test_doctor_names_what_a_cluster_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Services were installed here, and none of them is complete."""
    found = installation._found
    monkeypatch.setattr(installation, "_found", lambda module: module != "xxhash" and found(module))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    for extra in CLUSTER:
        (line,) = [line for line in lines if f" [{extra}] " in line]
        assert line.startswith("! ")
        assert "not installed: xxhash; " in line
        assert f"[{extra}]'" in line.split("pip install")[1]
    assert lines[-1] == "Missing: [router], [store], [worker]."


TORCHES = {
    "works": (
        "import types; cuda = types.SimpleNamespace(is_available=lambda: False)\n"
        "version = types.SimpleNamespace(cuda=None)\n",
        ("absent", "no GPU"),
    ),
    "broken": ("raise OSError('libcudart.so: no such file')\n", ("missing", "libcudart.so")),
}


@pytest.mark.parametrize("kind", TORCHES)
def test_doctor_of_a_client_beside_a_torch(
    client_only: Installed, tmp_path: Path, kind: str
) -> None:
    """Which does not make it a worker: packages that a worker needs are still missing."""
    text, (state, found) = TORCHES[kind]
    (tmp_path / "torch.py").write_text(text)
    words = ("env", f"PYTHONPATH={tmp_path}", client_only.kvrelay, "doctor", "--json")
    done = client_only.run(*words, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert findings["devices"]["state"] == state
    assert found in findings["devices"]["found"]
    assert findings["[worker]"]["state"] == "absent"
    assert done.returncode == (state == "missing")


def test_doctor_asked_for_a_vllm_says_what_it_is(client_only: Installed, tmp_path: Path) -> None:
    """It is that of another environment, so nothing of a cluster must be installed here."""
    words = ("doctor", "--json", "--vllm-python", tmp_path / "python")
    done = client_only.run(client_only.kvrelay, *words, cwd=tmp_path)
    assert done.returncode == 1
    (found,) = [one for one in json.loads(done.stdout)["findings"] if one["name"] == "vllm"]
    assert found["state"] == "missing"
    assert str(tmp_path / "python") in found["found"]


def test_doctor_asked_for_a_store_names_it(client_only: Installed, tmp_path: Path) -> None:
    url = "kvrelay://127.0.0.1:1"
    done = client_only.run(client_only.kvrelay, "doctor", "--store", url, cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'kvrelay[store]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_missing_where_all_is_installed(with_all: Installed, tmp_path: Path) -> None:
    done = with_all.run(with_all.kvrelay, "doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert f"Try: {with_all.kvrelay} demo" in done.stdout, "this is no clone, and not on the path"
    for service in ("kvstore", "router"):  # a worker imports torch first
        page = with_all.run(with_all.python, "-P", "-m", service, "--help", cwd=tmp_path)
        assert page.returncode == 0, page.stderr
