"""A simulated CUDA runtime over host memory: streams run in any order that events allow.

What a program enqueues runs later: when it must (a stream or an event is waited for), or earlier,
as drawn. A program that forgets to wait sees old bytes under some seed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._pytree import tree_map_only

_Operation = Callable[[], object]
WRITES = ("copy_", "__setitem__", "zero_", "fill_")
COMPUTES = ("cat", "float", "int", "max")


class Runtime:
    """The streams of a device. ``seed`` draws what runs when nothing has to."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.queues: dict[int, list[tuple[_Operation, int | None]]] = {}
        self.done: set[int] = set()
        self.current = [0]  # the stream of the innermost ``torch.cuda.stream``
        self._names = iter(range(1, 1 << 30))
        self.pinned: dict[int, int] = {}  # bytes that the device reaches, by address
        self.kept: list[torch.Tensor] = []  # what is pinned: a mistaken program may copy there late
        self.registered: dict[int, tuple[int, bool]] = {}  # bytes, and whether it may write them
        self.meanwhile: Callable[[], object] = lambda: None  # what other threads do in a wait
        self.counts: Counter[str] = Counter()

    def name(self) -> int:
        """A new number, of a stream or of an event's record."""
        return next(self._names)

    def enqueue(self, stream: int, operation: _Operation, needs: int | None = None) -> None:
        """Run an operation behind those of its stream, and after a record if it ``needs`` one."""
        self.queues.setdefault(stream, []).append((operation, needs))
        while self.rng.random() < 0.3:
            self.step()

    def step(self) -> bool:
        """Run one operation that may run now; whether there was any."""
        ready = [
            stream
            for stream, queue in self.queues.items()
            if queue and (queue[0][1] is None or queue[0][1] in self.done)
        ]
        if ready:
            operation, _ = self.queues[self.rng.choice(ready)].pop(0)
            with torch.inference_mode():  # tensors of a step may be written in no other
                operation()
        return bool(ready)

    def reaches(self, host: torch.Tensor, write: bool) -> bool:
        """Whether the device can copy from (or to) this memory of the host now."""
        first, size = host.data_ptr(), host.nbytes
        ranges = [*self.pinned.items()]
        ranges += [(at, n) for at, (n, writable) in self.registered.items() if writable >= write]
        return any(at <= first and first + size <= at + n for at, n in ranges)

    def wait(self, ended: Callable[[], bool]) -> None:
        """Run operations until something has ended; others may run too."""
        self.meanwhile()
        while not ended():
            assert self.step(), "the streams wait for each other"


def _tensors(result: object) -> tuple[torch.Tensor, ...]:
    """Of a function that returns one or several."""
    if isinstance(result, torch.Tensor):
        return (result,)
    assert isinstance(result, tuple)
    return result


class Memory(torch.Tensor):
    """Memory of the device: what writes it is enqueued."""

    runtime: Runtime

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        if func.__name__ == "cpu":
            return cls._read_back(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in WRITES:
                named.pop("non_blocking", None)
                plain = [
                    a.as_subclass(torch.Tensor) if isinstance(a, torch.Tensor) else a for a in args
                ]
                if isinstance(args[0], Pinned) and not _on_device(args[1:]):
                    func(*plain, **named)  # from one place of the host to another: at once
                else:
                    cls._launch(func, args, plain, named)
                return args[0]
            if func.__name__ in COMPUTES:
                return cls._compute(func, args, named)
            if func.__name__ in ("to", "contiguous"):  # read when the copy out of it runs
                return args[0]
            made = func(*args, **named)
        return made.as_subclass(cls) if isinstance(made, torch.Tensor) else made

    @classmethod
    def _compute(
        cls, func: Callable[..., object], args: tuple[object, ...], named: dict[str, object]
    ) -> object:
        """Enqueue a kernel that makes new tensors: what it reads is read when it runs."""
        runtime = cls.runtime
        plain = tree_map_only(torch.Tensor, lambda one: one.as_subclass(torch.Tensor), args)
        alike = _tensors(func(*tree_map_only(torch.Tensor, torch.zeros_like, plain), **named))
        made = [torch.zeros_like(one) for one in alike]

        def run() -> None:
            for target, computed in zip(made, _tensors(func(*plain, **named)), strict=True):
                target.copy_(computed)

        runtime.counts["kernels"] += 1
        runtime.enqueue(runtime.current[-1], run)
        found = tuple(one.as_subclass(cls) for one in made)
        return found if len(found) > 1 else found[0]

    @classmethod
    def _read_back(cls, given: object) -> torch.Tensor:
        """A copy to the host, which waits for its stream."""
        assert isinstance(given, torch.Tensor)
        runtime = cls.runtime
        with torch._C.DisableTorchFunctionSubclass():
            source = given.as_subclass(torch.Tensor)
            seen = torch.zeros_like(source)
        runtime.counts["read back"] += 1
        ended: list[torch.Tensor] = []
        runtime.enqueue(runtime.current[-1], lambda: ended.append(seen.copy_(source)))
        runtime.wait(lambda: bool(ended))
        return seen

    @classmethod
    def _launch(
        cls,
        func: Callable[..., object],
        args: tuple[object, ...],
        plain: list[object],
        named: dict[str, object],
    ) -> None:
        """Enqueue a kernel or a copy. The host's memory must be within reach when a copy runs."""
        runtime = cls.runtime
        host = [
            (tensor, number == 0)
            for number, (given, tensor) in enumerate(zip(args, plain, strict=True))
            if isinstance(tensor, torch.Tensor)
            and (type(given) is torch.Tensor or isinstance(given, Pinned))
        ]
        runtime.counts["copies" if host else "kernels"] += 1

        def run() -> None:
            for tensor, write in host:
                assert runtime.reaches(tensor, write), "a copy uses memory that is not registered"
            func(*plain, **named)

        runtime.enqueue(runtime.current[-1], run)


class Pinned(Memory):
    """Memory of the host that the device can copy to and from while the program goes on."""


def _on_device(values: tuple[object, ...]) -> bool:
    return any(isinstance(v, Memory) and not isinstance(v, Pinned) for v in values)


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: object = None) -> None:
        self.number = Memory.runtime.name()

    def wait_event(self, event: Event) -> None:
        if event.record_number is not None:
            Memory.runtime.enqueue(self.number, lambda: None, event.record_number)

    def synchronize(self) -> None:
        runtime = Memory.runtime
        runtime.wait(lambda: not runtime.queues.get(self.number))


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, blocking: bool = False) -> None:
        self.record_number: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        runtime = Memory.runtime
        number = self.record_number = runtime.name()
        runtime.counts["records"] += 1
        where = runtime.current[-1] if stream is None else stream.number
        runtime.enqueue(where, lambda: runtime.done.add(number))

    def synchronize(self) -> None:
        runtime = Memory.runtime
        runtime.wait(lambda: self.record_number is None or self.record_number in runtime.done)


class _Default(Stream):
    def __init__(self) -> None:
        self.number = 0


@contextmanager
def _within(stream: Stream) -> Iterator[None]:
    Memory.runtime.current.append(stream.number)
    try:
        yield
    finally:
        Memory.runtime.current.pop()


def wait_for_registrations() -> None:
    """Wait until the driver was asked for every mapping (``kvrelay.engine.cuda.registration``)."""
    for thread in threading.enumerate():
        if thread.name == "register":
            thread.join()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``torch.cuda`` and pinned memory those of ``Memory.runtime``."""
    own, own_tensor = torch.empty, torch.tensor

    def tensor(data: object, *, device: object = "cpu", **named: object) -> torch.Tensor:
        made: torch.Tensor = own_tensor(data, **named)  # type: ignore[arg-type]
        return made.as_subclass(Memory) if str(device).startswith("cuda") else made

    def empty(*size: object, pin_memory: bool = False, **named: object) -> torch.Tensor:
        there = str(named.pop("device", "cpu")).startswith("cuda")
        made: torch.Tensor = own(*size, **named)  # type: ignore[call-overload]
        if there:
            return made.as_subclass(Memory)
        if not pin_memory:
            return made
        Memory.runtime.pinned[made.data_ptr()] = made.nbytes
        Memory.runtime.kept.append(made)
        Memory.runtime.counts["pinned"] += 1
        return made.as_subclass(Pinned)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", _within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _Default())
