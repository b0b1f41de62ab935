"""Simulation of schedules: refused schedules, memory counts, and the times of events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sft.common.errors import InputError
from sft.solvers.chain import Alternative, HostLink, Stage, StageChain
from sft.solvers.schedule import Operation, Schedule, backward_op, forward_op, free_op, loss_op, offload_op, prefetch_op, release_op
from sft.solvers.simulate import SimulationEvent, simulate

_STAGE = Stage(forward_seconds=2.0, backward_seconds=4.0, output_bytes=10, grad_bytes=10)
_CHAIN = StageChain(input_bytes=10, stages=(_STAGE, _STAGE))
_SLOW = HostLink(down_bytes_per_second=2.0, up_bytes_per_second=5.0)

_PLAIN = (forward_op(1), forward_op(2), loss_op(), *free_op("x2"), backward_op(2), *free_op("y2", "x1"), backward_op(1), *free_op("y1"))


def _schedule(*operations: Operation) -> Schedule:
    return Schedule(strategy="test", operations=operations)


def test_the_plain_schedule() -> None:
    simulation = simulate(_CHAIN, _schedule(*_PLAIN))
    assert (simulation.seconds, simulation.compute_seconds, simulation.idle_seconds) == (12.0, 12.0, 0.0)
    assert simulation.peak_bytes == 40  # x0, x1, y2 and either x2 or y1
    assert simulation.host_peak_bytes == 0
    assert [str(event.label) for event in simulation.events] == ["F1", "F2", "L", "B2", "B1"]


_BROKEN = {
    "a forward without its input": (_PLAIN[1:], "reads x1"),
    "a value made twice": ((forward_op(1), *_PLAIN), "x1 exists already"),
    "a double free": ((*_PLAIN, *free_op("y1")), "no y1 to free"),
    "a free of what was never made": ((*free_op("x1"), *_PLAIN), "no x1 to free"),
    "a backward left out": (_PLAIN[:6], "backward of stage 1 is missing"),
    "no loss": ((forward_op(1), forward_op(2), backward_op(2)), "reads y2"),
    "two losses": ((*_PLAIN[:3], *free_op("y2"), loss_op()), "the loss runs once"),
    "a backward twice": ((*_PLAIN[:5], *free_op("y1"), backward_op(2)), "y1 was made before"),
    "an input freed too early": ((*_PLAIN[:4], *free_op("x1"), *_PLAIN[4:]), "reads x1"),
    "use of what is on the host": ((forward_op(1), offload_op("x1"), release_op("x1"), forward_op(2)), "reads x1"),
    "a release without an offload": ((forward_op(1), release_op("x1")), "was not offloaded"),
    "a prefetch without an offload": ((forward_op(1), *free_op("x1"), prefetch_op("x1")), "no copy on the host"),
    "a prefetch of what is there": ((forward_op(1), offload_op("x1"), prefetch_op("x1")), "is on the device"),
    "an offload of what is not there": ((offload_op("x1"),), "not on the device"),
    "an offload twice": ((forward_op(1), offload_op("x1"), offload_op("x1")), "on the host already"),
    "a stage that is not there": ((forward_op(3),), "no stages 3..3"),
    "stages run as one without a name": ((forward_op(1, 2),), "no stages 1..2"),
    "an unknown alternative": ((forward_op(1, 2, mode="tile"),), "no alternative 'tile'"),
}


@pytest.mark.parametrize("name", _BROKEN)
def test_a_broken_schedule_is_refused(name: str) -> None:
    operations, problem = _BROKEN[name]
    with pytest.raises(InputError, match=problem.replace("(", "\\(")):
        simulate(_CHAIN, _schedule(*operations))


def test_a_backward_needs_saved_values_of_its_own_forward() -> None:
    stage = replace(_STAGE, saved_bytes=3)
    other = Alternative(first=2, last=2, mode="tile", forward_seconds=1, backward_seconds=1, saved_bytes=1)
    chain = StageChain(input_bytes=10, stages=(stage, stage), alternatives=(other,))
    head = (forward_op(1, save=True), forward_op(2, save=True), loss_op())
    with pytest.raises(InputError, match="another form"):
        simulate(chain, _schedule(*head, backward_op(2, mode="tile")))
    with pytest.raises(InputError, match="reads s2"):
        simulate(chain, _schedule(forward_op(1, save=True), forward_op(2), loss_op(), backward_op(2)))
    tiled = (forward_op(1, save=True), forward_op(2, mode="tile", save=True), loss_op(), backward_op(2, mode="tile"), backward_op(1))
    assert simulate(chain, _schedule(*tiled)).seconds == 2 + 1 + 1 + 4


def test_a_backward_that_reads_its_output() -> None:
    chain = StageChain(input_bytes=10, stages=(replace(_STAGE, reads_output=True),))
    with pytest.raises(InputError, match="reads x1"):
        simulate(chain, _schedule(forward_op(1, save=True), loss_op(), *free_op("x1"), backward_op(1)))
    assert simulate(chain, _schedule(forward_op(1, save=True), loss_op(), backward_op(1))).peak_bytes == 10 + 10 + 10


def _event(stream: str, label: str, start: float, end: float) -> SimulationEvent:
    return SimulationEvent(stream=stream, label=label, start_seconds=start, end_seconds=end)  # type: ignore[arg-type]


def test_copies_overlap_with_computation_and_are_waited_for() -> None:
    """x0 leaves during the forwards; the release waits one second for it, the last backward one second for its return."""
    operations = (
        offload_op("x0"),
        forward_op(1),
        forward_op(2),
        release_op("x0"),
        loss_op(),
        *free_op("x2"),
        prefetch_op("x0"),
        *_PLAIN[4:],
    )
    simulation = simulate(_CHAIN, _schedule(*operations), link=_SLOW)
    assert simulation.events == (
        _event("down", ">x0", 0.0, 5.0),
        _event("compute", "F1", 0.0, 2.0),
        _event("compute", "F2", 2.0, 4.0),
        _event("compute", "L", 5.0, 5.0),
        _event("up", "<x0", 5.0, 7.0),
        _event("compute", "B2", 5.0, 9.0),
        _event("compute", "B1", 9.0, 13.0),
    )
    assert (simulation.seconds, simulation.idle_seconds, simulation.host_peak_bytes) == (13.0, 1.0, 10)
    assert sum(event.end_seconds - event.start_seconds for event in simulation.events if event.stream == "down") == 5.0
    late = (*operations[:6], backward_op(2), prefetch_op("x0"), *_PLAIN[5:])
    assert simulate(_CHAIN, _schedule(*late), link=_SLOW).seconds == 9.0 + 2.0 + 4.0


def test_bytes_do_not_depend_on_the_link() -> None:
    operations = (
        offload_op("x0"),
        forward_op(1),
        forward_op(2),
        release_op("x0"),
        loss_op(),
        *free_op("x2"),
        backward_op(2),
        *free_op("y2"),
        prefetch_op("x0"),
    )
    schedule = _schedule(*operations, *free_op("x1"), backward_op(1))
    peaks = {
        (simulation.peak_bytes, simulation.host_peak_bytes)
        for simulation in (simulate(_CHAIN, schedule, link=HostLink(down_bytes_per_second=rate)) for rate in (0.1, 3.0, 1e12))
    }
    assert peaks == {(30, 10)}
    assert max(num_bytes for _, num_bytes in simulate(_CHAIN, schedule).memory) == 30


def test_half_duplex_copies_take_turns() -> None:
    chain = StageChain(input_bytes=10, stages=(_STAGE,) * 3)
    operations = (
        *(offload_op("x0"), forward_op(1), release_op("x0"), offload_op("x1"), prefetch_op("x0"), forward_op(2), forward_op(3), loss_op()),
        *(backward_op(3), backward_op(2), backward_op(1)),
    )
    full, half = (
        simulate(chain, _schedule(*operations), link=HostLink(down_bytes_per_second=2, up_bytes_per_second=2, full_duplex=duplex))
        for duplex in (True, False)
    )
    assert [(event.start_seconds, event.end_seconds) for event in full.events if event.stream != "compute"] == [(0, 5), (5, 10), (5, 10)]
    assert [(event.start_seconds, event.end_seconds) for event in half.events if event.stream != "compute"] == [(0, 5), (5, 10), (10, 15)]


def test_a_free_waits_for_the_copy_that_reads_the_bytes() -> None:
    chain = StageChain(input_bytes=10, stages=(_STAGE,))
    operations = (forward_op(1), offload_op("x1"), loss_op(), *free_op("x1"), backward_op(1))
    assert simulate(chain, _schedule(*operations), link=_SLOW).seconds == 2 + 5 + 4


def test_weights_are_resident_or_streamed() -> None:
    stage = replace(_STAGE, weight_bytes=20)
    chain = StageChain(input_bytes=10, stages=(stage, stage))
    resident = simulate(chain, _schedule(*_PLAIN))
    assert resident.peak_bytes == 2 * 40 + 40 and resident.seconds == 12
    fast = HostLink(down_bytes_per_second=20, up_bytes_per_second=20)
    streamed = simulate(chain, replace(_schedule(*_PLAIN), streamed_weights=(1, 2)), link=fast)
    assert streamed.peak_bytes == 40 + 40 and streamed.host_peak_bytes == 80  # a backward's window has a weight and its gradient
    assert streamed.seconds == 12
    slow = HostLink(down_bytes_per_second=4, up_bytes_per_second=4)
    assert simulate(chain, replace(_schedule(*_PLAIN), streamed_weights=(1,)), link=slow).seconds == 5 + 2 + 4 + 5
    half = HostLink(down_bytes_per_second=4, up_bytes_per_second=4, full_duplex=False)
    assert simulate(chain, replace(_schedule(*_PLAIN), streamed_weights=(1,)), link=half).seconds == 5 + 2 + 4 + 10


def test_a_streamed_cut_is_never_on_the_device() -> None:
    tiles = tuple(
        Alternative(
            first=i,
            last=i,
            mode="tile",
            forward_seconds=3,
            backward_seconds=6,
            forward_workspace_bytes=2,
            backward_workspace_bytes=4,
            streamable=streamable,
        )
        for i, streamable in ((1, True), (2, True))
    )
    chain = StageChain(
        input_bytes=1,
        stages=(replace(_STAGE, output_bytes=100, grad_bytes=100), replace(_STAGE, output_bytes=1, grad_bytes=1)),
        alternatives=tiles,
    )
    operations = (
        *(forward_op(1, mode="tile"), forward_op(2, mode="tile"), loss_op(), *free_op("x2"), backward_op(2, mode="tile")),
        *(*free_op("y2", "x1"), backward_op(1, mode="tile"), *free_op("y1")),
    )
    schedule = replace(_schedule(*operations), streamed_cuts=(1,))
    link = HostLink(down_bytes_per_second=50, up_bytes_per_second=10)
    simulation = simulate(chain, schedule, link=link)
    assert simulation.peak_bytes == 1 + 1 + 4 and simulation.host_peak_bytes == 200
    assert [event.end_seconds - event.start_seconds for event in simulation.events if event.stream == "compute"] == [3, 10, 0, 10, 10]
    with pytest.raises(InputError, match="complete"):
        simulate(replace(chain, alternatives=(tiles[0], replace(tiles[1], streamable=False))), schedule)
    with pytest.raises(InputError, match="longer chain"):
        simulate(chain, replace(schedule, streamed_cuts=(7,)))


def test_the_text_of_a_schedule_has_a_sign_for_each_operation() -> None:
    schedule = Schedule(
        strategy="test",
        operations=(
            forward_op(1, 2, mode="tile(4)", save=True),
            offload_op("x2"),
            release_op("x2"),
            prefetch_op("x2"),
            loss_op(),
            backward_op(1, 2, mode="tile(4)"),
        ),
        streamed_cuts=(1,),
        streamed_weights=(2,),
    )
    assert str(schedule) == "F1-2[tile(4)]+ >x2 ~x2 <x2 L B1-2[tile(4)]"
    with pytest.raises(InputError, match="jump"):
        Operation(kind="jump")  # type: ignore[arg-type]  # an unknown kind


def test_impossible_chains_and_links_are_refused() -> None:
    for change in ({"output_bytes": -1}, {"output_bytes": 1.5}, {"forward_seconds": float("nan")}, {"backward_seconds": -1}):
        with pytest.raises(InputError, match=next(iter(change))):
            replace(_STAGE, **change)
    with pytest.raises(InputError, match="at least one stage"):
        StageChain(input_bytes=1, stages=())
    tile = Alternative(first=2, last=3, mode="tile", forward_seconds=1, backward_seconds=1)
    with pytest.raises(InputError, match=r"2\.\.3 of 2"):
        replace(_CHAIN, alternatives=(tile,))
    with pytest.raises(InputError, match="give them different names"):
        replace(_CHAIN, alternatives=(replace(tile, last=2),) * 2)
    with pytest.raises(InputError, match="up_bytes_per_second"):
        HostLink(up_bytes_per_second=0)
