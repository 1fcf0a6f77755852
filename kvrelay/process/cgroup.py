"""The control groups (containers) that this process is in. Linux only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def group_folders(controller: str, proc: Path, cgroup: Path) -> Iterator[tuple[Path, int]]:
    """The folder and version of every group of a controller, from the innermost outwards."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = cgroup, 2
        elif controller in controllers.split(","):
            root, version = cgroup / controller, 1
        else:
            continue
        place = root / path.strip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(root):
                yield folder, version
