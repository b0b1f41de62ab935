"""Contexts that switch settings and tables of torch and Python during a capture; :mod:`sft.analysis.frontend.torch_patches` lists them.

Each context sets back what it has switched. Settings of the whole process hold for other threads as well.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from sft.analysis.frontend.replacement_functions import bincount_with_dtype, pointwise_shapes

__all__ = [
    "muted_output",
    "needs_deterministic_sums",
    "quiet_loggers",
    "remembered_kernels",
    "restored_buffer_hooks",
    "with_bincount_dtypes",
    "with_pointwise_shapes",
    "without_deterministic_algorithms",
    "without_global_module_hooks",
    "without_mode_stacks",
]


@contextmanager
def without_deterministic_algorithms() -> Iterator[None]:
    """Switch ``torch.use_deterministic_algorithms`` off."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=only_warns)


@contextmanager
def without_global_module_hooks() -> Iterator[None]:
    """Remove the forward and backward hooks of all modules."""
    names = [f"_global_{name}_hooks" for name in ("forward", "forward_pre", "backward", "backward_pre")]
    contents = [(hooks, dict(hooks)) for name, hooks in vars(nn.modules.module).items() if name in names]
    for hooks, _ in contents:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in contents:
            hooks.clear()  # `forward` may register some
            hooks.update(content)


#: Loggers that repeat the messages of exceptions.
_NOISY_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch._subclasses.fake_tensor")


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Mute the exporter's loggers and all warnings."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        _set_levels(loggers, [logging.CRITICAL for _ in loggers])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _set_levels(loggers, levels)


def _set_levels(loggers: Sequence[logging.Logger], levels: Sequence[int]) -> None:
    """Set the levels of loggers. Only the last one by its method, which forgets what all loggers of the process know of levels."""
    for logger, level in zip(loggers, levels, strict=True):
        logger.level = level
    loggers[-1].setLevel(levels[-1])


@contextmanager
def muted_output() -> Iterator[None]:
    """Drop what this thread prints."""
    with contextlib.redirect_stdout(_MutedStream(sys.stdout)), contextlib.redirect_stderr(_MutedStream(sys.stderr)):
        yield


@contextmanager
def without_mode_stacks() -> Iterator[None]:
    """Create modes of fake tensors without a record of the Python stack."""
    module = pkgutil.resolve_name("torch._subclasses.fake_tensor")
    functions = types.SimpleNamespace(**vars(traceback))
    functions.extract_stack = traceback.StackSummary
    with mock.patch.object(module, "traceback", functions):
        yield


@contextmanager
def restored_buffer_hooks() -> Iterator[None]:
    """Remove the hooks on registrations of buffers that were added inside."""
    hooks = vars(nn.modules.module)["_global_buffer_registration_hooks"]
    before = dict(hooks)
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(before)


@contextmanager
def with_bincount_dtypes() -> Iterator[None]:
    """Give ``bincount`` on fake tensors the dtype that it has on real ones."""
    kernels = pkgutil.resolve_name("torch._subclasses.fake_impls").op_implementations_dict
    operator = torch.ops.aten.bincount.default
    original = kernels[operator]
    kernels[operator] = bincount_with_dtype(original)
    try:
        yield
    finally:
        kernels[operator] = original


#: Pointwise functions of one tensor and of numbers that need no check.
_POINTWISE = (
    *("relu", "leaky_relu", "elu", "gelu", "silu", "mish", "softplus", "sigmoid", "tanh", "hardsigmoid", "hardswish"),
    *("abs", "cos", "erf", "exp", "log", "log1p", "neg", "reciprocal", "rsqrt", "sin", "sqrt"),
)


@contextmanager
def with_pointwise_shapes() -> Iterator[None]:
    """Give pointwise functions kernels on fake tensors of symbolic sizes that do no arithmetic."""
    kernels = pkgutil.resolve_name("torch._subclasses.fake_impls").get_fast_op_impls()
    decompositions = pkgutil.resolve_name("torch._decomp").decomposition_table
    operators = [getattr(torch.ops.aten, name).default for name in _POINTWISE]
    added = [operator for operator in operators if operator in decompositions and operator not in kernels]
    kernels.update({operator: pointwise_shapes(decompositions[operator]) for operator in added})
    try:
        yield
    finally:
        for operator in added:
            kernels.pop(operator, None)


#: By composite operator: the rule that keeps it whole, its kernels outside and inside of the exporter's context, and that on fake tensors.
_COMPOSITE_KERNELS: dict[Any, tuple[Callable[..., Any], dict[Any, Any], dict[Any, Any], Callable[..., Any]]] = {}


def remembered_kernels(override: Callable[..., Any]) -> Callable[..., Any]:
    """The context in which the exporter keeps composite operators whole, with the kernels that it made for them the first time."""

    @contextmanager
    def kept_whole(rules: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
        fake = pkgutil.resolve_name("torch._subclasses.fake_impls").op_implementations_dict
        known = {op: _COMPOSITE_KERNELS[op] for op in rules if op in _COMPOSITE_KERNELS and op not in fake}
        known = {op: kept for op, kept in known.items() if kept[0] is rules[op] and kept[1] == op.py_kernels}
        others = {op: rule for op, rule in rules.items() if op not in known}
        before = {op: dict(op.py_kernels) for op in others if op not in fake}
        with override(others):
            for op, kernels in before.items():
                _COMPOSITE_KERNELS[op] = others[op], kernels, dict(op.py_kernels), fake[op]
            try:
                for op, (_, _, kernels, fake_kernel) in known.items():
                    _set_kernels(op, kernels)
                    fake[op] = fake_kernel
                yield
            finally:
                for op, (_, kernels, _, _) in known.items():
                    _set_kernels(op, kernels)
                    fake.pop(op, None)

    return kept_whole


def _set_kernels(operator: Any, kernels: Mapping[Any, Any]) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()


class _MutedStream:
    """A text stream that drops, and counts, the writes of one thread and passes on those of other threads."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()
        self.num_muted = 0

    def write(self, text: str) -> int:
        is_muted = threading.get_ident() == self._thread or self._stream is None
        self.num_muted += len(text) if is_muted else 0
        return len(text) if is_muted else int(self._stream.write(text))

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def needs_deterministic_sums(device: torch.device) -> bool:
    """Return true where sums need an order that PyTorch's own derivatives do not keep on a device. On the CPU they keep it."""
    return device.type != "cpu" and torch.are_deterministic_algorithms_enabled()
