"""State outside of module attributes that `forward` changes: other objects, classes, generators and iterators."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.analysis.frontend.module_state import preserve_objects
from sft.analysis.frontend.side_effect_checks import forbid_external_rng
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_SHAPE = (1, 3, 24, 20)

_dice = random.Random(0)


@dataclass
class _Box:
    """An object that equals other objects and refers to itself."""

    calls: int = 0
    seen: list[int] = field(default_factory=list)
    features: Any = None
    other: Any = None


class _Model(nn.Module):
    """A convolution, an object, and a function of both."""

    steps: ClassVar[int] = 0

    def __init__(self, then: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.then, self.box = nn.Conv2d(3, 4, 3, padding=1), then, _Box()
        self.box.other = {"itself": [self.box]}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.then(self, self.conv(x))
        return out


def _count(model: Any, y: Tensor) -> Any:
    model.box.calls += 1
    return y * model.box.calls


def _append(model: Any, y: Tensor) -> Any:
    model.box.other["itself"][0].seen.append(1)
    return y * len(model.box.seen)


def _begin(model: Any, y: Tensor) -> Any:
    if not hasattr(model.box, "has_begun"):
        model.box.has_begun = True
        return y * 2
    return y


def _count_in_the_class(model: Any, y: Tensor) -> Any:
    type(model).steps += 1
    return y * type(model).steps


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (_count, r"\(an object _Box\): `forward` sets calls, to 1, so the next call computes other values"),
        (_append, r"\(an object _Box\): `forward` sets seen, to \[1\], so the next call computes other values"),
        (_begin, r"\(an object _Box\): `forward` sets has_begun, to True, so the next call computes other values"),
        (_count_in_the_class, r"\(the class _Model\): `forward` sets steps, to 1, so the next call computes other values"),
    ],
)
def test_state_that_changes_the_next_call_is_refused(then: Any, said: str) -> None:
    """All steps would be like the first."""
    model = seeded(lambda: _Model(then))
    with pytest.raises(sft.UnsupportedError, match=said):
        sft.compile(model, _SHAPE)
    assert (model.box.calls, model.box.seen, _Model.steps, hasattr(model.box, "has_begun")) == (0, [], 0, False)


def _keep(model: Any, y: Tensor) -> Tensor:
    model.box.calls += 1
    model.box.seen.append(y)
    model.box.features = y
    type(model).steps += 1
    return y.relu()


def test_state_that_no_call_reads_is_restored() -> None:
    model = seeded(lambda: _Model(_keep))
    try:
        net = sft.compile(model, _SHAPE)
        with torch.no_grad():
            net(image(*_SHAPE).contiguous(memory_format=torch.channels_last))
        assert (model.box.calls, model.box.seen, model.box.features, _Model.steps) == (0, [], None, 0)
        assert_exact(model, image(*_SHAPE), options=sft.Options(tile=(5, 20)))
    finally:
        _Model.steps = 0


def _numbers() -> Iterator[int]:
    yield from range(1, 100)


@pytest.mark.parametrize(
    ("source", "draw"),
    [
        (lambda: itertools.count(1), next),
        (lambda: itertools.cycle([1, 2]), next),
        (lambda: iter([1, 2, 3, 4]), next),
        (lambda: iter({1: 2, 3: 4}), next),
        (lambda: zip(range(9), itertools.count(1)), lambda pairs: next(pairs)[1]),
        (_numbers, next),
        (lambda: np.random.default_rng(0), lambda rng: float(rng.random())),
        (lambda: np.random.RandomState(0), lambda rng: float(rng.rand())),
        (lambda: random.Random(0), lambda rng: rng.random()),
    ],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_draws_in_forward_are_refused(source: Any, draw: Any, is_inside: bool) -> None:
    model = _Model(lambda model, y: y * draw(model.box.features if is_inside else model.source))
    model.box.features, model.source = source(), source()
    with pytest.raises(sft.UnsupportedError, match=r"_Model: `forward` draws from `a \w+ that it holds`, and a compiled model"):
        sft.compile(model, _SHAPE)


class _Rolling(_Model):
    """Model that draws from a generator among its globals."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x) * _dice.random()
        return y


def test_a_generator_among_the_globals_is_refused() -> None:
    with pytest.raises(sft.UnsupportedError, match="`forward` draws from `_dice`"):
        sft.compile(_Rolling(_keep), _SHAPE)


def test_unused_generators_and_iterators_are_accepted() -> None:
    model: Any = seeded(lambda: _Model(lambda model, y: y.relu()))
    model.sources = [itertools.count(), _numbers(), iter({1: 2}), random.Random(0), np.random.default_rng(0), map(str, [1])]
    net, x = sft.compile(model, _SHAPE), image(*_SHAPE)
    torch.testing.assert_close(net(x), model(x))


def test_the_search_for_objects_is_fast() -> None:
    model = nn.Sequential(*(nn.BatchNorm2d(3) if place % 2 else nn.Conv2d(3, 3, 3) for place in range(1000)))

    def seconds() -> float:
        began = time.process_time()
        with preserve_objects(model), forbid_external_rng(model):
            pass
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 0.1
