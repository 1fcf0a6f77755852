"""Two tenants of one fleet: same tokens, and neither sees that the other has asked before."""

from __future__ import annotations

import pytest

from kvrelay import Completion
from kvrelay.v1 import router_pb2
from tests.secure.secured_cluster import Secured
from tests.secured import ADMIN, ALICE, BOB

pytestmark = pytest.mark.cluster


def cached(answer: Completion) -> int:
    assert answer.usage is not None
    assert answer.usage.cached_prompt_tokens is not None
    return answer.usage.cached_prompt_tokens


def prompt(number: int, length: int = 100) -> list[int]:
    return [(number * 31 + index * 7) % 250 for index in range(length)]


@pytest.mark.parametrize("length", [5, 15, 100])
def test_a_tenant_hits_its_own_blocks_only(secured: Secured, length: int) -> None:
    prompt_ids = prompt(length, length)
    first = secured.complete(ALICE, prompt_ids)
    strangers = [secured.complete(BOB, prompt_ids), secured.complete(ADMIN, prompt_ids)]
    again = secured.complete(ALICE, prompt_ids)
    assert [cached(answer) for answer in (first, *strangers)] == [0, 0, 0]
    assert cached(again) >= (length - 1) // 16 * 16
    assert {answer.token_ids for answer in (first, *strangers, again)} == {first.token_ids}
    assert cached(secured.complete(BOB, prompt_ids)) == cached(again)


def test_within_a_tenant_the_hand_over_goes_through_the_store(secured: Secured) -> None:
    answer = secured.complete(BOB, prompt(200))
    assert answer.usage is not None
    prefill, decode = answer.usage.legs
    assert prefill.role == "prefill"
    assert (prefill.saved, decode.external, decode.computed) == (100, 100, 1)


def test_a_longer_prompt_of_another_tenant_finds_nothing_either(secured: Secured) -> None:
    """Neither a prefix, nor a block in the middle."""
    prompt_ids = prompt(300, 64)
    secured.complete(ALICE, prompt_ids)
    assert cached(secured.complete(BOB, [*prompt_ids, 1, 2, 3])) == 0
    assert cached(secured.complete(ALICE, [*prompt_ids, 1, 2, 3])) == 64


def test_a_request_has_no_place_for_a_salt_or_an_address() -> None:
    names, left = set[str](), [router_pb2.GenerateRequest.DESCRIPTOR]
    while left:
        for field in left.pop().fields:
            names.add(field.name)
            left += [field.message_type] if field.message_type else []
    assert "token_ids" in names
    for word in ("salt", "tenant", "address", "store", "worker", "namespace", "generation"):
        assert not any(word in name for name in names)
