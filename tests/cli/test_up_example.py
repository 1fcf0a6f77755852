"""The commands for clients that ``kvrelay up`` prints."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from kvrelay.cli.up import client_flags, curl_example
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


def test_a_shell_reads_what_was_meant(tmp_path: Path) -> None:
    """Spaces in paths, an apostrophe in a model's name and brackets in an address."""
    folder = tmp_path / "Bob's keys"
    folder.mkdir()
    (folder / "client.toml").write_text('token = "x"')
    size = replace(config(folder), model=str(tmp_path), served_model="Bob's")
    words = shlex.split(" ".join(client_flags(size)))
    files = ("ca.pem", "cert.pem", "key.pem", "client.toml")
    assert words[1::2] == [str(folder / name) for name in files]
    curl = shlex.split(" ".join(curl_example(size, "https://[::1]:8000")))
    assert curl[:2] == ["curl", "https://[::1]:8000/v1/completions"]
    assert curl[curl.index("--cacert") + 1] == str(folder / "ca.pem")
    assert json.loads(curl[-1])["model"] == "Bob's"
    assert "'https://[::1]:8000/v1/completions'" in curl_example(size, "https://[::1]:8000")[0]
