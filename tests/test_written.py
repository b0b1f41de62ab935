"""What `forward` writes into: buffers as large as the image, and its own inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft

from .helpers.exactness import assert_exact
from .helpers.models import image, seeded


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
    net, given = sft.compile(model, x.shape, options=sft.Options(tile=tile)), x.clone()
    torch.testing.assert_close(net(given), model(x.clone()), rtol=1e-12, atol=1e-12)
    assert torch.equal(given, x)


def test_a_call_of_its_own_is_refused_where_it_would_run_twice() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x / 255)

        def forward(self, x: Tensor) -> Any:
            return self.conv(x)

    model, x = seeded(Scaled), image(1, 3, 16, 16)
    with pytest.raises(sft.InputError, match=r"`__call__` of its own.*nn.Sequential\(model\)"):
        sft.compile(model, x.shape)
    torch.testing.assert_close(sft.compile(nn.Sequential(model), x.shape)(x), model(x))
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double())  # whose class has one, too, for its tracebacks
    torch.testing.assert_close(sft.compile(traced, x.shape)(x), traced(x))
