"""``kvrelay top``: its figures, its width, and a router that does not answer."""

from __future__ import annotations

import json

import pytest

from kvrelay.cli import router_options
from kvrelay.cli.dispatch import main
from kvrelay.cli.top import ServedRates
from kvrelay.client.convert import fleet_of
from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.fleet import FleetStatus
from kvrelay.v1 import router_pb2, types_pb2, worker_pb2

ADDRESSES = ("127.0.0.1:50052", "10.20.30.40:50053", "a-long-name.of-a-worker.example.com:50054")
FLEET = fleet_of(router_pb2.ListWorkersResponse(workers=[router_pb2.WorkerStatus(address="h:1")]))


class Router:
    """The router's replies in turn; then Ctrl-C."""

    def __init__(self, *answers: FleetStatus | KvrelayError) -> None:
        self._answers = list(answers)

    def __call__(self, address: str) -> Router:
        return self

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *why: object) -> None:
        pass

    def fleet(self) -> FleetStatus:
        if not self._answers:
            raise KeyboardInterrupt
        answer = self._answers.pop(0)
        if isinstance(answer, KvrelayError):
            raise answer
        return answer


def fleet(*, tokens: int, prompt: int, cached: int, first: int, seconds: float) -> FleetStatus:
    """A fleet with every width that a column can have, and these totals."""
    states = (
        router_pb2.WORKER_STATE_READY,
        router_pb2.WORKER_STATE_UNREACHABLE,
        router_pb2.WORKER_STATE_STARTING,
    )
    reason = "namespace.revision: the weights " + "0123456789abcdef " * 8
    workers = [
        router_pb2.WorkerStatus(
            address=address,
            role=types_pb2.ROLE_PREFILL,
            state=state,
            healthy=state == router_pb2.WORKER_STATE_READY,
            reason="" if state == router_pb2.WORKER_STATE_READY else reason,
            in_flight=1024,
            info=worker_pb2.WorkerInfo(num_blocks=16384),
            load=worker_pb2.WorkerLoad(
                running=256, loading=64, waiting=1024, free_blocks=16384, executed=tokens * 1000
            ),
        )
        for address, state in zip(ADDRESSES, states, strict=True)
    ]
    totals = router_pb2.RouterTotals(
        generation_tokens=tokens,
        prompt_tokens=prompt,
        cached_prompt_tokens=cached,
        first_tokens=first,
        first_token_seconds=seconds,
    )
    queue = router_pb2.QueueStatus(
        running=768, slots=768, waiting=99999, waiting_tokens=262144, tokens_per_second=12345.6
    )
    return fleet_of(router_pb2.ListWorkersResponse(workers=workers, queue=queue, totals=totals))


BEFORE = fleet(tokens=1000, prompt=5000, cached=5000, first=10, seconds=90.0)
AFTER = fleet(tokens=1600, prompt=6000, cached=5250, first=14, seconds=90.5)


def test_rates_are_those_between_two_samples() -> None:
    rates = ServedRates.between(BEFORE.totals, AFTER.totals, 2.0)
    assert rates == ServedRates(300.0, 0.25, 0.125)
    words = "300 tokens/s to clients, 25% of prompt tokens cached, first token 125 ms"
    assert str(rates) == words


def test_without_an_earlier_sample_rates_are_since_the_start() -> None:
    """Also if the router was restarted between two samples, so that its counts fell."""
    expected = ServedRates(None, 1.0, 9.0)
    assert ServedRates.between(None, BEFORE.totals, 0.0) == expected
    assert ServedRates.between(AFTER.totals, BEFORE.totals, 2.0) == expected
    idle = fleet(tokens=0, prompt=0, cached=0, first=0, seconds=0.0).totals
    assert ServedRates.between(idle, idle, 1.0) == ServedRates(0.0, None, None)


def test_the_screen_fits_80_columns_and_explains_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(router_options, "Client", Router(BEFORE, AFTER))
    assert main(["top", "--interval", "0.1"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "tokens/s to clients, 25% of prompt tokens cached, first token 125 ms" in text
    assert text.count("0123456789abcdef") == 2 * 2 * 8, "no reason is cut"
    assert all(address.rpartition(":")[2] in text for address in ADDRESSES)
    assert "legs: sent by this router" in text
    assert "pos/s: positions computed a second." in text


def test_json_has_the_totals_and_the_rates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router_options, "Client", Router(BEFORE))
    assert main(["top", "--json"]) == 130
    (line,) = capsys.readouterr().out.splitlines()
    status = json.loads(line)
    assert status["totals"]["generation_tokens"] == 1000
    assert status["rates"]["first_token_seconds"] == 9.0
    assert [one["address"] for one in status["workers"]] == list(ADDRESSES)


def test_top_waits_for_a_router_that_stopped_answering(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router_options, "Client", Router(FLEET, Unavailable("gone"), FLEET))
    assert main(["top", "--interval", "0.1"]) == 130
    out = capsys.readouterr().out
    assert out.index("h:1") < out.index("gone") < out.rindex("h:1")


def test_a_router_that_never_answered_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router_options, "Client", Router(Unavailable("gone")))
    assert main(["top"]) == 1
    assert "gone" in capsys.readouterr().err
