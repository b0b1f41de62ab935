"""Launches and dispatched operators of kernel calls: a few, for any number of splits, samples and channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.backends.conv_calls import ConvolutionCall, NormedConvolutionCall, WeightGradientCall
from sft.backends.norm_calls import AffineCall, FrozenNormCall, MomentsCall
from sft.kernels.geometry import Geometry, KernelWindow
from tests.helpers.triton_process import count_launches, needs_triton

pytestmark = needs_triton

_CHANNELS, _SAMPLES, _SIZE = 16, 2, (12, 10)
_MOST_OPERATORS = 4


def _image(num_channels: int = _CHANNELS) -> Tensor:
    return torch.zeros(_SAMPLES, *_SIZE, num_channels).permute(0, 3, 1, 2)


def _calls(num_splits: int) -> dict[str, tuple[Any, str, tuple[Any, ...], list[str]]]:
    """By name: the call, the method, its arguments, and the kernels that it launches."""
    x, vector = _image(), torch.ones(_CHANNELS)
    window = KernelWindow(kernel=3, padding=1)
    geometry = Geometry.whole(_SIZE, window, window)
    weight = torch.zeros(_CHANNELS, 3, 3, _CHANNELS).permute(0, 3, 1, 2)
    frozen, affine = FrozenNormCall(eps=1e-5, num_splits=num_splits), AffineCall(num_keys=_SAMPLES, num_splits=num_splits)
    both = torch.zeros(_SAMPLES, _CHANNELS, 1, 1, 2)
    scale, shift = both.unbind(-1)
    conv = WeightGradientCall(geometry=geometry, weight=tuple(weight.shape), has_bias=True, num_splits=num_splits)
    moments = MomentsCall(num_keys=_SAMPLES, num_groups=2, num_splits=num_splits)
    slots = torch.zeros(num_splits * _SAMPLES * _CHANNELS, dtype=torch.int64)
    sums, statistics = torch.zeros(2 * slots.numel(), dtype=torch.float64), torch.zeros(_SAMPLES, 2)
    frozen_sums, conv_sums = torch.zeros(2 * num_splits * _CHANNELS, dtype=torch.float64), torch.zeros(conv.num_elements)
    folded = NormedConvolutionCall(geometry=geometry, eps=1e-5)
    return {
        "frozen norm": (frozen, "run", (x, x, vector, vector, vector, vector, x), ["normalize_kernel"]),
        "frozen norm gradient": (frozen, "differentiate", (x, x, vector, vector, x), ["norm_gradient_kernel"]),
        "frozen norm sums": (frozen, "sum", (frozen_sums, x, x, vector, vector, x), ["norm_sums_kernel"]),
        "frozen norm parameters": (frozen, "add_gradients", (vector, vector, frozen_sums), ["reduce_kernel"]),
        "affine": (affine, "run", (x, x, scale, shift, x), ["normalize_kernel"]),
        "affine gradient": (affine, "differentiate", (x, x, scale, x), ["norm_gradient_kernel"]),
        "affine sums": (affine, "sum", (sums, x, x, x), ["norm_sums_kernel"]),
        "affine parameters": (affine, "write_gradients", (scale.clone(), shift.clone(), sums), ["reduce_kernel"]),
        "moments": (moments, "run", (statistics, statistics, slots, sums, x), ["moments_kernel", "merge_moments_kernel"]),
        "weight gradient": (conv, "run", (conv_sums, x, x, x, None), ["weight_gradient_kernel"]),
        "weight and bias": (conv, "add_gradients", (weight, vector, conv_sums), ["reduce_kernel"]),
        "convolution": (ConvolutionCall(geometry=geometry), "run", (x, x, weight, vector, x), ["conv2d_kernel"]),
        "convolution with a norm": (
            folded,
            "run",
            (x, torch.zeros(2 * _CHANNELS), x, weight, vector, x, vector, vector, vector, vector),
            ["fold_norm_kernel", "conv2d_kernel"],
        ),
    }


@pytest.mark.parametrize("num_splits", [1, 512])
def test_calls_launch_one_or_two_kernels_for_any_number_of_splits(num_splits: int, tmp_path: Path) -> None:
    calls = _calls(num_splits)
    jobs = [{"call": call, "method": method, "arguments": arguments} for call, method, arguments, _ in calls.values()]
    for (name, (*_, kernels)), counts in zip(calls.items(), count_launches(jobs, tmp_path), strict=True):
        assert counts["launches"] == kernels, name
        assert len(counts["operators"]) <= _MOST_OPERATORS, (name, counts["operators"])
        assert not any("copy" in operator or "add" in operator for operator in counts["operators"]), (name, counts["operators"])
