"""Single rows, columns and pixels of an image: reads, functions of them, and writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.planner.plan import Plan
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.tilings import tiled_options


class _After(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.before(x).tanh())


def _border(x: Tensor) -> Tensor:
    """The border of a fluid: rows of zeros, columns copied from their neighbours."""
    out = x * 1.5
    out[:, :, 0], out[:, :, -1] = 0.0, 1.0
    out[..., 0], out[..., -1] = out[..., 1].clone(), out[..., -2].clone() + x[..., 2]
    return out * x


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda x: x[:, :, 3] * 2,
    "the last column": lambda x: x[..., -1].sin(),
    "a pixel": lambda x: x[:, :, 3, -2],
    "a row added to all": lambda x: x + x[:, :, 2].unsqueeze(2),
    "a pixel added to all": lambda x: x + x[:, :, 2, 3][..., None, None],
    "two rows": lambda x: x[:, :, 2] * x[:, :, 4] + x.select(2, -1),
    "rows stacked": lambda x: torch.stack([x[:, :, 2], x[:, :, 3].sin(), x[:, :, 0]], 2).sum(1),
    "rows joined": lambda x: torch.cat([x[:, :, 2], x[:, :, 3]], 1).softmax(1),
    "a row times a column": lambda x: x[:, :, 1].unsqueeze(2) * x[..., 1].unsqueeze(3),
    "reductions of a row": lambda x: x[:, :, 2].mean(-1) + x[:, :, 1].amax(-1) + x[:, :, 0].norm(dim=2),
    "a product of rows": lambda x: x[:, :, 2].transpose(1, 2) @ x[:, :, 1],
    "a row without its channels": lambda x: x[:, 1, 2] + x[:, 0, 1],
    "columns unbound": lambda x: torch.stack([a * b for a, b in zip(x.unbind(3), x.unbind(3)[1:], strict=False)], 3),
    "borders": _border,
    "a row of a part": lambda x: x.index_copy(2, torch.tensor([1]), x[:, :, 2:3]) + x[:, 1:3][:, :, 2].sum(1)[:, None, None],
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_selected_rows_are_exact(name: str) -> None:
    model = seeded(lambda: _After(_FUNCTIONS[name]))
    assert_exact(model, image(2, 3, 9, 8), options=sft.Options(tile=(3, None)))
    assert_exact(model, image(2, 3, 7, 6), options=sft.Options(tile=(2, 3), state_every=2), steps=1)


@pytest.mark.parametrize("name", ["a row", "two rows", "borders"])
def test_the_image_of_a_selected_row_streams(name: str) -> None:
    check = sft.check(seeded(lambda: _After(_FUNCTIONS[name])), (1, 3, 24, 20))
    assert not [reason for reason in check.whole_reasons if "restore_dims" not in reason]  # of a row that the model returns


class _LastValue(nn.Module):
    """A classifier of the last value of a signal, as in temporal convolutional networks (Bai et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.head = nn.Conv1d(3, 4, 3, padding=4, dilation=4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)[:, :, :-4].relu()
        out: Tensor = self.head(y[:, :, -1] + y[:, :, 0])
        return out


def test_the_last_value_of_a_signal() -> None:
    report = assert_exact(seeded(_LastValue), image(2, 3, 21), options=sft.Options(tile=(5, None)))
    assert any(segment.mode == "tiled" and {"conv1d", "select"} <= set(segment.nodes) for segment in report.plan.segments)


@at_most(6)
@given(data=st.data())
def test_any_row_and_tiling(data: st.DataObject) -> None:
    extents = tuple(data.draw(st.integers(2, 10)) for _ in range(2))
    read, written = (data.draw(st.integers(-extents[0], extents[0] - 1)) for _ in range(2))

    def shift(x: Tensor) -> Tensor:
        out = x * 1.5
        out[:, :, written] = x[:, :, read] + 1
        return out

    model = seeded(lambda: nn.Sequential(_After(shift), nn.Conv2d(4, 2, 3, padding=1)))
    assert_exact(model, image(data.draw(st.integers(1, 2)), 3, *extents), options=data.draw(tiled_options(extents)), steps=1)


def _plan(count: int, take: Callable[[Tensor, int], Tensor]) -> Plan:
    model = seeded(lambda: _After(lambda x: torch.cat([take(x, at).sin() for at in range(count)], 1)))
    return sft.plan(model, (1, 3, 32, 32), budget="1GiB", options=sft.Options(strategy="none"))


@pytest.mark.parametrize(
    "take",
    [lambda x, at: x[:, :, at : at + 1], lambda x, at: x[:, :, :, at : at + 1], lambda x, at: x[:, :, at]],
    ids=["rows", "columns", "row"],
)
def test_gradients_of_slices_are_no_images(take: Callable[[Tensor, int], Tensor]) -> None:
    """Each of 16 slices adds its own bytes, for its result and gradient, and neither a copy nor a gradient of the image."""
    slice_bytes, image_bytes = 4 * 32 * 8, 4 * 32 * 32 * 8
    grown = _plan(18, take).total_bytes - _plan(2, take).total_bytes
    assert 16 * slice_bytes < grown < 4 * image_bytes
