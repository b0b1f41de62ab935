"""Messages between bands while strips run: times of posts and waits, and freedom from deadlock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from torch import nn

import sft
from sft.analysis.passes.pipeline import run_passes
from sft.analysis.tiling.bands import BandPartition, even_band_bounds
from sft.distributed import all_reduce as sums
from sft.distributed.balancing import balanced_bounds
from sft.distributed.band_region import BandRegionBuilder
from sft.distributed.band_search import band_choices
from sft.distributed.band_segments import BandSegment
from sft.distributed.communicator import CommQueue
from sft.distributed.mesh import MeshShape
from tests.distributed.test_band_region import Deep, NormedVgg, Vgg
from tests.helpers.message_log import Event, logged_step, num_stuck
from tests.helpers.models import ConvNet, Residual, TinyUNet, seeded
from tests.helpers.problems import problem_of


def _chain(num_convs: int = 3, norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for index in range(num_convs):
        layers += [nn.Conv2d(4 if index else 3, 4, 3, padding=1), nn.BatchNorm2d(4) if norm else nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


def _bands(
    make: Callable[[], nn.Module],
    shape: tuple[int, int, int, int],
    bounds: Sequence[int],
    *,
    strip_rows: int = 2,
    num_panels: int = 1,
    batch_tile: int | None = None,
    cuts: Sequence[int] = (),
    num_replicas: int = 1,
) -> BandRegionBuilder:
    problem = problem_of(seeded(make).float().train(), shape, training=True, passes=run_passes)
    by_phase = {0: tuple(cuts)} if cuts else None
    choices = band_choices(problem, lambda names: strip_rows, num_panels=num_panels, batch_tile=batch_tile, cuts=by_phase)
    return BandRegionBuilder(problem, choices, BandPartition(tuple(bounds)), num_replicas=num_replicas)


def test_the_queue_runs_entries_in_order_and_shows_its_clock() -> None:
    comm_queue, done = CommQueue(), list[tuple[str, int]]()

    def note(name: str) -> None:
        done.append((name, comm_queue.clock))

    comm_queue.put(2, partial(note, "late"))
    comm_queue.put(0, partial(note, "first"))
    comm_queue.put(2, partial(note, "later"))
    comm_queue.put(5, partial(note, "last"))
    for strip in range(4):
        comm_queue.reach(strip)
    assert done == [("first", 0), ("late", 2), ("later", 2)]
    assert len(comm_queue.entries) == 4, "completed entries are kept until the segment ends"
    comm_queue.finish(5)
    comm_queue.put(1, partial(note, "next"))
    comm_queue.finish(1)
    assert done[3:] == [("last", 5), ("next", 6)]
    assert comm_queue.clock == 6 and not comm_queue.entries


_MESHES: dict[str, Callable[[], tuple[BandRegionBuilder, MeshShape]]] = {
    "chain": lambda: (_bands(_chain, (1, 3, 24, 8), (0, 9, 15, 24), cuts=(2, 4)), MeshShape(num_bands=3)),
    "staged": lambda: (_bands(partial(_chain, 3, True), (2, 3, 24, 8), (0, 6, 11, 24), batch_tile=1), MeshShape(num_bands=3)),
    "panels": lambda: (_bands(NormedVgg, (1, 3, 24, 16), (0, 11, 24), num_panels=2, strip_rows=4), MeshShape(num_bands=2)),
    "skips": lambda: (_bands(TinyUNet, (1, 3, 32, 16), (0, 8, 16, 32), strip_rows=4, cuts=(2, 5)), MeshShape(num_bands=3)),
    "thin": lambda: (_bands(partial(_chain, 4), (1, 3, 8, 8), (0, 1, 2, 3, 8), cuts=(4,)), MeshShape(num_bands=4)),
    "empty": lambda: (_bands(Deep, (1, 3, 9, 8), even_band_bounds(9, 4)), MeshShape(num_bands=4)),
    "replicas": lambda: (
        _bands(partial(_chain, 3, True), (1, 3, 16, 8), (0, 7, 16), num_replicas=2),
        MeshShape(num_bands=2, num_replicas=2),
    ),
}


@pytest.mark.parametrize("name", _MESHES)
def test_no_rank_deadlocks_and_all_messages_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "WINDOW_BYTES", 256)  # so that gradients of small models need many windows
    bands, shape = _MESHES[name]()
    ranks = [(replica, band) for replica in range(shape.num_replicas) for band in range(shape.num_bands)]
    walked = [logged_step(bands, shape, *rank) for rank in ranks]
    for in_order in (False, True):
        assert num_stuck([step.events for step in walked], in_order=in_order) == 0
    for rank, step in zip(ranks, walked, strict=True):
        added = logged_step(bands, shape, *rank, exactly=False)
        assert step.traffic == added.traffic
        assert (step.projection.peak_bytes, step.projection.flops) == (added.projection.peak_bytes, added.projection.flops)
    for topic in ("rows", "globals", "parameters"):
        sent, received = (sum(getattr(step.traffic, way)[topic] for step in walked) for way in ("sent_bytes", "received_bytes"))
        assert sent == received
    assert sum(sum(step.traffic.overlapped_sent_bytes.values()) for step in walked) > 0


def test_a_wrong_order_deadlocks() -> None:
    # Each rank waits for a message that the other posts after its own wait; and, on a stream, messages of two topics in crossed order.
    def post(ticket: int, *messages: tuple[int, bool]) -> Event:
        return Event(("", 0), ticket, "rows", messages)

    def wait(ticket: int) -> Event:
        return Event(("", 0), ticket, "rows")

    crossed = [[post(0, (1, True)), wait(0), post(2, (1, False)), wait(2)], [post(0, (0, True)), wait(0), post(2, (0, False)), wait(2)]]
    assert num_stuck(crossed, in_order=False) > 0
    apart = [[post(0, (1, True)), post(1, (1, False)), wait(0), wait(1)], [post(0, (0, True)), post(1, (0, False)), wait(0), wait(1)]]
    assert num_stuck(apart, in_order=False) == 0
    assert num_stuck(apart, in_order=True) > 0
    together = [[post(0, (1, True), (1, False)), wait(0)], [post(0, (0, True), (0, False)), wait(0)]]
    assert num_stuck(together, in_order=True) == 0


def test_times_of_posts_and_waits() -> None:
    """Two segments, 12 rows, bands of 6 rows in strips of two."""
    bands = _bands(partial(_chain, 2), (1, 3, 12, 4), (0, 6, 12), cuts=(2,))
    assert [choice.nodes[-1] for choice in bands.choices[:2]] == ["relu", "adaptive_avg_pool2d"]
    # Forward: the first two strips compute the row that is sent up, and the last strip there reads it; the row sent down is needed at once.
    # Backward in reverse. The last convolution's gradients are summed during the first one's strips; the first one's remain for the end.
    assert [_schedule_lines(logged_step(bands, MeshShape(num_bands=2), 0, band).events) for band in range(2)] == [
        [
            "F0+ 0: receive rows (0)",
            "F0+ 4: send rows (1)",
            "F1+ 7: wait for rows (0)",
            "F1+ 7: send and receive globals (2)",
            "F1+ 7: wait for globals (2)",
            "F1+ 8: wait for rows (1)",
            "B1 9: send rows (3)",
            "B1 12: receive rows (4)",
            "B0 12: wait for rows (4)",
            "B0 12: send and receive parameters (5)",
            "B0 14: wait for parameters (5)",
            "B0 14: send and receive parameters (6)",
            "B0 16: wait for rows (3)",
            "B0 16: wait for parameters (6)",
            "B0 16: send and receive parameters (7)",
            "B0 16: wait for parameters (7)",
            "B0 16: send and receive parameters (8)",
            "B0 16: wait for parameters (8)",
        ],
        [
            "F0+ 2: send rows (0)",
            "F0+ 4: receive rows (1)",
            "F1+ 4: wait for rows (1)",
            "F1+ 7: send and receive globals (2)",
            "F1+ 7: wait for globals (2)",
            "F1+ 8: wait for rows (0)",
            "B1 8: receive rows (3)",
            "B1 12: send rows (4)",
            "B0 12: send and receive parameters (5)",
            "B0 14: wait for rows (3)",
            "B0 14: wait for parameters (5)",
            "B0 14: send and receive parameters (6)",
            "B0 16: wait for rows (4)",
            "B0 16: wait for parameters (6)",
            "B0 16: send and receive parameters (7)",
            "B0 16: wait for parameters (7)",
            "B0 16: send and receive parameters (8)",
            "B0 16: wait for parameters (8)",
        ],
    ]


def _schedule_lines(events: Sequence[Event]) -> list[str]:
    """Schedule ops, strips that ran before, and messages posted or waited for."""
    lines, numbers = [], dict[int, int]()
    for event in events:
        number = numbers.setdefault(event.ticket, len(numbers))
        what = " and ".join("send" if is_sent else "receive" for _, is_sent in event.messages) or "wait for"
        lines.append(f"{event.what[0]} {event.what[1]}: {what} {event.topic} ({number})")
    return lines


@pytest.mark.parametrize("name", ["chain", "staged", "panels", "thin"])
def test_timetables_are_those_of_the_strips(name: str) -> None:
    bands, shape = _MESHES[name]()
    num_asked = 0
    for band in range(shape.num_bands):
        for segment, makes in zip(bands.region(band).segments, bands.region(band).writes, strict=True):
            if not isinstance(segment, BandSegment) or not segment.schedule.num_steps:
                continue
            timeline, count, num_sweeps = segment.timeline, segment.schedule.num_steps, len(segment.sweeps)
            assert timeline.num_strips == count * num_sweeps
            steps = [segment.step(index) for index in range(count)]
            for value in makes:
                if value not in bands.ownership.values:
                    continue
                own = bands.ownership.values[value].owned_rows[band]
                for row in range(own.start, own.stop):
                    maker = next(index for index, step in enumerate(steps) if row in range(step[value].owned.start, step[value].owned.stop))
                    assert timeline.strips_until_computed(value, row + 1) == (num_sweeps - 1) * count + maker + 1
                    assert timeline.strips_before_grad_read(value, row + 1) == count - 1 - maker
                    num_asked += 1
            for source in segment.schedule.sources:
                reads = [segment.scope.rows_read(step).get(source) for step in steps]
                for row in range(max(each.stop for each in reads if each)):
                    reader = next(index for index, each in enumerate(reads) if each and each.stop > row)
                    assert timeline.strips_before_read(source, row) == reader
                    assert timeline.strips_until_grad_complete(source, row) == num_sweeps * count - reader
                    num_asked += 1
    assert num_asked > 20


@pytest.mark.parametrize(
    ("make", "shape", "num_bands"),
    [(Vgg, (1, 3, 240, 32), 3), (Residual, (1, 3, 256, 32), 8), (ConvNet, (1, 3, 96, 16), 4), (Deep, (1, 3, 128, 16), 5)],
)
def test_bands_are_balanced_by_computation(
    make: Callable[[], nn.Module], shape: tuple[int, ...], num_bands: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = sft.Options(tile=(8, None))
    plan = sft.plan(seeded(make), shape, mesh=(1, num_bands), options=options)
    monkeypatch.setattr("sft.distributed.planning.balance_bands", lambda bounds, *rest: bounds)
    even = sft.plan(seeded(make), shape, mesh=(1, num_bands), options=options)
    assert plan.mesh is not None and even.mesh is not None
    assert max(rank.flops for rank in plan.mesh.ranks) <= max(rank.flops for rank in even.mesh.ranks)
    assert plan.mesh.balance >= even.mesh.balance
    assert [rank.rows[0] for rank in plan.mesh.ranks[1:]] == [rank.rows[1] for rank in plan.mesh.ranks[:-1]]


def test_level_bounds() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        num_bands, multiple = int(generator.integers(1, 7)), int(generator.integers(1, 4))
        bounds = even_band_bounds(int(generator.integers(num_bands * multiple * 2, 100)), num_bands, multiple)
        own, price = generator.integers(0, 40, num_bands), 3
        costs = [int(each) + price * (stop - start) for each, start, stop in zip(own, bounds, bounds[1:], strict=False)]
        levelled = balanced_bounds(bounds, costs, price, multiple)
        assert (levelled[0], levelled[-1], len(levelled)) == (0, bounds[-1], len(bounds))
        assert all((stop - start) % multiple == 0 and stop > start for start, stop in pairwise(levelled[:-1]))
        after = [int(each) + price * (stop - start) for each, start, stop in zip(own, levelled, levelled[1:], strict=False)]
        assert max(after) <= max(costs)
        # No move of a unit of rows to another band makes the largest band smaller.
        most = max(after)
        for giver in range(num_bands):
            for taker in range(num_bands):
                moved = list(after)
                moved[giver], moved[taker] = moved[giver] - price * multiple, moved[taker] + price * multiple
                if giver != taker and levelled[giver + 1] - levelled[giver] > multiple:
                    assert max(moved) >= most
