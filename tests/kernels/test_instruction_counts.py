"""Instructions of the inner loops of convolution kernels, compiled ahead of time for sm_90: a gate on work besides the matrix products.

A multiprocessor issues four instructions in a clock. At 1.7 GHz on 132 multiprocessors ``n`` instructions for each product of 64 x 64 x 16
elements allow at most 29,400 / n TFLOP/s. The counts are of the whole loop, with loads, masks and addresses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sft.kernels.geometry import Geometry, KernelWindow, VolumeGeometry
from tests.helpers.triton_gates import meta_image
from tests.helpers.triton_process import compile_kernels, needs_triton

pytestmark = needs_triton

_HALF = torch.bfloat16
_SIZE, _VOLUME = (256, 4096), (16, 64, 512)
_WINDOW = KernelWindow(kernel=3, padding=1)


def _operands(num_in: int, num_out: int, size: tuple[int, ...], window: KernelWindow = _WINDOW) -> dict[str, Any]:
    axes = (window,) * len(size)
    geometry = Geometry.whole(size, *axes) if len(size) == 2 else VolumeGeometry.whole(size, *axes)  # type: ignore[arg-type]
    kernel = (window.kernel,) * len(size)
    weight = torch.empty(num_out, *kernel, num_in, dtype=_HALF, device="meta").movedim(-1, 1)
    slots = torch.empty(32, num_out, *kernel, num_in, device="meta")
    outputs = geometry.output_size if isinstance(geometry, Geometry) else size
    x, y = meta_image(num_in, _HALF, size), meta_image(num_out, _HALF, outputs)
    return {"x": x, "y": y, "weight": weight, "slots": slots, "biases": torch.empty(32, num_out, device="meta"), "geometry": geometry}


def _launch(kind: str, num_channels: int, *, masked: bool, size: tuple[int, ...] = _SIZE) -> dict[str, Any]:
    return _launch_of(kind, _operands(num_channels, num_channels, size), num_channels, masked=masked, size=size)


def _launch_of(kind: str, operands: dict[str, Any], num_channels: int, *, masked: bool, size: tuple[int, ...]) -> dict[str, Any]:
    x, y, output = operands["x"], operands["y"], operands["y"] if masked else None
    is_image = len(size) == 2
    common = {"geometry": operands["geometry"], "precision": "bf16"} | ({"groups": 1} if is_image else {})
    dimensions = "2d" if is_image else "3d"
    if kind == "forward":
        bias = torch.empty(num_channels, dtype=_HALF, device="meta")
        arguments = common | {"x": x, "weight": operands["weight"], "bias": bias, "residual": None, "out": y, "relu": True}
        name = "launch_conv" + dimensions
    elif kind == "data_grad":
        arguments = common | {"gradient": y, "output": output, "weight": operands["weight"], "out": x}
        name = "launch_data_gradient" if is_image else "launch_volume_data_gradient"
    else:
        sums = {"weights": operands["slots"], "biases": operands["biases"], "accumulate": False}
        arguments = common | {"gradient": y, "output": output, "x": x} | sums
        name = "launch_weight_gradient" if is_image else "launch_volume_weight_gradient"
    module = f"sft.kernels.conv.{kind}{dimensions}_triton"
    return {"module": module, "launch": name, "arguments": arguments, "target": "sm_90", "counts_instructions": True}


#: kind, channels, masked by a ReLU, extents, and the most instructions for a product
_LIMITS: list[tuple[str, int, bool, tuple[int, ...], int]] = [
    ("forward", 64, False, _SIZE, 36),
    ("data_grad", 64, False, _SIZE, 42),
    ("data_grad", 128, True, _SIZE, 50),
    ("data_grad", 64, True, _SIZE, 90),
    ("weight_grad", 64, False, _SIZE, 30),
    ("weight_grad", 64, True, _SIZE, 60),
    ("weight_grad", 256, True, _SIZE, 60),
    ("data_grad", 64, False, _VOLUME, 50),
    ("weight_grad", 64, False, _VOLUME, 60),
]


@pytest.mark.parametrize(("kind", "num_channels", "masked", "size", "limit"), _LIMITS)
def test_instructions_of_a_product(kind: str, num_channels: int, masked: bool, size: tuple[int, ...], limit: int, tmp_path: Path) -> None:
    (cost,) = compile_kernels([_launch(kind, num_channels, masked=masked, size=size)], tmp_path)
    assert cost["loop_products"] > 0
    assert cost["spilled_bytes"] == 0
    assert cost["loop_instructions"] <= limit * cost["loop_products"], cost


#: kind, window, and the most instructions for 128 pixels and 64 output channels: of the whole kernel, or of all loops of its blocks
_FEW_CHANNELS: list[tuple[str, KernelWindow, int]] = [
    ("forward", KernelWindow(kernel=7, stride=2, padding=3), 2300),
    ("forward", _WINDOW, 1200),
    ("weight_grad", _WINDOW, 420),
]


@pytest.mark.parametrize(("kind", "window", "limit"), _FEW_CHANNELS)
def test_instructions_of_three_channels(kind: str, window: KernelWindow, limit: int, tmp_path: Path) -> None:
    """Each element of a window once, at an address that is a constant next to that of its pixel."""
    launch = _launch_of(kind, _operands(3, 64, _SIZE, window), 64, masked=False, size=_SIZE)
    (cost,) = compile_kernels([launch], tmp_path)
    assert cost["spilled_bytes"] == 0
    assert cost["loop_instructions" if kind == "weight_grad" else "instructions"] <= limit, cost
