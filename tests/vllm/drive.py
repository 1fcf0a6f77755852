"""One vLLM engine in a process of its own, in vLLM's environment: JSON lines in, JSON lines out.

``python -m tests.vllm.drive OPTIONS``: ``OPTIONS`` is the JSON of ``EngineOptions`` in the rig. A
line ``{"do": NAME, ...}`` calls the method of that name; its result is one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

SETTLE_SECONDS = 30.0


class Drive:
    """The engine and what the tests call."""

    def __init__(self, options: Mapping[str, object]) -> None:
        transfer = options.get("transfer")
        settings: dict[str, object] = dict(options["engine"])  # type: ignore[call-overload]
        if options.get("sampler"):
            settings["logits_processors"] = [options["sampler"]]
        if transfer is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**cast("dict[str, object]", transfer))
        self.llm = LLM(enforce_eager=True, disable_log_stats=False, **settings)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.steps = 0

    def generate(
        self, requests: Sequence[Mapping[str, object]], abort: Mapping[str, int] | None = None
    ) -> dict[str, object]:
        """Serve requests together; ``abort`` ends the n-th one after so many steps."""
        begun, busy = time.perf_counter(), time.process_time()
        ids = []
        for number, request in enumerate(requests):
            ids.append(f"r{time.monotonic_ns()}-{number}")
            self.engine.add_request(ids[-1], _prompt(request), _params(request))
        due = {ids[int(number)]: steps for number, steps in (abort or {}).items()}
        outputs: dict[str, dict[str, object]] = {one: {"tokens": [], "logprobs": []} for one in ids}
        seconds: dict[str, float] = {}
        steps = 0
        while self.engine.has_unfinished_requests():
            for done in self.engine.step():
                seconds.setdefault(done.request_id, time.perf_counter() - begun)
                _note(outputs[done.request_id], done)
            steps += 1
            for name, after in list(due.items()):
                if steps >= after:
                    self.engine.abort_request([name])
                    del due[name]
        self.steps += steps
        for one, output in outputs.items():
            output["seconds"] = seconds.get(one)
        return {
            "outputs": [outputs[one] for one in ids],
            "seconds": time.perf_counter() - begun,
            "processor_seconds": time.process_time() - busy,
        }

    def settle(self) -> dict[str, object]:
        """Step until every transfer has ended; how many blocks are held then."""
        until = time.monotonic() + SETTLE_SECONDS
        while self.scheduler.has_requests() and time.monotonic() < until:
            self.engine.step()
        pool = self.scheduler.kv_cache_manager.block_pool
        held = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
        return {"held": held, "free": pool.get_num_free_blocks(), "blocks": len(pool.blocks)}

    def forget(self) -> bool:
        """Empty vLLM's own prefix cache."""
        return bool(self.llm.reset_prefix_cache())

    def state(self) -> dict[str, object]:
        """What the connector says of itself."""
        from dataclasses import asdict

        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = self.scheduler.connector
        rank = get_kv_transfer_group()
        return {
            "findings": [[f.invariant, f.request_id, f.message] for f in connector.audit()],
            "scheduler": asdict(connector.counters),
            "rank": asdict(rank.counters),
            "tracks": len(connector.side.tracks),
        }

    def metrics(self) -> dict[str, float]:
        """The samples of our families on vLLM's metrics page."""
        from prometheus_client import REGISTRY

        samples = (sample for family in REGISTRY.collect() for sample in family.samples)
        return {one.name: one.value for one in samples if one.name.startswith("kvrelay:")}


def _prompt(request: Mapping[str, object]) -> dict[str, object]:
    prompt: dict[str, object] = {"prompt_token_ids": request["tokens"]}
    if request.get("salt"):
        prompt["cache_salt"] = request["salt"]
    return prompt


def _params(request: Mapping[str, object]) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=request.get("max_tokens", 16),
        ignore_eos=True,
        detokenize=False,
        logprobs=request.get("logprobs"),
        stop_token_ids=request.get("stop_token_ids"),
        extra_args=request.get("extra"),
        skip_reading_prefix_cache=request.get("skip_reading"),
    )


def _note(output: dict[str, object], done: object) -> None:
    made = done.outputs[0]  # type: ignore[attr-defined]
    output["tokens"] = list(made.token_ids)
    output["logprobs"] = [
        {str(token): one.logprob for token, one in step.items()} for step in made.logprobs or ()
    ]
    output["cached"] = done.num_cached_tokens  # type: ignore[attr-defined]
    output["account"] = (done.kv_transfer_params or {}).get("kvrelay")  # type: ignore[attr-defined]
    output["finish"] = made.finish_reason


def main() -> None:
    """Answer lines until the input ends; vLLM's own output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        drive = Drive(json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - the edge of the process: the test reads it
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        os._exit(1)
    answers.write(json.dumps({"result": "ready"}) + "\n")
    for line in sys.stdin:
        call = json.loads(line)
        method: Callable[..., object] = getattr(drive, call.pop("do"))
        try:
            answers.write(json.dumps({"result": method(**call)}) + "\n")
        except Exception as error:  # noqa: BLE001 - the edge of the process: the test reads it
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
