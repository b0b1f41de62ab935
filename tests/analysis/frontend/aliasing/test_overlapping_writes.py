"""In-place writes to memory that is also read: refused where eager PyTorch depends on an order, exact elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
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


class _SharedBuffers(nn.Module):
    first: Tensor
    second: Tensor

    def __init__(self, share: Callable[[Tensor], Tensor], writes: str = "first", *, is_registered: bool = True) -> None:
        super().__init__()
        self.conv, self.writes = nn.Conv2d(3, 4, 3, padding=1), writes
        self.register_buffer("first", torch.ones(4, 1, 1))
        if is_registered:
            self.register_buffer("second", share(self.first))
        else:
            self.second = share(self.first)

    def forward(self, x: Tensor) -> Tensor:
        getattr(self, self.writes).mul_(2)
        y: Tensor = self.conv(x) * self.first + self.second.sum()
        return y


_SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda value: value[:2],
    "reshape": lambda value: value.view(2, 2, 1),
    "alias": lambda value: value.detach(),
}


@pytest.mark.parametrize("writes", ["first", "second"])
@pytest.mark.parametrize("share", _SHARED.values(), ids=_SHARED)
def test_writes_to_buffers_that_share_memory_are_refused(share: Callable[[Tensor], Tensor], writes: str) -> None:
    other = {"first": "second", "second": "first"}[writes]
    with pytest.raises(sft.UnsupportedError, match=rf"{writes}: `forward` writes this buffer, which shares memory with {other};"):
        sft.compile(_SharedBuffers(share, writes), (1, 3, 16, 16))


def test_writes_to_memory_of_other_attributes_and_parameters_are_refused() -> None:
    with pytest.raises(sft.UnsupportedError, match=r"first: `forward` writes this buffer, which shares memory with second"):
        sft.compile(_SharedBuffers(lambda value: value[:2], is_registered=False), (1, 3, 16, 16))
    model = _SharedBuffers(torch.clone)
    model.first = model.conv.weight.detach()[:, :1, :1, 0]
    with pytest.raises(sft.UnsupportedError, match=r"first: `forward` writes this buffer, which shares memory with conv.weight"):
        sft.compile(model, (1, 3, 16, 16))


def test_one_buffer_of_two_names_and_disjoint_buffers_are_exact() -> None:
    model = seeded(lambda: _SharedBuffers(lambda value: value))
    assert_exact(model, image(1, 3, 16, 16), steps=2)
    model = seeded(lambda: _SharedBuffers(torch.clone))
    model.first, model.second = torch.arange(8.0).view(8, 1, 1).split(4)
    assert_exact(model, image(1, 3, 16, 16), steps=2)


def test_inputs_that_share_memory_are_refused_where_one_is_written() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.relu_() if self.training else x
            z: Tensor = self.conv(x) * y
            return z

    model, x = seeded(Writing), image(1, 3, 16, 16)
    net = sft.compile(model, [(1, 3, 16, 16), (1, 3, 16, 16)])
    with pytest.raises(sft.InputError, match=r"inputs 0 and 1 share memory, .* writes into input 0: .* as input 1 \(x\.clone\(\)\)"):
        net(x, x)
    torch.testing.assert_close(net(x, x.clone()), model(x.clone(), x.clone()), rtol=0, atol=1e-12)
    net.eval()
    torch.testing.assert_close(net(x, x), model.eval()(x, x), rtol=0, atol=1e-12)
