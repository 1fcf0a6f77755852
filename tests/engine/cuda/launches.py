"""Counts what a step of the real runner launches, on fake CUDA tensors: ``.. KIND [BACKEND [SM]]``.

Prints one JSON object a step. Nothing is computed: a fake tensor has a shape, a dtype and a device,
and an operation between devices is an error as it is on a GPU. A copy from the host or a read of
data inside the forward pass is what the capture of a CUDA graph refuses. A copy out of memory that
is not pinned waits for all that was launched, whatever it is asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from triton.runtime.jit import JITFunction

from kvrelay.engine.attention import pool
from kvrelay.engine.attention.native.build import compiler
from kvrelay.engine.core.updates import Foresee, OutputGrammar, Work
from kvrelay.engine.model.forward import TransformersModel
from kvrelay.engine.model.loading import LoadedModel, ModelInfo, computing
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampling.masks import GrammarMasks
from kvrelay.sampling import Sampling
from tests.models import KINDS, VOCAB

HEADS, KV_HEADS, DIM = 8, 2, 64
OWN_HEADS = ("llama-mha", "gpt2", "gpt-neox")  # a KV head for every query head
SIZES = {"triton": 16, "varlen": 256}  # positions of a block
# Operations that are views, or that allocate and do nothing else.
QUIET = (
    *("_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "expand"),
    *("lift_fresh", "permute", "select", "slice", "split", "squeeze", "t", "transpose", "unbind"),
    *("unsqueeze", "view", "_reshape_alias", "new_empty", "empty_strided", "device"),
)
WAITING = ("_local_scalar_dense", "item", "nonzero", "_unique2", "equal")
# Torch's grouped product, in bfloat16 on these devices, reads how many rows each group has on the
# device; elsewhere the host does, inside of the operation (aten/src/ATen/native/cuda/GroupedBlas).
GROUPED = (9, 10)
PINNED: list[torch.UntypedStorage] = []  # what steps have allocated so far


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Launches, copies from the host and waits for the device, by name."""

    def __init__(self, major: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._major = major
        self.launched: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        name = str(func.overloadpacket.__name__)  # type: ignore[attr-defined]
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        target = str(named.get("device", tensors[0].device if tensors else "cpu"))
        if name in WAITING or (name == "_grouped_mm" and not self._grouped(tensors)):
            self.waited[name] += 1
        elif (
            name in ("_to_copy", "copy_")
            and len({target[:3], *(str(t.device)[:3] for t in tensors)}) > 1
        ):
            up = target.startswith("cuda")
            assert not up or self._is_pinned(tensors[-1]), "a copy out of memory that is not pinned"
            self.copied["up" if up else "down"] += 1
        elif target.startswith("cuda") and name not in QUIET:
            self.launched[name] += 1
        made = func(*args, **named)
        if named.get("pin_memory"):
            assert isinstance(made, torch.Tensor)
            PINNED.append(made.untyped_storage())
        return made

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        own = tensor.untyped_storage()._cdata
        return any(storage._cdata == own for storage in PINNED)

    def _grouped(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self._major in GROUPED and tensors[0].dtype is torch.bfloat16

    def kernel(self, function: JITFunction, *given: object, **named: object) -> None:
        """In place of ``JITFunction.run``."""
        for value in (*given, *named.values()):
            for field in value if isinstance(value, tuple) else (value,):
                assert not isinstance(field, torch.Tensor) or field.device.type == "cuda", function
        self.launched[str(function.fn.__name__)] += 1


class _NoEvent:
    """A CPU build of torch has no events."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _NoCopier:
    """A CPU build of torch has no streams."""

    def __init__(self, tensor: torch.Tensor) -> None:
        pass

    def computed(self) -> None:
        pass


def enable(mode: FakeTensorMode, major: int) -> None:
    """Make this torch believe in a CUDA device of capability ``major``, for fake tensors."""
    library = Path(tempfile.mkdtemp()) / "guard.so"
    root = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", "-w", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
    source = str(Path(__file__).with_name("guard.cpp"))
    subprocess.run([*compiler(), source, "-o", str(library), *flags], check=True)
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    own = torch.from_numpy

    def from_numpy(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return mode.from_tensor(own(array))

    torch.from_numpy = from_numpy  # type: ignore[assignment]
    torch.cuda.Event = _NoEvent  # type: ignore[assignment,misc]
    torch.Tensor.numpy = _zeros  # type: ignore[assignment,method-assign]
    torch.cuda.get_device_capability = lambda device=None: (major, 0)
    torch.backends.cuda.is_flash_attention_available = lambda: True
    pool.DeviceBlockCopier = _NoCopier  # type: ignore[assignment,attr-defined]


def _zeros(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Instead of numbers that were read back."""
    assert tensor.device.type == "cpu"
    assert tensor.dtype is torch.int32
    return np.zeros(tensor.shape, np.int32)


def runner_of(kind: str, layers: int, backend: str) -> Runner:
    """A runner of a model on the fake device."""
    model_type, own = KINDS[kind]
    if "layer_types" in own:
        own = {**own, "layer_types": ["full_attention"] * layers}
    kv_heads = HEADS if kind in OWN_HEADS else KV_HEADS
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": DIM}
    config = AutoConfig.for_model(
        model_type,
        **{**own, "vocab_size": VOCAB, "hidden_size": 512, "num_hidden_layers": layers, **shape},
        bos_token_id=None,
        eos_token_id=None,
    )
    make = cast(Callable[..., PreTrainedModel], AutoModelForCausalLM.from_config)
    with torch.device("cuda"), torch.no_grad():
        given = make(config, dtype=torch.bfloat16).train(False)
        forward = computing(TransformersModel(given), 4096)
    info = ModelInfo(
        name=kind,
        revision="",
        architecture="",
        dtype="bfloat16",
        device="cuda",
        num_layers=layers,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        vocab_size=VOCAB,
        max_model_len=4096,
        position_limit=4096,
        eos_token_ids=(),
        num_parameters=0,
        logit_error=0.0,
    )
    model = LoadedModel(info, forward, torch.device("cuda"))
    return Runner(model, 64_000 // SIZES[backend], SIZES[backend], backend)


GREEDY = Sampling(temperature=0.0)
ALL = Sampling(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    stop_token_ids=(3,),
    min_tokens=100_000,
    logprobs=4,
    logit_bias={5: 1.0},
    bad_word_ids=((7,),),
)


class _Anything:
    """A grammar for which ``masks`` stand."""


def masks(count: int) -> GrammarMasks:
    """Of as many works, all of which have a grammar."""
    return GrammarMasks(tuple(range(count)), np.zeros((count, VOCAB), np.bool_), {})


def works(
    spans: Sequence[tuple[int, int]], sampling: Sampling, size: int, restricted: bool
) -> list[Work]:
    """Entries that all sample."""
    grammar = cast(OutputGrammar, _Anything()) if restricted else None
    made = []
    for start, count in spans:
        table = range(-(-(start + count) // size))
        made.append(Work([1] * (start + count), start, count, table, 1, sampling, grammar))
    return made


DECODE = [(100 + 30 * i, 1) for i in range(64)]
STEPS = {
    "decode": (DECODE, GREEDY),
    "drawn": (DECODE, Sampling(temperature=0.7)),
    "all options": (DECODE, ALL),
    "prefill": ([(0, 512), (700, 100)], GREEDY),
    "mixed": ([(1000, 1), (5, 1), (0, 200)], GREEDY),
    "structured": (DECODE, GREEDY),
}


def main(kind: str, backend: str, major: int) -> None:
    """Steps of models of two and five layers: the difference is that of three layers."""
    with FakeTensorMode() as mode:
        enable(mode, major)
        counts: dict[str, list[tuple[int, int, tuple[int, int, int]]]] = {}
        for layers in (2, 5):
            runner = runner_of(kind, layers, backend)
            for name, (spans, sampling) in STEPS.items():
                step = Count(major)
                JITFunction.run = _passed_to(step)
                own = runner._forward
                inner = _Watched(own, step)
                runner._forward = inner
                restricted = name == "structured"
                asked = works(spans, sampling, SIZES[backend], restricted)
                made = masks(len(asked)) if restricted else None
                with torch.no_grad(), step:
                    computed = runner.compute(asked)
                    before = step.launched.total()
                    sampling_works = [asked[n] for n in computed.batch.samples]
                    seen: list[tuple[int, int]] = []
                    runner._choose(computed, sampling_works, made, _noting(step, seen))
                runner._forward = own
                assert seen == [(step.launched.total(), 0)], "planned before all was launched"
                assert step.waited == inner.waited, step.waited
                assert not inner.inside, inner.inside
                chosen = step.launched.total() - before
                copies = (step.copied["up"], step.copied["down"], chosen)
                counts.setdefault(name, []).append((before, step.waited.total(), copies))
    for name, ((two, waits, copies), (five, more, again)) in counts.items():
        assert copies == again, "they depend on the number of layers"
        up, down, sampling_launches = copies
        a_layer = (five - two) / 3
        told = {"layer": a_layer, "rest": two - 2 * a_layer, "sampling": sampling_launches}
        told["waits"] = (more - waits) / 3
        assert waits == 2 * told["waits"], "a wait outside of the layers"
        print(json.dumps({"step": name, "up": up, "down": down, **told}))


def _noting(step: Count, seen: list[tuple[int, int]]) -> Foresee:
    """Notes, when the next step is foreseen, what was launched and what was read back."""

    def foresee() -> list[Work]:
        seen.append((step.launched.total(), step.copied["down"]))
        return []

    return foresee


def _passed_to(count: Count) -> Callable[..., None]:
    def run(function: JITFunction, *given: object, **named: object) -> None:
        count.kernel(function, *given, **named)

    return run


class _Watched:
    """A forward pass, and the copies and waits that happen inside of it."""

    def __init__(self, own: object, count: Count) -> None:
        self._own = own
        self._count = count
        self.inside: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()

    def logits(self, *arguments: object) -> torch.Tensor:
        before = self._count.copied.copy()
        found = cast(torch.Tensor, self._own.logits(*arguments))  # type: ignore[attr-defined]
        self.inside = self._count.copied - before
        self.waited = self._count.waited.copy()
        return found


if __name__ == "__main__":
    kind_asked, backend_asked, version = (*sys.argv[1:], *("triton", "90")[len(sys.argv) - 2 :])
    main(kind_asked, backend_asked, int(version) // 10)
