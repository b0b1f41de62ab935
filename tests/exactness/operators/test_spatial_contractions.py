"""Matrix products over all pixels of an image, and of its pixels with the results: exact in strips, at eager's FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.plans import assert_tiled, least_budget
from tests.helpers.tilings import is_tiled, tiled_options

_CONVOLUTIONS: tuple[Callable[..., nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Context(nn.Module):
    """A global-context block (GCNet; Cao et al. 2019): pixels pooled by attention, added to every pixel."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        conv = _CONVOLUTIONS[axes - 1]
        self.axes, self.before, self.mask, self.after = axes, conv(3, 4, 3, padding=1), conv(4, 1, 1), conv(4, 2, 3, padding=1)
        self.change = nn.Sequential(conv(4, 3, 1), nn.ReLU(), conv(3, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        attention = self.mask(x).flatten(2).softmax(2).unsqueeze(-1)
        context = torch.matmul(x.flatten(2).unsqueeze(1), attention).view(x.shape[0], 4, *[1] * self.axes)
        y: Tensor = self.after(x + self.change(context))
        return y


class _Double(nn.Module):
    """Double attention (Chen et al. 2018): features gathered by one attention and distributed by another."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        conv = _CONVOLUTIONS[axes - 1]
        self.before, self.after = conv(3, 4, 3, padding=1), conv(3, 2, 3, padding=1)
        self.a, self.b, self.v = conv(4, 3, 1), conv(4, 5, 3, padding=1), conv(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        a, b, v = self.a(x).flatten(2), self.b(x).flatten(2).softmax(-1), self.v(x).flatten(2).softmax(1)
        gathered = torch.bmm(a, b.transpose(1, 2))
        y: Tensor = self.after(gathered.bmm(v).view(x.shape[0], 3, *x.shape[2:]))
        return y


class _Linear(nn.Module):
    """Linear attention of several heads on a list of pixels (Katharopoulos et al. 2020), keys times values first."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        conv = _CONVOLUTIONS[axes - 1]
        self.before, self.after = conv(3, 4, 3, padding=1), conv(4, 2, 3, padding=1)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        n, c, tokens = x.shape[0], x.shape[1], x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).chunk(3, -1)
        q, k, v = (t.reshape(n, -1, 2, c // 2).transpose(1, 2) for t in (q, k.sigmoid(), v))
        mixed = (q @ (k.transpose(-2, -1) @ v / tokens.shape[1])).transpose(1, 2).reshape(n, -1, c)
        y: Tensor = self.after((tokens + self.out(mixed)).transpose(1, 2).reshape(x.shape))
        return y


class _Gram(nn.Module):
    """A Gram matrix written with einsum, and channels mixed by its softmax."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        conv = _CONVOLUTIONS[axes - 1]
        self.before, self.after, self.letters = conv(3, 4, 3, padding=1), conv(4, 2, 3, padding=1), "xyz"[:axes]

    def forward(self, x: Tensor) -> Tensor:
        x, at = self.before(x), self.letters
        gram = torch.einsum(f"nc{at},nd{at}->ndc", x, x.tanh())
        y: Tensor = self.after(torch.einsum(f"ncd,nd{at}->nc{at}", gram.softmax(-1), x))
        return y


_BLOCKS: dict[str, Callable[[int], nn.Module]] = {"context": _Context, "double": _Double, "linear": _Linear, "gram": _Gram}


@st.composite
def _cases(draw: st.DrawFn) -> tuple[nn.Module, Tensor, sft.Options]:
    axes, block = draw(st.sampled_from([1, 2, 2, 3])), draw(st.sampled_from(sorted(_BLOCKS)))
    extents = tuple(draw(st.integers(2, 13 if axis < 2 else 4)) for axis in range(axes))
    note(f"{block} of {extents}")
    return seeded(lambda: _BLOCKS[block](axes)), image(draw(st.integers(1, 3)), 3, *extents), draw(tiled_options(extents))


@at_most(4)
@given(case=_cases())
def test_any_product_any_tiling(case: tuple[nn.Module, Tensor, sft.Options]) -> None:
    model, x, options = case
    report = assert_exact(model, x, options=options, steps=1)
    assert is_tiled(report.plan, "bmm", "matmul", "einsum")


def test_operands_that_exist_at_different_strips() -> None:
    """Rows of one operand are carried until those of the other exist."""
    report = assert_exact(seeded(lambda: _Double(2)), image(2, 3, 14, 9), options=sft.Options(tile=(2, 5), state_every=3), steps=1)
    assert_tiled(report, "bmm")


def _flops(model: nn.Module, x: Tensor) -> int:
    model(x)  # plans, and traces on fake tensors, which the counter would count
    with FlopCounterMode(display=False) as counter:
        model(x)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("block", ["double", "linear"])
def test_no_flop_more_than_eager(block: str) -> None:
    model = seeded(lambda: _BLOCKS[block](2))
    x = image(2, 3, 12, 9)
    net: Any = sft.compile(model, tuple(x.shape), options=sft.Options(tile=(4, None)))
    assert not net._sft_engine.phases().whole_reasons
    with torch.no_grad():
        assert _flops(net, x) == _flops(model, x)


@pytest.mark.parametrize("is_fused", [False, True])
def test_products_of_pixels_with_pixels_run_whole(*, is_fused: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            y = x.flatten(2)
            pixels = y.transpose(1, 2)
            if is_fused:
                y = nn.functional.scaled_dot_product_attention(pixels, pixels, pixels).transpose(1, 2)
            else:
                y = y @ (pixels @ y).softmax(-1)
            out: Tensor = self.after(y.reshape(x.shape))
            return out

    model = seeded(Attention).train()
    report = assert_exact(model, image(2, 3, 9, 7), options=sft.Options(tile=(3, None)), steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled", "whole", "tiled"]


class _DualAttention(nn.Module):
    """Attention of positions, and of channels by a Gram matrix (DANet, Fu et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.query = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        pixels, query = x.flatten(2), self.query(x).flatten(2)
        energy = torch.bmm(pixels, pixels.transpose(1, 2))
        channels = torch.bmm((energy.amax(-1, keepdim=True) - energy).softmax(-1), pixels)
        positions = torch.bmm(pixels, torch.bmm(query.transpose(1, 2), query).softmax(-1).transpose(1, 2))
        y: Tensor = self.after((channels + positions).view(x.shape) + x)
        return y


def test_gram_matrices_of_some_samples_at_a_time() -> None:
    """Runs of samples on full tensors contain the products over pixels: with a batch tile, and at the smallest budget."""
    model, x = seeded(_DualAttention), image(3, 3, 8, 10)
    assert_exact(model, x, options=sft.Options(batch_tile=1), steps=1)
    needed = least_budget(model, [x.clone().requires_grad_()])
    assert needed is not None
    assert_exact(model, x, budget=needed, steps=1)


class _Queries(nn.Module):
    """Learned matrices for each sample: expanded, repeated, or a parameter with an entry for each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.before, self.bases = kind, nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.rand(1, 5, 4))
        self.many = nn.Parameter(torch.rand(2, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        batch, _, height, width = y.shape
        if self.kind == "a parameter":
            scores: Tensor = torch.einsum("nkc,nchw->nkhw", self.many, y)
            return scores
        pixels = y.flatten(2)
        bases = self.bases.repeat(batch, 1, 1) if self.kind == "repeated" else self.bases.expand(batch, -1, -1)
        if self.kind != "made again":  # as in EMANet (Li et al., 2019): expectation and maximisation
            attended: Tensor = bases.transpose(1, 2) @ (bases @ pixels).softmax(1)
            return attended.view(batch, 4, height, width)
        for _ in range(2):
            shares = (bases @ pixels).softmax(1)
            bases = (shares / (1e-6 + shares.sum(2, keepdim=True))) @ pixels.transpose(1, 2)
        made: Tensor = bases.transpose(1, 2) @ shares
        return made.view(batch, 4, height, width)


@pytest.mark.parametrize("batch_tile", [None, 1])
@pytest.mark.parametrize("kind", ["expanded", "repeated", "a parameter", "made again"])
def test_learned_matrices_for_each_sample(kind: str, batch_tile: int | None) -> None:
    options = sft.Options(tile=(4, None), batch_tile=batch_tile)
    report = assert_exact(seeded(lambda: _Queries(kind)), image(2, 3, 13, 9), options=options, steps=1)
    assert is_tiled(report.plan, "bmm", "matmul", "einsum")
