"""The kernels compile for every supported GPU, and what they need there is bounded."""

from __future__ import annotations

import json

import pytest

from tests.engine.cuda.processes import needs_triton, plain
from tests.engine.cuda.rounded import PRODUCTS

pytestmark = [needs_triton, pytest.mark.triton]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
SHARED = 99 * 1024  # of a program on sm_86, sm_89 and sm_120: the least of all


def check(printed: str, kernels: int) -> None:
    """What ``compiled`` has printed."""
    found = [json.loads(line) for line in printed.splitlines()]
    assert len(found) == kernels
    for one in found:
        assert one["local"] == 0, f"spills: {one}"
        assert one["registers"] <= 255, one
        assert one["shared"] <= SHARED, one
        attends = one["kernel"] in ("attend_decode", "attend_prefill")
        if one["case"] == "float32":
            assert one["products"] == 0, f"tensor cores round float32: {one}"
        elif attends:
            assert one["products"] > 0, f"no tensor cores: {one}"
            assert one["wide_loads"] > 0, f"no loads of 16 bytes: {one}"
        if not attends or one["case"] != "float32":
            assert one["fused"] == 0, f"a product and a sum are rounded once: {one}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_spills_and_shared_memory(architecture: int) -> None:
    check(plain("compiled", str(architecture)), 9 * 7)


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_rounded_product_of_float32_is_found(product: str) -> None:
    printed = plain("rounded", "80", product)
    with pytest.raises(AssertionError, match="tensor cores round float32"):
        check(printed, 7)
