"""Which versions of vLLM are accepted, and how a user tries another one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvrelay.engine.vllm.versions import check_version, refusal
from kvrelay.errors import Rejected

PLAIN = SimpleNamespace(additional_config={"others": 1})
ASKED = SimpleNamespace(additional_config={"kvrelay": {"any_version": True}})


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.4+cpu", "0.32rc1"])
def test_releases_of_the_tested_version_are_accepted(version: str) -> None:
    assert refusal(version, PLAIN) == ""
    check_version(version, PLAIN)


@pytest.mark.parametrize("version", ["0.33.0", "0.3.2", "1.0.32", "dev", "0.320.1"])
def test_another_version_is_tried_if_asked_for(version: str) -> None:
    with pytest.raises(ValueError, match=rf"vLLM {version} was not tested, 0.32 was.*any_version"):
        check_version(version, PLAIN)
    check_version(version, ASKED)


@pytest.mark.parametrize(
    ("given", "field"),
    [(3, "kvrelay"), ({"version": 1}, "kvrelay"), ({"any_version": 1}, "kvrelay.any_version")],
)
def test_wrong_fields_are_named(given: object, field: str) -> None:
    with pytest.raises(Rejected) as caught:
        refusal("0.32.0", SimpleNamespace(additional_config={"kvrelay": given}))
    assert caught.value.field == f"additional_config.{field}"
