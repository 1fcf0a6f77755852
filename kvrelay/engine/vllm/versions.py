"""Which versions of vLLM are accepted.

The connector and the samplers rely on inner interfaces, so they were tested with each version that
they accept. A user may try another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvrelay.errors import Rejected
from kvrelay.version import VLLM, tested_vllm

RELIED_ON = (
    "the connector's interface (KVConnectorBase_V1), the reference counts of its block pool, the"
    " order of its calls in a step, the layout of its pages, the interface of logits processors"
)


class VllmAdditions(Protocol):
    """``VllmConfig``, as far as it is read here."""

    @property
    def additional_config(self) -> object: ...


def refusal(version: str, config: VllmAdditions) -> str:
    """Why this version of vLLM is refused, and how to try it; empty for one that is accepted.

    Raises ``Rejected`` for wrong fields in ``additional_config["kvrelay"]``.
    """
    if _any_version(config.additional_config) or tested_vllm(version):
        return ""
    return (
        f"vLLM {version} was not tested, {VLLM} was: kvrelay relies on {RELIED_ON}. To try it,"
        ' set "kvrelay": {"any_version": true} in vLLM\'s additional_config'
    )


def _any_version(additions: object) -> bool:
    given = additions.get("kvrelay", {}) if isinstance(additions, Mapping) else {}
    if not isinstance(given, Mapping) or given.keys() - {"any_version"}:
        reason = f"takes the field any_version, got {given!r}"
        raise Rejected("additional_config.kvrelay", reason)
    accepted = given.get("any_version", False)
    if not isinstance(accepted, bool):
        reason = f"must be true or false, got {accepted!r}"
        raise Rejected("additional_config.kvrelay.any_version", reason)
    return accepted


def check_version(version: str, config: VllmAdditions) -> None:
    """Raise ``ValueError`` for a version of vLLM that is refused."""
    if reason := refusal(version, config):
        raise ValueError(reason)
