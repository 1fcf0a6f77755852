"""Bad input: an error that names the field, before any work; other streams are undisturbed."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from grpc_status import rpc_status

from kvrelay import Client
from kvrelay.cluster.supervisor import Cluster
from kvrelay.v1 import router_pb2, router_pb2_grpc, types_pb2
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle, loads
from tests.exact.oracle import Oracle
from tests.models import VOCAB

Request = router_pb2.GenerateRequest
IDS = router_pb2.TokenIds(ids=[1, 2, 3])
MIB = 1 << 20
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def up(models: Models) -> Iterator[Cluster]:
    with cluster(models("llama"), block_size=4, num_blocks=200) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(models: Models) -> list[int]:
    """The answer to ``PROMPT``."""
    return Oracle(models("llama")).greedy(PROMPT, 40)


@pytest.fixture(autouse=True)
def neighbours(up: Cluster, wanted: list[int]) -> Iterator[None]:
    """Streams beside every bad request; they must come out right."""
    made: list[list[int]] = []

    def stream() -> None:
        with Client(up.router) as client:
            done = client.complete(token_ids=PROMPT, max_tokens=40, temperature=0.0, timeout=60.0)
            made.append(list(done.token_ids))

    threads = [threading.Thread(target=stream) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
    assert made == [wanted] * 3
    check_idle(up)


def sampling(**fields: object) -> Request:
    return Request(token_ids=IDS, max_tokens=4, sampling=types_pb2.Sampling(**fields))  # type: ignore[arg-type]


def chat(arguments: str) -> Request:
    turns = [router_pb2.ChatMessage(role="user", content="x")]
    return Request(chat=router_pb2.Chat(messages=turns, template_kwargs=arguments), max_tokens=4)


def refused(up: Cluster, request: Request | bytes, timeout: float = 30.0) -> grpc.RpcError:
    raw = request if isinstance(request, bytes) else request.SerializeToString()
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(up.router, options=options) as channel:
        call: grpc.UnaryStreamMultiCallable[bytes, bytes]
        call = channel.unary_stream("/kvrelay.v1.RouterService/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(raw, timeout=timeout))
    return caught.value


def fields(error: grpc.RpcError) -> list[str]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    bad = BadRequest()
    return [
        violation.field
        for detail in status.details
        if detail.Unpack(bad)
        for violation in bad.field_violations
    ]


INVALID = {
    "no input": (Request(max_tokens=4), ""),
    "empty text": (Request(prompt="", max_tokens=4), "prompt"),
    "no token ids": (Request(token_ids=router_pb2.TokenIds(), max_tokens=4), "token_ids"),
    "empty chat": (Request(chat=router_pb2.Chat(), max_tokens=4), "chat"),
    "max_tokens 0": (Request(token_ids=IDS, max_tokens=0), "max_tokens"),
    "max_tokens negative": (Request(token_ids=IDS, max_tokens=-5), "max_tokens"),
    "token outside": (
        Request(token_ids=router_pb2.TokenIds(ids=[1, VOCAB]), max_tokens=4),
        "token_ids",
    ),
    "longer than the model": (
        Request(token_ids=router_pb2.TokenIds(ids=[1] * 1024), max_tokens=4),
        "",
    ),
    "temperature NaN": (sampling(temperature=math.nan), "temperature"),
    "temperature negative": (sampling(temperature=-1.0), "temperature"),
    "temperature infinite": (sampling(temperature=math.inf), "temperature"),
    "top_p 0": (sampling(top_p=0.0), "top_p"),
    "top_p above 1": (sampling(top_p=1.5), "top_p"),
    "top_k negative": (sampling(top_k=-1), "top_k"),
    "min_p NaN": (sampling(min_p=math.nan), "min_p"),
    "repetition_penalty 0": (sampling(repetition_penalty=0.0), "repetition_penalty"),
    "min_tokens negative": (sampling(min_tokens=-1), "min_tokens"),
    "logprobs too many": (sampling(logprobs=10_000), "logprobs"),
    "stop token outside": (sampling(stop_token_ids=[VOCAB + 1]), "stop_token_ids"),
    "empty stop string": (sampling(stop=[""]), "stop"),
    "bias NaN": (sampling(logit_bias={5: math.nan}), "sampling.logit_bias[5]"),
    "bias above 100": (sampling(logit_bias={5: 101.0}), "sampling.logit_bias[5]"),
    "bias of a token outside": (sampling(logit_bias={VOCAB: 1.0}), f"logit_bias[{VOCAB}]"),
    "biases many": (
        sampling(logit_bias=dict.fromkeys(range(2000), 1.0)),
        "sampling.logit_bias",
    ),
    "empty bad word": (sampling(bad_words=[""]), "sampling.bad_words[0]"),
    "bad words many": (sampling(bad_words=["a"] * 129), "sampling.bad_words"),
    "bad sequence outside": (
        sampling(bad_word_ids=[types_pb2.TokenSequence(ids=[VOCAB])]),
        "sampling.bad_word_ids[0][0]",
    ),
    "template arguments no JSON": (chat("{1"), "chat.template_kwargs"),
    "template argument reserved": (chat('{"tokenize": true}'), "chat.template_kwargs.tokenize"),
    "n 0": (Request(token_ids=IDS, max_tokens=4, n=0), "n"),
    "n 129": (Request(token_ids=IDS, max_tokens=4, n=129), "n"),
    "samples of n 1": (
        Request(token_ids=IDS, max_tokens=4, samples=[router_pb2.SampleOutput()]),
        "samples",
    ),
    "tokens so far use up max_tokens": (
        Request(
            token_ids=IDS,
            max_tokens=1,
            output_token_ids=[1, 2],
            sampling=types_pb2.Sampling(seed=1),
        ),
        "",
    ),
    "tokens so far outside": (
        Request(
            token_ids=IDS,
            max_tokens=4,
            output_token_ids=[VOCAB],
            sampling=types_pb2.Sampling(seed=1),
        ),
        "output_token_ids",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_argument(up: Cluster, name: str) -> None:
    request, field = INVALID[name]
    error = refused(up, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    named = fields(error)
    assert named
    assert all(named)
    assert any(field in item for item in named), named


def test_a_request_longer_than_every_pool_is_its_operators_matter(up: Cluster) -> None:
    """It is within ``max_model_len``, so the client did nothing wrong."""
    request = Request(token_ids=router_pb2.TokenIds(ids=[1] * 250), max_tokens=600)
    error = refused(up, request)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION, error
    assert "its operator must raise --kv-memory" in (error.details() or "")


def test_stop_string_that_is_not_utf8(up: Cluster) -> None:
    marker = "\x01\x02\x03\x04"
    raw = sampling(stop=["fine", marker]).SerializeToString()
    error = refused(up, raw.replace(marker.encode(), b"\xff\xfe\xfd\xfc"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(error) == ["sampling.stop[1]"]


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x1a\x7fshort", b"\x00" * 100])
def test_bytes_that_are_no_message(up: Cluster, raw: bytes) -> None:
    assert refused(up, raw).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_ten_megabytes(up: Cluster) -> None:
    error = refused(up, Request(prompt="a" * (10 * MIB), max_tokens=4))
    assert error.code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # gRPC's own, before the message is read
    )
    error = refused(up, Request(prompt="a" * (3 * MIB), max_tokens=4))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(error)


def test_unknown_model(up: Cluster) -> None:
    error = refused(up, Request(token_ids=IDS, max_tokens=4, model="nobody"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "nobody" in (error.details() or "")


def test_expired_deadline(up: Cluster) -> None:
    before = [load.executed for load in loads(up)]
    error = refused(up, Request(token_ids=IDS, max_tokens=4), timeout=1e-6)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(before) == 2


def test_deadline_in_the_middle(up: Cluster) -> None:
    """The first token comes; the decode worker stands still, so the stream cannot end before."""
    request = Request(token_ids=IDS, max_tokens=790, sampling=types_pb2.Sampling(ignore_eos=True))
    up.kill("decode", 0, signal.SIGSTOP)
    try:
        error = refused(up, request, timeout=1.0)
    finally:
        up.kill("decode", 0, signal.SIGCONT)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    check_idle(up, within=5.0)


def test_full_queue(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_MAX_WAITING", "2")
    monkeypatch.setenv("KVRELAY_MAX_NUM_SEQS", "1")
    with cluster(models("llama"), prefill=0, block_size=4, num_blocks=64) as busy:
        stub = router_pb2_grpc.RouterServiceStub(grpc.insecure_channel(busy.router))
        request = Request(
            token_ids=IDS, max_tokens=200, sampling=types_pb2.Sampling(ignore_eos=True)
        )
        calls = [stub.Generate(request, timeout=60.0) for _ in range(12)]
        codes, delays = [], []
        for call in calls:
            try:
                list(call)
                codes.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())
                delays.append(rpc_status.from_call(error))  # type: ignore[arg-type]
        assert codes.count(grpc.StatusCode.OK) >= 2  # the queue; one more if the first had begun
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
        assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all(delay is not None and "RetryInfo" in str(delay) for delay in delays)
        check_idle(busy)
