"""The digest that names a model's weights, so that workers with others never share blocks."""

from __future__ import annotations

import mmap
from pathlib import Path

import xxhash


def revision(directory: Path) -> str:
    """XXH3-128 over ``config.json`` and every ``*.safetensors``: names, sizes and bytes.

    A name or a date somebody can forget to change is not part of it; a renamed directory is not
    another model. Runs at the speed of the page cache (several GB/s).
    """
    digest = xxhash.xxh3_128()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        if size:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                digest.update(data)
    return digest.hexdigest()
