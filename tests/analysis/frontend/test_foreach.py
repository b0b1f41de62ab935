"""Operators that write and return no tensor: those on lists of tensors, and custom ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.analysis.frontend.foreach import decompose_foreach
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_SHAPE = (2, 3, 14, 11)


class _Model(nn.Module):
    """A convolution, two buffers, a parameter, and a function of them."""

    def __init__(self, then: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.then = nn.Conv2d(3, 4, 3, padding=1), then
        self.scale = nn.Parameter(torch.randn(4, 1, 1))
        self.register_buffer("average", torch.ones(4, 1, 1))
        self.register_buffer("other", torch.full((4, 1, 1), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.then(self, self.conv(x))
        return out


def _activations(model: Any, y: Tensor) -> Tensor:
    a, b = y * 1, y * 2
    torch._foreach_mul_([a, b], 3.0)
    torch._foreach_add_([a, b], [y, y], alpha=0.5)
    torch._foreach_neg_((b,))
    return a + b


def _factors(model: Any, y: Tensor) -> Tensor:
    a, b = y * 1, y * 2
    torch._foreach_addcmul_([a, b], [y, y], [y.sin(), y], 0.5)
    torch._foreach_addcmul_([a, b], [y, y], [y.sin(), y], [0.25, 2.0])
    torch._foreach_lerp_([a, b], [y, y], 0.25)
    torch._foreach_mul_([a, b], [2.0, 3.0])
    return a + b


def _buffers(model: Any, y: Tensor) -> Any:
    torch._foreach_mul_([model.average, model.other], 1.5)
    return y * model.average + model.other


def _averages(model: Any, y: Tensor) -> Any:
    with torch.no_grad():
        torch._foreach_lerp_([model.average], [model.scale], 0.1)
        torch._foreach_zero_([model.other])
        torch._foreach_add_([model.other], [y.mean((0, 2, 3))[:, None, None]])
    return y * model.average * model.scale + model.other


def _mask(model: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.zeros_like(y)
        torch._foreach_add_([mask], [y])
        torch.ops.aten.mul_.Tensor(mask, y)
    return y * mask


@pytest.mark.parametrize("then", [_activations, _factors, _buffers, _averages, _mask])
def test_lists_are_written_tensor_by_tensor(then: Any) -> None:
    """They have no results, like assertions, which a capture drops: activations and buffers must change."""
    assert_exact(seeded(lambda: _Model(then)), image(*_SHAPE), options=sft.Options(tile=(5, None)), steps=3)


def _hidden(model: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_mul_([y], 2.0)
    return y


def _teacher(model: Any, y: Tensor) -> Any:
    with torch.no_grad():
        torch._foreach_lerp_([model.scale], [y.mean((0, 2, 3))[:, None, None]], 0.1)
    return y * model.scale


def _behind(model: Any, y: Tensor) -> Tensor:
    torch._foreach_mul_([y.detach()], 2.0)
    return y


def _by_one_tensor(model: Any, y: Tensor) -> Tensor:
    a = y * 1
    torch._foreach_addcmul_([a], [y], [y], torch.tensor([2.0]))
    return a


def _crossing(model: Any, y: Tensor) -> Tensor:
    """The second call reads the first call's result, and eager PyTorch's gradient is that of the value before."""
    a, b = y * 1, y * 2
    torch._foreach_add_([a, b], [b, a])
    return a + b


@torch.library.custom_op("sft_tests::double_", mutates_args={"x"})
def _double_(x: Tensor) -> None:
    x.mul_(2)


def _own(model: Any, y: Tensor) -> Any:
    _double_(model.average)
    return y * model.average


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (_hidden, r"writes in place \(mul_\), under torch\.no_grad, into a tensor of shape"),
        (_teacher, r"writes in place \(lerp_\), under torch\.no_grad, into the parameter scale, .*register_buffer"),
        (_behind, r"writes in place \(mul_\) through x\.detach\(\)"),
        (_by_one_tensor, r"`forward` calls _foreach_addcmul_, which is not the same as one call for each tensor here"),
        (_crossing, r"`forward` calls _foreach_add_, which is not the same as one call for each tensor here"),
        (_own, r"\(the model itself\): sft_tests\.double_\.default is not an ATen operator; write the model with plain"),
    ],
)
def test_writes_past_autograd_are_refused(then: Any, message: str) -> None:
    with pytest.raises(sft.UnsupportedError, match=message):
        sft.compile(seeded(lambda: _Model(then)), _SHAPE)


def test_lists_of_different_lengths_are_not_decomposed() -> None:
    a = torch.ones(2)
    assert decompose_foreach("_foreach_mul_", ([a], [a, a]), {}) is None
    assert decompose_foreach("_foreach_maximum_", ([a], [a]), {}) is None, "tensors have no maximum_"
    assert decompose_foreach("_foreach_neg_", ([a, a],), {}) is None
    assert decompose_foreach("_foreach_mul_", (), {"self": [a], "scalar": 2.0}) is None
