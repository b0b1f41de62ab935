"""Reductions over the image are exact for any tiling, and make no large untiled value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.capture_cache import one_capture_a_model
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.operator_cases import AroundFunction, assert_exact_in_strips, assert_streams, cases

captures = one_capture_a_model("options")

_MAX_POOLS = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)


def _axes(y: Tensor) -> tuple[int, ...]:
    return tuple(range(2, y.dim()))


def _last(y: Tensor) -> Tensor:
    """The image with channels in the last dimension."""
    return y.movedim(1, -1)


def _spread(value: Tensor, y: Tensor) -> Tensor:
    """``[N, C]`` as an image of one pixel."""
    return value.reshape(*value.shape, *[1] * (y.dim() - 2))


def _grouped(y: Tensor) -> Tensor:
    return y.view(y.shape[0], 2, 2, *y.shape[2:])


def _flat_grouped(y: Tensor, value: Tensor) -> Tensor:
    return _spread(value.flatten(1), y)


def _response_norm(y: Tensor) -> Tensor:
    """Global response normalisation of ConvNeXt V2 (Woo et al., 2023), channels last."""
    x = _last(y)
    norm = torch.norm(x, p=2, dim=tuple(range(1, x.dim() - 1)), keepdim=True)
    out: Tensor = x * (norm / (norm.mean(-1, keepdim=True) + 1e-6)) + x
    return out.movedim(-1, 1)


def _group_deviation(y: Tensor) -> Tensor:
    """Standard deviation of groups of channels in EvoNorm-S0 (Liu et al., 2020), at each pixel."""
    x = _grouped(y)
    return x.var(_axes(x), unbiased=False, keepdim=True).add(1e-5).sqrt().expand(x.shape).reshape(y.shape)


def _strided_group_variance(y: Tensor) -> Tensor:
    """Variance of each second channel and of the others, as in a channel shuffle."""
    x = _grouped(y)
    return x.var((1, *_axes(x)[1:]), keepdim=True).expand(x.shape).reshape(y.shape)


def _var_mean(y: Tensor) -> Tensor:
    variance, mean = torch.var_mean(y, _axes(y), keepdim=True)
    return (y - mean) / (1 + variance)


#: Each has a result of the size of its argument, or of one pixel.
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(_axes(y), keepdim=True),
    "sum of everything": lambda y: y * y.sum(),
    "mean": lambda y: y * _spread(y.mean(_axes(y)), y),
    "mean of everything": lambda y: y * y.mean(),
    "mean, channels last": lambda y: (_last(y) * _last(y).mean(tuple(range(1, y.dim() - 1)), keepdim=True)).movedim(-1, 1),
    "mean of pixels in a list": lambda y: y * _spread(y.flatten(2).transpose(1, 2).mean(1), y),
    "mean and channels": lambda y: y * y.mean((1, *_axes(y)), keepdim=True),
    "mean and batch": lambda y: y - y.mean((0, *_axes(y)), keepdim=True),
    "mean of groups": lambda y: y * _flat_grouped(y, _grouped(y).mean(_axes(_grouped(y))[1:])),
    "mean of groups' channels": lambda y: y * _spread(_grouped(y).mean(_axes(_grouped(y))).repeat_interleave(2, 1), y),
    "amax": lambda y: y * y.amax(_axes(y), keepdim=True),
    "amin": lambda y: y * _spread(y.amin(_axes(y)), y),
    "amax of many": lambda y: y.clamp(max=0.1).amax(_axes(y), keepdim=True) * y,
    "amin of many": lambda y: y.relu().amin(_axes(y), keepdim=True) + y,
    "max pool": lambda y: y * _MAX_POOLS[y.dim() - 3](y, 1),
    "max pool of many": lambda y: y * _MAX_POOLS[y.dim() - 3](y.clamp(max=0.1), 1),
    "max of pixels": lambda y: y * _spread(y.flatten(2).max(-1)[0], y),
    "norm": lambda y: y / (1 + torch.linalg.vector_norm(y, dim=_axes(y), keepdim=True)),
    "norm of nothing": lambda y: y + torch.linalg.vector_norm(y * 0, dim=_axes(y), keepdim=True),
    "norm, 1": lambda y: y / (1 + y.norm(p=1, dim=_axes(y), keepdim=True)),
    "norm, 3": lambda y: y / (1 + y.norm(p=3, dim=_axes(y), keepdim=True)),
    "norm, largest": lambda y: y / (1 + y.norm(p=float("inf"), dim=_axes(y), keepdim=True)),
    "norm of samples": lambda y: y / (1 + torch.linalg.vector_norm(y.flatten(1), dim=1).view(-1, *[1] * (y.dim() - 1))),
    "response norm": _response_norm,
    "var": lambda y: y / (1 + y.var(_axes(y), keepdim=True)),
    "std": lambda y: y / (1 + y.std(_axes(y), correction=0, keepdim=True)),
    "std of nothing": lambda y: y + (y * 0).std(_axes(y), keepdim=True),
    "var and mean": _var_mean,
    "var and batch": lambda y: y / (1 + y.var((0, *_axes(y)), keepdim=True)),
    "var and channels": lambda y: y / (1 + y.var((1, *_axes(y)), keepdim=True)),
    "var of everything": lambda y: y / (1 + y.var()),
    "var of groups": lambda y: y / (1 + _flat_grouped(y, _grouped(y).var(_axes(_grouped(y))[1:]))),
    "var of groups of channels": lambda y: y * torch.sigmoid(y) / _group_deviation(y),
    "var of strided groups of channels": lambda y: y / (1 + _strided_group_variance(y)),
    "var of pixels of groups in a list": lambda y: (
        y.reshape(y.shape[0], 2, -1).var(2, keepdim=True).repeat_interleave(2, 1).unflatten(2, (1,) * (y.dim() - 2)) * y
    ),
    "var of groups together": lambda y: y / (1 + _grouped(y).flatten(1).var(1).view(-1, *[1] * (y.dim() - 1))),
    "logsumexp": lambda y: y * torch.logsumexp(y, _axes(y), keepdim=True),
    "logsumexp and channels": lambda y: y * torch.logsumexp(y, (1, *_axes(y)), keepdim=True),
    "softmax": lambda y: 50 * y.flatten(2).softmax(-1).view_as(y),
    "softmax of pixels in a list": lambda y: 50 * y.flatten(2).transpose(1, 2).softmax(1).transpose(1, 2).reshape(y.shape),
    "length of each channel": lambda y: 9 * F.normalize(y.flatten(2), dim=-1).view_as(y),
    "log softmax": lambda y: y.flatten(2).log_softmax(-1).view_as(y),
}


@pytest.mark.parametrize("name", _REDUCTIONS)
def test_any_tiling_is_exact(name: str) -> None:
    models = {axes: seeded(partial(AroundFunction, _REDUCTIONS[name], axes=axes)) for axes in (1, 2, 3)}

    assert_streams(models[2], (1, 3, 7, 6))

    @settings(max_examples=max(2, settings().max_examples // 75))
    @given(case=st.sampled_from((2, 3, 1)).flatmap(lambda axes: st.tuples(st.just(axes), cases(axes=axes))))
    def check(case: tuple[int, tuple[tuple[int, ...], sft.Options]]) -> None:
        axes, (shape, options) = case
        assert_exact_in_strips(models[axes], shape, options, steps=1)

    check()


def test_argmax_is_the_first_largest_element() -> None:
    """Panels run one after another; the first element of the image may be in a later panel."""
    x = torch.zeros(1, 1, 6, 6)
    x[0, 0, 1, 5] = x[0, 0, 3, 0] = x[0, 0, 1, 3] = 1.0
    model = _Places()
    net = sft.compile(model, (1, 1, 6, 6), options=sft.Options(tile=(2, 2)))
    images = [x.clone().requires_grad_() for _ in range(2)]
    for call, value in zip((model, net), images, strict=True):
        largest, place = call(value)
        assert int(place) == 9
        largest.sum().backward()
    assert torch.equal(images[0].grad, images[1].grad)  # type: ignore[arg-type]


class _Places(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest, place = F.adaptive_max_pool2d(x + 0, 1, return_indices=True)
        return largest, place


def test_infinite_elements() -> None:
    model = AroundFunction(lambda y: torch.logsumexp(y, (2, 3), keepdim=True), axes=2)
    assert model.before.bias is not None
    with torch.no_grad():
        model.before.bias.fill_(-float("inf"))
    x = torch.randn(1, 3, 6, 5)
    net = sft.compile(model, tuple(x.shape), options=sft.Options(tile=(2, None)))
    assert torch.equal(net(x).isnan(), model(x).isnan())


class _SpatialPyramid(nn.Module):
    """All poolings of a head in one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, stride=2)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        pooled = [F.adaptive_avg_pool2d(y, 1).flatten(1), F.adaptive_max_pool2d(y, 1).flatten(1), y.std((2, 3)), y.amin((2, 3))]
        out: Tensor = self.head(torch.cat(pooled, 1))
        return out


@pytest.mark.parametrize("options", [sft.Options(tile=(3, 4), batch_tile=1), sft.Options(tile=(1, None)), sft.Options(strategy="none")])
def test_several_in_one_walk(options: sft.Options) -> None:
    assert_exact(seeded(_SpatialPyramid), torch.randn(3, 3, 17, 13), options=options)


def test_a_softmax_of_overflowed_values_is_nan_everywhere() -> None:
    """As in ATen."""

    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(2).softmax(-1).view_as(x)

    x = image(1, 2, 20, 18)
    net = sft.compile(Softmax(), tuple(x.shape), options=sft.Options(tile=(3, None)))
    torch.testing.assert_close(net(x), Softmax()(x), rtol=1e-12, atol=0)
    x[0, 1, 7, 5] = float("inf")
    assert torch.equal(net(x).isnan(), Softmax()(x).isnan()) and net(x)[0, 1].isnan().all() and not net(x)[0, 0].isnan().any()
