"""Images with different numbers of samples: one reference for all of a batch, or independent images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_CASES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "one encoder": lambda m, x, other: m.encoder(x) + m.encoder(other),
    "pooled": lambda m, x, other: m.encoder(x) * m.encoder(other).mean((2, 3), keepdim=True).sigmoid(),
    "as it is": lambda m, x, other: m.encoder(x) * other.mean(1, keepdim=True),
}


class _Two(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function, self.encoder = function, nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.function(self, x, other)


@pytest.mark.parametrize("tile", [None, (4, None), (6, 7)])
@pytest.mark.parametrize("batches", [(2, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("name", _CASES)
def test_one_reference_for_all_samples(name: str, batches: tuple[int, int], tile: tuple[int, int | None] | None) -> None:
    first, second = (image(n, 3, 16, 14, seed=n) for n in batches)
    assert_exact(seeded(lambda: _Two(_CASES[name])), first, second, options=sft.Options(tile=tile, batch_tile=1 if tile else None), steps=1)


@pytest.mark.parametrize("tile", [None, (4, None)])
def test_images_apart(tile: tuple[int, int | None] | None) -> None:
    model = seeded(lambda: _Two(lambda m, x, other: (m.encoder(x), m.encoder(other))))
    assert_exact(model, image(2, 3, 16, 14), image(3, 3, 16, 14), options=sft.Options(tile=tile), steps=1)


_PIXELS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "passed on": lambda m, x, pixel: m.encoder(x) + m.encoder(pixel),
    "as it is": lambda m, x, pixel: m.encoder(x) * pixel.mean(1, keepdim=True),
    "channels last": lambda m, x, pixel: (m.encoder(x).permute(0, 2, 3, 1) * pixel.mean(1, keepdim=True).permute(0, 2, 3, 1)).tanh(),
}


@pytest.mark.parametrize("tile", [None, (4, None), (6, 7)])
@pytest.mark.parametrize("batches", [(2, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("name", _PIXELS)
def test_an_input_of_one_pixel(name: str, batches: tuple[int, int], tile: tuple[int, int | None] | None) -> None:
    model = seeded(lambda: _Two(_PIXELS[name])).eval()
    assert_exact(model, image(batches[0], 3, 16, 14), image(batches[1], 3, 1, 1), options=sft.Options(tile=tile), steps=1)


def test_a_reference_with_a_gradient_of_its_own() -> None:
    model = seeded(lambda: _Two(_CASES["one encoder"]))
    x, other = image(2, 3, 16, 14), image(1, 3, 16, 14)
    net = sft.compile(model, [x.shape, other.shape], options=sft.Options(tile=(4, None)))
    gradients = [torch.autograd.grad(each(x, other.requires_grad_()).square().sum(), other)[0] for each in (model, net)]
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("size", [(16, 14), (4, 7)])
@pytest.mark.parametrize("tile", [None, (4, None), (6, 7)])
def test_one_mask_for_all_samples(size: tuple[int, int], tile: tuple[int, int | None] | None) -> None:
    model = seeded(lambda: _Two(lambda m, x, mask: m.encoder(x) * nn.functional.interpolate(mask, x.shape[2:]).sigmoid()))
    assert_exact(model, image(2, 3, 16, 14), image(1, 1, *size), options=sft.Options(tile=tile), steps=1)


def test_a_reference_is_not_read_in_strips() -> None:
    net = sft.compile(seeded(lambda: _Two(_CASES["one encoder"])).float(), [(2, 3, 16, 14), (1, 3, 16, 14)])
    pixels = np.zeros((2, 16, 14, 3), np.float32)
    with pytest.raises(
        sft.InputError, match=r"input 1 has 1 sample\(s\), another image 2: .* give a tensor on the model's device, or 2 samples"
    ):
        net(pixels, pixels[:1])
    assert net(pixels, torch.zeros(1, 3, 16, 14)).shape == (2, 4, 16, 14)
