"""Finds, checks and loads the compiled attention kernel, and torch's own team of threads.

The best object that this processor runs is compared with the plain one on a few shapes when it is
loaded; one that differs in a bit is passed over, with the reason. No second OpenMP runtime comes
into the process: threads are those of the runtime that torch is linked with.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvrelay.engine.attention.native.arguments import KernelArguments
from kvrelay.engine.attention.native.build import COMMAND, FOLDER, PLAIN, object_name, variants
from kvrelay.engine.attention.native.rows import RowFunctions, row_functions
from kvrelay.engine.attention.native.self_test import differs, rows_differ

FORCED = "KVRELAY_ATTENTION_VARIANT"  # the object to use, for tests and comparisons

Function = Callable[[KernelArguments], int]


class NoKernel(Exception):
    """Why this machine has no native kernel, in words for people."""


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """A loaded object that passed its test: attention, and the row kernels.

    ``parallel`` is the address of torch's ``GOMP_parallel``, 0 if it has none: then a call uses
    one thread. ``passed_over`` has the reasons against better objects.
    """

    variant: str
    revision: int
    function: Function
    rows: RowFunctions
    parallel: int
    passed_over: tuple[str, ...]

    @property
    def profile(self) -> str:
        """What decides the bits of its results, for the numeric profile."""
        return f"native-{self.revision}-{self.variant}"

    @property
    def summary(self) -> str:
        """For people: revision and variant, and what is not as it could be."""
        return "; ".join((self.profile, *self.shortcomings))

    @property
    def shortcomings(self) -> tuple[str, ...]:
        """What is not as it could be, for people."""
        threads = () if self.parallel else ("one thread: torch has no GOMP_parallel",)
        return (*threads, *self.passed_over)


def load_kernel() -> NativeKernel:
    """The kernel of this process; raises ``NoKernel``."""
    return _load(os.environ.get(FORCED, ""))


def load_object(variant: str, folder: Path = FOLDER) -> Function:
    """The entry of one object, which this processor must be able to run."""
    return entry_of(_open(variant, folder))


def load_rows(variant: str, folder: Path = FOLDER) -> RowFunctions:
    """The row kernels of one object, which this processor must be able to run."""
    return row_functions(_open(variant, folder))


def runs(variant: str) -> bool:
    """Whether this processor has the instructions of an object."""
    return bool(_open(PLAIN, FOLDER).kvrelay_runs(variant.encode()))


@cache
def _load(forced: str) -> NativeKernel:
    plain = _open(PLAIN, FOLDER)
    oracle = entry_of(plain)
    plain.kvrelay_revision.restype = ctypes.c_int64
    against: list[str] = []
    if forced and forced not in variants():
        raise NoKernel(f"{FORCED}={forced}: this machine's are {', '.join(variants())}")
    for variant in (forced,) if forced else variants():
        if not runs(variant):
            if forced:
                raise NoKernel(f"{FORCED}={forced}: this processor lacks its instructions")
            continue
        try:
            function = oracle if variant == PLAIN else load_object(variant)
            rows = load_rows(variant)
            reason = differs(function, oracle) or rows_differ(rows, load_rows(PLAIN))
        except NoKernel as error:
            reason = str(error)
        if reason is None:
            revision = plain.kvrelay_revision()
            return NativeKernel(variant, revision, function, rows, parallel(), tuple(against))
        against.append(f"{variant}: {reason}")
    raise NoKernel("; ".join(against))


def _open(variant: str, folder: Path) -> ctypes.CDLL:
    path = folder / object_name(variant)
    if not path.exists():
        stale = any(folder.glob("*.so"))
        how = "compiled from other sources" if stale else "not compiled (was there a C++ compiler?)"
        raise NoKernel(f"{how}: run {COMMAND}")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernel(f"cannot be loaded: {error}") from error


def entry_of(library: ctypes.CDLL) -> Function:
    """The kernel of a loaded object."""
    entry = library.kvrelay_attention
    entry.restype = ctypes.c_int
    entry.argtypes = [ctypes.POINTER(KernelArguments)]
    called: Function = entry
    return called


@cache
def parallel() -> int:
    """The address of ``GOMP_parallel`` in the OpenMP runtime that torch is linked with, or 0.

    A handle's symbols are those of the library and of all that it is linked with.
    """
    for path in _torch_libraries():
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


def _torch_libraries() -> Iterator[Path]:
    folder = Path(torch.__file__).parent / "lib"
    yield from folder.glob("libtorch_cpu.*")
