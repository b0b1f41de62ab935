"""Layout tracking: symbolic permutations and reshapes match those of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from sft.analysis.ir.axes import Axes
from sft.analysis.passes.layout import DimLayout, merge_channels, reshape_layout
from sft.lower.custom_ops.layouts import rearrange, restore_dims
from tests.helpers.exactness import assert_exact

_AXES = Axes(2)


@st.composite
def _reshapes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape with the same number of elements: dimensions split, merged, and units inserted or dropped."""
    pieces: list[int] = []
    for extent in shape:
        divisor = draw(st.sampled_from([d for d in range(1, extent + 1) if extent % d == 0]))
        pieces += [divisor, extent // divisor] if draw(st.booleans()) else [extent]
    sizes: list[int] = []
    for piece in pieces:
        if sizes and draw(st.integers(0, 2)) == 0:
            sizes[-1] *= piece
        elif piece != 1 or draw(st.booleans()):
            sizes.append(piece)
        if draw(st.integers(0, 5)) == 0:
            sizes.append(1)
    return tuple(sizes) if math.prod(sizes) == math.prod(shape) else shape


@given(data=st.data())
def test_tracked_layout_matches_the_tensor(data: st.DataObject) -> None:
    """After any permutations and reshapes the layout gives the position of every element in the image."""
    shape = (
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from((1, 4, 6, 12))),
        *data.draw(st.tuples(st.integers(2, 5), st.integers(2, 5))),
    )
    image = torch.arange(math.prod(shape)).view(shape)
    value, layout = image, DimLayout.plain(4)
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(value.dim())))
            value, layout = value.permute(order), layout.permuted(order)
        else:
            wanted = data.draw(_reshapes(tuple(value.shape)))
            tracked = reshape_layout(layout, image.shape, wanted, _AXES)
            if tracked is None:
                continue  # a split of the image's axes, or of its batch: not tracked
            value, layout = value.reshape(wanted), tracked.layout
            if tracked.rearrangement is not None:
                change = tracked.rearrangement
                image = rearrange(image, change.split, change.order, change.shape, 2)
        whole = merge_channels(layout, image.shape, _AXES)
        if whole is not None and whole.rearrangement is not None:
            change = whole.rearrangement
            image, layout = rearrange(image, change.split, change.order, change.shape, 2), whole.layout
        order = [dim for group in layout.groups for dim in group]
        order += [dim for dim in range(image.dim()) if dim not in order]
        assert torch.equal(restore_dims(image, order, value.shape), value), f"{layout} of {tuple(image.shape)}"
        assert layout.shape(image.shape) == tuple(value.shape)


class _Focus(nn.Module):
    """Every second pixel of every second row, as channels; then heads of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(12, 8, 3, padding=1)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, :, ::2, ::2], x[:, :, 1::2, ::2], x[:, :, ::2, 1::2], x[:, :, 1::2, 1::2]], 1)
        batch, _, height, width = x.shape
        heads = self.mix(x).view(batch, 2, 4, height, width)
        weights = heads.softmax(1)
        mixed: Tensor = (heads * weights).sum(1)
        normed: Tensor = self.norm(mixed.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


@pytest.mark.parametrize("tile", [(6, None), (3, 9), (1, None)])
def test_heads_of_channels_stream(tile: tuple[int, int | None]) -> None:
    torch.manual_seed(0)
    report = assert_exact(_Focus().double(), torch.randn(2, 3, 26, 22, dtype=torch.float64), options=sft.Options(tile=tile))
    assert not report.plan.notes, "nothing runs whole"


class _Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2)
        return x + (tokens @ (tokens.transpose(1, 2) @ tokens).softmax(-1)).view(x.shape)


def test_attention_runs_untiled_and_streaming_resumes_after_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), _Attention(), nn.Conv2d(4, 2, 3)).double()
    report = assert_exact(model, torch.randn(1, 3, 25, 27, dtype=torch.float64), options=sft.Options(tile=(4, None)))
    assert [segment.mode for segment in report.plan.segments] == ["tiled", "whole", "tiled"]
    assert any("1: matmul" in note for note in report.plan.notes)
    assert "On full tensors" in report.plan.explain()
    layers = sft.check(model, (1, 3, 25, 27))
    assert layers.ok and any("1: matmul" in reason and "pooled" in reason for reason in layers.whole_reasons)
    assert "on full tensors" in str(layers)


def test_check_reports_uncompilable_models_without_raising() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.poisson(x.abs())

    report = sft.check(nn.Sequential(nn.Conv2d(3, 4, 3), Noisy()), (1, 3, 32, 32))
    assert not report.ok and "1: poisson" in report.problems[0]
    assert not sft.check(nn.Conv2d(3, 4, 3), (1, 5, 32, 32)).ok


class _PerSample(nn.Module):
    """A parameter with an entry for each sample of the batch, and a kernel with as many outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]).view(2, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.conv(x) * self.scale
        return scaled


@pytest.mark.parametrize("batch_tile", [None, 1])
def test_a_parameter_for_each_sample(batch_tile: int | None) -> None:
    torch.manual_seed(0)
    options = sft.Options(tile=(4, None), batch_tile=batch_tile)
    report = assert_exact(_PerSample().double(), torch.randn(2, 3, 14, 9, dtype=torch.float64), options=options)
    assert "each sample" in report.plan.notes[0]


def test_a_result_in_another_order() -> None:
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            return y.permute(0, 2, 3, 1)

    report = assert_exact(Last().double(), torch.randn(2, 3, 14, 9, dtype=torch.float64), options=sft.Options(tile=(4, None)))
    assert "returns an image in another order" in report.plan.notes[0]
    assert report.plan.segments[0].mode == "tiled"


class _Merge(nn.Module):
    """Images stacked along a new first axis and summed, and constants made in between (as in feature pyramids and normalisations)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.plain = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([self.a(x), self.b(x), self.a(x).tanh()], dim=0).sum(dim=0)
        y = y * self.plain.to(y.dtype) + torch.tensor([0.5, -1.0, 2.0, 1.0], dtype=y.dtype).view(4, 1, 1)
        z: Tensor = y * torch.tensor(0.25, dtype=y.dtype)
        return z


def test_stacked_in_front_of_the_batch_and_constants() -> None:
    report = assert_exact(_Merge(), torch.randn(2, 3, 12, 10), options=sft.Options(tile=(5, 7)))
    assert not report.plan.notes, report.plan.notes


class _Assigns(nn.Module):
    """Slices of an image overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        y[:, 0] = y[:, 1] * 2
        y[:, 2:] = 1.5
        y[:, :, 0] += 1
        return y


def test_parts_overwritten_in_place() -> None:
    assert_exact(_Assigns(), torch.randn(2, 3, 12, 10), options=sft.Options(tile=(5, None)))


class _BlockTransform(nn.Module):
    """A linear map of blocks of 8 x 8 pixels, with the index of the block as channel."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        y = x.reshape(batch, channels, height // 8, 8, width // 8, 8).permute(0, 2, 4, 1, 3, 5)
        y = self.map(self.map(y).transpose(-1, -2)).transpose(-1, -2).reshape(-1, channels, 64)
        z: Tensor = y.reshape(batch, height // 8, width // 8, channels, -1).permute(0, 3, 4, 1, 2).flatten(1, 2)
        return z


def test_as_many_channels_as_the_image_has_blocks() -> None:
    """Their number is a symbol, which must not become an integer."""
    report = assert_exact(_BlockTransform(), torch.randn(2, 3, 48, 32))
    assert any("linear" in note for note in report.plan.notes)


class _JoinsGroups(nn.Module):
    """Channels in groups, joined along either of their dimensions."""

    def __init__(self, num_groups: int, dim: int, *, transposed: bool) -> None:
        super().__init__()
        self.num_groups, self.dim, self.transposed = num_groups, dim, transposed
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(x.shape[0], self.num_groups, x.shape[1] // self.num_groups, *x.shape[2:])
        if self.transposed:
            y = y.transpose(1, 2)
        return torch.cat([y * self.scale, y.exp()], self.dim).flatten(1, 2)


@pytest.mark.parametrize("shape", [(2, 6, 9), (2, 6, 6, 5), (2, 6, 6, 4, 4)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim", [1, 2, -1])
@pytest.mark.parametrize("num_groups", [1, 2, 6])
def test_joined_along_one_of_several_dimensions_of_channels(num_groups: int, dim: int, transposed: bool, shape: tuple[int, ...]) -> None:
    """Regression: they were joined along the first one, with an error of sizes, or another shape where the next operator broadcasts."""
    model = _JoinsGroups(num_groups, dim if dim > 0 else 1 - len(shape), transposed=transposed)
    assert_exact(model, torch.randn(shape), options=sft.Options(tile=(4, None)), steps=1)
    assert_exact(model, torch.randn(shape), options=sft.Options(strategy="none"), steps=1)


def test_a_token_joined_to_a_list_of_pixels_is_no_image() -> None:
    """As in VOLO (Yuan et al., 2021): an untiled result with channels last looks like an image of other axes."""

    class Classed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.places = nn.Conv2d(3, 6, 3, padding=1), nn.Parameter(torch.rand(1, 14, 10, 6))
            self.token, self.norm, self.head = nn.Parameter(torch.rand(1, 1, 6)), nn.LayerNorm(6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).permute(0, 2, 3, 1).roll(1, 1) + self.places
            tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), y.reshape(x.shape[0], -1, 6)], 1)
            scores: Tensor = self.head(self.norm(tokens)[:, 0]) + tokens.mean(1)[:, :2]
            return scores

    for batch in (1, 2):
        assert_exact(Classed(), torch.rand(batch, 3, 14, 10), options=sft.Options(tile=(4, None)), steps=1)


_BORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded": lambda t: F.pad(t, (0, 0, 1, 2, 3, 0)),
    "cropped by a padding": lambda t: F.pad(t, (0, 0, -1, 2, 3, -2)),
    "reflected": lambda t: F.pad(t.permute(0, 3, 2, 1), (1, 1, 2, 2), mode="reflect").permute(0, 3, 2, 1),
    "cropped": lambda t: t[:, 1:, 2:-1],
    "every other row": lambda t: t[:, ::2, 1::3],
}


class _Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.first, self.norm, self.last = function, nn.Conv2d(3, 6, 3, padding=1), nn.LayerNorm(6), nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.function(self.norm(self.first(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2))
        return output


@pytest.mark.parametrize("tile", [(5, None), (4, 3)])
@pytest.mark.parametrize("name", _BORDERS)
def test_borders_of_images_with_channels_last(name: str, tile: tuple[int, int | None]) -> None:
    model = _Between(_BORDERS[name])
    assert not sft.check(model, (2, 3, 18, 14)).whole_reasons
    assert_exact(model, torch.rand(2, 3, 18, 14), options=sft.Options(tile=tile), steps=1)


@pytest.mark.parametrize("size", [(18, 14), (16, 12)])
def test_windows_of_an_image_padded_to_a_multiple(size: tuple[int, int]) -> None:
    """As the Swin Transformer cuts windows (Liu et al., ICCV 2021)."""

    def function(t: Tensor) -> Tensor:
        batch, height, width, channels = t.shape
        t = F.pad(t, (0, 0, 0, -width % 4, 0, -height % 4))
        rows, columns = t.shape[1] // 4, t.shape[2] // 4
        windows = t.view(batch, rows, 4, columns, 4, channels).permute(0, 1, 3, 2, 4, 5).contiguous().softmax(-1)
        t = windows.permute(0, 1, 3, 2, 4, 5).contiguous().view(batch, rows * 4, columns * 4, channels)
        return t[:, :height, :width].contiguous()

    model = _Between(function)
    assert not sft.check(model, (2, 3, *size)).whole_reasons
    assert_exact(model, torch.rand(2, 3, *size), options=sft.Options(tile=(5, None)), steps=1)
