"""The command line without a cluster: help, errors, exit statuses, closed pipes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import make_model
from benchmarks import random_model as kvrelay_make_model
from kvrelay.cli import commands
from kvrelay.cli.demo.command import next_commands
from kvrelay.cli.dispatch import COMMANDS, main
from kvrelay.cli.store import command as store
from kvrelay.cli.up import UpConfig, _check
from kvrelay.cluster import endpoints
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.ports import free_ports
from kvrelay.engine.attention.native.library import (
    FORCED,
    FORCED_PRODUCTS,
    MULTIPLIED,
    load_kernel,
    products_of,
)
from kvrelay.engine.attention.native.products import Products
from kvrelay.errors import NotFound, Rejected
from kvrelay.installation import command

NAMES = [command.name for command in COMMANDS]
LEAVES: list[tuple[str, ...]] = [(name,) for name in NAMES if name != "store"]
LEAVES += [("store", command.name) for command in store.COMMANDS]


def kvrelay(*argv: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvrelay", *argv],
        cwd=ROOT,
        input=stdin if stdin is not None else b"",
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_the_page_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(name in page for name in NAMES)
    assert main([]) == 2
    assert main(["--version"]) == 0


@pytest.mark.parametrize("columns", [80, 132])
@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_has_a_page(
    words: tuple[str, ...],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    page = capsys.readouterr().out
    assert ended.value.code == 0
    assert page.startswith(f"usage: kvrelay {' '.join(words)} ")
    assert max(map(len, page.splitlines())) <= min(columns, 100)


def test_a_page_names_no_variable_that_is_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["conform", "--help"])
    page = " ".join(capsys.readouterr().out.split())
    assert "Every option but --model, --restart-command can be set in the environment:" in page


@pytest.mark.parametrize("words", [("bench",), ("make-model",), ("store", "bench")], ids=" ".join)
def test_a_wheel_says_where_the_benchmarks_are(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "clone_root", lambda: None)
    assert main([*words, "--help"]) == 1
    said = capsys.readouterr().err
    assert "clone kvrelay's repository" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_a_wrong_flag_is_one_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--no-such-flag"])
    line = capsys.readouterr().err
    assert ended.value.code == 2
    assert line.count("\n") == 1
    assert line.startswith(f"kvrelay {' '.join(words)}: ")


def test_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--help"]) == 0
    page = capsys.readouterr().out
    assert all(command.name in page for command in store.COMMANDS)
    assert main(["store"]) == 2
    assert main(["store", "simulat"]) == 2
    assert "did you mean simulate?" in capsys.readouterr().err


def test_an_unknown_command_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate"]) == 2
    assert "did you mean generate?" in capsys.readouterr().err
    assert main(["xyzzy"]) == 2
    assert "there are demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (("generate", "a", "--token-ids", "1"), 2, "token_ids: cannot be given together"),
        (("generate", "a", "--system", "b"), 2, "system: needs --chat"),
        (("generate", "--endpoints", "/no/such"), 1, "cannot read /no/such"),
        (("generate", "a", "--max-tokens", "0"), 2, "max_tokens: 0 (from --max-tokens)"),
        (("generate", "a", "--router", "foo"), 2, "router: must be HOST:PORT or unix:PATH"),
        (("replay", "/no/such"), 2, "kvrelay replay: /no/such: No such file or directory"),
        (("store", "ls", "--store", "redis://127.0.0.1:1"), 1, "nothing listens at 127.0.0.1:1"),
        (("up", "--store", "memory://"), 2, "store: memory:// belongs to one process"),
        (
            ("up", "--store", "kvrelay://h:1,memory://"),
            2,
            "store: memory:// belongs to one process",
        ),
        (("up", "--dtype", "foo"), 2, "dtype: 'foo' (from --dtype): choose one of auto, float32"),
        (("up", "--device", "cuda:x"), 2, "device: 'cuda:x' (from --device): choose one of auto"),
        (("up", "--attention-backend", "foo"), 2, "attention_backend: 'foo' (from"),
        (("demo", "--kill", "prefill", "--prefill", "0"), 2, "kill: 'prefill' needs --prefill"),
        (("bench", "--only", "x"), 2, "only: no part 'x'"),
        (
            ("make-model", "--shape", "nope", "--out", "out"),
            2,
            "shape: 'nope' (from",
        ),
    ],
)
def test_errors_name_the_field(
    argv: Sequence[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status(argv) == status
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said


def _status(argv: Sequence[str]) -> str | int | None:
    try:
        return main(list(argv))
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--store", "kvrelay://127.0.0.1:9?transport=foo"), b"transport: 'foo' is none of"),
        (("--store", "127.0.0.1:1"), b"store: '127.0.0.1:1': has none of the schemes"),
        (("--endpoints", "/nonexist/x.json"), b"there is no folder /nonexist"),
        (("--endpoints", str(ROOT)), b"it is a folder"),
        (("--host", "0.0.0.0"), b"host: 0.0.0.0:0 can be reached by other machines, and the"),
    ],
)
def test_up_refuses_before_it_starts(flags: tuple[str, ...], said: bytes) -> None:
    done = kvrelay("up", "--port", "0", *flags)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1, done.stderr
    assert said in done.stderr
    assert b"Starting" not in done.stderr


def test_up_takes_the_script_of_a_mock(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"lookups": {"*": [0]}}')
    _check(UpConfig(store=f"mock:{script}"))
    script.write_text('{"store": "kvrelay://127.0.0.1:9?transport=foo"}')
    with pytest.raises(Rejected, match="foo"):
        _check(UpConfig(store=f"mock:{script}"))


def test_help_names_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help", "generate"], ["help", "store", "ls"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: kvrelay {' '.join(words[1:])} ")
    assert main(["help", "genrate"]) == 2


def test_a_url_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    url = "kvrelay://127.0.0.1:x"
    assert main(["store", "stats", "--store", url]) == 1
    assert capsys.readouterr().err.count(url) == 1
    assert main(["doctor", "--store", url]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if f"! store {url}" in line]
    assert line.count(url) == 1


def test_make_certs_says_what_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    folder = tmp_path / "my certs"
    assert main(["make-certs", str(folder)]) == 0
    hints = capsys.readouterr().out.splitlines()[1:]
    assert [hint.split(" --tls")[0] for hint in hints] == [
        f"  {command('up')}",
        f"  {command('generate')}",
    ]
    for hint, own in zip(hints, ("credentials.toml", "client.toml"), strict=True):
        words = shlex.split(hint)
        flags = ("--tls-cert", "--tls-key", "--tls-ca", "--credentials")
        files = [Path(words[words.index(flag) + 1]) for flag in flags]
        assert files == [folder / name for name in ("cert.pem", "key.pem", "ca.pem", own)]
        assert all(file.is_file() for file in files)


def test_what_the_demo_says_last_fits_a_terminal() -> None:
    """A path of a long name may not: it is typed as it is."""
    lines = [line for line in next_commands() if command() not in line]
    assert all(len(line) <= 80 for line in lines), lines


def test_every_shape_can_be_made_by_name() -> None:
    assert set(make_model.SHAPES) == set(kvrelay_make_model.SHAPES)


def test_without_a_router_the_error_is_one_line_and_status_1() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    done = kvrelay("generate", "hello", "--router", address, "--timeout", "5")
    assert done.returncode == 1
    line = done.stderr.decode()
    assert line.count("\n") == 1
    assert line.startswith(f"kvrelay generate: nothing listens at {address}: start a cluster with ")
    assert "--router" in line


def test_standard_input_must_be_text() -> None:
    done = kvrelay("generate", stdin=b"\xff\xfe")
    assert done.returncode == 2
    assert b"is not UTF-8" in done.stderr


def test_doctor_finds_what_the_tests_run_on() -> None:
    done = kvrelay("doctor", "--json")
    found = json.loads(done.stdout)
    states = {finding["name"]: finding["state"] for finding in found["findings"]}
    assert states["python"] == states["torch"] == states["attention"] == "ok"
    assert (done.returncode == 0) is found["ok"]


@pytest.mark.parametrize("dtype", MULTIPLIED)
def test_doctor_says_what_multiplies(
    dtype: torch.dtype, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default what a worker uses; what was asked for in vain is named."""
    products = products_of(dtype)
    if isinstance(products, Products):
        usual = ("ok", products.summary)
    else:
        usual = ("absent" if products.notable else "ok", products.reason)
    said = {"": usual, "mkl": ("absent", f"{FORCED_PRODUCTS}: 'mkl'")}
    name = str(dtype).removeprefix("torch.")
    for forced, (state, found) in said.items():
        monkeypatch.setenv(FORCED_PRODUCTS, forced)
        findings = json.loads(kvrelay("doctor", "--json").stdout)["findings"]
        (finding,) = [each for each in findings if each["name"] == name]
        assert finding["state"] == state
        assert found in finding["found"]


def test_doctor_says_which_attention_kernel_is_here_or_why_none(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(kvrelay("doctor", "--json").stdout)["findings"]
    (kernel,) = [finding for finding in found if finding["name"] == "native kernel"]
    assert (kernel["state"], kernel["found"]) == ("ok", load_kernel().summary)
    monkeypatch.setenv(FORCED, "sse9")
    found = json.loads(kvrelay("doctor", "--json").stdout)["findings"]
    (kernel,) = [finding for finding in found if finding["name"] == "native kernel"]
    assert kernel["state"] == "absent"
    assert f"{FORCED}: 'sse9' is not one of" in kernel["found"]
    refusal = "workers on the CPU refuse to start, except with --attention-backend sdpa"
    assert kernel["means"] == refusal


def test_doctor_ignores_a_switch_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_AUDIT", "true")
    assert json.loads(kvrelay("doctor", "--json").stdout)["findings"]


def test_a_closed_pipe_leaves_no_trace() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvrelay", "doctor"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as popen:
        assert popen.stdout is not None
        assert popen.stderr is not None
        popen.stdout.close()
        assert popen.stderr.read() == b""
    assert popen.returncode == 141


def test_doctor_and_top_name_the_processes_that_keep_dying(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "up.json"
    entry = {"name": "decode-0", "address": "127.0.0.1:2", "pid": 7, "failing": None}
    failing = {**entry, "name": "router", "pid": None, "failing": "was killed by SIGKILL, 9 times"}
    content = {"pid": os.getpid(), "router": "127.0.0.1:1", "processes": [entry, failing]}
    endpoints.write(path, content)
    assert main(["doctor", "--endpoints", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "+ decode-0       process 7 at 127.0.0.1:2" in shown
    assert "! router         was killed by SIGKILL, 9 times" in shown
    assert main(["top", "--once", "--endpoints", str(path)]) == 1
    assert "router 127.0.0.1:2: was killed by SIGKILL, 9 times" in capsys.readouterr().out
    with subprocess.Popen(["true"]) as ended:
        pass
    endpoints.write(path, {**content, "pid": ended.pid})
    with pytest.raises(NotFound, match="has ended"):
        endpoints.processes_of(path)
    endpoints.write(path, {"pid": 1, "processes": [{"name": "store"}]})
    with pytest.raises(Rejected, match="names no processes"):
        endpoints.processes_of(path)


def test_endpoints_are_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "up.json"
    endpoints.write(path, {"router": "127.0.0.1:1"})
    assert endpoints.router_of(path) == "127.0.0.1:1"
    assert [found.name for found in tmp_path.iterdir()] == ["up.json"]
    path.write_text("{")
    with pytest.raises(Rejected, match="is not JSON"):
        endpoints.router_of(path)
    path.write_text("[]")
    with pytest.raises(Rejected, match="names no router"):
        endpoints.router_of(path)
    endpoints.remove(path)
    with pytest.raises(NotFound, match="is a cluster up"):
        endpoints.router_of(path)
    with pytest.raises(Rejected, match="cannot write"):
        endpoints.write(tmp_path / "no" / "up.json", {})
