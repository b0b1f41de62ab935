"""Functions that replace those of torch while a model is captured; :mod:`sft.analysis.frontend.torch_patches` lists them.

Each function here but those of :data:`OTHER_FORMS` takes the original function and returns its replacement, which calls the original
where it does not apply.

*Shape functions* (pointwise functions, batch norm, interpolation, ``grid_sample``, LSTM states) take the place of decompositions. The
exporter keeps these operators whole, and finds the shapes of their results by running their decomposition on fake tensors: a few to a
hundred operations with symbolic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import sympy as sp
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from sft.common.torch_internals import FakeTensor

__all__ = [
    "OTHER_FORMS",
    "SymbolicSizeTooComplexError",
    "balanced_module_stack",
    "batch_norm_shapes",
    "bincount_with_dtype",
    "code_on_demand",
    "cosine_similarity_of_norms",
    "first_call_only",
    "floor_quotient",
    "gaussian_nll_loss_unchecked",
    "grid_sample_shapes",
    "limited_evaluate_expr",
    "minmax_by_comparison",
    "no_stack_traces",
    "no_tensor_metadata",
    "pointwise_shapes",
    "rnn_state_shapes",
    "rrelu_of_noise",
    "solve_specializations",
    "upsample_shapes",
]

Function = Callable[..., Any]


# -- sizes ------------------------------------------------------------------------------------------------------------

_MAX_OPERATIONS = 100


class SymbolicSizeTooComplexError(Exception):
    """A size expression has too many operations; the model is captured for one size instead."""


def limited_evaluate_expr(evaluate: Function) -> Function:
    """``ShapeEnv.evaluate_expr`` that gives up on expressions of more than 100 operations.

    The limit is on the length of an expression and not on time: reshapes that still stream (pixels to channels by hand) evaluate
    expressions of some 70 operations.
    """

    def limited(self: Any, expr: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(expr, sp.Basic) and _num_operations(expr) > _MAX_OPERATIONS:
            raise SymbolicSizeTooComplexError(f"a size of more than {_MAX_OPERATIONS} operations")
        return evaluate(self, expr, *arguments, **keywords)

    return limited


@lru_cache(maxsize=2**12)
def _num_operations(expr: sp.Basic) -> int:
    return int(expr.count_ops())


def minmax_by_comparison(exporter_minmax: Function) -> Function:
    """The exporter's ``max`` and ``min``, which return one of two sizes and add a guard, instead of a ``Max`` or ``Min`` expression."""

    def minmax(*values: Any, real_callable: Function, tensor_callable: Function, **keywords: Any) -> Any:
        if any(isinstance(value, Tensor) for value in values):
            return exporter_minmax(*values, real_callable=real_callable, tensor_callable=tensor_callable, **keywords)
        if len(values) == 2 and not keywords:
            for size, number in (values, values[::-1]):
                if isinstance(size, torch.SymInt) and isinstance(number, int):
                    # A tie is the number: max(-(size % 2), 0) is 0 for odd and even sizes, under one guard that holds for both.
                    takes_number = size <= number if real_callable.__name__ == "max" else size >= number
                    return number if takes_number else size
        return real_callable(*values, **keywords)

    return minmax


def floor_quotient(rounded_quotient: Function) -> Function:
    """``//``, which rounds down; the original also looks at the remainder, which becomes a guard on the size."""
    return lambda x, y: x // y


def solve_specializations(solve: Function) -> Function:
    """``DimConstraints.solve`` that leaves out ranges of sizes, which only the text of an error has.

    Equalities fix sizes, and the exporter refuses some of these; they are solved as before.
    """

    def solve_equalities(constraints: Any) -> None:
        if constraints._symbols_with_equalities or constraints._inconsistencies:
            solve(constraints)

    return solve_equalities


# -- shape functions --------------------------------------------------------------------------------------------------


def batch_norm_shapes(decomposition: Function) -> Function:
    """The decomposition of batch norm, without arithmetic on fake tensors: the result has the input's shape, dtype and strides."""

    def batch_norm(
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
        is_valid = isinstance(input, FakeTensor) and all(t is None or tuple(t.shape) == (input.shape[1],) for t in channels)
        if not is_valid or not (training or running_mean is not None):  # the decomposition raises the right error
            return decomposition(input, weight, bias, running_mean, running_var, training, momentum, eps, functional)
        num_saved = input.shape[1] if training or input.device.type != "cpu" else 0
        # Two distinct tensors: the exporter tells results apart by identity.
        mean, invstd = (torch.empty(num_saved, dtype=input.dtype, device=input.device) for _ in range(2))
        if training and not functional and running_mean is not None and running_var is not None:
            running_mean.copy_(running_mean)  # records the write to the running statistics
            running_var.copy_(running_var)
        return _empty_like(input), mean, invstd, running_mean, running_var

    return batch_norm


def _empty_like(value: Tensor) -> Tensor:
    """``torch.empty_like`` without a proof of contiguity where it is visible."""
    return torch.empty(value.shape, dtype=value.dtype, device=value.device) if _is_visibly_contiguous(value) else torch.empty_like(value)


def _is_visibly_contiguous(value: Tensor) -> bool:
    """True where the strides are products of the sizes, each of which may count as at least one, as in strides that PyTorch computes."""
    products: set[Any] = {1}
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if _sympy_expression(stride) not in products:
            return False
        factors = {_sympy_expression(size), _sympy_expression(torch.sym_max(size, 1))}
        products = {product * factor for product in products for factor in factors}
    return True


def _sympy_expression(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def pointwise_shapes(decomposition: Function) -> Function:
    """The kernel of a function of one tensor on fake tensors, without arithmetic: the result has the input's shape, dtype and strides."""

    def kernel(mode: Any, *arguments: Any, **keywords: Any) -> Any:
        value, *numbers = arguments
        with mode:
            if keywords or not value.is_floating_point() or not all(isinstance(number, (int, float)) for number in numbers):
                return decomposition(*arguments, **keywords)
            return _empty_like(value)

    return kernel


def upsample_shapes(decomposition: Function) -> Function:
    """The decomposition of interpolation, without arithmetic on fake tensors: samples and channels of the image, and the new size."""

    def upsample(input: Tensor, output_size: Any, *arguments: Any, **keywords: Any) -> Tensor:
        is_valid = isinstance(input, FakeTensor) and input.is_floating_point() and len(output_size) == input.dim() - 2
        if not is_valid or not _is_visibly_contiguous(input):
            result: Tensor = decomposition(input, output_size, *arguments, **keywords)
            return result
        return torch.empty((*input.shape[:2], *output_size), dtype=input.dtype, device=input.device)

    return upsample


#: Interpolation and padding modes that the decomposition accepts.
_GRID_SAMPLE_MODES = (0, 1, 2)


def grid_sample_shapes(decomposition: Function) -> Function:
    """The decomposition of ``grid_sample``, without arithmetic on fake tensors: channels of the image, height and width of the grid."""

    def grid_sample(
        a: Tensor,
        grid: Tensor,
        interpolation_mode: int = 0,
        padding_mode: int = 0,
        align_corners: bool = False,
        _expand_grid: bool = True,
    ) -> Tensor:
        is_valid = isinstance(a, FakeTensor) and a.dim() == grid.dim() == 4 and a.shape[0] == grid.shape[0] and grid.shape[3] == 2
        is_valid = is_valid and interpolation_mode in _GRID_SAMPLE_MODES and padding_mode in _GRID_SAMPLE_MODES
        if not is_valid:  # the decomposition raises the right error
            sampled: Tensor = decomposition(a, grid, interpolation_mode, padding_mode, align_corners, _expand_grid)
            return sampled
        return torch.empty((*a.shape[:2], *grid.shape[1:3]), dtype=a.dtype, device=a.device)

    return grid_sample


def rnn_state_shapes(decomposition: Function) -> Function:
    """The decomposition of recurrent layers with states ``[N, H]``, as eager PyTorch has them, and not ``[1, N, H]``."""

    def rnn(*arguments: Any, **keywords: Any) -> Any:
        out, states = decomposition(*arguments, **keywords)
        return out, [tuple(map(_without_leading_one, state)) if isinstance(state, tuple) else state for state in states]

    return rnn


def _without_leading_one(state: Any) -> Any:
    return state.squeeze(0) if state.dim() == 3 else state


def bincount_with_dtype(kernel: Function) -> Function:
    """The kernel of ``bincount`` on fake tensors with the dtype of real ones: float32 or float64 where there are weights, else int64."""

    def bincount(mode: Any, func: Any, inputs: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        counts: Tensor = kernel(mode, func, inputs, weights, minlength)
        dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
        return counts if counts.dtype == dtype else inputs.new_empty(counts.shape, dtype=dtype)

    return bincount


# -- modules ----------------------------------------------------------------------------------------------------------


def balanced_module_stack(call_module: Function) -> Function:
    """``Tracer.call_module`` that restores the stack of running modules where a module raises an error."""

    def call(self: Any, m: Any, forward: Function, args: Any, kwargs: Any) -> Any:
        before = dict(self.module_stack)
        try:
            return call_module(self, m, forward, args, kwargs)
        except BaseException:
            self.module_stack.clear()
            self.module_stack.update(before)
            raise

    return call


# -- metadata and losses -----------------------------------------------------------------------------------------------------------


def no_tensor_metadata(original: Function) -> Function:
    """The function that finds memory formats of a node's value, without a result."""
    return lambda *arguments, **keywords: None


def no_stack_traces(make_tracer: Function) -> Function:
    """The constructor of the exporter's tracer, with a tracer that records no Python stacks."""

    def make(tracer: Any, *arguments: Any, **keywords: Any) -> None:
        make_tracer(tracer, *arguments, **keywords)
        tracer.record_stack_traces = False

    return make


def first_call_only(function: Function) -> Function:
    """A function without a result that runs at its first call and does nothing at later ones."""
    calls: list[Any] = []

    def run_once() -> None:
        if not calls:
            calls.append(function())

    return run_once


def code_on_demand(recompile: Function) -> Function:
    """``GraphModule.recompile`` that generates Python code when the module is called, and not each time that its graph changes."""

    def recompile_later(module: Any) -> Any:
        if type(module.graph._codegen) is not fx.graph.CodeGen:
            return recompile(module)

        def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
            recompile(self)
            return type(self).forward(self, *arguments, **keywords)

        type(module).forward = forward
        return None

    return recompile_later


def gaussian_nll_loss_unchecked(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """``gaussian_nll_loss`` without a look at the values of the variances: where PyTorch raises for a negative one, the loss is NaN.

    PyTorch clamps variances to ``eps`` under ``torch.no_grad``, so the gradient of a clamped variance is not zero; here likewise.
    """
    if not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return F.gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)  # raises the right error
    if var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.dim() != input.dim() or sum(size for size, other in zip(var.shape, input.shape, strict=True) if size != other) > 1:
        raise ValueError("var is of incorrect size")
    values = var.detach()
    clamped = torch.where(values < 0, math.nan, values.clamp(min=eps))
    var = var + (clamped - values)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def rrelu_of_noise(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Tensor:
    """``rrelu`` with slopes of uniform noise, which follows positions; in evaluation the slope is their mean, and nothing is drawn."""
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    slope = torch.where(input.detach() <= 0, torch.empty_like(input).uniform_(lower, upper), 1.0)
    return input.mul_(slope) if inplace else input * slope


def cosine_similarity_of_norms(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """``cosine_similarity`` by its norms, which stream along channels and are global values along the image.

    PyTorch clamps norms to ``eps`` under ``torch.no_grad``, so the gradient of a clamped norm is not zero; here likewise. Operands that
    PyTorch would convert or expand first are left to it.
    """
    is_alike = x1.dtype == x2.dtype and x1.is_floating_point() and x1.dim() == x2.dim()
    if not is_alike or torch.is_autocast_enabled(x1.device.type):
        return F.cosine_similarity(x1, x2, dim, eps)

    def unit(value: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(value, 2, dim, keepdim=True)
        return value / (norm + (norm.detach().clamp_min(eps) - norm.detach()))

    return (unit(x1) * unit(x2)).sum(dim)


def covariance_of_products(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """``cov`` without weights as a product of matrices, without a look at the number of observations as a tensor."""
    if fweights is not None or aweights is not None or not (input.is_floating_point() or input.is_complex()) or input.dim() > 2:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    rows = rows - rows.mean(1, keepdim=True)
    out: Tensor = (rows @ rows.mT.conj() / max(rows.shape[1] - correction, 0)).squeeze()
    return out


def correlation_of_covariance(input: Tensor) -> Tensor:
    """``corrcoef`` of real numbers by :func:`covariance_of_products`."""
    if not input.is_floating_point() or input.dim() > 2:
        return torch.corrcoef(input)
    matrix = covariance_of_products(input)
    if matrix.dim() == 0:
        return matrix / matrix
    deviations = matrix.diagonal().sqrt()
    return (matrix / deviations[:, None] / deviations[None]).clip(-1, 1)


#: Functions that are captured in another form: they branch on values of tensors, draw in an operator of their own, or have no rule for
#: strips. Function modes call the other form, so nothing is patched.
OTHER_FORMS: Mapping[Any, Function] = {
    F.gaussian_nll_loss: gaussian_nll_loss_unchecked,
    F.rrelu: rrelu_of_noise,
    torch.rrelu: rrelu_of_noise,
    torch.cosine_similarity: cosine_similarity_of_norms,
    torch.cov: covariance_of_products,
    torch.corrcoef: correlation_of_covariance,
    Tensor.cov: covariance_of_products,
    Tensor.corrcoef: correlation_of_covariance,
}
