"""The window of streamed weights: reads return the stored bytes in any order, and the counters match the plan."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sft
from sft.weights import DiskStore, HostStore, RecordLayout, TensorSpec, WeightStream
from sft.weights.stream import StreamCounters

_LAYOUT = RecordLayout.of(
    [TensorSpec(name="w", shape=(16,), dtype=torch.int32), TensorSpec(name="m", shape=(3,), dtype=torch.int32, is_state=True)]
)


def _fill(block: int, views: dict[str, Tensor]) -> None:
    views["w"].fill_(block)
    views["m"].fill_(-block)


def _host(num_blocks: int) -> HostStore:
    store = HostStore([_LAYOUT] * num_blocks)
    for block in range(num_blocks):
        _fill(block, _LAYOUT.views(store.record(block)))
    return store


def _read(stream: WeightStream, plan: list[int], reads: list[int]) -> list[int]:
    with stream.open_pass(plan) as reading:
        for block in reads:
            views = reading.acquire(block)
            assert views["w"].tolist() == [block] * 16
            reading.release(block)
        return reading.read_order


def _optimal_copies(plan: list[int], num_slots: int) -> int:
    """Belady's rule: the fewest copies with a number of slots."""
    in_memory: set[int] = set()
    copies = 0
    for place, block in enumerate(plan):
        if block in in_memory:
            continue
        copies += 1
        if len(in_memory) == num_slots:
            rest = plan[place:]
            in_memory.remove(max(in_memory, key=lambda other: rest.index(other) if other in rest else len(rest)))
        in_memory.add(block)
    return copies


@pytest.mark.parametrize("prefetch", [False, True])
def test_random_plans_are_read_with_few_copies(prefetch: bool) -> None:
    rng = random.Random(0)
    for _ in range(60):
        num_blocks, num_slots = rng.randint(1, 8), rng.randint(1, 5)
        plan = [rng.randrange(num_blocks) for _ in range(rng.randint(1, 40))]
        stream = WeightStream(_host(num_blocks), "cpu", window_bytes=64 * num_slots, prefetch=prefetch)
        assert _read(stream, plan, plan) == plan
        counters = stream.counters
        assert counters.reads == len(plan) == counters.hits + counters.waits + counters.misses
        assert (counters.misses == 0) is prefetch
        fewest = _optimal_copies(plan, stream.num_slots)
        # A thread that is ahead selects among free slots, and may have to copy a block again.
        assert fewest <= counters.num_copies <= len(plan) if prefetch else counters.num_copies == fewest
        assert counters.copied_bytes == 64 * counters.num_copies


@pytest.mark.parametrize("prefetch", [False, True])
def test_reads_that_differ_from_the_plan_are_fetched(prefetch: bool) -> None:
    rng = random.Random(1)
    for _ in range(60):
        num_blocks, num_slots = rng.randint(1, 6), rng.randint(1, 4)
        plan = [rng.randrange(num_blocks) for _ in range(30)]
        reads = list(plan)
        for _ in range(rng.randint(1, 6)):
            match rng.randrange(3):
                case 0:
                    reads.insert(rng.randrange(len(reads)), rng.randrange(num_blocks))
                case 1:
                    del reads[rng.randrange(len(reads))]
                case _:
                    reads[rng.randrange(len(reads))] = rng.randrange(num_blocks)
        stream = WeightStream(_host(num_blocks), "cpu", window_bytes=64 * num_slots, prefetch=prefetch)
        assert _read(stream, plan, reads) == reads
        assert stream.counters.hits + stream.counters.waits + stream.counters.misses == len(reads)


def test_a_recorded_pass_is_a_plan() -> None:
    stream = WeightStream(_host(3), "cpu", window_bytes=128, prefetch=True)
    plan = _read(stream, [], [0, 1, 2, 2, 1, 0])
    assert stream.counters == StreamCounters(
        reads=6, hits=2, misses=4, num_copies=4, copied_bytes=256, wait_seconds=stream.counters.wait_seconds
    )  # 2 and 1 are still there on the way back
    stream.counters = StreamCounters()
    assert _read(stream, plan, plan) == plan
    assert stream.counters.misses == 0


def test_a_slot_in_use_is_not_evicted() -> None:
    stream = WeightStream(_host(4), "cpu", window_bytes=128, prefetch=True)
    with stream.open_pass([0, 1, 2, 3]) as reading:
        first, second = reading.acquire(0), reading.acquire(1)
        with pytest.raises(sft.InputError, match="2 slots"):
            reading.acquire(2)
        assert first["w"][0] == 0 and second["w"][0] == 1


def test_the_state_of_records_streams_alone() -> None:
    stream = WeightStream(_host(3), "cpu", window_bytes=64, part="state")
    with stream.open_pass([2]) as reading:
        views = reading.acquire(2)
        assert {name: view.tolist() for name, view in views.items()} == {"m": [-2, -2, -2]}


def test_blocks_are_changed_in_the_window_and_written() -> None:
    store = _host(3)
    stream = WeightStream(store, "cpu", window_bytes=128)
    store.begin()
    with stream.open_pass([1, 1]) as reading:
        reading.acquire(1)["w"].fill_(50)
        reading.write(1)
        reading.release(1, forget=True)
        assert reading.acquire(1)["w"].tolist() == [1] * 16  # the current generation
        reading.release(1)
    store.commit()
    assert [int(_LAYOUT.views(store.record(block))["w"][0]) for block in range(3)] == [0, 50, 2]
    assert [int(_LAYOUT.views(store.record(block))["m"][0]) for block in range(3)] == [0, -1, -2]
    assert stream.counters.written_bytes == 64


def test_a_pass_allocates_only_the_window(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path / "w", [_LAYOUT] * 50, _fill)
    stream = WeightStream(store, "cpu", window_bytes=300)
    assert stream.prefetch
    threads = threading.active_count()
    with sft.measure_peak() as peak:
        _read(stream, [*range(50)], [*range(50)])
    assert peak.num_bytes == stream.window_bytes == 256
    assert peak.current_bytes == 0
    assert threading.active_count() == threads


class _Failing(HostStore):
    def __init__(self) -> None:
        super().__init__([_LAYOUT] * 4)

    def record(self, block: int) -> Tensor:
        if block == 2:
            raise OSError("the disk is gone")
        return super().record(block)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_failing_read_ends_the_pass_and_the_thread(prefetch: bool) -> None:
    threads = threading.active_count()
    stream = WeightStream(_Failing(), "cpu", window_bytes=128, prefetch=prefetch)
    with pytest.raises(OSError, match="the disk is gone"), stream.open_pass([0, 1, 2, 3]) as reading:
        for block in range(4):
            reading.acquire(block)
            reading.release(block)
    assert threading.active_count() == threads


def test_an_interrupted_pass_leaves_no_thread() -> None:
    threads = threading.active_count()
    stream = WeightStream(_host(9), "cpu", window_bytes=128, prefetch=True)
    for raised in (KeyboardInterrupt, ValueError, GeneratorExit):
        with pytest.raises(raised), stream.open_pass([*range(9)]) as reading:
            for block in itertools.count():
                reading.acquire(block)
                if block == 1:
                    raise raised
    assert threading.active_count() == threads


def test_a_window_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(sft.BudgetError, match="64 B") as caught:
        WeightStream(_host(2), "cpu", window_bytes=63)
    assert caught.value.needed_bytes == 64
