"""A worker whose books were broken on purpose: asked over the wire, it names whose and by how much.

It keeps serving all other requests.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from decode_service.service import register
from kvrelay.cli.dispatch import main
from kvrelay.engine.core.scheduler import Scheduler
from kvrelay.engine.engine import Engine
from kvrelay.rpc.server.server import Server, ServerOptions
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.roles import RoleSwitch
from kvrelay.worker.service import SERVICE, WorkerService
from kvrelay.worker.worker import Worker
from tests.models import tiny_model

WAIT = 60.0
PROMPT = tuple(range(30, 42))


@dataclass(frozen=True)
class Live:
    """A decode worker within this process, on a real server."""

    worker: Worker
    address: str

    def decode(self, request_id: str, channel: grpc.Channel) -> Iterator[decode_pb2.DecodeResponse]:
        sampling = types_pb2.Sampling(temperature=0.0, ignore_eos=True)
        leg = types_pb2.Leg(
            request_id=request_id, prompt_token_ids=PROMPT, max_tokens=6, sampling=sampling
        )
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        return iter(stub.Decode(decode_pb2.DecodeRequest(leg=leg), timeout=WAIT))

    @property
    def engine(self) -> Engine:
        """The native engine of the worker."""
        assert isinstance(self.worker.engine, Engine)
        return self.worker.engine

    def between_steps(self, change: Callable[[Scheduler], None]) -> None:
        """On the engine's own thread."""
        scheduler = self.engine._scheduler
        self.engine._call(lambda: change(scheduler)).result(WAIT)

    def until(self, true: Callable[[], bool]) -> None:
        for _ in range(int(WAIT / 0.01)):
            if true():
                return
            threading.Event().wait(0.01)
        raise AssertionError("it did not come to that")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """The request ``stuck`` waits for a load that never ends."""
    script = tmp_path / "script.json"
    stuck = {"lookups": {"stuck": [8]}, "loads": {"stuck": [{"times": 0}]}}
    script.write_text(json.dumps(stuck))
    model = str(tiny_model("llama", tmp_path / "model"))
    config = WorkerConfig(
        model=model, store=f"mock:{script}", dtype="float32", block_size=4, num_blocks=32
    )
    worker = Worker.build(config, types_pb2.ROLE_DECODE)
    loop, address = asyncio.new_event_loop(), Future[str]()
    server = Server(ServerOptions("127.0.0.1:0"))

    async def start() -> None:
        service = WorkerService(worker, RoleSwitch(worker.identity, worker.streams, server.health))
        server.add(
            SERVICE, lambda made: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, made)
        )
        register(server, worker)
        worker.start()
        address.set_result(await server.start())

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT)
    yield Live(worker, address.result(WAIT))
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(WAIT)
    worker.engine.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT)


def tokens_of(stream: Iterator[decode_pb2.DecodeResponse]) -> list[int]:
    return [token.id for message in stream for token in message.tokens]


def compute_what_has_no_room(scheduler: Scheduler) -> None:
    for request in scheduler.requests.values():
        request.resident.computed = 999


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1:99999"])
def test_doctor_says_what_is_no_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--audit", address]) != 0
    assert f"{address!r} is neither HOST:PORT nor unix:PATH" in capsys.readouterr().err


def test_doctor_says_who_is_no_worker(capsys: pytest.CaptureFixture[str]) -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        assert main(["doctor", "--audit", f"127.0.0.1:{port}"]) != 0
    finally:
        other.stop(None).wait()
    assert f"audit: 127.0.0.1:{port} is no prefill or decode worker" in capsys.readouterr().err


def test_doctor_names_the_request_and_the_numbers_and_the_others_are_served(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = ["doctor", "--audit", live.address]
    with grpc.insecure_channel(live.address) as channel:
        first = tokens_of(live.decode("first", channel))
        assert len(first) == 6
        assert main(audit) == 0
        assert "all invariants hold" in capsys.readouterr().out
        stuck = live.decode("stuck", channel)
        live.until(lambda: live.worker.engine.load().loading == 1)
        live.between_steps(compute_what_has_no_room)
        assert main(audit) == 1
        told = capsys.readouterr().out
        assert "I2 stuck/2: 999 computed in 3 blocks" in told
        assert "I4 stuck/2: block " in told
        assert "2 invariants are broken" in told
        assert main([*audit, "--json"]) == 1
        findings = json.loads(capsys.readouterr().out)["findings"]
        broken = [(finding["invariant"], finding["requestId"]) for finding in findings]
        assert broken == [("I4", "stuck/2"), ("I2", "stuck/2")]
        assert tokens_of(live.decode("another", channel)) == first
        assert main(audit) == 1, "it is broken still, and still served"
        stuck.cancel()  # type: ignore[attr-defined]
        live.until(lambda: live.worker.streams.open == 0)
        live.between_steps(lambda scheduler: None)
        capsys.readouterr()
        assert main(audit) == 0, "it was the request's own book that was broken"
        assert tokens_of(live.decode("last", channel)) == first


def test_an_audit_whose_time_is_over_is_no_internal_error(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC answers the client itself; the worker logged a traceback."""
    go_on = threading.Event()
    live.engine._call(lambda: go_on.wait(WAIT))
    try:
        with grpc.insecure_channel(live.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            for _ in range(5):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Audit(worker_pb2.AuditRequest(), timeout=0.2)
                assert isinstance(caught.value, grpc.Call)
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        go_on.set()
    assert not [record for record in caplog.records if record.exc_info]
