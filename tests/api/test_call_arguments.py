"""Arguments of calls: constants, keywords, and containers of tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.torch_internals import pytree
from tests.helpers.exactness import gradient_errors, relative_error
from tests.helpers.models import image, seeded

_SHAPE = (2, 3, 14, 12)
_OPTIONS = sft.Options(tile=(5, None))


class _Flags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, mode: str = "plain", *, scale: float = 1.0, return_dict: bool = True, **extra: Any) -> Any:
        y = self.conv(x) * scale
        y = y.sin() if mode == "sine" else y
        for value in extra.values():
            y = y + value
        return {"y": y} if return_dict else (y,)


_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "flag": ((), {"return_dict": False}),
    "text": (("sine",), {}),
    "number": ((), {"scale": 0.5}),
    "all": (("sine",), {"scale": 2, "return_dict": False}),
    "tensor by an unknown name": ((), {"num_items": torch.tensor(3.0, dtype=torch.float64)}),
    "several": ((), {"a": image(2, 4, 12, 10), "b": 1.5}),
}


@pytest.mark.parametrize("kind", _CALLS)
def test_constants_and_keywords(kind: str) -> None:
    args, keywords = _CALLS[kind]
    model, x = seeded(_Flags), image(*_SHAPE)
    net = sft.compile(copy.deepcopy(model), _SHAPE, options=_OPTIONS)
    results = []
    for module in (net, model):
        leaf = x.clone().requires_grad_()
        out = module(leaf, *args, **keywords)
        (y,) = pytree.tree_leaves(out)
        y.square().sum().backward()
        results.append((type(out), y, leaf.grad, {name: p.grad for name, p in module.named_parameters()}))
    (kind_ours, ours, grad, grads), (kind_eager, eager, expected, expected_grads) = results
    assert kind_ours is kind_eager and relative_error(ours, eager) <= 1e-12
    assert grad is not None and expected is not None and relative_error(grad, expected) <= 1e-11
    assert max(gradient_errors(grads, expected_grads).values()) <= 1e-11


def test_constants_are_compared_by_value_and_type() -> None:
    model, x = seeded(_Flags), image(*_SHAPE)
    net: Any = sft.compile(model, _SHAPE, options=_OPTIONS)
    for scale in (2.0, 3.0, 2, True, 2.0):
        torch.testing.assert_close(net(x, scale=scale), model(x, scale=scale), rtol=1e-12, atol=1e-12)
    assert len(net._sft_engine.plan_cache.captures) == 5  # without scale, and with four different ones
    net(x, scale=1.0)  # the default
    assert len(net._sft_engine.plan_cache.captures) == 5


class _Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class _Batch:
    image: Tensor
    weight: Tensor


torch.export.register_dataclass(_Batch)


class _Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, batch: Any, *, names: Any = None) -> Tensor:
        tensors = [value for value in pytree.tree_leaves(batch) if isinstance(value, Tensor)]
        y: Tensor = self.conv(tensors[0]) * tensors[-1]
        return y


_BATCHES: dict[str, Any] = {
    "dict": {"image": image(*_SHAPE), "id": "slide 1", "weight": image(*_SHAPE, seed=1)},
    "ordered dict": OrderedDict(image=image(*_SHAPE), weight=image(*_SHAPE, seed=1)),
    "list": [image(*_SHAPE), image(*_SHAPE, seed=1)],
    "tuple": (image(*_SHAPE), 3, None, image(*_SHAPE, seed=1)),
    "named tuple": _Pair(image(*_SHAPE), image(*_SHAPE, seed=1)),
    "dataclass": _Batch(image(*_SHAPE), image(*_SHAPE, seed=1)),
    "nested": {"images": [image(*_SHAPE)], "more": {"weight": (image(*_SHAPE, seed=1),)}},
}


@pytest.mark.parametrize("kind", _BATCHES)
def test_containers_of_inputs(kind: str) -> None:
    model, batch = seeded(_Containers), _BATCHES[kind]
    net = sft.compile(model, (*_SHAPE[:2], None, None), options=_OPTIONS)
    assert relative_error(net(batch), model(batch)) <= 1e-12
    assert relative_error(net(batch=batch, names=["a", "b"]), model(batch)) <= 1e-12
    assert sft.of(net).plan_for(batch).input_shapes == (_SHAPE, _SHAPE)


def test_shapes_of_containers_and_keywords() -> None:
    model = seeded(_Containers)
    described: Any = {"image": _SHAPE, "id": "slide 1", "weight": torch.empty(_SHAPE)}
    for input_shape in ([described], {"batch": described}):
        net: Any = sft.compile(model, input_shape, options=_OPTIONS)
        net(_BATCHES["dict"])
        assert len(net._sft_engine.plan_cache.captures) == 1, "the plan of the first call is that of compile"
        assert sft.plan(model, input_shape, options=_OPTIONS) == net.plan_for(described) == net.plan
        assert sft.check(model, input_shape).ok
    varying = sft.compile(model, [{"image": (2, 3, None, None), "weight": (2, 3, None, None)}])
    assert relative_error(varying(_BATCHES["ordered dict"]), model(_BATCHES["ordered dict"])) <= 1e-12


@pytest.mark.parametrize("described", [[_SHAPE, torch.empty(_SHAPE)], (_SHAPE, _SHAPE), (_SHAPE, 3, None, [_SHAPE])])
def test_shapes_of_lists_among_the_arguments(described: Any) -> None:
    """``net([x, y])`` is described by a list in a list; a list of shapes alone is for ``net(x, y)``."""
    model = seeded(_Containers)
    net = sft.compile(model, [described], options=_OPTIONS)
    batch = pytree.tree_map_only(tuple, lambda _: image(*_SHAPE), described, is_leaf=lambda item: item == _SHAPE)
    batch = pytree.tree_map_only(Tensor, lambda _: image(*_SHAPE), batch)
    plan = sft.of(net).plan
    assert relative_error(net(batch), model(batch)) <= 1e-12
    assert sft.of(net).plan is plan
    assert sft.plan(model, [described], options=_OPTIONS) == plan
    assert sft.check(model, [described]).ok


def test_a_streamed_image_in_a_dictionary() -> None:
    model = seeded(_Containers)
    batch = {"image": image(*_SHAPE).numpy(), "weight": image(*_SHAPE, seed=1)}
    net = sft.compile(model, [batch], options=_OPTIONS)
    assert sft.of(net).plan.input_placements == ("source", "device")
    gradient = np.zeros(_SHAPE)
    y = net(batch, input_grad=[gradient, None])
    assert relative_error(y, model({"image": image(*_SHAPE), "weight": batch["weight"]})) <= 1e-12
    y.sum().backward()
    assert np.abs(gradient).max() > 0


def test_labels_without_channels_in_a_dictionary() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.conv(batch["image"]), batch["labels"])

    model = seeded(Loss)
    batch = {"image": image(*_SHAPE), "labels": torch.randint(4, (2, 14, 12))}
    torch.testing.assert_close(sft.compile(model, [batch], options=_OPTIONS)(batch), model(batch), rtol=1e-12, atol=1e-12)


@dataclass
class _Unregistered:
    image: Tensor


def test_arguments_that_are_neither_inputs_nor_constants_are_refused() -> None:
    net = sft.compile(seeded(_Containers), (*_SHAPE[:2], None, None))
    with pytest.raises(sft.InputError, match=r"is a .*_Unregistered; .*registered with torch.export.register_dataclass"):
        net(_Unregistered(image(*_SHAPE)))
    with pytest.raises(sft.InputError, match=r"\['image'\]\[1\] is a builtins.object"):
        net({"image": [image(*_SHAPE), object()]})
    with pytest.raises(sft.InputError, match="the call has no input, only arguments of type dict"):
        net({"image": 3})
    with pytest.raises(sft.InputError, match=r"only arguments of type str; .* such as sft\.sources\.open_image\(path\)"):
        net("slide.svs")
    with pytest.raises(sft.InputError, match="forward takes"):
        net(image(*_SHAPE), 2, 3)


def test_a_model_without_tensors_computes_on_the_device_of_its_input() -> None:
    net: Any = sft.compile(nn.MaxPool2d(2), (1, 3, 16, 16), budget="1GiB")
    engine = net._sft_engine
    for device in ("cpu", "meta"):
        snapshot = engine._snapshot()
        engine._resolve(snapshot, (torch.empty(1, 3, 16, 16, device=device),), None)
        assert snapshot.device.type == device
    with pytest.raises(sft.InputError, match="input 1 is on meta, the model on cpu"):
        engine._resolve(engine._snapshot(), (torch.empty(1, 3, 16, 16), torch.empty(1, 3, 16, 16, device="meta")), None)
