"""Norms with running statistics of every kind, norms of channels and of whole samples, and norms of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm

import sft
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.operator_cases import AroundFunction, assert_exact_in_strips, assert_streams, cases

captures = one_capture_a_model("options")


class _Rectified(nn.SyncBatchNorm):
    """Norm with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.3, self.eps).relu()


class _Twice(nn.Module):
    """One norm called twice in a step, with other statistics each time."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.norm(2 * self.norm(y) + y)
        return out


class _ChannelsLast(nn.Module):
    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, y: Tensor) -> Tensor:
        return self.norm(y.movedim(1, -1)).movedim(-1, 1)


def _groups(y: Tensor) -> Tensor:
    return y.view(y.shape[0], 2, 2, *y.shape[2:])


def _norm_of_groups(y: Tensor) -> Tensor:
    return F.layer_norm(_groups(y).movedim(2, -1), (2,)).movedim(-1, 2).flatten(1, 2)


def _norm_of_groups_and_channels(y: Tensor) -> Tensor:
    last = _groups(y).movedim((1, 2), (-1, -2))
    return F.layer_norm(last, (2, 2)).movedim((-1, -2), (1, 2)).flatten(1, 2)


#: By name: the image's axes and the layer.
_NORMS: dict[str, tuple[int, Callable[[], Callable[[Tensor], Tensor]]]] = {
    "instance": (2, lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True, momentum=0.3)),
    "instance, no momentum": (2, lambda: nn.InstanceNorm2d(4, track_running_stats=True, momentum=None)),  # type: ignore[arg-type]
    "instance, frozen": (2, lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval()),
    "instance, twice": (2, lambda: _Twice(nn.InstanceNorm2d(4, track_running_stats=True))),
    "instance of signals": (1, lambda: nn.InstanceNorm1d(4, track_running_stats=True)),
    "instance of volumes": (3, lambda: nn.InstanceNorm3d(4, track_running_stats=True)),
    "batch, average": (2, lambda: nn.BatchNorm2d(4, momentum=None)),
    "batch, average, twice": (2, lambda: _Twice(nn.BatchNorm2d(4, momentum=None))),
    "batch, average, frozen": (2, lambda: nn.BatchNorm2d(4, momentum=None).eval()),
    "batch of signals": (1, lambda: nn.BatchNorm1d(4)),
    "batch of volumes": (3, lambda: nn.BatchNorm3d(4, momentum=0.2)),
    "batch on several devices": (2, lambda: nn.SyncBatchNorm(4)),
    "batch on several devices, of one's own": (2, lambda: _Rectified(4)),
    "layer": (3, lambda: _ChannelsLast(nn.LayerNorm(4))),
    "layer, groups": (2, lambda: _norm_of_groups),
    "layer, groups and channels": (2, lambda: _norm_of_groups_and_channels),
    "layer, samples": (2, lambda: lambda y: F.layer_norm(y, y.shape[1:])),
    "layer, samples, channels last": (1, lambda: _ChannelsLast(lambda y: F.layer_norm(y, y.shape[1:]))),
    "layer, axes": (2, lambda: lambda y: F.layer_norm(y, y.shape[2:])),
    "mean square": (2, lambda: _ChannelsLast(nn.RMSNorm(4))),
    "mean square, eps": (1, lambda: _ChannelsLast(nn.RMSNorm(4, eps=1e-3, elementwise_affine=False))),
    "mean square, samples": (2, lambda: lambda y: F.rms_norm(y, y.shape[1:])),
    "mean square, axes": (1, lambda: lambda y: F.rms_norm(y, y.shape[2:], eps=0.1)),
    "length": (2, lambda: lambda y: F.normalize(y)),
    "length, groups": (2, lambda: lambda y: F.normalize(_groups(y), dim=2).flatten(1, 2)),
}


@pytest.mark.parametrize("name", _NORMS)
def test_any_tiling_is_exact(name: str) -> None:
    axes, make = _NORMS[name]
    model = seeded(lambda: AroundFunction(make(), axes=axes))
    assert_streams(model, (2, 3, *(6, 5, 3)[:axes]))

    @settings(max_examples=max(2, settings().max_examples // 75))
    @given(case=cases(axes=axes))
    def check(case: tuple[tuple[int, ...], sft.Options]) -> None:
        assert_exact_in_strips(model, *case, steps=3)

    check()


class _PooledNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body, self.norm = nn.Conv2d(3, 4, 3), norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))
        return out


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_norm_of_pooled_values(momentum: float | None) -> None:
    model = seeded(lambda: _PooledNorm(nn.BatchNorm1d(4, momentum=momentum)))
    assert_exact(model, image(3, 3, 9, 8), options=sft.Options(tile=(2, 3), batch_tile=2), steps=3)


def test_a_weight_for_each_pixel_makes_a_layer_norm_whole() -> None:
    model = seeded(lambda: AroundFunction(nn.LayerNorm((4, 9, 8)), axes=2))
    options = sft.Options(tile=(3, None))
    assert_exact(model, image(2, 3, 9, 8), options=options)
    (reason,) = sft.of(sft.compile(model, (2, 3, 9, 8), options=options)).engine.phases().whole_reasons.values()
    assert "a weight for each pixel" in reason


class _ReadsItsStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(3, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        assert self.norm.running_mean is not None
        return y + self.norm.running_mean.view(1, 3, 1, 1)


class _Normalized(nn.Module):
    """A model that reads the running statistics of its norm after the norm."""

    def __init__(self, function: Callable[[nn.BatchNorm2d, Tensor, Tensor], object], momentum: float | None) -> None:
        super().__init__()
        self.function, self.body, self.norm = function, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum)

    def forward(self, x: Tensor) -> object:
        y = self.body(x)
        return self.function(self.norm, y, self.norm(y))


def _inverted(norm: nn.BatchNorm2d, y: Tensor, z: Tensor) -> object:
    """A loss on statistics, as of DeepInversion (Yin et al., CVPR 2020)."""
    assert norm.running_mean is not None and norm.running_var is not None
    mean, var = y.mean((0, 2, 3)), y.var((0, 2, 3))
    return z, (norm.running_mean - 2 * mean).square().sum() + (norm.running_var - 2 * var).square().sum()


def _renormalized(norm: nn.BatchNorm2d, y: Tensor, z: Tensor) -> object:
    """Batch renormalization (Ioffe, NeurIPS 2017)."""
    assert norm.running_mean is not None and norm.running_var is not None
    ratio, shift = y.var((0, 2, 3)) / norm.running_var, y.mean((0, 2, 3)) - norm.running_mean
    return z * ratio.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize(
    "function",
    [
        _inverted,
        _renormalized,
        lambda norm, y, z: (z, norm.running_mean, norm.running_var),
        lambda norm, y, z: norm(z) * norm.running_var[0],
    ],
    ids=["loss", "renormalization", "returned", "twice"],
)
def test_running_statistics_that_are_read_have_no_gradient(
    function: Callable[[nn.BatchNorm2d, Tensor, Tensor], object], momentum: float | None
) -> None:
    model = seeded(lambda: _Normalized(function, momentum))
    assert_exact(model, image(2, 3, 12, 9), options=sft.Options(tile=(3, None)))
    assert_exact(model, image(2, 3, 12, 9))


def test_statistics_that_the_model_reads_itself_are_refused() -> None:
    """The exporter drops their update, so the model would read the old ones."""
    with pytest.raises(sft.UnsupportedError, match="running statistics"):
        sft.compile(_ReadsItsStatistics(), (1, 3, 16, 16))


def test_the_momentum_of_an_average_is_left_alone() -> None:
    norm = nn.BatchNorm2d(3, momentum=None)
    sft.compile(nn.Sequential(norm, nn.Conv2d(3, 2, 3)), (1, 3, 16, 16))
    assert norm.momentum is None


@pytest.mark.parametrize("options", [sft.Options(tile=(3, None)), sft.Options(tile=(2, 3), batch_tile=1), sft.Options(strategy="none")])
@pytest.mark.parametrize("dim", [0, None])
def test_lengths_of_weights(options: sft.Options, dim: int | None) -> None:
    model = seeded(
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1), dim=dim),  # type: ignore[arg-type]
            nn.ReLU(),
            parametrizations.weight_norm(nn.Conv2d(4, 2, 3)),
        )
    )
    assert_exact(model, image(2, 3, 9, 8), options=options, steps=3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_lengths_of_weights_by_hooks() -> None:
    """They cannot be copied, so two equal models are made."""
    eager, ours = (seeded(lambda: nn.Sequential(weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Conv2d(4, 2, 3))) for _ in range(2))
    weight = ours[0].weight
    net = sft.compile(ours, (2, 3, 12, 9), options=sft.Options(tile=(3, None)))
    assert ours[0].weight is weight
    x = image(2, 3, 12, 9)
    for call in (eager, net):
        call(x).square().sum().backward()
    for (name, parameter), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-10, atol=1e-10, msg=name)


def test_pruned_weights() -> None:
    """Their hooks compute a weight from a parameter and a buffer, too."""

    def pruned() -> nn.Sequential:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        prune.l1_unstructured(model[0], "weight", 0.5)
        prune.l1_unstructured(model[2], "weight", 0.25)
        prune.ln_structured(model[2], "weight", 1, n=1, dim=1)  # in addition to the other
        prune.l1_unstructured(model[2], "bias", 1)
        return model

    eager, ours = (seeded(pruned) for _ in range(2))
    net = sft.compile(ours, (2, 3, 12, 9), options=sft.Options(tile=(3, None)))
    x = image(2, 3, 12, 9)
    for _ in range(2):
        for call in (eager, net):
            call(x).square().sum().backward()
        for (name, parameter), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-10, atol=1e-10, msg=name)
            with torch.no_grad():
                parameter.sub_(0.1)
                theirs.sub_(0.1)
    prune.remove(ours[0], "weight")
    torch.testing.assert_close(net(x), ours(x), rtol=1e-12, atol=1e-12)


class _Unread(nn.Module):
    """A norm with an unused output: only its statistics change."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        self.norm(y.relu())
        out: Tensor = self.after(y)
        return out


def test_a_norm_with_an_unused_result() -> None:
    report = assert_exact(_Unread().train(), image(1, 3, 15, 11), options=sft.Options(tile=(5, 3)))
    assert len(report.plan.segments[0].nodes) == 4, "statistics alone need no second walk"


def test_several_norms_in_turn() -> None:
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.InstanceNorm2d(4, track_running_stats=True),
            nn.ReLU(),
            nn.BatchNorm2d(4, momentum=None),
            nn.Conv2d(4, 2, 1),
        )
    )
    for mode in (True, False):
        assert_exact(model.train(mode), image(2, 3, 11, 7), options=sft.Options(tile=(3, 4), batch_tile=1), steps=3)


def test_half_precision_is_normalized_wide() -> None:
    """Squares of half-precision numbers overflow."""
    layer = nn.Conv2d(3, 4, 1)
    model = nn.Sequential(layer, _Scaled()).to(torch.bfloat16)
    x = 100 * torch.randn(1, 3, 12, 9).to(torch.bfloat16)
    net = sft.compile(model, tuple(x.shape), options=sft.Options(tile=(3, None)))
    torch.testing.assert_close(net(x), model(x), rtol=2e-2, atol=2e-2)


class _Scaled(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(y, dim=(2, 3), keepdim=True)
        out: Tensor = y / length + F.rms_norm(y, y.shape[1:]) + y.amax((2, 3), keepdim=True) / 300
        return out
