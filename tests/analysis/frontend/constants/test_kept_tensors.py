"""Tensors that `forward` leaves in attributes: state and auxiliary losses are refused, feature maps and caches of constants are not."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import relative_error
from tests.helpers.models import image

_SHAPE = (2, 3, 11, 10)

Rule = Callable[[Any, Any, Tensor], Any]


class _Settings:
    """An object with an attribute."""

    def __init__(self, last: Tensor | None = None) -> None:
        self.last = last


class _Keeping(nn.Module):
    """A model whose `forward` is a function of the module, the output of a convolution, and the input."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.conv, self.rule = nn.Conv2d(3, 3, 3, padding=1), rule
        self.last: Tensor | None = None
        self.first: Tensor | None = None
        self.pair: tuple[Tensor | None, int] = (None, 0)
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.named: dict[str, Tensor] = {}
        self.settings = _Settings()
        self.zeros = torch.zeros(_SHAPE, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rule(self, self.conv(x), x)
        return y


def _attribute(model: Any, y: Any, x: Tensor) -> Any:
    y = y if model.last is None else y + model.last
    model.last = y.detach()
    return y


def _replaced_tensor(model: Any, y: Any, x: Tensor) -> Any:
    y = y + model.zeros
    model.zeros = y.detach()
    return y


def _first_input(model: Any, y: Any, x: Tensor) -> Any:
    model.first = x.detach() if model.first is None else model.first
    return y - model.first


def _item_of_tuple(model: Any, y: Any, x: Tensor) -> Any:
    y = y if model.pair[0] is None else y * model.pair[0].mean()
    model.pair = (y.detach(), 1)
    return y


def _item_of_deque(model: Any, y: Any, x: Tensor) -> Any:
    model.recent.append(y.mean().detach())
    return y + sum(model.recent)


def _item_of_dictionary(model: Any, y: Any, x: Tensor) -> Any:
    y = y + model.named.get("last", 0.0)
    model.named["last"] = y.detach()
    return y


def _object(model: Any, y: Any, x: Tensor) -> Any:
    y = y if model.settings.last is None else y + model.settings.last
    model.settings.last = y.detach()
    return y


def _new_object(model: Any, y: Any, x: Tensor) -> Any:
    y = y if model.settings.last is None else y + model.settings.last
    model.settings = _Settings(y.detach())
    return y


def _branch(model: Any, y: Any, x: Tensor) -> Any:
    y = y if model.last is None else 2 * y
    model.last = y.detach()
    return y


def _number(model: Any, y: Any, x: Tensor) -> Any:
    y = 2 * y if model.last is not None and model.last.sum() == 0 else y
    model.last = y.detach()
    return y


def _noise(model: Any, y: Any, x: Tensor) -> Any:
    model.first = torch.randn(3, 1, 1, dtype=torch.float64) if model.first is None else model.first
    return y + model.first


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (_attribute, "last"),
        (_replaced_tensor, "zeros"),
        (_first_input, "first"),
        (_item_of_tuple, "pair"),
        (_item_of_deque, "recent"),
        (_item_of_dictionary, "named"),
        (_object, "settings"),
        (_new_object, "settings"),
        (_branch, "last"),
        (_number, "last"),
        (_noise, "first"),
    ],
)
def test_state_is_refused_by_name(rule: Rule, name: str) -> None:
    keeping = _Keeping(rule).double()
    before = dict(vars(keeping))
    with pytest.raises(sft.UnsupportedError, match=rf"- 0\.{name}: `forward` keeps a tensor in this attribute.*register_buffer"):
        sft.compile(nn.Sequential(keeping), _SHAPE)
    assert all(value is before[key] for key, value in vars(keeping).items())
    assert not keeping.recent
    assert not keeping.named
    assert keeping.settings.last is None


def _feature_map(model: Any, y: Any, x: Tensor) -> Any:
    model.last = y.relu()
    model.recent.append(y.mean().detach())
    return 2 * model.last


def _reset(model: Any, y: Any, x: Tensor) -> Any:
    model.named.clear()
    model.named["mean"] = y.mean()
    model.named["mean"] = model.named["mean"] + x.mean()
    return y * model.named["mean"]


def _grid(model: Any, y: Any, x: Tensor) -> Any:
    if model.first is None or model.first.shape[-2:] != x.shape[-2:]:
        axes = [torch.linspace(-1, 1, size) for size in x.shape[-2:]]
        model.first = torch.stack(torch.meshgrid(*axes, indexing="ij")).to(x)
    return y + model.first.mean(0)


def _size(model: Any, y: Any, x: Tensor) -> Any:
    size = x.shape[-1]
    if size not in model.named:
        model.named[size] = x.new_ones(size).cumsum(0)
    return y * model.named[size]


@pytest.mark.parametrize("rule", [_feature_map, _reset, _grid, _size])
def test_calls_that_do_not_depend_on_each_other_are_exact(rule: Rule) -> None:
    torch.manual_seed(0)
    model = _Keeping(rule).double()
    net = sft.compile(copy.deepcopy(model), _SHAPE, options=sft.Options(tile=(4, 6)))
    for seed in range(2):
        for width in (10, 7):
            x = image(*_SHAPE[:3], width, seed=seed)
            assert relative_error(net(x), model(x)) <= 1e-12
    assert net.last is None
    assert not net.named


def _auxiliary_loss(model: Any, y: Any, x: Tensor) -> Any:
    model.last = y.square().mean()
    return y


def _auxiliary_losses(model: Any, y: Any, x: Tensor) -> Any:
    model.named["loss"] = y.square().mean().reshape(1)
    return y


class _WithAuxiliary(nn.Module):
    def __init__(self, model: _Keeping) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.model(x)
        assert self.model.last is not None
        return y, self.model.last


@pytest.mark.parametrize(("rule", "name"), [(_auxiliary_loss, "last"), (_auxiliary_losses, "named")])
def test_a_loss_in_an_attribute_is_refused_in_training(rule: Rule, name: str) -> None:
    """The caller would add one of an earlier call, or none."""
    model = _Keeping(rule).double()
    with pytest.raises(sft.UnsupportedError, match=f"{name}: `forward` keeps a number with a gradient in this attribute"):
        sft.compile(model, _SHAPE)
    net, x = sft.compile(model, (*_SHAPE[:3], None)), image(*_SHAPE)
    with pytest.raises(sft.UnsupportedError, match="Return it"):
        net(x)
    with torch.no_grad():
        assert relative_error(net(x), model.conv(x)) <= 1e-12
    net.requires_grad_(False)
    assert relative_error(net(x), model.conv(x)) <= 1e-12


def test_a_loss_that_is_returned_is_exact() -> None:
    model = _WithAuxiliary(_Keeping(_auxiliary_loss).double())
    net = sft.compile(copy.deepcopy(model), _SHAPE, options=sft.Options(tile=(4, 6)))
    for module in (model, net):
        y, loss = module(image(*_SHAPE))
        (y.abs().mean() + loss).backward()
    for ours, theirs in zip(net.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) <= 1e-12
