"""Circular padding: wrapped rows are a global value, wrapped columns are inside of a strip; exact at every tiling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import chain, image, seeded
from tests.helpers.operator_cases import AroundFunction, assert_streams
from tests.helpers.plans import assert_tiled
from tests.helpers.tilings import tiled_options

_CONVOLUTIONS: tuple[Callable[..., nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Padded(nn.Module):
    """A circular padding between layers, with a cropped skip."""

    def __init__(self, amounts: tuple[int, ...]) -> None:
        super().__init__()
        axes = len(amounts) // 2
        self.amounts, self.axes = amounts, axes
        self.before, self.after = (_CONVOLUTIONS[axes - 1](*channels, 3, padding=1) for channels in ((3, 4), (4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(F.pad(self.before(x), self.amounts, mode="circular").tanh())
        return y


@st.composite
def _padded(draw: st.DrawFn) -> tuple[nn.Module, Tensor, sft.Options]:
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    extents = tuple(draw(st.integers(1, 11 if axis < 2 else 4)) for axis in range(axes))
    amounts = tuple(draw(st.integers(0, min(4, extents[axis]))) for axis in reversed(range(axes)) for _ in range(2))
    note(f"{extents} padded by {amounts}")
    model = seeded(lambda: _Padded(amounts))
    return model, image(draw(st.integers(1, 3)), 3, *extents), draw(tiled_options(extents))


@at_most(6)
@given(case=_padded())
def test_any_circular_padding(case: tuple[nn.Module, Tensor, sft.Options]) -> None:
    model, x, options = case
    assert_exact(model, x, options=options, steps=1)


def test_convolutions_that_wrap_round() -> None:
    model = seeded(
        lambda: chain(
            nn.Conv2d(3, 4, 5, padding=2, padding_mode="circular"),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2, padding=2, dilation=2, padding_mode="circular"),
            nn.Conv2d(4, 2, 3, padding="same", padding_mode="circular", groups=2),
        )
    )
    x = image(2, 3, 13, 9)
    report = assert_exact(model, x, options=sft.Options(tile=(3, 4), state_every=2), steps=1)
    assert_tiled(report, "conv", "border")
    assert all(segment.mode == "tiled" for segment in report.plan.segments)


def test_columns_alone_need_no_barrier() -> None:
    """On a cylinder (a panorama, a globe's longitudes) all layers are in one sweep, in full width."""
    model = seeded(lambda: chain(*(nn.Conv2d(c, 4, 3, padding=(0, 1), padding_mode="circular") for c in (3, 4, 4))))
    report = assert_exact(model, image(1, 3, 20, 9), options=sft.Options(tile=(4, None)), steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled"]


def test_a_strip_of_wrapped_rows_only() -> None:
    """Strips of one row, of an image of three rows that all wrap around, some twice."""
    model = seeded(lambda: AroundFunction(lambda y: F.pad(y, (1, 0, 3, 2), mode="circular")[:, :, 3:-2, 1:], axes=2))
    assert_exact(model, image(2, 3, 3, 5), options=sft.Options(tile=(1, 2), state_every=2), steps=1)


def test_in_single_precision_the_rows_are_the_same() -> None:
    model, x = nn.CircularPad2d((1, 2, 2, 1)), image(1, 3, 9, 7).float()
    net = sft.compile(model, (1, 3, 9, 7), options=sft.Options(tile=(2, None)))
    assert bool((net(x) == model(x)).all())


_ROLLS: dict[str, Callable[[Tensor], Tensor]] = {
    "down": lambda x: x.roll(2, 2),
    "up": lambda x: x.roll(-3, 2),
    "along both axes": lambda x: x.roll((-4, 1), (2, 3)),
    "to the left, channels last": lambda x: x.movedim(1, -1).roll((-2, 2), (2, 1)).movedim(-1, 1),
    "channels as well": lambda x: x.roll((1, 3), (1, 2)),
    "twice along one axis": lambda x: x.roll((1, -3, 1), (2, 3, 2)),
    "by nothing": lambda x: x.roll((0, 2), (2, 3)),
    "further than the image": lambda x: x.roll((15, -11), (2, 3)),
}


@pytest.mark.parametrize("name", _ROLLS)
def test_rolls_are_circular_paddings(name: str) -> None:
    model = seeded(lambda: AroundFunction(_ROLLS[name], axes=2))
    assert_exact(model, image(2, 3, 13, 10), options=sft.Options(tile=(4, 3), state_every=2), steps=1)
    assert_streams(model, (2, 3, 24, 20))


def test_a_roll_of_a_smaller_image_than_the_captured_one() -> None:
    """The shift exceeds the number of rows of the second image."""
    model = seeded(lambda: AroundFunction(lambda x: x.roll((6, -6), (2, 3)), axes=2))
    net = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(3, None)))
    for size in ((20, 18), (4, 5), (9, 7)):
        x = image(1, 3, *size)
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)
