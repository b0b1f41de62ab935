"""Constant strips are left out without any effect on the results."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.analysis.tiling.constant_strips import is_constant_per_strip
from tests.helpers.constant_strips import assert_exact_skipping, banded_image
from tests.helpers.exactness import relative_error
from tests.helpers.examples import at_most

MODELS: dict[str, Any] = {}


def _named(make: Any) -> Any:
    MODELS[make.__name__.lstrip("_")] = make
    return make


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class _UNet(nn.Module):
    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.middle, self.up, self.last = nn.Conv2d(4, 4, 3, padding=1), up, nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x).relu()
        below = self.middle(self.down(skip)).relu()
        out: Tensor = self.last(torch.cat([skip, self.up(below)], 1))
        return out


class _Attention(nn.Module):
    """Gated attention pooling over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Conv2d(4, 1, 1)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).relu()
        weights = self.gate(features).flatten(2).softmax(-1)
        out: Tensor = self.last((features.flatten(2) * weights).sum(-1))
        return out


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.short = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 5, padding=2), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.b(self.a(x).relu()) + self.short(x)).relu()
        return out


@_named
def _plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2, padding=1), nn.Tanh())


@_named
def _pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 5, stride=2), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 3, 3, padding=1), _Mean(), nn.Linear(3, 2))


@_named
def _batch_norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), _Mean()
    )


@_named
def _frozen_norms() -> nn.Module:
    model: nn.Module = _batch_norms()
    return model.eval()


@_named
def _group_norms() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.InstanceNorm2d(3))


@_named
def _residual() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), _Residual(), _Residual(), _Mean())


@_named
def _transposed() -> nn.Module:
    return _UNet(nn.ConvTranspose2d(4, 4, 2, 2))


@_named
def _nearest() -> nn.Module:
    return _UNet(nn.Upsample(scale_factor=2))


@_named
def _bilinear() -> nn.Module:
    return _UNet(nn.Upsample(scale_factor=2, mode="bilinear"))


@_named
def _attention() -> nn.Module:
    return _Attention()


@_named
def _largest() -> nn.Module:
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x.amax((2, 3)), x.logsumexp((2, 3))], 1)

    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Largest())


def _made(name: str) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = MODELS[name]()
    return model


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_band_of_background_is_left_out_exactly(name: str) -> None:
    """Outputs, gradients, buffers and two updates equal eager PyTorch's; forward and backward leave strips out."""
    x = banded_image((2, 2, 96, 14), (20, 80))
    skipping = assert_exact_skipping(_made(name), x, options=sft.Options(tile=(4, None), skip_repeats=True))
    assert skipping.forward >= 4, skipping
    assert skipping.backward >= 4, skipping
    assert skipping.flops < skipping.plan.flops


@at_most(5, one_in=8)
@given(
    name=st.sampled_from(sorted(MODELS)),
    size=st.tuples(st.integers(40, 80), st.integers(10, 30)),
    rows=st.integers(1, 9),
    columns=st.sampled_from([None, None, 5, 8]),
    band=st.tuples(st.integers(0, 60), st.integers(2, 60)),
    side=st.tuples(st.integers(0, 20), st.integers(2, 40)),
    batch=st.integers(1, 2),
    batch_tile=st.sampled_from([None, 1]),
    states=st.sampled_from([{}, {"state_every": 3}, {"state_slots": 2}]),
    halo=st.sampled_from(["carry", "carry", "recompute"]),
)
def test_any_band_is_exact(
    name: str,
    size: tuple[int, int],
    rows: int,
    columns: int | None,
    band: tuple[int, int],
    side: tuple[int, int],
    batch: int,
    batch_tile: int | None,
    states: dict[str, int],
    halo: str,
) -> None:
    """For all strips, panels, kept states, and positions of the band."""
    if name in ("transposed", "nearest", "bilinear"):
        size = (size[0] // 2 * 2, size[1] // 2 * 2)
    first = min(band[0], size[0] - 1)
    x = torch.randn(batch, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[:, :, first : first + band[1], side[0] : sum(side)] = 0.5
    options = sft.Options(tile=(rows, columns), batch_tile=batch_tile, halo=halo, skip_repeats=True, **states)  # type: ignore[arg-type]  # a mapping
    assert_exact_skipping(_made(name), x, options=options)


def test_a_rectangle_is_left_out_of_its_panels() -> None:
    """Rows that are constant in some columns only are left out of the panels with these columns."""
    x = banded_image((1, 2, 80, 24))
    x[:, :, 10:70, 8:] = 0.25
    whole = assert_exact_skipping(_made("plain"), x, options=sft.Options(tile=(4, None), skip_repeats=True))
    panels = assert_exact_skipping(_made("plain"), x, options=sft.Options(tile=(4, 6), skip_repeats=True))
    assert whole.forward == 0
    assert panels.forward > 10


@pytest.mark.parametrize("panel", (1, 3, 6))
def test_panels_of_one_geometry_are_compared_separately(panel: int) -> None:
    """A rectangle in one of many panels that share their programs, and its gradient."""
    x = banded_image((1, 2, 64, 48))
    x[:, :, 4:62, max(0, 6 * panel - 12) : 6 * panel + 18] = 0.25
    for name in ("plain", "pooled"):
        skipping = assert_exact_skipping(_made(name), x, options=sft.Options(tile=(4, 6), skip_repeats=True))
        assert 0 < skipping.forward < skipping.num_forward // 2


def test_one_pixel_is_enough_to_run_a_strip() -> None:
    """With a different pixel in every strip all strips run; with one in one strip, those that read it run."""
    options = sft.Options(tile=(4, None), skip_repeats=True)
    x = banded_image((1, 2, 96, 14), (10, 90))
    all_of_it = assert_exact_skipping(_made("plain"), x, options=options)
    x[0, 1, 48, 3] += 1e-12
    but_one = assert_exact_skipping(_made("plain"), x, options=options)
    assert 0 < but_one.forward < all_of_it.forward
    x[0, 1, 10:90:4, 3] = torch.arange(20.0).double()
    none = assert_exact_skipping(_made("plain"), x, options=options)
    assert (none.forward, none.backward) == (0, 0)
    assert none.flops == none.plan.flops


def test_bits_are_compared_and_not_numbers() -> None:
    """0 and -0 are equal numbers with different bits; a NaN does not equal itself but has the same bits."""

    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv(x).reciprocal()
            return out

    x = torch.zeros(1, 1, 32, 4, dtype=torch.float64)
    x[:, :, 1::2] = -0.0
    options = sft.Options(tile=(2, None), skip_repeats=True)
    net: Any = sft.compile(Inverse().double(), x, options=options)
    assert torch.equal(net(x), copy.deepcopy(net._sft_engine.model)(x))
    assert net.last_skipping.forward.num_skipped == 0
    x.fill_(float("nan"))
    net(x)
    assert net.last_skipping.forward.num_skipped > 8


def test_a_gradient_that_differs_runs_the_strips_back() -> None:
    """Constant image, non-constant gradient of the output: forward strips are left out, backward strips run."""
    x = banded_image((1, 2, 64, 8), (0, 64)).requires_grad_()
    net: Any = sft.compile(_made("plain").double(), x, options=sft.Options(tile=(4, None), skip_repeats=True))
    net(x).backward(torch.randn(1, 3, 32, 4, dtype=torch.float64))
    assert net.last_skipping.forward.num_skipped > 8
    assert net.last_skipping.backward.num_skipped == 0


@pytest.mark.parametrize("name", ["plain", "transposed", "bilinear"])
def test_bits_are_those_of_all_strips(name: str) -> None:
    """Values without weighted sums (outputs, gradient of the input) have the same bits as without the option."""
    image = banded_image((1, 2, 96, 14), (20, 80), dtype=torch.float32)
    outputs, gradients = [], []
    for skip in (False, True):
        x = image.clone().requires_grad_()
        net = sft.compile(_made(name), x, options=sft.Options(tile=(4, None), skip_repeats=skip))
        outputs.append(net(x))
        outputs[-1].backward(torch.ones_like(outputs[-1]))
        assert x.grad is not None
        gradients.append(x.grad)
        assert (net.last_skipping is not None) == skip
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)


def test_masks_are_never_repeated() -> None:
    """Dropout draws a different mask at every position."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.5))
    x = banded_image((1, 2, 64, 8), (0, 64))
    net: Any = sft.compile(model.double(), x, options=sft.Options(tile=(4, None), skip_repeats=True))
    net(x)
    assert net.last_skipping.forward.num_skipped == 0


def test_a_graph_that_is_retained_gives_the_same_gradients_again() -> None:
    """Carried rows kept for the backward pass are shared, and remain for the next pass."""
    x = banded_image((1, 2, 64, 8), (10, 60)).requires_grad_()
    net = sft.compile(_made("frozen_norms").double(), x, options=sft.Options(tile=(4, None), state_every=3, skip_repeats=True))
    loss = net(x).sum()
    first = torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=True)
    again = torch.autograd.grad(loss, [x, *net.parameters()])
    assert all(map(torch.equal, first, again))


def test_rows_that_equal_each_other_make_strips_alike() -> None:
    """Strip 2 reads rows 3 to 5, the strip before it rows 2 to 4: all of them must be equal."""
    same = np.array([False, True, True, True, True, True, False])
    start, stop = np.array([0, 2, 3, 4]), np.array([2, 5, 6, 7])
    assert is_constant_per_strip(same, start, stop).tolist() == [False, True, True, False]


def test_strips_that_read_nothing_are_alike() -> None:
    """Also after the last row: some values are complete earlier than others."""
    same, end = np.array([False, False, False]), np.array([1, 3, 3, 3])
    assert is_constant_per_strip(same, np.array([0, 3, 3, 3]), end).tolist() == [False, False, True, True]


def test_a_plan_states_that_strips_may_be_left_out() -> None:
    """The plan's JSON and a step of a model compiled with it."""
    x = banded_image((1, 2, 64, 8), (0, 64))
    plan = sft.plan(_made("plain").double(), x.shape, options=sft.Options(tile=(4, None), skip_repeats=True))
    assert plan.skips_repeats and "last_skipping" in plan.explain()
    again = sft.Plan.from_json(plan.to_json())
    assert again == plan
    net: Any = sft.compile(_made("plain").double(), x.shape, plan=again)
    net(x)
    assert net.last_skipping.forward.num_skipped > 0
    assert net.plan.projected_peak_bytes == plan.projected_peak_bytes
    assert not sft.plan(_made("plain"), x.shape, options=sft.Options(tile=(4, None))).skips_repeats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Outputs have the same bits; gradients, summed in single precision, differ by less than the resolution of the half type."""
    image = banded_image((1, 2, 96, 14), (20, 80), dtype=torch.float32).to(dtype)
    results = []
    for skip in (False, True):
        model = _made("plain").to(dtype)
        x = image.clone().requires_grad_()
        net = sft.compile(model, x, options=sft.Options(tile=(4, None), skip_repeats=skip))
        out = net(x)
        out.backward(torch.full_like(out, 0.125))
        results.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert torch.equal(results[0][0], results[1][0])
    resolution = 2 * torch.finfo(dtype).eps
    for full, ours in zip(*results, strict=True):
        assert full is not None and ours is not None
        assert relative_error(ours, full) <= resolution


def test_skipped_strips_are_counted_by_pass() -> None:
    """Inference has no backward pass; without the option no strip is counted."""
    x = banded_image((1, 2, 64, 8), (0, 64))
    net: Any = sft.compile(_made("plain").double(), x, options=sft.Options(tile=(4, None), skip_repeats=True))
    with torch.no_grad():
        net(x)
    skipping = net.last_skipping
    assert skipping.forward.num_skipped > 0
    assert (skipping.backward.num_strips, skipping.skipped_flops) == (0, skipping.forward.skipped_flops)
    assert "strips left out" in str(skipping)


def test_a_mesh_runs_all_strips() -> None:
    """The option is for one device; bands ignore it."""
    options = sft.Options(tile=(4, None), skip_repeats=True)
    assert not sft.plan(_made("plain"), (1, 2, 64, 16), mesh=(1, 2), options=options).skips_repeats
