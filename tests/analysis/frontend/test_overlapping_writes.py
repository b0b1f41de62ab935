"""In-place writes to memory that is also read: refused where eager PyTorch depends on an order, exact elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.analysis.frontend.overlapping_writes import _View
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded


class _Writing(nn.Module):
    def __init__(self, write: Callable[[Tensor, Callable[[Tensor], Tensor]], Any], read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.write, self.read = nn.Conv2d(3, 4, 3, padding=1), write, read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x) * 2
        self.write(y, self.read)
        return y


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _assign(destination: Callable[[Tensor], Tensor], source: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda y, read: destination(y).copy_(read(source(y)))


def _shift_rows(y: Tensor, read: Callable[[Tensor], Tensor]) -> None:
    y[:, :, 2:] = read(y[:, :, :-2])


def _add_neighbours(y: Tensor, read: Callable[[Tensor], Tensor]) -> None:
    y[:, 1:] += read(y[:, :-1])


def _subtract_first(y: Tensor, read: Callable[[Tensor], Tensor]) -> None:
    y -= read(y[:, :1])


def _first_column_of_row(y: Tensor, read: Callable[[Tensor], Tensor]) -> None:
    y[:, :, :, 0] += read(y[:, :, 0])


def _lists(y: Tensor, read: Callable[[Tensor], Tensor]) -> None:
    torch._foreach_add_([y[:, 1:]], [read(y[:, :-1])])


_OVERLAPPING: dict[str, Callable[..., Any]] = {
    "rows": _shift_rows,
    "channels": _add_neighbours,
    "broadcast": _subtract_first,
    "column and row": _first_column_of_row,
    "steps": _assign(lambda y: y[..., :4], lambda y: y[..., ::2][..., :4]),
    "lerp_": lambda y, read: y[:, 1:].lerp_(read(y[:, :-1]), 0.5),
    "addcmul_": lambda y, read: y[:, 1:].addcmul_(read(y[:, :-1]), read(y[:, 1:])),
    "lists": _lists,
    "other shape": _assign(lambda y: y.flatten(2)[..., 3:], lambda y: y.flatten(2)[..., :-3]),
}


@pytest.mark.parametrize("write", _OVERLAPPING.values(), ids=_OVERLAPPING)
def test_overlapping_writes_are_refused_and_their_remedy_compiles(write: Callable[..., Any]) -> None:
    with pytest.raises(sft.UnsupportedError, match=r"_Writing: \w+_: writes to a view .* read a copy, as in .*\.clone\(\)"):
        sft.compile(seeded(lambda: _Writing(write, _as_it_is)), (1, 3, 16, 16))
    assert_exact(seeded(lambda: _Writing(write, torch.clone)), image(1, 3, 16, 16), options=sft.Options(tile=(5, None)))


def test_views_that_overlap_with_themselves_are_refused() -> None:
    model = _Writing(lambda y, read: y.unfold(3, 3, 1).mul_(2), _as_it_is)
    with pytest.raises(sft.UnsupportedError, match=r"_Writing: mul_: .* several elements have the same memory .*; write to a copy"):
        sft.compile(model, (1, 3, 16, 16))


def test_the_module_of_the_write_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Sequential(_Writing(_shift_rows, _as_it_is)))
    with pytest.raises(sft.UnsupportedError, match=r"1\.0: copy_: writes to a view"):
        sft.compile(model, (1, 3, 16, 16))


_DISJOINT: dict[str, Callable[..., Any]] = {
    "halves": lambda y, read: y[:, :2].add_(y[:, 2:]),
    "rows in turn": lambda y, read: y[..., ::2].copy_(y[..., 1::2]),
    "one row to all": lambda y, read: y.copy_(y[:, :, 3:4]),
    "one element to many": lambda y, read: y[:, 1:, 2:].copy_(y[0, 2, 3, 3]),
    "filled by an element": lambda y, read: y.masked_fill_(y > 0, y[0, 0, 0, 0]),
    "itself": lambda y, read: y.add_(y),
    "windows without overlap": lambda y, read: y.unfold(3, 2, 2).mul_(2),
    "a copy": lambda y, read: y.copy_(y.flip(2)),
}


@pytest.mark.parametrize("write", _DISJOINT.values(), ids=_DISJOINT)
def test_other_writes_are_exact(write: Callable[..., Any]) -> None:
    assert_exact(seeded(lambda: _Writing(write, _as_it_is)), image(1, 3, 16, 16))


def test_sizes_at_which_a_write_overlaps_are_refused() -> None:
    """The capture for a wide image is not used for a narrow one."""
    model = seeded(lambda: _Writing(_assign(lambda y: y[..., :8], lambda y: y[..., -8:]), _as_it_is))
    net = sft.compile(model, (1, 3, 16, 20))
    x = image(1, 3, 16, 24)
    torch.testing.assert_close(net(x), model(x), rtol=0, atol=1e-5)
    with pytest.raises(sft.UnsupportedError, match="shares some of its memory"):
        net(image(1, 3, 16, 12))


_dims = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3)


def _addresses(view: _View) -> dict[tuple[int, ...], int]:
    indices = product(*map(range, view.sizes))
    return {index: view.offset_bytes + sum(i * s for i, s in zip(index, view.strides_bytes, strict=True)) for index in indices}


@given(dims=_dims, strides=st.lists(st.integers(0, 9), min_size=3, max_size=3), offsets=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_views_are_compared_by_their_addresses(dims: list[tuple[int, int]], strides: list[int], offsets: tuple[int, int]) -> None:
    sizes = tuple(size for size, _ in dims)
    view = _View(sizes, tuple(stride for _, stride in dims), offsets[0], 1)
    other = _View(sizes, tuple(strides[: len(sizes)]), offsets[1], 1)
    written, read = _addresses(view), _addresses(other)
    assert view.overlaps(other) == bool(set(written.values()) & set(read.values()))
    if not view.has_shared_elements:
        assert len(set(written.values())) == len(written)
        if view.repeats(other):
            assert all(read[index] == address for index, address in written.items() if address in read.values())
    if view.coincides_with(other):
        assert written == read
