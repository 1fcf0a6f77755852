"""One secured cluster for all tests of the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.supervisor import Cluster
from tests.models import tiny_model
from tests.secure.secured_cluster import Secured
from tests.secured import write_credentials, write_files


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Mutual TLS and credentials on every connection; every prompt is handed over."""
    folder = tmp_path_factory.mktemp("secured")
    authority = CertificateAuthority()
    files = write_files(folder, "cluster", authority)
    tokens = write_credentials(folder)
    model = tiny_model("llama", folder / "llama", eos_token_id=None)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:  # for the cluster alone, not for later tests
        patch.setenv("KVRELAY_AUDIT", "true")
        patch.setenv("KVRELAY_HEALTH_TIMEOUT", "20")
        patch.setenv("KVRELAY_HANDOFF_WAIT", "30")
        config = ClusterConfig(
            model=str(model),
            port=0,
            http_port=0,
            dtype="float32",
            disaggregate="always",
            threads=1,
            store_budget=1 << 26,
            num_blocks=512,
            max_num_seqs=8,
            tls_cert=files.cert,
            tls_key=files.key,
            tls_ca=files.ca,
            credentials=tokens,
        )
        made = Cluster(config, on_line=lambda spec, line: lines.append(f"{spec.name}| {line}"))
    try:
        with made as cluster:
            yield Secured(cluster, files, tokens, authority, Path(folder), lines)
    finally:
        print("\n".join(lines[-200:]))
