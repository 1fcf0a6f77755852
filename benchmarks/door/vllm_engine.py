"""vLLM's engine without its HTTP layer; runs in vLLM's environment, with the model's folder.

A line of the input has prompts and a number of tokens, a line of the output the seconds to the
first token and from there to the last one, of each prompt.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def main(model: str) -> None:
    """Serve the lines of the input until it ends."""
    given = AsyncEngineArgs(
        model=model, dtype="float32", enforce_eager=True, enable_prefix_caching=False
    )
    engine = AsyncLLM.from_engine_args(given)
    served = 0

    async def one(prompt: list[int], count: int, name: str) -> tuple[float, float]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        sent = time.perf_counter()
        first = last = 0.0
        async for _ in engine.generate({"prompt_token_ids": prompt}, sampling, name):
            last = time.perf_counter()
            first = first or last
        return first - sent, last - first

    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        prompts, count = json.loads(line)
        served += 1
        names = [f"{served}-{index}" for index in range(len(prompts))]
        pairs = zip(prompts, names, strict=True)
        found = await asyncio.gather(*(one(prompt, count, name) for prompt, name in pairs))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
