"""The commands for clients that ``kvrelay up`` prints."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.cli.up import client_flags, curl_example, generate_example
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.supervisor import Cluster, with_cluster_token
from tests.models import tiny_model
from tests.secured import write_files

NAME = "kvrelay.internal"


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


def test_an_address_with_brackets_is_quoted() -> None:
    """zsh refuses the bare word, and other shells take it for the name of a file."""
    lines = generate_example(ClusterConfig(), "[::1]:50051")
    assert lines[0].endswith(" --router '[::1]:50051'")
    assert generate_example(ClusterConfig(), "127.0.0.1:50051")[0].endswith(" 127.0.0.1:50051")


def test_curl_asks_for_the_name_in_the_certificate() -> None:
    plain = ClusterConfig(tls_name=NAME)
    assert curl_example(plain, "http://[::1]:80")[0].startswith("curl 'http://[::1]:80/v1/")
    words = shlex.split(" ".join(curl_example(plain, "https://[::1]:80")))
    assert words[1].startswith(f"https://{NAME}:80/v1/")
    assert words[words.index("--connect-to") + 1] == f"{NAME}:80:[::1]:80"


def typed(lines: Sequence[str]) -> str:
    """What a command prints in a shell."""
    shell = ["sh", "-c", " ".join(lines)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (lines, done.stderr)
    return done.stdout


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_reach_a_cluster_whose_certificate_has_another_name(tmp_path: Path) -> None:
    """curl refused the certificate: its name is not the address."""
    files = write_files(tmp_path, "of a cluster", CertificateAuthority(), hosts=[NAME])
    model = tiny_model("llama", tmp_path / "model", eos_token_id=None)
    config = with_cluster_token(
        ClusterConfig(
            model=str(model),
            port=0,
            http_port=0,
            prefill=0,
            threads=1,
            num_blocks=64,
            store_budget=1 << 26,
            tls_cert=files.cert,
            tls_key=files.key,
            tls_ca=files.ca,
            tls_name=NAME,
        )
    )
    with Cluster(config) as cluster:
        assert cluster.http is not None
        answer = json.loads(typed(curl_example(config, cluster.http)))
        assert answer["choices"][0]["text"]
        assert typed(generate_example(config, cluster.router)).strip()
