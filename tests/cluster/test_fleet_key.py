"""The key that a user keeps for blocks that outlive a cluster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.fleet_key import kept_key
from kvrelay.cluster.supervisor import with_fleet_key


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_drawn_once_and_is_private(home: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        drawn = set(threads.map(lambda _: kept_key(), range(32)))
    assert len(drawn) == 1
    (key,) = drawn
    assert key is not None
    assert len(key) == 64
    file = home / "kvrelay" / "fleet-key"
    assert file.read_text() == key
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["fleet-key"]


def test_one_that_others_can_read_is_not_used(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert kept_key() is not None
    (home / "kvrelay" / "fleet-key").chmod(0o644)
    assert kept_key() is None
    assert "KVRELAY_FLEET_KEY" in caplog.text


def test_without_a_place_for_it_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert kept_key() is None


def test_it_is_for_blocks_that_outlive_the_cluster(home: Path, tmp_path: Path) -> None:
    own = ClusterConfig()
    assert with_fleet_key(own).fleet_key != with_fleet_key(own).fleet_key
    assert not (home / "kvrelay").exists()
    for lasting in (ClusterConfig(store="redis://h:1"), ClusterConfig(store_disk=str(tmp_path))):
        assert with_fleet_key(lasting).fleet_key == kept_key()
    given = ClusterConfig(store="redis://h:1", fleet_key="the-key-that-was-given")
    assert with_fleet_key(given) == given
