"""The native backend behind the runner, what its profile says, and what refuses it."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from kvrelay.engine.attention.backend import AttentionStep
from kvrelay.engine.attention.batch import Batch, pack
from kvrelay.engine.attention.choice import choose_attention
from kvrelay.engine.attention.native import build, library
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.attention.sdpa import SdpaBackend
from kvrelay.engine.core.updates import Work
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.numerics import numeric_profile
from kvrelay.engine.runner import Runner
from kvrelay.errors import Rejected
from tests.models import tiny_model

SHAPE = PoolShape(12, 2, 4, 2, 16, "float32")
WORKS = [
    Work([0] * 10, 9, 1, [3, 5, 1], 10, None),
    Work([0] * 9, 0, 9, [0, 2, 4], 9, None),
    Work([0] * 12, 5, 6, [8, 7, 6], 12, None),
]


def filled_pool() -> KVPool:
    pool = KVPool(SHAPE)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return pool


@pytest.mark.parametrize("scaling", [None, 0.1])
def test_it_computes_what_sdpa_does(compiled: None, scaling: float | None) -> None:
    """Outputs, and the K and V that are stored, from tensors that are not contiguous."""
    pools = [filled_pool(), filled_pool()]
    joint = torch.randn(16, 8, 16)
    query, key, value = joint[:, :4], joint[:, 4:6], joint[:, 6:]
    native, sdpa = (
        backend.step(pack(WORKS, SHAPE.block_size)).attend(1, query, key, value, scaling)
        for backend in (NativeBackend(pools[0]), SdpaBackend(pools[1]))
    )
    assert torch.allclose(native, sdpa, atol=1e-5)
    assert native.is_contiguous()
    used = [block for work in WORKS for block in work.blocks]
    ends = {1: 2, 4: 1, 6: 3}  # positions of a last block; SDPA zeroes the rest of a new one
    for block in used:
        stored = [pool.by_position[block, 1, :, : ends.get(block, 4)] for pool in pools]
        assert torch.equal(*stored), block


@pytest.mark.parametrize(
    ("layer", "rows", "heads", "width", "dtype"),
    [
        (2, 16, 2, 16, torch.float32),
        (-1, 16, 2, 16, torch.float32),
        (0, 15, 2, 16, torch.float32),
        (0, 16, 1, 16, torch.float32),
        (0, 16, 2, 8, torch.float32),
        (0, 16, 2, 16, torch.bfloat16),
    ],
)
def test_shapes_that_are_not_the_pools_are_refused(
    compiled: None, layer: int, rows: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    """The kernel would read or write elsewhere."""
    step = NativeBackend(filled_pool()).step(pack(WORKS, SHAPE.block_size))
    both = torch.zeros(rows, heads, width, dtype=dtype)
    with pytest.raises(ValueError, match="not of this pool and 16 rows"):
        step.attend(layer, torch.zeros(16, 4, 16), both, both, None)


def test_a_table_outside_the_pool_is_refused(compiled: None) -> None:
    for block in (12, -1):
        work = Work([0], 0, 1, [block], 1, None)
        batch = pack([work], SHAPE.block_size)
        with pytest.raises(IndexError, match="leaves the pool of 12"):
            NativeBackend(filled_pool()).step(batch)


@pytest.mark.parametrize("scaling", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_not_positive_is_refused(compiled: None, scaling: float) -> None:
    step = NativeBackend(filled_pool()).step(pack(WORKS, SHAPE.block_size))
    query, both = torch.zeros(16, 4, 16), torch.zeros(16, 2, 16)
    with pytest.raises(ValueError, match="scaling"):
        step.attend(0, query, both, both, scaling)


def test_tensors_with_gaps_in_their_heads(compiled: None) -> None:
    """Also heads of one element, whose last stride says nothing."""
    for width in (16, 1):
        pool = KVPool(PoolShape(12, 2, 4, 2, width, "float32"))
        wide = torch.randn(16, 8, 2 * width)[:, :, ::2]
        step = NativeBackend(pool).step(pack(WORKS, pool.shape.block_size))
        cuts = (wide[:, :4], wide[:, 4:6], wide[:, 6:])
        got = step.attend(0, *cuts, None)
        query, key, value = (cut.contiguous() for cut in cuts)
        again = step.attend(0, query, key, value, None)
        assert torch.equal(got, again)


def test_the_profile_names_revision_and_variant(compiled: None, tmp_path: Path) -> None:
    loaded = load_model(tiny_model("llama", tmp_path / "llama"), "float32", "cpu")
    runner = Runner(loaded, 4, 4, "native")
    variant = library.load_kernel().variant
    assert runner.attention_profile == f"native-3-{variant}"
    assert f"/native-3-{variant}/tp1/" in numeric_profile(loaded, "native", 1)
    assert "/sdpa-5/tp1/" in numeric_profile(loaded, "sdpa", 1)


def choose(**environ: str) -> str:
    """What a new process says that was asked for the native backend.

    It loads no model, and so does not wait for the import of ``transformers``.
    """
    program = (
        "import sys\n"
        "from kvrelay.engine.attention.pool import KVPool, PoolShape\n"
        "from kvrelay.engine.attention.choice import choose_attention\n"
        "from kvrelay.errors import Rejected\n"
        "try:\n"
        "    pool = KVPool(PoolShape(1, 1, 1, 1, 8, 'float32'))\n"
        "    print(choose_attention('native', pool).backend.profile)\n"
        "except Rejected as error:\n"
        "    print(error)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("variant", build.variants())
def test_a_variant_can_be_forced(compiled: None, variant: str) -> None:
    said = choose(**{library.FORCED: variant})
    if library.runs(variant):
        assert said == f"native-3-{variant}"
    else:
        assert "this processor lacks its instructions" in said


def test_an_unknown_variant_is_refused_by_name(compiled: None) -> None:
    said = choose(**{library.FORCED: "sse9"})
    assert f"{library.FORCED}: 'sse9' is not one of {', '.join(build.variants())}" in said


def test_what_was_not_compiled_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library._load.cache_clear()
    try:
        with pytest.raises(Rejected, match=f"not compiled.*run {build.COMMAND}"):
            choose_attention("native", KVPool(SHAPE))
        (tmp_path / "plain-000000000000.so").touch()
        with pytest.raises(library.NoKernel, match="compiled from other sources"):
            library.load_kernel()
    finally:
        library._load.cache_clear()


def test_auto_is_the_kernel_where_it_can_be_used(compiled: None) -> None:
    chosen = choose_attention("auto", KVPool(SHAPE))
    assert chosen.backend.profile == library.load_kernel().profile
    assert not chosen.reason
    assert choose_attention("sdpa", KVPool(SHAPE)).backend.profile == "sdpa-5"


def test_auto_is_sdpa_with_a_reason_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No object, no instructions, a dtype or a device that the kernel does not know."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library._load.cache_clear()
    try:
        chosen = choose_attention("auto", KVPool(SHAPE))
    finally:
        library._load.cache_clear()
    assert chosen.backend.profile == "sdpa-5"
    assert re.match("native cannot be used: not compiled", chosen.reason)
    monkeypatch.undo()
    monkeypatch.setenv(library.FORCED, "sse9")
    with pytest.raises(Rejected, match=library.FORCED):
        choose_attention("auto", KVPool(SHAPE))


def test_auto_is_sdpa_where_only_the_plain_object_runs(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor that is neither Intel's nor AMD's: plain C++ is slower than SDPA."""
    monkeypatch.setattr(library, "runs", lambda variant: variant == build.PLAIN)
    library._load.cache_clear()
    try:
        chosen = choose_attention("auto", KVPool(SHAPE))
        with pytest.raises(Rejected, match="no object runs on this processor"):
            choose_attention("native", KVPool(SHAPE))
    finally:
        library._load.cache_clear()
    assert chosen.backend.profile == "sdpa-5"
    assert (
        chosen.reason == "native cannot be used: no object runs on this processor: they need AVX2"
    )


def test_auto_is_sdpa_for_a_pool_of_another_kind(compiled: None) -> None:
    pool = KVPool(SHAPE)
    pool.tensor = pool.tensor.double()
    chosen = choose_attention("auto", pool)
    assert chosen.backend.profile == "sdpa-5"
    assert "torch.float64" in chosen.reason
    pool.device = torch.device("meta")
    assert "the pool is on meta" in choose_attention("auto", pool).reason


def test_a_better_object_that_failed_is_the_reason(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = iter(["other bits"])
    monkeypatch.setattr(library, "differs", lambda function, oracle: next(verdicts, None))
    library._load.cache_clear()
    try:
        chosen = choose_attention("auto", KVPool(SHAPE))
    finally:
        library._load.cache_clear()
    assert chosen.backend.name == "native"
    assert "other bits" in chosen.reason


@pytest.mark.parametrize("attention", ["sdpa", "native", "auto"])
def test_the_model_is_tested_with_the_backend_in_use(
    compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attention: str
) -> None:
    """At start the logits are compared with those of ``transformers``."""
    used: list[str] = []
    for kind in (NativeBackend, SdpaBackend):
        monkeypatch.setattr(kind, "step", noting(kind, used))
    load_model(tiny_model("llama", tmp_path / "llama"), "float32", "cpu", None, attention)
    assert set(used) == {"native" if attention == "auto" else attention}


def noting(
    kind: type[NativeBackend | SdpaBackend], used: list[str]
) -> Callable[[NativeBackend | SdpaBackend, Batch], AttentionStep]:
    """``step`` of a backend, which adds the backend's name to ``used``."""
    inner = cast("Callable[[object, Batch], AttentionStep]", kind.step)

    def step(self: NativeBackend | SdpaBackend, batch: Batch) -> AttentionStep:
        used.append(self.name)
        return inner(self, batch)

    return step


def test_an_object_that_fails_its_test_is_passed_over(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is used, and the summary says why; without any, nothing is."""
    monkeypatch.setattr(library, "differs", lambda function, oracle: "other bits")
    library._load.cache_clear()
    try:
        best, *rest = [variant for variant in build.variants() if library.runs(variant)]
        with pytest.raises(library.NoKernel, match=f"{best}: other bits"):
            library.load_kernel()
        verdicts = iter(["other bits", None])
        monkeypatch.setattr(library, "differs", lambda function, oracle: next(verdicts))
        kernel = library.load_kernel()
        assert kernel.variant == rest[0]
        assert f"{best}: other bits" in kernel.summary
    finally:
        library._load.cache_clear()


def test_a_build_without_a_compiler_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.build(tmp_path)


def test_a_compiler_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -c exit('broken')")
    with pytest.raises(build.BuildError, match="broken"):
        build.build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_object_that_cannot_be_loaded_is_not_kept(
    compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By hand everything is compiled anew, so the same command mends it with a better compiler."""
    for path in build.FOLDER.glob("*.so"):
        shutil.copy(path, tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(build, "variants", lambda: (build.PLAIN,))
    monkeypatch.setenv("CXX", f"{shlex.join(build.compiler())} -Wl,-z,nodlopen")
    with pytest.raises(build.BuildError, match="what it wrote cannot be used"):
        build.build(tmp_path, anew=True)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_compiled_anew_there_is_one_object_of_each_kind(
    compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a build that was killed has left is removed, not that of one that still runs."""
    for path in build.FOLDER.glob("*.so"):
        shutil.copy(path, tmp_path)
    (plain,) = build.objects(build.PLAIN, tmp_path)
    other = tmp_path / f"{build.PLAIN}-{build.digest()}-{hashlib.sha256(b'').hexdigest()[:12]}.so"
    other.touch()
    plain.unlink()
    monkeypatch.setattr(build, "variants", lambda: (build.PLAIN,))
    abandoned, running = tmp_path / "building-1", tmp_path / "building-2"
    abandoned.mkdir()
    running.mkdir()
    os.utime(abandoned, (0, 0))
    with pytest.raises(library.NoKernel, match=f"cannot be loaded.*run {build.COMMAND}"):
        library.load_object(build.PLAIN, tmp_path)
    build.build(tmp_path, anew=True)
    assert build.objects(build.PLAIN, tmp_path) == [build.whole_object(build.PLAIN, tmp_path)]
    assert not other.exists()
    assert (abandoned.exists(), running.exists()) == (False, True)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is of Linux")
@pytest.mark.parametrize("variant", build.variants())
def test_an_object_runs_where_torch_does(compiled: None, variant: str) -> None:
    """That of a wheel is loaded beside an older glibc than that of the compiler: torch's least."""
    path = build.whole_object(variant)
    if path is None:
        pytest.skip(f"the compiler does not know {variant}")
    wanted = re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())
    assert max((int(major), int(minor)) for major, minor in wanted) <= (2, 28)


def test_objects_of_other_sources_are_removed(compiled: None, tmp_path: Path) -> None:
    whole = [path for one in build.variants() if (path := build.whole_object(one)) is not None]
    for path in whole:
        shutil.copy(path, tmp_path)
    (tmp_path / "avx2-000000000000.so").touch()
    made, failures = build.build(tmp_path)
    assert ({path.name for path in made}, failures) == ({path.name for path in whole}, {})
    assert len(list(tmp_path.iterdir())) == len(whole)


@pytest.mark.parametrize("damage", ["cut off", "one bit"])
def test_a_damaged_object_is_not_loaded_and_compiled_again(
    compiled: None, tmp_path: Path, damage: str
) -> None:
    """A part of its pages would end the process; another bit would compute other bits."""
    for path in build.FOLDER.glob("*.so"):
        shutil.copy(path, tmp_path)
    best = next(variant for variant in build.variants() if library.runs(variant))
    damaged = build.whole_object(best, tmp_path)
    assert damaged is not None
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content[: len(content) // 2] if damage == "cut off" else content)
    with pytest.raises(library.NoKernel, match=f"its file is damaged: run {build.COMMAND}"):
        library.load_object(best, tmp_path)
    build.build(tmp_path)
    assert build.whole_object(best, tmp_path) is not None


def compiled_variants() -> list[str]:
    return [variant for variant in build.variants() if build.whole_object(variant) is not None]


def stand_in(folder: Path, name: str, failing: str) -> Path:
    """A compiler that copies what was compiled before, with its name behind; one object fails."""
    command = folder / name
    command.write_text(
        f"""#!/bin/sh
        echo {name} >> {folder}/calls
        sleep 0.1
        while [ "$1" != -o ]; do shift; done
        object=$(basename "$2" .so)
        [ "$object" != {failing} ] || {{ echo "no room left"; exit 1; }} >&2
        cat {build.FOLDER}/$object-*.so > "$2"
        printf %s {name} >> "$2"
        """
    )
    command.chmod(0o755)
    return command


def test_what_the_compiler_says_of_one_object_is_kept(
    compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, *others = compiled_variants()
    monkeypatch.setattr(build, "variants", lambda: (first, *others))
    monkeypatch.setenv("CXX", str(stand_in(tmp_path, "cc", failing=first)))
    if not others:
        with pytest.raises(build.BuildError, match="no room left"):
            build.build(tmp_path)
        return
    made, failures = build.build(tmp_path)
    assert (len(made), failures) == (len(others), {first: "no room left"})


def test_two_builds_wait_for_each_other(compiled: None, tmp_path: Path) -> None:
    """Else each would remove the other's objects, if their compilers differ."""
    program = (
        "import sys; from pathlib import Path; from kvrelay.engine.attention.native import build;"
        "build.build(Path(sys.argv[1]), anew=True)"
    )
    compilers = [stand_in(tmp_path, name, failing="none") for name in ("a", "bb")]
    folder = tmp_path / "objects"
    folder.mkdir()
    builds = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder)], env={**os.environ, "CXX": str(each)}
        )
        for each in compilers
    ]
    assert [each.wait(60) for each in builds] == [0, 0]
    assert all(build.whole_object(variant, folder) for variant in compiled_variants())
    calls = (tmp_path / "calls").read_text().split()
    assert calls in (sorted(calls), sorted(calls, reverse=True))  # one build, then the other


def test_an_object_that_the_compiler_left_out_is_named(compiled: None, tmp_path: Path) -> None:
    plain = build.whole_object(build.PLAIN)
    assert plain is not None
    shutil.copy(plain, tmp_path)
    with pytest.raises(library.NoKernel, match="does the C\\+\\+ compiler know its instructions"):
        library.load_object(build.AVX2, tmp_path)


@pytest.mark.parametrize(
    ("command", "words"),
    [("g++ 'x", "No closing quotation"), ("true", "it wrote no object")],
)
def test_a_compiler_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, words: str
) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(build.BuildError, match=words):
        build.build(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_THREAD_LIMIT", "1"),
        ("OMP_DYNAMIC", "true"),
        ("OMP_DYNAMIC", "false"),
        ("OMP_MAX_ACTIVE_LEVELS", "0"),
    ],
)
def test_openmp_that_may_give_fewer_threads_is_refused(name: str, value: str) -> None:
    program = (
        "from kvrelay.engine.attention.native.library import check_openmp\n"
        "from kvrelay.errors import Rejected\n"
        "try: check_openmp(2)\n"
        "except Rejected as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, name: value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{name}: ") == (value != "false"), done.stdout
    assert ("unset it" in done.stdout) == (value != "false")
