"""Compiles the CPU kernels for each instruction set.

``pip install`` runs it through the build hook of pyproject.toml, and
``python -m kvrelay.engine.attention.native.build`` by hand, which compiles everything anew. It
imports the standard library only.
An object's name has a digest of the sources and flags, and one of its own bytes, so that neither an
object of other sources nor a damaged one is loaded.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
COMMAND = "python -m kvrelay.engine.attention.native.build"
PLAIN = "plain"
AMX = "amx"
AVX512_BF16 = "avx512bf16"
AVX512 = "avx512"
AVX2 = "avx2"
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
# The instruction sets, best first; ``plain`` runs on every machine.
VARIANTS = {
    AMX: (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    AVX512_BF16: (*_AVX512, "-mavx512bf16"),
    AVX512: _AVX512,
    AVX2: _AVX2,
    PLAIN: (),
}
# Contraction would fuse a product and a sum in one place and not in another.
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"),
    # Exceptions would link the unwinder, which needs glibc 2.35.
    *("-w", "-pthread", "-fno-exceptions"),
)
# What each object is made of: ``plain`` is the definition, in plain C++.
SOURCES = ("attention.cpp", "rows.cpp")
_VECTOR = "products_vector.cpp"
PRODUCT_SOURCES = {
    AMX: "products_amx.cpp",
    AVX512_BF16: _VECTOR,
    AVX512: _VECTOR,
    AVX2: _VECTOR,
}
PLAIN_SOURCES = ("plain.cpp", "plain_rows.cpp", "plain_products.cpp", "forward.cpp")
_STATIC = ("-static-libgcc", "-static-libstdc++")  # so that no runtime of C++ is needed
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300.0  # for one object, on a machine that is busy
_ROOM = "building-"  # the folder of one compilation
_ENTRY = "kvrelay_attention"  # which every object has


class BuildError(Exception):
    """Why nothing was compiled, in words for people."""


class Built(NamedTuple):
    """All whole objects. ``failures`` has the compiler's complaint for each variant that failed."""

    objects: list[Path]
    failures: dict[str, str]


def variants() -> tuple[str, ...]:
    """The variants of this machine's architecture, best first."""
    intel = platform.machine().lower() in ("x86_64", "amd64")
    return tuple(VARIANTS) if intel else (PLAIN,)


def digest() -> str:
    """Of the sources and the flags."""
    found = hashlib.sha256(repr((VARIANTS, FLAGS)).encode())
    for path in sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def objects(variant: str, folder: Path = FOLDER) -> list[Path]:
    """The files of a variant that were compiled from the sources as they are; ``*``: of all."""
    return sorted(folder.glob(f"{variant}-{digest()}-*.so"))


def whole_object(variant: str, folder: Path = FOLDER) -> Path | None:
    """The undamaged file of a variant, ``None`` if there is none."""
    return next(filter(_is_whole, objects(variant, folder)), None)


def _is_whole(path: Path) -> bool:
    try:
        return path.stem.rpartition("-")[2] == _own_digest(path)
    except OSError:  # it cannot be read, or another build has removed it
        return False


def _own_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def compiler() -> list[str]:
    """The command of the C++ compiler: ``CXX``, or one on the path."""
    try:
        own = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX={os.environ['CXX']}: {error}") from error
    for words in [own] if own else [[name] for name in _COMPILERS]:
        if shutil.which(words[0]):
            return words
    tried = shlex.join(own) if own else ", ".join(_COMPILERS)
    raise BuildError(f"no C++ compiler was found ({tried})")


def build(folder: Path = FOLDER, anew: bool = False) -> Built:
    """Compile into ``folder`` what is not there yet, or everything ``anew``; one build at a time.

    Removes damaged objects, those of other sources and the folders of killed builds. An instruction
    set that does not compile keeps its old object, if any. Raises ``BuildError`` if the plain
    object does not compile.
    """
    with _alone_in(folder):
        failures = _compile_missing(folder, anew)
        whole = [path for path in objects("*", folder) if _is_whole(path)]
        for path in folder.glob(f"{_ROOM}*"):
            with suppress(OSError):  # without locks, another build may have removed it
                if time.time() - path.stat().st_mtime > 2 * _SECONDS:
                    shutil.rmtree(path)
        for path in folder.glob("*.so"):
            if path not in whole:
                path.unlink(missing_ok=True)
    return Built(whole, failures)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait for other builds in the folder; their compilers have a time limit."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile_missing(folder: Path, anew: bool) -> dict[str, str]:
    """The compiler's complaints, by variant. ``BuildError`` if the plain object is among them."""
    missing = [each for each in variants() if anew or whole_object(each, folder) is None]
    if not missing:
        return {}
    command = compiler()
    # Taken now: if a source changes while the compiler reads, no later digest is this one.
    sources = digest()
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda v: _compile(command, v, sources, folder), missing))
    failures = {variant: error for variant, error in zip(missing, errors, strict=True) if error}
    if PLAIN in failures:
        raise BuildError(f"{shlex.join(command)} failed: {failures[PLAIN]}")
    return failures


def flags_and_sources(name: str, folder: Path = FOLDER) -> list[str]:
    """The compiler's arguments for an object, ``FLAGS`` aside; ``folder`` has the sources."""
    own = (PRODUCT_SOURCES[name],) if name in PRODUCT_SOURCES else ()
    sources = PLAIN_SOURCES if name == PLAIN else (*SOURCES, *own)
    return [*VARIANTS[name], *(str(folder / source) for source in sources)]


def _compile(command: list[str], variant: str, sources: str, folder: Path) -> str:
    """Compile one object; returns the compiler's complaint, empty if there is none."""
    static = _STATIC if sys.platform == "linux" else ()
    with tempfile.TemporaryDirectory(prefix=_ROOM, dir=folder) as room:
        made = Path(room) / f"{variant}.so"
        flags = [*FLAGS, *static, *flags_and_sources(variant), "-o", str(made)]
        try:
            done = subprocess.run(
                [*command, *flags], capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode != 0:
            return " ".join(done.stderr.split())[:300] or f"status {done.returncode}"
        if not made.exists():
            return "it wrote no object"
        try:
            getattr(ctypes.CDLL(str(made)), _ENTRY)
        except (OSError, AttributeError) as error:
            return f"what it wrote cannot be used: {error}"
        whole = folder / f"{variant}-{sources}-{_own_digest(made)}.so"
        made.replace(whole)
    for path in folder.glob(f"{variant}-*.so"):
        if path != whole:
            path.unlink(missing_ok=True)
    return ""


if __name__ == "__main__":
    try:
        ready, failed = build(anew=True)
        print("\n".join(f"ready: {path}" for path in ready))
        for name, complaint in failed.items():
            print(f"not compiled: {name}: {complaint}", file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    except (BuildError, OSError) as failure:
        sys.exit(f"the attention kernel was not compiled: {failure}")
