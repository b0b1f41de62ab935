"""Time model of a GPU: host or device, whichever takes longer; bandwidth, rates of types and widths, waves of tiles."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sft.planner.cost.gpu_time import H100, GpuModel
from sft.planner.cost.roofline import DeviceRates
from sft.planner.projection import plain_programs
from tests.helpers.problems import problem_of

#: A GPU without floors and host.
_IDEAL = replace(
    H100,
    min_kernel_seconds=0.0,
    min_product_seconds=0.0,
    call_seconds=0.0,
    product_seconds=0.0,
    view_seconds=0.0,
    instruction_seconds=0.0,
    program_seconds=0.0,
)
_RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def _seconds(gpu: GpuModel, layers: list[nn.Module], size: int, channels: int = 64) -> float:
    """Modelled seconds of the untiled forward pass in single precision."""
    model = nn.Sequential(*layers).requires_grad_(False)
    problem = problem_of(model, (1, channels, size, size), training=False)
    return sum(map(gpu.seconds, plain_programs(problem)))


def test_bytes_over_bandwidth() -> None:
    """A ReLU of 64 channels reads an image and writes one, at least."""
    seconds, num_bytes = _seconds(_IDEAL, [nn.ReLU()], 1024), 64 * 1024 * 1024 * 4
    assert seconds >= 2 * num_bytes / H100.bytes_per_second
    assert _seconds(replace(_IDEAL, bytes_per_second=2 * H100.bytes_per_second), [nn.ReLU()], 1024) == pytest.approx(seconds / 2)
    assert _seconds(_IDEAL, [nn.ReLU()], 2048) == pytest.approx(4 * seconds)


def test_flops_over_the_rate_of_type_and_width() -> None:
    for channels, rate in ((64, 423e12), (128, 694e12), (512, 803e12)):
        layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        flops = 2 * 9 * channels**2 * 1024**2
        computing = _seconds(replace(_IDEAL, bytes_per_second=math.inf), [layer], 1024, channels)
        assert computing == pytest.approx(flops / (H100.single_share * rate), rel=0.05)
        assert H100.flops_per_second(torch.bfloat16, channels) == pytest.approx(rate)
    assert H100.flops_per_second(torch.float64) < H100.flops_per_second(torch.float32) < H100.flops_per_second(torch.float16)


def test_rates_between_measured_widths() -> None:
    """A power of the channels, so that narrow convolutions are in proportion; those of unmeasured width are between their neighbours."""
    rates = [H100.flops_per_second(torch.bfloat16, channels) for channels in (1, 3, 16, 64, 96, 128, 512, 4096)]
    assert rates == sorted(rates) and rates[-1] == rates[-2]
    assert rates[0] == pytest.approx(rates[1] / 3, rel=0.05) and 4 < rates[2] / rates[1] < 6
    assert H100.flops_per_second(torch.bfloat16, 512, "weight") < H100.flops_per_second(torch.bfloat16, 512, "data")


def test_biases_and_reductions_are_kernels_of_their_own() -> None:
    """The bias of a convolution takes a pass element by element; its gradient a slow read."""
    layer, elements = nn.Conv2d(64, 64, 3, padding=1), 64 * 1024 * 1024
    without = _seconds(_IDEAL, [nn.Conv2d(64, 64, 3, padding=1, bias=False)], 1024)
    assert _seconds(_IDEAL, [layer], 1024) - without == pytest.approx(elements / H100.biases_per_second, rel=0.01)

    def step(gpu: GpuModel) -> float:
        problem = problem_of(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1)), (1, 64, 256, 256), training=True)
        return float(sum(map(gpu.seconds, plain_programs(problem))))

    slower = step(replace(_IDEAL, reduced_elements_per_second=H100.reduced_elements_per_second / 10)) - step(_IDEAL)
    assert slower == pytest.approx(9 * 64 * 256**2 / H100.reduced_elements_per_second, rel=0.05)


def test_kernels_in_graphs_have_a_lower_floor() -> None:
    problem = problem_of(nn.Sequential(*(nn.ReLU() for _ in range(50))), (1, 3, 8, 8), training=False)
    (program,) = (program for program in plain_programs(problem))
    assert H100.seconds(program, replays=True) == pytest.approx(50 * H100.min_replayed_seconds, rel=0.2)
    assert H100.seconds(program) > 10 * H100.seconds(program, replays=True)


def _measured_rates() -> dict[str, dict[str, Any]]:
    """The newest committed rates of an H100."""
    rates: dict[str, dict[str, Any]] = json.loads(max(_RESULTS.glob("*-h100-gpu-rates.json")).read_text())["rates"]
    return rates


def test_rates_are_the_measured_ones() -> None:
    """Constants of the model within 15 % of the newest result for rates of large tensors, and within 40 % for times of the host."""
    measured, near, about = _measured_rates(), 1.15, 1.4

    def microseconds(*names: str) -> float:
        return 1e-6 * float(sum(measured[f"host: {name}"]["microseconds"] for name in names)) / len(names)

    elements = 64 * 512 * 2048  # of the largest images
    image = measured["bf16 64 -> 64, 512 x 2048"]
    floor = (4 * measured["bf16 64 -> 64, 128 x 2048"]["forward, no bias"]["microseconds"] - image["forward, no bias"]["microseconds"]) / 3
    bias = image["forward"]["microseconds"] - image["forward, no bias"]["microseconds"]
    pairs: dict[str, tuple[float, float, float]] = {
        "memory": (H100.bytes_per_second, measured["device: copy of 1024 MiB"]["GB/s"] * 1e9, near),
        "link up": (H100.link_bytes_per_second, measured["link: to the device"]["GB/s"] * 1e9, near),
        "link down": (H100.link_bytes_per_second, measured["link: to the host"]["GB/s"] * 1e9, near),
        "graph": (H100.min_replayed_seconds, measured["device: kernel in a graph"]["microseconds"] * 1e-6, near),
        "bias": (H100.biases_per_second, elements / bias * 1e6, near),
        "reduction": (H100.reduced_elements_per_second, elements / image["bias"]["microseconds"] * 1e6, near),
        "product": (H100.min_product_seconds, floor * 1e-6, 2.0),
        "call": (H100.call_seconds, microseconds("add_", "relu_", "copy_", "cat", "threshold_backward", "max_pool2d"), about),
        "view": (H100.view_seconds, microseconds("view (slice)", "view (view)", "empty"), about),
        "convolution": (
            H100.product_seconds,
            microseconds("convolution, no bias", "convolution_backward, data", "convolution_backward, weight"),
            about,
        ),
        "Triton": (H100.kernel_call_seconds, microseconds("triton convolution", "triton frozen norm"), about),
    }
    for channels, columns in ((64, 2048), (128, 1024), (256, 512), (512, 256)):
        rates = measured[f"bf16 {channels} -> {channels}, 512 x {columns}"]
        pairs[f"{channels} forward"] = (
            H100.flops_per_second(torch.bfloat16, channels),
            rates["forward, no bias"]["TFLOP/s"] * 1e12,
            near,
        )
        for direction in ("data", "weight"):
            rate = H100.flops_per_second(torch.bfloat16, channels, direction)
            pairs[f"{channels} {direction}"] = (rate, rates[direction]["TFLOP/s"] * 1e12, near)
        single = measured[f"fp32 TF32 {channels} -> {channels}, 512 x {columns}"]["forward, no bias"]["TFLOP/s"] * 1e12
        pairs[f"{channels} TF32"] = (H100.flops_per_second(torch.float32, channels), single, 1.2)
    wrong = {name: pair for name, pair in pairs.items() if not 1 / pair[2] <= pair[0] / pair[1] <= pair[2]}
    assert not wrong


def test_small_strips_leave_multiprocessors_idle() -> None:
    """One wave of tiles takes as long as a fraction of it."""
    few, many = (_seconds(_IDEAL, [nn.Conv2d(512, 512, 3, padding=1, bias=False)], size, 512) for size in (16, 64))
    assert few > 3 * many * (16 / 64) ** 2


def test_the_host_counts_if_it_takes_longer() -> None:
    layers: list[nn.Module] = [nn.ReLU() for _ in range(50)]
    small, large = _seconds(H100, layers, 8), _seconds(H100, layers, 4096)
    assert small == pytest.approx(50 * (H100.call_seconds + H100.instruction_seconds) + H100.program_seconds, rel=0.3)
    assert large > 10 * small
    slow_host = replace(H100, call_seconds=4e-4)
    assert _seconds(slow_host, layers, 8) > 10 * small
    assert _seconds(slow_host, layers, 4096) == pytest.approx(large, rel=0.05)


def test_searches_of_a_gpu_differ_in_the_rate_of_copies() -> None:
    gpu, cpu = DeviceRates("cuda"), DeviceRates("cpu")
    assert len({variant.flops_per_second for variant in gpu.search_variants()}) == len(gpu.search_variants()) > 1
    assert cpu.search_variants() == (cpu,) and not cpu.ranks_by_time
    assert gpu.ranks_by_time and gpu.link().up_bytes_per_second == H100.link_bytes_per_second
    assert math.isfinite(gpu.flops_per_second)
