"""Names and metadata of a compiled model: the model's own signature, attributes and documentation; the handle of ``sft.of``."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import typing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.api.compiled_handle import HANDLE_NAMES
from tests.helpers.models import ConvNet, image, seeded

_SHAPE = (1, 3, 16, 12)


class _Documented(nn.Module):
    """A documented model."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)

    def forward(self, pixels: Tensor, scale: float = 1.0, *, flip: bool = False, **options: Any) -> Tensor:
        """Output of the model."""
        y: Tensor = self.conv(pixels.flip(3) if flip else pixels) * scale
        return y


class _Variadic(nn.Module):
    def forward(self, *images: Tensor) -> Tensor:
        return torch.stack(images).sum(0)


def test_the_signature_is_the_model_s_own() -> None:
    model = seeded(_Documented)
    net = sft.compile(model, _SHAPE)
    expected = "(pixels: Tensor, scale: float = 1.0, *, flip: bool = False, input_grad=None, **options: Any) -> Tensor"
    assert str(inspect.signature(net.forward)).replace("'", "") == expected
    own = dict(inspect.signature(model.forward).parameters)
    ours = dict(inspect.signature(net.forward).parameters)
    assert ours.pop("input_grad").kind is inspect.Parameter.KEYWORD_ONLY and ours == own
    assert list(inspect.signature(type(net).forward).parameters)[:3] == ["self", "pixels", "scale"]
    assert inspect.signature(net) == inspect.signature(model)
    assert inspect.signature(type(net)) == inspect.signature(_Documented)
    assert typing.get_type_hints(net.forward) == typing.get_type_hints(model.forward)
    for name in ("__doc__", "__name__", "__qualname__", "__module__"):
        assert getattr(net.forward, name) == getattr(model.forward, name)
    assert type(net).__doc__ == _Documented.__doc__ and type(net).__name__ == "_Documented"
    assert str(inspect.signature(sft.compile(_Variadic(), [_SHAPE, _SHAPE]).forward)) == "(*images: 'Tensor', input_grad=None) -> 'Tensor'"


def test_the_signature_of_a_forward_in_the_instance() -> None:
    """Libraries put a wrapped ``forward`` into the model itself."""
    model: Any = seeded(_Documented)
    inner = model.forward

    @functools.wraps(inner)
    def doubled(*args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = 2 * inner(*args, **kwargs)
        return y

    model.forward = doubled
    net, x = sft.compile(model, _SHAPE), image(*_SHAPE)
    assert list(inspect.signature(net.forward).parameters) == ["pixels", "scale", "flip", "input_grad", "options"]
    torch.testing.assert_close(net(x, flip=True), model(x, flip=True))
    net.forward = lambda x: "replaced"
    assert net(x) == "replaced" and model.forward is doubled
    del net.forward
    torch.testing.assert_close(net(x), model(x))


class _OwnInputGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor, input_grad: float = 2.0) -> Tensor:
        y: Tensor = self.conv(x) * input_grad
        return y


def test_an_argument_that_the_model_has_itself() -> None:
    model, x = seeded(_OwnInputGrad), image(*_SHAPE)
    net = sft.compile(model, _SHAPE)
    assert inspect.signature(net.forward) == inspect.signature(model.forward)
    torch.testing.assert_close(net(x, input_grad=3.0), model(x, input_grad=3.0))
    gradient = np.zeros(_SHAPE)
    sft.of(net)(x.numpy(), input_grad=gradient).sum().backward()
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-12)


class _Named(nn.Module):
    """Model with all of our names, each defined in another way."""

    plan_for = "of the class"

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Conv2d(3, 2, 3)
        self.last_reading = nn.Parameter(torch.ones(2, 1, 1))
        self.register_buffer("last_skipping", torch.zeros(2, 1, 1))
        self.weight_counters = 7

    @property
    def band_rows(self) -> str:
        return "a property"

    def compile(self, optimizer: str) -> str:  # type: ignore[override]
        return optimizer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.plan(x) * self.last_reading + self.last_skipping
        return y


def test_attributes_of_the_model_are_not_shadowed() -> None:
    model = seeded(_Named)
    net: Any = sft.compile(model, _SHAPE)
    for name in HANDLE_NAMES:
        own = getattr(model, name)
        assert getattr(net, name) is own or getattr(net, name) == own, name
    assert net.compile("adam") == "adam"
    handle = sft.of(net)
    net(image(*_SHAPE))
    assert isinstance(handle.plan, sft.Plan) and handle.plan_for(_SHAPE).input_shapes == (_SHAPE,)
    assert handle.last_reading is None and handle.last_skipping is None and handle.weight_counters is None
    with pytest.raises(sft.InputError, match="band_rows is for models on a mesh"):
        handle.band_rows(3)
    model.weight_counters = 8
    assert net.weight_counters == 8


def test_names_are_those_of_the_handle_where_they_are_free() -> None:
    net: Any = sft.compile(seeded(ConvNet), _SHAPE)
    assert net.plan is sft.of(net).plan and net.plan_for(_SHAPE) == net.plan
    net.plan = "mine"
    assert net.plan == "mine" and isinstance(sft.of(net).plan, sft.Plan)
    del net.plan
    assert isinstance(net.plan, sft.Plan)
    twins = (copy.deepcopy(net), pickle.loads(pickle.dumps(net)))
    assert all(twin.plan_for(_SHAPE) == net.plan for twin in twins)


def test_the_handle_of_a_model_in_a_wrapper() -> None:
    net = sft.compile(seeded(ConvNet), _SHAPE)
    wrapped: Any = torch.compile(net, backend="eager")
    assert sft.of(wrapped).plan is sft.of(net).plan
    assert "compiled ConvNet" in repr(sft.of(net)) and len(repr(sft.of(net))) < 300
    for other in (nn.Conv2d(3, 2, 3), nn.Sequential(net)):
        with pytest.raises(sft.InputError, match=r"is not a compiled model; give what sft.compile returned"):
            sft.of(other)


def test_the_type_is_that_of_the_model() -> None:
    net = sft.compile(seeded(_Documented), _SHAPE)
    width: int = net.conv.out_channels  # type checkers accept the attribute
    assert width == 4
    hints = typing.get_type_hints(sft.compile)
    assert hints["return"] is hints["model"] and hints["return"].__bound__ is nn.Module


def test_a_plan_prints_in_a_few_lines() -> None:
    plan = sft.plan(seeded(ConvNet), (1, 3, 256, 256), options=sft.Options(tile=(16, None)))
    assert "\n" not in repr(plan) and len(repr(plan)) < 250
    assert "training step on 1x3x256x256 (float64)" in repr(plan) and "11.00 GiB" in repr(plan)
    page = plan._repr_html_()
    assert page.startswith("<div>") and "<svg" in page and "budget 11.00 GiB" in page and "print(plan)" in page
    assert str(plan) == plan.explain()
