"""Positional dropout: any tile of the mask is a slice of one mask, equal to a definition in Python's integers."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.kernels.rng import dropout_reference
from sft.kernels.rng.dropout import MaskKind, PositionalDropout, dropout, keep_mask, positional_dropout
from sft.kernels.rng.mask_tile import MaskTile, threshold_of
from tests.kernels.rng.test_philox import python_philox

_KINDS: tuple[MaskKind, ...] = ("element", "channel", "row", "batch")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_Shape = tuple[int, int, int, int]
_Origin = tuple[int, int, int]


def _rule(kind: MaskKind = "element", p: float = 0.3, seed: int = 2**64 - 5, site: int = 4, draw: int = 0) -> dict[str, Any]:
    return {"kind": kind, "p": p, "seed": seed, "site": site, "draw": draw}


def _python_keep(extents: _Shape, at: _Shape, *, kind: MaskKind, p: float, seed: int, site: int, draw: int) -> bool:
    """True if the element at (sample, channel, row, column) is kept, by the definition."""
    (_, num_channels, height, width), (n, c, h, w) = extents, at
    groups = math.ceil(num_channels / 4)
    index = {
        "element": ((n * groups + c // 4) * height + h) * width + w,
        "channel": n * groups + c // 4,
        "row": n,
        "batch": 0,
    }[kind]
    place = c % 4 if kind in ("element", "channel") else 0
    word = python_philox((index % 2**32, index >> 32, site, draw), (seed % 2**32, seed >> 32))[place]
    return word >= round(p * 2**32)


@st.composite
def _tilings(draw: st.DrawFn) -> tuple[_Shape, _Shape, _Origin]:
    """A whole, a tile of it, and the tile's origin."""
    extents = tuple(draw(st.integers(1, most)) for most in (3, 9, 12, 12))
    spans = [sorted(draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))) for extent in (extents[0], *extents[2:])]
    (n0, n1), (h0, h1), (w0, w1) = spans
    return (extents[0], extents[1], extents[2], extents[3]), (n1 - n0, extents[1], h1 - h0, w1 - w0), (n0, h0, w0)


def _part(whole: Tensor, shape: tuple[int, ...], origin: _Origin) -> Tensor:
    (n, _, h, w), (n0, h0, w0) = shape, origin
    return whole[n0 : n0 + n, :, h0 : h0 + h, w0 : w0 + w]


_RULES = st.builds(
    _rule,
    st.sampled_from(_KINDS),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@given(_tilings(), _RULES)
def test_a_tile_of_the_mask_is_a_slice_of_the_mask(tiling: tuple[_Shape, _Shape, _Origin], rule: dict[str, Any]) -> None:
    extents, shape, origin = tiling
    whole = keep_mask(extents, extents=extents, origin=(0, 0, 0), **rule)
    tile = keep_mask(shape, extents=extents, origin=origin, **rule)
    assert tile.shape == shape and torch.equal(tile, _part(whole, shape, origin))
    last = (extents[0] - 1, extents[1] - 1, extents[2] - 1, extents[3] - 1)
    assert bool(whole[last]) == _python_keep(extents, last, **rule)


@given(_tilings(), _RULES, st.booleans())
def test_tiles_equal_the_untiled_result(tiling: tuple[_Shape, _Shape, _Origin], rule: dict[str, Any], last: bool) -> None:
    """Output and gradient bit for bit, on sliced views in both layouts."""
    extents, shape, origin = tiling
    layout = torch.channels_last if last else torch.contiguous_format
    x, gradient = (torch.randn(extents, dtype=torch.float32).to(memory_format=layout) for _ in range(2))
    whole = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = positional_dropout(whole, rule["p"], site=rule["site"], seed=rule["seed"], draw=rule["draw"], kind=rule["kind"])
    (dx,) = torch.autograd.grad(y, whole, gradient)
    tile = _part(x, shape, origin).detach().requires_grad_()
    tile_y = dropout(tile, origin=origin, extents=extents, **rule)
    (tile_dx,) = torch.autograd.grad(tile_y, tile, _part(gradient, shape, origin))
    assert torch.equal(tile_y, _part(y, shape, origin))
    assert torch.equal(tile_dx, _part(dx, shape, origin))


@pytest.mark.parametrize("kind", _KINDS)
def test_positions_beyond_32_bits(kind: MaskKind) -> None:
    extents, origin, shape = (3, 6, 4_000_000, 70_001), (2, 3_000_000, 69_990), (1, 6, 2, 5)
    assert ((2 * 2 + 0) * extents[2] + origin[1]) * extents[3] > 2**32
    mask = keep_mask(shape, extents=extents, origin=origin, **_rule(kind))
    for n, c, h, w in itertools.product(*map(range, shape)):
        at = (n + origin[0], c, h + origin[1], w + origin[2])
        assert bool(mask[n, c, h, w]) == _python_keep(extents, at, **_rule(kind))


@pytest.mark.parametrize("num_calls", [1, 2, 7, 30, 64, 10_000])
@pytest.mark.parametrize("kind", _KINDS)
def test_masks_do_not_depend_on_blocks(kind: MaskKind, num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: _Shape = (3, 6, 5, 7)
    x = torch.randn(shape)
    whole = positional_dropout(x, 0.3, site=1, seed=2, kind=kind)
    monkeypatch.setattr(dropout_reference, "_BLOCK_CALLS", num_calls)
    assert torch.equal(positional_dropout(x, 0.3, site=1, seed=2, kind=kind), whole)


@pytest.mark.parametrize("shape", [(1, 64, 16, 512), (1, 1024, 1, 513), (1, 3, 100, 1000), (700, 1000, 1, 1)])
def test_temporaries_are_small(shape: _Shape) -> None:
    x = torch.randn(shape)
    with sft.measure_peak() as peak, torch.no_grad():
        dropout(x, origin=(0, 0, 0), extents=shape, out=x, **_rule())
    assert peak.num_bytes < 4 * 2**20


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["element", "channel"])
def test_rate(kind: MaskKind, p: float) -> None:
    """The number of kept elements is within five standard deviations of a binomial's mean."""
    shape = (2, 50, 40, 50) if kind == "element" else (20, 10_000, 1, 1)
    num_nonzero = int(keep_mask(shape, extents=shape, origin=(0, 0, 0), **_rule(kind, p, seed=1)).sum())
    assert abs(num_nonzero - 200_000 * (1 - p)) <= 5 * math.sqrt(200_000 * p * (1 - p))


def test_masks_are_unrelated() -> None:
    """Two masks of different seed, site or draw, and one mask and its shift, agree as often as independent masks."""
    shape = (2, 50, 40, 50)

    def mask(**changes: int) -> Tensor:
        return keep_mask(shape, extents=shape, origin=(0, 0, 0), **(_rule(p=0.5, seed=1) | changes))

    first = mask()
    others = [mask(seed=2), mask(seed=1 + 2**32), mask(site=5), mask(draw=1)]
    others += [first.roll(1, axis) for axis in range(4)]
    for other in others:
        assert abs(int((first == other).sum()) - 100_000) <= 5 * math.sqrt(200_000 / 4)


@pytest.mark.parametrize("kind", _KINDS)
def test_all_and_nothing(kind: MaskKind) -> None:
    x = torch.randn(2, 5, 3, 4)
    assert torch.equal(positional_dropout(x, 0.0, site=0, seed=0, kind=kind), x)
    assert torch.equal(positional_dropout(x, 1.0, site=0, seed=0, kind=kind), torch.zeros_like(x))
    assert threshold_of(2**-33) == 0 and threshold_of(3 * 2**-33) == 2, "half goes to even"
    assert threshold_of(1 - 2**-40) == 2**32


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_arithmetic_is_that_of_eager(dtype: torch.dtype) -> None:
    """Signs of zeros and NaNs too, output and gradient, at many p: against the operations of ``F.dropout`` on our mask."""
    x, gradient = (torch.randn(1, 8, 9, 11).to(dtype) for _ in range(2))
    x[0, 0, 0, :2] = torch.tensor([math.inf, math.nan])
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for percent in range(1, 100, 2):
        p = percent / 100
        keep = keep_mask((1, 8, 9, 11), extents=(1, 8, 9, 11), origin=(0, 0, 0), **_rule(p=p))
        noise = keep.to(dtype).div_(1 - p)
        z = x.clone().requires_grad_()
        y = dropout(z, extents=(1, 8, 9, 11), origin=(0, 0, 0), **_rule(p=p))
        (dz,) = torch.autograd.grad(y, z, gradient)
        for ours, eager in ((y, x * noise), (dz, gradient * noise)):
            assert torch.equal(ours.isnan(), eager.isnan())
            assert torch.equal(ours.nan_to_num(1.0).view(bits), eager.nan_to_num(1.0).view(bits))


def test_nothing_is_saved_and_any_order_differentiates() -> None:
    x = torch.randn(1, 4, 5, 6, dtype=torch.float64, requires_grad=True)

    def refuse(tensor: Tensor) -> Tensor:
        raise AssertionError(f"saved a tensor of shape {tuple(tensor.shape)}")

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda tensor: tensor):
        y = positional_dropout(x, 0.4, site=0, seed=3)
    mask = keep_mask((1, 4, 5, 6), extents=(1, 4, 5, 6), origin=(0, 0, 0), **_rule(p=0.4, seed=3, site=0))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(ddx, 2 * mask.double() / 0.6**2, rtol=1e-14, atol=0)


def test_out() -> None:
    x = torch.randn(2, 6, 5, 7)
    where = {"extents": (2, 6, 9, 9), "origin": (0, 2, 1), **_rule()}
    expected = dropout(x, **where)
    buffer = torch.full((2, 6, 9, 9), math.nan).to(memory_format=torch.channels_last)
    view = buffer[:, :, 2:7, 1:8]
    assert dropout(x, out=view, **where) is view and torch.equal(view, expected)
    assert int(buffer.isnan().sum()) == buffer.numel() - x.numel(), "it writes the tile only"
    assert torch.equal(dropout(x, out=x, **where), expected) and torch.equal(x, expected)
    for out in (torch.empty(2, 6, 5, 6), torch.empty(2, 6, 5, 7, dtype=torch.float64)):
        with pytest.raises(sft.InputError, match="out is"):
            dropout(x, out=out, **where)
    with pytest.raises(sft.InputError, match="not differentiable"):
        dropout(x.requires_grad_(), out=torch.empty_like(x), **where)


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 4), (3, 5, 4, 6), (3, 5, 4, 6, 2)])
@pytest.mark.parametrize("kind", _KINDS)
def test_module(kind: MaskKind, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    model = nn.Sequential(PositionalDropout(0.5, site=0, kind=kind, seed=11), PositionalDropout(0.25, site=1, kind=kind, seed=11))
    once = positional_dropout(x, 0.5, site=0, seed=11, kind=kind)
    assert torch.equal(model(x), positional_dropout(once, 0.25, site=1, seed=11, kind=kind))
    assert torch.equal(model.eval()(x), x)
    assert "site=1" in repr(model)


def test_refusals_name_every_problem() -> None:
    bad: Any = {"kind": "pixel", "p": 1.5, "seed": 2**64, "site": -1, "draw": 2**32}
    with pytest.raises(sft.InputError) as caught:
        MaskTile(shape=(1, 3, 4, 4), extents=(1, 3, 4, 4), origin=(0, 1, 0), **bad)
    for word in ("'pixel'", "p is 1.5", "seed is", "site is -1", "draw is", "at (batch, row, column) (0, 1, 0)"):
        assert word in str(caught.value)
    with pytest.raises(sft.InputError, match="62 bits"):
        MaskTile(shape=(1, 3, 1, 1), extents=(1, 3, 2**31, 2**31), origin=(0, 0, 0), **_rule())
    for x in (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4, 4, dtype=torch.int32)):
        with pytest.raises(sft.InputError, match="floating tile"):
            dropout(x, extents=(1, 3, 4, 4), origin=(0, 0, 0), **_rule())
    with pytest.raises(sft.InputError, match="p is nan"):
        positional_dropout(torch.zeros(1, 3), math.nan, site=0, seed=0)
    with pytest.raises(sft.InputError, match="samples and channels"):
        positional_dropout(torch.zeros(3), 0.5, site=0, seed=0)


def test_works_without_triton() -> None:
    """Neither the import nor the use of our kernels on the CPU needs Triton."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, sft.kernels.common, sft.kernels.rng.dropout\n"
        "x = sft.kernels.rng.dropout.positional_dropout(torch.ones(2, 3, 4, 5), 0.5, site=0, seed=0)\n"
        "assert x.sum() > 0 and not sft.kernels.common.has_triton()\n"
        "assert not [name for name in sys.modules if name.endswith('_triton') and name.startswith('sft')]\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
