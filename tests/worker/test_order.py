"""What a leg is made into for the engine."""

from __future__ import annotations

import pytest

from kvrelay.sampling import Sampling
from kvrelay.v1 import types_pb2
from kvrelay.worker import convert

LEG = types_pb2.Leg(request_id="r", prompt_token_ids=[1, 2, 3], output_token_ids=[4], max_tokens=5)


@pytest.mark.parametrize("save", [True, False])
def test_nothing_is_saved_where_there_is_no_store(save: bool) -> None:
    order = convert.order(LEG, "r/1", Sampling(), True, save, b"whose")
    assert (order.tokens, order.prompt_len, order.max_tokens) == ((1, 2, 3, 4), 3, 5)
    assert order.save is save
    assert (order.prefill_only, order.space) == (True, b"whose")
