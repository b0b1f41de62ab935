"""Streamed cuts: eager PyTorch's values in budgets far below the sum of the cuts before norms, and freed host memory."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.planner.materialize import materialize
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, project_step
from sft.planner.streamed_cuts import host_traffic, stream_seconds, streamable_values, with_streamed
from sft.runtime.region import Region
from sft.torch_runtime.machine import TorchMachine
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact, assert_within_budget, gradient_errors, relative_error
from tests.helpers.host_cuts import Normed
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.tilings import tiled_options

pytestmark = pytest.mark.usefixtures("without_proposals")

captures = one_capture_a_model("options", "folder")

_SHAPE = (2, 3, 26, 18)


class Dropped(Normed):
    """Network with a dropout mask and its seed from the caller's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout2d(x, 0.3))


def _is_as(model: nn.Module, before: Mapping[str, Tensor], *, grads: bool = False) -> None:
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    assert grads or all(parameter.grad is None for parameter in model.parameters())


def _choices(plan: sft.Plan) -> list[Any]:
    return [segment.choice for segment in plan.segments]


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[PlanningProblem]:
    """Problems of the planner, in order."""
    planned: list[PlanningProblem] = []
    engine = import_module("sft.api.plan_search")
    plan_segments = engine.plan_segments

    def noting(problem: PlanningProblem, *arguments: Any) -> Any:
        planned.append(problem)
        return plan_segments(problem, *arguments)

    monkeypatch.setattr(engine, "plan_segments", noting)
    return planned


def _compare(net: Any, eager: Any, x: Tensor, *, seed: int = 0) -> None:
    """Two training steps of the compiled and the eager model."""
    for step in range(2):
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        y, expected = net(ours), eager(theirs)
        direction = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(seed + step))
        y.backward(direction)
        expected.backward(direction)
        assert relative_error(y.detach(), expected.detach()) <= 1e-10
        assert ours.grad is not None and theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) <= 1e-9
    errors = gradient_errors({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in eager.named_parameters()})
    assert max(errors.values()) <= 1e-10, errors
    for (key, buffer), other in zip(net.named_buffers(), eager.named_buffers(), strict=True):
        assert relative_error(buffer, other[1]) <= 1e-10, key


def _streamed_plan(model: nn.Module, shape: tuple[int, ...], options: sft.Options, problems: list[PlanningProblem], mask: int) -> sft.Plan:
    """Plan for these tiles with some of the streamable cuts streamed."""
    plan = sft.plan(model, shape, budget="4GiB", options=options)
    choices = _choices(plan)
    names = [name for i, name in enumerate(streamable_values(problems[-1], choices)) if mask >> i & 1]
    chosen = with_streamed(choices, names)
    segments = tuple(replace(segment, streamed=choice.streamed) for segment, choice in zip(plan.segments, chosen, strict=True))
    return sft.Plan.from_json(replace(plan, segments=segments).to_json())


@pytest.mark.usefixtures("captures")
def test_any_of_them_may_be_streamed(problems: list[PlanningProblem]) -> None:
    @settings(max_examples=max(5, settings.default.max_examples // 3) if settings.default else 5)
    @given(options=tiled_options(_SHAPE[2:]), mask=st.integers(1, 63))
    def check(options: sft.Options, mask: int) -> None:
        model = seeded(Normed)
        made = _streamed_plan(model, _SHAPE, options, problems, mask)
        net: Any = sft.compile(copy.deepcopy(model), _SHAPE, budget="4GiB", plan=made)
        streamed = [name for segment in net.plan.segments for name in segment.streamed]
        assert streamed == [name for segment in made.segments for name in segment.streamed]
        assert bool(streamed) == (net.plan.host_bytes > 0)
        assert all((segment.placement == "device") == (not segment.streamed) for segment in net.plan.segments)
        _compare(net, copy.deepcopy(model), image(*_SHAPE))
        assert_within_budget(net, image(*_SHAPE), budget="4GiB", to_the_byte=True)

    check()


@pytest.mark.parametrize("options", [sft.Options(tile=(4, None)), sft.Options(tile=(5, 7), batch_tile=1)], ids=str)
def test_the_profile_of_a_walk_is_the_walk(options: sft.Options, problems: list[PlanningProblem], monkeypatch: pytest.MonkeyPatch) -> None:
    def both(problem: PlanningProblem, region: Region) -> Projection:
        summed, walked = project_step(problem, region), project_step(problem, region, exactly=True)
        assert summed.op_records == walked.op_records
        assert summed.host_bytes == walked.host_bytes
        return summed

    monkeypatch.setattr(import_module("sft.planner.materialize"), "project_step", both)
    model = seeded(Normed)
    made = _streamed_plan(model, _SHAPE, options, problems, -1)
    assert sft.of(sft.compile(model, _SHAPE, budget="4GiB", plan=made)).plan.host_bytes > 0


_HOST = sft.Options(host_budget="64GiB")


def test_a_budget_far_below_the_sum_of_the_cuts_works(problems: list[PlanningProblem]) -> None:
    model, shape = seeded(Normed), (1, 3, 96, 48)
    at_home, least = least_budget(model, shape), least_budget(model, shape, _HOST)
    plan = sft.plan(model, shape, budget=at_home, options=_HOST)
    cuts = sum(
        map(
            problems[-1].sized.value_bytes,
            streamable_values(problems[-1], _choices(sft.plan(model, shape, options=sft.Options(tile=(8, None))))),
        )
    )
    assert least < cuts / 2 < at_home
    budget = (3 * least + at_home) // 4
    report = assert_exact(model, image(*shape), budget=budget, options=_HOST, input_grad=False, steps=1)
    assert report.plan.host_bytes > 0 and report.plan.total_bytes <= budget
    assert report.plan.redundancy < 1.4
    assert "on the device and host" in report.plan.explain()
    # Cuts that fit stay on the device.
    assert 0 <= plan.host_bytes < report.plan.host_bytes
    assert sft.plan(model, shape, budget="4GiB", options=_HOST).host_bytes == 0
    hosted = [sft.plan(model, shape, budget=least + (at_home - least) * i // 2, options=_HOST).host_bytes for i in range(3)]
    assert hosted == sorted(hosted, reverse=True)
    for options in (sft.Options(), sft.Options(host_budget=0)):  # the CPU's memory is the host's
        with pytest.raises(sft.BudgetError, match=rf"{at_home} bytes.*host_budget="):
            sft.plan(model, shape, budget=budget, options=options)
    with pytest.raises(sft.BudgetError):
        sft.plan(model, shape, budget=budget, options=sft.Options(host_budget=report.plan.host_bytes // 8))


def test_the_link_rate_decides_between_streaming_and_keeping(problems: list[PlanningProblem]) -> None:
    """Of two plans that fit, the faster one at the link's rate is chosen."""
    model, shape = seeded(Normed), (1, 3, 96, 48)
    least = least_budget(model, shape, _HOST)
    fast, slow = (sft.plan(model, shape, budget=2 * least, options=replace(_HOST, link_bandwidth=rate)) for rate in ("1TB", "1MB"))
    assert fast.host_bytes > 0
    assert slow.estimated_seconds > fast.estimated_seconds
    choices, problem = _choices(slow), problems[-1]
    passing = host_traffic(problem, with_streamed(choices, streamable_values(problem, choices)))
    slowest = sum(max(call.down_bytes, call.up_bytes) + max(call.backward_down_bytes, call.backward_up_bytes) for call in passing)
    assert stream_seconds(problem, with_streamed(choices, streamable_values(problem, choices))) == pytest.approx(slowest / 1e6)


@pytest.mark.parametrize("folder", [False, True])
def test_no_memory_remains_on_the_host(folder: bool, problems: list[PlanningProblem], tmp_path: Path) -> None:
    model = seeded(Normed)
    made = _streamed_plan(model, _SHAPE, sft.Options(tile=(4, None)), problems, -1)
    options = sft.Options(host_folder=str(tmp_path)) if folder else sft.Options()
    net = sft.compile(copy.deepcopy(model), _SHAPE, budget="4GiB", plan=made, options=options)
    threads = threading.active_count()
    y = net(image(*_SHAPE).requires_grad_())
    assert not [*tmp_path.iterdir()]  # its files have no names
    y.sum().backward()
    assert threading.active_count() == threads
    net.zero_grad()
    _compare(sft.compile(copy.deepcopy(model), _SHAPE, budget="4GiB", plan=made, options=options), copy.deepcopy(model), image(*_SHAPE))
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_an_error_and_changes_nothing(
    problems: list[PlanningProblem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Normed)
    made = _streamed_plan(model, _SHAPE, sft.Options(tile=(4, None)), problems, -1)
    net = sft.compile(model, _SHAPE, budget="4GiB", plan=made, options=sft.Options(host_folder=str(tmp_path)))
    calls = 0
    left: list[int] = []

    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls > left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    y = net(image(*_SHAPE))  # its statistics change last
    before = {key: value.clone() for key, value in net.state_dict().items()}
    state, threads = torch.get_rng_state(), threading.active_count()
    for num_fitting in (0, 2):
        with monkeypatch.context() as patches:
            calls, left = 0, [num_fitting]
            patches.setattr("sft.torch_runtime.host.host_memory.allocate_blocks", full)
            with pytest.raises(sft.SourceError, match=r"No space left.*are free in.*Make room"):
                net(image(*_SHAPE, seed=1))
    with monkeypatch.context() as patches:
        calls, left = 0, [1]
        patches.setattr("sft.torch_runtime.host.host_memory.allocate_blocks", full)
        with pytest.raises(sft.SourceError, match="gradient of a cut"):
            y.sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    after = net.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    assert torch.equal(state, torch.get_rng_state())
    assert threading.active_count() == threads
    assert not [*tmp_path.iterdir()]
    with pytest.raises(sft.InputError, match="host_folder"):
        sft.Options(host_folder=str(tmp_path / "missing"))


@pytest.mark.usefixtures("frozen_objects")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the files of a process in /proc")
def test_an_interrupted_step_changes_nothing(problems: list[PlanningProblem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before every few programs of a step with cuts in files does not change the next step."""
    model, other = seeded(Dropped), seeded(Dropped)
    made = _streamed_plan(model, _SHAPE, sft.Options(tile=(9, None)), problems, -1)
    net, untouched = (
        sft.compile(each, _SHAPE, budget="4GiB", plan=made, options=sft.Options(host_folder=str(tmp_path))) for each in (model, other)
    )
    x, run = image(*_SHAPE), TorchMachine.run
    left = [0]

    def interrupted(machine: TorchMachine, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return run(machine, *arguments)

    monkeypatch.setattr(TorchMachine, "run", interrupted)
    gc.collect()  # files of other tests, which could otherwise be removed during this one
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    state, before = torch.get_rng_state(), {key: value.clone() for key, value in model.state_dict().items()}
    counts = {"forward": 0, "backward": 0}
    for phase in counts:
        for count in range(1, 1000, 5):
            torch.set_rng_state(state)
            model.load_state_dict(before)
            left[0] = count if phase == "forward" else 0
            changed: Mapping[str, Tensor] = before
            drawn = state
            try:
                losses = [net(x).sum()]
                changed, drawn = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
                if phase == "backward":
                    left[0] = count
                    losses.pop().backward()
                break  # past the last program
            except KeyboardInterrupt:
                counts[phase] += 1
            _is_as(model, changed)
            assert torch.equal(torch.get_rng_state(), drawn)
            gc.collect()
            assert threading.active_count() == threads
            assert len(os.listdir("/proc/self/fd")) == descriptors and not [*tmp_path.iterdir()]
    assert min(counts.values()) >= 3
    left[0] = 0
    torch.set_rng_state(state)
    untouched(x).sum().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
    _is_as(model, other.state_dict(), grads=True)


_KILLED = """
import os, signal, sys, torch, sft
from torch import nn
from sft.torch_runtime.machine import TorchMachine

model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
options = sft.Options(host_folder=sys.argv[1])
net = sft.compile(model, (1, 3, 64, 32), budget=int(sys.argv[2]), options=options)
print(net.plan.host_bytes, flush=True)
loss = net(torch.randn(1, 3, 64, 32)).square().sum()
run, left = TorchMachine.run, 3
def killed(*arguments):
    global left
    left -= 1
    if left == 0:
        print(sum(sys.argv[1] in line for line in open("/proc/self/maps")), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return run(*arguments)
TorchMachine.run = killed
loss.backward()
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts the mappings of a process in /proc")
def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
    least = least_budget(nn.Sequential(*layers), (1, 3, 64, 32), _HOST)
    done = subprocess.run([sys.executable, "-P", "-c", _KILLED, str(tmp_path), str(least)], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    host_bytes, num_mapped = map(int, done.stdout.split())
    assert host_bytes > 0 and num_mapped > 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 3, 10, 8, 6), sft.Options(tile=(3, None))),
        ((1, 3, 301), sft.Options(tile=(64, None))),
        ((3, 3, 128), sft.Options(tile=(37, None), batch_tile=2)),
        ((1, 3, 7), sft.Options(tile=(1, None))),
    ],
    ids=["volume", "signal", "batch of signals", "samples one by one"],
)
def test_volumes_and_signals_stream_too(shape: tuple[int, ...], options: sft.Options, problems: list[PlanningProblem]) -> None:
    model = seeded(lambda: Normed(axes=len(shape) - 2))
    made = _streamed_plan(model, shape, options, problems, -1)
    net: Any = sft.compile(copy.deepcopy(model), shape, budget="4GiB", plan=made)
    assert net.plan.host_bytes > 0
    _compare(net, copy.deepcopy(model), image(*shape))
    assert_within_budget(net, image(*shape), budget="4GiB", to_the_byte=True)


class Signal(nn.Module):
    """Norms of both kinds between convolutions and pools of a signal, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, 4, 5, padding=2), nn.BatchNorm1d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.MaxPool1d(3, 2, 1))
        self.pool = nn.AvgPool1d(2, ceil_mode=True)
        self.down = nn.Sequential(nn.Conv1d(4, 6, 3, padding=2, dilation=2), nn.GroupNorm(2, 6), nn.ReLU())
        self.up = nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1)
        self.last = nn.Conv1d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = torch.relu(self.body(y) + self.pool(y))
        output: Tensor = self.last(self.up(self.down(y)))
        return output.mean(2)


@pytest.mark.parametrize("folder", [False, True])
def test_signals_train_in_a_budget_far_below_the_sum_of_their_cuts(folder: bool, tmp_path: Path) -> None:
    model, shape = seeded(Signal), (1, 3, 1601)
    options = sft.Options(host_folder=str(tmp_path)) if folder else _HOST
    at_home, least = least_budget(model, shape), least_budget(model, shape, options)
    assert least < 0.4 * at_home
    budget = (4 * least + at_home) // 5
    report = assert_exact(model, image(*shape), budget=budget, options=options, input_grad=False, steps=1)
    assert report.plan.host_bytes > 0 and report.plan.total_bytes <= budget
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("captures")
def test_any_cut_of_a_signal_may_be_streamed(problems: list[PlanningProblem]) -> None:
    @settings(max_examples=max(4, settings.default.max_examples // 8) if settings.default else 4)
    @given(rows=st.integers(5, 70), batch_tile=st.integers(1, 2), mask=st.integers(1, 63))
    def check(rows: int, batch_tile: int, mask: int) -> None:
        model, shape = seeded(Signal), (2, 3, 201)
        made = _streamed_plan(model, shape, sft.Options(tile=(rows, None), batch_tile=batch_tile), problems, mask)
        net = sft.compile(copy.deepcopy(model), shape, budget="4GiB", plan=made)
        _compare(net, copy.deepcopy(model), image(*shape))
        assert_within_budget(net, image(*shape), budget="4GiB")

    check()


def test_a_graph_may_be_retained(problems: list[PlanningProblem]) -> None:
    model = seeded(Normed)
    made = _streamed_plan(model, _SHAPE, sft.Options(tile=(4, None)), problems, -1)
    net = sft.compile(model, _SHAPE, budget="4GiB", plan=made)
    x = image(*_SHAPE).requires_grad_()
    y = net(x).square().sum()
    y.backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * first, rtol=1e-12, atol=1e-14)


@pytest.fixture
def ungraded() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("ungraded")
def test_inference_streams_too(problems: list[PlanningProblem]) -> None:
    model = seeded(Normed)
    made = _streamed_plan(model, _SHAPE, sft.Options(tile=(4, None)), problems, -1)
    whole = sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(tile=(4, None)))
    net, eager = sft.compile(copy.deepcopy(model), _SHAPE, budget="4GiB", plan=made), copy.deepcopy(model)
    streamed = sft.of(net).plan
    assert streamed.projected_peak_bytes < whole.projected_peak_bytes and streamed.host_bytes > 0
    torch.testing.assert_close(net(image(*_SHAPE)), eager(image(*_SHAPE)), rtol=1e-12, atol=1e-12)


def test_cuts_that_cannot_be_streamed_are_refused(problems: list[PlanningProblem]) -> None:
    model = seeded(Normed)
    plan = sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(tile=(4, None)))
    first = next(i for i, segment in enumerate(plan.segments) if segment.mode == "tiled")
    inner = next(name for name in plan.segments[first].nodes if name not in streamable_values(problems[-1], _choices(plan)))
    whole = next(i for i, segment in enumerate(plan.segments) if segment.mode == "whole")
    for index, name in ((first, inner), (first, "nothing"), (whole, plan.segments[whole].nodes[0])):
        segments = list(plan.segments)
        segments[index] = replace(segments[index], streamed=(name,))
        with pytest.raises(sft.InputError, match="strip by strip"):
            sft.compile(model, _SHAPE, plan=replace(plan, segments=tuple(segments)))


def test_streamed_cuts_are_no_copies_of_an_order(problems: list[PlanningProblem]) -> None:
    """A schedule cannot offload a cut that is on the host already."""
    model = seeded(Normed)
    sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(tile=(4, None)))
    problem = problems[-1]
    choices = _choices(sft.plan(model, _SHAPE, budget="4GiB", options=sft.Options(tile=(4, None))))
    name = streamable_values(problem, choices)[0]
    planned = materialize(problem, with_streamed(choices, (name,)))
    assert name in planned.region.streamed and name not in planned.region.liveness.value_lifetimes(planned.region.schedule)
