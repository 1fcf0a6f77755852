"""Mutated requests: a clear error or an answer, never an internal error, never a hang."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import grpc

from kvrelay.v1 import router_pb2
from tests.router.fakes import answer, decode_worker, ids, prefill_worker, running

COUNT = 1500
GOOD = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,  # `weights` that are not served here
}


def seeds() -> list[bytes]:
    text = router_pb2.GenerateRequest(prompt="The fox é", model="tiny", max_tokens=3)
    text.sampling.stop.extend(["ab", "漢字"])
    text.sampling.temperature = 0.7
    text.sampling.seed = 9
    tokens = router_pb2.GenerateRequest(request_id="r", max_tokens=4, output_token_ids=[5, 6])
    tokens.token_ids.ids.extend([3, 4, 5])
    tokens.sampling.seed = 2**64 - 1
    tokens.sampling.stop_token_ids.extend([7, 8])
    chat = router_pb2.GenerateRequest(max_tokens=2)
    chat.chat.messages.add(role="user", content="Hi")
    chat.chat.template_kwargs = '{"thinking": false, "levels": [1, 2.5, null]}'
    chat.sampling.logit_bias.update({5: -3.5, 8: 100.0})
    chat.sampling.bad_words.extend(["fox", " dog"])
    chat.sampling.bad_word_ids.add(ids=[3, 4])
    several = router_pb2.GenerateRequest(prompt="The", max_tokens=3, n=3)
    several.sampling.seed = 4
    for tokens_so_far, ended in (([5], False), ([], False), ([7, 8], True)):
        several.samples.add(token_ids=tokens_so_far, ended=ended)
    return [message.SerializeToString() for message in (text, tokens, chat, several)]


def mutated(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            case 1:
                del data[at : at + rng.randint(1, 4)]
            case 2 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case _:
                data[at:at] = data[rng.randrange(len(data) + 1) :][:8]
    return bytes(data)


async def test_mutated_requests() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    codes: Counter[grpc.StatusCode] = Counter()
    async with running([prefill_worker(), decode_worker()]) as router:
        call = router.channel.unary_stream(
            "/kvrelay.v1.RouterService/Generate",
            request_serializer=lambda raw: raw,
            response_deserializer=router_pb2.GenerateResponse.FromString,
        )

        async def one(raw: bytes) -> None:
            stream = call(raw, timeout=20)
            with suppress(grpc.aio.AioRpcError):
                async for _ in stream:
                    pass
            code = await stream.code()
            assert code in GOOD, (raw, await stream.details())
            codes[code] += 1

        for _ in range(COUNT // 50):
            raws = [mutated(rng, rng.choice(seeds())) for _ in range(50)]
            await asyncio.gather(*map(one, raws))
        request = router_pb2.GenerateRequest(max_tokens=3)
        request.token_ids.ids.append(9)
        request.sampling.seed = 1
        assert ids(await router.generate(request)) == answer([9], 3, 1)
        await asyncio.wait_for(router.service.gate.drain(), 5)
    print(codes)
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > COUNT // 10
