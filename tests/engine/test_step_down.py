"""How a worker on a GPU computes: each failure steps down to the next way, and says why."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from kvrelay.cli.doctor.device import lines
from kvrelay.engine.cuda.launch import launch
from kvrelay.engine.self_test import DeviceCheck, SelfTest, attempt
from kvrelay.engine.step_down import Way, choose_way
from kvrelay.engine.stepping import DeviceLost
from kvrelay.errors import Unservable
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engines import native
from tests.worker.models import MODEL


class TritonError(Exception):
    """The base of Triton's own errors."""


FACTS = ("rows-same", "cuts-differ")


@dataclass
class Device:
    """Fails in the named stages, or loses the device in one."""

    fails: Mapping[str, str] = field(default_factory=dict)
    lost: str = ""
    asked: list[str] = field(default_factory=list)

    def backend(self, name: str) -> Iterator[DeviceCheck]:
        if name == "sdpa":
            return
        for stage in ("attention", "model"):
            yield self._check(f"{name} {stage}", stage)

    def graphs(self) -> DeviceCheck:
        return self._check("graphs", "graphs")

    def facts(self, name: str) -> tuple[str, ...]:
        self.asked.append(f"facts of {name}")
        return FACTS

    def blocks(self, name: str) -> DeviceCheck:
        return self._check("blocks", "blocks")

    def _check(self, stage: str, name: str) -> DeviceCheck:
        self.asked.append(stage)
        if stage == self.lost:
            raise DeviceLost(f"{name}: an illegal memory access")
        return DeviceCheck(name, stage not in self.fails, self.fails.get(stage, "fine"))


BOTH = ["triton attention", "triton model"]
WRONG = "differs from SDPA by 3.0e-01 at most"
ABSENT = "flash_attn cannot be used: the package flash_attn is not installed"
# What fails -> the way, the reasons, and what was tried, in order.
STEPS: Mapping[tuple[str, ...], tuple[Way, list[str]]] = {
    (): (Way("triton", True), [*BOTH, "graphs"]),
    ("graphs",): (Way("triton", False, (f"graphs: {WRONG}",)), [*BOTH, "graphs"]),
    ("triton model",): (
        Way("varlen", False, (f"triton: model: {WRONG}",)),
        [*BOTH, "varlen attention", "varlen model"],
    ),
    ("triton attention",): (
        Way("varlen", False, (f"triton: attention: {WRONG}",)),
        ["triton attention", "varlen attention", "varlen model"],
    ),
    ("triton attention", "varlen model"): (
        Way(
            "flash_attn",
            False,
            (f"triton: attention: {WRONG}", f"varlen: model: {WRONG}"),
        ),
        [
            "triton attention",
            "varlen attention",
            "varlen model",
            "flash_attn attention",
            "flash_attn model",
        ],
    ),
    ("triton attention", "varlen attention", "flash_attn attention"): (
        Way(
            "sdpa",
            False,
            (
                f"triton: attention: {WRONG}",
                f"varlen: attention: {WRONG}",
                f"flash_attn: attention: {WRONG}",
            ),
        ),
        ["triton attention", "varlen attention", "flash_attn attention"],
    ),
}


@pytest.mark.parametrize("failing", STEPS, ids=lambda names: "+".join(names) or "nothing")
def test_each_failure_steps_down(failing: tuple[str, ...]) -> None:
    """The rest is not tried: what comes after a way that holds is no better."""
    device = Device(dict.fromkeys(failing, WRONG))
    want, tried = STEPS[failing]
    assert choose_way("auto", device) == replace(want, facts=FACTS)
    assert device.asked == [*tried, f"facts of {want.backend}", "blocks"]


@pytest.mark.parametrize("asked", ["auto", "sdpa"])
def test_a_gpu_whose_copies_differ_is_refused(asked: str) -> None:
    """No way of computing helps: the store would get wrong bytes."""
    with pytest.raises(Unservable, match="KV blocks to host memory and back: 2 of 3 came back"):
        choose_way(asked, Device({"blocks": "2 of 3 came back through pinned memory"}))


def test_a_forced_backend_does_not_step_down() -> None:
    """Of triton the graphs may: they are no backend."""
    for name in ("triton", "varlen", "flash_attn", "sdpa"):
        assert choose_way(name, Device()) == Way(name, name == "triton", (), FACTS)
    assert choose_way("triton", Device({"graphs": WRONG})).graphs is False
    for name in ("triton", "varlen", "flash_attn"):
        with pytest.raises(Unservable) as caught:
            choose_way(name, Device({f"{name} model": WRONG}))
        told = f"--attention-backend {name} cannot be used here: {name}: model: {WRONG}"
        assert str(caught.value) == told


@pytest.mark.parametrize(
    ("stage", "rest"),
    [
        ("triton attention", "varlen or flash_attn or sdpa"),
        ("graphs", "varlen or flash_attn or sdpa"),
    ],
)
def test_a_lost_device_ends_the_start(stage: str, rest: str) -> None:
    """No other way can be tried in this process: the message says with which flag to start."""
    with pytest.raises(Unservable) as caught:
        choose_way("auto", Device(lost=stage))
    told = f"an illegal memory access; start the worker with --attention-backend {rest}"
    assert str(caught.value).startswith("the self-test of triton lost the device: ")
    assert str(caught.value).endswith(told)
    with pytest.raises(Unservable) as caught:
        choose_way("varlen", Device(lost="varlen model"))
    assert str(caught.value).endswith("model: an illegal memory access")


def test_a_check_that_raises_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the device answers nothing afterwards: such an error comes back at every call."""

    def wrong() -> tuple[bool, str]:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    check = attempt(cuda, "model", wrong)
    assert (check.name, check.holds) == ("model", False)
    assert check.found.startswith("RuntimeError: Triton Error")

    def changed() -> tuple[bool, str]:
        raise TypeError("varlen_attn() got an unexpected keyword argument 'num_splits'")

    assert attempt(cuda, "attention", changed).found.startswith("TypeError: varlen_attn() got")

    def again(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", again)
    with pytest.raises(DeviceLost, match="model: RuntimeError: Triton Error"):
        attempt(cuda, "model", wrong)


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),  # no headers of Python
        PermissionError(13, "Permission denied", "/.triton"),  # no folder for its cache
        AssertionError("libcuda.so cannot found!"),
        TritonError("out of resource: shared memory"),
    ],
)
def test_a_triton_that_cannot_compile_steps_down(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors are of many classes."""

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def refuse(*given: object, **named: object) -> None:
                raise error

            return refuse

    def attends() -> tuple[bool, str]:
        launch(Kernel(), (1,), warps=1)
        return True, ""

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(TritonError=TritonError))
    check = attempt(torch.device("cpu"), "attention", attends)
    assert check.holds is False
    assert check.found.startswith(f"LaunchFailed: {type(error).__name__}: {error}"[:200])


@pytest.mark.parametrize(("asked", "fails"), [("auto", "triton attention"), ("sdpa", "")])
def test_a_worker_prints_its_way_and_why(
    asked: str, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line for each reason; on the CPU nothing is tested."""
    device = Device({fails: WRONG})
    monkeypatch.setattr(native, "DeviceExaminer", lambda model, size: device)
    config = WorkerConfig(model="m", attention_backend=asked)
    with caplog.at_level(logging.INFO):
        assert native.way_of(config, MODEL) == Way(asked)
        assert not caplog.records
        way = native.way_of(config, replace(MODEL, device=torch.device("cuda")))
    *why, last = [record.getMessage() for record in caplog.records]
    assert last.startswith(f"this GPU computes with {way.name} (the self-test took ")
    assert why == ([f"the self-test: triton: attention: {WRONG}"] if fails else [])
    assert way.facts == FACTS


def test_the_doctor_names_the_way_and_why_it_is_no_better() -> None:
    """A library that is not there matters only where its attention would have been used."""
    absent = DeviceCheck("flash_attn", None, ABSENT)
    right = [DeviceCheck("varlen", True, "fine"), absent, DeviceCheck("triton", True, "fine")]
    assert (SelfTest(tuple(right)).way, SelfTest(tuple(right)).reasons) == ("graphs", ())
    wrong = DeviceCheck("model", False, WRONG)
    found = SelfTest((*right, wrong))
    assert (found.way, found.reasons) == ("varlen", (f"model: {WRONG}",))
    found = SelfTest((replace(right[0], holds=False, found=WRONG), *right[1:], wrong))
    want = (f"varlen: {WRONG}", f"flash_attn: {ABSENT}", f"model: {WRONG}")
    assert (found.way, found.reasons) == ("sdpa", want)
    assert lines(found, "cuda")[-1] == "Best way of computing here: sdpa."
