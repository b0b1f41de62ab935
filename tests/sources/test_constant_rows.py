"""Constant rows that sources, masks and views state, and constant strips that are neither read nor run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.common.interval import Interval
from sft.sources import ArrayImage, ArraySource, Cached, Cropped, LabelSource, Normalized
from sft.sources.source import image_equal_rows
from sft.tissue import Masked, Regions, TissueMask
from sft.wsi.data.transforms import ColourAffine, Recoloured, Turned
from tests.helpers.constant_strips import banded_image
from tests.helpers.exactness import relative_error

pytestmark = pytest.mark.usefixtures("without_proposals")

_ROWS, _COLUMNS = 96, 14


def _net(source: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1, stride=2)).double()
    return sft.compile(model, [source], options=sft.Options(tile=(4, None), **options))


class _Mute:
    """A source without information about its rows."""

    dtype = torch.float64

    def __init__(self, image: Tensor) -> None:
        self._source = ArraySource(image, layout="NCHW", dtype=torch.float64)
        self.shape = self._source.shape

    def rows(self, interval: Interval, out: Tensor) -> None:
        self._source.rows(interval, out)


@pytest.mark.parametrize("states", [{}, {"state_every": 3}, {"state_slots": 2}])
def test_strips_that_are_left_out_are_not_read(states: dict[str, int]) -> None:
    """Numbers and gradients are those of the tensor; fewer rows are read, unless the backward sweep restores strips."""
    image = banded_image((1, 2, _ROWS, _COLUMNS), (20, 80))
    source = ArraySource(image, layout="NCHW", dtype=torch.float64)
    full, net = _net(source, **states), _net(source, skip_repeats=True, **states)
    gradients, sinks = [], [np.empty((1, 2, _ROWS, _COLUMNS)) for _ in range(2)]
    for each, sink in zip((full, net), sinks, strict=True):
        out = each(source, input_grad=sink)
        out.backward(torch.ones_like(out))
        gradients.append([out.detach(), torch.from_numpy(sink), *(p.grad for p in each.parameters())])
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert all(relative_error(ours, theirs) < 1e-12 for ours, theirs in zip(*gradients, strict=True))
    assert net.last_skipping.forward.num_skipped > 8
    assert net.last_skipping.backward.num_skipped > 8
    assert net.last_reading.forward.num_rows_read < full.last_reading.forward.num_rows_read == _ROWS
    turns = bool(states)
    assert (net.last_reading.backward.num_rows_read < full.last_reading.backward.num_rows_read) != turns


def test_a_source_without_constant_rows_runs_in_full() -> None:
    """Rows are not read for a comparison."""
    image = banded_image((1, 2, _ROWS, _COLUMNS), (20, 80))
    net = _net(_Mute(image), skip_repeats=True)
    net(_Mute(image))
    assert net.last_skipping.forward.num_skipped == 0


def test_a_wrong_answer_is_refused() -> None:
    """An answer with another number of rows."""

    class Wrong(_Mute):
        def repeated_rows(self, columns: Interval) -> Any:
            return np.ones(3, dtype=bool)

    source = Wrong(banded_image((1, 2, _ROWS, _COLUMNS), (20, 80)))
    with pytest.raises(sft.SourceError, match="shape \\(3,\\)"):
        _net(source, skip_repeats=True)(source)


@pytest.mark.parametrize("host", [{"output": "host"}, {"host_budget": "1GiB"}])
def test_strips_on_the_host(host: dict[str, Any]) -> None:
    """Outputs, cuts and their gradients on the host are compared and repeated there."""

    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 2, 1),
        ).double()

    x = banded_image((1, 2, 256, 24), (20, 236))
    options = {"tile": (4, None), **{key: value for key, value in host.items() if key == "host_budget"}}
    least = _least_budget(make(), x, options) if "host_budget" in host else 2**32
    eager = make()
    net: Any = sft.compile(make(), x, budget=least, output=host.get("output", "device"), options=sft.Options(**options, skip_repeats=True))
    placed = {name for segment in net.plan.segments for name in segment.streamed}
    assert bool(placed) == ("host_budget" in host)
    expected, output = eager(x), net(x)
    expected.backward(torch.ones_like(expected))
    output.backward(torch.ones_like(output))
    assert relative_error(output, expected) < 1e-10
    largest = max(float(p.grad.abs().max()) for p in eager.parameters() if p.grad is not None)
    for ours, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad, scale=largest) < 1e-10
    assert net.last_skipping.forward.num_skipped > 40
    assert net.last_skipping.backward.num_skipped > 40


def _least_budget(model: nn.Module, x: Tensor, options: dict[str, Any]) -> int:
    """The smallest budget with a plan, in which all streamable values are streamed."""
    with pytest.raises(sft.BudgetError) as caught:
        sft.plan(model, x.shape, budget=1000, options=sft.Options(**options, skip_repeats=True))
    return caught.value.needed_bytes


def _lines(pixels: Any, interval: Interval, *, columns: bool) -> Any:
    """Rows (columns) of pixels equal to their predecessor."""
    lines = pixels.swapaxes(0, 1) if columns else pixels
    lines = lines[:, interval.start : interval.stop]
    same = (lines[1:] == lines[:-1]).reshape(len(lines) - 1, -1).all(axis=1)
    return same


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.tuples(st.integers(3, 12), st.integers(3, 12)),
    quarters=st.integers(0, 3),
    mirrored=st.booleans(),
    is_mask=st.booleans(),
    columns=st.booleans(),
    data=st.data(),
)
def test_views_state_all_constant_rows_of_their_mask(
    seed: int, size: tuple[int, int], quarters: int, mirrored: bool, is_mask: bool, columns: bool, data: st.DataObject
) -> None:
    """Rows that a view states are constant, and all rows outside of its mask are stated, for crops, rotations, colour maps and caches."""
    rng, (height, width) = np.random.default_rng(seed), size
    pixels = rng.integers(0, 200, (height, width, 3), dtype=np.uint8)
    inside = np.zeros((height, width), bool)
    inside[rng.integers(height) :, rng.integers(width) :] = True
    inside[rng.integers(height) :] = False

    class Grid:
        def region(self, x: int, y: int, w: int, h: int) -> Any:
            return inside[y : y + h, x : x + w]

    mask = TissueMask(pixels=inside, width_px=width, height_px=height) if is_mask else Grid()
    image: Any = Masked(ArrayImage(pixels, layout="HWC"), mask, background=(255, 254, 253))
    left, top = int(rng.integers(width - 1)), int(rng.integers(height - 1))
    image = Cropped(image, x=left, y=top, w=width - left, h=height - top)
    image = Recoloured(Turned(image, quarters=quarters, mirrored=mirrored), density=ColourAffine.of(np.eye(3) * 0.9))
    image = Cached(image, host_budget_bytes="1MiB")
    seen = image.read(0, 0, image.width_px, image.height_px)
    across = image.height_px if columns else image.width_px
    first = data.draw(st.integers(0, across - 1))
    interval = Interval(first, data.draw(st.integers(first + 1, across)))
    claimed, true = image_equal_rows(image, interval, columns=columns)[1:], _lines(seen, interval, columns=columns)
    assert not (claimed & ~true).any()
    background = (
        seen
        == Recoloured(
            ArrayImage(np.full((1, 1, 3), (255, 254, 253), np.uint8), layout="HWC"), density=ColourAffine.of(np.eye(3) * 0.9)
        ).read(0, 0, 1, 1)
    ).all(-1)
    lines = (background.swapaxes(0, 1) if columns else background)[:, interval.start : interval.stop].all(axis=1)
    assert (claimed == lines[1:] & lines[:-1]).all()


def test_arrays_and_labels_are_compared_in_the_requested_columns() -> None:
    """In the requested columns, over all batch elements; an image without information states none."""
    pixels = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    pixels[:, 2, 1:4] = pixels[:, 1, 1:4]
    source = ArraySource(pixels, layout="NHWC")
    assert source.repeated_rows(Interval(1, 4)).tolist() == [False, False, True, False]
    assert source.repeated_rows(Interval(0, 4)).tolist() == [False] * 4
    pixels[1, 2, 2] += 1
    assert source.repeated_rows(Interval(1, 4)).tolist() == [False] * 4
    assert LabelSource(np.array([[1, 2], [1, 3], [1, 3]])).repeated_rows(Interval(0, 2)).tolist() == [False, False, True]
    half = ArraySource(torch.zeros(1, 3, 4, 5, dtype=torch.bfloat16), layout="NCHW")
    assert half.repeated_rows(Interval(0, 5)).tolist() == [False, True, True, True]
    plain = Normalized(ArrayImage(np.zeros((4, 5, 3), np.uint8), layout="HWC"), mean=(0, 0, 0), std=(1, 1, 1))
    assert not plain.repeated_rows(Interval(0, 5)).any()


def test_polygons_are_looked_up() -> None:
    """Rows that no polygon touches are background."""
    regions = Regions([[[(2.0, 3.0), (6.0, 3.0), (6.0, 5.0), (2.0, 5.0)]]])
    image = Masked(ArrayImage(np.zeros((9, 8, 3), np.uint8), layout="HWC"), regions)
    assert image.repeated(Interval(0, 8)).tolist() == [False, True, True, False, False, False, True, True, True]
