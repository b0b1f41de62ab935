"""Scale and shift of a convolution with a frozen norm after it, in Triton, for vectors of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sft.kernels.launching import launch
from sft.kernels.rng.mask_tile import ceil_div

__all__ = ["fold_norm_kernel", "launch_fold_norm"]

_BLOCK = 256


@triton.jit
def fold_norm_kernel(
    p_mean,  # [channels], like all others
    p_variance,
    p_conv_bias,
    p_weight,
    p_bias,
    p_scale,  # fp32
    p_shift,  # fp32
    num_channels,
    eps,
    HAS_CONV_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scale = weight / sqrt(variance + eps), shift = (conv_bias - mean) * scale + bias."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_channels
    variance = tl.load(p_variance + i, mask=mask, other=1.0).to(tl.float32)
    scale = tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    if HAS_WEIGHT:
        scale *= tl.load(p_weight + i, mask=mask, other=0.0).to(tl.float32)
    shift = -tl.load(p_mean + i, mask=mask, other=0.0).to(tl.float32)
    if HAS_CONV_BIAS:
        shift += tl.load(p_conv_bias + i, mask=mask, other=0.0).to(tl.float32)
    shift *= scale
    if HAS_BIAS:
        shift += tl.load(p_bias + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_scale + i, scale, mask=mask)
    tl.store(p_shift + i, shift, mask=mask)


def launch_fold_norm(
    mean: Tensor,
    variance: Tensor,
    conv_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    *,
    eps: float,
) -> None:
    """Write fp32 ``scale`` and ``shift`` of ``norm(conv(x) + conv_bias) = scale * conv(x) + shift``; all are contiguous ``[C]``."""
    num_channels = mean.shape[0]
    with torch.cuda.device_of(mean):
        launch(fold_norm_kernel, (ceil_div(num_channels, _BLOCK),))(
            mean,
            variance,
            mean if conv_bias is None else conv_bias,
            mean if weight is None else weight,
            mean if bias is None else bias,
            scale,
            shift,
            num_channels,
            eps,
            HAS_CONV_BIAS=conv_bias is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            BLOCK=_BLOCK,
            num_warps=1,
            enable_fp_fusion=False,
        )
