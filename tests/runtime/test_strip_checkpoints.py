"""Checkpoint policies of a sweep, executed action by action; Revolve against the best of all schedules."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sft
from sft.runtime.strip_checkpoints import Checkpoints
from tests.helpers.exactness import assert_exact
from tests.helpers.models import Residual, image, seeded


def _most_retained(policy: Checkpoints, num_strips: int) -> int:
    """Execute the backward sweep, in which every strip needs its state; return the maximum number of retained states."""
    stored = set(policy.kept(num_strips))
    most, reversed_strips = len(stored), []
    for action in policy.actions(num_strips):
        assert action.strip in stored
        if action.kind == "joint":
            stored.remove(action.strip)
            reversed_strips.append(action.strip)
            continue
        stored.add(action.strip + 1)
        if action.drops:
            stored.remove(action.strip)
        most = max(most, len(stored))
    assert reversed_strips == list(range(num_strips - 1, -1, -1)) and not stored
    assert policy.num_restored(num_strips) == sum(action.kind == "forward" for action in policy.actions(num_strips))
    return most


@given(num_strips=st.integers(1, 300), every=st.integers(1, 40))
def test_every_kth_state(num_strips: int, every: int) -> None:
    most = _most_retained(Checkpoints(every), num_strips)
    assert most <= -(-num_strips // every) + every - 1


@given(num_strips=st.integers(1, 300), slots=st.integers(1, 12))
def test_slots_are_not_exceeded(num_strips: int, slots: int) -> None:
    assert _most_retained(Checkpoints(slots=slots), num_strips) <= slots + 1
    assert len(Checkpoints(slots=slots).kept(num_strips)) <= slots


@cache
def _fewest(num_strips: int, free: int, is_placed: bool) -> int:
    """Number of strips that the best schedule restores, over all positions of the next state."""
    if num_strips == 1:
        return 0
    if not free:
        return num_strips * (num_strips - 1) // 2
    return min(
        (0 if is_placed else step) + _fewest(num_strips - step, free - 1, is_placed) + _fewest(step, free, False)
        for step in range(1, num_strips)
    )


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6])
def test_no_schedule_with_as_many_slots_restores_less(slots: int) -> None:
    for num_strips in range(1, 50):
        assert Checkpoints(slots=slots).num_restored(num_strips) == _fewest(num_strips, slots - 1, True)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("cols", [None, 10])
def test_few_slots_are_exact(slots: int, cols: int | None) -> None:
    options = sft.Options(tile=(2, cols), state_slots=slots)
    report = assert_exact(seeded(Residual), image(2, 3, 37, 18), options=options)
    (segment,) = (segment for segment in report.plan.segments if segment.mode == "tiled")
    assert segment.state_slots == slots
    assert sft.Plan.from_json(report.plan.to_json()) == report.plan
    assert f"{slots} at most" in report.plan.explain()


def test_fewer_slots_need_less_and_compute_more() -> None:
    plans = [sft.plan(seeded(Residual), (1, 3, 512, 64), options=sft.Options(tile=(2, None), state_slots=slots)) for slots in (2, 4, 8)]
    peaks, flops = [plan.projected_peak_bytes for plan in plans], [plan.flops for plan in plans]
    assert peaks == sorted(peaks) and flops == sorted(flops, reverse=True) and len(set(flops)) == 3


def test_two_policies_at_once() -> None:
    with pytest.raises(sft.InputError, match="drop one"):
        sft.Options(state_every=2, state_slots=2)


@given(num_strips=st.integers(1, 400), slots=st.integers(1, 12))
def test_restored_strips_are_counted_without_walking(num_strips: int, slots: int) -> None:
    policy = Checkpoints(slots=slots)
    assert policy.num_restored(num_strips) == sum(action.kind == "forward" for action in policy.actions(num_strips))


def test_sweeps_of_any_length_are_counted() -> None:
    """Regression: the recursion was as deep as the number of repetitions, so images of 175,000 rows could not be planned."""
    assert Checkpoints(slots=2).num_restored(10**6) > 10**8
    signal = nn.Sequential(nn.Conv1d(1, 4, 7), nn.ReLU(), nn.Conv1d(4, 4, 3, stride=2))
    plan = sft.plan(signal, (1, 1, 1_000_000), budget="30MiB")
    assert plan.segments[0].mode == "tiled"
