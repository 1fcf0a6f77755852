"""The store connector: exact content, one event for each order, nothing held at the end."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

import pytest

from kvrelay.connector.context import ConnectorOptions
from kvrelay.engine.core.external import Loaded, Saved, TransferEvent
from kvrelay.errors import DeadlineExceeded
from kvrelay.usage import Miss
from kvstore import GetResult, Want, connect
from kvstore.client.memory import forget
from tests.connector.rig import PATIENT, SPACE, WAIT, B, Stage, Worker, blocks_for

Making = Callable[..., Worker]


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.go.set()
    forget(made.name)


@pytest.fixture
def making(stage: Stage) -> Iterator[Making]:
    workers: list[Worker] = []

    def make(options: ConnectorOptions | None = None, **more: object) -> Worker:
        workers.append(Worker(stage, options, **more))  # type: ignore[arg-type]
        return workers[-1]

    yield make
    stage.go.set()
    for worker in workers:
        worker.connector.close()
        assert worker.idle


def saved(worker: Worker, tokens: Sequence[int]) -> None:
    """Put the KV of ``tokens`` into the store."""
    blocks = blocks_for(len(tokens), 40)
    worker.fill(tokens, blocks)
    save = worker.save("saver", tokens, blocks)
    assert worker.event() == Saved("saver", save.epoch, 0, len(blocks))


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("prompt", range(1, 3 * B + 2))
def test_a_decode_leg_finds_and_loads_the_whole_prompt(
    making: Making, prompt: int, host: bool
) -> None:
    tokens = list(range(100, 100 + prompt))
    saved(making(host=host), tokens)
    for local in range(0, prompt, B):
        worker = making(host=host)
        assert worker.ask("r", [*tokens, 7], local) == prompt - local
        blocks = blocks_for(prompt - local)
        load = worker.load("r", [*tokens, 7], local, prompt - local, blocks)
        assert worker.event() == Loaded("r", load.epoch, prompt - local)
        assert worker.holds(tokens, local, prompt, blocks)


@pytest.mark.parametrize("prompt", range(2, 3 * B + 2))
def test_a_twin_finds_all_but_its_last_token(making: Making, prompt: int) -> None:
    tokens = list(range(100, 100 + prompt))
    saved(making(), tokens)
    twin = making()
    assert twin.ask("r", tokens) == prompt
    load = twin.load("r", tokens, 0, prompt - 1, blocks_for(prompt - 1))
    assert twin.event() == Loaded("r", load.epoch, prompt - 1)
    assert twin.holds(tokens, 0, prompt - 1, blocks_for(prompt - 1))


def test_a_last_full_block_that_is_absent_is_replaced_by_the_partial_one(making: Making) -> None:
    tokens = list(range(2 * B))
    saved(making(), tokens[:-1])
    worker = making()
    assert worker.ask("r", tokens) == 2 * B - 1
    load = worker.load("r", tokens, 0, 2 * B - 1, [0, 1])
    assert worker.event() == Loaded("r", load.epoch, 2 * B - 1)
    assert worker.holds(tokens, 0, 2 * B - 1, [0, 1])


@pytest.mark.parametrize("external", range(1, 12))
def test_a_load_without_a_remembered_lookup(making: Making, external: int) -> None:
    tokens = list(range(12))
    saved(making(), tokens[:external])
    worker = making()
    load = worker.load("r", tokens, 0, external, blocks_for(external))
    assert worker.event() == Loaded("r", load.epoch, external)
    assert worker.holds(tokens, 0, external, blocks_for(external))


def test_a_lookup_is_asked_once_and_answers_any_local(making: Making, stage: Stage) -> None:
    tokens = list(range(11))
    worker = making()
    saved(worker, tokens)
    assert worker.connector.lookup(worker.query("r", [*tokens, 7])) is None
    assert worker.ask("r", [*tokens, 7]) == 11
    assert worker.ask("r", [*tokens, 7], 8) == 3
    assert worker.ask("r", [*tokens, 7], 12) == 0
    assert stage.lookups == [(3, 1)]
    assert worker.ask("r", [*tokens, 7, 8]) == 8
    assert stage.lookups == [(3, 1), (3, 1)]


@pytest.mark.parametrize(("length", "local"), [(1, 0), (5, 4), (9, 8)])
def test_a_prompt_held_in_the_pool_is_not_looked_up(
    making: Making, stage: Stage, length: int, local: int
) -> None:
    worker = making()
    assert worker.connector.lookup(worker.query("r", list(range(length)), local)) == 0
    assert stage.lookups == []


def test_an_answer_ends_before_its_lease(making: Making, stage: Stage) -> None:
    now = [time.monotonic()]
    options = ConnectorOptions(lease_seconds=30, lease_margin_seconds=6)
    worker = making(options, clock=lambda: now[0])
    saved(worker, list(range(8)))
    assert worker.ask("r", list(range(9))) == 8
    now[0] += 23
    assert worker.connector.lookup(worker.query("r", list(range(9)))) == 8
    now[0] = time.monotonic() + 24
    assert worker.connector.lookup(worker.query("r", list(range(9)))) is None
    worker.until(lambda: worker.counters.open_lookups == 0)
    assert len(stage.lookups) == 2


def test_nothing_found_is_asked_again_after_a_while(making: Making, stage: Stage) -> None:
    now = [time.monotonic()]
    worker = making(clock=lambda: now[0])
    assert worker.ask("r", list(range(9))) == 0
    assert worker.ask("r", list(range(9)), 4) == -4
    assert len(stage.lookups) == 1
    saved(making(), list(range(8)))
    now[0] += 2
    assert worker.ask("r", list(range(9))) == 8


def test_a_failed_lookup_is_an_answer_of_nothing(making: Making, stage: Stage) -> None:
    stage.failing = lambda: True
    worker = making()
    assert worker.ask("r", list(range(9))) == 0
    assert worker.counters.lookup_failures == 1


def test_a_stalled_lookup_is_an_answer_of_nothing(making: Making, stage: Stage) -> None:
    now = [time.monotonic()]
    worker = making(ConnectorOptions(lookup_seconds=1), clock=lambda: now[0])
    saved(worker, list(range(8)))
    stage.stall()
    query = worker.query("r", list(range(9)))
    assert worker.connector.lookup(query) is None
    assert stage.asked.acquire(timeout=WAIT)  # its deadline starts when it is sent
    now[0] += 0.9
    assert worker.connector.lookup(query) is None
    now[0] += 0.2
    assert worker.connector.lookup(query) == 0
    assert worker.counters.lookup_failures == 1
    stage.go.set()
    worker.until(lambda: worker.counters.open_lookups == 0)
    assert worker.connector.lookup(query) == 0  # the late answer changed nothing


def test_a_release_gives_the_lease_back(making: Making, stage: Stage) -> None:
    worker = making()
    saved(worker, list(range(8)))
    assert worker.ask("r", list(range(9))) == 8
    assert stage.stats(1).leases == worker.counters.open_leases == 1
    worker.connector.release("r")
    worker.connector.release("unknown")
    worker.connector.close()
    assert stage.stats(1).leases == worker.counters.open_leases == 0


def test_a_lease_no_load_will_follow_goes_back(making: Making, stage: Stage) -> None:
    now = time.monotonic()  # an answer without a lease counts for a second
    worker = making(clock=lambda: now)
    tokens = list(range(11))
    saved(worker, tokens[:8])

    def returned() -> bool:
        deadline = time.monotonic() + WAIT
        while worker.counters.open_leases and time.monotonic() < deadline:
            pass
        return worker.counters.open_leases == stage.stats(1).leases == 0

    assert worker.ask("covered", tokens, local=8) == 0
    assert returned()
    assert worker.ask("covered", tokens, local=4) == 4  # the answer itself is kept
    assert len(stage.lookups) == 1
    assert worker.ask("admitted", tokens) == 8
    assert worker.counters.open_leases == 1
    worker.fill(tokens, [50, 51, 52])
    worker.save("admitted", tokens, [50, 51, 52])
    worker.event()
    assert returned()


def test_what_a_request_found_is_leased_until_the_rest_is_saved(
    making: Making, stage: Stage
) -> None:
    """The lease ended with the load: a prompt that fills the store evicted its own head."""
    worker = making()
    tokens = list(range(100, 117))
    saved(worker, tokens[:8])
    assert worker.ask("r", tokens) == 8
    worker.load("r", tokens, 0, 8, blocks_for(8))
    worker.event()
    assert stage.stats(1).leases == worker.counters.open_leases == 1
    worker.fill(tokens, blocks_for(17))
    worker.save("r", tokens, blocks_for(17))
    worker.event()
    assert stage.clear(1) == 3  # the rest: what was found is held
    worker.connector.release("r")
    worker.until(lambda: worker.counters.open_leases == 0)
    assert stage.clear(1) == 2


def test_a_lease_that_is_released_during_its_load_ends_with_the_load(
    making: Making, stage: Stage
) -> None:
    worker = making()
    tokens = list(range(100, 117))
    saved(worker, tokens[:8])
    assert worker.ask("r", tokens) == 8
    stage.stall()
    worker.load("r", tokens, 0, 8, blocks_for(8))
    assert stage.asked.acquire(timeout=WAIT)
    worker.connector.release("r")
    assert worker.counters.open_leases == 1
    stage.go.set()
    worker.event()
    worker.until(lambda: worker.counters.open_leases == 0)
    assert stage.stats(1).leases == 0


def test_a_release_during_the_lookup_gives_the_lease_back(making: Making, stage: Stage) -> None:
    worker = making()
    saved(worker, list(range(8)))
    stage.go.clear()
    assert worker.connector.lookup(worker.query("r", list(range(9)))) is None
    worker.connector.release("r")
    stage.go.set()
    worker.until(lambda: worker.counters.open_lookups == 0)
    worker.connector.close()
    assert stage.stats(1).leases == 0


@pytest.mark.parametrize("bad", range(4))
def test_nothing_counts_from_the_first_wrong_block_on(
    making: Making, stage: Stage, bad: int
) -> None:
    tokens = list(range(15))
    worker = making()
    saved(worker, tokens)
    stage.flip = lambda index: index == bad
    assert worker.ask("r", [*tokens, 7]) == 15
    load = worker.load("r", [*tokens, 7], 0, 15, blocks_for(15))
    assert worker.event() == Loaded("r", load.epoch, bad * B, Miss.FAILED_VERIFICATION)
    assert (worker.counters.corrupt, worker.counters.loads_short) == (1, 1)
    assert worker.holds(tokens, 0, bad * B, blocks_for(bad * B))


def test_a_chain_with_many_wrong_blocks_heals_after_one_load(making: Making, stage: Stage) -> None:
    """Of five wrong blocks each request removed one."""
    tokens = list(range(100, 100 + 6 * B))
    worker = making()
    saved(worker, tokens)
    names = worker.namer.chain(tokens, B)
    for name in names[1:]:
        entry = stage._shared.index.find(name, time.monotonic())
        assert entry is not None
        entry.value = entry.value[:-1] + bytes([entry.value[-1] ^ 1])
    assert worker.ask("r", [*tokens, 7]) == 6 * B
    load = worker.load("r", [*tokens, 7], 0, 6 * B, blocks_for(6 * B))
    assert worker.event() == Loaded("r", load.epoch, B, Miss.FAILED_VERIFICATION)
    deadline = time.monotonic() + WAIT
    while stage.stats(1).entries > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stage.stats(1).entries == 1
    assert stage.stats(1).counters.corrupt == 5
    assert worker.counters.corrupt == 1  # a request met one wrong block
    saved(worker, tokens)
    assert stage.stats(1).entries == 6


class LateChecks(Stage):
    """A store that reads single blocks, as a check does, only when told."""

    def __init__(self) -> None:
        super().__init__()
        self.check = threading.Event()

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        if len(wants) == 1:
            assert self.check.wait(timeout)
        return super().get(wants, timeout)


def test_a_request_heals_a_chain_though_it_saves_before_the_check_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The save took the wrong blocks for stored ones; then they were removed: a block a request."""
    monkeypatch.setattr("kvrelay.connector.store.RECHECK_SECONDS", WAIT)
    tokens = list(range(200, 200 + 6 * B))
    stage = LateChecks()
    worker = Worker(stage)
    try:
        saved(worker, tokens)
        for name in worker.namer.chain(tokens, B)[1:]:
            entry = stage._shared.index.find(name, time.monotonic())
            assert entry is not None
            entry.value = entry.value[:-1] + bytes([entry.value[-1] ^ 1])
        load = worker.load("r", [*tokens, 7], 0, 6 * B, blocks_for(6 * B))
        assert worker.event() == Loaded("r", load.epoch, B, Miss.FAILED_VERIFICATION)
        save = worker.save("r", tokens, blocks_for(6 * B, 40))
        threading.Event().wait(0.1)  # the save would put its blocks
        stage.check.set()
        assert worker.event() == Saved("r", save.epoch, 0, 6)
        load = worker.load("s", [*tokens, 7], 0, 6 * B, blocks_for(6 * B))
        assert worker.event() == Loaded("s", load.epoch, 6 * B)
        assert worker.holds(tokens, 0, 6 * B, blocks_for(6 * B))
    finally:
        worker.connector.close()
        forget(stage.name)


def test_an_absent_block_ends_the_load_there(making: Making) -> None:
    tokens = list(range(16))
    worker = making()
    saved(worker, tokens[:8])
    load = worker.load("r", tokens, 0, 15, blocks_for(15))
    assert worker.event() == Loaded("r", load.epoch, 8, Miss.TOO_LATE)
    assert (worker.counters.absent, worker.counters.corrupt) == (1, 0)


def test_names_that_collide_are_misses_and_never_answers(making: Making, stage: Stage) -> None:
    def eight_bits(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()[:1] * 32

    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    stage.named_with(eight_bits)
    worker = making(digest=eight_bits)
    for number in range(300):
        tokens = [source.randrange(50) for _ in range(source.randrange(2, 14))]
        blocks = blocks_for(len(tokens), 40)
        worker.fill(tokens, blocks)
        worker.save("s", tokens, blocks)
        worker.event()
        external = min(worker.ask(f"r{number}", tokens), len(tokens) - 1)
        if external > 0:
            worker.load(f"r{number}", tokens, 0, external, blocks_for(external))
            event = worker.event()
            assert isinstance(event, Loaded)
            assert worker.holds(tokens, 0, event.valid, blocks_for(event.valid))
    assert worker.counters.corrupt > 50


def test_a_failed_load_has_one_event(making: Making, stage: Stage) -> None:
    worker = making()
    saved(worker, list(range(8)))
    assert worker.ask("r", list(range(9))) == 8
    stage.failing = lambda: True
    load = worker.load("r", list(range(9)), 0, 8, blocks_for(8))
    assert worker.event() == Loaded("r", load.epoch, 0, Miss.UNREACHABLE)
    assert worker.counters.load_failures == 1
    assert worker.connector.poll() == []


def test_a_load_that_waits_for_a_thread_is_cancelled_at_once(making: Making, stage: Stage) -> None:
    """Its blocks belong to others from then on: nothing is written into them."""
    worker = making(ConnectorOptions(load_threads=1))
    tokens = list(range(100, 109))
    saved(worker, tokens)
    assert worker.ask("waits", [*tokens, 7]) == 9
    stage.stall()
    runs = worker.load("runs", tokens, 0, 8, blocks_for(8))
    assert stage.asked.acquire(timeout=WAIT)
    waits = worker.load("waits", [*tokens, 7], 0, 9, blocks_for(9, 8))
    assert worker.connector.cancel("waits", waits.epoch)
    assert worker.event() == Loaded("waits", waits.epoch, 0, Miss.UNKNOWN)
    other = list(range(200, 209))
    worker.fill(other, blocks_for(9, 8))
    stage.go.set()
    assert worker.event() == Loaded("runs", runs.epoch, 8)
    worker.load("last", tokens, 0, 8, blocks_for(8, 16))  # begins after the cancelled one's turn
    worker.event()
    assert worker.holds(other, 0, 9, blocks_for(9, 8))
    assert worker.connector.cancel("runs", runs.epoch), "it has ended"
    assert worker.connector.cancel("unknown", 7)
    assert (worker.counters.loads, worker.counters.loads_cancelled) == (3, 1)
    worker.until(lambda: worker.counters.open_leases == 0)
    assert worker.connector.poll() == []


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(("batch", "valid"), [(1 << 20, 16), (128, 12), (256, 16)])
def test_a_load_that_runs_stops_before_its_next_batch_when_it_is_cancelled(
    making: Making, stage: Stage, host: bool, batch: int, valid: int
) -> None:
    """It is cancelled at its third block of four. Until its event it keeps its blocks.

    It does not stop in the middle of a batch: the store would verify the block again.
    """
    worker = making(ConnectorOptions(batch_bytes=batch), host=host)
    tokens = list(range(100, 117))
    saved(worker, tokens[:16])
    epoch = next(worker.epochs) + 1
    seen: list[int] = []
    answers: list[bool] = []

    def cancel_at_the_third(index: int) -> bool:
        seen.append(index)
        if len(seen) == 3:
            answers.append(worker.connector.cancel("r", epoch))
        return False

    stage.flip = cancel_at_the_third
    load = worker.load("r", tokens, 0, 16, blocks_for(16))
    assert load.epoch == epoch
    missed = Miss.UNKNOWN if valid < 16 else None
    assert worker.event() == Loaded("r", epoch, valid, missed)
    assert answers == [False]
    assert len(seen) == valid // B
    assert worker.holds(tokens, 0, valid, blocks_for(valid))
    assert (worker.counters.load_failures, stage.stats(1).counters.corrupt) == (0, 0)


def test_a_load_is_ended_by_one_only(making: Making, stage: Stage) -> None:
    """Many loads, each cancelled while its thread may begin it: one event each."""
    worker = making(ConnectorOptions(load_threads=3))
    saved(worker, list(range(8)))
    for number in range(300):
        load = worker.load(f"r{number}", list(range(9)), 0, 8, blocks_for(8))
        time.sleep((number % 7) * 2e-5)
        worker.connector.cancel(load.request_id, load.epoch)
        assert worker.event().epoch == load.epoch
        assert worker.connector.poll() == []
    assert worker.counters.open_loads == 0


def test_a_load_that_waits_too_long_for_its_turn_is_given_up(making: Making, stage: Stage) -> None:
    worker = making(ConnectorOptions(load_threads=1, queue_seconds=0.0))
    saved(worker, list(range(8)))
    load = worker.load("r", list(range(9)), 0, 8, blocks_for(8))
    assert worker.event() == Loaded("r", load.epoch, 0, Miss.TOO_LATE)
    assert worker.counters.load_failures == 1


def test_a_load_larger_than_its_scratch_memory_comes_in_batches(
    making: Making, stage: Stage
) -> None:
    tokens = list(range(30))
    worker = making(ConnectorOptions(batch_bytes=2 * 128 + 1), host=False)
    saved(worker, tokens)
    while stage.asked.acquire(False):
        pass
    load = worker.load("r", [*tokens, 7], 0, 30, blocks_for(30))
    assert worker.event() == Loaded("r", load.epoch, 30)
    assert worker.holds(tokens, 0, 30, blocks_for(30))
    assert [stage.asked.acquire(False) for _ in range(5)] == [True] * 4 + [False]


def test_loads_do_not_wait_for_one_another(making: Making, stage: Stage) -> None:
    worker = making(ConnectorOptions(load_threads=3))
    saved(worker, list(range(8)))
    stage.stall()
    for number in range(3):
        worker.load(f"r{number}", list(range(9)), 0, 8, blocks_for(8, 2 * number))
    for _ in range(3):
        assert stage.asked.acquire(timeout=WAIT)
    stage.go.set()
    assert {worker.event().request_id for _ in range(3)} == {"r0", "r1", "r2"}


def test_too_many_bytes_waiting_drop_a_save_at_once(making: Making, stage: Stage) -> None:
    worker = making(ConnectorOptions(max_pending_save_bytes=300))
    stage.go.clear()
    first = worker.save("r", list(range(8)), [0, 1])
    dropped = worker.save("r", list(range(50, 58)), [2, 3])
    assert worker.event() == Saved("r", dropped.epoch, 0, 0)
    assert worker.counters.saves_dropped == 1
    stage.go.set()
    assert worker.event() == Saved("r", first.epoch, 0, 2)


def test_saves_of_one_request_keep_their_order(making: Making, stage: Stage) -> None:
    worker = making(ConnectorOptions(save_threads=4))
    stage.go.clear()
    saves = [worker.save("r", [n] * B, [n]) for n in range(20)]
    stage.go.set()
    events = [worker.event() for _ in saves]
    assert [event.epoch for event in events] == [save.epoch for save in saves]
    assert stage.puts == [[save.contents[0].name] for save in saves]


def test_saves_that_fail_and_blocks_that_exist(making: Making, stage: Stage) -> None:
    worker = making()
    stage.failing = lambda: True
    save = worker.save("r", list(range(8)), [0, 1])
    assert worker.event() == Saved("r", save.epoch, 0, 0)
    assert worker.counters.save_failures == 1
    stage.failing = lambda: False
    for _ in range(2):
        save = worker.save("r", list(range(8)), [0, 1])
        assert worker.event() == Saved("r", save.epoch, 0, 2)
    assert (worker.counters.saved_blocks, worker.counters.existing_blocks) == (2, 2)


def test_close_answers_everything_that_is_open(stage: Stage) -> None:
    worker = Worker(stage, ConnectorOptions(load_threads=1, save_threads=1, lookup_threads=1))
    saved(worker, list(range(8)))
    assert worker.ask("held", list(range(9))) == 8
    stage.stall()
    for number in range(4):
        assert worker.connector.lookup(worker.query(f"q{number}", list(range(9)))) is None
        worker.load(f"l{number}", list(range(9)), 0, 8, blocks_for(8))
        worker.save(f"s{number}", list(range(8)), [0, 1])
    for _ in range(3):  # one of each kind is under way, the others wait
        assert stage.asked.acquire(timeout=WAIT)
    closing = threading.Thread(target=worker.connector.close)
    closing.start()
    worker.until(lambda: worker.counters.open_loads == worker.counters.open_saves == 1)
    stage.go.set()
    closing.join(WAIT)
    worker.load("late", list(range(9)), 0, 8, blocks_for(8))
    worker.save("late", list(range(8)), [0, 1])
    opened = [f"{kind}{number}" for kind in "ls" for number in range(4)]
    assert worker.connector.cancel("l3", -1)
    closed = [event.request_id for event in worker.connector.poll()]
    assert sorted(closed) == sorted([*opened, "late", "late"])
    assert worker.idle


def test_a_storm_leaves_nothing_behind(stage: Stage) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source, fate = random.Random(seed), random.Random(seed + 1)
    worker = Worker(stage, ConnectorOptions(lease_seconds=60))
    stage.failing = lambda: fate.random() < 0.2
    stage.flip = lambda index: fate.random() < 0.3
    orders = {"load": 0, "save": 0}
    events: list[TransferEvent] = []

    def ended(kind: type[TransferEvent]) -> TransferEvent:
        while True:
            events.append(worker.event())
            if isinstance(events[-1], kind):
                return events[-1]

    for _ in range(800):
        tokens = [source.randrange(3) for _ in range(source.randrange(2, 30))]
        name = f"r{source.randrange(20)}"
        action = source.choice(["lookup", "lookup", "release", "load", "save"])
        if action == "lookup":
            answer = worker.connector.lookup(worker.query(name, tokens))
            assert answer is None or answer <= len(tokens)
        elif action == "release":
            worker.connector.release(name)
        elif action == "load":
            external = source.randrange(1, len(tokens))
            load = worker.load(name, tokens, 0, external, blocks_for(external, 16))
            event = ended(Loaded)
            assert isinstance(event, Loaded)
            assert (event.request_id, event.epoch) == (name, load.epoch)
            assert worker.holds(tokens, 0, event.valid, blocks_for(event.valid, 16))
        else:
            while worker.counters.open_saves:
                ended(Saved)
            worker.fill(tokens, blocks_for(len(tokens)))
            worker.save(name, tokens, blocks_for(len(tokens)))
        if action in orders:
            orders[action] += 1
    while worker.counters.open_saves:
        ended(Saved)
    worker.until(lambda: worker.counters.open_lookups == 0)
    stage.failing = lambda: False
    worker.connector.close()
    events += worker.events + worker.connector.poll()
    assert sum(isinstance(event, Loaded) for event in events) == orders["load"]
    assert sum(isinstance(event, Saved) for event in events) == orders["save"]
    assert len(events) == len({(type(event), event.epoch) for event in events})
    counters, stats = worker.counters, stage.stats(1)
    assert worker.idle
    assert counters.crashes == 0
    assert min(counters.load_failures, counters.save_failures, counters.lookup_failures) > 0
    assert min(counters.loaded_tokens, counters.corrupt, counters.lookup_hits) > 0
    assert (stats.reservations, stats.reserved_bytes) == (0, 0)


def test_an_unreachable_store_costs_no_request_a_timeout() -> None:
    worker = Worker(connect("kvrelay://127.0.0.1:1"))
    began = time.monotonic()
    for number in range(50):
        assert worker.ask(f"r{number}", list(range(9))) == 0
        worker.load(f"r{number}", list(range(9)), 0, 8, blocks_for(8))
        assert isinstance(worker.event(), Loaded)
        worker.save(f"r{number}", list(range(8)), [0, 1])
        assert isinstance(worker.event(), Saved)
    assert time.monotonic() - began < PATIENT.lookup_seconds, "none waited out its time"
    worker.connector.close()
    assert worker.counters.lookup_failures == 50
    assert worker.idle


def test_a_bug_ends_one_job_and_no_thread(
    making: Making, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = making(ConnectorOptions(load_threads=1), host=False)
    saved(worker, list(range(8)))

    def broken(block: int, count: int, payload: memoryview) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(worker.pool, "write", broken)
        load = worker.load("r", list(range(9)), 0, 8, blocks_for(8))
        assert worker.event() == Loaded("r", load.epoch, 0, Miss.UNKNOWN)
    load = worker.load("r", list(range(9)), 0, 8, blocks_for(8))
    assert worker.event() == Loaded("r", load.epoch, 8)
    assert worker.counters.crashes == 1
    assert "device lost" in caplog.text


# --- why a block was missed -----------------------------------------------------------------------


def test_a_lookup_says_why_it_found_no_more(making: Making, stage: Stage) -> None:
    tokens = list(range(11))
    worker = making()
    saved(worker, tokens[:8])
    assert worker.ask("new", [50, *tokens]) == 0
    assert worker.connector.why("new") is Miss.NEVER_STORED
    assert worker.ask("part", [*tokens, 7]) == 8
    assert worker.connector.why("part") is Miss.NEVER_STORED
    assert worker.ask("all", tokens[:9]) == 8
    assert worker.ask("whole", tokens[:8]) == 8
    assert worker.connector.why("whole") is None
    assert worker.connector.why("unknown") is None


def test_a_cleared_store_is_told_as_such(making: Making, stage: Stage) -> None:
    worker = making()
    saved(worker, list(range(8)))
    stage.clear(1)
    assert worker.ask("r", list(range(9))) == 0
    assert worker.connector.why("r") is Miss.CLEARED


@pytest.mark.parametrize("prompt", [3, 4, 9])
def test_the_same_prompt_under_another_namespace_is_told_as_such(
    making: Making, prompt: int
) -> None:
    tokens = list(range(prompt))
    saved(making(space=replace(SPACE, revision="other")), tokens)
    worker = making()
    assert worker.ask("r", tokens) == worker.ask("next", [*tokens, 7]) == 0
    assert worker.connector.why("r") is Miss.OTHER_NAMESPACE
    assert worker.connector.why("next") is Miss.OTHER_NAMESPACE
    assert worker.ask("other", [50, *tokens]) == 0
    assert worker.connector.why("other") is Miss.NEVER_STORED


@pytest.mark.parametrize("prompt", [3, 4, 9])
def test_the_same_prompt_from_another_numeric_profile_is_told_as_such(
    making: Making, prompt: int
) -> None:
    tokens = list(range(prompt))
    saved(making(space=replace(SPACE, numerics="avx2/sdpa")), tokens)
    for numerics in ("avx512/sdpa", ""):
        worker = making(space=replace(SPACE, numerics=numerics))
        assert worker.ask("r", tokens) == worker.ask("next", [*tokens, 7]) == 0
        assert worker.connector.why("r") is Miss.OTHER_NUMERICS
        assert worker.connector.why("next") is Miss.OTHER_NUMERICS
        assert worker.ask("other", [50, *tokens]) == 0
        assert worker.connector.why("other") is Miss.NEVER_STORED
    other = making(space=replace(SPACE, revision="other", numerics="avx512/sdpa"))
    assert other.ask("r", tokens) == 0
    assert other.connector.why("r") is Miss.OTHER_NAMESPACE


def test_what_another_tenant_holds_is_not_told(making: Making) -> None:
    tokens = list(range(9))
    saved(making(space=replace(SPACE, tenant_salt=b"theirs")), tokens)
    worker = making(space=replace(SPACE, tenant_salt=b"ours"))
    assert worker.ask("r", tokens) == 0
    assert worker.connector.why("r") is Miss.NEVER_STORED


SALTS = {name: name.encode() * 32 for name in "ab"}  # of two tenants


@pytest.mark.parametrize("prompt", [3, 4, 9])
def test_a_tenant_is_told_of_its_own_blocks_elsewhere_and_of_no_others(
    making: Making, prompt: int
) -> None:
    """Workers know a tenant by its salt, as the leg brings it."""
    tokens = list(range(prompt))
    old = making(space=replace(SPACE, numerics="avx2/sdpa"))
    new = making(space=replace(SPACE, numerics="avx512/sdpa"))
    other = making(space=replace(SPACE, revision="other", numerics="avx512/sdpa"))
    blocks = blocks_for(prompt, 40)
    old.fill(tokens, blocks)
    old.save("saver", tokens, blocks, space=SALTS["a"])
    old.event()
    for worker, reason in ((new, Miss.OTHER_NUMERICS), (other, Miss.OTHER_NAMESPACE)):
        assert worker.ask("a", tokens, space=SALTS["a"]) == 0
        assert worker.connector.why("a") is reason
        for name, space in (("b", SALTS["b"]), ("none", b"")):
            assert worker.ask(name, tokens, space=space) == 0
            assert worker.connector.why(name) is Miss.NEVER_STORED


def test_a_store_that_does_not_answer_is_unreachable_and_a_slow_one_too_late(
    making: Making, stage: Stage
) -> None:
    now = [time.monotonic()]
    worker = making(ConnectorOptions(lookup_seconds=1), clock=lambda: now[0])
    stage.failing = lambda: True
    assert worker.ask("r", list(range(9))) == 0
    assert worker.connector.why("r") is Miss.UNREACHABLE
    stage.failing = lambda: False
    stage.error = DeadlineExceeded("slow")
    assert worker.ask("slow", list(range(9))) == 0
    assert worker.connector.why("slow") is Miss.TOO_LATE
    stage.error = None
    stage.stall()
    assert worker.connector.lookup(worker.query("later", list(range(9)))) is None
    assert stage.asked.acquire(timeout=WAIT)
    now[0] += 2
    assert worker.connector.lookup(worker.query("later", list(range(9)))) == 0
    assert worker.connector.why("later") is Miss.TOO_LATE
    stage.go.set()


def test_a_store_that_cannot_be_used_is_in_the_log_once(
    making: Making, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    worker = making()
    for number, failing in enumerate((False, True, True, False, False, True)):
        stage.failing = lambda failing=failing: failing  # type: ignore[misc]
        worker.ask(f"r{number}", list(range(9)))
    said = [record.message.partition(",")[0] for record in caplog.records]
    cannot, again = "the store cannot be used", "the store can be used again"
    assert said == [cannot, again, cannot]


def test_after_a_restart_nothing_is_called_never_stored(making: Making, stage: Stage) -> None:
    worker = making()
    assert worker.ask("before", list(range(9))) == 0
    assert worker.connector.why("before") is Miss.NEVER_STORED
    stage.restart()
    assert worker.ask("after", list(range(9))) == 0
    assert worker.connector.why("after") is Miss.UNKNOWN
