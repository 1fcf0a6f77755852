"""``kvrelay make-model``: a model of a real shape with random weights, for measurements."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cli.screen import print_err, print_out
from kvrelay.config.reader import check, load, option, required
from kvrelay.errors import Rejected
from kvrelay.process import sigint

DESCRIPTION = """\
Writes a model of a real shape with random weights, in ordinary transformers format. Its text is
noise; its cost is that of the real model."""
SHAPES = ("qwen3-0.6b", "llama-toy", "llama-tiny", "qwen3-tiny")  # known before torch is imported


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeModelConfig:
    """Which model, and where to."""

    shape: str = required(str, f"which sizes: {', '.join(SHAPES)}", choices=SHAPES, metavar="NAME")
    out: str = required(str, "directory to write it to", metavar="DIR")
    dtype: str = option("bfloat16", "number format", choices=("float32", "bfloat16", "float16"))
    seed: int = option(0, "of the weights", low=0)

    def __post_init__(self) -> None:
        check(self)


class ShownProgress:
    """Shows the share of the weights that are drawn: on a terminal in one line, else now and then.

    Nothing is shown of a model that is made within a second.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + 1.0
        self._open = False  # whether the terminal's line still has to be ended

    def show(self, done: float) -> None:
        now = time.monotonic()
        if now < self._next and not (self._open and done == 1):
            return
        self._next = now + (0.2 if self._terminal else 5.0)
        text = f"  {done:.0%} of the weights drawn" if done < 1 else "  writing the weights"
        if self._terminal:
            sys.stderr.write(f"\r{text}\x1b[K" + ("\n" if done == 1 else ""))
            sys.stderr.flush()
            self._open = done < 1
        else:
            print_err(text)


def main(argv: Sequence[str]) -> int:
    config = load(MakeModelConfig, argv, "kvrelay make-model", DESCRIPTION)
    out = Path(config.out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise Rejected("out", f"{out} exists and is not an empty folder: name another one")
    with sigint.sigint_exits():
        # It imports torch: not before the flags are read.
        from benchmarks.random_model import make_model

    print_err(f"Making {config.shape} in {config.dtype}")
    shown = ShownProgress()
    made = make_model(config.shape, out, config.dtype, config.seed, shown.show)
    size = sum(path.stat().st_size for path in made.iterdir())
    print_out(f"{made}: {size / 1e6:,.1f} MB")
    return 0
