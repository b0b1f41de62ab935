"""Rates of a GPU and of its host, of which the time model of the planner consists (``sft.planner.cost.gpu_time``).

It measures more than a calibration (``sft.planner.measured.gpu_calibration``), with the same calls.

    python benchmarks/gpu_rates.py --out results            # 40 seconds
    python benchmarks/gpu_rates.py --device cpu --minutes 0.2
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.gpu import Deadline, convolution_settings, device_environment
from torch import Tensor

from sft.backends.convolution_relu import convolution_relu
from sft.lower.custom_ops.statistics import channel_sums
from sft.planner.measured.operator_calls import (
    convolution_calls,
    convolution_operands,
    device_seconds,
    element_calls,
    host_calls,
    host_seconds,
)

__all__ = ["main", "measure_rates"]

#: Pairs of channels of 3 x 3 convolutions, and the columns of their images in networks for 2048 columns.
_CONVOLUTIONS = (
    *((3, 64, 2048), (8, 64, 2048), (64, 64, 2048), (64, 128, 1024), (128, 128, 1024), (256, 256, 512), (512, 512, 256), (64, 64, 512)),
    *((32, 32, 2048), (96, 32, 2048), (32, 64, 1024)),
)
_ROWS = (32, 128, 512)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _kernel_calls(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Launches of our kernels, on the same tensors."""
    from sft.backends.conv_calls import ConvolutionCall
    from sft.backends.norm_calls import FrozenNormCall
    from sft.kernels.geometry import Geometry, KernelWindow

    def image() -> Tensor:
        return torch.zeros(1, 4, 64, 64, device=device, dtype=torch.bfloat16).permute(0, 3, 1, 2)

    x, out, vector = image(), image(), torch.ones(64, device=device)
    weight = torch.zeros(64, 3, 3, 64, device=device, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    bias, window = torch.zeros(64, device=device, dtype=torch.bfloat16), KernelWindow(kernel=3, padding=1)
    conv = ConvolutionCall(geometry=Geometry.whole((4, 64), window, window), numbers="bfloat16", relu=True)
    norm = FrozenNormCall(eps=1e-5, relu=True)
    yield "triton convolution", lambda: conv.run(out, x, weight, bias, None)
    yield "triton frozen norm", lambda: norm.run(out, x, vector, vector, vector, vector, None)


def measure_rates(device: torch.device, deadline: Deadline, report: Callable[[str, dict[str, Any]], None]) -> None:
    """Measure all rates; each is reported at once, as a name with its numbers."""
    for name, call in host_calls(device):
        report(f"host: {name}", {"microseconds": 1e6 * host_seconds(call, device)})
    if device.type == "cuda":
        for name, call in _kernel_calls(device):
            report(f"host: {name}", {"microseconds": 1e6 * host_seconds(call, device)})
        _report_floor(device, report)
    _report_bandwidths(device, report)
    for name, count, call in element_calls(device, 512 if device.type == "cuda" else 32):
        report(f"elements: {name}", {"G/s": count / device_seconds(call, device) / 1e9})
    for dtype_name, dtype in _DTYPES.items():
        for tf32 in (False, True) if dtype == torch.float32 else (False,):
            for num_in, num_out, columns in _CONVOLUTIONS:
                for rows in _ROWS if dtype == torch.bfloat16 else (512,):
                    if deadline.is_over:
                        return
                    with convolution_settings(tf32=tf32):
                        name = f"{dtype_name}{' TF32' if tf32 else ''} {num_in} -> {num_out}, {rows} x {columns}"
                        report(name, _convolution_rates(device, dtype, num_in, num_out, rows, columns))


def _report_floor(device: torch.device, report: Callable[[str, dict[str, Any]], None]) -> None:
    """Device seconds of a kernel on few numbers: in a stream, and in a CUDA graph."""
    x = torch.zeros(64, device=device)
    graph = torch.cuda.CUDAGraph()
    x.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(200):
            x.add_(1)
    report("device: kernel in a graph", {"microseconds": 1e6 * device_seconds(graph.replay, device) / 200})
    report("device: kernel in a stream", {"microseconds": 1e6 * device_seconds(lambda: x.add_(1), device)})


def _report_bandwidths(device: torch.device, report: Callable[[str, dict[str, Any]], None]) -> None:
    """Bytes read and written per second: on the device, and between it and the host."""
    num_bytes = 2**30 if device.type == "cuda" else 2**26
    for size in (num_bytes, num_bytes // 16, num_bytes // 64):
        x = torch.zeros(size // 2, device=device, dtype=torch.bfloat16)
        y = torch.zeros_like(x)
        report(f"device: copy of {size >> 20} MiB", {"GB/s": 2 * size / device_seconds(lambda x=x, y=y: y.copy_(x), device) / 1e9})  # type: ignore[misc]
        report(f"device: add_ of {size >> 20} MiB", {"GB/s": 3 * size / device_seconds(lambda x=x, y=y: y.add_(x), device) / 1e9})  # type: ignore[misc]
    if device.type != "cuda":
        return
    size = num_bytes // 4
    x, pinned = torch.zeros(size, device=device, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8).pin_memory()
    report("link: to the device", {"GB/s": size / device_seconds(lambda: x.copy_(pinned, non_blocking=True), device) / 1e9})
    report("link: to the host", {"GB/s": size / device_seconds(lambda: pinned.copy_(x, non_blocking=True), device) / 1e9})
    pageable = torch.zeros(size, dtype=torch.uint8)
    report("link: to the device, pageable", {"GB/s": size / device_seconds(lambda: x.copy_(pageable), device) / 1e9})
    start = time.perf_counter()
    torch.empty(size, dtype=torch.uint8).pin_memory()
    report("host: page-locking", {"GB/s": size / (time.perf_counter() - start) / 1e9})


def _convolution_rates(device: torch.device, dtype: torch.dtype, num_in: int, num_out: int, rows: int, columns: int) -> dict[str, Any]:
    """Seconds and FLOPs per second of a convolution, of its data gradient and its weight gradient, channels last."""
    aten = torch.ops.aten
    x, weight, bias, y = convolution_operands(device, num_in, num_out, rows, columns, dtype)
    calls = {
        **convolution_calls(device, num_in, num_out, rows, columns, dtype),
        "all": lambda: aten.convolution_backward(y, x, weight, [num_out], (1, 1), (1, 1), (1, 1), False, (0, 0), 1, [True, True, True]),
        "bias, wide rows": lambda: channel_sums(y, torch.promote_types(dtype, torch.float32)),
        "fused": lambda: convolution_relu(x, weight, bias, [1, 1], [1, 1], [1, 1], 1),
        "relu_": lambda: aten.relu_(y),
        "threshold_backward": lambda: aten.threshold_backward(y, y, 0),
    }
    flops = 2 * 9 * num_in * num_out * rows * columns
    result: dict[str, Any] = {}
    for name, call in calls.items():
        seconds = device_seconds(call, device, least_seconds=2e-3)
        result[name] = {"microseconds": 1e6 * seconds}
        if name in ("forward", "forward, no bias", "data", "weight"):
            result[name]["TFLOP/s"] = flops / seconds / 1e12
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0, or 2 without the device."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_rates.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="device, or cpu to try the script without a GPU (default: cuda)")
    parser.add_argument("--minutes", type=float, help="begin no further measurement after so many minutes")
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    options = parser.parse_args(arguments)
    device, deadline = torch.device(options.device), Deadline.after(options.minutes)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_rates.py: no CUDA device on this machine; --device cpu tries the script without a GPU", file=sys.stderr)
        return 2
    rates: dict[str, dict[str, Any]] = {}

    def report(name: str, numbers: dict[str, Any]) -> None:
        rates[name] = numbers
        cells = {key: value if isinstance(value, dict) else {"": value} for key, value in numbers.items()}
        values = [f"{key} {item:.4g} {unit}".replace("  ", " ") for key, units in cells.items() for unit, item in units.items()]
        print(f"{name:44} {'  '.join(values)}", flush=True)

    with torch.no_grad():
        measure_rates(device, deadline, report)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{datetime.date.today().isoformat()}-gpu-rates.json"
        path.write_text(json.dumps({"environment": device_environment(device), "rates": rates}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
