"""Each row of the table of replacements against the torch at hand: its target exists, and torch still needs it.

If a test here fails with a new release of torch, the row needs new ``parameters``, or an ``until``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import get_fast_op_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import sft
from sft.analysis.frontend.capture import capture
from sft.analysis.frontend.torch_patches import (
    COMPOSITE_FUNCTIONS,
    MODE_SWITCHES,
    PATCHES,
    RECURRENT_FUNCTIONS,
    Patch,
    apply_patches,
)
from sft.analysis.frontend.trace_context import COMPUTE_DEVICES
from sft.common.torch_internals import without_onednn
from sft.lower.op_recorder import ArgumentSpec, record_ops
from tests.helpers.torch_patches import skip_patch

_FUNCTION_ROWS = [name for name, patch in PATCHES.items() if patch.switch is None]
_SHAPE = (1, 3, 16, 14)


@pytest.mark.parametrize("name", PATCHES)
def test_targets_of_rows_exist(name: str) -> None:
    if PATCHES[name].is_in_range:
        assert PATCHES[name].locate() is not None


@pytest.mark.parametrize("name", _FUNCTION_ROWS)
def test_functions_are_replaced_for_the_thread_that_captures_and_restored(name: str) -> None:
    patch = PATCHES[name]
    if not patch.is_in_range:
        pytest.skip(f"torch {torch.__version__} does not need it")
    location = patch.locate()
    assert location is not None
    owner, attribute = location
    # `vars` and not `getattr`, which binds class methods anew; some owners inherit the function.
    before = vars(owner).get(attribute)
    threads: list[int] = []

    def record(*arguments: Any, **keywords: Any) -> None:
        threads.append(threading.get_ident())

    def call() -> None:
        with contextlib.suppress(Exception):  # the original misses its arguments
            getattr(owner, attribute)()

    other = threading.Thread(target=call)
    with apply_patches(replacements={name: lambda original: record}):
        assert vars(owner).get(attribute) is not before
        call()
        other.start()
        other.join()
    assert vars(owner).get(attribute) is before
    assert threads == [threading.get_ident()]


def test_names_in_modules_of_the_model_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "asks", torch.is_grad_enabled, raising=False)
    with apply_patches(replacements={"is_grad_enabled": lambda original: lambda: "replaced"}, namespaces=[module]):
        functions = (vars(module)["asks"], torch.is_grad_enabled)
        assert [str(function()) for function in functions] == ["replaced"] * 2
    assert vars(module)["asks"] is torch.is_grad_enabled


@pytest.mark.parametrize(
    ("fields", "is_applied"),
    [
        ({}, True),
        ({"since": "9.0"}, False),
        ({"until": "2.0"}, False),
        ({"until": "9.0", "since": "2.0"}, True),
        ({"parameters": ("other",)}, False),
        ({"parameters": ("input", "...")}, True),
        ({"target": "torch.nn.functional.absent"}, False),
        ({"target": "torch.absent.relu"}, False),
    ],
    ids=str,
)
def test_rows_are_skipped_out_of_their_range(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_applied: bool) -> None:
    options = {"target": "torch.nn.functional.relu", "parameters": ("input", "inplace")} | fields
    monkeypatch.setitem(PATCHES, "relu", Patch(why="", without="", replacement=lambda original: lambda *arguments: None, **options))
    with apply_patches("relu"):
        assert (F.relu(torch.ones(1)) is None) == is_applied
    assert F.relu(torch.ones(1)) is not None


def test_a_torch_without_a_required_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = PATCHES["autograd_function_apply"]
    monkeypatch.setitem(PATCHES, "autograd_function_apply", replace(row, target="torch.autograd.function._Absent.apply"))
    with pytest.raises(sft.UnsupportedError, match=r"has no torch\.autograd\.function\._Absent\.apply .*use torch>=2\.11,<2\.15"):
        sft.compile(nn.Conv2d(3, 4, 3), _SHAPE)


# -- torch still needs the rows ---------------------------------------------------------------------------------------


class _FunctionRecorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _captured_dtype(model: nn.Module, autocast: torch.dtype) -> str:
    device = torch.device("cuda", 0)
    for parameter in model.requires_grad_(False).parameters():
        COMPUTE_DEVICES[parameter] = device
    graph = capture(model, (_SHAPE,), (torch.float32,), device, autocast=autocast).graph
    return graph[graph.outputs[0]].dtype


class _Then(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def _exported(model: nn.Module, is_symbolic: bool = False) -> torch.export.ExportedProgram:
    dynamic = ({2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO},) if is_symbolic else None
    return torch.export.export(model, (torch.zeros(_SHAPE),), dynamic_shapes=dynamic, strict=False)


def _export_calls(target: str, model: nn.Module, *, times: int = 1, is_decomposed: bool = False) -> bool:
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    original, calls = getattr(owner, name), []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return original(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(owner, name, counted)
        exported = _exported(model, is_symbolic=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated functions in the namespaces of operators
            if is_decomposed:
                exported.run_decompositions({})
    return len(calls) >= times


def _runs_decomposition(name: str, model: nn.Module) -> bool:
    return _export_calls(f"torch._decomp.decompositions.{name}", model)


def _modes_see_no_queries() -> bool:
    with _FunctionRecorder() as recorder:
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
    return not recorder.names


def _modes_see_no_ends_of_switches() -> bool:
    """True if modes see only that the grad mode is set, without the context and its begin or end."""
    with _FunctionRecorder() as recorder:
        with torch.no_grad():
            pass
        with torch.inference_mode():
            pass
    return set(recorder.names) <= {"_set_grad_enabled"}


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def _exports_autograd_functions() -> bool:
    return "clone" in str(_exported(_Then(_Doubled.apply)).graph)


def _keeps_max_of_sizes() -> bool:
    sizes: list[str] = []

    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(str(max(x.shape[2] - 5, 0)))
            return x

    _exported(Padded(), is_symbolic=True)
    return "Max" in sizes[0]


def _states_of_lstms_have_another_rank() -> bool:
    """As captures decompose them: the call of oneDNN, which takes their place on the CPU, has the right states."""
    lstm, x = nn.LSTM(3, 4), torch.zeros(2, 5, 3)
    weights, states = [p.detach() for p in lstm.parameters()], [torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)]
    arguments = (states, weights, True, 1, 0.0, False, False, False)
    with without_onednn():
        expected, decomposed = torch.lstm(x, *arguments), decomposition_table[torch.ops.aten.lstm.input](x, *arguments)
    return [value.shape for value in expected] != [value.shape for value in decomposed]


def _sums_by_class_have_the_dtype_of_classes() -> bool:
    with FakeTensorMode(shape_env=ShapeEnv()):
        counts = torch.bincount(torch.zeros(5, dtype=torch.int64), weights=torch.zeros(5, dtype=torch.float64), minlength=3)
    return counts.dtype != torch.float64


def _pooling_guards_the_parity() -> bool:
    exported = _exported(nn.MaxPool2d(2), is_symbolic=True)
    sizes = [size for node in exported.graph.nodes if node.op == "placeholder" for size in node.meta["val"].shape]
    environments = {id(size.node.shape_env): size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)}
    return any("Mod" in str(guard.expr) for environment in environments.values() for guard in environment.guards)


def _failed_exports_leave_a_hook() -> bool:
    def fail(x: Tensor) -> Tensor:
        raise ValueError

    hooks = vars(nn.modules.module)["_global_buffer_registration_hooks"]
    before = dict(hooks)
    try:
        with pytest.raises(ValueError):
            _exported(_Then(fail))
        return bool(hooks != before)
    finally:
        hooks.clear()
        hooks.update(before)


def _composites_are_captured_in_half() -> bool:
    """One of the family, and a function that autocast runs in single precision; `test_autocast_composites.py` has all of them."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        patching.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
        skip_patch(patching, *COMPOSITE_FUNCTIONS)
        model = _Then(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"))
        return _captured_dtype(model, torch.bfloat16) == "bfloat16"


class _OfTwoTypes(nn.Module):
    """``einsum`` or a recurrent layer of an image in half precision and weights in single."""

    def __init__(self, name: str) -> None:
        super().__init__()
        layers = {"lstm": nn.LSTM(4, 4), "gru": nn.GRU(4, 4), "rnn_tanh": nn.RNN(4, 4), "rnn_relu": nn.RNN(4, 4, nonlinearity="relu")}
        self.conv, self.weight, self.layer = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(4, 5)), layers.get(name)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.einsum("nchw,cd->ndhw", y, self.weight) if self.layer is None else self.layer(y.mean(3).movedim(2, 0))[0]


def _two_types_are_refused(name: str) -> bool:
    """True if operands of two types are refused, or a recurrent layer is captured step by step (torch 2.11)."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("sft.analysis.frontend.functionalize.functionalize_by_rewriting", lambda *_: None)
        skip_patch(patching, name)
        try:
            graph = capture(_OfTwoTypes(name), (_SHAPE,), (torch.float32,), torch.device("cpu"), autocast=torch.bfloat16).graph
        except sft.UnsupportedError as error:
            return "operands of two types meet there" in str(error)
    return name in RECURRENT_FUNCTIONS and all(node.target != f"aten.{name}.input" for node in graph.operators)


def _traces_have_calls_of_onednn() -> bool:
    lstm = nn.LSTM(3, 4)
    flags = (True, 1, 0.0, True, False, False)
    weights = [tuple(p.shape) for p in lstm.parameters()]

    def run(x: Tensor, h: Tensor, c: Tensor, *params: Tensor) -> Tensor:
        return torch.lstm(x, [h, c], params, *flags)[0]

    shapes = [(2, 1, 3), (1, 1, 4), (1, 1, 4), *weights]
    calls = record_ops(run, [ArgumentSpec(tuple(shape), torch.float32, True) for shape in shapes]).calls
    return any("mkldnn" in str(call.function) for call in calls)


def _evaluates_long_sizes() -> bool:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = sum(x.shape[2] // divisor for divisor in range(3, 63))
            return x if total == 5 else x * 2

    return "mul" in str(_exported(Asks(), is_symbolic=True).graph)


def _tracers_know_no_setting() -> bool:
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("torch.fx.config.do_not_emit_stack_traces", True, raising=False)
        return _nodes_have("stack_trace")


def _nodes_have(key: str) -> bool:
    return any(key in node.meta for node in _exported(nn.ReLU()).graph.nodes)


def _hooks_run_inside(context: Any) -> bool:
    counted: list[int] = []

    def note(*arguments: Any) -> None:
        counted.append(1)

    def pack(value: Tensor) -> Tensor:
        note(value)
        return value

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value), context:
            nn.ReLU()(torch.ones(1, requires_grad=True))
    finally:
        handle.remove()
    return len(counted) > 0


def _is_switched(read: Callable[[], bool], name: str) -> bool:
    before = read()
    with apply_patches(name):
        inside = read()
    return before and not inside and read()


def _switches_determinism() -> bool:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        is_asked = "are_deterministic_algorithms_enabled" in inspect.getsource(F.interpolate)
        return is_asked and _is_switched(torch.are_deterministic_algorithms_enabled, "deterministic_algorithms")
    finally:
        torch.use_deterministic_algorithms(False)


def _switches_anomaly_mode() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            return _is_switched(torch.is_anomaly_enabled, "anomaly_mode")


def _switches_hooks() -> bool:
    hooks = ("saved_tensor_hooks", "global_module_hooks")
    return all(_hooks_run_inside(apply_patches(name)) for name in hooks) and not _hooks_run_inside(apply_patches(*hooks))


def _switches_output() -> bool:
    """Prints of this thread are dropped, and those of other threads are not."""
    texts: list[str] = []

    class Stream:
        def write(self, text: str) -> int:
            texts.append(text)
            return len(text)

        def flush(self) -> None: ...

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(sys, "stdout", Stream())
        with apply_patches("output"):
            print("this thread")
            thread = threading.Thread(target=print, args=("another thread",))
            thread.start()
            thread.join()
        print("afterwards")
    return "".join(texts) == "another thread\nafterwards\n"


def _switches_loggers() -> bool:
    return _is_switched(lambda: logging.getLogger("torch.export").isEnabledFor(logging.WARNING), "loggers")


class _Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("another way")


class _Catches(nn.Module):
    """Model that catches an error of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = _Raises()

    def forward(self, x: Tensor) -> Tensor:
        try:
            y: Tensor = self.fails(x)
        except ValueError:
            y = x + 1
        return y


def _caught_errors_of_modules_fail() -> bool:
    try:
        torch.export.export(_Catches(), (torch.zeros(1, 3, 4, 4),), strict=False)
    except AssertionError:
        return True
    return False


def test_errors_of_submodules_may_be_caught() -> None:
    net = sft.compile(nn.Sequential(nn.Conv2d(3, 3, 1), _Catches()), (1, 3, 8, 6))
    x = torch.ones(1, 3, 8, 6)
    torch.testing.assert_close(net(x), net[0](x) + 1)


#: For each row a check that torch without it behaves as its ``without`` says, or that its switch has an effect.
_NEEDS: dict[str, Callable[[], bool]] = {
    **dict.fromkeys(("is_grad_enabled", "is_inference_mode_enabled", "are_deterministic_algorithms_enabled"), _modes_see_no_queries),
    **dict.fromkeys(MODE_SWITCHES, _modes_see_no_ends_of_switches),
    "autograd_function_apply": _exports_autograd_functions,
    "exporter_minmax": _keeps_max_of_sizes,
    "rnn_state_shapes": _states_of_lstms_have_another_rank,
    "bincount_dtype": _sums_by_class_have_the_dtype_of_classes,
    "pooling_sizes": _pooling_guards_the_parity,
    **dict.fromkeys(COMPOSITE_FUNCTIONS, _composites_are_captured_in_half),
    **{name: functools.partial(_two_types_are_refused, name) for name in ("einsum", *RECURRENT_FUNCTIONS)},
    "deterministic_algorithms": _switches_determinism,
    "onednn": _traces_have_calls_of_onednn,
    "batch_norm_shapes": lambda: _runs_decomposition("native_batch_norm_helper", _Then(nn.BatchNorm2d(4))),
    "grid_sample_shapes": lambda: _runs_decomposition(
        "_grid_sampler_2d", _Then(lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False))
    ),
    "pointwise_shapes": lambda: _is_switched(lambda: torch.ops.aten.relu.default not in get_fast_op_impls(), "pointwise_shapes"),
    "upsample_linear_shapes": lambda: _runs_decomposition("_upsample_linear", _Then(nn.Upsample(scale_factor=2, mode="bilinear"))),
    "upsample_nearest_shapes": lambda: _runs_decomposition("_upsample_nearest", _Then(nn.Upsample(scale_factor=2))),
    "size_complexity_limit": _evaluates_long_sizes,
    "node_metadata": lambda: _nodes_have("tensor_meta"),
    "stack_traces": lambda: _nodes_have("stack_trace"),
    "tracer_stack_traces": _tracers_know_no_setting,
    "fake_tensor_cache": lambda: _is_switched(lambda: bool(torch._dynamo.config.fake_tensor_cache_enabled), "fake_tensor_cache"),
    "generated_code": lambda: _export_calls("torch.fx.graph.Graph.python_code", nn.ReLU()),
    "composite_operators": lambda: _export_calls("torch._export.utils._materialize_cpp_cia_ops", nn.ReLU(), times=2, is_decomposed=True),
    "composite_kernels": lambda: _export_calls("torch._ops.OperatorBase.py_impl", nn.ReLU(), times=5000, is_decomposed=True),
    "ranges_of_sizes": lambda: _export_calls("sympy.solvers.inequalities.reduce_inequalities", nn.Conv2d(3, 4, 3)),
    "mode_stacks": lambda: _is_switched(lambda: bool(FakeTensorMode()._stack_trace), "mode_stacks"),
    "buffer_hooks": _failed_exports_leave_a_hook,
    "module_stack": _caught_errors_of_modules_fail,
    "anomaly_mode": _switches_anomaly_mode,
    "saved_tensor_hooks": _switches_hooks,
    "global_module_hooks": _switches_hooks,
    "loggers": _switches_loggers,
    "output": _switches_output,
}


def test_every_row_has_a_check() -> None:
    assert _NEEDS.keys() == PATCHES.keys()


@pytest.mark.parametrize("name", {check: name for name, check in _NEEDS.items()}.values())
def test_torch_still_needs_the_row(name: str) -> None:
    """A row that this release of torch no longer needs has an ``until``. (Rows may share a check.)"""
    patch = PATCHES[name]
    if patch.until is None and not patch.is_in_range:
        pytest.skip(f"torch {torch.__version__} is older than the function")
    assert _NEEDS[name]() == patch.is_in_range
