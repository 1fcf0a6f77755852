"""Which workers belong together: the checks that a worker passes before it is used. Pure."""

from __future__ import annotations

from kvrelay.errors import Mismatch
from kvrelay.rpc.protocol import NAMES, PROTOCOL, Role, role_name
from kvrelay.v1 import types_pb2, worker_pb2

_FIELDS = ("model", "revision", "dtype", "layout", "block_size", "format_version")


def belongs(info: worker_pb2.WorkerInfo, listed: Role) -> bool:
    """Whether it may be used in its role: listed so, changed to it since its start, or unlisted."""
    return listed in (info.role, info.started_as, types_pb2.ROLE_UNSPECIFIED)


def check_worker(
    info: worker_pb2.WorkerInfo,
    listed: Role,
    model: str,
    fleet: worker_pb2.Namespace | None,
) -> None:
    """Raise ``Mismatch`` naming the first field that keeps the worker out of the fleet."""
    if info.protocol != PROTOCOL:
        raise Mismatch(
            "protocol",
            f"it speaks version {info.protocol}, this router {PROTOCOL}: run the same release",
        )
    if info.role not in NAMES:
        raise Mismatch("role", f"it is {info.role}, neither prefill nor decode")
    if not belongs(info, listed):
        raise Mismatch(
            "role",
            f"it is a {role_name(info.role)} worker, listed as a {role_name(listed)} one",
        )
    if info.namespace.model != model:
        raise Mismatch(
            "namespace.model", f"it serves {info.namespace.model!r}, this router {model!r}"
        )
    if fleet is not None:
        check_namespace(info.namespace, fleet)


def weights_of(space: worker_pb2.Namespace) -> str:
    """What a stream is bound to: it resumes only on weights, dtype and numerics that are equal."""
    return "/".join(filter(None, (space.revision, space.dtype, space.numerics)))


def same_but_numerics(weights: str, space: worker_pb2.Namespace) -> bool:
    """Whether a stream bound to ``weights`` has those of ``space``, numeric profile aside."""
    return f"{weights}/".startswith(f"{space.revision}/{space.dtype}/")


def check_key(info: worker_pb2.WorkerInfo, ours: bytes) -> None:
    """Raise ``Mismatch`` for a worker whose handoffs the other workers would refuse."""
    if ours and info.fleet_key_id != ours:
        raise Mismatch(
            "fleet_key",
            "it signs handoffs with another key than this router was given, or with none: give"
            " all of them the same credentials",
        )


def check_namespace(mine: worker_pb2.Namespace, fleet: worker_pb2.Namespace) -> None:
    """Raise ``Mismatch`` naming the first field that differs, with both values.

    Workers of several numeric profiles may belong to one fleet: each stream stays within one.
    """
    for field in (*_FIELDS, *(["digest"] if mine.numerics == fleet.numerics else [])):
        ours, theirs = getattr(mine, field), getattr(fleet, field)
        if ours != theirs:
            if isinstance(ours, bytes):  # the digest differs alone if the tenant's salt does
                ours, theirs = ours.hex()[:16], theirs.hex()[:16]
            raise Mismatch(
                f"namespace.{field}", f"it has {ours!r}, the first worker of the fleet {theirs!r}"
            )
