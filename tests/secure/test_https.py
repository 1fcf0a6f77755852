"""``kvrelay load`` and ``kvrelay conform`` against the HTTP door of a cluster with mutual TLS."""

from __future__ import annotations

import re

import pytest

from kvrelay.cli.dispatch import main
from tests.secure.secured_cluster import Secured
from tests.secured import ALICE, Files

pytestmark = pytest.mark.cluster
LOAD = ["load", "--requests", "6", "--concurrency", "2", "--output", "4", "--check", "first-run"]
CONFORM = ["conform", "--prompts", "1", "--output", "4", "--check", "repeat"]


def url(secured: Secured) -> str:
    assert secured.cluster.http is not None
    return secured.cluster.http


def flags(files: Files, own: bool = True) -> list[str]:
    """With a certificate of one's ``own``, or with the authority alone."""
    shown = ["--tls-cert", files.cert, "--tls-key", files.key] if own else []
    return [*shown, "--tls-ca", files.ca]


@pytest.mark.parametrize("command", [LOAD, CONFORM])
def test_a_client_with_a_certificate(
    secured: Secured,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVRELAY_API_KEY", ALICE)
    name, *rest = command
    party = flags(secured.party("client", secured.authority))
    status = main([name, url(secured), *rest, *party, "--no-progress"])
    assert status == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (True, r"its certificate is refused \(.*certificate.*\): name its authority with --tls-ca"),
        (False, "closed the connection|(?i:certificate.required)"),
    ],
)
def test_a_client_without_the_authority_or_without_a_certificate(
    secured: Secured,
    own: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The system's authorities do not know the server; the server wants a certificate."""
    monkeypatch.setenv("KVRELAY_API_KEY", ALICE)
    party = flags(secured.party("client", secured.authority), own)
    given = party[:4] if own else party
    status = main([LOAD[0], url(secured), *LOAD[1:], *given, "--no-progress"])
    assert status == 1
    assert re.search(reason, capfd.readouterr().err)
