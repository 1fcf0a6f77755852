"""The one GPU that a process may use: chosen before anything asks CUDA's driver.

The driver reads the variable once. `transformers` asks it when it is imported, if the package
flash_attn is installed, so no later change would count.
"""

from __future__ import annotations

import os

from kvrelay.errors import Unservable

VISIBLE = "CUDA_VISIBLE_DEVICES"


def show_one(device: str) -> str:
    """For "cuda:N", hide all visible devices but the N-th and return "cuda"; else the name.

    Call it before the import of `transformers`. No thread and no library can then choose another
    device. ``Unservable`` if there is no N-th visible device.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number:
        return device
    shown = os.environ.get(VISIBLE)
    names = [number] if shown is None else [name.strip() for name in shown.split(",")]
    if shown is not None and int(number) >= len(names):
        raise Unservable(f"device {device}: {VISIBLE} shows {shown!r} alone")
    os.environ[VISIBLE] = names[0 if shown is None else int(number)]
    return kind
