"""One-line mistakes in every kernel, each of which the checks must find: ``.. mutants FUNCTION..``.

Every mistake gets a process of its own, forked from one that has imported everything but kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import kvrelay.engine.attention.triton_backend
import kvrelay.engine.model.decoder

SECONDS = 240  # of the processor: the checks of attention take 64
FOLDER = Path(kvrelay.engine.__path__[0], "cuda")
ATTENTION = ("padded", "isolated", "many", "far", "long", "random")
CHECKS: Mapping[str, tuple[str, ...]] = {
    "_attend_segment": ATTENTION,
    "_merge": ("long",),
    "_finish": ("long", "many", "random"),
    "_entry_of_tile": ("many", "random"),
    "attend_prefill": ATTENTION,
    "attend_decode": ATTENTION,
    "combine_segments": ATTENTION,
    "store_rows": ("stored", "padded", "far"),
    "add_and_norm": ("norms",),
    "rotate_and_store": ("rotations", "far"),
    "_normed": ("norms", "rotations"),
    "gate_and_up": ("gates",),
}
# Loops that never end.
ENDLESS: frozenset[tuple[str, str]] = frozenset()
# Function -> what is wrong -> the text, and what stands there instead.
MUTANTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "_attend_segment": {
        "a row does not see itself": ("key[None, :] <= pos", "key[None, :] < pos"),
        "a window is one key wider": (
            "> position[:, None] - scoring.window",
            ">= position[:, None] - scoring.window",
        ),
        "a window is one key narrower": (
            "> position[:, None] - scoring.window",
            "> position[:, None] - scoring.window + 1",
        ),
        "offsets of 32 bits": ("block * pool.s_block", "(block * pool.s_block).to(tl.int32)"),
        "blocks of 32 bits": ("other=0).to(tl.int64)", "other=0)"),
        "keys before every window are read": ("(key >= low) & (key < end)", "key < end"),
        "keys behind the end are read": ("(key >= low) & (key < end)", "key >= low"),
        "V of hidden keys is read": ("mask=read[:, None] & wide[None, :]", "mask=wide[None, :]"),
        "heads are read beyond their end": (
            "mask=read[None, :] & wide[:, None]",
            "mask=read[None, :]",
        ),
        "tiles of keys are taken for blocks": ("key // TILE.BLOCK", "key // TILE.KEYS"),
        "the offset in a block is that in a tile": ("key % TILE.BLOCK", "key % TILE.KEYS"),
        "K stands for V": ("at[:, None] + pool.s_kv + column", "at[:, None] + column"),
        "no scale": ('input_precision="ieee") * scoring.scale', 'input_precision="ieee")'),
        "base e stands for base 2": ("score = score * LOG2_E", "score = score * 1.0"),
        "a soft cap without its divisor": ("2.0 * LOG2_E / cap", "2.0 * LOG2_E"),
        "outputs are not rescaled": ("out * fade[:, None] + added", "out + added"),
        "sums are not rescaled": ("total * fade + tl.sum", "total + tl.sum"),
        "a row that saw nothing is no number": (
            'base = tl.where(top == float("-inf"), 0.0, top)',
            "base = top",
        ),
        "the last tile's largest score is forgotten": (
            "top = tl.maximum(best, tl.max(score, 1))",
            "top = tl.max(score, 1)",
        ),
        "tiles begin at the segment's end": (
            "range(begin, end, TILE.KEYS)",
            "range(begin, end - TILE.KEYS, TILE.KEYS)",
        ),
    },
    "_merge": {
        "outputs are not rescaled": ("out * fade[:, None]", "out"),
        "the next outputs are not rescaled": ("next_out * gain[:, None]", "next_out"),
        "sums are not rescaled": ("total * fade +", "total +"),
        "the next sums are not rescaled": ("next_total * gain", "next_total"),
        "the next sums are forgotten": ("total * fade + next_total * gain", "total * fade"),
        "the largest score is the last one's": (
            "top = tl.maximum(best, next_best)",
            "top = next_best",
        ),
        "the largest score is the first one's": ("top = tl.maximum(best, next_best)", "top = best"),
        "nothing seen twice is no number": (
            'base = tl.where(top == float("-inf"), 0.0, top)',
            "base = top",
        ),
        "scales are exchanged": ("fade = tl.exp2(best - base)", "fade = tl.exp2(next_best - base)"),
        "the base is that of e": (
            "gain = tl.exp2(next_best - base)",
            "gain = tl.exp(next_best - base)",
        ),
        "the returned score is the older": ("return top,", "return best,"),
    },
    "_finish": {
        "a sink has no weight": (" + tl.exp2(sink - top)", ""),
        "a sink in base e": ("* LOG2_E", "* 1.0"),
        "every head has the first sink": ("sinks + head", "sinks"),
        "sums are not rescaled": ("total = total * fade +", "total = total +"),
        "outputs are not rescaled": ("out = out * fade[:, None]", "out = out"),
        "no division": ("return out / total[:, None] + 0.0", "return out + 0.0"),
        "the sink's scale is inverted": ("tl.exp2(best - top)", "tl.exp2(top - best)"),
        "the largest score is the sink": ("top = tl.maximum(best, sink)", "top = sink * 2"),
        "sinks are weights of their own": ("tl.exp2(sink - top)", "sink"),
        "sinks are subtracted": ("+ tl.exp2(sink - top)", "- tl.exp2(sink - top)"),
    },
    "_entry_of_tile": {
        "an entry begins one tile late": (" + middle <= number", " + middle < number"),
        "entries have no tiles of their own": (
            "POSITIONS + middle <= number",
            "POSITIONS <= number",
        ),
        "the first row is taken for 0": (
            "(tl.load(spans + middle * 4) - first_row)",
            "tl.load(spans + middle * 4)",
        ),
        "no entry but the first": ("upper = entries", "upper = 1"),
        "an entry too many": ("upper = entries", "upper = entries + 1"),
        "the last entry is left out": ("upper = entries", "upper = entries - 1"),
        "the first entry is left out": ("lower = 0", "lower = 2"),
        "the entry behind": ("return lower - 1", "return lower"),
        "rows are taken for entries": ("spans + middle * 4", "spans + middle"),
        "the search stops early": ("upper = middle", "upper = lower"),
    },
    "attend_prefill": {
        "tiles are counted from the wrong one": (
            "(row - first_row) // POSITIONS + entry",
            "(row - first_row) // POSITIONS",
        ),
        "rows beyond the positions of a tile": (" & (index < POSITIONS * TILE.GROUP)", ""),
        "rows beyond the entry": ("live = (place < count) &", "live = (place <= count) &"),
        "heads and positions are exchanged": (
            "before + index // TILE.GROUP",
            "before + index % TILE.GROUP",
        ),
        "the wrong query head": (
            "kv_head * TILE.GROUP + index % TILE.GROUP",
            "kv_head + index % TILE.GROUP",
        ),
        "the context is forgotten": ("start + place,", "place,"),
        "the last position of a tile is cut": (
            "start + tl.minimum(before + POSITIONS, count)",
            "start + tl.minimum(before + POSITIONS, count - 1)",
        ),
        "the layer is forgotten": ("pool.tensor + pool.offset + kv_head", "pool.tensor + kv_head"),
        "the kv head is forgotten": (" + kv_head.to(tl.int64) * pool.s_head", ""),
        "another entry's table": (
            "contexts.blocks + tl.load(span + 3)",
            "contexts.blocks + tl.load(contexts.spans + 3)",
        ),
        "the first segment is skipped": (
            "range(low // TILE.SEGMENT,",
            "range(low // TILE.SEGMENT + 1,",
        ),
        "the last segment is skipped": ("tl.cdiv(end, TILE.SEGMENT)", "end // TILE.SEGMENT"),
        "segments begin anew": (
            "_merge(best, total, state, next_best",
            "_merge(best * 0, total * 0, state * 0, next_best",
        ),
        "a segment is a tile too long": (
            "tl.minimum((segment + 1) * TILE.SEGMENT, end)",
            "tl.minimum((segment + 1) * TILE.SEGMENT + TILE.KEYS, end)",
        ),
        "output rows lie elsewhere": (
            "out.tensor + (line * out.s_row",
            "out.tensor + (place * out.s_row",
        ),
        "a window's tiles begin where it does": ("low // TILE.KEYS * TILE.KEYS", "low"),
        "a window begins with the tile's last row": (
            "tl.maximum(start + before - scoring.window + 1, 0)",
            "tl.maximum(end - scoring.window, 0)",
        ),
    },
    "attend_decode": {
        "the kv head is forgotten": (" + kv_head.to(tl.int64) * pool.s_head", ""),
        "the layer is forgotten": ("pool.tensor + pool.offset + kv_head", "pool.tensor + kv_head"),
        "another entry's table": (
            "contexts.blocks + tl.load(span + 3)",
            "contexts.blocks + tl.load(contexts.spans + 3)",
        ),
        "padding is computed": ("(count > 0) & ", ""),
        "the last segment is skipped": (
            "(first <= position)",
            "(first + TILE.SEGMENT <= position)",
        ),
        "a segment of one key is skipped": ("(first <= position)", "(first < position)"),
        "a window's first segment is skipped": ("(first + TILE.SEGMENT > low)", "(first >= low)"),
        "the own position is cut": ("position + 1)", "position)"),
        "segments overlap": (
            "first = segment * TILE.SEGMENT",
            "first = segment * (TILE.SEGMENT - TILE.KEYS)",
        ),
        "a window is wider": (
            "position - scoring.window + 1",
            "position - scoring.window - TILE.KEYS",
        ),
        "the wrong query head": ("kv_head * TILE.GROUP + tl.where", "kv_head + tl.where"),
        "rows beyond the group": ("live = index < TILE.GROUP", "live = index < TILE.ROWS"),
        "another row's query": (
            "query.tensor + (line * query.s_row",
            "query.tensor + (entry * 0 * query.s_row",
        ),
        "parts lie in each other": ("* tl.num_programs(2) + segment", "+ segment"),
        "entries' parts lie in each other": (
            "(entry.to(tl.int64) * tl.num_programs(1) + kv_head)",
            "(entry.to(tl.int64) + kv_head)",
        ),
        "sums are not kept": (
            "tl.store(weights + at * 2 + 1, total",
            "tl.store(weights + at * 2 + 1, best",
        ),
        "parts have the padded width": (
            "partial + at[:, None] * TILE.DIM",
            "partial + at[:, None] * TILE.WIDTH",
        ),
        "a window's tiles begin where it does": ("low // TILE.KEYS * TILE.KEYS", "low"),
    },
    "combine_segments": {
        "segments in the other order": (
            "at = (part + segment)",
            "at = (part + position // TILE.SEGMENT - segment + low // TILE.SEGMENT)",
        ),
        "the first segment is forgotten": (
            "range(low // TILE.SEGMENT,",
            "range(low // TILE.SEGMENT + 1,",
        ),
        "the last segment is forgotten": (
            "position // TILE.SEGMENT + 1",
            "position // TILE.SEGMENT",
        ),
        "segments before a window count": ("range(low // TILE.SEGMENT,", "range(0,"),
        "a segment too many": ("position // TILE.SEGMENT + 1", "position // TILE.SEGMENT + 2"),
        "padding is written": ("if tl.load(span + 2) > 0:", "if tl.load(span + 2) >= 0:"),
        "entries' parts lie in each other": (
            "(entry.to(tl.int64) * tl.num_programs(1) + kv_head)",
            "(entry.to(tl.int64) + kv_head)",
        ),
        "kv heads' parts lie in each other": ("* segments", "* 1"),
        "the sum is the score": ("weights + at * 2 + 1", "weights + at * 2 + 0"),
        "the wrong query head": ("kv_head * TILE.GROUP + tl.where", "kv_head + tl.where"),
        "another row": ("out.tensor + (line * out.s_row", "out.tensor + ((line + 1) * out.s_row"),
        "rows beyond the group": ("live = index < TILE.GROUP", "live = index <= TILE.GROUP"),
        "a window is narrower": ("position - window + 1", "position - window + 1 + TILE.SEGMENT"),
        "parts have the padded width": (
            "partial + at[:, None] * TILE.DIM",
            "partial + at[:, None] * TILE.WIDTH",
        ),
    },
    "store_rows": {
        "padding is written": ("if slot >= 0:", "if slot >= -1:"),
        "the first slot is padding": ("if slot >= 0:", "if slot > 0:"),
        "one position late": ("slot % BLOCK * pool.s_pos", "(slot + 1) % BLOCK * pool.s_pos"),
        "one block late": ("slot // BLOCK * pool.s_block", "(slot // BLOCK + 1) * pool.s_block"),
        "offsets of 32 bits": (
            "slot // BLOCK * pool.s_block",
            "(slot // BLOCK * pool.s_block).to(tl.int32)",
        ),
        "slots of 32 bits": ("tl.load(slots + row).to(tl.int64)", "tl.load(slots + row)"),
        "the layer is forgotten": ("at += pool.offset + head", "at += head"),
        "the kv head is forgotten": (
            "pool.offset + head.to(tl.int64) * pool.s_head + column",
            "pool.offset + column",
        ),
        "V stands for K": (
            "tl.load(key.tensor + row * key.s_row + head * key.s_head",
            "tl.load(value.tensor + row * value.s_row + head * value.s_head",
        ),
        "V goes where K is": ("tl.store(at + pool.s_kv, v", "tl.store(at, v"),
        "V by the strides of heads": (
            "value.tensor + row * value.s_row",
            "value.tensor + row * value.s_head",
        ),
        "V by the stride of K's heads": ("head * value.s_head", "head * key.s_head"),
        "V by the stride of K's rows": ("row * value.s_row", "row * key.s_row"),
        "one head for all": (
            "key.tensor + row * key.s_row + head * key.s_head",
            "key.tensor + row * key.s_row",
        ),
        "heads are written beyond their end": ("mask = column < DIM", "mask = column < WIDTH"),
    },
    "add_and_norm": {
        "the sum is not kept": ("tl.store(residual + row + column, x, mask=mask)", "pass"),
        "the sum is not added": (
            "x = (x.to(tl.float32) + more.to(tl.float32)).to(dtype)",
            "x = more",
        ),
        "the sum is not rounded": (
            "(x.to(tl.float32) + more.to(tl.float32)).to(dtype)",
            "x.to(tl.float32) + more.to(tl.float32)",
        ),
        "the mean is over the padded width": ("/ SIZE + epsilon", "/ WIDTH + epsilon"),
        "no epsilon": (" / SIZE + epsilon", " / SIZE"),
        "epsilon is added to the sum": (
            "tl.sum(wide * wide, 0) / SIZE + epsilon",
            "(tl.sum(wide * wide, 0) + epsilon) / SIZE",
        ),
        "the mean is of the numbers": ("tl.sum(wide * wide, 0)", "tl.sum(wide, 0)"),
        "rows lie in each other": (".to(tl.int64) * SIZE", ".to(tl.int64) * (SIZE - 1)"),
        "the weight is that of the row": ("weight + column", "weight + row + column"),
        "the root is forgotten": ("tl.rsqrt(", "1.0 / ("),
        "padding is written": (
            "_normed(wide, scale, gain, dtype), mask=mask)",
            "_normed(wide, scale, gain, dtype))",
        ),
        "the norm is written to the sum": (
            "tl.store(out + row + column",
            "tl.store(residual + row + column",
        ),
    },
    "_normed": {
        "no rounding before the weight": (".to(dtype).to(tl.float32) *", " *"),
        "the weight is forgotten": (" * weight.to(tl.float32)", ""),
        "the weight is 1 + weight": ("weight.to(tl.float32)", "(1 + weight.to(tl.float32))"),
        "the scale is forgotten": ("(wide * scale)", "(wide)"),
        "the scale is applied twice": ("(wide * scale)", "(wide * scale * scale)"),
        "the scale divides": ("(wide * scale)", "(wide / scale)"),
        "the weight is added": ("* weight.to(tl.float32)", "+ weight.to(tl.float32)"),
        "the weight is rounded to half": (
            "weight.to(tl.float32)",
            "weight.to(tl.bfloat16).to(tl.float32)",
        ),
        "the result is rounded to half": (
            "weight.to(tl.float32)).to(dtype)",
            "weight.to(tl.float32)).to(tl.bfloat16).to(dtype)",
        ),
        "the norm is rounded to half": (
            "(wide * scale).to(dtype)",
            "(wide * scale).to(tl.float16)",
        ),
    },
    "rotate_and_store": {
        "values are rotated": ("if head < QUERIES + KEYS:", "if head >= 0:"),
        "keys are not rotated": ("if head < QUERIES + KEYS:", "if head < QUERIES:"),
        "neighbours are pairs": ("(column + DIM // 2) % DIM", "column ^ 1"),
        "halves are not exchanged": ("(column + DIM // 2) % DIM", "column"),
        "the padded width is halved": ("(column + DIM // 2) % DIM", "(column + WIDTH // 2) % DIM"),
        "one weight for all heads": ("gain = weight + head * DIM", "gain = weight"),
        "one weight for both halves": ("tl.load(gain + opposite", "tl.load(gain + column"),
        "the other half is not normed": (
            "y = _normed(y.to(tl.float32), scale, far, dtype)",
            "pass",
        ),
        "the first product is not rounded": (
            "(x.to(tl.float32) * cosine).to(dtype).to(tl.float32)",
            "(x.to(tl.float32) * cosine)",
        ),
        "the second product is not rounded": (
            "(y.to(tl.float32) * sine).to(dtype).to(tl.float32)",
            "(y.to(tl.float32) * sine)",
        ),
        "the rotation is backwards": ("(near + turned)", "(near - turned)"),
        "angles of one row": ("cosines + row * DIM", "cosines"),
        "sines of one row": ("(sines + row * DIM", "(sines"),
        "padding is written": ("if slot >= 0:", "if slot >= -1:"),
        "the first slot is padding": ("if slot >= 0:", "if slot > 0:"),
        "V goes where K is": ("other // KEYS * pool.s_kv + ", ""),
        "one head for all": ("(other % KEYS).to(tl.int64) * pool.s_head", "0 * pool.s_head"),
        "the layer is forgotten": (" + pool.offset", ""),
        "offsets of 32 bits": (
            "slot // BLOCK * pool.s_block",
            "(slot // BLOCK * pool.s_block).to(tl.int32)",
        ),
        "slots of 32 bits": ("tl.load(slots + row).to(tl.int64)", "tl.load(slots + row)"),
        "no epsilon": ("/ DIM + epsilon", "/ DIM"),
        "the mean is over the padded width": ("/ DIM + epsilon", "/ WIDTH + epsilon"),
        "rows of the joint product lie in each other": (
            "joint + row * j_row",
            "joint + row * QUERIES * DIM",
        ),
    },
    "gate_and_up": {
        "gate and up are exchanged": (
            "wide = gate.to(tl.float32)",
            "wide = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)",
        ),
        "the activation is not rounded": (".to(dtype).to(tl.float32)\n    up", "\n    up"),
        "the sigmoid alone": ("(wide / (1.0 +", "(1.0 / (1.0 +"),
        "the sign is lost": ("tl.exp(-wide)", "tl.exp(wide)"),
        "base 2": ("tl.exp(-wide)", "tl.exp2(-wide)"),
        "large numbers are none": (
            "(wide / (1.0 + tl.exp(-wide)))",
            "(wide * tl.exp(wide) / (1.0 + tl.exp(wide)))",
        ),
        "no one in the divisor": ("(1.0 + tl.exp", "(0.0 + tl.exp"),
        "up is forgotten": ("(active * up)", "(active)"),
        "up is added": ("(active * up)", "(active + up)"),
        "up is gate": ("source + SIZE, mask", "source, mask"),
        "rows lie in each other": ("row * (2 * SIZE)", "row * SIZE"),
        "columns of other programs": ("tl.program_id(1) * WIDTH + ", ""),
        "padding is written": ("(active * up).to(dtype), mask=mask)", "(active * up).to(dtype))"),
        "output rows are twice as long": ("out + row * SIZE", "out + row * 2 * SIZE"),
    },
}


def mutated(function: str, old: str, new: str) -> tuple[str, str]:
    """The module of a function, and its text with the mistake."""
    for path in sorted(FOLDER.glob("*_kernels.py")):
        text = path.read_text()
        head, found, rest = text.partition(f"\ndef {function}(")
        if found:
            body, end, tail = rest.partition("\n@triton.jit")
            assert body.count(old) == 1, f"{function} has {old!r} {body.count(old)} times"
            return path.stem, head + found + body.replace(old, new) + end + tail
    raise LookupError(function)


@contextmanager
def mistaken(function: str, old: str, new: str) -> Iterator[None]:
    """The kernels of this process, none of which is imported yet, with the mistake."""
    module, text = mutated(function, old, new)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{module}.py")
        path.write_text(text)
        name = f"kvrelay.engine.cuda.{module}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made
        spec.loader.exec_module(made)
        yield


def verdict(function: str, old: str, new: str) -> str:
    """``found``, ``survives`` every check of the function, or ``endless``.

    Time is the processor's: on a busy machine no mistake counts as found because it waited.
    """
    mutated(function, old, new)  # that the mistake can be made
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {0: "survives", -signal.SIGPROF: "endless"}.get(status, "found")
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    status = 1
    try:
        with mistaken(function, old, new):
            checks = importlib.import_module("tests.engine.cuda.checks")
            for check in CHECKS[function]:
                checks.run(check, 1)
        status = 0
    finally:
        os._exit(status)


def survivors(function: str) -> Iterator[str]:
    """The mistakes in a function that no check finds, and the function itself if one finds any."""
    same = next(iter(MUTANTS[function].values()))[0]
    if (told := verdict(function, same, same)) != "survives":
        yield f"{function}, unchanged: {told}"
    for name, (old, new) in MUTANTS[function].items():
        told = verdict(function, old, new)
        if told != ("endless" if (function, name) in ENDLESS else "found"):
            yield f"{function}: {name}: {told}"


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(MUTANTS)
    left = [one for function in chosen for one in survivors(function)]
    print(f"{sum(len(MUTANTS[function]) for function in chosen)} mistakes, {len(left)} survive")
    if left:
        sys.exit("\n".join(left))
