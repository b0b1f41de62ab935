"""Rows that are repeated, interleaved, and written with a step: manual pixel shuffles, wavelets, unpooling with zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.operator_cases import assert_exact_in_strips, assert_streams
from tests.helpers.tilings import tiled_options

_CONVOLUTIONS: tuple[Callable[..., nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], *, axes: int = 2, channels: int = 4) -> None:
        super().__init__()
        convolution = _CONVOLUTIONS[axes - 1]
        self.before, self.function, self.after = convolution(3, 4, 3, padding=1), function, convolution(channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.function(self.before(x).tanh()))
        return y


def _wavelets(x: Tensor) -> Tensor:
    """Haar wavelets and their inverse, which writes each of four images into every other row and column (Liu et al., 2018)."""
    even, odd = x[:, :, 0::2] / 2, x[:, :, 1::2] / 2
    a, b, c, d = even[..., 0::2], odd[..., 0::2], even[..., 1::2], odd[..., 1::2]
    low, vertical, horizontal, diagonal = a + b + c + d, (c + d - a - b).tanh(), b + d - a - c, a + d - b - c
    out = torch.zeros(x.shape[0], x.shape[1], 2 * low.shape[2], 2 * low.shape[3], dtype=x.dtype)
    out[:, :, 0::2, 0::2] = (low - vertical - horizontal + diagonal) / 2
    out[:, :, 1::2, 0::2] = (low - vertical + horizontal - diagonal) / 2
    out[:, :, 0::2, 1::2] = (low + vertical - horizontal - diagonal) / 2
    out[:, :, 1::2, 1::2] = (low + vertical + horizontal + diagonal) / 2
    return out


def _among_zeros(x: Tensor) -> Tensor:
    out = x.new_zeros(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])
    out[:, :, ::2, ::2] = x
    return out


def _written(x: Tensor, start: int, step: int) -> Tensor:
    out = x * 1.5
    out[:, :, start::step] = x[:, :, start::step].sin()
    return out + x


def _scaled_columns(x: Tensor) -> Tensor:
    out = x * 1.5
    out[..., 1::2] *= x[..., ::2][..., : x.shape[-1] // 2]
    return out


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns of two images": lambda x: torch.stack((x, -x), -1).flatten(3),
    "rows of two images": lambda x: torch.stack((x, 2 * x), -2).flatten(2, 3),
    "channels last, stacked": lambda x: torch.stack((x.movedim(1, -1), x.movedim(1, -1) + 1), 3).flatten(2, 3).movedim(-1, 1),
    "repeated rows and columns": lambda x: x.repeat_interleave(2, 2).repeat_interleave(3, -1),
    "repeated channels": lambda x: x.repeat_interleave(2, 1)[:, 2:6],
    "wavelets": _wavelets,
    "among zeros": _among_zeros,
    "every third row": lambda x: _written(x, 2, 3),
    "columns scaled": _scaled_columns,
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_interleaved_rows_stream(name: str) -> None:
    model = seeded(lambda: _Between(_FUNCTIONS[name]))
    assert_streams(model, (2, 3, 24, 20))
    assert_exact_in_strips(model, (2, 3, 12, 10), sft.Options(tile=(5, 3), state_every=2), steps=1)


@pytest.mark.parametrize("name", ["wavelets", "every third row", "repeated rows and columns"])
def test_other_sizes_than_the_captured_one(name: str) -> None:
    model = seeded(lambda: _Between(_FUNCTIONS[name]))
    net = sft.compile(model, (None, 3, None, None), options=sft.Options(tile=(5, None)))
    for shape in ((1, 3, 14, 10), (2, 3, 18, 8)):
        x = image(*shape)
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)


def test_the_other_rows_are_selected() -> None:
    """NaN in overwritten rows does not reach the written ones, and vice versa."""
    model = nn.Sequential(nn.Identity(), _Written())
    x = image(1, 4, 13, 10)
    x[:, :, 5], x[:, :, 6] = torch.nan, torch.inf
    net = sft.compile(model, x, options=sft.Options(tile=(3, None)))
    torch.testing.assert_close(net(x), model(x), rtol=0, atol=0, equal_nan=True)


class _Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = x * 1
        out[:, :, 1::2] = 0.5
        out[:, :, 2::4] = -x[:, :, ::4][:, :, : out[:, :, 2::4].shape[2]]
        return out


@at_most(10)
@given(data=st.data())
def test_any_step_and_tiling(data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from([1, 2, 2, 3]))
    extents = tuple(data.draw(st.integers(3, 11 if axis < 2 else 4)) for axis in range(axes))
    axis = data.draw(st.integers(0, axes - 1))
    start, step = data.draw(st.integers(0, extents[axis] - 1)), data.draw(st.integers(2, 4))
    stop, is_constant = data.draw(st.integers(start + 1, extents[axis])), data.draw(st.booleans())
    index = (*[slice(None)] * (2 + axis), slice(start, stop, step))

    def write(x: Tensor) -> Tensor:
        out = torch.full_like(x, 0.5) if is_constant else x * 1.5
        out[index] = (2 * x)[index]
        return out.repeat_interleave(2, 2 + axis)

    model = seeded(lambda: _Between(write, axes=axes))
    assert_exact(model, image(data.draw(st.integers(1, 2)), 3, *extents), options=data.draw(tiled_options(extents)), steps=1)
