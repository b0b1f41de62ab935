"""Time model of a GPU: host or device, whichever takes longer; bandwidth, rates of types and widths, waves of tiles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from sft.planner.cost.gpu_time import H100, GpuModel
from sft.planner.cost.roofline import DeviceRates
from sft.planner.projection import plain_programs
from tests.helpers.problems import problem_of

#: A GPU without floors and host.
_IDEAL = replace(H100, min_kernel_seconds=0.0, call_seconds=0.0, product_seconds=0.0, view_seconds=0.0, program_seconds=0.0)


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
    for channels, rate in ((64, 240e12), (128, 450e12), (512, 600e12)):
        layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        flops = 2 * 9 * channels**2 * 1024**2
        computing = _seconds(replace(_IDEAL, bytes_per_second=math.inf), [layer], 1024, channels)
        assert computing == pytest.approx(flops / (H100.single_share * rate), rel=0.05)
        assert H100.flops_per_second(torch.bfloat16, channels) == rate
    assert H100.flops_per_second(torch.float64) < H100.flops_per_second(torch.float32) < H100.flops_per_second(torch.float16)


def test_small_strips_leave_multiprocessors_idle() -> None:
    """One wave of tiles takes as long as a fraction of it."""
    few, many = (_seconds(_IDEAL, [nn.Conv2d(512, 512, 3, padding=1, bias=False)], size, 512) for size in (16, 64))
    assert few > 3 * many * (16 / 64) ** 2


def test_the_host_counts_if_it_takes_longer() -> None:
    layers: list[nn.Module] = [nn.ReLU() for _ in range(50)]
    small, large = _seconds(H100, layers, 8), _seconds(H100, layers, 4096)
    assert small == pytest.approx(50 * H100.call_seconds, rel=0.3)
    assert large > 10 * small
    slow_host = replace(H100, call_seconds=1e-4)
    assert _seconds(slow_host, layers, 8) > 10 * small
    assert _seconds(slow_host, layers, 4096) == pytest.approx(large, rel=0.05)


def test_searches_of_a_gpu_differ_in_the_rate_of_copies() -> None:
    gpu, cpu = DeviceRates("cuda"), DeviceRates("cpu")
    assert len({variant.flops_per_second for variant in gpu.search_variants()}) == len(gpu.search_variants()) > 1
    assert cpu.search_variants() == (cpu,) and not cpu.ranks_by_time
    assert gpu.ranks_by_time and gpu.link().up_bytes_per_second == H100.link_bytes_per_second
    assert math.isfinite(gpu.flops_per_second)
