"""The two roles of a worker: their names for people, and the service that each of them serves."""

from __future__ import annotations

from typing import TypeAlias

from kvrelay.v1 import types_pb2

Role: TypeAlias = "types_pb2.Role.ValueType"  # quoted: it is in the type stubs only
NAMES: dict[Role, str] = {types_pb2.ROLE_PREFILL: "prefill", types_pb2.ROLE_DECODE: "decode"}
ROLES: dict[str, Role] = {name: role for role, name in NAMES.items()}
SERVICES: dict[Role, str] = {
    types_pb2.ROLE_PREFILL: "kvrelay.v1.PrefillService",
    types_pb2.ROLE_DECODE: "kvrelay.v1.DecodeService",
}


def role_name(role: Role) -> str:
    """As in flags, logs and tables; of a worker that has told none, ``unspecified``."""
    return NAMES.get(role, "unspecified")
