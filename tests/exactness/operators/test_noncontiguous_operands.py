"""Untiled operators on noncontiguous values with noncontiguous gradients.

Torch makes operands of some kernels contiguous before it calls them; traced kernels lack this copy.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_CHANNELS, _POSITIONS = 8, 12

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda t: F.layer_norm(t, (_POSITIONS,)),
    "softmax": lambda t: t.softmax(1),
    "cdist": lambda t: torch.cdist(t, 2 * t + 1, p=3.0),
    "attention": lambda t: F.scaled_dot_product_attention(t, 2 * t, t + 1),
    "bmm": lambda t: torch.bmm(t, t.transpose(1, 2)),
    "max_pool": lambda t: F.max_pool1d(t, 2),
    "interpolate": lambda t: F.interpolate(t, size=17, mode="linear"),
    "pad": lambda t: F.pad(t, (2, 3), "reflect"),
    "cumprod": lambda t: t.cumprod(2),
    "fft": lambda t: torch.fft.fft(t, dim=1).real,
    "inverse": lambda t: torch.linalg.inv(t[:, :, :_CHANNELS] + 9 * torch.eye(_CHANNELS, dtype=t.dtype)),
}
_MODULES: dict[str, Callable[[], nn.Module]] = {
    "group_norm": lambda: nn.GroupNorm(4, _CHANNELS),
    "conv": lambda: nn.Conv1d(_CHANNELS, 6, 3, padding=1),
    "conv_transpose": lambda: nn.ConvTranspose1d(_CHANNELS, 6, 3, stride=2),
    "linear": lambda: nn.Linear(_POSITIONS, 5),
    "batch_norm": lambda: nn.BatchNorm1d(_CHANNELS),
}


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _OutOfOrder(nn.Module):
    """An operator with a transposed operand and a transposed gradient of its result."""

    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Linear(_CHANNELS, _CHANNELS)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.scale(x.flatten(2).flip(2).transpose(1, 2))  # flipped values run whole
        products: Tensor = self.operator(tokens.transpose(1, 2))
        return products.transpose(1, 2).cos()


@pytest.mark.parametrize("name", [*_FUNCTIONS, *_MODULES])
def test_operators_out_of_order(name: str) -> None:
    operator = _MODULES[name]() if name in _MODULES else _Function(_FUNCTIONS[name])
    assert_exact(seeded(lambda: _OutOfOrder(operator)), image(2, _CHANNELS, 3, 4))


@pytest.mark.parametrize("options", [None, sft.Options(tile=(8, 24)), sft.Options(strategy="none")])
def test_a_norm_of_positions_whose_gradient_is_transposed(options: sft.Options | None) -> None:
    """The head of attention in diffusion models. Regression: gradients were those of other channels."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.query = nn.GroupNorm(4, _CHANNELS), nn.Linear(_CHANNELS, _CHANNELS)

        def forward(self, x: Tensor) -> Tensor:
            query: Tensor = self.query(self.norm(x.flatten(2)).transpose(1, 2))
            return query

    assert_exact(seeded(Head), image(2, _CHANNELS, 16, 24), options=options)


@pytest.mark.parametrize("operand", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_to_parameters_in_any_layout(operand: int, is_causal: bool) -> None:
    """Parameters of four dimensions are channels last after ``model.to(memory_format=torch.channels_last)``."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(1, 2, _POSITIONS, _CHANNELS // 2))

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.reshape(len(x), 2, _CHANNELS // 2, _POSITIONS).transpose(2, 3)
            query, key, value = (self.latents if number == operand else tokens for number in range(3))
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    model = seeded(Attention)
    model.latents.data = model.latents.data.contiguous(memory_format=torch.channels_last)
    assert_exact(model, image(1, _CHANNELS, 3, 4))
