"""State of a training model: save, load, copy, average, change. Plain PyTorch is the reference."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import sft
from sft.planner.planner import plan_segments
from tests.helpers.eager_pairs import OPTIONS, SHAPE, assert_same_grads, assert_same_state, pair
from tests.helpers.exactness import relative_error
from tests.helpers.models import ConvNet, chain, image, seeded


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    module(image(*SHAPE, seed=seed)).square().mean().backward()
    optimizer.step()


def _norm_net() -> nn.Module:
    # No bias before the norm: its gradient is rounding error, which AdamW would scale up.
    return chain(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2))


def test_save_and_resume() -> None:
    """State of model and optimizer through a file, into a fresh compiled model, in the middle of training."""
    model, net = pair(_norm_net)
    eager_optimizer, optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, net))
    for seed in range(4):
        _train(model, eager_optimizer, seed)
    for seed in range(2):
        _train(net, optimizer, seed)
    stream = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream)
    fresh = sft.compile(seeded(_norm_net, seed=7), SHAPE, options=OPTIONS)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    fresh.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    for seed in range(2, 4):
        _train(fresh, optimizer, seed)
    assert_same_state(fresh, model)


def test_assigned_state_is_used() -> None:
    """``assign=True`` replaces the parameters by new tensors."""
    _, net = pair()
    other = seeded(ConvNet, seed=5)
    net.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    for module in (other, net):
        module.zero_grad()
        module(image(*SHAPE)).square().sum().backward()
    assert_same_grads(net, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"])
def test_copies_go_on_training(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, net = pair(_norm_net)
    for module in (model, net):
        _train(module, torch.optim.SGD(module.parameters(), lr=1e-2), 0)
    state = copy.deepcopy(net.state_dict())
    twin, eager_twin = copied(net), copied(model)
    for module in (twin, eager_twin):
        _train(module, torch.optim.SGD(module.parameters(), lr=1e-2), 1)
    assert_same_state(twin, eager_twin)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items()), "the original was trained"


def test_moving_average() -> None:
    model, net = pair(_norm_net)
    averages = []
    for module in (model, net):
        average = AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        for seed in range(3):
            _train(module, optimizer, seed)
            average.update_parameters(module)
        averages.append(average.eval())
    assert_same_state(averages[1], averages[0])
    with torch.no_grad():
        assert relative_error(averages[1](image(*SHAPE)), averages[0](image(*SHAPE))) <= 1e-9
    assert_same_state(net, model)


@pytest.mark.parametrize("what", ["momentum", "activation", "stride", "flag", "untied"])
def test_a_model_that_changes_after_its_first_step(what: str) -> None:
    """A captured graph has these as constants: a change must be detected."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
            self.norm, self.activation = nn.BatchNorm2d(3), cast(nn.Module, nn.ReLU())
            self.factor = 1.0
            if what == "untied":
                self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.activation(self.norm(self.first(x)))) * self.factor
            return out

    model, net = pair(Changing)
    for module in (model, net):
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        _train(module, optimizer, 0)
        changing = cast(Any, module)
        if what == "momentum":
            changing.norm.momentum = 0.5
        elif what == "activation":
            changing.activation = nn.Tanh()
        elif what == "stride":
            changing.second.stride = (2, 2)
        elif what == "flag":
            changing.factor = 3.0
        else:
            changing.second.weight = nn.Parameter(changing.second.weight.detach() * 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        _train(module, optimizer, 1)
    assert_same_grads(net, model)
    assert_same_state(net, model)


@dataclasses.dataclass
class _Settings:
    factor: float = 1.0


class _Containers(nn.Module):
    """Containers of many kinds that `forward` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.names, self.queue = nn.Conv2d(3, 2, 3), {"one"}, deque([1.0])
        self.array, self.bytes, self.settings = np.ones(1), bytearray(b"\x01"), _Settings()
        self.namespace = argparse.Namespace(factor=1.0)

    def forward(self, x: Tensor) -> Tensor:
        scale = len(self.names) * self.queue[0] * float(self.array[0]) * self.bytes[0] * self.settings.factor * self.namespace.factor
        output: Tensor = self.conv(x) * scale
        return output


_CHANGES: dict[str, Callable[[_Containers], object]] = {
    "set": lambda m: m.names.add("two"),
    "queue": lambda m: m.queue.__setitem__(0, 3.0),
    "array": lambda m: m.array.fill(3.0),
    "bytes": lambda m: m.bytes.__setitem__(0, 3),
    "dataclass": lambda m: setattr(m.settings, "factor", 3.0),
    "namespace": lambda m: setattr(m.namespace, "factor", 3.0),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_changes_inside_of_attributes_are_detected(what: str) -> None:
    model, net = pair(_Containers)
    for module in (model, net):
        module(image(*SHAPE))
        _CHANGES[what](cast(_Containers, module))
    torch.testing.assert_close(net(image(*SHAPE)), model(image(*SHAPE)), rtol=1e-10, atol=1e-10)


def test_an_attribute_that_changes_at_every_step_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.capture_cache._MAX_CAPTURES", 2)
    monkeypatch.setattr("sft.api.plan_cache._MAX_PLANS", 3)
    monkeypatch.setattr("sft.api.plan_cache._MAX_CACHED_OBJECTS", 4)
    model, net = pair(lambda: nn.Conv2d(3, 2, 3))
    for step in range(4):
        cast(Any, net).epoch = step
        assert relative_error(net(image(*SHAPE)), model(image(*SHAPE))) <= 1e-12
    plan_cache = cast(Any, net)._sft_engine.plan_cache
    assert [len(known) for known in (plan_cache.captures, plan_cache.prepared, plan_cache.plans)] == [2, 3, 4]


def test_a_size_whose_programs_were_dropped_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.plan_cache._MAX_PLANS", 1)
    planned = MagicMock(wraps=plan_segments)
    monkeypatch.setattr("sft.api.plan_search.plan_segments", planned)
    model, net = pair(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1)))
    sizes = ((1, 3, 64, 48), (1, 3, 96, 48), (1, 3, 80, 64))
    net = cast(Any, sft.compile(model, sizes[0], budget="400KiB"))
    first = [net.plan_for(size) for size in sizes]
    num_planned = planned.call_count
    assert any(plan.segments[0].mode == "tiled" for plan in first)
    assert [net.plan_for(size) for size in sizes] == first
    assert planned.call_count == num_planned
    x = image(*sizes[0])
    assert relative_error(net(x), model(x)) <= 1e-12


class _Scaled(nn.Module):
    """Counts times a plain attribute, which determines the type of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Any = 1
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), counts * self.factor


def test_an_attribute_that_is_set_to_an_equal_value_of_another_type() -> None:
    model, counts = _Scaled().double(), torch.arange(12).view(1, 1, 3, 4)
    net: Any = sft.compile(model, [SHAPE, counts])
    for factor in (1, 1.0, True, 1):
        model.factor = factor
        scaled = net(image(*SHAPE), counts)[1]
        assert scaled.dtype == (counts * factor).dtype and torch.equal(scaled, counts * factor), factor


def test_parameters_are_swapped_after_compilation() -> None:
    """``torch.utils.swap_tensors``, by which libraries replace parameters, refuses those with weak references."""
    model, net = pair(_norm_net)
    x = image(*SHAPE)
    for each in (model, net):
        each(x).square().mean().backward()
        each.zero_grad()
        for parameter in list(each.parameters()):
            torch.utils.swap_tensors(parameter, nn.Parameter(2 * parameter.detach()))
    for each in (model, net):
        each(x).square().mean().backward()
    assert_same_grads(model, net)
    assert_same_state(model, net)
