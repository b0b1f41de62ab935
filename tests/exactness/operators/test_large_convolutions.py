"""Weight gradients of large images on a CPU are computed in pieces of rows: as exact as in one call, in the projected memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sft
from sft.common.torch_internals import TorchDispatchMode
from sft.lower.rules import row_pieces
from sft.lower.rules.row_pieces import RowWindow
from tests.helpers.exactness import assert_exact
from tests.helpers.models import chain, image, seeded

_CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "padded": (lambda: nn.Conv2d(4, 4, 3, padding=1), (2, 3, 23, 11)),
    "without padding, frozen bias": (lambda: nn.Conv2d(4, 4, 3, bias=False), (2, 3, 23, 11)),
    "even kernel, strides": (lambda: nn.Conv2d(4, 4, (4, 3), stride=(2, 1), padding=(1, 0)), (1, 3, 26, 11)),
    "stride above kernel": (lambda: nn.Conv2d(4, 4, 2, stride=3), (1, 3, 31, 11)),
    "dilated": (lambda: nn.Conv2d(4, 4, 3, stride=2, padding=(4, 2), dilation=(2, 1)), (1, 3, 33, 11)),
    "padding above kernel": (lambda: nn.Conv2d(4, 4, 2, padding=3), (1, 3, 23, 11)),
    "groups": (lambda: nn.Conv2d(4, 4, 5, padding=2, groups=2), (2, 3, 23, 11)),
    "strided, pointwise": (lambda: nn.Conv2d(4, 4, 1, stride=2), (2, 3, 23, 11)),
    "signal": (lambda: nn.Conv1d(4, 4, 5, padding=2, stride=2), (2, 3, 301)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 4, 2, stride=2), (2, 3, 23, 11)),
    "transposed, cropped": (lambda: nn.ConvTranspose2d(4, 4, 5, stride=2, padding=2, output_padding=1, groups=2), (1, 3, 23, 11)),
    "transposed, gaps": (lambda: nn.ConvTranspose2d(4, 4, (2, 3), stride=(3, 1), padding=(0, 1)), (1, 3, 23, 11)),
    "transposed, dilated": (lambda: nn.ConvTranspose2d(4, 4, 3, dilation=2, padding=3, bias=False), (1, 3, 23, 11)),
    "volume": (lambda: nn.Conv3d(4, 4, 3, padding=1), (1, 3, 9, 7, 6)),
}


def _network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    make, shape = _CONVOLUTIONS[name]
    first = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
    return seeded(lambda: chain(first(3, 4, 3, padding=1), make())), shape


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image counts as large."""
    monkeypatch.setattr(row_pieces, "_LARGE_BYTES", 2000)


class _WeightGradients(TorchDispatchMode):
    """Counter of calls of the convolution's backward that make a weight gradient."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default and args[-1][1]:
            self.rows[args[0].shape[2]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("options", [None, sft.Options(tile=(7, None))], ids=["any plan", "strips"])
@pytest.mark.parametrize("name", list(_CONVOLUTIONS))
def test_pieces_are_exact(name: str, options: sft.Options | None) -> None:
    model, shape = _network(name)
    assert_exact(model, image(*shape), options=options)


@pytest.mark.usefixtures("small_pieces")
def test_large_images_are_divided() -> None:
    model, shape = _network("padded")
    net = sft.compile(model, shape, budget="1GiB")
    with _WeightGradients() as calls:
        net(image(*shape)).sum().backward()
    assert calls.rows.total() > 8 and max(calls.rows) * 4 * 11 * 4 <= 2000


def test_batches_of_small_images_are_divided_by_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_pieces, "_LARGE_BYTES", 2 * 2 * 4 * 9 * 9 * 8)  # twice the bytes of two images
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)))
    assert_exact(model, image(7, 3, 9, 9), options=sft.Options(strategy="none"))
    net = sft.compile(model.double(), image(7, 3, 9, 9), budget="1GiB")
    with _WeightGradients() as calls:
        net(image(7, 3, 9, 9)).sum().backward()
    assert calls.rows == {1: 8, 7: 8}  # four groups of two images: two border rows and the rest in the first layer


def test_small_images_are_not_divided() -> None:
    model, shape = _network("padded")
    net = sft.compile(model, shape, budget="1GiB")
    with _WeightGradients() as calls:
        net(image(*shape)).sum().backward()
    assert calls.rows == {23: 2}


@given(st.data())
def test_pieces_read_the_rows_of_the_convolution(data: st.DataObject) -> None:
    kernel, stride = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    padding = data.draw(st.integers(0, kernel - 1))
    num_rows = data.draw(st.integers(max(1, kernel - 2 * padding), 40))
    num_out = (num_rows + 2 * padding - kernel) // stride + 1
    window, max_rows = RowWindow(kernel_rows=kernel, stride=stride, padding=padding), data.draw(st.integers(1, 9))
    seen: list[int] = []
    for piece in row_pieces.row_pieces(num_out, num_rows, window, max_rows):
        seen += range(piece.out_rows.start, piece.out_rows.stop)
        padded = piece.pad_low + len(piece.rows) + piece.pad_high
        assert (padded - kernel) // stride + 1 == len(piece.out_rows) and padded == (len(piece.out_rows) - 1) * stride + kernel
        assert piece.rows.start - piece.pad_low == piece.out_rows.start * stride - padding
        assert len(piece.out_rows) <= max_rows or piece.pad_low or piece.pad_high
        assert piece.pad_low == max(0, padding - piece.out_rows.start * stride)
    assert seen == list(range(num_out))
