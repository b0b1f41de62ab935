"""Reductions over some axes of the image: rows, columns or slices, which broadcast to the image again or are outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.operator_cases import AroundFunction, assert_exact_in_strips, assert_streams, cases
from tests.helpers.plans import least_budget

_Function = Callable[[Tensor], Tensor]


def _coordinate_attention(x: Tensor) -> Tensor:
    """Gates for each row and each column (Hou et al., 2021)."""
    height, width = x.shape[2:]
    rows, columns = F.adaptive_avg_pool2d(x, (height, 1)), F.adaptive_avg_pool2d(x, (1, width))
    return x * rows.sigmoid() * columns.sigmoid()


def _channels_last(function: _Function) -> _Function:
    return lambda x: function(x.movedim(1, -1)).movedim(-1, 1)


_PLANE: dict[str, _Function] = {
    "mean of rows": lambda x: x - x.mean(3, keepdim=True),
    "mean of columns": lambda x: x - x.mean(2, keepdim=True),
    "sum, without its dimension": lambda x: x + x.sum(2).unsqueeze(2) / 9,
    "channels as well": lambda x: x * x.mean((1, 3), keepdim=True).sigmoid(),
    "the batch as well": lambda x: x * x.mean((0, 2), keepdim=True).sigmoid(),
    "largest of a row": lambda x: x - x.amax(3, keepdim=True),
    "smallest of a column": lambda x: x * x.amin(2, keepdim=True).tanh(),
    "channels last": _channels_last(lambda x: x * x.mean(2, keepdim=True)),
    "channels last, largest": _channels_last(lambda x: x + x.amax(1, keepdim=True)),
    "pooled to a row": lambda x: x + F.avg_pool2d(x, (x.shape[2], 1)),
    "pooled adaptively to a row": lambda x: x + F.adaptive_avg_pool2d(x, (1, x.shape[3])),
    "strip pooling": lambda x: x * (x.mean(3, keepdim=True) + x.mean(2, keepdim=True)).sigmoid(),
    "of a rounded image, with ties": lambda x: x * x.round().amax(3, keepdim=True),
}
#: Poolings with a window for each row stream as poolings do; the resulting column is read as a whole.
_COLUMNS: dict[str, _Function] = {
    "pooled to a column": lambda x: x + F.avg_pool2d(x, (1, x.shape[3])),
    "coordinate attention": _coordinate_attention,
}
_VOLUME: dict[str, _Function] = {
    "mean over the depth": lambda x: x * x.mean(2, keepdim=True).sigmoid(),
    "sum over a plane": lambda x: x + x.sum((3, 4), keepdim=True) / 30,
    "largest over depth and width": lambda x: x - x.amax((2, 4), keepdim=True),
    "smallest over the height": lambda x: x - x.amin(3, keepdim=True),
}


@pytest.mark.parametrize("name", _PLANE)
def test_planes_stream(name: str) -> None:
    model = seeded(lambda: AroundFunction(_PLANE[name], axes=2))
    assert_streams(model, (2, 3, 24, 20))
    assert_exact_in_strips(model, (2, 3, 13, 10), sft.Options(tile=(4, 3), state_every=2), steps=1)


@pytest.mark.parametrize("name", _COLUMNS)
def test_rows_that_are_pooled_alone_make_a_column(name: str) -> None:
    model = seeded(lambda: AroundFunction(_COLUMNS[name], axes=2))
    assert_exact_in_strips(model, (2, 3, 13, 10), sft.Options(tile=(4, 3), state_every=2), steps=1)


@pytest.mark.parametrize("name", _VOLUME)
def test_volumes_stream(name: str) -> None:
    model = seeded(lambda: AroundFunction(_VOLUME[name], axes=3))
    assert_streams(model, (1, 3, 12, 10, 8))
    assert_exact_in_strips(model, (2, 3, 7, 6, 4), sft.Options(tile=(3, 4)), steps=1)


class _Projection(nn.Module):
    """Projection of a volume to a plane, followed by two-dimensional layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv3d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.before(x).tanh()
        return self.after(y.amax(2)), y.mean(4)


def test_results_that_leave_the_network() -> None:
    assert_exact(seeded(_Projection), image(2, 1, 9, 8, 6), options=sft.Options(tile=(2, 3)), steps=1)


def test_sizes_other_than_the_captured_one() -> None:
    model = seeded(lambda: AroundFunction(_coordinate_attention, axes=2))
    net = sft.compile(model, (None, 3, None, None), options=sft.Options(tile=(5, None)))
    for shape in ((1, 3, 13, 10), (2, 3, 17, 8)):
        x = image(*shape)
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)


def test_the_reduced_volume_is_not_kept() -> None:
    """The smallest plan needs a fraction of the projected volume's bytes, in training as well."""
    assert least_budget(_Projection(), (1, 1, 128, 128, 128)) < 4 * 128**3 * 4


@at_most(6)
@given(data=st.data())
def test_any_size_and_tiling(data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from((2, 2, 3)))
    shape, options = data.draw(cases(axes=axes))
    name = data.draw(st.sampled_from(sorted(_VOLUME if axes == 3 else _PLANE)))
    function = (_VOLUME if axes == 3 else _PLANE)[name]
    assert_exact(seeded(lambda: AroundFunction(function, axes=axes)), torch.randn(shape, dtype=torch.float64), options=options, steps=1)
