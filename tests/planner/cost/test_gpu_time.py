"""Time model of a GPU: the maximum of host and device; bandwidth, rates of types and widths, waves of tiles."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sft.lower.builder import ProgramBuilder
from sft.lower.custom_ops.windows import RowMajorCall
from sft.lower.program import Program
from sft.lower.untiled.whole_norms import BATCH_NORM_FUNCTIONS
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.cost.gpu_models import H100, H200
from sft.planner.cost.gpu_time import GpuModel
from sft.planner.projection import plain_programs
from tests.helpers.problems import problem_of

aten, _batch_norm = torch.ops.aten, BATCH_NORM_FUNCTIONS[0]
#: A GPU without floors and host times.
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
    """A ReLU of 64 channels reads and writes at least one image."""
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
    assert rates[0] == pytest.approx(rates[1] / 3, rel=0.1) and 4 < rates[2] / rates[1] < 6
    assert H100.flops_per_second(torch.bfloat16, 512, "weight") < H100.flops_per_second(torch.bfloat16, 512, "data")


def test_biases_and_reductions_are_kernels_of_their_own() -> None:
    """The bias of a convolution takes an elementwise pass; its gradient a slow read."""
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
    assert H100.seconds(program, replays=True) == pytest.approx(50 * 1.6 * H100.min_replayed_seconds, rel=0.2)
    assert H100.seconds(program) > 10 * H100.seconds(program, replays=True)


def _measured_rates(gpu: str) -> dict[str, dict[str, Any]]:
    """The newest committed rates of a GPU."""
    rates: dict[str, dict[str, Any]] = json.loads(max(_RESULTS.glob(f"*-{gpu}-gpu-rates.json")).read_text())["rates"]
    return rates


def test_copies_of_strips_take_the_measured_time() -> None:
    """In the newest trace with copies over the link, in both directions at once; within 10 %."""
    copies = {}
    for path in sorted(_RESULTS.glob("*-h200-gpu-kernels.json")):
        for rows in json.loads(path.read_text())["kernels"].values():
            copies.update({row["kernel"]: 1e-3 * row["ms"] / row["calls"] for row in rows if row["kernel"].startswith("copy ")})
    link = DeviceRates("cuda", gpu=H200).link()
    for size_mib in (2, 4):
        for direction in ("HtoD", "DtoH"):
            measured = copies[f"copy {direction}, {size_mib:.1f} MiB"]
            assert link.streamed_seconds(0, size_mib * 2**20, num_up=1) == pytest.approx(measured, rel=0.1), (size_mib, direction)


@pytest.mark.parametrize(("name", "model"), [("h100", H100), ("h200", H200)])
def test_rates_are_the_measured_ones(name: str, model: GpuModel) -> None:
    """Constants of the model within 15 % of the newest result for rates of large tensors, and within 40 % for times of the host."""
    measured, near, about = _measured_rates(name), 1.15, 1.4

    def microseconds(*names: str) -> float:
        return 1e-6 * float(sum(measured[f"host: {name}"]["microseconds"] for name in names)) / len(names)

    elements = 64 * 512 * 2048  # of the largest images
    image = measured["bf16 64 -> 64, 512 x 2048"]
    floor = (4 * measured["bf16 64 -> 64, 128 x 2048"]["forward, no bias"]["microseconds"] - image["forward, no bias"]["microseconds"]) / 3
    bias = image["forward"]["microseconds"] - image["forward, no bias"]["microseconds"]
    pairs: dict[str, tuple[float, float, float]] = {
        "memory": (model.bytes_per_second, measured["device: copy of 1024 MiB"]["GB/s"] * 1e9, near),
        "link up": (model.link_bytes_per_second, measured["link: to the device"]["GB/s"] * 1e9, near),
        "link down": (model.link_bytes_per_second, measured["link: to the host"]["GB/s"] * 1e9, near),
        "graph": (model.min_replayed_seconds, measured["device: kernel in a graph"]["microseconds"] * 1e-6, near),
        "bias": (model.biases_per_second, elements / bias * 1e6, near),
        "reduction": (model.reduced_elements_per_second, elements / image["bias"]["microseconds"] * 1e6, near),
        "product": (model.min_product_seconds, floor * 1e-6, 2.0),
        "call": (model.call_seconds, microseconds("add_", "relu_", "copy_", "cat", "threshold_backward", "max_pool2d"), about),
        "view": (model.view_seconds, microseconds("view (slice)", "view (view)", "empty"), about),
        "convolution": (
            model.product_seconds,
            microseconds("convolution, no bias", "convolution_backward, data", "convolution_backward, weight"),
            about,
        ),
        "Triton": (model.kernel_call_seconds, microseconds("triton convolution", "triton frozen norm"), about),
    }
    if "bf16 32 -> 32, 512 x 2048" in measured:
        rates = measured["bf16 32 -> 32, 512 x 2048"]
        pairs["32 forward"] = (model.flops_per_second(torch.bfloat16, 32), rates["forward, no bias"]["TFLOP/s"] * 1e12, near)
        pairs["32 weight"] = (model.flops_per_second(torch.bfloat16, 32, "weight"), rates["weight"]["TFLOP/s"] * 1e12, near)
    sizes = ((64, 2048), (128, 1024), (256, 512), (512, 256))
    for channels, columns in sizes:
        rates = measured[f"bf16 {channels} -> {channels}, 512 x {columns}"]
        pairs[f"{channels} forward"] = (
            model.flops_per_second(torch.bfloat16, channels),
            rates["forward, no bias"]["TFLOP/s"] * 1e12,
            near,
        )
        for direction in ("data", "weight"):
            rate = model.flops_per_second(torch.bfloat16, channels, direction)
            widest = [measured[f"bf16 {narrower} -> {narrower}, 512 x {size}"] for narrower, size in sizes if narrower <= channels]
            pairs[f"{channels} {direction}"] = (rate, max(each[direction]["TFLOP/s"] for each in widest) * 1e12, near)
        single = measured[f"fp32 TF32 {channels} -> {channels}, 512 x {columns}"]["forward, no bias"]["TFLOP/s"] * 1e12
        pairs[f"{channels} TF32"] = (model.flops_per_second(torch.float32, channels), single, 1.2)
    wrong = {name: pair for name, pair in pairs.items() if not 1 / pair[2] <= pair[0] / pair[1] <= pair[2]}
    assert not wrong


def _rows(gpu: str, step: str) -> list[tuple[str, int, float]]:
    """Kernels, calls and seconds of a step in the newest trace of it."""
    texts = [path.read_text() for path in sorted(_RESULTS.glob(f"*-{gpu}-gpu-kernels.md"))]
    newest = next(text for text in reversed(texts) if step in text)
    rows = [[cell.strip() for cell in line.split("|")] for line in newest.splitlines() if step in line]
    names = sorted({row[1] for row in rows})
    return [(row[2], int(row[3]), 1e-3 * float(row[4])) for row in rows if row[1] == names[0]]


@pytest.mark.parametrize(("gpu", "model"), [("h100", H100), ("h200", H200)])
def test_pools_and_norms_take_the_time_of_traces(gpu: str, model: GpuModel) -> None:
    """Of an untiled ResNet-18, whose norms have 1, 4 and three times 5 images of 64, 64, 128, 256 and 512 channels."""
    rows = _rows(gpu, "resnet18-training-step-in-8-gib")
    builder = ProgramBuilder(dtype=torch.bfloat16)
    image, window = builder.port("source", "x", (1, 64, 1024, 1024)), ([3, 3], [2, 2], [1, 1], [1, 1], False)
    pooled, indices = builder.slot((1, 64, 512, 512)), builder.slot((1, 64, 512, 512), torch.int64)
    builder.call_many(aten.max_pool2d_with_indices.default, (image, *window), (pooled, indices))
    builder.call(aten.max_pool2d_with_indices_backward.default, pooled, image, *window, indices, shape=image.shape)
    for channels, size in [(64, 1024), *4 * [(64, 512)], *5 * [(128, 256)], *5 * [(256, 128)], *5 * [(512, 64)]]:
        _add_norm(builder, (1, channels, size, size))
    seconds: dict[str, float] = {}
    for call in builder.instructions:
        seconds[str(call.function)] = seconds.get(str(call.function), 0.0) + model.instruction_times(call, replays=True)[1]
    traced = {
        "aten.max_pool2d_with_indices.default": ("max_pool_forward",),
        "aten.max_pool2d_with_indices_backward.default": ("max_pool_backward",),
        str(_batch_norm): ("batch_norm_collect_statistics", "batch_norm_transform"),
        "aten.native_batch_norm_backward.default": ("batch_norm_backward",),
    }
    for name, kernels in traced.items():
        measured = sum(row[2] for row in rows if any(kernel in row[0] for kernel in kernels))
        assert seconds[name] == pytest.approx(measured, rel=0.15), name


def _add_norm(builder: ProgramBuilder, shape: tuple[int, ...]) -> None:
    """Calls of a norm of a whole image, and of its derivative."""
    image, out = builder.port("source", f"x{shape}", shape), builder.slot(shape)
    mean, deviation = (builder.slot((shape[1],), torch.float32) for _ in range(2))
    builder.call_measured(_batch_norm, (image, None, None, 1e-5), (out, mean, deviation), peak_bytes=0, flops=0)
    arguments = (out, image, None, None, None, mean, deviation, True, 1e-5, [True, False, False])
    builder.call_many(aten.native_batch_norm_backward.default, arguments, (builder.slot(shape), None, None))


def test_pools_interpolation_and_copies_of_columns_take_their_elements() -> None:
    """Bound by elements, in any type; copies of rows are bound by bytes."""
    pooled, enlarged = nn.MaxPool2d(2), nn.Upsample(scale_factor=2.0, mode="bilinear")
    num_elements, wide = 64 * 1024**2, replace(_IDEAL, bytes_per_second=math.inf)
    assert _seconds(wide, [pooled], 1024) == pytest.approx(num_elements / H100.pooled_elements_per_second, rel=0.02)
    assert _seconds(wide, [enlarged], 512) == pytest.approx(num_elements / H100.gathered_elements_per_second, rel=0.02)
    assert _seconds(wide, [nn.ZeroPad2d((1, 0, 0, 0))], 1024) == pytest.approx(num_elements / H100.copied_elements_per_second, rel=0.02)


@pytest.mark.parametrize(("mode", "operator"), [("bilinear", "upsample_bilinear2d"), ("nearest", "upsample_nearest2d")])
def test_calls_on_row_major_copies_take_the_time_of_their_operator(mode: str, operator: str) -> None:
    enlarged = nn.Upsample(scale_factor=2, mode=mode)
    programs = plain_programs(problem_of(nn.Sequential(enlarged).requires_grad_(False), (1, 64, 256, 256), training=False))
    row_major = RowMajorCall(operator, images_per_call=1, channels_per_call=64)
    (call,) = (call for program in programs for call in program.instructions if call.function is row_major.function)
    copied = call._replace(function=row_major)
    assert H200.instruction_times(copied) == H200.instruction_times(call)


def _copy_program(dim: int) -> Program:
    """A copy of a slice of an image along a dimension."""
    builder = ProgramBuilder(dtype=torch.float32)
    image, target = builder.port("source", "x", (1, 64, 512, 512)), builder.port("out", "y", (1, 64, 512, 512))
    builder.copy(builder.narrow(target, dim, 0, 256), builder.narrow(image, dim, 0, 256))
    return builder.finish()


def test_copies_of_columns_take_longer_than_copies_of_rows() -> None:
    num_elements, wide = 64 * 512 * 256, replace(_IDEAL, bytes_per_second=math.inf)
    assert _IDEAL.seconds(_copy_program(2)) == pytest.approx(2 * 4 * num_elements / _IDEAL.bytes_per_second)
    assert wide.seconds(_copy_program(2)) == 0
    assert wide.seconds(_copy_program(3)) == pytest.approx(num_elements / _IDEAL.copied_elements_per_second)


def test_small_strips_leave_multiprocessors_idle() -> None:
    """One wave of tiles takes as long as a fraction of it."""
    few, many = (_seconds(_IDEAL, [nn.Conv2d(512, 512, 3, padding=1, bias=False)], size, 512) for size in (16, 64))
    assert few > 2.5 * many * (16 / 64) ** 2


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
