"""``kvrelay top`` while the router is away."""

from __future__ import annotations

import pytest

from kvrelay.cli import top
from kvrelay.cli.dispatch import main
from kvrelay.client.convert import fleet_of
from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.fleet import FleetStatus
from kvrelay.v1 import router_pb2

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


def test_a_router_that_is_away_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "Client", Router(FLEET, Unavailable("gone"), FLEET))
    assert main(["top", "--interval", "0.1"]) == 130
    out = capsys.readouterr().out
    assert out.index("h:1") < out.index("gone") < out.rindex("h:1")


def test_one_that_never_answered_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "Client", Router(Unavailable("gone")))
    assert main(["top"]) == 1
    assert "gone" in capsys.readouterr().err
