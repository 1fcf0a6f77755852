"""Which hints the router sends when. Pure; the tests give the time."""

from __future__ import annotations

from contextlib import ExitStack

from kvrelay.v1 import store_pb2
from kvrelay.v1.router_pb2 import (
    RETENTION_TOOL_CALL,
    RETENTION_TURN_ENDS,
    RETENTION_UNSPECIFIED,
)
from kvrelay.v1.store_pb2 import REUSE_LATE, REUSE_SOON
from router.queue import hints
from router.queue.hints import MAX_ENDED, MAX_HINTS, MAX_NAMES, MIN_WAIT, RENEW, SETTLE, HintQueue

NAMES = (b"a" * 32, b"b" * 32)


def sent(message: store_pb2.HintRequest | None) -> list[tuple[str, int]]:
    """The tenants and number of blocks of the hints in a message."""
    return [] if message is None else [(one.tenant, len(one.names)) for one in message.hints]


def test_a_request_that_waits_is_told_and_told_again() -> None:
    queue = HintQueue(enabled=True)
    with queue.waiting(NAMES, "alice", 0.0):
        assert queue.due(MIN_WAIT / 2) is None  # most requests never wait
        message = queue.due(MIN_WAIT)
        assert message is not None
        (hint,) = message.hints
        assert (tuple(hint.names), hint.reuse, hint.tenant) == (NAMES, REUSE_SOON, "alice")
        assert hint.life_ms > RENEW * 1000
        assert queue.due(MIN_WAIT + RENEW / 2) is None
        assert sent(queue.due(MIN_WAIT + RENEW)) == [("alice", 2)]
    assert queue.due(100.0) is None


def test_a_request_with_a_token_waits_no_longer() -> None:
    queue = HintQueue(enabled=True)
    with queue.waiting(NAMES, "", 0.0) as waits_no_longer:
        waits_no_longer()
        assert queue.due(10.0) is None
        waits_no_longer()


def test_what_a_client_expects_is_told_once_the_last_blocks_are_stored() -> None:
    queue = HintQueue(enabled=True)
    queue.ended(NAMES, RETENTION_TOOL_CALL, "alice", 0.0)
    queue.ended(NAMES, RETENTION_TURN_ENDS, "bob", 0.0)
    queue.ended(NAMES, RETENTION_UNSPECIFIED, "carol", 0.0)
    queue.ended((), RETENTION_TOOL_CALL, "dave", 0.0)  # shorter than a block
    assert queue.due(SETTLE / 2) is None
    message = queue.due(SETTLE)
    assert message is not None
    assert [(one.tenant, one.reuse) for one in message.hints] == [
        ("alice", REUSE_SOON),
        ("bob", REUSE_LATE),
    ]
    assert queue.due(100.0) is None


def test_a_message_is_bounded_and_the_rest_follows() -> None:
    queue = HintQueue(enabled=True)
    many = [bytes([i // 256, i % 256]) * 16 for i in range(MAX_NAMES // 2 - 1)]
    with ExitStack() as stack:
        for tenant in "abcde":
            stack.enter_context(queue.waiting(many, tenant, 0.0))
        told = [sent(queue.due(1.0 + second)) for second in range(4)]
    pairs = [["a", "b"], ["c", "d"], ["e"], []]
    assert told == [[(tenant, len(many)) for tenant in pair] for pair in pairs]
    with ExitStack() as stack:
        for _ in range(MAX_HINTS + 3):
            stack.enter_context(queue.waiting(NAMES, "", 0.0))
        assert [len(sent(queue.due(1.0 + second))) for second in range(3)] == [MAX_HINTS, 3, 0]


def test_a_prompt_of_more_blocks_than_a_message_takes_is_cut() -> None:
    queue = HintQueue(enabled=True)
    with queue.waiting([b"n" * 32] * (MAX_NAMES + 9), "", 0.0):
        assert sent(queue.due(1.0)) == [("", MAX_NAMES)]


def test_what_waits_to_be_sent_is_bounded() -> None:
    queue = HintQueue(enabled=True)
    block = [b"n" * 32] * MAX_NAMES
    most = MAX_ENDED // MAX_NAMES
    for _ in range(most + 3):
        queue.ended(block, RETENTION_TOOL_CALL, "", 0.0)
    assert queue.counts == {"dropped": 3}
    told = 0
    while (message := queue.due(SETTLE)) is not None:
        told += len(message.hints)
    assert told == most


def test_without_a_store_nothing_is_noted() -> None:
    queue = HintQueue(enabled=False)
    queue.ended(NAMES, RETENTION_TOOL_CALL, "", 0.0)
    with queue.waiting(NAMES, "", 0.0):
        assert queue.due(100.0) is None


def test_every_retention_has_a_meaning() -> None:
    named = {RETENTION_TURN_ENDS, RETENTION_TOOL_CALL}
    assert set(hints.LIVES) == named
