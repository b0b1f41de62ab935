"""Every launch on images, compiled ahead of time for sm_80 and sm_90 as it would be for a large tile: no spills, shared memory that
both have, matrix instructions and wide copies where there should be some. ``SFT_KERNEL_SWEEP=1`` compiles all dtypes for both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sft.kernels.geometry import Geometry, Window

from .helpers.triton_process import compile_kernels, needs_triton

#: dynamic shared memory of one block
_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
_ROWS, _COLUMNS = 256, 4096
_HALF, _SINGLE = torch.bfloat16, torch.float32


def _image(num_channels: int, dtype: torch.dtype, size: tuple[int, int] = (_ROWS, _COLUMNS)) -> Tensor:
    return torch.empty(1, *size, num_channels, dtype=dtype, device="meta").permute(0, 3, 1, 2)


def _conv(num_in: int, num_out: int, dtype: torch.dtype, *, groups: int = 1, stride: int = 1) -> dict[str, Any]:
    window = Window(kernel=3, stride=stride, padding=1)
    geometry = Geometry.whole((_ROWS, _COLUMNS), window, window)
    weight = torch.empty(num_out, 3, 3, num_in // groups, dtype=dtype, device="meta").permute(0, 3, 1, 2)
    return {"geometry": geometry, "weight": weight, "x": _image(num_in, dtype), "y": _image(num_out, dtype, geometry.output_size)}


def _forward(precision: str, parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    bias = parts["weight"].new_empty(parts["weight"].shape[0])
    arguments = {"x": parts["x"], "weight": parts["weight"], "bias": bias, "residual": parts["y"], "out": parts["y"], "relu": True}
    return arguments | {"geometry": parts["geometry"]} | ({"precision": precision, "groups": 1} if precision else {}) | more


def _adjoint(precision: str, parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    arguments = {"gradient": parts["y"], "output": parts["y"], "weight": parts["weight"], "out": parts["x"]}
    return arguments | {"geometry": parts["geometry"]} | ({"precision": precision, "groups": 1} if precision else {}) | more


def _weight(precision: str, parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    slots = torch.empty(32, *parts["weight"].permute(0, 2, 3, 1).shape, device="meta")
    arguments = {"gradient": parts["y"], "output": parts["y"], "x": parts["x"], "weights": slots, "biases": slots[..., 0, 0, 0]}
    return arguments | {"geometry": parts["geometry"]} | ({"precision": precision, "groups": 1} if precision else {}) | more


def _jobs() -> list[tuple[int, bool, bool, dict[str, Any]]]:
    """(capability, products of matrices, wide copies, job): a few, or all."""
    table: list[tuple[tuple[int, ...], bool, bool, str, str, dict[str, Any]]] = []

    def add(when: tuple[int, ...], matrix: bool, wide: bool, module: str, launch: str, arguments: dict[str, Any]) -> None:
        table.append((when, matrix, wide, f"sft.kernels.{module}", launch, arguments))

    forward, adjoint, weight = ("conv2d_triton", "launch_conv2d"), ("conv2d_triton", "launch_data_gradient"), "conv2d_gradient_triton"
    add((80, 90), True, True, *forward, _forward("bf16", _conv(64, 64, _HALF)))
    add((), True, True, *forward, _forward("fp16", _conv(256, 256, torch.float16)))
    add((90,), True, True, *forward, _forward("tf32", _conv(64, 128, _SINGLE)))
    add((80,), False, True, *forward, _forward("ieee", _conv(64, 128, _SINGLE)))
    add((), True, True, *forward, _forward("tf32x3", _conv(64, 128, _SINGLE)))
    add((90,), True, False, *forward, _forward("bf16", _conv(3, 64, _HALF, stride=2)))
    add((80, 90), True, False, *adjoint, _adjoint("bf16", _conv(64, 128, _HALF)))
    add((90,), True, False, *adjoint, _adjoint("bf16", _conv(64, 128, _HALF, stride=2), output=None))
    add((80,), False, False, *adjoint, _adjoint("ieee", _conv(128, 64, _SINGLE)))
    add((), True, False, *adjoint, _adjoint("tf32", _conv(128, 64, _SINGLE)))
    add((80, 90), True, False, weight, "launch_weight_gradient", _weight("bf16", _conv(64, 128, _HALF)))
    add((90,), True, False, weight, "launch_weight_gradient", _weight("tf32", _conv(64, 64, _SINGLE), output=None))
    add((80,), False, False, weight, "launch_weight_gradient", _weight("ieee", _conv(64, 64, _SINGLE)))
    add((), True, False, weight, "launch_weight_gradient", _weight("bf16", _conv(3, 64, _HALF, stride=2)))
    slots = torch.empty(32, 3, 3, 64, 64, device="meta")
    add((90,), False, False, weight, "launch_reduce", {"slots": slots, "out": slots[0]})
    depthwise = _conv(96, 96, _HALF, groups=96)
    add((90,), False, False, "depthwise_triton", "launch_depthwise", _forward("", depthwise))
    add((80,), False, False, "depthwise_triton", "launch_depthwise_gradient", _adjoint("", depthwise))
    add((90,), False, False, "depthwise_triton", "launch_depthwise_weight", _weight("", depthwise))
    for kernel in (2, 3):
        window = Window(kernel=kernel, stride=2, padding=kernel // 3)
        geometry = Geometry.whole((_ROWS, _COLUMNS), window, window)
        x, y = _image(64, _HALF), _image(64, _HALF, geometry.output_size)
        taps = _image(16 if kernel == 2 else 64, torch.uint8, geometry.output_size)
        when = (80,) if kernel == 2 else (90,)
        add(when, False, False, "pool_triton", "launch_max_pool", {"x": x, "out": y, "taps": taps, "geometry": geometry})
        add(when, False, False, "pool_triton", "launch_max_pool_gradient", {"gradient": y, "taps": taps, "out": x, "geometry": geometry})
        options = {"count_padding": True, "divisor": None, "geometry": geometry}
        add(when, False, False, "pool_triton", "launch_average_pool", {"x": x, "out": y} | options)
        add(when, False, False, "pool_triton", "launch_average_pool_gradient", {"gradient": y, "out": x} | options)

    sweep = os.environ.get("SFT_KERNEL_SWEEP") == "1"
    return [
        (capability, matrix, wide, {"module": module, "launch": launch, "arguments": arguments, "capability": capability})
        for when, matrix, wide, module, launch, arguments in table
        for capability in ((80, 90) if sweep else when)
    ]


@needs_triton
def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    cases = _jobs()
    for (capability, matrix, wide, job), cost in zip(cases, compile_kernels([job for *_, job in cases], tmp_path), strict=True):
        context = (capability, job["launch"], cost)
        assert cost["cubin_bytes"] > 0 and cost["spilled_bytes"] == 0, context
        assert cost["shared_bytes"] <= _SHARED_BYTES[capability], context
        assert (cost["matrix_instructions"] > 0) == matrix, context
        assert cost["wide_copies"] > 0 or not wide, context
        if capability == 90 and job["launch"] == "launch_conv2d" and job["arguments"]["precision"] != "tf32x3":
            assert cost["computed_operands"] == 0, ("operands that old assemblers for Hopper overwrite", context)
