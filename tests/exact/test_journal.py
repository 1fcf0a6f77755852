"""The journal of a worker under preemption, replayed; and its audit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.cli.dispatch import main
from kvrelay.engine.core.replay import replay
from tests.exact.conftest import Models, cluster
from tests.exact.queries import Query, complete_all, prompts
from tests.models import VOCAB


@pytest.mark.slow
def test_replay_of_a_run_with_preemptions(
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    journal = tmp_path / "journal.jsonl"
    monkeypatch.setenv("KVRELAY_JOURNAL", str(journal))
    queries = [Query(prompt, 40) for prompt in prompts(160, 4, VOCAB, seed=8, longest=24)]
    with cluster(models("llama"), prefill=0, block_size=4, num_blocks=40) as up:
        answers = complete_all(up.router, queries, at_once=64)
        assert main(["doctor", "--audit", up.addresses("decode")[0]]) == 0
        assert "all invariants hold" in capsys.readouterr().out
    preemptions = sum(leg.preemptions for answer in answers for leg in answer.usage.legs)
    with journal.open(encoding="utf-8") as lines:
        done = replay(lines)
    print(done)
    assert done.difference is None
    assert done.preemptions == preemptions
    assert preemptions >= 100
    assert main(["replay", str(journal)]) == 0
