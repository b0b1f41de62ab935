"""Convolutions with weights that a model computes from each image, or from all of the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_Function = Callable[["_Making", Tensor, Tensor], Tensor]
#: Of an image and a smaller one, both with four channels.
_FUNCTIONS: dict[str, _Function] = {
    "means as weights": lambda m, x, y: F.conv2d(x, y.mean((2, 3))[:, :, None, None]),
    "cross-correlation": lambda m, x, y: F.conv2d(x, F.adaptive_avg_pool2d(y, 3), padding=1),
    "of the mean image": lambda m, x, y: F.conv2d(x, m.linear(y.mean((0, 2, 3))).view(4, 4, 1, 1)),
    "for each image": lambda m, x, y: F.conv2d(
        x.reshape(1, -1, *x.shape[2:]), m.linear(y.mean((2, 3))).view(-1, 4, 1, 1), groups=x.shape[0]
    ).view_as(x),
    "transposed": lambda m, x, y: F.conv_transpose2d(y, m.linear(x.amax((2, 3))).view(-1, 4, 1, 1)[:4], stride=2),
    "bias": lambda m, x, y: F.conv2d(x, m.down.weight, y.mean((0, 2, 3)), padding=1),
    "attention among images": lambda m, x, y: x * torch.einsum("nc,mc->nm", y.mean((2, 3)), y.mean((2, 3)))[:, :1, None, None],
    "images in another order": lambda m, x, y: x * y.mean((2, 3)).flip(0)[:, :, None, None],
}


class _Making(nn.Module):
    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.function, self.first = function, nn.Conv2d(3, 4, 3, padding=1)
        self.down: nn.Conv2d = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.linear: nn.Linear = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.function(self, y, self.down(y))


@pytest.mark.parametrize("num_batch", [2, 4])
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_weights_computed_from_images(name: str, num_batch: int) -> None:
    """With as many images as channels the size does not determine the batch dimension."""
    model = seeded(lambda: _Making(_FUNCTIONS[name]))
    assert_exact(model, image(num_batch, 3, 18, 14))
    assert_exact(model, image(num_batch, 3, 18, 14), options=sft.Options(tile=(5, None)), steps=1)
    assert_exact(model, image(num_batch, 3, 18, 14), options=sft.Options(tile=(4, 8), batch_tile=1), steps=1)


def test_the_batch_is_only_taken_whole_where_that_is_needed() -> None:
    tiles = {}
    for name in ("means as weights", "images in another order"):
        model = seeded(lambda name=name: _Making(_FUNCTIONS[name]))  # type: ignore[misc]
        plan = sft.plan(model, (2, 3, 18, 14), options=sft.Options(tile=(5, None)))
        tiles[name] = {segment.batch_tile for segment in plan.segments if segment.mode == "tiled"}
    assert tiles == {"means as weights": {2}, "images in another order": {1}}
