"""Complex numbers inside of a model: derivatives are conjugated, and a real operand gets the real part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_SHAPE = (2, 3, 20, 16)
_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, b: (a * b).real,
    "product with a conjugate": lambda a, b: (a * b.conj()).imag,
    "quotient": lambda a, b: (a / (b.exp() + 2)).real,
    "product with a number": lambda a, b: (a * (2 + 1j)).real,
    "sum with an imaginary part": lambda a, b: (a + 1j * b.real).imag,
    "sum and difference": lambda a, b: (a + b - a.real).abs(),
    "mean": lambda a, b: (a.mean((2, 3), keepdim=True) * b).real,
    "join": lambda a, b: torch.cat([a, b.real], 1).real,
    "single elements": lambda a, b: a.exp().real + b.sin().imag + a.abs() + b.angle(),
    "assigned parts": lambda a, b: _assigned(a, b).real,
    "filter": lambda a, b: torch.fft.ifft2(torch.fft.fft2(a) * b).real,
}


def _assigned(a: Tensor, b: Tensor) -> Tensor:
    """Low frequencies written as in Fourier neural operators."""
    out = torch.zeros_like(a)
    out[:, :, :3, 1:-1:2] = a[:, :, :3, 1:-1:2] * b[:, :, :3, 1:-1:2]
    out[:, :, 5] = b[:, :, 2]
    return out * b


class _Complex(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        out: Tensor = self.function(torch.complex(y, y * 2 + 1), torch.complex(y.exp(), self.second(x)))
        scaled: Tensor = out * y.mean()
        return scaled


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_gradients_through_complex_numbers(name: str) -> None:
    """Regression: gradients of products, quotients and sums were wrong by up to twice their size."""
    model = seeded(lambda: _Complex(_FUNCTIONS[name]))
    assert_exact(model, image(*_SHAPE))
    assert_exact(model, image(*_SHAPE), options=sft.Options(tile=(4, 16)), steps=1)
