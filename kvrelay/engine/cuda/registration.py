"""Host memory that is registered with CUDA's driver, so that DMA reads and writes it directly.

Each mapping is registered in a thread of its own: a large one takes long, and CUDA keeps a refusal
as the thread's last error. No copy uses a mapping before it is registered, or if the driver
refuses. After ``unregister`` it stays registered until no copy uses it.
"""

from __future__ import annotations

import logging
import mmap
import threading
from typing import Protocol

import numpy as np
import torch

log = logging.getLogger(__name__)

_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly


class MemoryDriver(Protocol):
    """The two calls of the driver."""

    def register(self, address: int, size: int, writable: bool) -> str | None:
        """``None``, or why the driver refuses."""

    def unregister(self, address: int) -> None: ...


class CudaMemory:
    """CUDA's runtime, as torch has loaded it."""

    def register(self, address: int, size: int, writable: bool) -> str | None:
        """A mapping that the host cannot write needs a flag that some devices do not know."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
        code = runtime.cudaHostRegister(address, size, flags)
        return None if int(code) == 0 else str(runtime.cudaGetErrorString(code))

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class Mapping:
    """A mapping, its state, and how many batches of copies use it."""

    def __init__(self, memory: mmap.mmap, writable: bool) -> None:
        self.memory = memory
        self.address = address_of(memoryview(memory))
        self.size = len(memory)
        self.writable = writable
        self.registered = False
        self.refusal: str | None = None
        self.answered = threading.Event()
        self.wanted = True
        self.users = 0

    def holds(self, address: int, size: int) -> bool:
        """Whether these bytes lie in the mapping."""
        return self.address <= address and address + size <= self.address + self.size


class RegisteredMemory:
    """The mappings of one process. Thread-safe."""

    def __init__(self, driver: MemoryDriver | None = None) -> None:
        self._driver = driver or CudaMemory()
        self._lock = threading.Lock()
        self._mappings: dict[int, Mapping] = {}  # by the identity of the object
        self._refused = False

    def register(self, memory: mmap.mmap, writable: bool) -> None:
        """See ``kvstore.device.MemoryRegistrar``."""
        made = Mapping(memory, writable)
        with self._lock:
            self._mappings[id(memory)] = made
        thread = threading.Thread(target=self._open, args=(made,), name="register", daemon=True)
        thread.start()

    def unregister(self, memory: mmap.mmap) -> None:
        """See ``kvstore.device.MemoryRegistrar``."""
        with self._lock:
            made = self._mappings.pop(id(memory), None)
            if made is not None:
                made.wanted = False
        if made is not None:
            self._close_unused(made)

    def refusal(self, memory: mmap.mmap, seconds: float) -> str | None:
        """Why the driver refuses a mapping, ``None`` if it does not; waits for its answer."""
        with self._lock:
            made = self._mappings[id(memory)]
        if not made.answered.wait(seconds):
            return f"no answer in {seconds:g} seconds"
        return made.refusal

    def use(self, address: int, size: int, write: bool) -> Mapping | None:
        """The registered mapping of these bytes, until ``release``; ``None`` if there is none."""
        with self._lock:
            for made in self._mappings.values():
                if made.registered and made.holds(address, size) and made.writable >= write:
                    made.users += 1
                    return made
        return None

    def release(self, used: Mapping) -> None:
        """End a use: no copy of it runs any more."""
        with self._lock:
            used.users -= 1
        self._close_unused(used)

    def _open(self, made: Mapping) -> None:
        why = self._driver.register(made.address, made.size, made.writable)
        with self._lock:
            made.registered = why is None
            made.refusal = why
            first = why is not None and not self._refused
            self._refused = self._refused or first
        if first:
            log.warning(
                "the driver does not register memory that is shared with the store (%s): the CPU"
                " copies blocks between it and pinned memory",
                why,
            )
        made.answered.set()
        self._close_unused(made)

    def _close_unused(self, made: Mapping) -> None:
        with self._lock:
            ends = made.registered and not made.wanted and not made.users
            if ends:
                made.registered = False
        if ends:
            self._driver.unregister(made.address)


def address_of(view: memoryview) -> int:
    """Where the bytes of a view begin."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
