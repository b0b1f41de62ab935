"""Launches on images, compiled ahead of time for sm_80 and sm_90 with the arguments of a large tile: no spills, shared memory within
the limits of both, matrix instructions and wide copies where expected. ``SFT_KERNEL_SWEEP=1`` compiles all dtypes for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sft.backends.selector import NumberFormat, ShapeClass, launch_variants
from sft.kernels.geometry import Geometry, KernelWindow
from tests.helpers.triton_gates import Gate, check_gates, is_swept, meta_image
from tests.helpers.triton_process import needs_triton

_ROWS, _COLUMNS = 256, 4096
_HALF, _SINGLE = torch.bfloat16, torch.float32


def _conv(num_in: int, num_out: int, dtype: torch.dtype, *, groups: int = 1, stride: int = 1) -> dict[str, Any]:
    window = KernelWindow(kernel=3, stride=stride, padding=1)
    geometry = Geometry.whole((_ROWS, _COLUMNS), window, window)
    weight = torch.empty(num_out, 3, 3, num_in // groups, dtype=dtype, device="meta").permute(0, 3, 1, 2)
    return {"geometry": geometry, "weight": weight, "x": meta_image(num_in, dtype), "y": meta_image(num_out, dtype, geometry.output_size)}


def _forward(precision: str, operands: dict[str, Any], **more: Any) -> dict[str, Any]:
    bias = operands["weight"].new_empty(operands["weight"].shape[0])
    arguments = {
        "x": operands["x"],
        "weight": operands["weight"],
        "bias": bias,
        "residual": operands["y"],
        "out": operands["y"],
        "relu": True,
    }
    return arguments | {"geometry": operands["geometry"]} | ({"precision": precision, "groups": 1} if precision else {}) | more


def _adjoint(precision: str, operands: dict[str, Any], **more: Any) -> dict[str, Any]:
    arguments = {"gradient": operands["y"], "output": operands["y"], "weight": operands["weight"], "out": operands["x"]}
    return arguments | {"geometry": operands["geometry"]} | ({"precision": precision, "groups": 1} if precision else {}) | more


def _weight(precision: str, operands: dict[str, Any], **more: Any) -> dict[str, Any]:
    slots = torch.empty(32, *operands["weight"].permute(0, 2, 3, 1).shape, device="meta")
    arguments = {"gradient": operands["y"], "output": operands["y"], "x": operands["x"], "weights": slots, "biases": slots[..., 0, 0, 0]}
    return arguments | {"geometry": operands["geometry"]} | ({"precision": precision, "groups": 1} if precision else {}) | more


def _gates() -> dict[str, list[Gate]]:
    """The launches of each family."""
    forward, adjoint = ("conv.forward2d_triton", "launch_conv2d"), ("conv.data_grad2d_triton", "launch_data_gradient")
    weight = ("conv.weight_grad2d_triton", "launch_weight_gradient")

    def gate(launch: tuple[str, str], when: tuple[int, ...], arguments: dict[str, Any], **facts: Any) -> Gate:
        return Gate(module=launch[0], launch=launch[1], when=when, arguments=arguments, **facts)

    copied = {"matrix": True, "wide": True, "copied_operands": True}
    slots, total = torch.empty(32, 64, 3, 3, 64, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    reduced = {"slots": slots, "out": total, "vector_slots": slots[..., 0, 0, 0], "vector_out": total[:, 0, 0, 0], "add": True}
    gates = {
        "conv2d": [
            gate(forward, (80, 90, 942), _forward("bf16", _conv(64, 64, _HALF)), **copied),
            gate(forward, (), _forward("fp16", _conv(256, 256, torch.float16)), **copied),
            gate(forward, (90,), _forward("tf32", _conv(64, 128, _SINGLE)), **copied),
            gate(forward, (80,), _forward("ieee", _conv(64, 128, _SINGLE)), wide=True),
            gate(forward, (), _forward("tf32x3", _conv(64, 128, _SINGLE)), matrix=True, wide=True),
            gate(forward, (90,), _forward("bf16x3", _conv(64, 128, _SINGLE)), matrix=True, wide=True),
            gate(forward, (90,), _forward("bf16", _conv(3, 64, _HALF, stride=2)), matrix=True, copied_operands=True),
        ],
        "data gradient": [
            gate(adjoint, (80, 90), _adjoint("bf16", _conv(64, 128, _HALF)), matrix=True),
            gate(adjoint, (90,), _adjoint("bf16", _conv(64, 128, _HALF, stride=2), output=None), matrix=True),
            gate(adjoint, (80,), _adjoint("ieee", _conv(128, 64, _SINGLE))),
            gate(adjoint, (), _adjoint("tf32", _conv(128, 64, _SINGLE)), matrix=True),
            gate(adjoint, (), _adjoint("bf16x3", _conv(128, 64, _SINGLE)), matrix=True),
        ],
        "weight gradient": [
            gate(weight, (80, 90), _weight("bf16", _conv(64, 128, _HALF)), matrix=True),
            gate(weight, (90,), _weight("tf32", _conv(64, 64, _SINGLE), output=None), matrix=True),
            gate(weight, (80,), _weight("ieee", _conv(64, 64, _SINGLE))),
            gate(weight, (), _weight("bf16x3", _conv(64, 64, _SINGLE)), matrix=True),
            gate(weight, (), _weight("bf16", _conv(3, 64, _HALF, stride=2)), matrix=True),
            gate(weight, (90,), _weight("bf16", _conv(3, 64, _HALF), output=None), matrix=True, copied_operands=True),
            gate(("reduce.reduce_triton", "launch_reduce"), (90,), reduced),
        ],
    }
    depthwise = _conv(96, 96, _HALF, groups=96)
    gates["depthwise"] = [
        gate(("conv.depthwise_triton", "launch_depthwise"), (90,), _forward("", depthwise)),
        gate(("conv.depthwise_triton", "launch_depthwise_gradient"), (80,), _adjoint("", depthwise)),
        gate(("conv.depthwise_triton", "launch_depthwise_weight"), (90,), _weight("", depthwise)),
    ]
    gates["old assembler"] = [
        gate(forward, (90,), _forward("bf16x3", _conv(64, 128, _SINGLE)), affected=True),
        gate(adjoint, (90,), _adjoint("bf16", _conv(64, 128, _HALF)), matrix=True, affected=True),
        gate(weight, (90,), _weight("bf16", _conv(64, 128, _HALF)), matrix=True, affected=True),
    ]
    gates["variants"] = [*_variants("bf16", _HALF), *_variants("tf32", _SINGLE), *_variants("ieee", _SINGLE)]
    gates["pool"] = [gate for kernel in (2, 3) for gate in _pools(kernel)]
    return gates


def _variants(numbers: str, dtype: torch.dtype) -> list[Gate]:
    """All splits of the convolutions of a class that a measured table may choose, without row-streaming ones, which have their own
    test."""
    operands, matrix, gates = _conv(128, 128, dtype), numbers != "ieee", []
    pooled, taps = meta_image(128, dtype, (_ROWS // 2, _COLUMNS // 2)), meta_image(32, torch.uint8, (_ROWS // 2, _COLUMNS // 2))
    name: NumberFormat = "bfloat16" if numbers == "bf16" else "tf32" if numbers == "tf32" else "float32"
    forward, adjoint, weight = _forward(numbers, operands), _adjoint(numbers, operands), _weight(numbers, operands)
    launches: list[tuple[str, str, str, dict[str, Any]]] = [
        ("conv2d", "conv.forward2d_triton", "launch_conv2d", forward),
        ("conv2d", "conv.forward2d_triton", "launch_conv2d", forward | {"residual": None, "out": pooled, "taps": taps}),
        ("conv2d data gradient", "conv.data_grad2d_triton", "launch_data_gradient", adjoint),
        ("conv2d data gradient", "conv.data_grad2d_triton", "launch_data_gradient", adjoint | {"output": None}),
        (
            "conv2d data gradient",
            "conv.data_grad2d_triton",
            "launch_data_gradient",
            adjoint | {"gradient": pooled, "output": pooled, "taps": taps},
        ),
        ("conv2d weight gradient", "conv.weight_grad2d_triton", "launch_weight_gradient", weight),
    ]
    for operator, module, launch, arguments in launches:
        wanted = ShapeClass(
            operator=operator, numbers=name, channels=(128, 128), kernel=(3, 3), stride=(1, 1), dilation=(1, 1), pixels=_ROWS * _COLUMNS
        )
        for variant in launch_variants(wanted):
            gates.append(Gate(module=module, launch=launch, arguments=arguments | {"variant": variant}, only=(80, 90), matrix=matrix))
    return gates


def _pools(kernel: int) -> list[Gate]:
    window = KernelWindow(kernel=kernel, stride=2, padding=kernel // 3)
    geometry = Geometry.whole((_ROWS, _COLUMNS), window, window)
    x, y = meta_image(64, _HALF), meta_image(64, _HALF, geometry.output_size)
    taps = meta_image(16 if kernel == 2 else 64, torch.uint8, geometry.output_size)
    options = {"count_padding": True, "divisor": None}
    launches: list[tuple[str, dict[str, Any]]] = [
        ("launch_max_pool", {"x": x, "out": y, "taps": taps}),
        ("launch_max_pool_gradient", {"gradient": y, "taps": taps, "out": x}),
        ("launch_average_pool", {"x": x, "out": y} | options),
        ("launch_average_pool_gradient", {"gradient": y, "out": x} | options),
    ]
    when = (80,) if kernel == 2 else (90,)
    return [
        Gate(module="pool.pool_triton", launch=name, when=when, arguments=arguments | {"geometry": geometry})
        for name, arguments in launches
    ]


def _names() -> list[str]:
    """Gates by family and number, if they have a target."""
    return [f"{family} {number}" for family, gates in _gates().items() for number, gate in enumerate(gates) if is_swept() or gate.when]


@needs_triton
@pytest.mark.parametrize("name", _names())
def test_compiles_ahead_of_time(name: str, tmp_path: Path) -> None:
    family, _, number = name.rpartition(" ")
    check_gates([_gates()[family][int(number)]], tmp_path)
