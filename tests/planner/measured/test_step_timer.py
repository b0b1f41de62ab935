"""Step timer: timed programs, their number of runs, and an unchanged caller state. Times are simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.lower.program import Port, Program, Slot
from sft.planner.cost.device_rates import LARGE_BUFFER_BYTES
from sft.planner.measured.step_timer import TimingMachine, time_step
from sft.planner.problem import PlanningProblem
from sft.planner.projection import run_step
from sft.runtime.region import Region
from sft.runtime.simulated_machine import SimulatedBuffer, SimulatedMachine
from sft.torch_runtime.profiling import ProgramBenchmark, program_hash

_SHAPE = (2, 3, 40, 24)


def _model() -> nn.Module:
    """Two phases of strips and a tail that saves for its backward pass."""
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(4, 2))


def _planned(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[PlanningProblem, Region]:
    """Problem and region of a timed plan."""
    seen: list[tuple[PlanningProblem, Region]] = []

    def note(problem: PlanningProblem, region: Region, device: torch.device, *, progress: bool) -> tuple[float, ...]:
        assert not progress
        seen.append((problem, region))
        return (1.0,) * len(region.schedule)

    monkeypatch.setattr("sft.api.plan_search.time_step", note)
    plan = sft.plan(_model(), _SHAPE, budget="64MiB", options=sft.Options(profile="measure", **options))
    assert plan.projected_seconds == len(seen[-1][1].schedule) == len(plan.timeline.entries)
    assert plan.timeline.is_measured and all(entry.measured_seconds == 1 for entry in plan.timeline.entries)
    return seen[-1]


class _Counting(SimulatedMachine):
    """Timer that records the programs that run."""

    programs: list[Program]

    def run(self, program: Program, *arguments: Any) -> Any:
        self.programs.append(program)
        return SimulatedMachine.run(self, program, *arguments)


@pytest.mark.parametrize("options", [{"tile": (8, None)}, {"tile": (8, 16)}, {"tile": (8, None), "state_slots": 2}, {"strategy": "none"}])
def test_a_step_is_the_sum_of_its_program_runs(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    problem, region = _planned(monkeypatch, **options)
    counting = _Counting()
    counting.programs = []
    run_step(problem, region, counting)
    time_once = TimingMachine._time_program
    monkeypatch.setattr(TimingMachine, "_time_program", lambda *arguments: time_once(*arguments) > 0)
    monkeypatch.setattr(TimingMachine, "_cached_seconds", lambda *_: 0.0)
    stopwatch = TimingMachine()
    run_step(problem, region, stopwatch)
    assert stopwatch.seconds == len(counting.programs)
    assert stopwatch.num_timed == len({program_hash(program) for program in counting.programs})
    assert len(stopwatch.start_seconds) == len(region.schedule) + 1 and stopwatch.start_seconds[-1] == stopwatch.seconds
    assert stopwatch.memory.peak_bytes == counting.memory.peak_bytes


def test_programs_are_timed_on_operands_in_the_layout_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have the model's layout, images the program's. Regression: convolutions with channels-last weights were timed as too fast."""
    problem, region = _planned(monkeypatch, tile=(8, None))
    made_once, seen = ProgramBenchmark._input_for, dict[str, set[bool]]()

    def note(trial: ProgramBenchmark, program: Program, port: Port, slot: Slot) -> Any:
        made = made_once(trial, program, port, slot)
        if isinstance(made, torch.Tensor) and made.dim() == 4 and made.shape[1] > 1 and max(made.shape[2:]) > 1:
            seen.setdefault(port.role, set()).add(made.is_contiguous(memory_format=torch.channels_last))
        return made

    monkeypatch.setattr(ProgramBenchmark, "_input_for", note)
    run_step(problem, region, TimingMachine())
    assert seen["side"] == seen["grad_side"] == {False}
    assert seen["source"] == seen["out"] == {True}


def test_seconds_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, region = _planned(monkeypatch, tile=(8, None))
    ticks = iter(range(10**9))
    monkeypatch.setattr("sft.planner.measured.step_timer.time.perf_counter", lambda: float(next(ticks)))
    seconds = sum(time_step(problem, region, torch.device("cpu")))
    counting = _Counting()
    counting.programs = []
    run_step(problem, region, counting)
    # Each run of a program takes one tick of this clock, and so do the sweep of each move and zeros; new pages take no longer than old
    # ones.
    num_zeros = seconds - len(counting.programs) - len(region.schedule)
    assert 0 <= num_zeros < 200 and num_zeros == int(num_zeros)


def test_fresh_pages_count_once_and_large_buffers_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    price = {"zeros of new pages": 3.0 * 2**26, "zeros of old pages": 2.0 * 2**26}  # a second a byte
    monkeypatch.setattr(TimingMachine, "_cached_seconds", lambda _, key, __: price.get(key, 0.25))
    large, stopwatch = LARGE_BUFFER_BYTES, TimingMachine()
    paid = []

    def pay(num_bytes: int, *, zero: bool = False) -> SimulatedBuffer:
        before = stopwatch.seconds
        handle = stopwatch.allocate((num_bytes,), torch.uint8, zero=zero)
        paid.append(stopwatch.seconds - before)
        return handle

    first = pay(1024)
    second = pay(512, zero=True)
    del second
    third = pay(1024)  # of which 512 are the second's
    del first, third
    pay(1536)
    pay(large)
    pay(large)
    assert paid == [1024, 512.25, 512, 0, large, large]


def test_timing_leaves_the_callers_state_unchanged() -> None:
    model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    net: Any = sft.compile(model, _SHAPE, budget="64MiB", options=sft.Options(tile=(8, None), profile="measure"))
    assert net.plan.projected_seconds > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sft.Plan.from_json(net.plan.to_json()) == net.plan
    assert "projected time" in net.plan.explain()


def test_time_is_measured_with_profile_measure() -> None:
    assert sft.plan(_model(), _SHAPE).projected_seconds is None
    assert sft.plan(_model().to("meta"), _SHAPE, options=sft.Options(profile="measure")).projected_seconds is None
    with pytest.raises(sft.InputError, match="profile 'always'"):
        sft.Options(profile="always")


def test_an_input_in_whole_numbers_is_timed() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 5, 3, padding=1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layer(x), labels)

    labels = torch.empty(2, 40, 24, dtype=torch.long, device="meta")
    plan = sft.plan(Loss(), [_SHAPE, labels], options=sft.Options(tile=(8, None), profile="measure"))
    assert plan.projected_seconds is not None and plan.projected_seconds > 0
