"""Values that do not depend on inputs: constants of the capture, with guards on tensors of the model that determine them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sft
from sft.analysis.frontend.capture import capture
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_SHAPE = (1, 3, 16, 12)
_OPTIONS = sft.Options(tile=(5, 12))

Then = Callable[[Any, Tensor], Any]


class _Model(nn.Module):
    """A convolution, then a function of the model and of its result."""

    def __init__(self, then: Then) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("stride", torch.tensor([8.0, 16.0, 32.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.plain = torch.tensor([2.0, 4.0])
        self.items = [torch.tensor(5.0)]
        self.then = then

    def forward(self, x: Tensor) -> Any:
        return self.then(self, self.conv(x))


_WORLD = torch.tensor([0.25])

_CASES: dict[str, Then] = {
    # numbers of numbers
    "arange.tolist": lambda m, y: y.sum(torch.arange(2, len(y.shape)).tolist(), keepdim=True) + y,
    "tensor.item": lambda m, y: y * torch.tensor([0.5, 2.5]).sum().item(),
    "linspace": lambda m, y: sum((y * v.item() for v in torch.linspace(0, 1, 4)), y),
    "new_tensor": lambda m, y: y * float(y.new_tensor([2.0, 3.0]).prod()),
    "new_full and ones_like": lambda m, y: y * y.new_full((2,), 3.0).sum().item() * torch.ones_like(m.stride).mean().item(),
    "folding": lambda m, y: y * math.sqrt(float((torch.ones(3) * 2).pow(2).cumsum(0)[-1].clamp(max=9))),
    "in place": lambda m, y: y * torch.zeros(3).add_(1).mul_(2).sum().item(),
    "set item": lambda m, y: y * _with_item(torch.zeros(3)).sum().item(),
    "range": lambda m, y: torch.cat([y for _ in range(int(torch.tensor(3)))], 1),
    "from numpy": lambda m, y: y * torch.from_numpy(np.array([1.5, 2.0])).max().item(),
    "array": lambda m, y: y * float(np.asarray(torch.arange(4.0)).mean()),
    "meshgrid": lambda m, y: y * torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")[1].max().item(),
    "comparison": lambda m, y: y * 2 if torch.equal(torch.arange(3), torch.tensor([0, 1, 2])) else y,
    "max of two": lambda m, y: y * float(max(torch.tensor(1.0), torch.tensor(3.0))),
    "nonzero": lambda m, y: y[:, torch.tensor([0, 1, 0, 1]).nonzero()[:, 0]],
    "unique": lambda m, y: y * len(torch.tensor([3, 1, 3]).unique()),
    # numbers of buffers
    "float of an element": lambda m, y: y / float(m.stride[0]),
    "int": lambda m, y: y * int(m.count),
    "tolist of a buffer": lambda m, y: sum((y / s for s in m.stride.tolist()), y),
    "iteration": lambda m, y: sum((y / float(s) for s in m.stride), y),
    "flag": lambda m, y: y * 2 if m.flag else y,
    "any": lambda m, y: y * 2 if bool((m.stride > 20).any()) else y,
    "not any": lambda m, y: y * 2 if not (m.stride > 40).any() else y,
    "range of a buffer": lambda m, y: torch.cat([y * i for i in range(1, int(m.count))], 1),
    "index": lambda m, y: y[:, : m.count],
    "numpy of a buffer": lambda m, y: y * float(m.stride.numpy().mean()),
    "format": lambda m, y: y * float(f"{m.stride[1]}"),
    "norm of a buffer": lambda m, y: y / m.stride.norm().item(),
    "under no_grad": lambda m, y: y * _without_grad(m),
    "mask of channels": lambda m, y: y[:, m.mask],
    "mask of a weight": lambda m, y: y[:, :3] * m.conv.bias[m.mask].view(1, 3, 1, 1),
    "repeats": lambda m, y: y.repeat_interleave(torch.tensor([1, 2, 1, 1]), 1),
    # torch reads the number
    "full": lambda m, y: y * torch.full((4, 1, 1), m.stride[0].to(y.dtype)),
    "full of a size": lambda m, y: y + torch.full((y.shape[2] * y.shape[3],), m.stride[1]).view(1, 1, y.shape[2], y.shape[3]),
    "tensor of tensors": lambda m, y: y * torch.tensor([m.stride[0], m.stride[1], 1.0, 2.0]).view(1, 4, 1, 1),
    "arange of a tensor": lambda m, y: y * torch.arange(m.count).sum(),
    "sizes": lambda m, y: y.repeat(1, m.count, 1, 1),
    "pad": lambda m, y: F.pad(y, (int(m.count), m.count.item())),
    "scale factor": lambda m, y: F.interpolate(y, scale_factor=float(m.stride[1] / m.stride[0])),
    # other tensors of the model
    "parameter": lambda m, y: y * m.scale.item(),
    "branch of a parameter": lambda m, y: y * 2 if m.scale > 1 else y,
    "plain attribute": lambda m, y: y * m.plain.sum().item(),
    "container": lambda m, y: y * m.items[0].item(),
    "global": lambda m, y: y * _WORLD.item(),
}


def _with_item(value: Tensor) -> Tensor:
    value[1] = 4.0
    value[2:] = torch.tensor([2.0])
    return value


def _without_grad(model: Any) -> float:
    with torch.no_grad():
        return float((model.stride * model.scale).sum().log())


@pytest.mark.parametrize("name", _CASES)
def test_constants_are_followed(name: str) -> None:
    assert_exact(seeded(lambda: _Model(_CASES[name])), image(*_SHAPE), options=_OPTIONS, steps=1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("float of an element", lambda m: m.stride.mul_(2)),
        ("float of an element", lambda m: m.stride.data.mul_(2)),
        ("float of an element", lambda m: m.stride.numpy().fill(3)),
        ("int", lambda m: m.count.fill_(5)),
        ("flag", lambda m: m.flag.fill_(False)),
        ("flag", lambda m: setattr(m, "flag", torch.tensor(False))),
        ("any", lambda m: m.load_state_dict({**m.state_dict(), "stride": torch.tensor([1.0, 2.0, 3.0])})),
        ("mask of channels", lambda m: m.mask.copy_(torch.tensor([False, True, True, False]))),
        ("full", lambda m: m.stride.zero_()),
        ("parameter", lambda m: m.scale.data.fill_(-2)),
        ("branch of a parameter", lambda m: m.scale.data.fill_(0.5)),
        ("plain attribute", lambda m: m.plain.add_(1)),
        ("plain attribute", lambda m: setattr(m, "plain", torch.tensor([7.0, 1.0]))),
        ("container", lambda m: m.items[0].add_(1)),
        ("container", lambda m: m.items.__setitem__(0, torch.tensor(9.0))),
    ],
)
def test_a_changed_value_is_noticed(name: str, change: Callable[[Any], Any]) -> None:
    model = seeded(lambda: _Model(_CASES[name])).float()
    net, x = sft.compile(model, _SHAPE, options=_OPTIONS), image(*_SHAPE).float()
    before = model(x).detach()
    torch.testing.assert_close(net(x), before)
    with torch.no_grad():
        change(model)
    after = model(x).detach()
    assert after.shape != before.shape or not torch.equal(after, before), "the change has no effect"
    torch.testing.assert_close(net(x), after)
    net.train(not net.training)
    torch.testing.assert_close(net(x), after)


def _counted_captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    captures: list[Any] = []

    def counted(*args: Any, **keywords: Any) -> Any:
        captures.append(capture(*args, **keywords))
        return captures[-1]

    monkeypatch.setattr("sft.api.capture_cache.capture", counted)
    return captures


def test_an_unchanged_value_costs_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = _counted_captures(monkeypatch)
    model: Any = seeded(lambda: _Model(_CASES["flag"])).float()
    net, x = sft.compile(model, _SHAPE, options=_OPTIONS), image(*_SHAPE).float()
    for flag in (True, False, True, False):
        model.flag.fill_(flag)
        for _ in range(2):
            torch.testing.assert_close(net(x), model(x))
    assert len(captures) == 2, "one capture for each value"


def test_a_decision_is_guarded_and_not_the_weights_that_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameter changes at each step, and the branch does not."""
    captures = _counted_captures(monkeypatch)
    model = seeded(lambda: _Model(lambda m, y: y * m.scale if m.scale > 0 else y)).float()
    net, x = sft.compile(model, _SHAPE, options=_OPTIONS), image(*_SHAPE).float()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    for _ in range(3):
        net(x).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(net(x), model(x))
    assert len(captures) == 1


def test_numbers_of_sizes_are_captured_for_each_size() -> None:
    def then(model: Any, y: Tensor) -> Tensor:
        sizes = torch.tensor([list(y.shape[2:]), [2, 2]])
        starts = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)])
        return y / starts[1].item() + int(starts[-1])

    model = seeded(lambda: _Model(then)).double()
    net: Any = sft.compile(model, (1, 3, None, None), options=_OPTIONS)
    for size in ((16, 12), (20, 12)):
        torch.testing.assert_close(net(image(1, 3, *size)), model(image(1, 3, *size)))


_REFUSED: dict[str, Then] = {
    "input": lambda m, y: y / y.detach().abs().max().item(),
    "input and buffer": lambda m, y: y * (m.stride[0] * y.detach().mean()).item(),
    "random": lambda m, y: y * torch.rand(3).sum().item(),
    "dropout of a buffer": lambda m, y: y * F.dropout(m.stride).sum().item(),
    "shuffled": lambda m, y: y * int(torch.randperm(4)[0]),
    "counter that is read": lambda m, y: y * int(m.count.add_(1)),
    "counter read before it is written": lambda m, y: (y * int(m.count), m.count.add_(1))[0],
    "written through a view": lambda m, y: (m.stride[:1].add_(y.detach().mean()), y * float(m.stride[0]))[1],
    "statistics of a norm": lambda m, y: y,
}


@pytest.mark.parametrize("name", [name for name in _REFUSED if name != "statistics of a norm"])
def test_values_that_differ_between_calls_are_refused(name: str) -> None:
    with pytest.raises(sft.UnsupportedError, match=r"item: it computes with a Python number|cannot follow the model at"):
        sft.compile(seeded(lambda: _Model(_REFUSED[name])), _SHAPE)


def test_running_statistics_are_constants_in_evaluation_only() -> None:
    """In training `forward` writes them, without a call that a trace sees."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            norm: Any = self.norm
            y: Tensor = norm(x) / (1 + float(norm.running_var.mean()))
            return y * int(norm.num_batches_tracked + 1)

    model = Scaled().eval()
    net, x = sft.compile(model, _SHAPE, options=_OPTIONS), image(*_SHAPE).float()
    torch.testing.assert_close(net(x), model(x))
    with pytest.raises(sft.UnsupportedError, match=r"running_var: .*Python number read from a tensor.*\n?.*writes it"):
        net.train()(x)
    nn.BatchNorm2d.forward(model.norm, x)
    model.eval()
    torch.testing.assert_close(net(x), model(x))


def test_a_read_names_its_line() -> None:
    with pytest.raises(sft.UnsupportedError, match=r"Read at constants/test_tracking\.py:\d+ \(`\"input\": lambda m, y: y / y"):
        sft.compile(seeded(lambda: _Model(_REFUSED["input"])), _SHAPE)


def test_evaluation_writes_to_no_tensor_of_the_model() -> None:
    def then(model: Any, y: Tensor) -> Tensor:
        ones = torch.ones(2, 3)
        value = F.batch_norm(ones, model.mean, model.variance, training=model.training, momentum=0.5)
        return y if torch.is_tensor(value) and model.stride.clone().mul_(2).sum() > 0 else -y

    model = seeded(lambda: _Model(then)).float()
    model.register_buffer("mean", torch.zeros(3))
    model.register_buffer("variance", torch.ones(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sft.compile(model, _SHAPE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_large_constants_are_not_computed() -> None:
    """A full-size mask of ones would take the memory of an image."""
    with pytest.raises(sft.UnsupportedError, match=r"Python number read from a tensor|cannot follow"):
        sft.plan(seeded(lambda: _Model(lambda m, y: y * torch.ones(2**14, 2**14).sum().item())), _SHAPE)
