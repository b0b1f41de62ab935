"""Queries of ``forward`` about the call (modes, gradients, layouts), and tensors that it makes, keeps or replaces while it is traced."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, is_grad_enabled, nn

import sft
from sft.common.torch_internals import FakeTensorMode
from tests.helpers.models import image, seeded

_SHAPE = (1, 3, 16, 14)


class _Querying(nn.Module):
    def __init__(self, ask: Callable[[Any, Tensor, Tensor], bool]) -> None:
        super().__init__()
        self.conv, self.ask = nn.Conv2d(3, 4, 3), ask

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y * 2 if self.ask(self, x, y) else y * 3


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _switching(model: Any, x: Tensor, y: Tensor) -> bool:
    with torch.no_grad():
        inside = torch.is_grad_enabled()
    with torch.enable_grad():
        inside = not torch.is_grad_enabled() or inside
    torch.set_grad_enabled(torch.is_grad_enabled())
    return torch.is_grad_enabled() and not inside


_QUERIES: dict[str, Callable[[Any, Tensor, Tensor], bool]] = {
    "grad mode": lambda model, x, y: torch.is_grad_enabled(),
    "grad mode by a name of its own": lambda model, x, y: is_grad_enabled(),
    "grad mode between switches": _switching,
    "inference mode": lambda model, x, y: torch.is_inference_mode_enabled(),
    "deterministic": lambda model, x, y: torch.are_deterministic_algorithms_enabled(),
    "parameter": lambda model, x, y: model.conv.weight.requires_grad,
    "input": lambda model, x, y: x.requires_grad,
    "activation": lambda model, x, y: y.requires_grad,
    "leaf": lambda model, x, y: y.is_leaf,
    "function": lambda model, x, y: y.grad_fn is None,
    "layout": lambda model, x, y: x.is_contiguous(),
}


@pytest.mark.parametrize("question", _QUERIES)
def test_queries_return_the_modes_of_the_call(question: str) -> None:
    """Queries returned the modes of the first trace: later calls took its branches."""
    model = seeded(lambda: _Querying(_QUERIES[question]))
    net, x = sft.compile(copy.deepcopy(model), _SHAPE), image(*_SHAPE)

    def check(x: Tensor = x) -> None:
        torch.testing.assert_close(net(x), model(x), rtol=1e-10, atol=1e-10)

    check()
    if question != "grad mode between switches":  # its output requires grad in eager PyTorch
        with torch.no_grad():
            check()
        with torch.inference_mode():
            check()
    with _deterministic():
        check()
    check(x.clone().requires_grad_())
    check(x.to(memory_format=torch.channels_last))
    for module in (model, net):
        module.requires_grad_(False)
    check()
    check(x.clone().requires_grad_())
    with torch.no_grad():
        check()


def test_a_first_call_without_gradients() -> None:
    model = seeded(lambda: _Querying(_QUERIES["grad mode"]))
    net, x = sft.compile(copy.deepcopy(model), (1, 3, None, None)), image(*_SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(net(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_model_without_queries_is_captured_once() -> None:
    net: Any = sft.compile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), _SHAPE)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            net(torch.randn(_SHAPE))
    captures, ready = net._sft_engine.plan_cache.captures, net._sft_engine.plan_cache.prepared
    assert not captures.guard_kinds and len(captures) == 1 and len(ready) == 2, "with gradients, and without"


def test_gradients_that_forward_switches_on_are_refused_without() -> None:
    class Enabled(nn.Conv2d):
        @torch.enable_grad()
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x).relu()
            return out

    model, x = Enabled(3, 4, 3), torch.randn(_SHAPE)
    net = sft.compile(model, _SHAPE)
    torch.testing.assert_close(net(x), nn.functional.conv2d(x, model.weight, model.bias).relu())
    with torch.no_grad(), pytest.raises(sft.UnsupportedError, match=r"Enabled: `forward` switches gradients on .*call it outside of"):
        net(x)
    model.requires_grad_(False)
    with torch.no_grad():
        assert not net(x).requires_grad


# --- tensors that forward makes and keeps ---------------------------------------------------------------------------


class _Making(nn.Module):
    def __init__(self, make: Callable[[Any], None]) -> None:
        super().__init__()
        self.conv, self.make = nn.Conv2d(3, 4, 3), make
        self.w: Any

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        if not hasattr(self, "w"):
            self.make(self)
        out: Tensor = self.w(y) if isinstance(self.w, nn.Module) else y * self.w
        return out


def _make(kind: str, model: Any) -> None:
    if kind == "parameter":
        model.w = nn.Parameter(torch.ones(4, 1, 1))
    elif kind == "buffer":
        model.register_buffer("w", torch.ones(4, 1, 1))
    else:
        model.w = nn.Conv2d(4, 4, 1)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "submodule"])
def test_registrations_in_forward_are_refused_by_name_and_undone(kind: str) -> None:
    """Otherwise the model keeps fake tensors: it can neither be used nor saved."""
    model, x = _Making(functools.partial(_make, kind)), torch.randn(_SHAPE)
    with pytest.raises(sft.UnsupportedError, match=rf"w: `forward` makes this {kind} .*call the model once before it is compiled"):
        sft.compile(model, _SHAPE)
    assert not hasattr(model, "w")
    expected = model(x)
    torch.testing.assert_close(sft.compile(model, _SHAPE)(x), expected)


class _Observed(nn.Conv2d):
    """The range of each channel, in buffers that get their size at the first call, as in ``torch.ao.quantization``."""

    scale: Tensor
    zero_point: Tensor
    low: Tensor
    high: Tensor
    on: Tensor

    def __init__(self) -> None:
        super().__init__(3, 4, 3)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("zero_point", torch.zeros(4, dtype=torch.int32))
        self.register_buffer("low", torch.empty(0))
        self.register_buffer("high", torch.empty(0))
        self.register_buffer("on", torch.ones(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fused_moving_avg_obs_fake_quant(
            self.weight, self.on, self.on, self.low, self.high, self.scale, self.zero_point, 0.1, -128, 127, 0, True, True
        )
        out: Tensor = nn.functional.conv2d(x, weight, self.bias)
        return out


def test_buffers_without_elements_get_them_before_the_model_is_compiled() -> None:
    """The operator that writes them failed in the first call."""
    model, x = _Observed(), torch.randn(_SHAPE)
    with pytest.raises(sft.UnsupportedError, match=r"low: `forward` writes this buffer, which has no elements.*call the model once before"):
        sft.compile(model, _SHAPE)
    model(x)
    eager = copy.deepcopy(model)
    net = sft.compile(model, _SHAPE)
    for module in (net, eager):
        with torch.no_grad():
            module.get_parameter("weight").mul_(2)
        module(x).square().sum().backward()
    for ours, theirs in zip((*net.buffers(), *net.parameters()), (*eager.buffers(), *eager.parameters()), strict=True):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_refused_model_registers_buffers() -> None:
    """The exporter's hook on registrations of buffers is removed after any failure of `forward`."""

    class Branching(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if y.sum() > 0 else -y

    model = Branching(3, 4, 3)
    with pytest.raises(sft.UnsupportedError):
        sft.compile(model, _SHAPE)
    model.register_buffer("w", torch.ones(4))
    assert torch.equal(model.get_buffer("w"), torch.ones(4))


def _replaced(model: Any) -> None:
    model.conv.weight = nn.Parameter(model.conv.weight * 2)


def test_a_parameter_that_forward_replaces_is_refused() -> None:
    model: Any = _Making(_replaced)
    before = model.conv.weight
    with pytest.raises(sft.UnsupportedError, match=r"conv\.weight: `forward` puts another parameter in the place"):
        sft.compile(nn.Sequential(_Then(model)), _SHAPE)
    assert model.conv.weight is before


class _Then(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.conv, self.change = inner.conv, inner.make

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        y: Tensor = self.conv(x)
        return y


class _Replacing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 4, 3), how
        self.u: Tensor
        self.register_buffer("u", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        new = self.u.detach() * 0.9 + y.detach().mean((0, 2, 3))
        if self.how == "_buffers":
            self._buffers["u"] = new
        elif self.how == "register_buffer":
            self.register_buffer("u", new)
        else:
            self.u = new[:1] if self.how == "shape" else new
        return y - self.u.view(-1, 1, 1)


@pytest.mark.parametrize("how", ["setattr", "register_buffer", "_buffers"])
def test_a_buffer_that_forward_replaces_is_written(how: str) -> None:
    model, x = seeded(lambda: _Replacing(how)), image(*_SHAPE)
    net: Any = sft.compile(copy.deepcopy(model), _SHAPE)
    for _ in range(3):
        torch.testing.assert_close(net(x), model(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(net.u, model.u)


def test_a_buffer_of_another_shape_is_refused() -> None:
    with pytest.raises(sft.UnsupportedError, match="u: `forward` puts a buffer of another shape or dtype"):
        sft.compile(_Replacing("shape"), _SHAPE)


class _Encoding:
    grid: Any = None

    def of(self, width: Any) -> Any:
        if self.grid is None:
            self.grid = torch.linspace(0, 1, width)
        return self.grid


_GRIDS: dict[str, Tensor] = {}


@functools.lru_cache
def _cached_grid(width: int) -> Tensor:
    return torch.linspace(0, 1, width)


class _Keeping(nn.Module):
    of_class: Any = None

    def __init__(self, where: str) -> None:
        super().__init__()
        self.conv, self.where, self.encodings = nn.Conv2d(3, 4, 3), where, {"x": [_Encoding()]}

    def grid(self, width: Any) -> Any:
        if self.where == "object":
            return self.encodings["x"][0].of(width)
        if self.where == "function":
            return _cached_grid(width)
        if self.where == "class":
            type(self).of_class = torch.linspace(0, 1, width) if self.of_class is None else self.of_class
            return self.of_class
        if "grid" not in _GRIDS:
            _GRIDS["grid"] = torch.linspace(0, 1, width)
        return _GRIDS["grid"]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        scores: Tensor = y + self.grid(y.shape[-1])
        return scores


@pytest.mark.parametrize("where", ["object", "function", "class", "global"])
def test_caches_are_not_filled_by_a_trace(where: str) -> None:
    """Caches kept fake tensors, which the plain model and the next compilation read."""
    model, x = _Keeping(where), torch.randn(_SHAPE)
    try:
        nets = [sft.compile(model, _SHAPE) for _ in range(2)]
        outputs = [net(x) for net in nets]
        assert type(model(x)) is Tensor
        for y in outputs:
            torch.testing.assert_close(y, model(x))
    finally:
        _Keeping.of_class = None
        _GRIDS.clear()
        _cached_grid.cache_clear()


def test_a_tensor_of_another_trace_is_named_as_such() -> None:
    """Caches that are not reachable from the model are not emptied."""
    with FakeTensorMode():
        stale = torch.ones(4, 1, 1)
    model = _Then(_Making(lambda module: None))
    model.forward = lambda x: model.conv(x) * stale  # type: ignore[method-assign]
    with pytest.raises(sft.UnsupportedError, match=r"finds a tensor of an earlier trace in a cache .*cache_clear\(\)"):
        sft.compile(model, _SHAPE)
