"""Wrong arguments, impossible budgets, models that cannot be captured, and invalid backward passes."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.torch_internals import TorchDispatchMode
from tests.helpers.exactness import assert_exact, assert_within_budget, gradient_errors
from tests.helpers.models import Around, ConvNet, TinyUNet, chain, image, seeded
from tests.helpers.plans import least_budget

_SHAPE = (1, 3, 16, 12)


def _body() -> nn.Sequential:
    return seeded(lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 5), nn.MaxPool2d(2)))


def _compiled(model: nn.Module | None = None, rows: int = 4) -> nn.Module:
    net: nn.Module = sft.compile(_body() if model is None else model, _SHAPE, options=sft.Options(tile=(rows, 12)))
    return net


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_a_size_that_the_model_cannot_take_is_one_error_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A U-Net of two levels needs even sizes for its skips; the exporter would log pages about it."""
    logged: list[str] = []

    def note(record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            logged.append(record.getMessage())

    for name in (name for name in logging.root.manager.loggerDict if name.startswith("torch")):
        for handler in logging.getLogger(name).handlers:  # torch's own logs
            monkeypatch.setattr(handler, "emit", note)
    with pytest.raises(sft.InputError, match=r"the model refuses an input of shape 1x3x15x12: Sizes of tensors must match"):
        sft.plan(seeded(TinyUNet), (1, 3, 15, 12))
    assert logged == []


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.zeros(3, 16, 12, dtype=torch.float64), id="rank 3"),
        pytest.param(torch.zeros(1, 1, 3, 16, 12, dtype=torch.float64), id="rank 5"),
        pytest.param(torch.zeros((), dtype=torch.float64), id="rank 0"),
        pytest.param(torch.zeros(_SHAPE, dtype=torch.float32), id="float32"),
        pytest.param(torch.zeros(_SHAPE, dtype=torch.int64), id="int64"),
        pytest.param(torch.zeros(_SHAPE, dtype=torch.uint8), id="uint8"),
        pytest.param(torch.zeros(_SHAPE, dtype=torch.bool), id="bool"),
        pytest.param(torch.zeros(_SHAPE, dtype=torch.complex128), id="complex128"),
        pytest.param(torch.zeros(1, 4, 16, 12, dtype=torch.float64), id="channels"),
        pytest.param(torch.zeros(1, 3, 0, 12, dtype=torch.float64), id="no rows"),
        pytest.param(torch.zeros(1, 3, 16, 0, dtype=torch.float64), id="no columns"),
        pytest.param(torch.zeros(1, 3, 4, 12, dtype=torch.float64), id="below the 5x5 kernel, height"),
        pytest.param(torch.zeros(1, 3, 16, 4, dtype=torch.float64), id="below the 5x5 kernel, width"),
        pytest.param(torch.zeros(1, 3, 5, 12, dtype=torch.float64), id="one row before the pool of two"),
    ],
)
def test_wrong_input(x: Tensor) -> None:
    net = _compiled()
    with pytest.raises(sft.InputError):
        net(x)
    assert net(image(*_SHAPE)).shape == (1, 2, 6, 4), "a refused input spoils the next call"


@pytest.mark.parametrize("shape", [(1, 3, 4, 12), (1, 3, 0, 12), (1, 4, 16, 12), (3, 16, 12), (1, 3, -1, 12)])
def test_wrong_input_shape_at_compile(shape: tuple[int, ...]) -> None:
    with pytest.raises(sft.InputError):
        sft.compile(_body(), shape)


@pytest.mark.parametrize(
    ("shape", "refusal"),
    [
        ((1, 3, 2**24 + 1, 12), "no extent may be more than 16777216"),
        ((2**25, 3, 16, 12), "no extent may be more than 16777216"),
        ((16, 12), "got input of size: .*; write batch, channels and extents in this order: 1x3x16x12"),
        ((16, 12, 3), "write batch, channels and extents in this order: 1x3x16x12"),
        ((2, 16, 12, 3), "got 16 channels instead; write batch, channels and extents in this order: 2x3x16x12"),
        (torch.zeros(_SHAPE, dtype=torch.uint8), r"; convert pixels to floating point \(x\.float\(\) / 255\)"),
        ([_SHAPE, _SHAPE], "the model refuses an input of shape .*takes 2 positional arguments but 3 were given"),
    ],
)
def test_impossible_shapes(shape: Any, refusal: str) -> None:
    with pytest.raises(sft.InputError, match=refusal):
        sft.plan(nn.Conv2d(3, 4, 3), shape)


class _Indexed(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.read = nn.Conv2d(3, 4, 1), read

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.read(self.conv(x), index)


@pytest.mark.parametrize(
    ("read", "dtype"),
    [
        (lambda y, index: nn.functional.embedding(index[:, 0], y[0, 0]), "long"),
        (lambda y, index: y.gather(1, index), "long"),
        (lambda y, mask: torch.where(mask, y, 0.0), "bool"),
        (lambda y, mask: y.masked_fill(~mask, 0.0), "bool"),
    ],
)
def test_a_shape_in_place_of_an_index_names_the_tensor_to_give(read: Callable[[Tensor, Tensor], Tensor], dtype: str) -> None:
    """The remedy for images, another order of the axes, would not help."""
    model, index = _Indexed(read), (1, 1, 16, 12)
    remedy = (
        rf"every input is torch\.float32 here.*with \.{dtype}\(\).* torch\.empty\(\(1, 1, 16, 12\), dtype=torch\.{dtype}, device='meta'\)"
    )
    with pytest.raises(sft.InputError, match=remedy):
        sft.compile(model, [_SHAPE, index])
    sft.compile(model, [_SHAPE, torch.empty(index, dtype=getattr(torch, dtype), device="meta")])


def test_a_complex_input_names_its_parts() -> None:
    net = sft.compile(nn.Conv2d(3, 4, 3), (*_SHAPE[:3], None))
    with pytest.raises(sft.InputError, match=r"inputs are real: .*torch\.complex\(real, imaginary\) in `forward`"):
        net(torch.zeros(_SHAPE, dtype=torch.complex64))


def test_an_input_that_another_model_computes_is_not_to_be_detached() -> None:
    """Detached, the other model would have no gradient."""
    first, second = (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1)) for _ in range(2))
    shape = (1, 3, 64, 48)
    net = sft.compile(second, shape, budget=least_budget(second, shape))
    with pytest.raises(sft.BudgetError, match=r"or, if no parameter or image before this model is trained, give x\.detach") as refused:
        net(first(torch.zeros(shape)))
    assert re.search(r"Try: budget='[\d.]+KiB'$", str(refused.value))
    budget = str(refused.value).rpartition("=")[2].strip("'")
    sft.compile(second, shape, budget=budget)(first(torch.zeros(shape))).sum().backward()
    assert all(parameter.grad is not None for parameter in first.parameters())


def test_an_array_of_a_signal_is_distinguished_from_an_image() -> None:
    with pytest.raises(sft.InputError, match=r"in this order: 1x1x100 \(arrays are read as images; give a signal .* torch.from_numpy"):
        sft.compile(nn.Conv1d(1, 2, 3), np.zeros((1, 1, 100), np.float32))


@pytest.mark.parametrize(
    ("model", "refusal"),
    [
        (nn.ReLU, "model must be an nn.Module, got the class ReLU; give an instance"),
        ("resnet18", "model must be an nn.Module, got str"),
        (
            torch.compile(nn.ReLU(), backend="eager"),
            "is a result of torch.compile; compile the original model, model._orig_mod",
        ),
    ],
)
def test_arguments_that_are_no_models(model: Any, refusal: str) -> None:
    with pytest.raises(sft.InputError, match=refusal):
        sft.compile(model, _SHAPE)


def test_assertions_of_the_model_are_no_limit_of_the_exporter() -> None:
    with pytest.raises(sft.InputError, match=r"the model refuses .*more than 1 value per channel when training"):
        sft.compile(chain(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)), (1, 3, 16, 12))


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"device": "nowhere"}, "device 'nowhere' cannot be used here"),
        ({"optimizer": "sgd"}, "optimizer must be a torch.optim.Optimizer, or its state's bytes, got str"),
        ({"optimizer": -1}, "optimizer must be a torch.optim.Optimizer, or its state's bytes, got -1"),
        ({"optimizer": True}, "optimizer must be a torch.optim.Optimizer, or its state's bytes, got True"),
        ({"options": 3}, "options must be an sft.Options, got int"),
    ],
)
def test_wrong_arguments_of_compile(arguments: dict[str, Any], refusal: str) -> None:
    with pytest.raises(sft.InputError, match=refusal):
        sft.compile(_body(), _SHAPE, **arguments)


@pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_]+` is deprecated")
@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: nn.LazyConv2d(4, 3), "1: LazyConv2d: its parameters are not initialised yet; call the model once"),
        (lambda: torch.jit.script(nn.Conv2d(3, 4, 3)), "1: RecursiveScriptModule: a scripted or traced module"),
    ],
)
def test_lazy_and_scripted_modules_are_refused(make: Callable[[], nn.Module], refusal: str) -> None:
    model = chain(nn.ReLU(), make())
    with pytest.raises(sft.InputError, match=refusal):
        sft.compile(model, _SHAPE)
    assert refusal in str(sft.check(model, _SHAPE))
    with pytest.raises(sft.InputError, match=refusal.replace("1:", r"\(the model itself\):")):
        sft.compile(make(), _SHAPE)


@pytest.mark.parametrize(
    ("select", "refusal"),
    [
        (lambda y: torch.unique(y, return_inverse=True)[1], "_unique2: the number of its values depends on the numbers"),
        (lambda y: torch.unique(y > 0, return_counts=True)[1], "_unique2: the number of its values depends on the numbers"),
        (lambda y: torch.unique_consecutive(y.flatten(), return_inverse=True)[1], "unique_consecutive: the number of its values"),
        (lambda y: torch.unique(y, dim=0, return_inverse=True)[1], "unique_dim: the number of its values"),
        (torch.nonzero, "nonzero: its size .* depends on the values"),
        (lambda y: y.masked_select(y > 0).sum(), "masked_select: its size .* depends on the values"),
    ],
)
def test_sizes_that_depend_on_values(select: Callable[[Tensor], Tensor], refusal: str) -> None:
    """Also if only a result of known size is used. Regression: the error was one of the exporter."""

    class Selecting(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return select(super().forward(x))

    with pytest.raises(sft.UnsupportedError, match=refusal):
        sft.compile(Selecting(3, 4, 3), _SHAPE)


@pytest.mark.parametrize(
    ("convert", "refusal"),
    [
        (Tensor.to_sparse, r"layout torch.sparse_coo; give a dense tensor, such as value.to_dense\(\)"),
        (lambda x: torch.nested.nested_tensor([x[0]]), r"is a nested tensor; give a dense tensor"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), r"is a quantized tensor \(torch.quint8\); give value.dequantize"),
    ],
    ids=["sparse", "nested", "quantized"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_that_are_no_dense_array(convert: Callable[[Tensor], Tensor], refusal: str) -> None:
    x = convert(image(*_SHAPE).float())
    for run in (lambda: _compiled()(x), lambda: sft.compile(_body(), [x]), lambda: sft.plan(_body(), x)):
        with pytest.raises(sft.InputError, match=refusal):
            run()


@pytest.mark.parametrize(
    "model", [nn.ModuleList([nn.ReLU()]), nn.ModuleDict(), nn.ParameterList(), nn.Module()], ids=lambda m: type(m).__name__
)
def test_modules_without_forward(model: nn.Module) -> None:
    refusal = rf"{type(model).__name__} has no `forward`.*compile the module that calls"
    with pytest.raises(sft.InputError, match=refusal):
        sft.compile(model, _SHAPE)
    assert "has no `forward`" in str(sft.check(model, _SHAPE))


def test_smallest_input_is_fine() -> None:
    assert_exact(_body(), image(1, 3, 6, 6), options=sft.Options(tile=(1, 6)))


def test_an_image_that_leaves_no_output() -> None:
    """Smaller than the receptive field without padding: at compile, and at a call of a model compiled for a larger one."""
    model = nn.Sequential(nn.Conv2d(3, 4, 5), nn.MaxPool2d(4), nn.Conv2d(4, 4, 5))
    with pytest.raises(sft.InputError):
        sft.compile(model, (1, 3, 12, 40))
    net = sft.compile(model, (1, 3, 60, 40))
    with pytest.raises(sft.InputError):
        net(torch.zeros(1, 3, 12, 40))


def test_skips_of_different_size() -> None:
    """The U-Net takes 16 rows and not 18: eager PyTorch fails at the concatenation, a compiled call before any work."""
    net = _compiled(seeded(TinyUNet))
    with pytest.raises(sft.InputError):
        net(image(1, 3, 18, 12))


# --- options and budgets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget",
    [
        *(float("nan"), float("inf"), 0, -1, True, 1.5, 2**63, b"1"),
        *("0GiB", "-1GiB", "nan", "lots", "", "11 parsecs", "9" * 400, "1e400", "1e-3"),
    ],
)
def test_wrong_budget(budget: Any) -> None:
    with pytest.raises(sft.InputError):
        sft.compile(_body(), _SHAPE, budget=budget)


@pytest.mark.parametrize(
    "options",
    [
        {"tile": (0, 5)},
        {"tile": (5, 0)},
        {"tile": (-4, 12)},
        {"tile": (4,)},
        {"tile": 3},
        {"tile": (4, 12, 1)},
        {"tile": (2.5, 12)},
        {"state_every": 0},
        {"state_every": -1},
        {"state_slots": 0},
        {"batch_tile": 0},
        {"batch_tile": -2},
        {"strategy": "none", "state_every": 2},
        {"strategy": "none", "state_slots": 2},
        {"strategy": "none", "batch_tile": 1},
        {"strategy": "none", "halo": "recompute"},
        {"strategy": "sqrt", "batch_tile": 1},
        {"strategy": "vdnn", "host_budget": 0},
        {"host_budget": False},
        {"skip_repeats": "no"},
        {"cuda_graphs": 1},
        {"progress": None},
        {"mesh_timeout_seconds": "1"},
        {"mesh_timeout_seconds": None},
        {"mesh_timeout_seconds": True},
        {"mesh_timeout_seconds": 0},
        {"mesh_timeout_seconds": float("nan")},
        {"mesh_timeout_seconds": float("inf")},
        {"mesh_timeout_seconds": 1e300},
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(sft.InputError):
        sft.compile(_body(), _SHAPE, options=sft.Options(**options))


def test_numbers_of_other_libraries() -> None:
    """Integers of all types are accepted."""
    shape = tuple(np.int64(extent) for extent in _SHAPE)
    plan = sft.plan(_body(), _SHAPE, budget=10**9)
    budgets: list[Any] = [np.int64(10**9), np.float64(1e9), 1e9, "1e9", "1E3 MB", "0.001e3GB"]
    for budget in budgets:
        assert sft.plan(_body(), shape, budget=budget).to_json() == plan.to_json()


def test_budget_too_small() -> None:
    model = seeded(lambda: Around(chain(nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, padding=1))))
    shape = (1, 3, 96, 64)
    with pytest.raises(sft.BudgetError, match=r"(?i)segment") as caught:
        sft.compile(model, shape, budget="40KiB")(image(*shape))
    assert isinstance(caught.value, MemoryError)
    needed = caught.value.needed_bytes
    assert needed > 40 * 1024

    # The budget of the error works, and is kept.
    net = sft.compile(copy.deepcopy(model), shape, budget=needed)
    assert_within_budget(net, image(*shape), budget=needed, input_grad=False)
    # It is the smallest one: 10 % less does not work.
    with pytest.raises(sft.BudgetError):
        sft.compile(copy.deepcopy(model), shape, budget=int(0.9 * needed))(image(*shape))


def test_a_budget_too_small_for_a_model_that_computes_nothing() -> None:
    x = torch.ones(1, 3, 64, 64)
    with pytest.raises(sft.BudgetError, match="a step needs 48") as caught:
        sft.compile(nn.Identity(), x.shape, budget="1KiB")
    assert torch.equal(sft.compile(nn.Identity(), x.shape, budget=caught.value.needed_bytes)(x), x)


def test_the_smallest_budget_is_exact_and_smaller_than_the_largest() -> None:
    model = seeded(lambda: Around(chain(nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, padding=1))))
    shape = (1, 3, 96, 64)
    with pytest.raises(sft.BudgetError) as caught:
        sft.compile(copy.deepcopy(model), shape, budget=1024)(image(*shape))
    tight = assert_exact(model, image(*shape), budget=caught.value.needed_bytes, input_grad=False)
    roomy = assert_exact(model, image(*shape), input_grad=False)
    assert tight.measured_peak_bytes < roomy.measured_peak_bytes


# --- models ---------------------------------------------------------------------------------------------------------


class _Undecided(nn.Module):
    """Model with control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 2, 3)
        self.b = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) if bool(x.sum() > 0) else self.b(x)
        return y


def test_control_flow_on_data() -> None:
    with pytest.raises(sft.UnsupportedError):
        sft.compile(seeded(_Undecided), _SHAPE)


_TAKEN: list[object] = []


def _forward_hook(module: nn.Module, args: object, output: object) -> None:
    _TAKEN.append(output)


def _forward_pre_hook(module: nn.Module, args: object) -> None:
    _TAKEN.append(args)


_HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda module: module.register_forward_hook(_forward_hook),
    "forward_pre": lambda module: module.register_forward_pre_hook(_forward_pre_hook),
    "backward": lambda module: module.register_full_backward_hook(lambda m, i, o: None),
    "backward_pre": lambda module: module.register_full_backward_pre_hook(lambda m, o: None),
}


@pytest.mark.parametrize("kind", _HOOKS)
@pytest.mark.parametrize("when", ["before compile", "after compile"])
def test_hooks_on_submodules(kind: str, when: str) -> None:
    """A hook with an effect that would be lost is refused, by the path of its module."""
    model = seeded(ConvNet)
    if when == "before compile":
        _HOOKS[kind](model.body[3])
        with pytest.raises(sft.UnsupportedError, match=r"body\.3"):
            sft.compile(model, _SHAPE)
        return
    net = _compiled(model)
    net(image(*_SHAPE))
    _HOOKS[kind](model.body[3])
    with pytest.raises(sft.UnsupportedError, match=r"body\.3"):
        net(image(*_SHAPE))


class _NoGradInside(nn.Module):
    """A gate without a gradient of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            level = x.mean((2, 3), keepdim=True)
        return x * level


class _Detached(nn.Module):
    """A gate without a gradient, by ``detach``."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean((2, 3), keepdim=True).detach()


@pytest.mark.parametrize("gate", [_NoGradInside, _Detached])
def test_a_gate_without_a_gradient(gate: type[nn.Module]) -> None:
    """Captures drop grad modes; a gradient where eager PyTorch has none would be silently wrong."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), gate()).double()
    assert_exact(net, image(*_SHAPE), options=sft.Options(tile=(5, None)))


class _PooledToo(nn.Module):
    """Model that returns a global value and a map that are also read in later phases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.first(x)
        level = y.mean((2, 3), keepdim=True)
        return self.second(y * level), level, y


@pytest.mark.parametrize("wanted", [(0,), (0, 1), (0, 2), (0, 1, 2)])
def test_gradients_of_outputs_that_are_read_inside_too(wanted: tuple[int, ...]) -> None:
    """Gradients are accumulated in a copy, since they are the caller's; some outputs have none."""
    model, x = seeded(_PooledToo), image(2, 3, 20, 16)
    net = sft.compile(copy.deepcopy(model), tuple(x.shape), options=sft.Options(tile=(6, None)))
    theirs, ours = model(x), net(x)
    gradients = [torch.randn_like(theirs[i]) for i in wanted]
    before = [gradient.clone() for gradient in gradients]
    torch.autograd.backward([theirs[i] for i in wanted], gradients)
    torch.autograd.backward([ours[i] for i in wanted], gradients)
    assert all(torch.equal(old, new) for old, new in zip(before, gradients, strict=True))
    for a, b in zip(net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


# --- backward -------------------------------------------------------------------------------------------------------


def _gradients(net: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    gradients = {name: p.grad for name, p in net.named_parameters()}
    return {"input": x.grad, **gradients}


def test_parameter_changed_between_forward_and_backward() -> None:
    net = _compiled()
    y = net(image(*_SHAPE))
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()
    assert all(p.grad is None for p in net.parameters())


def test_buffer_changed_between_forward_and_backward() -> None:
    model = seeded(lambda: Around(nn.BatchNorm2d(4).eval()))
    net = _compiled(model)
    y = net(image(*_SHAPE))
    assert isinstance(model.layer, nn.BatchNorm2d) and model.layer.running_var is not None
    model.layer.running_var.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()
    assert all(p.grad is None for p in net.parameters())


def test_input_changed_between_forward_and_backward() -> None:
    net = _compiled()
    x = image(*_SHAPE)
    y = net(x)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()
    assert all(p.grad is None for p in net.parameters())


class _OutOfMemory(TorchDispatchMode):
    """Mode that allows ``num_allowed`` convolution calls and fails at the next."""

    def __init__(self, num_allowed: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_allowed = num_allowed
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if "conv" in str(func):
            if self.num_calls == self.num_allowed:
                raise torch.OutOfMemoryError("injected")
            self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_failing_backward_leaves_grad_untouched() -> None:
    net = _compiled()
    x = image(*_SHAPE).requires_grad_()
    net(x).sum().backward()
    reference = {name: None if g is None else g.clone() for name, g in _gradients(net, x).items()}
    loss = net(x).sum()
    with _OutOfMemory(None) as counter:
        loss.backward()
    assert counter.num_calls > 2, "the test sees no convolution in the backward"

    for num_allowed in sorted({0, 1, counter.num_calls // 2, counter.num_calls - 1}):
        for p in (x, *net.parameters()):
            p.grad = torch.full_like(p, 7.0)
        loss = net(x).sum()
        with pytest.raises(torch.OutOfMemoryError), _OutOfMemory(num_allowed):
            loss.backward()
        for name, g in _gradients(net, x).items():
            assert g is not None and bool((g == 7.0).all()), f"{name} was touched before call {num_allowed} failed"
        with pytest.raises(RuntimeError, match=r"an earlier backward pass of this call failed.*call the model again"):
            loss.backward()

    # And the next step is correct.
    x.grad = None
    net.zero_grad(set_to_none=True)
    net(x).sum().backward()
    assert max(gradient_errors(_gradients(net, x), reference).values()) == 0.0


def test_failing_forward_changes_nothing() -> None:
    net = _compiled()
    x = image(*_SHAPE)
    reference = net(x)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(torch.OutOfMemoryError), _OutOfMemory(1):
        net(x)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.equal(net(x), reference)


def test_backward_twice_without_retain_graph() -> None:
    net = _compiled()
    loss = net(image(*_SHAPE)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_backward_twice_with_retain_graph() -> None:
    net = _compiled()
    x = image(*_SHAPE).requires_grad_()
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    first = {name: None if g is None else g.clone() for name, g in _gradients(net, x).items()}
    x.grad = None
    net.zero_grad(set_to_none=True)
    loss.backward()
    for name, g in _gradients(net, x).items():
        gradient = first[name]
        assert g is not None and gradient is not None and torch.equal(g, gradient), name


def test_double_backward_is_refused() -> None:
    net = _compiled()
    x = image(*_SHAPE).requires_grad_()
    with pytest.raises((RuntimeError, sft.UnsupportedError)):
        (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()


def test_a_path_in_place_of_an_image_names_its_readers() -> None:
    layer, x = nn.Conv2d(3, 4, 1), sft.sources.ArraySource(np.zeros((8, 8, 3), np.uint8))
    training = sft.nn.WithLoss(layer, nn.CrossEntropyLoss())
    for call in (lambda: sft.compile(layer, "a.tif"), lambda: sft.compile(training, [x, "a.tif"])):
        with pytest.raises(sft.InputError, match=r"open_image\('a\.tif'\), labels sft\.sources\.open_labels\('a\.tif'\)"):
            call()
