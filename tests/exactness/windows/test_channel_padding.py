"""Channels added to an image: by padding in any order of dimensions, by joining constants, and by writing into a larger constant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.operator_cases import assert_exact_in_strips, assert_streams
from tests.helpers.tilings import tiled_options

_CONVOLUTIONS: tuple[Callable[..., nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Function = Callable[[Tensor], Tensor]


class _Between(nn.Module):
    """A function of an image of four channels between two convolutions."""

    def __init__(self, function: _Function, *, axes: int = 2, extent: int = 9) -> None:
        super().__init__()
        convolution = _CONVOLUTIONS[axes - 1]
        channels = function(torch.zeros(2, 4, *[extent] * axes)).shape[1]
        self.before, self.function, self.after = convolution(3, 4, 3, padding=1), function, convolution(channels, 2, 3, padding=1)
        self.register_buffer("order", torch.tensor([3, 0, 4, 1]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.function(self.before(x).tanh()))
        return y


def _written(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], 7, *x.shape[2:])
    out[:, 2:6] = x
    return out


def _copied(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 6, *x.shape[2:], dtype=x.dtype)
    out[:, :4].copy_(x)
    return out


def _filled(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], 6, *x.shape[2:], dtype=x.dtype).fill_(0.5)
    out[:, 1:5] += x
    return out


def _one_by_one(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], 5, *x.shape[2:])
    out[:, 0] = x[:, 3]
    out[:, 4] = x[:, 1] * x[:, 2]
    return out


def _by_index(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], 6, *x.shape[2:])
    return out.index_copy(1, torch.tensor([5, 0, 2, 3]), x)


def _listed(x: Tensor) -> Tensor:
    out = x * 0.5
    out[:, [2, 0]] = x[:, :2] * 2
    out[:, [3]] = 0.25
    return out


def _channels_last(function: _Function) -> _Function:
    return lambda x: function(x.movedim(1, -1)).movedim(-1, 1)


_FUNCTIONS: dict[str, _Function] = {
    "pairs of zeros for the batch": lambda x: F.pad(x, (0, 0, 0, 0, 2, 3, 0, 0)),
    "pairs of zeros for channels and the batch": lambda x: F.pad(x, (1, 2, 0, 1, 0, 0, 0, 0)),
    "channels and axes": lambda x: F.pad(x, (1, 2, 0, 3, 2, 1)),
    "channels and axes, cropped and added": lambda x: F.pad(x, (1, -2, -1, 3, -1, 4, 0, 0), value=0.5),
    "channels cropped": lambda x: F.pad(x, (0, 0, 0, 0, -1, -2, 0, 0)),
    "channels cropped, axes added": lambda x: F.pad(x, (1, 1, 2, 2, -1, -2, 0, 0), value=-1.0),
    "constant_pad_nd": lambda x: torch.constant_pad_nd(x, (0, 0, 1, 0, 1, 1), 2.0),
    "reflection_pad2d": lambda x: torch.ops.aten.reflection_pad2d(x, (1, 2, 0, 1)),
    "replication_pad2d": lambda x: torch.ops.aten.replication_pad2d(x, (1, 2, 0, 1)),
    "a number of columns that follows the size": lambda x: F.pad(x, (0, -x.shape[3] % 4, 0, 0, 0, 2, 0, 0)),
    "channels last": _channels_last(lambda x: F.pad(x, (2, 1))),
    "channels last, with a pair of zeros": _channels_last(lambda x: F.pad(x, (2, 1, 1, 0, 0, 2, 0, 0))),
    "channels last, reflected": _channels_last(lambda x: F.pad(x, (2, 1, 1, 0), mode="reflect")),
    "channels last, replicated": _channels_last(lambda x: F.pad(x, (2, 1, 1, 0), mode="replicate")),
    "channels last, wrapped": _channels_last(lambda x: F.pad(x, (2, 1, 1, 0), mode="circular")),
    "groups of channels": lambda x: F.pad(x.unflatten(1, (2, 2)), (0, 0, 0, 0, 1, 0, 0, 1)).flatten(1, 2),
    "a list of pixels": lambda x: F.pad(x.flatten(2).transpose(1, 2), (0, 3)).transpose(1, 2).unflatten(2, x.shape[2:]),
    "cat with zeros": lambda x: torch.cat([x, torch.zeros(x.shape[0], 2, *x.shape[2:], dtype=x.dtype)], 1),
    "cat with new_zeros": lambda x: torch.cat([x.new_zeros(x.shape[0], 1, *x.shape[2:]), x], 1),
    "cat with zeros_like": lambda x: torch.cat([x, torch.zeros_like(x[:, :2])], 1),
    "cat with full": lambda x: torch.cat([x, torch.full((x.shape[0], 1, *x.shape[2:]), 0.25, dtype=x.dtype), x], 1),
    "cat with expanded ones": lambda x: torch.cat([x, torch.ones(1, 1, 1, 1, dtype=x.dtype).expand(x.shape[0], 2, *x.shape[2:])], 1),
    "cat with zeros for each axis": lambda x: torch.cat([x, x.new_zeros(x.shape[0], x.shape[2], x.shape[3], 2).permute(0, 3, 1, 2)], 1),
    "cat with zeros, channels last": _channels_last(lambda x: torch.cat([x, x.new_zeros(*x.shape[:3], 2)], -1)),
    "written into zeros": _written,
    "copied into zeros": _copied,
    "added to a constant": _filled,
    "one by one": _one_by_one,
    "index_copy": _by_index,
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 0, 3, 1]), x * 0.5, alpha=2),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0, 3]), 0.5),
    "a list of channels": lambda x: x[:, [2, 1, 0, -1, 2]],
    "a list of channels, channels last": _channels_last(lambda x: x[..., [2, 1, 0]]),
    "index_select, channels last": _channels_last(lambda x: x.index_select(-1, torch.tensor([3, 1]))),
    "written by a list": _listed,
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_channels_are_added_in_strips(name: str) -> None:
    model = seeded(lambda: _Between(_FUNCTIONS[name]))
    assert_streams(model, (2, 3, 24, 20))
    assert_exact_in_strips(model, (2, 3, 13, 10), sft.Options(tile=(4, 5), state_every=2), steps=1)


_ANY_SIZE = ("pairs of zeros for the batch", "channels and axes, cropped and added", "written into zeros", "one by one")


@pytest.mark.parametrize("name", _ANY_SIZE)
def test_other_sizes_than_the_captured_one(name: str) -> None:
    model = seeded(lambda: _Between(_FUNCTIONS[name]))
    net = sft.compile(model, (None, 3, None, None), options=sft.Options(tile=(5, None)))
    for shape in ((1, 3, 13, 10), (2, 3, 17, 8)):
        x = image(*shape)
        torch.testing.assert_close(net(x), model(x), rtol=1e-12, atol=1e-12)


def test_volumes_and_signals() -> None:
    for axes, pad in ((3, (0, 0, 0, 0, 0, 0, 2, 2, 0, 0)), (3, (1, 0, 0, 0, 1, 1, 2, 0)), (1, (0, 0, 3, 1, 0, 0)), (1, (2, 1, 0, 1))):
        model = seeded(partial(_Between, partial(F.pad, pad=pad), axes=axes))
        extents = (8, 7, 6)[:axes]
        assert_streams(model, (1, 3, *extents))
        assert_exact_in_strips(model, (2, 3, *extents), sft.Options(tile=(3, None)), steps=1)


@pytest.mark.parametrize("pad", [(0, 0, 0, 0, 0, 0, 1, 2), (1, 1, 0, 0, 2, 0, 0, 1)])
def test_a_pad_of_the_batch_runs_whole_with_a_reason(pad: tuple[int, ...]) -> None:
    model = seeded(lambda: _Between(lambda x: F.pad(x, pad)))
    report = sft.check(model, (2, 3, 24, 20))
    assert report.ok and "pads the batch" in report.whole_reasons[0]
    assert_exact(model, image(2, 3, 13, 10), options=sft.Options(tile=(4, None)), steps=1)


@st.composite
def _padded(draw: st.DrawFn) -> tuple[nn.Module, Tensor, sft.Options]:
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    extents = tuple(draw(st.integers(4, 10 if axis < 2 else 4)) for axis in range(axes))
    is_last = draw(st.booleans())
    mode = draw(st.sampled_from(["constant", "constant", "reflect", "replicate", "circular"])) if is_last and axes > 1 else "constant"
    least = -1 if mode == "constant" else 0
    pairs = [(draw(st.integers(least, 3)), draw(st.integers(least, 3))) for _ in range(axes + 1)]
    # Constants may leave out trailing dimensions, or give pairs for the batch; other modes pad the last dimensions only.
    count = axes if mode != "constant" else axes + 1
    amounts = [amount for pair in pairs[:count] for amount in pair] + ([0, 0] if mode == "constant" and draw(st.booleans()) else [])
    note(f"{extents} padded by {amounts}, {mode}, channels last: {is_last}")

    def pad(x: Tensor) -> Tensor:
        return F.pad(x, amounts, mode=mode)

    model = seeded(lambda: _Between(_channels_last(pad) if is_last else pad, axes=axes))
    return model, image(draw(st.integers(1, 3)), 3, *extents), draw(tiled_options(extents))


@at_most(8)
@given(case=_padded())
def test_any_padding_of_channels_and_axes(case: tuple[nn.Module, Tensor, sft.Options]) -> None:
    model, x, options = case
    assert_exact(model, x, options=options, steps=1)
