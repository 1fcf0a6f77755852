"""Finds, checks and loads the compiled attention kernel, and torch's own team of threads.

The best object that this processor runs is compared with the plain one on a few shapes when it is
loaded; one that differs in a bit is passed over, with the reason. The plain one is used only if
KVRELAY_ATTENTION_VARIANT=plain: SDPA is 30 times as fast. No second OpenMP runtime comes
into the process: threads are those of the runtime that torch is linked with.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from kvrelay.engine.attention.native.arguments import KernelArguments
from kvrelay.engine.attention.native.build import (
    AMX,
    AVX512_BF16,
    COMMAND,
    FOLDER,
    PLAIN,
    PRODUCT_SOURCES,
    objects,
    variants,
    whole_object,
)
from kvrelay.engine.attention.native.products import (
    PAIRS,
    NoProducts,
    ProductFunction,
    Products,
    product_function,
)
from kvrelay.engine.attention.native.rows import RowFunctions, row_functions
from kvrelay.engine.attention.native.self_test import differs, products_differ, rows_differ
from kvrelay.errors import Rejected

# Environment variables for tests and comparisons: the attention variant, the products.
FORCED = "KVRELAY_ATTENTION_VARIANT"
FORCED_PRODUCTS = "KVRELAY_PRODUCTS"
ONEDNN = "onednn"
MULTIPLIED = (torch.bfloat16, torch.float32)
BFLOAT16_ONLY = (AMX, AVX512_BF16)
NO_TILES = "this processor has no AMX for bfloat16"

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
    """The kernel of this process; raises ``NoKernel``.

    ``Rejected`` if the variable asks for what cannot be used here.
    """
    forced = os.environ.get(FORCED, "")
    if forced and forced not in variants():
        raise Rejected(FORCED, f"{forced!r} is not one of {', '.join(variants())}")
    try:
        return _load(forced)
    except NoKernel as error:
        if forced:
            raise Rejected(FORCED, _unusable(forced, error)) from error
        raise


def _unusable(variant: str, reason: object) -> str:
    return f"{variant} cannot be used: {reason}; unset the variable for the best that can"


def load_object(variant: str, folder: Path = FOLDER) -> Function:
    """The entry of one object, which this processor must be able to run."""
    return entry_of(open_object(variant, folder))


def definition(variant: str) -> Function:
    """The plain object's attention, adding products of bfloat16 as ``variant`` does."""
    plain = load_object(PLAIN)

    def tiled(arguments: KernelArguments) -> int:
        arguments.tiles = 1
        return plain(arguments)

    return tiled if variant == AMX else plain


def load_rows(variant: str, folder: Path = FOLDER) -> RowFunctions:
    """The row kernels of one object, which this processor must be able to run."""
    return row_functions(open_object(variant, folder))


def runs(variant: str) -> bool:
    """Whether this processor has the instructions of an object."""
    return bool(open_object(PLAIN, FOLDER).kvrelay_runs(variant.encode()))


@cache
def _load(forced: str) -> NativeKernel:
    plain = open_object(PLAIN, FOLDER)
    plain.kvrelay_revision.restype = ctypes.c_int64
    against: list[str] = []
    for variant in (forced,) if forced else variants():
        if variant == PLAIN and not forced:
            continue
        if not runs(variant):
            if forced:
                raise NoKernel("this processor lacks its instructions")
            continue
        try:
            function = load_object(variant)
            rows = load_rows(variant)
            reason = differs(function, definition(variant)) or rows_differ(rows, load_rows(PLAIN))
        except NoKernel as error:
            reason = str(error)
        if reason is None:
            revision = plain.kvrelay_revision()
            return NativeKernel(variant, revision, function, rows, parallel(), tuple(against))
        against.append(reason if forced else f"{variant}: {reason}")
    raise NoKernel("; ".join(against) or "no object runs on this processor: they need AVX2")


def products_of(dtype: torch.dtype) -> Products | NoProducts:
    """The CPU's products in a dtype: on AMX, AVX512-BF16, AVX-512 or AVX2.

    The first two have no float32; there the variable's ``amx`` and ``avx512bf16`` are ignored.
    oneDNN's are used where ours cannot be. Raises ``Rejected`` if the variable asks for what cannot
    be used here.
    """
    forced = os.environ.get(FORCED_PRODUCTS, "")
    known = (*PRODUCT_SOURCES, ONEDNN)
    if forced and forced not in known:
        raise Rejected(FORCED_PRODUCTS, f"{forced!r} is not one of {', '.join(known)}")
    if dtype not in MULTIPLIED:
        return NoProducts("they are for bfloat16 and float32", notable=False)
    if forced == ONEDNN:
        return NoProducts(f"{FORCED_PRODUCTS}={forced}", notable=False)
    if dtype is torch.float32 and forced in BFLOAT16_ONLY:
        forced = ""
    found = _load_products(forced, dtype)
    if forced and isinstance(found, NoProducts):
        raise Rejected(FORCED_PRODUCTS, _unusable(forced, found.reason))
    return found


@cache
def _load_products(forced: str, dtype: torch.dtype) -> Products | NoProducts:
    """Those of a variant, or the best ones if ``forced`` is empty."""
    left_out = () if dtype is torch.bfloat16 else BFLOAT16_ONLY
    lacking = ""
    against: list[str] = []
    try:
        for variant in (forced,) if forced else PRODUCT_SOURCES:
            if variant in left_out:
                continue
            refused = tiles_refused() if variant == AMX else ""
            if refused in ("", NO_TILES) and not runs(variant):
                lacking = f"this processor has no {variant}"
                continue
            if not parallel():
                return NoProducts("torch has no GOMP_parallel")
            found = refused or _tested(variant, dtype)
            if isinstance(found, Products):
                return replace(found, passed_over=tuple(against))
            against.append(found if forced else f"{variant}: {found}")
    except NoKernel as error:  # attention has logged it
        return NoProducts(str(error), notable=False)
    return NoProducts("; ".join(against) or lacking, notable=bool(against))


def _tested(variant: str, dtype: torch.dtype) -> Products | str:
    """The products of an object that this processor can run, or why they are not to be used."""
    try:
        found = Products(variant, dtype, load_product(variant), parallel())
        return products_differ(found, product_definition(variant)) or found
    except NoKernel as error:
        return str(error)


def tiles_refused() -> str:
    """Why this process may not use AMX tiles; empty if it may, from now on."""
    answer: int = open_object(PLAIN).kvrelay_tiles()
    if answer < 0:
        return NO_TILES
    return f"the system refuses AMX tiles: {os.strerror(answer)}" if answer else ""


def product_definition(variant: str) -> ProductFunction:
    """The plain object's product, adding bfloat16 as ``variant`` does."""
    plain = load_product(PLAIN)

    def paired(*arguments: int | None) -> int:
        *operands, _, threads, parallel = arguments
        return plain(*operands, PAIRS, threads, parallel)

    return paired if variant == AVX512_BF16 else plain


def load_product(name: str, folder: Path = FOLDER) -> ProductFunction:
    """The product of one object: ``PLAIN`` or one of ``PRODUCT_SOURCES``."""
    return product_function(open_object(name, folder))


def open_object(variant: str, folder: Path = FOLDER) -> ctypes.CDLL:
    """Load an object as it was compiled; raises ``NoKernel``."""
    path = whole_object(variant, folder)
    if path is None:
        raise NoKernel(f"{_absence(variant, folder)}: run {COMMAND}")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernel(f"cannot be loaded: {error}: run {COMMAND}") from error


def _absence(variant: str, folder: Path) -> str:
    """Why there is no object to load."""
    if objects(variant, folder):
        return "its file is damaged"
    if objects("*", folder):
        return "not compiled (does the C++ compiler know its instructions?)"
    if any(folder.glob("*.so")):
        return "compiled from other sources"
    return "not compiled (was there a C++ compiler?)"


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
    found = _openmp("GOMP_parallel")
    return ctypes.cast(found, ctypes.c_void_p).value or 0 if found else 0


def check_openmp(threads: int) -> None:
    """``Rejected`` if OpenMP may give a step of several threads fewer than it asks for.

    oneDNN relies on all of them: it would leave parts of its results unwritten.
    """
    limit, dynamic = _openmp("omp_get_thread_limit"), _openmp("omp_get_dynamic")
    why = "and oneDNN would not write all results: unset it (--threads N sets a worker's threads)"
    if limit is not None and limit() < threads:
        raise Rejected("OMP_THREAD_LIMIT", f"{limit()} is less than {threads} threads, {why}")
    if dynamic is not None and dynamic():
        raise Rejected("OMP_DYNAMIC", f"a step may get fewer threads than it asks for, {why}")
    levels = _openmp("omp_get_max_active_levels")
    if threads > 1 and levels is not None and levels() < 1:
        raise Rejected("OMP_MAX_ACTIVE_LEVELS", f"0 gives a step one thread, {why}")


def _openmp(name: str) -> ctypes._NamedFuncPointer | None:
    """A function of the OpenMP runtime that torch is linked with."""
    for path in _torch_libraries():
        with suppress(OSError, AttributeError):
            return ctypes.CDLL(str(path))[name]
    return None


def _torch_libraries() -> Iterator[Path]:
    folder = Path(torch.__file__).parent / "lib"
    yield from folder.glob("libtorch_cpu.*")
