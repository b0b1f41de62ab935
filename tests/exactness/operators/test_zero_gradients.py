"""Gradients of zeros: values that are overwritten, or cropped, completely.

Eager PyTorch gives every parameter that the output depends on a gradient, also a gradient of zeros. An optimizer with momentum or weight
decay changes a parameter with a gradient of zeros, and not one without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.operator_cases import assert_streams


def _set_all(out: Tensor, x: Tensor) -> None:
    out[:] = x


def _set_all_channels(out: Tensor, x: Tensor) -> None:
    out[:, :4] = x


def _copy_broadcast(out: Tensor, x: Tensor) -> None:
    out.copy_(x.mean((2, 3), keepdim=True))


_WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": Tensor.copy_,
    "copy_ of a smaller tensor": _copy_broadcast,
    "all elements": _set_all,
    "all channels": _set_all_channels,
}


class _Overwritten(nn.Module):
    """The result of a convolution, overwritten by that of another one."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.overwritten, self.written, self.head = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 2, 3, padding=1),
        )
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        out = self.overwritten(x)
        self.write(out, self.written(x))
        y: Tensor = self.head(out)
        return y


class _Cropped(nn.Module):
    """A pad that crops all rows of the image and adds rows of zeros."""

    def __init__(self, pad: tuple[int, ...]) -> None:
        super().__init__()
        self.pad, self.head = pad, nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.pad(x, self.pad)) + self.head(x.detach()).mean()
        return y


@pytest.mark.parametrize("name", _WRITES)
def test_overwritten_values_have_a_gradient_of_zeros(name: str) -> None:
    model = seeded(lambda: _Overwritten(_WRITES[name]))
    assert_exact(model, image(2, 3, 9, 7), steps=1)
    if name == "copy_ of a smaller tensor":
        assert_exact(model, image(2, 3, 9, 7), options=sft.Options(tile=(3, None)), steps=1)
    else:
        assert_streams(model, (2, 3, 24, 20))


def test_overwritten_constants_take_no_operator() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.empty_like(x).copy_(x).relu()

    net: Any = sft.compile(Model(), (1, 3, 8, 8))
    assert [node.target for node in net._sft_engine.phases().graph.nodes if node.kind == "operator"] == ["aten.relu.default"]


@pytest.mark.parametrize("pad", [(-7, 3), (0, 0, -9, 2), (-3, 1, -9, 4)])
@pytest.mark.parametrize("tile", [None, (3, None)])
def test_cropped_images_have_a_gradient_of_zeros(pad: tuple[int, ...], tile: tuple[int, None] | None) -> None:
    assert_exact(seeded(lambda: _Cropped(pad)), image(2, 3, 9, 7), options=sft.Options(tile=tile), input_grad=True, steps=1)
