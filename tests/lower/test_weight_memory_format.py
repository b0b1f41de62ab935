"""Weights keep the caller's memory layout: layouts of their gradients, and layouts of images in untiled segments."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sft
from sft.analysis.passes.pipeline import run_passes
from sft.lower.builder import copy_with_strides
from sft.planner.problem import PlanningProblem
from sft.planner.projection import plain_programs
from tests.helpers.exactness import assert_exact
from tests.helpers.models import chain, image, seeded
from tests.helpers.problems import problem_of
from tests.helpers.stage_chains import assert_same_bits_in_stages

aten = torch.ops.aten


def _problem(model: nn.Module, size: int = 16) -> PlanningProblem:
    return problem_of(model.float().train(), (2, 3, size, size), training=True, passes=run_passes)


def _lay_out(model: nn.Module, layout: torch.memory_format) -> None:
    for param in model.parameters():
        if param.dim() == (5 if layout is torch.channels_last_3d else 4):
            param.data = param.data.contiguous(memory_format=layout)


def _classifier() -> nn.Module:
    return chain(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 3))


class _Columns(nn.Module):
    """A linear layer with a column-major weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.weight = nn.Parameter(torch.rand(4, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.conv(x).mean((2, 3)), self.weight)


def test_gradients_of_weights_are_not_copied() -> None:
    """The product itself is the gradient."""
    problem = _problem(seeded(_classifier))
    laid_out = [i.outputs[0] for program in plain_programs(problem) for i in program.instructions if i.function is copy_with_strides]
    assert all(slot is not None and len(slot.shape) == 1 for slot in laid_out)  # those of biases are views of sums
    weight = next(
        node.name for node in problem.sized.graph.nodes if node.kind == "parameter" and problem.sized.shapes[node.name] == (40, 64)
    )
    backward = plain_programs(problem)[1]
    (slot,) = (slot for port, slot in backward.results.items() if port.name == weight)
    (maker,) = (instruction for instruction in backward.instructions if slot in instruction.outputs)
    assert maker.function is aten.mm.default


def test_the_gradient_of_a_column_major_weight_is_copied_to_its_layout() -> None:
    model = seeded(_Columns)
    assert any(i.function is copy_with_strides for program in plain_programs(_problem(model)) for i in program.instructions)
    report = assert_exact(model, image(2, 3, 12, 10), budget="1GiB")
    assert [segment.mode for segment in report.plan.segments] == ["whole"]


def test_gradients_of_contiguous_weights_are_not_copied_where_layouts_are_left_to_torch() -> None:
    model = seeded(lambda: _wide(nn.Conv2d(64, 64, 3, groups=2, padding=1), nn.Linear(6, 3)))
    problem = _problem(model, 8)
    assert problem.keeps_torch_layouts
    copied = [i.outputs[0] for program in plain_programs(problem) for i in program.instructions if i.function is copy_with_strides]
    assert all(slot is not None and len(slot.shape) == 1 for slot in copied)


class _Positions(nn.Module):
    """A parameter with the shape of an image, whose gradient is a transposed image: a norm over channels follows."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = _wide(), nn.LayerNorm(64)
        self.positions = nn.Parameter(torch.randn(1, 64, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm((self.net(x) + self.positions).permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


def test_gradients_of_parameters_that_are_images_have_their_layout() -> None:
    model = seeded(_Positions)
    problem = _problem(copy.deepcopy(model), 8)
    assert problem.keeps_torch_layouts
    images = [node.name for node in problem.sized.graph.nodes if node.kind == "parameter" and len(problem.sized.shapes[node.name]) == 4]
    in_layout = problem.globals_in_layout(images, tiled=False)
    assert {problem.sized.shapes[name] for name in in_layout} == {(64, 3, 3, 3), (64, 64, 3, 3)}, "the positions are not among them"
    net, x = sft.compile(copy.deepcopy(model).float(), (1, 3, 8, 8), budget="1GiB"), torch.randn(1, 3, 8, 8)
    (gradient,) = torch.autograd.grad(net(x).square().sum(), [net.positions])
    assert gradient.stride() == net.positions.stride()
    assert_exact(model, image(1, 3, 8, 8), budget="1GiB")


def test_a_weight_in_a_new_layout_gets_a_new_plan() -> None:
    """Its gradient has the weight's layout and is exact, before and after."""
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 3))).float()
    plain = copy.deepcopy(model)
    net = sft.compile(model, (2, 3, 12, 10), budget="1GiB")
    x = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(0))
    for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        _lay_out(model, layout)
        model.zero_grad()
        plain.zero_grad()
        net(x).square().sum().backward()
        plain(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and ours.grad.stride() == ours.stride()
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [5, 64])
def test_layouts_are_left_to_torch_where_weights_are_more_than_images(size: int, layout: torch.memory_format) -> None:
    """Except for channels-last weights, which need no copies; results are exact in both cases."""
    model = seeded(lambda: chain(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)))
    _lay_out(model, layout)
    is_left = size == 5 and layout is torch.contiguous_format
    problem = _problem(copy.deepcopy(model), size)
    assert problem.keeps_torch_layouts == is_left
    copies = [i.function for i in plain_programs(problem)[0].instructions if i.function in (aten.clone.default, aten.contiguous.default)]
    assert copies == [aten.contiguous.default if is_left else aten.clone.default]
    assert_exact(model, image(2, 3, size, size), budget="1GiB")


def test_stages_compute_the_same_bits_where_layouts_are_left_to_torch() -> None:
    layers = [nn.Conv2d(3, 32, 3, padding=1), *(layer for _ in range(6) for layer in (nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)))]
    model = seeded(lambda: chain(*layers)).float()
    assert _problem(copy.deepcopy(model), 8).keeps_torch_layouts
    assert_same_bits_in_stages(model, (2, 3, 8, 8), "sqrt")


def _wide(*layers: nn.Module) -> nn.Module:
    """A network with more weights than pixels of its small images."""
    return chain(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3, padding=1), *layers)


_WIDE: dict[str, Callable[[], nn.Module]] = {
    "padded": lambda: _wide(nn.ZeroPad2d((1, 2, 0, 1)), nn.MaxPool2d(2)),
    "grouped": lambda: _wide(nn.GroupNorm(4, 64), nn.Conv2d(64, 64, 3, groups=2, padding=1)),
    "transposed": lambda: _wide(nn.ConvTranspose2d(64, 12, 3, 2), nn.PixelShuffle(2)),
    "resampled": lambda: _wide(nn.BatchNorm2d(64), nn.Upsample(scale_factor=2), nn.AvgPool2d(2)),
}


@given(
    name=st.sampled_from(sorted(_WIDE)),
    batch=st.integers(1, 2),
    sides=st.tuples(st.integers(5, 8), st.integers(5, 8)),
    layout=st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
def test_any_network_of_wide_layers_is_exact(name: str, batch: int, sides: tuple[int, int], layout: torch.memory_format) -> None:
    """Layouts are left to torch, unless the input is channels last."""
    model = seeded(_WIDE[name])
    assert problem_of(copy.deepcopy(model).float(), (batch, 3, *sides), training=True, passes=run_passes).keeps_torch_layouts
    assert_exact(model, image(batch, 3, *sides).contiguous(memory_format=layout), budget="1GiB")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("make", [nn.Conv3d, nn.ConvTranspose3d])
def test_weights_of_volumes_that_are_channels_last(make: Callable[..., nn.Module], layout: torch.memory_format) -> None:
    """In double precision torch computes some of their gradients contiguous: they are copied, and the copies are projected."""
    model = seeded(lambda: chain(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), make(8, 16, 3)))
    _lay_out(model, torch.channels_last_3d)
    assert_exact(model, image(1, 3, 5, 5, 5).contiguous(memory_format=layout), budget="1GiB")


@pytest.mark.parametrize("tile", [None, (4, None), (5, 16)])
@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (8, 1), (15, 1), (16, 1), (32, 4)])
def test_strided_pointwise_convolutions_of_few_channels(channels: int, groups: int, tile: tuple[int, int | None] | None) -> None:
    """Their weight gradient is computed from a copy of the read pixels: oneDNN's own, for channels-last images, crashes the process."""
    model = seeded(lambda: chain(nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 8, 1, 2, groups=groups), nn.ReLU())).float()
    for call in (i for program in plain_programs(_problem(copy.deepcopy(model), 64)) for i in program.instructions):
        if call.function is aten.convolution_backward.default:
            _, read, weight, _, strides, *_, wanted = call.arguments
            assert weight.shape[2:] != (1, 1) or weight.shape[1] >= 16 or max(strides) == 1 or not wanted[1], read.shape
    options = sft.Options() if tile is None else sft.Options(tile=tile)
    net = sft.compile(copy.deepcopy(model), (2, 3, 64, 48), budget="1GiB", options=options)
    for _ in range(3):
        net(torch.randn(2, 3, 64, 48)).square().sum().backward()  # crashes with oneDNN's own gradient
    assert_exact(model, image(2, 3, 33, 24), budget="1GiB", options=options)
