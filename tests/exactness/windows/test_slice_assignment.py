"""Writes into rows, columns and slices of an image, and joins along an axis."""

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

_Function = Callable[[Tensor], Tensor]
_CONVOLUTIONS: tuple[Callable[..., nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Between(nn.Module):
    def __init__(self, function: _Function, *, axes: int = 2) -> None:
        super().__init__()
        convolution = _CONVOLUTIONS[axes - 1]
        self.before, self.function, self.after = convolution(3, 4, 3, padding=1), function, convolution(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.function(self.before(x).tanh()))
        return y


def _written(write: Callable[[Tensor, Tensor], object]) -> _Function:
    """A function that writes into a copy of the image, and adds the image."""

    def function(x: Tensor) -> Tensor:
        out = x * 1.5
        write(out, x)
        return out + x

    return function


def _set(index: tuple[slice, ...], make: Callable[[Tensor], Tensor | float]) -> _Function:
    def write(out: Tensor, x: Tensor) -> None:
        out[index] = make(x)

    return _written(write)


def _temporal_shift(x: Tensor) -> Tensor:
    """A quarter of the channels moves up a row, a quarter down, the rest stays (Lin et al., 2019)."""
    out = torch.zeros_like(x)
    out[:, :1, :-1] = x[:, :1, 1:]
    out[:, 1:2, 1:] = x[:, 1:2, :-1]
    out[:, 2:] = x[:, 2:]
    return out


def _bordered(x: Tensor) -> Tensor:
    out = x.new_full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), 0.5)
    out[:, :, 2:-1] = x
    return out


_ALL = slice(None)
_FUNCTIONS: dict[str, _Function] = {
    "rows": _set((_ALL, _ALL, slice(2, 5)), lambda x: x[:, :, :3] * 2),
    "columns": _set((_ALL, _ALL, _ALL, slice(1, 4)), lambda x: x[..., 3:6].sin()),
    "border rows to a number": _written(lambda out, x: (out[:, :, :1].fill_(0.0), out[:, :, -1:].fill_(1.0))),
    "border columns scaled": _written(lambda out, x: out[..., -2:].mul_(0.5)),
    "inner rows and columns": _set((_ALL, _ALL, slice(1, -1), slice(2, -2)), lambda x: x[:, :, 1:-1, 2:-2] * x[:, :, 2:, 2:-2]),
    "channels and rows": _set((_ALL, slice(1, 3), slice(2, None)), lambda x: x[:, 2:, 2:]),
    "up to a row that follows the size": lambda x: _set((_ALL, _ALL, slice(0, x.shape[2] // 2)), lambda y: y[:, :, : x.shape[2] // 2] * 2)(
        x
    ),
    "channels last": lambda x: _set((_ALL, slice(3, 6)), lambda y: y[:, :3])(x.movedim(1, -1)).movedim(-1, 1),
    "temporal shift": _temporal_shift,
    "into a larger constant": _bordered,
    "joined to itself": lambda x: torch.cat([x, x.sin()], 2),
    "joined columns": lambda x: torch.cat([x[..., :3].cos(), x, x[..., -1:]], 3),
    "joined to rows of zeros": lambda x: torch.cat([x, x.new_zeros(*x.shape[:2], 2, x.shape[3])], 2),
    "joined between ones": lambda x: torch.cat([torch.ones_like(x)[:, :, :1], x, x.new_ones(*x.shape[:2], 3, x.shape[3])], 2),
    "halves exchanged": lambda x: torch.cat([x[:, :, 4:], x[:, :, :4]], 2),
    "joined, channels last": lambda x: torch.cat([x.movedim(1, -1), x.movedim(1, -1) * 2], 1).movedim(-1, 1),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_slices_are_written_in_strips(name: str) -> None:
    model = seeded(lambda: _Between(_FUNCTIONS[name]))
    assert_streams(model, (2, 3, 24, 20))
    assert_exact_in_strips(model, (2, 3, 13, 10), sft.Options(tile=(4, 3), state_every=2), steps=1)


@pytest.mark.parametrize(
    "name", ["border rows to a number", "up to a row that follows the size", "into a larger constant", "halves exchanged"]
)
def test_other_sizes_than_the_captured_one(name: str) -> None:
    model = seeded(lambda: _Between(_FUNCTIONS[name]))
    net = sft.compile(model, (None, 3, None, None), options=sft.Options(tile=(5, None)))
    for shape in ((1, 3, 13, 10), (2, 3, 17, 8)):
        x = image(*shape)
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)


def test_volumes_and_signals() -> None:
    shift = seeded(lambda: _Between(_temporal_shift, axes=3))
    assert_streams(shift, (1, 3, 12, 10, 8))
    assert_exact_in_strips(shift, (2, 3, 6, 5, 4), sft.Options(tile=(2, 3)), steps=1)
    slices = seeded(lambda: _Between(_set((_ALL, _ALL, _ALL, _ALL, slice(1, 3)), lambda x: x[..., :2] * 2), axes=3))
    assert_exact_in_strips(slices, (1, 3, 6, 5, 4), sft.Options(tile=(2, 3)), steps=1)
    signal = seeded(lambda: _Between(lambda x: torch.cat([x[:, :, -3:], x, x[:, :, :3]], 2), axes=1))
    assert_exact_in_strips(signal, (2, 3, 17), sft.Options(tile=(4, None)), steps=1)


def test_nan_and_infinity_stay_where_they_are() -> None:
    """The padding around the written slice is masked by selection, not by a product with zero."""
    model = _Between(_FUNCTIONS["rows"]).double()
    model.before = nn.Identity()
    model.after = nn.Identity()
    x = image(1, 4, 13, 10)
    x[:, :, 7, 3], x[:, :, 1, 2] = torch.nan, torch.inf
    net = sft.compile(model, x, options=sft.Options(tile=(3, None)))
    torch.testing.assert_close(net(x), model(x), rtol=0, atol=0, equal_nan=True)


_SCATTERS: dict[str, _Function] = {
    "a row": _written(lambda out, x: out[:, :, -1, :].copy_(x[:, :, 1, :])),
    "some of a row": _written(lambda out, x: out[:, :, 1, 2:5].copy_(x[:, :, 0, 1:4])),
    "a row of a part": _written(lambda out, x: out[:, 1:3][:, :, 2].mul_(2)),
    "a diagonal": _written(lambda out, x: out[:, :, :5, :5].diagonal(0, 2, 3).mul_(x[:, :, 1, :5])),
}


@pytest.mark.parametrize("name", _SCATTERS)
def test_an_assignment_to_a_view_takes_the_bytes_of_the_view(name: str) -> None:
    """PyTorch's ``slice_scatter``, ``select_scatter`` and ``diagonal_scatter`` copy the storage of their operand's base."""
    model, x = seeded(lambda: _Between(_SCATTERS[name])), image(2, 3, 13, 10)
    assert_exact(model, x, to_the_byte=True, steps=1)
    assert_exact(model, x, options=sft.Options(tile=(4, None)), steps=1)


@at_most(8)
@given(data=st.data())
def test_any_slice_and_tiling(data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from([1, 2, 2, 3]))
    extents = tuple(data.draw(st.integers(3, 10 if axis < 2 else 4)) for axis in range(axes))
    axis = data.draw(st.integers(0, axes - 1))
    start = data.draw(st.integers(0, extents[axis] - 1))
    stop = data.draw(st.integers(start + 1, extents[axis]))
    index = (*[_ALL] * (2 + axis), slice(start, stop))
    model = seeded(lambda: _Between(_set(index, lambda x: (x * 2)[index]), axes=axes))
    assert_exact(model, image(data.draw(st.integers(1, 2)), 3, *extents), options=data.draw(tiled_options(extents)), steps=1)
