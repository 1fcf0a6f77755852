"""The file that lists workers: ``{"prefill": ["host:port"], "decode": [...]}``, JSON or TOML."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import Rejected

FIELD = "workers_file"
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """Addresses by role, and of those who announced themselves, whose role they tell."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    announced: tuple[str, ...] = ()


def read_workers_file(path: Path) -> WorkerAddresses:
    """Raises ``Rejected`` for the field ``workers_file`` when the file is not as it should be."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise Rejected(FIELD, f"{path} is larger than {MAX_BYTES} bytes")
        text = raw.decode()
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise Rejected(FIELD, f"{path}: {error}") from error
    if not (isinstance(content, dict) and content and content.keys() <= {"prefill", "decode"}):
        raise Rejected(FIELD, f"{path}: must hold the lists `prefill` and `decode`, nothing else")
    return WorkerAddresses(
        _addresses(path, content, "prefill"), _addresses(path, content, "decode")
    )


def _addresses(path: Path, content: dict[str, object], role: str) -> tuple[str, ...]:
    value = content.get(role, [])
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(dict.fromkeys(value))
    raise Rejected(FIELD, f"{path}: `{role}` must be a list of addresses, got {value!r}")
