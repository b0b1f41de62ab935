"""Writes of `forward` to buffers of the image's size and to its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded


class _Remembering(nn.Module):
    """A background that is as large as the image."""

    background: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.kind = nn.Conv2d(3, 4, 3, padding=1), kind
        self.register_buffer("background", torch.zeros(1, 4, 24, 20))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        if self.kind == "before and after":
            z = y + self.background
            self.background.lerp_(y.detach(), 0.5)
            return z + self.background
        if self.kind == "before":
            z = y + self.background
            self.background.lerp_(y.detach(), 0.5)
            return z
        if self.kind == "after":
            self.background.lerp_(y.detach(), 0.5)
            return y - self.background
        self.background.copy_(y.detach())
        return y


@pytest.mark.parametrize("kind", ["before", "after", "before and after", "written"])
def test_buffers_of_the_size_of_the_image(kind: str) -> None:
    model = seeded(lambda: _Remembering(kind))
    for options in (sft.Options(), sft.Options(tile=(5, None)), sft.Options(tile=(5, 8))):
        assert_exact(model, image(1, 3, 24, 20), options=options, steps=3)


class _Writing(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv, x)


_FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "scaled": lambda conv, x: conv(x.mul_(2)),
    "returned as well": lambda conv, x: (x.add_(1), conv(x)),
    "returned alone": lambda conv, x: x.add_(1),
    "a part of it returned": lambda conv, x: (x.add_(1)[:, :2], conv(x)),
}


@pytest.mark.parametrize("tile", [None, (5, None)])
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_inputs_that_are_written_into_stay_as_they_are(name: str, tile: tuple[int, None] | None) -> None:
    model, x = seeded(lambda: _Writing(_FUNCTIONS[name])), image(1, 3, 20, 16)
    net, x_ours = sft.compile(model, x.shape, options=sft.Options(tile=tile)), x.clone()
    torch.testing.assert_close(net(x_ours), model(x.clone()), rtol=1e-12, atol=1e-12)
    assert torch.equal(x_ours, x)


def test_an_overridden_call_method_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x / 255)

        def forward(self, x: Tensor) -> Any:
            return self.conv(x)

    model, x = seeded(Scaled), image(1, 3, 16, 16)
    with pytest.raises(sft.InputError, match=r"overrides `__call__`.*nn.Sequential\(model\)"):
        sft.compile(model, x.shape)
    torch.testing.assert_close(sft.compile(nn.Sequential(model), x.shape)(x), model(x))
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double())  # overrides it, too
    torch.testing.assert_close(sft.compile(traced, x.shape)(x), traced(x))


_HANDED_ON: dict[str, Callable[[Any, Tensor], Any]] = {
    "dropout that drops nothing": lambda conv, x: (y := conv(x)) + nn.functional.dropout(y, 0.0).relu_(),
    "dropout in evaluation": lambda conv, x: (y := conv(x)) + nn.functional.dropout(y, 0.3, training=False).mul_(2),
    "the same type": lambda conv, x: (y := conv(x)) + y.type_as(x).relu_(),
    "a product of one": lambda conv, x: (y := conv(x)) + torch.einsum("nchw->nhwc", y).relu_().permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("name", _HANDED_ON)
def test_writes_to_results_that_alias_their_operand(name: str) -> None:
    """These operators return their operand, against their schema."""
    assert_exact(seeded(lambda: _Writing(_HANDED_ON[name])), image(2, 3, 14, 12), options=sft.Options(tile=(5, None)), steps=1)


_THROUGH_VIEWS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "windows": (lambda y: y.unfold(2, 3, 3)[..., 1].zero_(), "`forward` writes in place into windows"),
    "strides": (
        lambda y: torch.as_strided(y, y.shape, y.stride()).relu_(),
        "`forward` writes in place through as_strided",
    ),
}


@pytest.mark.parametrize("name", _THROUGH_VIEWS)
def test_writes_through_views_that_torch_does_not_follow_are_refused(name: str) -> None:
    write, words = _THROUGH_VIEWS[name]

    def function(conv: Any, x: Tensor) -> Any:
        y = conv(x)
        write(y)
        return y

    with pytest.raises(sft.UnsupportedError, match=words):
        sft.compile(_Writing(function), (1, 3, 20, 22))


def test_writes_to_masked_pixels_are_refused_with_a_remedy() -> None:
    def function(conv: Any, x: Tensor) -> Any:
        y = conv(x).clone()
        y[y < 0] *= 0.1
        return y

    with pytest.raises(sft.UnsupportedError, match=r"where a mask says what changes, write torch\.where\(mask, new, old\)"):
        sft.compile(_Writing(function), (1, 3, 20, 22))
