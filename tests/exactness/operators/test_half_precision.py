"""Half precision beyond the usual layers: as accurate as eager PyTorch, by the rule of ``test_autocast``, on signals and volumes as well.

Several operators share a network, so that errors pass through further operators, as in a model. There is no max pooling: its gradient is
arbitrary if two candidates round to the same number.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import sft
from tests.helpers.backend_networks import relative_l2
from tests.helpers.models import chain, seeded

_MOST = 1.1
"""Our median error over eager's."""
_NUM_SEEDS = 25
_AUTOCAST = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
_PURE = [(None, torch.bfloat16), (None, torch.float16)]
_IDS = {_AUTOCAST[0]: "autocast bf16", _AUTOCAST[1]: "autocast fp16", _PURE[0]: "model bf16", _PURE[1]: "model fp16"}

Precision = tuple[torch.dtype | None, torch.dtype]


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Last(nn.Module):
    """A norm of channels in the last dimension."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.permute(0, 2, 3, 1))
        return y.permute(0, 3, 1, 2)


def _resampled() -> nn.Module:
    """Transposed convolutions with and without overlap, interpolation, shuffles, reflected and repeated borders, adaptive pool."""
    up = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.SiLU(), nn.ConvTranspose2d(8, 8, 3, padding=1)
    sizes = nn.Upsample(scale_factor=0.7, mode="bilinear"), nn.ReflectionPad2d(1), nn.Upsample(size=(40, 18), mode="bicubic")
    folds = nn.PixelUnshuffle(2), nn.ReplicationPad2d(1), nn.Conv2d(32, 8, 3), nn.SiLU(), nn.PixelShuffle(2), nn.Conv2d(2, 4, 3)
    return chain(nn.Conv2d(3, 8, 3), nn.SiLU(), *up, *sizes, *folds, nn.AdaptiveAvgPool2d((17, 7)))


class Gates(nn.Module):
    """Reductions over the image: each gates a group of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = F.silu(self.first(x)).chunk(6, 1)
        branches = [
            a * torch.sigmoid(a.amax((2, 3), keepdim=True)),  # divides the gradient among ties
            b * torch.tanh(torch.linalg.vector_norm(b, dim=(2, 3), keepdim=True) / 30),
            c / (1 + c.var((2, 3), keepdim=True)),
            d * torch.sigmoid(torch.logsumexp(d, (2, 3), keepdim=True) - 7),
            e * e.flatten(2).softmax(-1).view_as(e) * 900,
            f * f.std((2, 3), keepdim=True),
        ]
        out: Tensor = self.second(torch.cat(branches, 1))
        return out


def _channels() -> nn.Module:
    """Norms of channels and of images, local responses, GLU, PReLU, softmax; weight and spectral norm."""
    norms = Last(nn.LayerNorm(8)), weight_norm(nn.Conv2d(8, 8, 3)), nn.PReLU(8), Last(nn.RMSNorm(8)), spectral_norm(nn.Conv2d(8, 16, 3))
    whole = nn.GLU(1), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 8, 3), Apply(lambda y: F.layer_norm(y, y.shape[1:]))
    return chain(nn.Conv2d(3, 8, 3), *norms, *whole, nn.LocalResponseNorm(3, alpha=0.1), nn.Softmax(1), nn.Conv2d(8, 4, 3))


def _signal() -> nn.Module:
    up = nn.ConvTranspose1d(8, 8, 4, stride=2), nn.Upsample(scale_factor=1.5, mode="linear")
    return chain(nn.Conv1d(3, 8, 5), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool1d(2), *up, nn.Conv1d(8, 8, 3), nn.SiLU(), nn.Conv1d(8, 4, 3))


def _volume() -> nn.Module:
    up = nn.ConvTranspose3d(8, 6, 2, stride=2), nn.Upsample(scale_factor=(1, 0.7, 1), mode="trilinear")
    return chain(nn.Conv3d(3, 8, 3), nn.InstanceNorm3d(8), nn.SiLU(), *up, nn.Conv3d(6, 4, 3))


def _overlapping() -> nn.Module:
    """Overlapping windows. The mask of a ReLU depends on the sign of a sum of products, which rounding may change for single elements."""
    return chain(nn.ConvTranspose2d(3, 8, 4, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))


_IMAGE, _SIGNAL, _VOLUME = (1, 3, 48, 18), (1, 3, 256), (1, 3, 14, 8, 7)


def _step(module: nn.Module, x: Tensor, gradient: Tensor, autocast: torch.dtype | None) -> dict[str, list[Tensor]]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = module(x)
    y.backward(gradient.to(y.dtype))
    assert x.grad is not None
    return {"output": [y.detach()], "input": [x.grad], "parameters": [p.grad for p in module.parameters() if p.grad is not None]}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # eager PyTorch's RMSNorm under autocast
@pytest.mark.parametrize(
    ("make", "shape", "precision"),
    [
        (_resampled, _IMAGE, _AUTOCAST[0]),
        (Gates, _IMAGE, _PURE[0]),
        (_overlapping, _IMAGE, _PURE[1]),
        (_channels, _IMAGE, _AUTOCAST[0]),
        (_signal, _SIGNAL, _AUTOCAST[1]),
        (_volume, _VOLUME, _PURE[1]),
    ],
    ids=lambda value: _IDS.get(value, "") if isinstance(value, tuple) and len(value) == 2 else getattr(value, "__name__", ""),
)
def test_as_accurate_as_eager(make: Callable[[], nn.Module], shape: tuple[int, ...], precision: Precision) -> None:
    autocast, weights = precision
    eager = seeded(make).to(weights)
    # The height is dynamic: one capture, at the first call, under its autocast.
    net: Any = sft.compile(copy.deepcopy(eager), (*shape[:2], None, *shape[3:]), options=sft.Options(tile=(max(6, shape[2] // 4), None)))
    errors: tuple[dict[str, list[float]], ...] = ({}, {})
    for seed in range(_NUM_SEEDS):
        reference = seeded(make, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator)
        for module in (eager, net):
            module.load_state_dict(reference.state_dict())
        gradient = torch.randn(reference.eval()(x.double()).shape, generator=generator)
        exact = _step(reference.train(), x.double(), gradient, None)
        for module, by_tensor in zip((eager, net), errors, strict=True):
            for key, values in _step(module, x.to(weights), gradient, autocast).items():
                by_tensor.setdefault(key, []).append(relative_l2(values, exact[key]))
    medians = [{key: statistics.median(values) for key, values in by_tensor.items()} for by_tensor in errors]
    ratios = {key: ours / medians[0][key] for key, ours in medians[1].items()}
    assert any(segment.num_steps > 1 for segment in net.plan.segments)
    assert all(ratio <= _MOST for ratio in ratios.values()), f"{ratios} times eager's {medians[0]}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_norms_in_evaluation_whose_statistics_are_half(dtype: torch.dtype, is_frozen: bool) -> None:
    """Their derivative reads the type of statistics that are not saved."""
    model = chain(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(dtype).eval()
    model[1].requires_grad_(not is_frozen)
    net = sft.compile(copy.deepcopy(model), (1, 3, 24, 20), options=sft.Options(tile=(8, None)))
    x, gradient = torch.randn(1, 3, 24, 20).to(dtype), torch.randn(1, 2, 22, 18).to(dtype)
    ours, eager = (_step(module, x, gradient, None) for module in (net, model))
    assert len(ours["parameters"]) == (4 if is_frozen else 6)
    for key, values in eager.items():
        assert relative_l2(ours[key], values) < 0.02, key
