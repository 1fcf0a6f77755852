"""Every bad input: the right code, the field named, before any work, and neighbours undisturbed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import grpc
import pytest

from kvrelay.errors import Mismatch, NotFound, Rejected
from kvrelay.rpc.channel import ChannelOptions, open_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import router_pb2, types_pb2
from tests.router.fakes import (
    VOCAB,
    Behaviour,
    answer,
    decode_worker,
    ids,
    namespace,
    prefill_worker,
    running,
)

Edit = Callable[[router_pb2.GenerateRequest], object]


def sampling(name: str, value: object) -> Edit:
    return lambda request: setattr(request.sampling, name, value)


def outputs(*tokens: int) -> Edit:
    return lambda request: request.output_token_ids.extend(tokens)


def both(*edits: Edit) -> Edit:
    return lambda request: [edit(request) for edit in edits]


def field(name: str, value: object) -> Edit:
    return lambda request: setattr(request, name, value)


def token_ids(*tokens: int) -> Edit:
    return lambda request: request.token_ids.CopyFrom(router_pb2.TokenIds(ids=tokens))


def stops(*texts: str) -> Edit:
    return lambda request: request.sampling.stop.extend(texts)


def bias(token: int, value: float) -> Edit:
    return lambda request: request.sampling.logit_bias.update({token: value})


def words(*texts: str) -> Edit:
    return lambda request: request.sampling.bad_words.extend(texts)


def sequences(*ids: list[int]) -> Edit:
    made = [types_pb2.TokenSequence(ids=one) for one in ids]
    return lambda request: request.sampling.bad_word_ids.extend(made)


def template(text: str) -> Edit:
    return both(chat(("user", "x")), lambda r: setattr(r.chat, "template_kwargs", text))


def chat(*turns: tuple[str, str]) -> Edit:
    messages = [router_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return lambda request: request.chat.CopyFrom(router_pb2.Chat(messages=messages))


CASES: dict[str, tuple[Edit, str]] = {
    "no input": (lambda request: request.ClearField("prompt"), "prompt"),
    "empty prompt": (field("prompt", ""), "prompt"),
    "no token ids": (token_ids(), "token_ids"),
    "no messages": (chat(), "chat.messages"),
    "max_tokens 0": (field("max_tokens", 0), "max_tokens"),
    "max_tokens negative": (field("max_tokens", -1), "max_tokens"),
    "token id outside": (token_ids(1, 2, VOCAB), "token_ids.ids[2]"),
    "token id huge": (token_ids(2**32 - 1), "token_ids.ids[0]"),
    "output id outside": (
        both(outputs(1, VOCAB), sampling("seed", 1)),
        "output_token_ids[1]",
    ),
    "never fits": (field("max_tokens", 1000), "max_tokens"),
    "prompt never fits": (token_ids(*[5] * 990), "max_tokens"),
    "temperature NaN": (sampling("temperature", math.nan), "sampling.temperature"),
    "temperature infinite": (sampling("temperature", math.inf), "sampling.temperature"),
    "temperature negative": (sampling("temperature", -0.1), "sampling.temperature"),
    "top_p 0": (sampling("top_p", 0.0), "sampling.top_p"),
    "top_p above 1": (sampling("top_p", 1.1), "sampling.top_p"),
    "top_p NaN": (sampling("top_p", math.nan), "sampling.top_p"),
    "top_k negative": (sampling("top_k", -1), "sampling.top_k"),
    "min_p above 1": (sampling("min_p", 2.0), "sampling.min_p"),
    "repetition_penalty 0": (sampling("repetition_penalty", 0.0), "sampling.repetition_penalty"),
    "presence_penalty": (sampling("presence_penalty", 2.5), "sampling.presence_penalty"),
    "frequency_penalty": (sampling("frequency_penalty", -2.5), "sampling.frequency_penalty"),
    "logprobs": (sampling("logprobs", 21), "sampling.logprobs"),
    "logprobs negative": (sampling("logprobs", -1), "sampling.logprobs"),
    "min_tokens negative": (sampling("min_tokens", -1), "sampling.min_tokens"),
    "min_tokens above max_tokens": (sampling("min_tokens", 17), "sampling.min_tokens"),
    "stop token outside": (
        lambda request: request.sampling.stop_token_ids.extend([1, VOCAB]),
        "sampling.stop_token_ids[1]",
    ),
    "stop string empty": (stops("a", ""), "sampling.stop[1]"),
    "stop string long": (stops("a" * 257), "sampling.stop[0]"),
    "stop strings many": (stops(*"abcdefghijklmnopq"), "sampling.stop"),
    "bias of a token outside": (bias(VOCAB, 1.0), f"sampling.logit_bias[{VOCAB}]"),
    "bias above 100": (bias(7, 100.5), "sampling.logit_bias[7]"),
    "bias below -100": (bias(7, -101.0), "sampling.logit_bias[7]"),
    "bias NaN": (both(bias(3, 1.0), bias(7, math.nan)), "sampling.logit_bias[7]"),
    "bias infinite": (bias(0, -math.inf), "sampling.logit_bias[0]"),
    "biases many": (both(*(bias(token, 1.0) for token in range(1025))), "sampling.logit_bias"),
    "bad word empty": (words("a", ""), "sampling.bad_words[1]"),
    "bad word of spaces": (words("a", "  "), "sampling.bad_words[1]"),
    "bad word long": (words("a" * 257), "sampling.bad_words[0]"),
    "bad words many": (words(*("a" * 129)), "sampling.bad_words"),
    "bad words of many tokens": (words(*("漢" * 200 for _ in range(4))), "sampling.bad_words"),
    "bad sequence empty": (sequences([1], []), "sampling.bad_word_ids[1]"),
    "bad sequence outside": (sequences([1], [2, VOCAB]), "sampling.bad_word_ids[1][1]"),
    "bad sequences many": (sequences(*([1] for _ in range(257))), "sampling.bad_word_ids"),
    "bad sequences long": (sequences([1] * 1025), "sampling.bad_word_ids"),
    "template argument no JSON": (template("{"), "chat.template_kwargs"),
    "template argument NaN": (template('{"a": NaN}'), "chat.template_kwargs"),
    "template arguments no object": (template("[1]"), "chat.template_kwargs"),
    "template arguments long": (template('{"a": "%s"}' % ("x" * 16384)), "chat.template_kwargs"),
    "template arguments deep": (
        template('{"a": %s}' % ("[" * 16 + "]" * 16)),
        "chat.template_kwargs",
    ),
    "template arguments very deep": (template("[" * 9000), "chat.template_kwargs"),
    "template argument reserved": (
        template('{"add_generation_prompt": false}'),
        "chat.template_kwargs.add_generation_prompt",
    ),
    "n 0": (field("n", 0), "n"),
    "n negative": (field("n", -2), "n"),
    "n many": (field("n", 129), "n"),
    "more outputs than max_tokens": (
        both(outputs(*[5] * 17), sampling("seed", 1)),
        "output_token_ids",
    ),
    "continued without its seed": (outputs(5), "sampling.seed"),
    "request_id long": (field("request_id", "x" * 129), "request_id"),
    "request_id of two lines": (field("request_id", "a\nERROR router: x"), "request_id"),
    "request_id of a terminal": (field("request_id", "\x1b[31m"), "request_id"),
    "request_id not ASCII": (field("request_id", "caf\u00e9"), "request_id"),
    "prompt of 8 MB": (field("prompt", "x" * 8_000_000), "prompt"),
    "content of 8 MB": (
        chat(("user", "x"), ("user", "x" * 8_000_000)),
        "chat.messages[1].content",
    ),
    "more text than positions hold": (field("prompt", "x" * 10_000), "prompt"),
    "more rendered text than positions hold": (chat(("user", "x" * 10_000)), "chat"),
}


@pytest.mark.parametrize("case", CASES)
async def test_rejected_before_any_work(case: str) -> None:
    edit, name = CASES[case]
    step = asyncio.Semaphore(1)
    prefill, decode = prefill_worker(), decode_worker(behaviour=Behaviour(step=step))
    prefill.num_blocks = decode.num_blocks = 110
    async with running([prefill, decode]) as router:
        beside = router_pb2.GenerateRequest(max_tokens=4)
        beside.token_ids.ids.append(9)
        beside.sampling.seed = 3
        neighbour = asyncio.ensure_future(router.generate(beside))
        await decode.entered.wait()
        request = router_pb2.GenerateRequest(prompt="The fox")
        edit(request)
        options = ChannelOptions(max_message_bytes=64 << 20)
        async with open_channel(router.address, options) as channel:
            from kvrelay.v1 import router_pb2_grpc

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(router_pb2_grpc.RouterServiceStub(channel).Generate(request)))
        error = from_rpc_error(caught.value)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        assert isinstance(error, Rejected)
        assert error.field == name
        assert (len(prefill.legs), len(decode.legs)) == (1, 1)
        for _ in range(8):
            step.release()
        assert ids(await neighbour) == answer([9], 4, 3)


async def test_unknown_model() -> None:
    async with running([decode_worker()]) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(router_pb2.GenerateRequest(prompt="x", model="other"))
        error = from_rpc_error(caught.value)
        assert isinstance(error, NotFound)
        assert "model" in str(error)
        assert await router.generate(router_pb2.GenerateRequest(prompt="x", model="tiny"))


async def test_expired_deadline() -> None:
    silent = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(0)))  # or it may be in time
    async with running([silent]) as router:
        for seconds in (0.0, 1e-4):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router.generate(router_pb2.GenerateRequest(prompt="x"), seconds)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stop_string_that_is_no_text() -> None:
    request = router_pb2.GenerateRequest(prompt="p")
    request.sampling.stop.extend(["a", "@@"])
    raw = request.SerializeToString().replace(b"@@", b"\xc3\x28")
    async with running([decode_worker()]) as router:
        call = router.channel.unary_stream(
            "/kvrelay.v1.RouterService/Generate",
            request_serializer=lambda raw: raw,
            response_deserializer=router_pb2.GenerateResponse.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call(raw)))
    error = from_rpc_error(caught.value)
    assert isinstance(error, Rejected)
    assert error.field == "sampling.stop[1]"


async def test_a_fleet_that_does_not_belong_together() -> None:
    decode = decode_worker(namespace=namespace(model="another"))
    async with running([decode], used=0) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(router_pb2.GenerateRequest(prompt="x"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = from_rpc_error(caught.value)
        assert isinstance(error, Mismatch)
        assert error.field == "namespace.model"
