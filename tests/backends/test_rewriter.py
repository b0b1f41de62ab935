"""Rewrites of programs by kernel calls, without running any: instructions replaced and kept, plans, and selectors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.analysis.passes.pipeline import run_passes
from sft.backends import resolve
from sft.backends.conv_calls import ConvolutionCall, DataGradientCall, PooledConvolutionCall, WeightGradientCall
from sft.backends.kernel_call import kernel_call_of
from sft.backends.resolve import backend_for
from sft.backends.rewriter import KernelBackend
from sft.backends.selector import AlwaysKernel, NumberFormat, ShapeClass, storage_format
from sft.kernels.common import LaunchVariant
from sft.lower.program import Program
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.runtime.tiled_segment import TiledSegment
from sft.runtime.whole_segment import WholeSegment
from sft.torch_runtime.profiling import program_hash
from tests.helpers.problems import problem_of, with_resources


class Never:
    """Selector that takes no kernel, and records the queries."""

    def __init__(self) -> None:
        self.asked: list[ShapeClass] = []

    def selects_kernel(self, shape_class: ShapeClass) -> bool:
        self.asked.append(shape_class)
        return False

    def launch_variant_of(self, shape_class: ShapeClass) -> LaunchVariant:
        return "default"

    def number_format_of(self, dtype: torch.dtype, *, multiplies: bool = False) -> NumberFormat | None:
        return storage_format(dtype, allows_tf32=False)


def _block() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


@cache
def _problem(size: int = 32) -> PlanningProblem:
    return problem_of(_block(), (1, 3, size, 20), training=True)


def _segment(problem: PlanningProblem, backend: Any, mode: Any = "tiled") -> Any:
    problem = with_resources(problem, backend=backend)
    nodes = tuple(name for phase in problem.sized.phases.phases for name in (*phase.streamed, *phase.tail))
    choice = SegmentChoice(nodes=nodes, mode=mode, strip_rows=8 if mode == "tiled" else 0, batch_tile=1)
    (segment,) = build_region(problem, [choice]).segments
    return segment


def _programs(segment: Any) -> list[Program]:
    if isinstance(segment, WholeSegment):
        return [program for program in segment.programs(True) if program is not None]
    assert isinstance(segment, TiledSegment)
    return [segment.program(kind, 1, segment.sweeps[0]) for kind in ("forward", "restore", "joint")]


def _calls(program: Program) -> list[str]:
    return [i.function.__qualname__ for i in program.instructions if kernel_call_of(i.function) is not None]


@pytest.mark.parametrize("mode", ["tiled", "whole"])
def test_a_program_without_fusions_is_unchanged(mode: str) -> None:
    problem, never = _problem(), Never()
    ours, atens = (_programs(_segment(problem, backend, mode)) for backend in (KernelBackend(selector=never), None))
    assert [program.instructions for program in ours] == [program.instructions for program in atens]
    assert [program.peak_bytes for program in ours] == [program.peak_bytes for program in atens]
    assert {wanted.operator for wanted in never.asked} >= {"conv2d", "conv2d data and weight gradient", "conv2d data gradient", "max pool"}


def test_a_strip_of_a_vgg_block_is_two_kernels_forwards_and_four_back() -> None:
    forward, restore, joint = _programs(_segment(_problem(), KernelBackend(selector=AlwaysKernel())))
    assert _calls(forward) == ["LoadRowsCall.run", "ConvolutionCall.run", "PooledConvolutionCall.run"]
    assert sorted(_calls(restore)) == ["ConvolutionCall.run", "LoadRowsCall.run"]
    of_conv = ["GradientSumsCall.add_gradients", "WeightGradientCall.run"]
    assert sorted(_calls(joint)) == sorted([*_calls(forward), "DataGradientCall.run", *of_conv, *of_conv])
    names = {str(i.function) for i in joint.instructions if kernel_call_of(i.function) is None}
    # The convolution's output, indices, masked gradients and padded copies are never in memory.
    assert not any(word in name for name in names for word in ("convolution", "max_pool", "threshold", "constant_pad", "relu"))


def test_operations_are_counted_the_same() -> None:
    problem = _problem()
    for mode in ("tiled", "whole"):
        ours, atens = (_programs(_segment(problem, backend, mode)) for backend in (KernelBackend(selector=AlwaysKernel()), None))
        assert [program.flops for program in ours] == [program.flops for program in atens]


def test_a_whole_segment_keeps_taps_instead_of_images() -> None:
    """Residuals of a convolution, ReLU and pool: maxima and two bits each, not the output and its indices."""
    problem = _problem(size=64)
    ours, atens = (_programs(_segment(problem, backend, "whole"))[0] for backend in (KernelBackend(selector=AlwaysKernel()), None))
    assert ours.end_bytes < 0.6 * atens.end_bytes


def test_without_computed_operands_no_mask_is_fused() -> None:
    """On Hopper with an old Triton, kernels would make masked gradients in memory, which a program does not count."""
    _, _, joint = _programs(_segment(_problem(), KernelBackend(selector=AlwaysKernel(), computes_operands=False)))
    names = [str(i.function) for i in joint.instructions if kernel_call_of(i.function) is None]
    assert "PooledConvolutionCall.run" not in _calls(joint)
    assert sum("threshold_backward" in name for name in names) == 2
    assert _calls(joint).count("DataGradientCall.run") == 1


def test_a_chooser_may_take_one_gradient_alone() -> None:
    class Weights(Never):
        def selects_kernel(self, shape_class: ShapeClass) -> bool:
            return shape_class.operator == "conv2d weight gradient"

        def launch_variant_of(self, shape_class: ShapeClass) -> LaunchVariant:
            return "deep"

    problem = _problem()
    _, _, joint = _programs(_segment(problem, KernelBackend(selector=Weights())))
    _, _, plain = _programs(_segment(problem, None))
    assert _calls(joint).count("WeightGradientCall.run") == 2
    calls = [kernel_call_of(instruction.function) for instruction in joint.instructions]
    assert {call.variant for call in calls if isinstance(call, WeightGradientCall)} == {"deep"}
    assert "DataGradientCall.run" not in _calls(joint)
    assert joint.flops == plain.flops


def test_kernels_get_weights_channels_last() -> None:
    """A kernel loads adjacent inputs of one tap; weights of models rarely have this layout."""
    for program in _programs(_segment(_problem(), KernelBackend(selector=AlwaysKernel()))):
        copied = {i.arguments[0] for i in program.instructions if i.function is torch.ops.aten.copy_.default}
        for instruction in program.instructions:
            call = kernel_call_of(instruction.function)
            if isinstance(call, (ConvolutionCall, DataGradientCall, PooledConvolutionCall)):
                assert instruction.arguments[3 if isinstance(call, PooledConvolutionCall) else 2] in copied


def _copied_weights(programs: Iterable[Program]) -> set[str]:
    """Global values of which programs make copies."""
    return {
        port.name
        for program in programs
        for port, slot in program.ports.items()
        if port.role == "side" and any(i.function is torch.ops.aten.copy_.default and i.arguments[1] == slot for i in program.instructions)
    }


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_weights_that_are_channels_last_are_not_copied(layout: torch.memory_format) -> None:
    model = _block().to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub lacks it
    segment = _segment(problem_of(model, (1, 3, 32, 20), training=True), KernelBackend(selector=AlwaysKernel()))
    assert "ConvolutionCall.run" in _calls(_programs(segment)[0])
    assert len(_copied_weights(_programs(segment))) == (2 if layout is torch.contiguous_format else 0)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_folded_weights_are_not_copied(layout: torch.memory_format) -> None:
    """Weights that frozen norms are folded into are written into cuts, which are channels last."""
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(*layers).eval().to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub lacks it
    problem = problem_of(model, (1, 3, 32, 20), training=True, passes=run_passes)
    problem = with_resources(problem, backend=KernelBackend(selector=AlwaysKernel()))
    folded, nodes = (tuple(name for name in problem.sized.operators if ("__" in name) is is_folded) for is_folded in (True, False))
    choices = (SegmentChoice(nodes=folded, mode="whole"), SegmentChoice(nodes=nodes, mode="tiled", strip_rows=8, batch_tile=1))
    prologue, segment = build_region(problem, choices).segments
    assert isinstance(prologue, WholeSegment)
    assert not prologue.self_allocated(True)  # otherwise its program would choose their layout
    assert "ConvolutionCall.run" in _calls(_programs(segment)[0])
    assert not _copied_weights(_programs(segment))


def test_programs_are_data() -> None:
    first, again = (_programs(_segment(_problem(), KernelBackend(selector=AlwaysKernel())))[2] for _ in range(2))
    assert repr(first.instructions[-1])
    assert program_hash(first) is not None
    assert program_hash(first) == program_hash(again)
    plain = _programs(_segment(_problem(), None))[2]
    assert program_hash(first) != program_hash(plain)


def test_plans_list_kernels_and_survive_json() -> None:
    with torch.device("meta"):
        model = _block()
    options = sft.Options(backend="triton", tile=(16, None))
    plan = sft.plan(model, (1, 3, 64, 64), options=options)
    assert [segment.backend for segment in plan.segments] == ["mixed"]
    assert len(plan.segments[0].kernels) == 3
    assert sft.Plan.from_json(plan.to_json()) == plan
    assert "Triton kernels" in " ".join(plan.explain().split())
    aten = sft.plan(model, (1, 3, 64, 64), options=replace(options, backend="aten"))
    assert [segment.backend for segment in aten.segments] == ["aten"]
    assert aten.segments[0].kernels == ()
    assert plan.flops == aten.flops


def test_double_precision_runs_on_aten() -> None:
    with torch.device("meta"):
        model = _block().double()
    plan = sft.plan(model, (1, 3, 64, 64), options=sft.Options(backend="triton", tile=(16, None)))
    assert {segment.backend for segment in plan.segments} == {"aten"}


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(sft.InputError, match=r"need a CUDA device|not installed"):
        sft.compile(_block(), (1, 3, 32, 32), options=sft.Options(backend="triton"))
    with pytest.raises(sft.InputError, match="choose one of auto, aten, triton"):
        sft.Options(backend="cuda")


def test_auto_is_aten_without_measurements(tmp_path: Path) -> None:
    assert backend_for("auto", torch.device("cpu"), [tmp_path]) is None
    assert backend_for("aten", torch.device("cpu"), [tmp_path]) is None
    assert isinstance(backend_for("triton", torch.device("meta"), [tmp_path]), KernelBackend)


def _settings(*, conv: str = "none", cudnn: str = "none", everywhere: str = "none") -> Any:
    of_conv = SimpleNamespace(fp32_precision=conv)
    return SimpleNamespace(cudnn=SimpleNamespace(conv=of_conv, fp32_precision=cudnn), fp32_precision=everywhere)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (_settings(conv="tf32"), True),
        (_settings(conv="ieee", cudnn="tf32"), False),
        (_settings(cudnn="tf32"), True),
        (_settings(cudnn="ieee", everywhere="tf32"), False),
        (_settings(everywhere="tf32"), True),
        (_settings(), False),
    ],
)
def test_products_of_single_precision_follow_the_switches_of_torch(settings: Any, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "check_triton", lambda device: None)
    monkeypatch.setattr(resolve, "computes_operands", lambda device: True)
    monkeypatch.setattr(torch, "backends", settings)
    backend = backend_for("triton", torch.device("cuda"))
    assert isinstance(backend, KernelBackend) and backend.selector is not None
    assert backend.selector.number_format_of(torch.float32, multiplies=True) == ("tf32" if allowed else "float32")
    assert backend.selector.number_format_of(torch.float32) == "float32"
    on_cpu = backend_for("triton", torch.device("cpu"))
    assert isinstance(on_cpu, KernelBackend) and on_cpu.selector is not None
    assert on_cpu.selector.number_format_of(torch.float32, multiplies=True) == "float32"


@pytest.mark.parametrize("allowed", [True, False])
def test_the_older_switch_of_tf32(allowed: bool) -> None:
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = allowed
        assert resolve.allows_tf32(torch.device("cuda")) == allowed
    finally:
        torch.backends.cudnn.allow_tf32 = before
