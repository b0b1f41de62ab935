"""Functions of the library's own operators (``sft.`` targets) on full tensors, written in PyTorch.

They are traced like ATen operators (:mod:`sft.lower.joint_traces`), so autograd provides their derivatives. Parameter names are the names
of the nodes' arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sft.lower.custom_ops import layouts, losses, statistics, windows
from sft.lower.custom_ops.layouts import EXACT_STORAGE

__all__ = ["BY_SHAPE", "EXACT_STORAGE", "FUNCTIONS"]

#: The function of each target.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sft.moments": statistics.moments,
    "sft.moment_mean": statistics.moment_mean,
    "sft.variance": statistics.variance,
    "sft.nth_root": statistics.nth_root,
    "sft.minmax": statistics.minmax,
    "sft.axis_sum": statistics.axis_sum,
    "sft.axis_minmax": statistics.axis_minmax,
    "sft.argmax": statistics.argmax,
    "sft.logsumexp": statistics.logsumexp,
    "sft.scale_shift": statistics.scale_shift,
    "sft.folded_weight": statistics.folded_weight,
    "sft.folded_bias": statistics.folded_bias,
    "sft.affine": statistics.affine,
    "sft.running_mean": statistics.running_mean,
    "sft.running_var": statistics.running_var,
    "sft.rearrange": layouts.rearrange,
    "sft.align_dims": layouts.align_dims,
    "sft.restore_dims": layouts.restore_dims,
    "sft.channel_norm": statistics.channel_norm,
    "sft.channel_rms_norm": statistics.channel_rms_norm,
    "sft.inverse_sqrt": statistics.inverse_sqrt,
    "sft.expand_channels": layouts.expand_channels,
    "sft.pixel_unshuffle": layouts.pixel_unshuffle,
    "sft.pixel_shuffle": layouts.pixel_shuffle,
    "sft.contract_pixels": statistics.contract_pixels,
    "sft.mix_channels": statistics.mix_channels,
    "sft.spatial_side_input": layouts.spatial_side_input,
    "sft.max_unpool1d": windows.max_unpool1d,
    "sft.border_rows": windows.border_rows,
    "sft.circular_pad": windows.circular_pad,
    "sft.kernel_rows": windows.kernel_rows,
    "sft.overlap_add": windows.overlap_add,
    "sft.im2col": windows.im2col,
    "sft.col2im": windows.col2im,
    "aten.bincount.default": losses.bincount,
    "sft.one_hot": losses.one_hot,
    "sft.constant_image": layouts.constant_image,
    "sft.assign_channels": layouts.assign_channels,
    "sft.pad_channels": layouts.pad_channels,
    "sft.assign_slice": layouts.assign_slice,
    "sft.cross_entropy": losses.cross_entropy,
    "sft.nll": losses.nll,
    "sft.label_weight": losses.label_weight,
    "aten._weight_norm.default": statistics.weight_norm,
    "aten.copy.default": layouts.copy_as,
    "aten.slice_scatter.default": layouts.slice_scatter,
    "aten.select_scatter.default": layouts.select_scatter,
}

#: Targets that make the same calls on every device: they are traced on meta tensors (:func:`sft.lower.op_recorder.record_ops`), which takes
#: less time. Attention and recurrent layers have kernels of each device, and statistics of layer norms have types of each device; rare
#: operators are not listed.
BY_SHAPE = frozenset(
    {
        *(f"sft.{name}" for name in ("affine", "align_dims", "argmax", "assign_channels", "axis_minmax", "axis_sum", "border_rows")),
        *(f"sft.{name}" for name in ("circular_pad", "constant_image", "contract_pixels", "cross_entropy", "expand_channels")),
        *(f"sft.{name}" for name in ("folded_bias", "folded_weight", "inverse_sqrt", "kernel_rows", "logsumexp", "minmax", "mix_channels")),
        *(f"sft.{name}" for name in ("moment_mean", "moments", "nth_root", "pad_channels", "pixel_shuffle", "pixel_unshuffle")),
        *(f"sft.{name}" for name in ("rearrange", "restore_dims", "running_mean", "running_var", "scale_shift", "spatial_side_input")),
        "sft.variance",
        *(f"aten.{name}.default" for name in ("adaptive_avg_pool2d", "amax", "cat", "einsum", "expand", "gelu", "linear", "matmul")),
        *(f"aten.{name}.default" for name in ("pad", "permute", "relu", "repeat", "sigmoid", "stack", "tanh", "unsqueeze", "view")),
        *(f"aten.{name}.Tensor" for name in ("add", "div", "mul", "slice", "sub")),
        *(f"aten.{name}.int" for name in ("log_softmax", "select", "softmax", "transpose")),
        *("aten.mean.dim", "aten.squeeze.dim", "aten.sum.dim_IntList", "aten.upsample_bilinear2d.vec", "aten.upsample_nearest2d.vec"),
    }
)
