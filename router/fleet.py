"""Who may work together: the checks a worker passes before it is used. Pure but for messages."""

from __future__ import annotations

from common.errors import Mismatch
from protos import types_pb2, worker_pb2

_FIELDS = ("model", "revision", "dtype", "layout", "block_size", "format_version", "digest")


def check_worker(
    info: worker_pb2.WorkerInfo,
    role: types_pb2.Role.ValueType,
    model: str,
    fleet: worker_pb2.Namespace | None,
) -> None:
    """Raise ``Mismatch`` naming the first field in which this worker is not what it should be."""
    if info.role != role:
        raise Mismatch(
            "role",
            f"it is {types_pb2.Role.Name(info.role)}, listed as {types_pb2.Role.Name(role)}",
        )
    if info.namespace.model != model:
        raise Mismatch(
            "namespace.model", f"it serves {info.namespace.model!r}, this router {model!r}"
        )
    if fleet is not None:
        check_namespace(info.namespace, fleet)


def check_namespace(mine: worker_pb2.Namespace, fleet: worker_pb2.Namespace) -> None:
    """Raise ``Mismatch`` naming the first field that differs, with both values."""
    for field in _FIELDS:
        ours, theirs = getattr(mine, field), getattr(fleet, field)
        if ours != theirs:
            if isinstance(ours, bytes):  # only when all the rest agrees: the tenant's salt
                ours, theirs = ours.hex()[:16], theirs.hex()[:16]
            raise Mismatch(
                f"namespace.{field}", f"it has {ours!r}, the first worker of the fleet {theirs!r}"
            )
