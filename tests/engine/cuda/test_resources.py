"""The kernels compile for every supported GPU, and what they need there is bounded."""

from __future__ import annotations

import json

import pytest

from tests.engine.cuda.processes import needs_triton, plain

pytestmark = [needs_triton, pytest.mark.triton]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
SHARED = 99 * 1024  # of a program on sm_86, sm_89 and sm_120: the least of all


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_spills_and_shared_memory(architecture: int) -> None:
    found = [json.loads(line) for line in plain("compiled", str(architecture)).splitlines()]
    assert len(found) == 9 * 7
    for one in found:
        assert one["local"] == 0, f"spills: {one}"
        assert one["registers"] <= 255, one
        assert one["shared"] <= SHARED, one
        attends = one["kernel"] in ("attend_decode", "attend_prefill")
        if attends and one["case"] != "float32":
            assert one["products"] > 0, f"no tensor cores: {one}"
            assert one["wide_loads"] > 0, f"no loads of 16 bytes: {one}"
        if not attends or one["case"] != "float32":
            assert one["fused"] == 0, f"a product and a sum are rounded once: {one}"
