"""Convolution of a tile, with bias, residual and ReLU fused, and its gradients.

A tile is said by a ``Geometry``: input buffer with its halo in, output rows out, zeros at the true border only. On CUDA
Triton kernels run, elsewhere the plain PyTorch of ``conv2d_reference``.

The gradients of the weight and the bias are sums over the whole image, so a tile only adds to them: to ``GradientSlots`` in fp32,
which the caller keeps for as long as strips come, and adds up once at the end.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sft.common.errors import InputError
from sft.kernels.common import KERNEL_DTYPES, empty_channels_last, uses_triton
from sft.kernels.conv.conv_reference import reference_conv2d, reference_data_gradient, reference_weight_gradient
from sft.kernels.geometry import Geometry, check_buffer, raise_problems

__all__ = ["Activation", "GradientSlots", "Precision", "check_layer", "conv2d", "conv2d_data_gradient", "conv2d_weight_gradient"]
__all__ += ["precision_of", "scaled_weight", "weight_gradients"]

Activation = Literal["none", "relu"]
#: how products are formed: fp32 operands exactly, or rounded to ten bits, or as three such products, or as three of bfloat16, which keep
#: sixteen bits; half-precision ones as they are
Precision = Literal["ieee", "tf32", "tf32x3", "bf16x3", "bf16", "fp16"]

_PRECISIONS: dict[torch.dtype, tuple[Precision, ...]] = {
    torch.float32: ("ieee", "tf32", "tf32x3", "bf16x3"),
    torch.bfloat16: ("bf16",),
    torch.float16: ("fp16",),
}
assert set(_PRECISIONS) == KERNEL_DTYPES

_NO_TILE = "these tensors are not a tile of this convolution"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSlots:
    """Where tiles add up the gradients of a weight and of a bias, in fp32 (fp64 for an fp64 weight)."""

    #: ``[splits, outputs, kh, kw, inputs of a group]``, contiguous
    weights: Tensor
    #: ``[splits, outputs]``, contiguous; None if there is no bias
    biases: Tensor | None

    @classmethod
    def zeros(cls, weight: Tensor, *, bias: bool, num_splits: int = 32) -> GradientSlots:
        """Empty sums for the gradient of ``weight`` ``[outputs, inputs of a group, kh, kw]``.

        Args:
            num_splits: how many sums run beside each other; the bits of the result depend on it.
        """
        if num_splits < 1:
            raise InputError(f"slots need at least one split, got {num_splits}")
        num_out, num_in, *kernel = weight.shape
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        sums = torch.zeros(num_splits, num_out, *kernel, num_in, dtype=dtype, device=weight.device)
        return cls(weights=sums, biases=sums.new_zeros(num_splits, num_out) if bias else None)

    def total(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The gradients: ``[outputs, inputs of a group, kh, kw]`` in channels-last layout, and ``[outputs]``. Or of a volume's weight."""
        weight = _reduce_slots(self.weights, dtype).movedim(-1, 1)
        return weight, None if self.biases is None else _reduce_slots(self.biases, dtype)


def _reduce_slots(slots: Tensor, dtype: torch.dtype) -> Tensor:
    if uses_triton(slots):
        from sft.kernels.conv.weight_grad2d_triton import launch_reduce  # not above: it imports Triton

        out = slots.new_empty(slots.shape[1:], dtype=dtype)
        if out.numel():
            launch_reduce(slots, out)
        return out
    return functools.reduce(torch.add, slots.unbind()).to(dtype)  # in the order of the splits, like the kernel


def conv2d(
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation = "none",
    groups: int = 1,
    precision: Precision | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``activation(scale * conv(x) + bias + residual)`` of one tile.

        Differentiable once with respect to every tensor if ``out`` is None; the gradient of ``x`` is then this tile's share, in
        the buffer's own shape, zero in rows that are not data.

        Args:
            x: ``[N, C, h, w]``, channels-last, the buffer that ``geometry`` calls input.
            weight: ``[outputs, C / groups, kh, kw]``; channels-last is fastest.
            scale: ``[outputs]``; with ``bias``, a norm whose statistics are known.
            bias: ``[outputs]``.
            residual: added before the activation; of the output's shape, channels-last.
            activation: ``"none"`` or ``"relu"``.
            groups: channels of each are convolved on their own.
            precision: how products are formed (default: exactly in the dtype of ``x``).
            out: where to write, of the output's shape, channels-last.

        Returns:
            ``[N, outputs, rows, columns]``, channels-last.

        Raises:
            InputError: a tensor does not fit the geometry, or the geometry lacks a halo.

    >>> from sft.kernels.geometry import Axis, Geometry, Span, Window
    >>> x, weight = torch.arange(20.0).reshape(1, 1, 5, 4), torch.ones(1, 1, 3, 3)
    >>> window = Window(kernel=3, padding=1)
    >>> whole = conv2d(x, weight, Geometry.whole((5, 4), window, window))
    >>> rows = Axis(input=Span(start=2, size=3, extent=5), output=Span(start=3, size=2, extent=5), window=window)
    >>> columns = Axis(input=Span.whole(4), output=Span.whole(4), window=window)
    >>> torch.equal(conv2d(x[:, :, 2:], weight, Geometry(height=rows, width=columns)), whole[:, :, 3:])
    True
    """
    geometry.check_forward()
    mode = check_layer(x, weight, geometry, groups, precision, [("residual", residual), ("out", out)], scale, bias)
    if activation not in get_args(Activation):
        raise InputError(f"the activation is {activation!r}; choose one of {', '.join(get_args(Activation))}")
    if out is None:
        result: Tensor = _Conv2d.apply(x, weight, scale, bias, residual, geometry, groups, activation == "relu", mode)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return result
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, scale, bias, residual, out)):
        raise InputError("conv2d with out= is not differentiable, and an argument requires grad; leave out= away or use torch.no_grad()")
    return _forward(x, weight, scale, bias, residual, geometry, groups, activation == "relu", mode, out)


def conv2d_data_gradient(
    gradient: Tensor,
    weight: Tensor,
    geometry: Geometry,
    *,
    output: Tensor | None = None,
    groups: int = 1,
    precision: Precision | None = None,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of a convolution's input, for the rows that ``geometry`` calls input.

    Args:
        gradient: of the output, ``[N, outputs, rows, columns]``, channels-last: the buffer that ``geometry`` calls output, with a halo.
        weight: as for ``conv2d``.
        output: of the activation, where that was ReLU: like ``gradient``; the gradient counts only where it is above zero.
        groups, precision: as for ``conv2d``.
        partial: gradients beyond the buffer count as zero: the share of this tile, to be added to those of others.
        out: where to write.

    Returns:
        ``[N, C, h, w]``, channels-last; zero in rows that are not data.

    Raises:
        InputError: a tensor does not fit the geometry, or the geometry lacks a halo.
    """
    if not partial:
        geometry.check_adjoint()
    num_samples, num_in = gradient.shape[0], weight.shape[1] * groups
    mode = check_layer(None, weight, geometry, groups, precision, [("gradient", gradient), ("output", output)])
    problems: list[str] = []
    if out is None:
        out = empty_channels_last(gradient, (num_samples, num_in, *geometry.input_size))
    check_buffer("out", out, num_samples, num_in, geometry.input_size, problems)
    raise_problems(_NO_TILE, problems)
    if not out.numel():
        return out
    if not uses_triton(gradient):
        return out.copy_(reference_data_gradient(gradient, output, weight, geometry, groups=groups))
    if weight.shape[1] == 1 and groups > 1:
        from sft.kernels.conv.depthwise_triton import launch_depthwise_gradient  # not above: it imports Triton

        launch_depthwise_gradient(gradient, output, weight, out, geometry)
    else:
        from sft.kernels.conv.data_grad2d_triton import launch_data_gradient  # not above: it imports Triton

        launch_data_gradient(gradient, output, weight, out, geometry, groups=groups, precision=mode)
    return out


def conv2d_weight_gradient(
    gradient: Tensor,
    x: Tensor,
    geometry: Geometry,
    *,
    into: GradientSlots,
    output: Tensor | None = None,
    groups: int = 1,
    precision: Precision | None = None,
) -> None:
    """Add one tile's share of the gradients of weight and bias to ``into``.

    Every output of the image must be in one tile only: a tile's ``gradient`` has no halo here.

    Args:
        gradient: of the output, as for ``conv2d_data_gradient``.
        x: the input buffer, as for ``conv2d``.
        into: the sums, changed in place.
        output: as for ``conv2d_data_gradient``.
        groups, precision: as for ``conv2d``.

    Raises:
        InputError: as ``conv2d``; or the slots do not fit the layer.
    """
    geometry.check_forward()
    num_out, *kernel, num_in = into.weights.shape[1:]
    weight = torch.empty(num_out, num_in, *kernel, dtype=x.dtype, device="meta")
    mode = check_layer(x, weight, geometry, groups, precision, [("gradient", gradient), ("output", output)])
    if not gradient.numel():
        return
    if not uses_triton(x):
        shares = reference_weight_gradient(gradient, output, x, (num_out, num_in, *kernel), geometry, groups=groups)
        into.weights[0] += shares[0].permute(0, 2, 3, 1)
        if into.biases is not None:
            into.biases[0] += shares[1]
    elif num_in == 1 and groups > 1:
        from sft.kernels.conv.depthwise_triton import launch_depthwise_weight  # not above: it imports Triton

        launch_depthwise_weight(gradient, output, x, into.weights, into.biases, geometry)
    else:
        from sft.kernels.conv.weight_grad2d_triton import launch_weight_gradient  # not above: it imports Triton

        launch_weight_gradient(gradient, output, x, into.weights, into.biases, geometry, groups=groups, precision=mode)


class _Conv2d(torch.autograd.Function):
    """Saves the input, the weight and, behind a ReLU, the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        geometry: Geometry,
        groups: int,
        relu: bool,
        mode: Precision,
    ) -> Tensor:
        out = empty_channels_last(x, (x.shape[0], weight.shape[0], *geometry.output_size))
        y = _forward(x, weight, scale, bias, residual, geometry, groups, relu, mode, out)
        ctx.save_for_backward(x, weight, scale, y if relu else None)
        ctx.bias = None if bias is None else bias.dtype
        ctx.geometry, ctx.groups, ctx.mode = geometry, groups, mode
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, output = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        dx = dw = ds = db = dr = None
        common = {"output": output, "groups": ctx.groups, "precision": ctx.mode}
        if ctx.needs_input_grad[0]:
            scaled = weight if scale is None else scaled_weight(weight, scale)
            dx = conv2d_data_gradient(gradient, scaled, ctx.geometry, partial=True, **common)
        if any(ctx.needs_input_grad[1:4]):
            slots = GradientSlots.zeros(weight, bias=ctx.needs_input_grad[3])
            conv2d_weight_gradient(gradient, x, ctx.geometry, into=slots, **common)
            dw, ds, db = weight_gradients(slots, weight, scale, ctx.bias)
        if ctx.needs_input_grad[4]:
            dr = gradient if output is None else torch.where(output <= 0, 0, gradient)
        return dx, dw, ds, db, dr, None, None, None, None


def scaled_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """The weight of a convolution that is followed by a scale, with the scale in it, in the weight's dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) * scale.to(wide).view(-1, *(1,) * (weight.dim() - 1))).to(weight.dtype)


def weight_gradients(
    slots: GradientSlots, weight: Tensor, scale: Tensor | None, bias: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of weight, scale and bias, from slots that were filled as if there were no scale.

    The output is ``scale * z``, and z is linear in the weight: so the sum over pixels of the gradient times z is the product of the
    weight with what the slots hold, and z itself is not needed again.
    """
    dw, db = slots.total(weight.dtype if scale is None else slots.weights.dtype)
    db = None if db is None or bias is None else db.to(bias)
    if scale is None:
        return dw, None, db
    ds = (dw * weight.to(dw.dtype)).flatten(1).sum(1).to(scale.dtype)
    return (dw * scale.to(dw.dtype).view(-1, *(1,) * (dw.dim() - 1))).to(weight.dtype), ds, db


def _forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Geometry,
    groups: int,
    relu: bool,
    mode: Precision,
    out: Tensor,
) -> Tensor:
    """Write to ``out`` by the kernel of the device; differentiates nothing."""
    if not out.numel():
        return out
    if not uses_triton(x):
        return out.copy_(reference_conv2d(x, weight, bias, residual, geometry, groups=groups, relu=relu, scale=scale))
    if weight.shape[1] == 1 and groups > 1:
        from sft.kernels.conv.depthwise_triton import launch_depthwise  # not above: it imports Triton

        scaled = weight if scale is None else scaled_weight(weight, scale)
        launch_depthwise(x, scaled, bias, residual, out, geometry, relu=relu)
    else:
        from sft.kernels.conv.forward2d_triton import launch_conv2d  # not above: it imports Triton

        launch_conv2d(x, weight, bias, residual, out, geometry, groups=groups, relu=relu, precision=mode, scale=scale)
    return out


def check_layer(
    x: Tensor | None,
    weight: Tensor,
    geometry: Geometry,
    groups: int,
    precision: Precision | None,
    outputs: list[tuple[str, Tensor | None]],
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    size: tuple[int, int] | None = None,
) -> Precision:
    """Raise all that keeps these tensors from being a tile of the layer; the precision otherwise.

    Args:
        outputs: names and tensors that are like the output: of its ``size``, if that is not the geometry's.
    """
    problems: list[str] = []
    given = [(name, tensor) for name, tensor in outputs if tensor is not None]
    first = x if x is not None else given[0][1]
    num_samples, num_out = first.shape[0], weight.shape[0]
    if weight.dim() != 4 or tuple(weight.shape[2:]) != geometry.kernel:
        problems.append(
            f"weight has shape {tuple(weight.shape)}, the window is {geometry.kernel}; give [outputs, inputs of a group, kh, kw]"
        )
    elif groups < 1 or num_out % groups or math.prod(weight.shape) == 0:
        problems.append(f"{num_out} outputs do not make {groups} groups of at least one; choose groups that divide them")
    else:
        if x is not None:
            check_buffer("x", x, num_samples, weight.shape[1] * groups, geometry.input_size, problems)
        for name, tensor in given:
            check_buffer(name, tensor, num_samples, num_out, size or geometry.output_size, problems)
        for name, vector in (("scale", scale), ("bias", bias)):
            if vector is not None and tuple(vector.shape) != (num_out,):
                problems.append(f"{name} has shape {tuple(vector.shape)}, the layer has {num_out} outputs")
    mode = precision_of([("x", x), ("weight", weight), *given], precision, problems)
    raise_problems(_NO_TILE, problems)
    return mode


def precision_of(tensors: list[tuple[str, Tensor | None]], precision: Precision | None, problems: list[str]) -> Precision:
    """How products of these are formed, by default exactly; or add to ``problems`` what keeps them from being multiplied so."""
    given = [(name, tensor) for name, tensor in tensors if tensor is not None]
    dtype = given[0][1].dtype
    problems += [f"{name} is {tensor.dtype}, another is {dtype}; cast one" for name, tensor in given if tensor.dtype != dtype]
    choices = _PRECISIONS.get(dtype, ("ieee",))
    mode: Precision = choices[0] if precision is None else precision
    if not dtype.is_floating_point or mode not in choices:
        problems.append(f"precision {mode!r} of {dtype} tensors; choose one of {', '.join(choices)}, or cast the tensors")
    return mode
