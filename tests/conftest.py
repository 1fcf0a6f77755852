"""What holds for every test, and what a run of them says about itself."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator, Iterator

# Before anything imports torch. Tiny models: more threads only wait for each other, and for ten
# times as long on a machine that has other work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Threads that spin on cores that other work has: two of them take minutes for what one does in one.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# As the engine does before its first product: some tests multiply without one.
os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX10_1_512")

# A cluster whose blocks outlive it keeps its key there, and not among the files of the user.
os.environ.setdefault("XDG_STATE_HOME", f"{tempfile.gettempdir()}/kvrelay-tests-{os.getuid()}")

import pytest

from kvrelay.engine.attention.native import build
from kvrelay.rpc.security import policy
from tests.kvstore.redis.redisserver import version


def pytest_report_header() -> str:
    """Which Redis the store is tested with; without one the run ends here."""
    return f"redis: {version()}"


def pytest_configure() -> None:
    gc.disable()  # until the tests are collected: nothing of their imports is garbage


def pytest_collection_finish() -> None:
    """Let collections pass over what was imported, which takes them half a second each."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Without half characters in what was captured: pytest-xdist ends at one in a report."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def security() -> Iterator[None]:
    """A command in this process installs that of a cluster beside it, such as another test's."""
    before = policy.installed()
    yield
    policy._installed = before


@pytest.fixture(scope="session")
def compiled() -> None:
    """The attention kernel, compiled if the install has not done it."""
    try:
        build.build()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def collector_off() -> Iterator[None]:
    """What is freed during the test is freed without a garbage collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
