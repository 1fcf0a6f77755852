"""What the tests with vLLM share: engines in processes of their own, a model, a store, prompts."""

from __future__ import annotations

import json
import os
import random
import selectors
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvrelay.block.header import decode, encode
from kvrelay.rpc.deadline import Deadline
from kvstore.base import NameQuery
from kvstore.client.remote import RemoteStore
from tests.cluster.processes import until
from tests.kvstore.rig import arena_in
from tests.vllm.environment import ROOT, WorkerEnvironment

VOCAB = 288
BLOCK = 32  # the smallest that vLLM's attention on a CPU has
START_SECONDS = 200.0
CALL_SECONDS = 120.0
SAMPLER = "kvrelay.engine.vllm.sampling:KvrelaySampling"


@dataclass(frozen=True, slots=True)
class Request:
    """One request to an engine; ``sampling`` goes to kvrelay's sampler, else vLLM's argmax."""

    tokens: Sequence[int]
    max_tokens: int = 16
    sampling: Mapping[str, object] | None = None
    prompt_len: int | None = None
    logprobs: int | None = None
    salt: str | None = None
    save_tail: bool = False
    skip: bool = False
    skip_reading: bool | None = None

    def message(self) -> dict[str, object]:
        """As the driver takes it."""
        wishes = {"save_tail": self.save_tail, "skip": self.skip}
        extra: dict[str, object] = {"kv_transfer_params": {"kvrelay": wishes}}
        if self.sampling is not None:
            length = self.prompt_len or len(self.tokens)
            extra["kvrelay"] = {"prompt_len": length, **self.sampling}
        return {
            "tokens": list(self.tokens),
            "max_tokens": self.max_tokens,
            "logprobs": self.logprobs,
            "salt": self.salt,
            "skip_reading": self.skip_reading,
            "extra": extra,
        }


@dataclass(frozen=True, slots=True)
class Output:
    """What became of a request."""

    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached: int | None = None
    account: dict[str, int | str] = field(default_factory=dict)
    finish: str | None = None
    seconds: float | None = None


def with_store(store: str, extra: Mapping[str, object] | None = None) -> dict[str, object]:
    """vLLM's configuration of the connector; ``extra`` are our own options."""
    return {
        "kv_connector": "KvrelayConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvrelay.engine.vllm.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "audit": True, **(extra or {})},
    }


class EngineError(Exception):
    """The engine refused to start, or a call failed."""


class VllmProcess:
    """An engine of vLLM with the connector, unless ``store`` is ``None``."""

    def __init__(
        self,
        model: Path,
        store: str | None,
        log: Path,
        *,
        extra: Mapping[str, object] | None = None,
        transfer: Mapping[str, object] | None = None,
        sampler: bool = True,
        environ: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        engine = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 256,
            "max_num_batched_tokens": 256,
            **settings,
        }
        configured = None if store is None else {**with_store(store, extra), **(transfer or {})}
        options = {
            "engine": engine,
            "sampler": SAMPLER if sampler else None,
            "transfer": configured,
        }
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [WorkerEnvironment().python, "-m", "tests.vllm.drive", json.dumps(options)],
                cwd=ROOT,
                env={**os.environ, **ENVIRON, **(environ or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._answer(START_SECONDS)

    @property
    def pid(self) -> int:
        """The process with engine and connector."""
        return self._process.pid

    def call(self, name: str, **arguments: object) -> object:
        """Call a method of the driver."""
        self.begin(name, **arguments)
        return self.end()

    def begin(self, name: str, **arguments: object) -> None:
        """Send a call; ``end`` waits for its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self._process.stdin.flush()

    def end(self) -> object:
        """The result of the call that was sent."""
        return self._answer(CALL_SECONDS)

    def generate(self, *requests: Request, abort: Mapping[int, int] | None = None) -> list[Output]:
        """Serve requests together."""
        messages = [request.message() for request in requests]
        return outputs(self.call("generate", requests=messages, abort=abort))

    def settle(self) -> dict[str, object]:
        """Wait for every transfer; the audit must be clean, and no block held."""
        held = self.call("settle")
        state = self.call("state")
        assert isinstance(held, dict)
        assert isinstance(state, dict)
        assert held["held"] == []
        assert state["findings"] == []
        assert state["tracks"] == 0
        return state

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that only the store has what was computed."""
        self.settle()
        assert self.call("forget") is True

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _answer(self, seconds: float) -> object:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            if not ready.select(seconds):
                self._process.kill()
                raise EngineError(f"no answer in {seconds:g} s, see {self.log}")
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"the engine ended: {self.log.read_text()[-3000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["result"]


# One thread a process: two cores are shared by the store, the test and the engine.
ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(ROOT),
}


class StoreProcess:
    """A store service, and its memory."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self._address = url.partition("?")[0].removeprefix("kvrelay://")

    def flip(self, names: Sequence[bytes], block: int) -> None:
        """Turn one bit of the payload of ``names[block]``, where it lies in the store."""
        self._change(names, block, lambda stored: [*stored[:-9], stored[-9] ^ 4, *stored[-8:]])

    def wait_for(self, names: Sequence[bytes]) -> None:
        """Until all of them are there: saves end after the answer."""
        with closing(RemoteStore(self._address)) as direct:
            query = NameQuery(tuple(names))
            until(
                lambda: direct.lookup(query, 20.0).lead == len(names),
                f"{len(names)} blocks in the store",
                60.0,
            )

    def retell(self, names: Sequence[bytes], block: int) -> None:
        """Let ``names[block]`` say another first token, in a header that is right in itself."""

        def change(stored: bytes) -> bytes:
            header = decode(stored)
            told = replace(header, tokens=(header.tokens[0] ^ 1, *header.tokens[1:]))
            return encode(told) + stored[header.length :]

        self._change(names, block, change)

    def _change(
        self, names: Sequence[bytes], block: int, change: Callable[[bytes], Iterable[int]]
    ) -> None:
        """Write other bytes where ``names[block]``, header and payload, lies in the store."""
        direct = RemoteStore(self._address)
        found = direct._calls.locate(list(names), 60_000, Deadline.after(20))
        place = arena_in(self.process) + found.offsets[block]
        with open(f"/proc/{self.process.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(place)
            stored = memory.read(found.lengths[block])
            memory.seek(place)
            memory.write(bytes(change(stored)))
        direct._calls.release_lease(found.boot, found.lease, 20)
        direct.close()


def outputs(result: object) -> list[Output]:
    """What ``generate`` returned."""
    assert isinstance(result, dict)
    return [
        Output(
            tokens=one["tokens"],
            logprobs=one["logprobs"],
            cached=one.get("cached"),
            account=one.get("account") or {},
            finish=one.get("finish"),
            seconds=one.get("seconds"),
        )
        for one in result["outputs"]
    ]


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens, without the special ones."""
    numbers = random.Random(seed)
    return [numbers.randrange(10, VOCAB - 40) for _ in range(length)]
