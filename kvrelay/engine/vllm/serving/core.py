"""vLLM's ``EngineCore`` in this process, as the engine drives it.

With several ranks vLLM starts a process for each; they end with this one. Async scheduling is off:
a request that ends computes no position beyond its last token. Imports vLLM when it opens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvrelay.connector.counters import ConnectorCounters
from kvrelay.engine.core.audit import Finding
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import Logprob, OutputGrammar, Sampled
from kvrelay.engine.vllm.grammars import GRAMMARS
from kvrelay.engine.vllm.kv.account import RequestAccount
from kvrelay.engine.vllm.kv.setup import NO_STORE
from kvrelay.engine.vllm.serving.engine import CoreLoad, CoreOutput, StepListener
from kvrelay.engine.vllm.serving.environment import prepare
from kvrelay.errors import Rejected, Unservable
from kvrelay.sampling import Sampling
from kvrelay.structured import FIELD

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core import EngineCore

CONNECTOR = "kvrelay.engine.vllm.connector"
PROCESSOR = "kvrelay.engine.vllm.sampling:KvrelaySampling"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """What of vLLM's engine is set; ``None`` leaves vLLM's default. ``num_blocks`` can be used.

    ``extra`` are further fields of vLLM's ``EngineArgs``, as their texts.
    """

    model: str
    dtype: str
    block_size: int
    num_blocks: int | None
    kv_memory: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    extra: Mapping[str, object]


def configure(options: CoreOptions, store: str | None, audit: bool) -> VllmConfig:
    """vLLM's configuration; raises ``Unservable`` with vLLM's reason. Imports vLLM."""
    prepare()
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector="KvrelayConnector",
        kv_role="kv_both",
        kv_connector_module_path=CONNECTOR,
        kv_connector_extra_config={"store": store or NO_STORE, "audit": audit},
        kv_load_failure_policy="recompute",
    )
    given: dict[str, object] = {
        "model": options.model,
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "block_size": options.block_size,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "async_scheduling": False,
        "kv_transfer_config": transfer,
        "logits_processors": [PROCESSOR],
    }
    if taken := sorted(given.keys() & options.extra.keys()):
        raise Rejected("vllm_option", f"{taken[0]} is set by kvrelay's own options")
    unset = {name: value for name, value in given.items() if value is not None}
    try:
        config: VllmConfig = EngineArgs(**unset, **options.extra).create_engine_config()
    except (TypeError, ValueError) as error:
        raise Unservable(f"vLLM refuses the configuration: {_line(error)}") from error
    _set_pool(config, options)
    return config


def open_core(config: VllmConfig, namespace: Mapping[str, object]) -> VllmCore:
    """Load the model. Blocks are named within ``namespace`` (fields of ``block.Namespace``)."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config.kv_transfer_config.kv_connector_extra_config["namespace"] = dict(namespace)
    try:
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise Unservable(f"vLLM cannot start: {_line(error)}") from error
    return VllmCore(core)


def _set_pool(config: VllmConfig, options: CoreOptions) -> None:
    """The size of the pool: as many blocks as given, else what memory holds and requests can use.

    vLLM keeps one block more, as padding. Without a bound of the memory it chooses itself.
    """
    model, cache = config.model_config, config.cache_config
    heads = model.get_num_kv_heads(config.parallel_config)
    layers = model.get_num_layers(config.parallel_config)
    positions = layers * heads * 2 * model.get_head_size() * model.dtype.itemsize
    block_bytes = positions * cache.block_size
    blocks = options.num_blocks
    if blocks is None and options.kv_memory is not None:
        useful = -(model.max_model_len // -cache.block_size) * options.max_num_seqs
        blocks = max(min(options.kv_memory // block_bytes, useful), 1)
    if blocks is not None:
        cache.num_gpu_blocks_override = blocks + 1
        cache.kv_cache_memory_bytes = (blocks + 1) * block_bytes


class VllmCore:
    """The ``SteppedCore`` over vLLM's ``EngineCore``."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._connector = core.scheduler.get_kv_connector()
        self._pool = core.scheduler.kv_cache_manager.block_pool

    @property
    def limits(self) -> EngineLimits:
        """The bounds that vLLM has settled on; one block of the pool is its padding."""
        config = self._core.vllm_config
        scheduling = config.scheduler_config
        return EngineLimits(
            num_blocks=config.cache_config.num_gpu_blocks - 1,
            block_size=config.cache_config.block_size,
            # vLLM counts the last token too, whose position is never computed.
            max_model_len=config.model_config.max_model_len - 1,
            max_num_seqs=scheduling.max_num_seqs,
            max_num_batched_tokens=scheduling.max_num_batched_tokens,
        )

    def counters(self) -> ConnectorCounters:
        """The counters of the store connector."""
        counters: ConnectorCounters = self._connector.counters
        return counters

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.has_requests())

    def listen(self, listener: StepListener) -> None:
        """Report steps and requests to ``listener``: the connector does, and ``schedule`` here."""
        self._connector.listener = listener
        schedule = self._scheduler.schedule

        def observed(throttle_prefills: bool = False) -> SchedulerOutput:
            planned: SchedulerOutput = schedule(throttle_prefills)
            listener.scheduled(planned.num_scheduled_tokens, planned.preempted_req_ids or ())
            return planned

        self._scheduler.schedule = observed

    def add(self, order: Order, sampling: Sampling, grammar: OutputGrammar | None) -> None:
        from vllm.v1.engine import EngineCoreRequest

        if grammar is not None and self._core.vllm_config.parallel_config.world_size > 1:
            raise Rejected(FIELD, "is not served by a vLLM worker with several ranks")
        request = EngineCoreRequest(
            request_id=order.request_id,
            prompt_token_ids=list(order.tokens),
            mm_features=None,
            sampling_params=_params(order, sampling),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=order.space.hex() or None,
            data_parallel_rank=None,
        )
        GRAMMARS.add(order.request_id, grammar)
        try:
            self._core.add_request(*self._core.preprocess_add_request(request))
        except BaseException:
            GRAMMARS.remove(order.request_id)
            raise

    def abort(self, request_id: str) -> None:
        GRAMMARS.remove(request_id)
        self._core.abort_requests([request_id])

    def step(self) -> Sequence[CoreOutput]:
        batches, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        outputs = [
            _output(output, token)
            for batch in (batches or {}).values()
            for output in batch.outputs
            for token in range(max(len(output.new_token_ids), 1))
        ]
        for output in outputs:
            if output.last:
                GRAMMARS.remove(output.request_id)
        return outputs

    def account(self, request_id: str, saves: bool = True) -> RequestAccount:
        account: RequestAccount | None = self._connector.account(request_id, saves)
        assert account is not None, request_id
        return account

    def load(self) -> CoreLoad:
        scheduler = self._scheduler
        return CoreLoad(
            waiting=len(scheduler.waiting),
            waiting_tokens=sum(request.num_tokens for request in scheduler.waiting),
            loading=len(scheduler.kv_holding_waiting),
            running=len(scheduler.running),
            saving=len(self._connector.side.held),
            free_blocks=self._pool.get_num_free_blocks(),
        )

    def audit(self) -> list[Finding]:
        return list(self._connector.audit())

    def close(self) -> None:
        self._core.shutdown()


def _params(order: Order, sampling: Sampling) -> object:
    """vLLM's parameters of a request: it picks the token that our processor leaves.

    vLLM's own seed, penalties and bounds stay unset.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rules = asdict(sampling)
    del rules["structured_output"]  # its matcher is in GRAMMARS
    left = order.prompt_len + order.max_tokens - len(order.tokens)
    return SamplingParams(
        temperature=0.0,
        max_tokens=1 if order.prefill_only else left,
        ignore_eos=True,
        detokenize=False,
        stop_token_ids=sorted(order.ending),
        logprobs=sampling.logprobs,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
        extra_args={
            "kvrelay": {**rules, "prompt_len": order.prompt_len, "id": order.request_id},
            "kv_transfer_params": {"kvrelay": {"save_tail": order.prefill_only}},
        },
    )


def _output(output: EngineCoreOutput, index: int) -> CoreOutput:
    """The ``index``-th token of an output; an output without one is an error of vLLM's."""
    request_id = output.request_id
    tokens = output.new_token_ids
    error = GRAMMARS.failure(request_id)
    if not tokens:
        error = error or Unservable("vLLM ended the request without a token")
        return CoreOutput(request_id, Sampled(0, error=error), True)
    last = output.finished and index == len(tokens) - 1
    sampled = Sampled(tokens[index], error=error)
    if output.new_logprobs is not None and error is None:
        ids = output.new_logprobs.logprob_token_ids[index].tolist()
        values = output.new_logprobs.logprobs[index].tolist()
        top = tuple(map(Logprob, ids[1:], values[1:]))
        sampled = Sampled(tokens[index], values[0], top)
    return CoreOutput(request_id, sampled, last)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]
