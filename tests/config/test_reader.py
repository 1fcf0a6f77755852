"""A configuration from flags, environment, file and defaults, and its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrelay.config.reader import check, load, option, read, required
from kvrelay.config.values import boolean, show_size, size
from kvrelay.errors import Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Every kind of field."""

    model: str = required(str, "a directory", metavar="DIR")
    port: int = option(1, "a port", low=0, high=65535)
    budget: int = option(2**30, "memory", unit="bytes", low=1024)
    wait: float = option(1.5, "patience", unit="seconds", low=0)
    dtype: str = option("auto", "format", choices=("auto", "float32"))
    worker: tuple[str, ...] = option((), "an address")
    ids: tuple[int, ...] = option((), "token ids", low=0)
    store: str | None = option(None, "a URL")
    chat: bool = option(False, "as chat")
    kill: bool = option(True, "do not kill")

    def __post_init__(self) -> None:
        if self.chat and self.store is not None:
            raise Rejected("chat", "cannot be given together with store")


def parse(*argv: str, environ: Mapping[str, str] | None = None) -> Sample:
    return read(Sample, ["--model", "m", *argv], "sample", "A sample.", environ or {})


def test_defaults() -> None:
    assert parse() == Sample(model="m")


def test_every_kind_of_flag() -> None:
    made = parse(
        *("--port", "7", "--budget=2MiB", "--wait", "0.25", "--dtype", "float32"),
        *("--worker", "a:1", "--worker", "b:2", "--ids", "1,2", "--ids", "3"),
        *("--store", "memory://", "--no-kill"),
    )
    assert made == Sample(
        model="m",
        port=7,
        budget=2 << 20,
        wait=0.25,
        dtype="float32",
        worker=("a:1", "b:2"),
        ids=(1, 2, 3),
        store="memory://",
        kill=False,
    )


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('port = 2\nbudget = "3MiB"\nwait = 4\nworker = ["f:1"]\nkill = false\n')
    environ = {"KVRELAY_PORT": "3", "KVRELAY_BUDGET": "4MiB", "KVRELAY_WORKER": "e:1, e:2"}
    made = parse("--port", "4", "--config", str(file), environ=environ)
    assert (made.port, made.budget, made.wait) == (4, 4 << 20, 4.0)
    assert (made.worker, made.kill) == (("e:1", "e:2"), False)
    by_environ = parse(environ={"KVRELAY_CONFIG": str(file)})
    assert (by_environ.port, by_environ.worker) == (2, ("f:1",))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], "port: 70000 (from --port): must be between 0 and 65535"),
        (["--port", "x"], "port: 'x' (from --port): expected a whole number"),
        (["--budget", "1"], "budget: 1 (from --budget): must be at least 1KiB"),
        (["--budget", "big"], "budget: 'big' (from --budget): expected a size"),
        (["--wait", "nan"], "wait: 'nan' (from --wait): expected a finite number"),
        (["--dtype", "int3"], "dtype: 'int3' (from --dtype): choose one of auto, float32"),
        (["--ids", "1,,2"], "ids: '' (from --ids): expected a whole number"),
        (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["--port"], "argument --port: expected one argument"),
        (["more"], "unexpected argument 'more'"),
        (["--config", "/no/such"], "config: cannot read /no/such: No such file"),
        (["--chat", "--store", "s"], "chat: cannot be given together with store"),
    ],
)
def test_an_error_is_one_line_and_status_2(
    argv: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Sample, ["--model", "m", *argv], "sample", "A sample.", {})
    line = capsys.readouterr().err
    assert ended.value.code == 2
    assert line.startswith("sample: ")
    assert line.count("\n") == 1
    assert words in line


def test_errors_name_where_the_value_stood(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="from KVRELAY_PORT"):
        parse(environ={"KVRELAY_PORT": "-1"})
    file = tmp_path / "c.toml"
    file.write_text("port = -1")
    with pytest.raises(Rejected, match=r"from .*c\.toml"):
        parse("--config", str(file))
    file.write_text("prot = 1")
    with pytest.raises(Rejected, match="no such option"):
        parse("--config", str(file))
    file.write_text("port = [")
    with pytest.raises(Rejected, match="is not TOML"):
        parse("--config", str(file))
    with pytest.raises(Rejected, match="model: missing; give --model or set KVRELAY_MODEL"):
        read(Sample, [], "sample", "A sample.", {})


def test_an_argument_is_not_looked_for_in_the_environment() -> None:
    """``KVRELAY_NAME`` may have another meaning."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Named:
        name: str = required(str, "a block", metavar="NAME", positional=True)

    with pytest.raises(Rejected, match=r"name: missing; give it as an argument$"):
        read(Named, [], "sample", "A sample.", {"KVRELAY_NAME": "worker-1"})
    assert read(Named, ["ab"], "sample", "A sample.", {"KVRELAY_NAME": "worker-1"}).name == "ab"


def test_a_variable_of_other_processes_is_not_read() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Named:
        audit: str | None = option(None, "a worker", environ=False)

    assert read(Named, [], "sample", "A sample.", {"KVRELAY_AUDIT": "true"}).audit is None
    assert read(Named, ["--audit", "h:1"], "sample", "A sample.", {}).audit == "h:1"


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Sample, ["--help"], "sample", "A sample.", {})
    page = capsys.readouterr().out
    assert ended.value.code == 0
    for words in ("--model DIR", "[required]", "[default 1GiB]", "--no-kill", "KVRELAY_MODEL"):
        assert words in page


def test_a_configuration_built_by_hand_can_be_checked() -> None:
    check(Sample(model="m", port=65535))
    with pytest.raises(Rejected, match="port: 65536: must be between"):
        check(Sample(model="m", port=65536))
    with pytest.raises(Rejected, match="ids: -1: must be at least 0"):
        check(Sample(model="m", ids=(1, -1)))


@given(st.integers(min_value=0, max_value=2**60))
@example(2**53 + 1)
def test_sizes_round_trip(value: int) -> None:
    assert size(show_size(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1GiB", 2**30), ("1G", 2**30), ("1GB", 10**9), ("1.5 KiB", 1536), ("7", 7), ("7B", 7)],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


def test_yes_and_no() -> None:
    assert all(map(boolean, ("1", "True", "yes", "ON")))
    assert not any(map(boolean, ("0", "false", "No", "off")))
    with pytest.raises(ValueError, match="yes or no"):
        boolean("perhaps")
