"""The client command that ``kvrelay up`` prints."""

from __future__ import annotations

from pathlib import Path

from kvrelay.cli.up import client_flags
from kvrelay.cluster.config import ClusterConfig


def config(folder: Path, *, mutual: bool = True) -> ClusterConfig:
    return ClusterConfig(
        tls_cert=str(folder / "cert.pem"),
        tls_key=str(folder / "key.pem"),
        tls_ca=str(folder / "ca.pem"),
        tls_mutual=mutual,
        credentials=str(folder / "credentials.toml"),
    )


def test_it_does_not_name_the_secrets_of_the_services(tmp_path: Path) -> None:
    flags = " ".join(client_flags(config(tmp_path)))
    assert "credentials.toml" not in flags
    assert flags.endswith("--credentials client.toml")
    (tmp_path / "client.toml").write_text('token = "x"')
    assert client_flags(config(tmp_path))[-1] == f"--credentials {tmp_path / 'client.toml'}"


def test_a_client_without_a_certificate_gets_no_key(tmp_path: Path) -> None:
    flags = " ".join(client_flags(config(tmp_path, mutual=False)))
    assert "key.pem" not in flags
    assert f"--tls-ca {tmp_path / 'ca.pem'}" in flags
    assert f"--tls-key {tmp_path / 'key.pem'}" in " ".join(client_flags(config(tmp_path)))


def test_a_plain_cluster_needs_no_flags() -> None:
    assert client_flags(ClusterConfig()) == []
