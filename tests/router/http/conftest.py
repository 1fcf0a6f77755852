"""The security of a router in the tests of its HTTP door."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.rpc.security import policy
from tests.router.http.rig import Keys
from tests.secured import write_files


@pytest.fixture(params=["plain", "tls"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Keys:
    """A router's security, and what its clients trust."""
    if request.param == "plain":
        return None, None
    files = write_files(tmp_path, "router", CertificateAuthority())
    trust = ssl.create_default_context(cafile=files.ca)
    return policy.load(replace(files.options(), tls_mutual=False)), trust
