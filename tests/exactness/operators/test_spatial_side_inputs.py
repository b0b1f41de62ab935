"""Spatial side inputs: position embeddings, coordinates, weights of pixels; each strip reads its slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.tilings import tiled_options

_CONVOLUTIONS: tuple[Callable[..., nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Embedded(nn.Module):
    """An embedding with entries for some of an image's dimensions, as a parameter or a buffer, in some function of the image."""

    def __init__(self, shape: tuple[int, ...], axes: int, how: str, *, stride: int = 1, learned: bool = True) -> None:
        super().__init__()
        conv = _CONVOLUTIONS[axes - 1]
        self.how, self.before = how, conv(3, 4, 3, padding=1, stride=stride)
        self.after = conv(4 + (shape[-1 - axes] if how == "cat" else 0), 2, 3, padding=1)
        embedding = torch.randn(shape)
        if learned:
            self.embedding: Tensor = nn.Parameter(embedding)
        else:
            self.register_buffer("embedding", embedding)

    def forward(self, x: Tensor) -> Tensor:
        y, embedding = self.before(x), self.embedding
        match self.how:
            case "cat":
                y = torch.cat([embedding.expand(y.shape[0], *embedding.shape[1 : -(y.dim() - 2)], *y.shape[2:]), y], 1)
            case "add":
                y = embedding + y
            case "gate":
                y = y * embedding.sigmoid()
            case _:
                y = torch.where(embedding > 0, y, 2 * y) + torch.maximum(y, embedding)
        out: Tensor = self.after(torch.tanh(y))
        return out


@st.composite
def _embedded(draw: st.DrawFn) -> tuple[nn.Module, Tensor, sft.Options]:
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    extents = tuple(draw(st.integers(4, 13 if axis < 2 else 5)) for axis in range(axes))
    stride, batch, how = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from(["add", "cat", "gate", "where"]))
    side_extents = tuple((extent - 1) // stride + 1 if draw(st.integers(0, 3)) else 1 for extent in extents)
    shape = (draw(st.sampled_from([1, 1, batch])), draw(st.sampled_from([1, 4])), *side_extents)
    if how == "cat" and all(extent == 1 for extent in side_extents):
        shape = (*shape[:2], *((extent - 1) // stride + 1 for extent in extents))
    elif how != "cat" and shape[0] == 1:
        shape = shape[draw(st.integers(0, 2)) :]
    learned = draw(st.booleans())
    note(f"{how} {shape}, image {extents}, {stride=}, {learned=}")
    model = seeded(lambda: _Embedded(shape, axes, how, stride=stride, learned=learned))
    return model, image(batch, 3, *extents), draw(tiled_options(extents))


@at_most(6)
@given(case=_embedded())
def test_any_embedding_any_tiling(case: tuple[nn.Module, Tensor, sft.Options]) -> None:
    model, x, options = case
    assert_exact(model, x, options=options, steps=1)


class _Tokens(nn.Module):
    """Positions of a list of pixels, ``[1, H * W, C]``, learned at another size and resized to this one (a vision transformer's)."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid, self.patches = grid, nn.Conv2d(3, 4, 2, stride=2)
        self.own, self.other = nn.Parameter(torch.randn(1, grid[0] * grid[1], 4)), nn.Parameter(torch.randn(1, 4, 3, 3))
        self.norm, self.linear, self.after = nn.LayerNorm(4), nn.Linear(4, 4), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = x + F.interpolate(self.other, size=x.shape[2:], mode="bilinear")
        y = x.flatten(2).transpose(1, 2) + self.own
        y = y + self.linear(self.norm(y))
        out: Tensor = self.after(y.transpose(1, 2).reshape(x.shape))
        return out


def test_positions_of_tokens() -> None:
    model = seeded(lambda: _Tokens((8, 7)))
    report = assert_exact(model, image(2, 3, 16, 14), options=sft.Options(tile=(6, 8), batch_tile=1, state_every=2), steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["whole", "tiled"]


class _Gated(nn.Module):
    """Columns of each sample are weighted by a function of the full image."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.weigh, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y: Tensor = self.after(x * self.weigh(x.mean(2)).sigmoid().unsqueeze(2))
        return y


@pytest.mark.parametrize("batch_tile", [1, 2])
def test_values_of_each_sample(batch_tile: int) -> None:
    options = sft.Options(tile=(4, 5), batch_tile=batch_tile)
    report = assert_exact(seeded(_Gated), image(3, 3, 13, 9), options=options, steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled", "whole", "tiled"]


def _rows_and_columns(x: Tensor) -> list[Tensor]:
    n, _, h, w = x.shape
    rows = torch.linspace(-1, 1, h, dtype=x.dtype, device=x.device).view(1, 1, h, 1).expand(n, 1, h, w)
    columns = torch.arange(w, dtype=x.dtype).repeat(n, 1, h, 1)
    return [rows, torch.sqrt(columns.square() + 1) / (w - 1)]


def _mesh(x: Tensor) -> list[Tensor]:
    grids = torch.meshgrid(*(torch.linspace(0, 1, extent, dtype=x.dtype) for extent in x.shape[2:]), indexing="ij")
    return [torch.stack(grids)[None].expand(x.shape[0], -1, -1, -1)]


class _Coordinates(nn.Module):
    """Coordinates as channels (CoordConv; Liu et al. 2018)."""

    def __init__(self, grids: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.grids, self.before, self.after = grids, nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y: Tensor = self.after(torch.cat([x, *self.grids(x)], 1))
        return y


@pytest.mark.parametrize("grids", [_rows_and_columns, _mesh])
def test_coordinates_as_channels(grids: Any) -> None:
    """One capture for all sizes: the untiled grids are computed for each size; the image streams."""
    model = seeded(lambda: _Coordinates(grids))
    report = assert_exact(model, image(2, 3, 21, 15), options=sft.Options(tile=(4, 6)), steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["whole", "tiled"]
    net = sft.compile(model, (2, 3, 21, 15), options=sft.Options(tile=(4, None)))
    for size in ((19, 15), (12, 30)):
        x = image(1, 3, *size)
        torch.testing.assert_close(net(x), model(x))


_PLANES: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda x: x.new_ones(x.shape[2:]).expand(x.shape[0], -1, -1),
    "columns": lambda x: torch.arange(x.shape[3], dtype=x.dtype).expand(x.shape[0], x.shape[2], -1),
    "mean": lambda x: x[:, 0].mean((-1, -2), keepdim=True).expand(-1, x.shape[2], x.shape[3]),
    "whole": lambda x: x[:, 0].flip(-1).roll(1, -2),
}


class _Stacked(nn.Module):
    """A stack of an untiled plane and one in strips."""

    def __init__(self, plane: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.plane, self.before, self.after = plane, nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y: Tensor = self.after(torch.stack([self.plane(x), x[:, 1]], 1))
        return y


@pytest.mark.parametrize("plane", _PLANES)
def test_planes_in_a_stack(plane: str) -> None:
    report = assert_exact(seeded(lambda: _Stacked(_PLANES[plane])), image(2, 3, 21, 15), options=sft.Options(tile=(4, 6)), steps=1)
    assert any(segment.mode == "tiled" for segment in report.plan.segments)


_CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_ones of a plane": lambda x: x.new_ones((1, 1, *x.shape[2:])),
    "new_full of rows": lambda x: x.new_full((x.shape[2], 1), 0.25),
    "zeros": lambda x: torch.zeros(x.shape[0], 1, *x.shape[2:], dtype=x.dtype, device=x.device),
    "full, of integers": lambda x: torch.full(x.shape[2:], 3),
    "follows the size": lambda x: x.new_full(x.shape, 1 / x.shape[2]),
    "truth": lambda x: x.new_ones(x.shape, dtype=torch.bool),
}


class _ConstantBranch(nn.Module):
    """A constant of the image's size, added and concatenated: the first hidden state of a recurrent layer of convolutions."""

    def __init__(self, constant: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.constant, self.before, self.after = constant, nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        hidden = self.constant(x)
        y: Tensor = self.after(torch.cat([torch.tanh(x + hidden), hidden.expand_as(x)], 1))
        return y


@pytest.mark.parametrize("constant", _CONSTANTS)
def test_a_constant_of_the_image_s_size_is_never_whole(constant: str) -> None:
    model = seeded(lambda: _ConstantBranch(_CONSTANTS[constant]))
    report = assert_exact(model, image(2, 3, 21, 15), options=sft.Options(tile=(4, 6)), steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled"] and not report.plan.notes
    net = sft.compile(model, (2, 3, 21, 15), options=sft.Options(tile=(4, None)))
    for size in ((19, 15), (12, 30)):
        x = image(1, 3, *size)
        torch.testing.assert_close(net(x), model(x))


class _TypedConstant(nn.Module):
    """A constant of a few numbers with the type and device of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y: Tensor = self.after(torch.tanh(x + x.new_full((4, 1, 1), 0.5) * x.new_ones(1) - x.new_empty(4, 1, 1).fill_(0.25)))
        return y


def test_a_constant_needs_no_more_of_an_image_than_its_type() -> None:
    """The image is not kept."""
    report = assert_exact(seeded(_TypedConstant), image(2, 3, 21, 15), options=sft.Options(tile=(4, 6)), steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["whole", "tiled"] and not report.plan.notes
    with torch.device("meta"):
        model = _TypedConstant()
    with pytest.raises(sft.BudgetError) as caught:
        sft.plan(model, (1, 3, 1024, 1024), budget=1024)
    whole_bytes = 4 * 4 * 1024 * 1024
    in_and_out_bytes = 4 * 1024 * 1024 * (3 + 2 + 2)  # with the output's gradient
    assert caught.value.needed_bytes < in_and_out_bytes + whole_bytes // 16


def test_the_embedding_s_gradient_is_in_its_own_type_and_place() -> None:
    model = _Embedded((4, 9, 1), 2, "add").half()
    net = sft.compile(model, (2, 3, 9, 7), options=sft.Options(tile=(2, 3)))
    net(image(2, 3, 9, 7).half()).sum().backward()
    assert model.embedding.grad is not None and model.embedding.grad.dtype == torch.float16
    assert model.embedding.grad.shape == (4, 9, 1) and bool((model.embedding.grad != 0).any(0).all())


class _ShrunkToOnePixel(nn.Module):
    """A gate from an image of a single pixel that is broadcast over the image again (GhostNetV2's attention on small images)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate = nn.Conv2d(3, 4, 3, stride=4, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.after = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        gate = torch.sigmoid(self.norm(self.gate(F.avg_pool2d(y, 2, 2))))
        out: Tensor = self.after(y[:, :4] * F.interpolate(gate, size=y.shape[-2:]))
        return out


@pytest.mark.parametrize("size", [(11, 10), (11, 21), (24, 21)], ids=str)
def test_an_image_of_a_single_pixel_is_spread_again(size: tuple[int, int]) -> None:
    assert_exact(seeded(_ShrunkToOnePixel), image(2, 3, *size), options=sft.Options(tile=(4, None)))
    assert_exact(seeded(_ShrunkToOnePixel), image(2, 3, *size), options=sft.Options(tile=(4, 8)), steps=1)
