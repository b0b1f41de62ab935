"""Batch norms on fake tensors, of which only the shapes are asked.

The exporter keeps a batch norm whole, but finds the shape of its result by running the formula behind it: a dozen operations on fake
tensors with symbolic sizes, which is a third of what capturing a ResNet takes. The result is shaped, typed and laid out like the input.

``max`` and ``min`` of sizes while a model is captured: decided by comparing, as Python does.

The exporter keeps them as functions of the image's size. A network that pads as TensorFlow does, by what the size leaves over, then has
sizes that hold those of the layer before several times over; after five strides they fill pages, and proving anything about them takes
minutes. Compared instead, one of the two numbers is taken, sizes stay as short as they are for any other network, and the comparison is
one more condition under which the capture holds.

``gaussian_nll_loss``, which looks at its variances before it computes: the exporter cannot follow that.

In its place is the same loss without a look: where a variance is negative, and PyTorch would raise, it is NaN. PyTorch writes the smallest
variance, ``eps``, into the variances under ``torch.no_grad``; so a gradient passes to those that were smaller as to all others.

Sizes that are too intricate to be followed as symbols.

Networks that cut images into windows reshape by rounded quotients of sizes, once more in every block, and `torch.export` asks SymPy about
each: 1 s for timm's mobilevitv2_050 at one size, two minutes for it at any (benchmarks/results, `capture-windows`). So it is captured again
for each size. What decides is the length of the expressions, not a clock: reshapes that still stream, as pixels to channels by hand, ask
about some 70 operations.

Traces whose nodes carry what is asked of them, and no more.

With every node the exporter writes down the Python stack that made it, and in which memory formats its value is contiguous, which takes
proofs about symbolic strides. Both are for people and for compilers behind it, and take long in a deep network.

The states that an LSTM leaves, as large as they are.

The exporter keeps an LSTM whole, and finds the shapes of its results by running the formula behind it. Up to torch 2.12 that leaves the
states of each layer with a dimension in front that is one, which eager PyTorch's have not; what follows would be captured so.

``torch.use_deterministic_algorithms``, out of the way of captures.

With it ``torch.nn.functional`` replaces interpolations, paddings and pools of volumes on GPUs by indexing of whole images, which has no
rows that a strip could compute. What is captured is the operator; that its sums have an order is the lowering's business.

Formulas that the exporter would run on fake tensors for the sake of a shape that is known without.

Samples at grids of places on fake tensors, of which only the shapes are asked.

Where sizes are symbols the exporter finds the shape of `grid_sample` by running the formula behind it: a hundred operations, a second. The
result has the image's channels and the grid's extents.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import sympy as sp
import torch
from torch import Tensor
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import config
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

__all__ = [
    "Decomposition",
    "SymbolicSizeTooComplexError",
    "allow_nondeterministic",
    "limit_symbolic_complexity",
    "needs_deterministic_sums",
    "override_decomposition",
    "skip_variance_checks",
    "slim_node_metadata",
    "specialize_size_minmax",
    "use_batch_norm_meta",
    "use_grid_sample_meta",
    "use_rnn_state_shapes",
]

_BUILTIN_MAX, _BUILTIN_MIN = max, min


@contextlib.contextmanager
def specialize_size_minmax() -> Iterator[None]:
    """While this is on, ``max`` and ``min`` of sizes return one of them; of anything else they are what they were."""
    before = builtins.max, builtins.min
    builtins.max = _minmax_by_comparison(_BUILTIN_MAX, before[0], operator.le)
    builtins.min = _minmax_by_comparison(_BUILTIN_MIN, before[1], operator.ge)
    try:
        yield
    finally:
        builtins.max, builtins.min = before


def _minmax_by_comparison(
    plain: Callable[..., Any], exporters: Callable[..., Any], gives_way: Callable[[Any, Any], bool]
) -> Callable[..., Any]:
    def compared(*values: Any, **keywords: Any) -> Any:
        if any(isinstance(value, torch.Tensor) for value in values):
            return exporters(*values, **keywords)
        if len(values) == 2 and not keywords:
            for size, number in (values, values[::-1]):
                if isinstance(size, torch.SymInt) and isinstance(number, int):
                    # A tie is the number: max(-(size % 2), 0) is 0 then, and not one thing for odd sizes and another for even ones.
                    return number if gives_way(size, number) else size
        return plain(*values, **keywords)

    return compared


_gaussian_nll_loss = F.gaussian_nll_loss


@contextlib.contextmanager
def skip_variance_checks() -> Iterator[None]:
    """A context in which this loss can be exported."""
    with mock.patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss_unchecked):
        yield


def _gaussian_nll_loss_unchecked(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    is_column = isinstance(var, Tensor) and var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]
    if not torch.compiler.is_exporting() or not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return _gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)  # it says what is wrong
    if is_column:
        var = var.unsqueeze(-1)
    elif var.dim() != input.dim() or sum(own for own, other in zip(var.shape, input.shape, strict=True) if own != other) > 1:
        raise ValueError("var is of incorrect size")
    value = var.detach()
    written = torch.where(value < 0, math.nan, value.clamp(min=eps))
    var = var + (written - value)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


_MAX_OPERATIONS = 100


class SymbolicSizeTooComplexError(Exception):
    """The exporter asked about a size of many operations; the model is captured for one size instead."""


@contextmanager
def limit_symbolic_complexity() -> Iterator[None]:
    """A context in which the exporter gives up on such sizes.

    Raises:
        IntricateSizesError: out of the exporter, which may wrap it.
    """
    evaluate = ShapeEnv.evaluate_expr

    def checked(self: ShapeEnv, expr: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(expr, sp.Basic) and _num_operations(expr) > _MAX_OPERATIONS:
            raise SymbolicSizeTooComplexError(f"a size of more than {_MAX_OPERATIONS} operations")
        return evaluate(self, expr, *arguments, **keywords)

    with mock.patch.object(ShapeEnv, "evaluate_expr", checked):
        yield


@lru_cache(maxsize=2**12)
def _num_operations(expr: sp.Basic) -> int:
    return int(expr.count_ops())


_STACK_TRACE_OPTION = "do_not_emit_stack_traces"
_METADATA_FUNCTION = "_extract_tensor_metadata"


@contextmanager
def slim_node_metadata() -> Iterator[None]:
    """A context in which traces leave that out; all as ever where this torch has other names for it."""
    with ExitStack() as changes:
        if hasattr(config, _STACK_TRACE_OPTION):
            changes.enter_context(mock.patch.object(config, _STACK_TRACE_OPTION, True))
        if hasattr(proxy_tensor, _METADATA_FUNCTION):
            changes.enter_context(mock.patch.object(proxy_tensor, _METADATA_FUNCTION, _no_metadata))
        yield


def _no_metadata(*arguments: Any, **keywords: Any) -> None:
    """In the place of what says how a value lies in memory."""


_RNN_DECOMPOSITION = "_rnn_helper"


@contextmanager
def use_rnn_state_shapes() -> Iterator[None]:
    """A context in which the formula leaves states ``[N, H]``; all as ever where this torch has another formula."""
    formula = getattr(decompositions, _RNN_DECOMPOSITION, None)
    if formula is None:
        yield
        return

    def result(*args: Any, **kwargs: Any) -> Any:
        out, states = formula(*args, **kwargs)
        return out, [tuple(map(_rnn_with_state_shapes, state)) if isinstance(state, tuple) else state for state in states]

    with mock.patch.object(decompositions, _RNN_DECOMPOSITION, result):
        yield


def _rnn_with_state_shapes(state: Any) -> Any:
    return state.squeeze(0) if state.dim() == 3 else state


@contextlib.contextmanager
def allow_nondeterministic() -> Iterator[None]:
    """A context in which PyTorch asks for no deterministic algorithms."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=only_warns)


def needs_deterministic_sums(device: torch.device) -> bool:
    """Whether sums must be made in an order that PyTorch's own derivatives do not keep on a device. On the CPU they do."""
    return device.type != "cpu" and torch.are_deterministic_algorithms_enabled()


Decomposition = Callable[..., Any]


@contextmanager
def override_decomposition(name: str, arguments: tuple[str, ...], made: Callable[[Decomposition], Decomposition]) -> Iterator[None]:
    """A context in which another function stands for a formula of torch; all as ever where this torch has none of that name and arguments.

    Args:
        name: of the formula, in ``torch._decomp.decompositions``.
        arguments: their names, in order.
        made: makes the other function of the formula, which it calls where it knows no better.
    """
    formula: Decomposition | None = getattr(decompositions, name, None)
    if formula is None or tuple(inspect.signature(formula).parameters) != arguments:
        yield
        return
    with mock.patch.object(decompositions, name, made(formula)):
        yield


_BATCH_NORM_DECOMPOSITION = "native_batch_norm_helper"
_BATCH_NORM_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "functional")


def use_batch_norm_meta() -> AbstractContextManager[None]:
    """A context in which batch norms on fake tensors are not computed; all as ever where this torch has another formula."""
    return override_decomposition(_BATCH_NORM_DECOMPOSITION, _BATCH_NORM_ARGUMENTS, _batch_norm_meta)


def _batch_norm_meta(formula: Decomposition) -> Decomposition:
    def result(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        functional: bool,
    ) -> Any:
        channels = (weight, bias, running_mean, running_var)
        fits = isinstance(input, FakeTensor) and all(t is None or tuple(t.shape) == (input.shape[1],) for t in channels)
        if not fits or not (training or running_mean is not None):  # the formula knows what is wrong
            return formula(input, weight, bias, running_mean, running_var, training, momentum, eps, functional)
        num_kept = input.shape[1] if training or input.device.type != "cpu" else 0
        mean, invstd = (torch.empty(num_kept, dtype=input.dtype, device=input.device) for _ in range(2))  # the exporter tells them apart
        if training and not functional and running_mean is not None and running_var is not None:
            running_mean.copy_(running_mean)  # they are written to, as far as anybody who watches can see
            running_var.copy_(running_var)
        return _empty_like(input), mean, invstd, running_mean, running_var

    return result


def _empty_like(value: Tensor) -> Tensor:
    """A tensor laid out like another one; of one that is seen to be contiguous nobody has to prove it.

    Strides are products of sizes. What PyTorch itself lays out counts at least one element in each dimension.
    """
    rests: set[Any] = {1}
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if _sympy_expression(stride) not in rests:
            return torch.empty_like(value)
        counted = {_sympy_expression(size), _sympy_expression(torch.sym_max(size, 1))}
        rests = {rest * count for rest in rests for count in counted}
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _sympy_expression(size: int | torch.SymInt) -> Any:
    """A size as SymPy writes it."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


_GRID_SAMPLE_DECOMPOSITION = "_grid_sampler_2d"
_GRID_SAMPLE_ARGUMENTS = ("a", "grid", "interpolation_mode", "padding_mode", "align_corners", "_expand_grid")
_GRID_SAMPLE_MODES = (0, 1, 2)


def use_grid_sample_meta() -> AbstractContextManager[None]:
    """A context in which fake tensors are not sampled; all as ever where this torch has another formula."""
    return override_decomposition(_GRID_SAMPLE_DECOMPOSITION, _GRID_SAMPLE_ARGUMENTS, _grid_sample_meta)


def _grid_sample_meta(formula: Decomposition) -> Decomposition:
    def result(
        a: Tensor,
        grid: Tensor,
        interpolation_mode: int = 0,
        padding_mode: int = 0,
        align_corners: bool = False,
        _expand_grid: bool = True,
    ) -> Tensor:
        fits = isinstance(a, FakeTensor) and a.dim() == grid.dim() == 4 and a.shape[0] == grid.shape[0] and grid.shape[3] == 2
        if (
            not fits or interpolation_mode not in _GRID_SAMPLE_MODES or padding_mode not in _GRID_SAMPLE_MODES
        ):  # the formula knows what is wrong
            found: Tensor = formula(a, grid, interpolation_mode, padding_mode, align_corners, _expand_grid)
            return found
        return torch.empty((*a.shape[:2], *grid.shape[1:3]), dtype=a.dtype, device=a.device)

    return result
