"""What a leg is made into for the engine."""

from __future__ import annotations

import pytest

from kvrelay.errors import Rejected
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


def test_bad_words_come_as_token_ids() -> None:
    leg = types_pb2.Leg()
    leg.CopyFrom(LEG)
    leg.sampling.bad_word_ids.add(ids=[5, 6])
    convert.check_leg(leg, 100, 100)
    assert convert.sampling(leg.sampling, ()).bad_word_ids == ((5, 6),)
    leg.sampling.bad_words.append("text")
    with pytest.raises(Rejected, match="must be in bad_word_ids") as caught:
        convert.check_leg(leg, 100, 100)
    assert caught.value.field == "leg.sampling.bad_words"
