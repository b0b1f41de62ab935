"""Hooks on submodules: effects on values are part of the graph, other effects are refused, and a trace leaves no hook."""

from __future__ import annotations

import copy
import functools
import logging
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact, relative_error
from tests.helpers.models import ConvNet, image, seeded

_SHAPE = (2, 3, 16, 12)
_OPTIONS = sft.Options(tile=(5, None))
_LOG = logging.getLogger(__name__)
_CALLS = 0
_TAKEN: list[Tensor] = []


class _Doubled:
    """A hook with a factor that may change."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.factor

    def method(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self._scaled(output)

    def _scaled(self, output: Tensor) -> Tensor:
        return output * self.factor


@torch.no_grad()
def _detached(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _with_keywords(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output + 1


def _needs_grad(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def _adapted() -> Callable[..., Tensor]:
    offset = torch.full((), 0.5, dtype=torch.float64)
    return lambda module, args, output: output + offset.cos()


_VALUE_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda m: m.register_forward_hook(lambda *_: None),
    "output": lambda m: m.register_forward_hook(lambda _, args, output: output.sin() + args[0].mean()),
    "input": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,)),
    "keywords": lambda m: m.register_forward_hook(_with_keywords, with_kwargs=True),
    "always": lambda m: m.register_forward_hook(lambda _, args, output: output * 3, always_call=True),
    "partial": lambda m: m.register_forward_hook(functools.partial(lambda factor, m, a, o: o * factor, 1.5)),
    "object": lambda m: m.register_forward_hook(_Doubled()),
    "method": lambda m: m.register_forward_hook(_Doubled().method),
    "closure": lambda m: m.register_forward_hook(_adapted()),
    "no_grad": lambda m: m.register_forward_hook(_detached),
    "requires_grad": lambda m: m.register_forward_hook(_needs_grad),
}


@pytest.mark.parametrize("kind", _VALUE_HOOKS)
def test_hooks_that_change_values_are_part_of_the_graph(kind: str) -> None:
    model = seeded(ConvNet)
    _VALUE_HOOKS[kind](model.body[3])
    assert_exact(model, image(*_SHAPE), options=_OPTIONS)


@pytest.mark.parametrize("kind", ["output", "input"])
def test_hooks_added_and_removed_after_compile(kind: str) -> None:
    model = seeded(ConvNet)
    plain = copy.deepcopy(model)
    net, x = sft.compile(model, _SHAPE, options=_OPTIONS), image(*_SHAPE)
    before = net(x)
    handles = [_VALUE_HOOKS[kind](each.body[3]) for each in (model, plain)]
    assert relative_error(net(x), plain(x)) <= 1e-12
    assert relative_error(net(x), before) > 1e-3
    for handle in handles:
        handle.remove()
    assert torch.equal(net(x), before)


@pytest.mark.parametrize("is_method", [False, True])
def test_values_that_a_hook_carries_are_compared_at_each_call(is_method: bool) -> None:
    model, doubled, x = seeded(ConvNet), _Doubled(), image(*_SHAPE)
    model.body[3].register_forward_hook(doubled.method if is_method else doubled)
    net = sft.compile(model, _SHAPE, options=_OPTIONS)
    for factor in (2.0, 0.25):
        doubled.factor = factor
        assert relative_error(net(x), model(x)) <= 1e-12


class _EqualLearningRate:
    """A weight computed by a pre-hook, as in many GANs (not one of torch's reparametrisations)."""

    def __call__(self, module: Any, args: Any) -> None:
        module.weight = module.weight_orig * 0.7

    @classmethod
    def apply(cls, module: nn.Conv2d) -> None:
        weight: Any = module.weight
        del module.weight
        module.register_parameter("weight_orig", weight)
        setattr(module, "weight", weight.data)  # noqa: B010  # a plain attribute of a parameter's name
        module.register_forward_pre_hook(cls())


def test_a_weight_that_a_pre_hook_computes() -> None:
    model = seeded(ConvNet)
    layer = model.body[3]
    assert isinstance(layer, nn.Conv2d)
    _EqualLearningRate.apply(layer)
    assert_exact(model, image(*_SHAPE), options=_OPTIONS)


class _Taps(nn.Module):
    """Features taken by hooks and used by ``forward``."""

    def __init__(self, *, clears: bool = False) -> None:
        super().__init__()
        self.body = seeded(ConvNet)
        self.taps: dict[str, Tensor] = {}
        self._clears = clears
        self.body.body[3].register_forward_hook(self._save)

    def _save(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.taps["third"] = output

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        tap = self.taps["third"]
        if self._clears:
            self.taps.clear()
        return y, tap.mean((2, 3))


@pytest.mark.parametrize("clears", [False, True])
def test_features_that_forward_uses(clears: bool) -> None:
    model = _Taps(clears=clears)
    assert_exact(model, image(*_SHAPE), options=_OPTIONS)
    net = sft.compile(model, _SHAPE, options=_OPTIONS)
    before = dict(model.taps)
    net(image(*_SHAPE))
    assert model.taps.keys() == before.keys() and all(model.taps[name] is value for name, value in before.items())


class _FeatureHooks:
    """The collector of timm's feature networks: outputs by device, taken out by ``forward``."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._outputs: Any = defaultdict(OrderedDict)
        for name, module in modules.items():
            module.register_forward_hook(functools.partial(self._collect, name))

    def _collect(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self._outputs[output.device][name] = output

    def get_output(self, device: torch.device) -> dict[str, Tensor]:
        output: dict[str, Tensor] = self._outputs[device]
        self._outputs[device] = OrderedDict()
        return output


class _FeatureNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(ConvNet)
        self.feature_hooks = _FeatureHooks({"a": self.net.body[0], "b": self.net.body[3]})

    def forward(self, x: Tensor) -> list[Tensor]:
        self.net(x)
        return list(self.feature_hooks.get_output(x.device).values())


def test_features_as_timm_takes_them() -> None:
    model = _FeatureNet()
    for _ in range(2):
        assert_exact(model, image(*_SHAPE), options=_OPTIONS)
        model(image(*_SHAPE))


# -- refusals ---------------------------------------------------------------------------------------------------------


class _Store:
    def __init__(self) -> None:
        self.count, self.taken = 0, [0]
        self.array = torch.zeros(1).numpy()

    def counts(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.count += 1

    def keeps(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._keep(output.shape[0])

    def _keep(self, value: int) -> None:
        self.taken.append(value)

    def writes(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.array[0] += 1


def _counts_calls(module: nn.Module, args: Any, output: Tensor) -> None:
    global _CALLS
    _CALLS += 1


def _takes(module: nn.Module, args: Any, output: Tensor) -> None:
    _TAKEN.append(output)


def _logs(module: nn.Module, args: Any, output: Tensor) -> None:
    _LOG.debug("shape %s", output.shape)


def _times(module: nn.Module, args: Any) -> None:
    time.perf_counter()


def _counter() -> Callable[..., None]:
    count = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal count
        count += 1

    return hook


def _own_counter() -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        hook.count += 1  # type: ignore[attr-defined]

    hook.count = 0  # type: ignore[attr-defined]
    return hook


def _sets_attribute(module: Any, args: Any, output: Tensor) -> None:
    module.activation = output


def _counts_flops(module: Any, args: Any, output: Tensor) -> None:
    module.__flops__ = getattr(module, "__flops__", 0) + 1


def _closure_of(value: Any, use: Callable[[Any, Tensor], object]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        use(value, output)

    return hook


_EFFECT_HOOKS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "list": (lambda: _closure_of([], lambda taken, y: taken.append(y)), "changes `value`"),
    "dict": (lambda: _closure_of({}, lambda taken, y: taken.update(a=y)), "changes `value`"),
    "shapes": (lambda: _closure_of([], lambda taken, y: taken.append(y.dim())), "changes `value`"),
    "nonlocal": (_counter, "changes `count`"),
    "global": (lambda: _counts_calls, "changes `_CALLS`"),
    "global list": (lambda: _takes, "changes `_TAKEN`"),
    "function": (_own_counter, "changes `count`"),
    "attribute": (lambda: _sets_attribute, r"changes `body\.3\.activation`"),
    "flops": (lambda: _counts_flops, r"changes `body\.3\.__flops__`"),
    "object": (lambda: _Store().counts, r"changes `self\.count`"),
    "helper": (lambda: _Store().keeps, r"changes `self\.taken`"),
    "array": (lambda: _Store().writes, r"changes `self\.array`"),
    "print": (lambda: lambda _, args, output: print(tuple(output.shape)), "prints"),
    "stderr": (lambda: lambda _, args, output: sys.stderr.write("!") and None, "uses the module `sys`|prints"),
    "logger": (lambda: _logs, "uses `_LOG`, a Logger"),
    "tensor": (lambda: _closure_of(torch.zeros(1, dtype=torch.float64), lambda mean, y: mean.copy_(y.mean())), None),
}


@pytest.mark.parametrize("kind", _EFFECT_HOOKS)
@pytest.mark.parametrize("when", ["before compile", "after compile"])
def test_hooks_with_other_effects_are_refused(kind: str, when: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A compiled model would drop the effect without an error. The trace does not change the hook's state."""
    make, text = _EFFECT_HOOKS[kind]
    model, hook = seeded(ConvNet), make()
    net = sft.compile(model, _SHAPE) if when == "after compile" else None
    handle = model.body[3].register_forward_hook(hook)
    before = (_CALLS, list(_TAKEN), dict(vars(model.body[3])), _carried(hook))
    said = r"writes in place \(copy_\) into a tensor" if text is None else rf"body\.3: Conv2d has a forward hook \(.*{text}"
    for _ in range(2):
        with pytest.raises(sft.UnsupportedError, match=said):
            sft.compile(model, _SHAPE) if net is None else net(image(*_SHAPE))
    assert (_CALLS, list(_TAKEN), dict(vars(model.body[3])), _carried(hook)) == before
    assert capsys.readouterr().out == ""
    handle.remove()
    sft.compile(model, _SHAPE)(image(*_SHAPE))


def _carried(hook: Any) -> Any:
    """Values that a hook carries, as text."""
    owner = getattr(hook, "__self__", None)
    cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return repr((vars(owner) if owner else None, [cell for cell in cells if not callable(cell)], dict(vars(hook)) if not owner else None))


def test_a_hook_that_writes_a_file(tmp_path: Path) -> None:
    model = seeded(ConvNet)
    with open(tmp_path / "log", "w") as file:
        model.body[3].register_forward_hook(_closure_of(file, lambda log, y: log.write("x")))
        with pytest.raises(sft.UnsupportedError, match="uses `value`, a TextIOWrapper"):
            sft.compile(model, _SHAPE)


def test_a_pre_hook_that_measures_time() -> None:
    model = seeded(ConvNet)
    model.body[3].register_forward_pre_hook(_times)
    with pytest.raises(sft.UnsupportedError, match=r"has a forward pre-hook \(_times\) that uses the module `time`"):
        sft.compile(model, _SHAPE)


class _ClearsOnly(nn.Module):
    """Activations for the caller: ``forward`` empties the list, and does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = seeded(ConvNet)
        self.activations: list[Tensor] = []
        self.body.body[3].register_forward_hook(lambda m, a, o: self.activations.append(o))

    def forward(self, x: Tensor) -> Tensor:
        self.activations.clear()
        y: Tensor = self.body(x)
        return y


def test_activations_for_the_caller_are_refused() -> None:
    with pytest.raises(sft.UnsupportedError, match=r"changes `self\.activations`"):
        sft.compile(_ClearsOnly(), _SHAPE)


class _RunsElsewhere(nn.Module):
    """A submodule with a hook that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Conv2d(3, 2, 3), nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


def test_a_hook_that_never_runs_is_no_reason_to_refuse() -> None:
    model = seeded(_RunsElsewhere)
    model.unused.register_forward_hook(_takes)
    assert_exact(model, image(*_SHAPE), options=_OPTIONS)


# -- hooks that `forward` registers -----------------------------------------------------------------------------------


class _Registers(nn.Module):
    """``forward`` registers a hook when it first runs."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
        self.where = where
        self.is_ready = False

    def _register(self) -> None:
        if self.where == "submodule":
            self.conv.register_forward_hook(lambda m, a, o: o * 2)
        elif self.where == "root":
            self.register_forward_hook(lambda m, a, o: o * 2)
        elif self.where == "all":
            nn.modules.module.register_module_forward_hook(lambda m, a, o: None)
        else:
            self.conv.register_full_backward_hook(lambda m, gi, go: None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self._register()
            self.is_ready = True
        y: Tensor = self.conv(x)
        return y


@pytest.fixture(autouse=True)
def _without_global_hooks() -> Iterator[None]:
    yield
    assert not vars(nn.modules.module)["_global_forward_hooks"]


def _num_hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return sum(len(vars(module)[kind]) for module in model.modules() for kind in kinds)


def test_hooks_that_forward_registers_are_taken_back() -> None:
    model = seeded(lambda: _Registers("submodule"))
    plain, x = copy.deepcopy(model), image(*_SHAPE)
    assert sft.check(model, _SHAPE).ok
    net = sft.compile(model, _SHAPE, options=_OPTIONS)
    with pytest.raises(sft.BudgetError):
        sft.plan(model, _SHAPE, budget="1KiB")
    assert _num_hooks(model) == 0 and not model.is_ready
    for size in (_SHAPE, (1, 3, 20, 9)):
        assert relative_error(net(image(*size)), plain(image(*size))) <= 1e-12
    assert _num_hooks(model) == 0
    model(x)  # in eager PyTorch: the hook exists from now on
    assert relative_error(net(x), plain(x)) <= 1e-12


@pytest.mark.parametrize(("where", "text"), [("root", r"\(the model itself\)"), ("all", r"\(all modules\)"), ("backward", "conv")])
def test_hooks_that_would_run_outside_of_the_graph_are_refused(where: str, text: str) -> None:
    model = seeded(lambda: _Registers(where))
    with pytest.raises(sft.UnsupportedError, match=rf"{text}: .*`?forward`? registers|autograd.Function"):
        sft.compile(model, _SHAPE)
    assert _num_hooks(model) == 0


_IS_READY = False
_READY: set[int] = set()


class _Flagged(_Registers):
    """A flag in a global, as a number or as an entry of a set."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        global _IS_READY
        _IS_READY = False
        _READY.clear()

    def forward(self, x: Tensor) -> Tensor:
        global _IS_READY
        if not (id(self) in _READY if self.where == "set" else _IS_READY):
            self.conv.register_forward_hook(lambda m, a, o: o * 2)
            if self.where == "set":
                _READY.add(id(self))
            else:
                _IS_READY = True
        y: Tensor = self.conv(x)
        return y


@pytest.mark.parametrize("where", ["set", "flag"])
def test_hooks_that_depend_on_a_global_are_refused(where: str) -> None:
    """A later capture could have another number of hooks. A first call in eager PyTorch registers them for good."""
    model = seeded(lambda: _Flagged(where))
    with pytest.raises(sft.UnsupportedError, match=r"conv: `forward` registers or removes a hook on this submodule.*call the model once"):
        sft.compile(model, _SHAPE)
    assert _num_hooks(model) == 0 and not _READY
    model = seeded(lambda: _Flagged(where))
    expected = model(image(*_SHAPE))
    assert relative_error(sft.compile(model, _SHAPE, options=_OPTIONS)(image(*_SHAPE)), expected) <= 1e-12


class _Unguarded(_Registers):
    """Model that adds a hook at each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.conv.register_forward_hook(lambda m, a, o: o * 2)
        y: Tensor = self.conv(x)
        return y


def test_a_hook_more_at_each_call_is_refused() -> None:
    with pytest.raises(sft.UnsupportedError, match="conv: `forward` registers or removes a hook on this submodule"):
        sft.compile(seeded(lambda: _Unguarded("submodule")), _SHAPE)


class _Temporary(_Registers):
    """A hook for the time of one call."""

    def forward(self, x: Tensor) -> Tensor:
        taken: list[Tensor] = []
        handle = self.conv.register_forward_hook(lambda m, a, o: taken.append(o))
        y = self.conv(x)
        handle.remove()
        result: Tensor = y.sin() + taken[0]
        return result


def test_a_hook_for_the_time_of_a_call() -> None:
    assert_exact(seeded(lambda: _Temporary("submodule")), image(*_SHAPE), options=_OPTIONS)


class _SwapsClass(nn.Module):
    """``forward`` changes the class of a submodule when it first runs, as parametrisations do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.conv.__class__ = type("Named", (nn.Conv2d,), {})
        y: Tensor = self.conv(x)
        return y


def test_a_class_that_forward_changes_is_taken_back() -> None:
    model = seeded(_SwapsClass)
    sft.compile(model, _SHAPE)
    assert type(model.conv) is nn.Conv2d
