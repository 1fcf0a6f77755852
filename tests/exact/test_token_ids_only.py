"""A cluster of a model whose folder has no tokenizer: token ids in and out, exact."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay import Client
from kvrelay.cluster.layout import ROOT
from kvrelay.errors import Rejected
from tests.exact.conftest import Models, cluster
from tests.exact.oracle import Oracle

pytestmark = [pytest.mark.cluster]
PROMPT = [11, 23, 5, 42, 7, 99, 3]


def test_a_cluster_without_a_tokenizer(models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "ids-only"
    shutil.copytree(models("llama"), folder, ignore=shutil.ignore_patterns("token*", "*.jinja"))
    wanted = Oracle(folder).greedy(PROMPT, 12)
    with cluster(folder) as up, Client(up.router) as client:
        done = client.complete(token_ids=PROMPT, max_tokens=12, temperature=0.0)
        assert (list(done.token_ids), done.text) == (wanted, "")
        with pytest.raises(Rejected, match="prompt: needs a tokenizer"):
            client.complete(prompt="Once")
        words = ["generate", "--router", up.router, "--temperature", "0", "--max-tokens", "12"]
        shown = subprocess.run(
            [sys.executable, "-m", "kvrelay", *words, "--token-ids", ",".join(map(str, PROMPT))],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert shown.stdout == ",".join(map(str, wanted)) + "\n"
