"""Rewrites of interpolations: a kernel reads half-precision images itself, and writes into the result of a concatenation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from sft.backends.convolution_relu import FusionDevice
from sft.backends.resize import ResizeCall
from sft.backends.rewriter import KernelBackend
from sft.backends.selector import AlwaysKernel, ShapeClass
from sft.lower.concat import cat_slices, cat_slices_into
from sft.lower.program import Instruction, Program, Slot
from sft.planner.measured.allocation_trace import record_step
from sft.planner.plan import SegmentChoice
from sft.planner.region_builder import build_region
from tests.helpers.models import seeded
from tests.helpers.problems import problem_of, with_resources

_aten = torch.ops.aten
Mode = Literal["tiled", "whole"]


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


def _programs(model: nn.Module, mode: Mode, backend: KernelBackend) -> list[Program]:
    """Programs of a training step in half precision."""
    problem = with_resources(problem_of(model, (1, 3, 32, 16), training=True, dtype=torch.bfloat16), backend=backend)
    nodes = tuple(name for phase in problem.sized.phases.phases for name in (*phase.streamed, *phase.tail))
    strip_rows = 8 if mode == "tiled" else 0
    region = build_region(problem, [SegmentChoice(nodes=nodes, mode=mode, strip_rows=strip_rows, batch_tile=1)])
    record_step(problem, region)  # it lowers all strips
    return [program for segment in region.segments for program in getattr(segment, "lowered_programs", ())]


def _is_resize(call: Instruction) -> bool:
    return isinstance(getattr(call.function, "__self__", None), ResizeCall)


def _gradient_calls(mode: str, formats: tuple[str, ...]) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
    """Kernels of gradients of a strip, each with the instructions before it."""
    backend = KernelBackend(selector=_Resizes(formats=formats), fusion_device=FusionDevice(None))
    for program in _programs(_network(mode), "tiled", backend):
        for at, call in enumerate(program.instructions):
            if _is_resize(call):
                yield call, program.instructions[:at]


def _operand(call: Instruction) -> Slot:
    slot: Slot = call.arguments[1]
    return slot


class _Joined(nn.Module):
    """An enlarged image between images of the same size, as channels of one image."""

    def __init__(self, position: int, *, is_read_twice: bool = False) -> None:
        super().__init__()
        self.position, self.is_read_twice = position, is_read_twice
        self.enter, self.other, self.leave = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(24, 2, 3, padding=1)
        self.enlarge = nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2.0, mode="bilinear"))

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.enter(x))
        enlarged = self.enlarge(skip)
        images = [skip, self.other(skip)]
        images.insert(self.position, enlarged)
        result: Tensor = self.leave(torch.cat(images, 1))
        return result + enlarged[:, :2] if self.is_read_twice else result


def _concatenations(program: Program) -> list[Instruction]:
    functions = (cat_slices, cat_slices_into, _aten.cat.default, _aten.cat.out)
    return [call for call in program.instructions if call.function in functions]


@pytest.mark.parametrize("mode", ["tiled", "whole"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_enlarged_images_are_written_into_a_concatenation(position: int, mode: Mode) -> None:
    backend = KernelBackend(selector=AlwaysKernel(), fusion_device=FusionDevice(None))
    num_written = 0
    for program in _programs(seeded(lambda: _Joined(position)).to(torch.bfloat16), mode, backend):
        for call in filter(_is_resize, program.instructions):
            (out,) = call.writes
            if out.shape[3] != 16:
                continue  # a gradient
            num_written += 1
            assert out.root != out.number
            start = 8 * position
            view = next(each for each in program.instructions if out in each.outputs)
            assert view.function is _aten.slice.Tensor and view.arguments[1:] == (1, start, start + 8)
            assert view.arguments[0].shape[1] == 24
            copied = [each.writes[0] for each in _concatenations(program) if each.writes[0].root == out.root]
            assert sum(slot.shape[1] for slot in copied) == 16
            assert len(copied) == (2 if position == 1 else 1)
    assert num_written


@pytest.mark.parametrize("is_read_twice", [False, True])
def test_an_enlarged_image_that_is_read_twice_has_a_buffer(is_read_twice: bool) -> None:
    """In the forward pass; the backward pass computes again what gradients need, which the sum does not."""
    backend = KernelBackend(selector=AlwaysKernel(), fusion_device=FusionDevice(None))
    programs = _programs(seeded(lambda: _Joined(1, is_read_twice=is_read_twice)).to(torch.bfloat16), "tiled", backend)
    resized = [call.writes[0] for program in programs for call in filter(_is_resize, program.instructions)]
    enlarged = [out for out in resized if out.shape[3] == 16]  # gradients have half of the columns
    assert enlarged
    assert any(out.root == out.number for out in enlarged) is is_read_twice


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
