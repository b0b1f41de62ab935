"""Matrices of channels: decompositions and inverses on full tensors, with checks of their operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_EYE = torch.eye(4, dtype=torch.float64)
#: Of a symmetric matrix with positive eigenvalues.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "inverse": torch.linalg.inv,
    "square root": torch.linalg.cholesky,
    "solution": lambda g: torch.linalg.solve(g, _EYE + 1),
    "determinant": lambda g: torch.linalg.slogdet(g)[1],
    "eigenvalues": torch.linalg.eigvalsh,
    "nuclear norm": lambda g: torch.linalg.matrix_norm(g, "nuc"),
    "exponential": lambda g: torch.matrix_exp(g / 100),
}


class _Gram(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.function(torch.einsum("nchw,ndhw->ncd", y, y) / y[0, 0].numel() + _EYE)


class _Mixing(nn.Module):
    """An invertible convolution of one pixel, as in flows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.conv2d(self.conv(x), torch.linalg.inv(self.weight)[:, :, None, None])
        return y, torch.linalg.slogdet(self.weight)[1] * x.shape[2] * x.shape[3]


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_matrices_of_an_image(name: str) -> None:
    model = seeded(lambda: _Gram(_FUNCTIONS[name]))
    assert_exact(model, image(2, 3, 14, 12))
    assert_exact(model, image(2, 3, 14, 12), options=sft.Options(tile=(4, None)), steps=1)


def test_an_inverted_weight() -> None:
    model = seeded(_Mixing)
    assert_exact(model, image(2, 3, 14, 12))
    assert_exact(model, image(1, 3, 14, 12), options=sft.Options(tile=(4, 5)), steps=1)
    net = sft.compile(model, (1, 3, 14, 12))
    with torch.no_grad():
        model.weight.zero_()
    for call in (model, net):
        with pytest.raises(RuntimeError, match="singular"):
            call(image(1, 3, 14, 12))


@pytest.mark.parametrize("name", ["inverse", "solution", "determinant", "square root", "of the transpose"])
def test_a_weight_that_lies_in_memory_by_columns(name: str) -> None:
    """`torch.linalg.qr` returns such matrices, and a derivative requires them."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = (torch.eye(4) + 0.1 * torch.rand(4, 4)).double()
            self.weight = nn.Parameter((weight + weight.T).T if name == "of the transpose" else (weight + weight.T).t().contiguous().t())

        def forward(self, x: Tensor) -> Tensor:
            operand = self.weight.T if name == "of the transpose" else self.weight
            matrix = torch.linalg.det(operand) if name == "of the transpose" else _FUNCTIONS[name](operand)
            return F.conv2d(x, self.weight[:, :3, None, None]) * matrix.sum()

    model = seeded(Mixed)
    assert name == "of the transpose" or model.weight.stride() == (1, 4)
    assert_exact(model, image(2, 3, 10, 12), options=sft.Options(tile=(4, None)), steps=1)
