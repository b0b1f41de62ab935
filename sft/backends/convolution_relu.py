"""Convolution with bias, optional addend and ReLU as one operator, ``sft::convolution_relu``: a single call of cuDNN on a GPU.

The addend is the shortcut of a residual block: ``relu(convolution(x, weight) + bias + addend)``.

ATen adds the bias of a convolution with a kernel of its own, which on an H100 reads and writes 1.35 TB/s, and the ReLU is a third pass.
``aten.cudnn_convolution_relu`` does both before it stores the result (bfloat16, 3 x 3, images of 134 MB):

===========  =======================  ==========================
channels     convolution, bias, ReLU  ``cudnn_convolution_relu``
===========  =======================  ==========================
64           482 us                   185 us
128          511 us                   222 us
256          684 us                   397 us
512          1066 us                  769 us
===========  =======================  ==========================

ATen's operator has no rule for fake tensors, no FLOP formula, and the following limits. The operator of this module runs a convolution and
an in-place ReLU in its place wherever one of them matters.

- It needs a CUDA build with cuDNN, which ``torch.backends.cudnn.enabled = False`` switches off.
- It always permits algorithms that sum in nondeterministic order. Convolutions exclude them under ``torch.backends.cudnn.deterministic``
  and ``torch.use_deterministic_algorithms``.
- It passes its uninitialised result as an addend with factor zero, and cuDNN has ReLUs that turn NaN into zero. A NaN must stay one: it
  tells of a training run that diverged. :func:`keeps_nan` tries both on the device.
- cuDNN has no fused algorithm for some shapes and types; it raises an error then.

It follows ``torch.backends.cudnn.allow_tf32`` and ``torch.backends.cudnn.benchmark`` as a convolution does, and its result has the same
memory format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

__all__ = ["FusionDevice", "convolution_add_relu", "convolution_relu", "keeps_nan"]

aten = torch.ops.aten

#: Element types of cuDNN's fused convolution.
_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Cases for which cuDNN had no fused algorithm in this process.
_WITHOUT_ALGORITHM: set[Hashable] = set()

_LIBRARY = torch.library.Library("sft", "FRAGMENT")
_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups"
_LIBRARY.define(f"convolution_relu(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}) -> Tensor")
_LIBRARY.define(f"convolution_add_relu(Tensor input, Tensor weight, Tensor? bias, Tensor addend, {_GEOMETRY}) -> Tensor")


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Geometry of a convolution."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


def _separate(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None, geometry: _Geometry) -> Tensor:
    """The convolution, and the sum and the ReLU in place."""
    zeros = [0] * len(geometry.stride)
    result: Tensor = aten.convolution.default(
        x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, False, zeros, geometry.groups
    )
    if addend is not None:
        result = aten.add_.Tensor(result, addend)
    result = aten.relu_.default(result)
    return result


def _fused(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None, geometry: _Geometry) -> Tensor:
    """One call of cuDNN."""
    arguments = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    if addend is None:
        result: Tensor = aten.cudnn_convolution_relu.default(x, weight, bias, *arguments)
    else:
        result = aten.cudnn_convolution_add_relu.default(x, weight, addend, 1.0, bias, *arguments)
    return result


def _by_cudnn(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None, geometry: _Geometry) -> Tensor:
    """One call of cuDNN where it computes the same as the operators, and these otherwise."""
    sizes = map(tuple, (x.shape, weight.shape, geometry.stride, geometry.padding, geometry.dilation))
    case = (x.device, x.dtype, *sizes, geometry.groups, addend is None)
    if not _permits_cudnn(x, weight, bias, addend) or case in _WITHOUT_ALGORITHM:
        return _separate(x, weight, bias, addend, geometry)
    try:
        return _fused(x, weight, bias, addend, geometry)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "unable to find an engine" not in str(error) and "CUDNN_STATUS_NOT_SUPPORTED" not in str(error):
            raise
        _WITHOUT_ALGORITHM.add(case)
        return _separate(x, weight, bias, addend, geometry)


def _permits_cudnn(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> bool:
    """True if operands and settings of torch permit cuDNN's fused convolution."""
    if not _has_cudnn() or torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        return False
    is_uniform = all(operand is None or operand.dtype == x.dtype for operand in (weight, bias, addend))
    return is_uniform and x.dtype in _FUSED_DTYPES and x.dim() in (4, 5) and x.numel() > 0


def _has_flash_attention(device: torch.device) -> bool:
    """True if torch has FlashAttention for this GPU, and its use is enabled."""
    has_kernels = torch.cuda.is_available() and torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return has_kernels and torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability(device) >= (8, 0)


def _has_cudnn() -> bool:
    """True if torch has cuDNN and a GPU, and the use is enabled; ROCm has another library under the same name."""
    return torch.version.hip is None and torch.backends.cudnn.enabled and torch.backends.cudnn.is_available() and torch.cuda.is_available()


_Implementation = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, _Geometry], Tensor]


def _without_addend(implementation: _Implementation) -> Callable[..., Tensor]:
    return lambda x, weight, bias, *geometry: implementation(x, weight, bias, None, _Geometry(*geometry))


def _with_addend(implementation: _Implementation) -> Callable[..., Tensor]:
    return lambda x, weight, bias, addend, *geometry: implementation(x, weight, bias, addend, _Geometry(*geometry))


for _name, _adapt in (("convolution_relu", _without_addend), ("convolution_add_relu", _with_addend)):
    for _key, _function in (("CPU", _separate), ("CUDA", _by_cudnn)):
        _LIBRARY.impl(_name, _adapt(_function), _key)
    torch.library.register_fake(f"sft::{_name}", _adapt(_separate), lib=_LIBRARY)
convolution_relu = torch.ops.sft.convolution_relu.default
convolution_add_relu = torch.ops.sft.convolution_add_relu.default


@register_flop_formula([torch.ops.sft.convolution_relu, torch.ops.sft.convolution_add_relu])
def _flops(x_shape: Any, weight_shape: Any, *arguments: Any, out_shape: Any = None, **keywords: Any) -> int:
    return int(conv_flop_count(x_shape, weight_shape, out_shape))


@functools.cache
def keeps_nan(device: torch.device, dtype: torch.dtype, num_axes: int) -> bool:
    """True if cuDNN's fused convolutions of a GPU keep NaN, and read nothing of the memory of their results."""
    with torch.no_grad(), torch.cuda.device(device):
        return _keeps_nan(_fused, device, dtype, num_axes)


def _keeps_nan(fused: _Implementation, device: torch.device, dtype: torch.dtype, num_axes: int) -> bool:
    """True if fused calls equal separate operators on an image with one NaN, in memory that held NaN before.

    NaN must be in the same places, and the numbers must be close. A call without an algorithm for the image is not equal.
    """
    layout = torch.channels_last if num_axes == 2 else torch.channels_last_3d
    random = torch.Generator(device).manual_seed(0)
    x, addend = (
        torch.randn((1, 64, *(8,) * (num_axes - 2), 32, 32), generator=random, device=device).to(dtype, memory_format=layout)
        for _ in range(2)
    )
    weight = (torch.randn((64, 64, *(3,) * num_axes), generator=random, device=device) / 24).to(dtype, memory_format=layout)
    bias = torch.randn(64, generator=random, device=device).to(dtype)
    x[..., 0, 0] = torch.nan
    addend[..., 9, 9] = torch.nan
    ones = [1] * num_axes
    for shortcut in (None, addend):
        operands = (x, weight, bias, shortcut, _Geometry(ones, ones, ones, 1))
        separate = _separate(*operands)
        torch.full_like(separate, torch.nan)  # freed at once: the next result of this size takes its memory
        try:
            result = fused(*operands)
        except RuntimeError:
            return False
        if not torch.allclose(result.float(), separate.float(), rtol=2e-2, atol=2e-2, equal_nan=True):
            return False
    return True


@dataclass(frozen=True, slots=True)
class FusionDevice:
    """Kind of CUDA device that programs are made for.

    Attributes:
        device: the GPU of this machine; None for a GPU of another machine, which is taken to fuse all types.
    """

    device: torch.device | None

    def fuses(self, dtype: torch.dtype, num_axes: int) -> bool:
        """True if convolutions of a type over so many axes are fused with a ReLU."""
        if dtype not in _FUSED_DTYPES or num_axes not in (2, 3):
            return False
        return self.device is None or (_has_cudnn() and keeps_nan(self.device, dtype, num_axes))

    def fuses_attention(self, dtype: torch.dtype) -> bool:
        """True if attention of a type is one operator: half precision, from Ampere on."""
        if dtype not in (torch.bfloat16, torch.float16):
            return False
        return self.device is None or _has_flash_attention(self.device)
