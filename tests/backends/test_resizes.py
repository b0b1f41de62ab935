"""Rewrites of interpolations: a kernel reads half-precision images itself, instead of a copy of them in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from sft.backends.convolution_relu import FusionDevice
from sft.backends.resize import ResizeCall
from sft.backends.rewriter import KernelBackend
from sft.backends.selector import AlwaysKernel, ShapeClass
from sft.lower.program import Instruction, Slot
from sft.planner.measured.allocation_trace import record_step
from sft.planner.plan import SegmentChoice
from sft.planner.region_builder import build_region
from sft.runtime.tiled_segment import TiledSegment
from tests.helpers.models import seeded
from tests.helpers.problems import problem_of, with_resources

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Resizes(AlwaysKernel):
    """Selects the kernels of gradients of interpolations of some number formats."""

    formats: tuple[str, ...] = ()

    def selects_kernel(self, shape_class: ShapeClass) -> bool:
        """True for a class of these formats."""
        return shape_class.operator == "resize gradient" and shape_class.numbers in self.formats


def _network(mode: str) -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(8, 2, 3, padding=1))
    return seeded(lambda: nn.Sequential(*layers)).to(torch.bfloat16)


def _gradient_calls(mode: str, formats: tuple[str, ...]) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
    """Kernels of gradients of a strip, each with the instructions before it."""
    backend = KernelBackend(selector=_Resizes(formats=formats), fusion_device=FusionDevice(None))
    problem = with_resources(problem_of(_network(mode), (1, 3, 32, 16), training=True, dtype=torch.bfloat16), backend=backend)
    nodes = tuple(name for phase in problem.sized.phases.phases for name in (*phase.streamed, *phase.tail))
    region = build_region(problem, [SegmentChoice(nodes=nodes, mode="tiled", strip_rows=8, batch_tile=1)])
    record_step(problem, region)  # it lowers all strips
    (segment,) = region.segments
    assert isinstance(segment, TiledSegment)
    for program in segment.lowered_programs:
        for at, call in enumerate(program.instructions):
            if isinstance(getattr(call.function, "__self__", None), ResizeCall):
                yield call, program.instructions[:at]


def _operand(call: Instruction) -> Slot:
    slot: Slot = call.arguments[1]
    return slot


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_gradients_read_half_precision(mode: str) -> None:
    calls = list(_gradient_calls(mode, ("bfloat16", "float32")))
    assert calls
    for call, before in calls:
        operand = _operand(call)
        assert operand.dtype == torch.bfloat16
        casts = [out for each in before if each.function is _aten._to_copy.default for out in each.outputs if out is not None]
        assert not any(cast.shape == operand.shape and cast.dtype == torch.float32 for cast in casts)


def test_gradients_read_a_copy_if_only_that_kernel_is_selected() -> None:
    calls = list(_gradient_calls("bilinear", ("float32",)))
    assert calls
    assert {_operand(call).dtype for call, _ in calls} == {torch.float32}
