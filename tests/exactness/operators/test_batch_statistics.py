"""Norms with statistics over batch and full image: gradients through the statistics, and one update of buffers a step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget

captures = one_capture_a_model()


class SqueezeExcite(nn.Module):
    """A gate from the pooled image, inside a residual block with norms (Hu et al., 2018)."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 2, 1), nn.ReLU(), nn.Conv2d(2, channels, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        body = self.body(x)
        return torch.relu(x + body * self.gate(body))


class DenseBlock(nn.Module):
    """Every layer reads all earlier ones, through a norm of its own (Huang et al., 2017)."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 + 3 * i), nn.ReLU(), nn.Conv2d(4 + 3 * i, 3, 3, padding=1, bias=False))
            for i in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


_NETS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(), nn.Conv2d(4, 3, 3)),
    "batch, no affine, in place": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    ),
    "batch, no running statistics": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()),
    "first layer": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 5, padding=2, stride=2)),
    "group": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.SiLU(), nn.Conv2d(6, 3, 3)),
    "one group": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(1, 4), nn.GELU(), nn.AvgPool2d(2)),
    "instance": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.InstanceNorm2d(2)
    ),
    "squeeze-excite": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), SqueezeExcite(), SqueezeExcite()),
    "dense": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), DenseBlock(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(13, 2)),
}


@st.composite
def _cases(draw: st.DrawFn) -> tuple[tuple[int, int, int, int], sft.Options]:
    shape = (draw(st.integers(1, 3)), 3, draw(st.integers(9, 30)), draw(st.integers(9, 24)))
    tile = draw(st.one_of(st.none(), st.tuples(st.integers(1, shape[2]), st.none() | st.integers(3, shape[3]))))
    if tile is None:
        return shape, sft.Options(strategy="none")
    return shape, sft.Options(tile=tile, state_every=draw(st.integers(1, 4)), batch_tile=draw(st.one_of(st.none(), st.integers(1, 3))))


@pytest.mark.parametrize("name", _NETS)
def test_any_tiling_is_exact(name: str) -> None:
    model = seeded(_NETS[name]).train()

    @settings(max_examples=max(2, settings().max_examples // 50))
    @given(case=_cases())
    def check(case: tuple[tuple[int, int, int, int], sft.Options]) -> None:
        shape, options = case
        assert_exact(model, image(*shape), options=options, steps=3)

    check()


def test_statistics_of_a_large_mean_keep_their_digits() -> None:
    """E[x^2] - E[x]^2 in float32 loses all digits of this variance."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1))
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    x = 1000 + 0.1 * image(1, 1, 200, 64).float()
    net = sft.compile(model, tuple(x.shape), options=sft.Options(tile=(7, None)))
    net(x)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None
    torch.testing.assert_close(norm.running_var.double(), 0.9 + 0.1 * x.double().var().reshape(1), rtol=1e-4, atol=0)


def test_a_failing_forward_leaves_the_statistics() -> None:
    model = seeded(_NETS["batch"]).train()
    before = copy.deepcopy(dict(model.named_buffers()))
    net = sft.compile(model, (1, 3, 20, 16), options=sft.Options(tile=(4, None)))
    with pytest.raises(sft.InputError):
        net(torch.zeros(1, 3, 0, 16, dtype=torch.float64))
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())


def test_training_under_no_grad_updates_the_statistics_too() -> None:
    model = seeded(_NETS["batch"]).train()
    eager, x = copy.deepcopy(model), image(2, 3, 20, 16)
    net = sft.compile(model, tuple(x.shape), options=sft.Options(tile=(4, None)))
    with torch.no_grad():
        torch.testing.assert_close(net(x), eager(x))
    for ours, theirs in zip(net.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_eval_and_train_take_turns() -> None:
    model = seeded(_NETS["batch"])
    eager, x = copy.deepcopy(model), image(1, 3, 20, 16)
    net = sft.compile(model, tuple(x.shape), options=sft.Options(tile=(4, None)))
    for mode in (True, False, True):
        net.train(mode)
        eager.train(mode)
        torch.testing.assert_close(net(x), eager(x))


@pytest.mark.parametrize("num_norms", [1, 2])
def test_a_norm_is_a_barrier_that_the_budget_must_hold(num_norms: int) -> None:
    """The input of the second norm is kept for its statistics, that of the first is recomputed; the error names a budget that works."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    if num_norms == 2:
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(16, 1, 3, padding=1))
    shape = (1, 3, 256, 128)
    least_bytes = least_budget(model, shape)
    cut_bytes = 4 * 16 * 256 * 128
    assert (least_bytes > cut_bytes) == (num_norms == 2)
    assert sft.plan(model, shape, budget=least_bytes).total_bytes <= least_bytes
