"""A training step with BatchNorm over a whole slide, in a sixteenth of the bytes of plain PyTorch, compared with plain PyTorch's own.

A norm in training mode is a barrier: its output depends on all rows of its input. So values between two norms are stored or recomputed.
Here they wait on the host (`sft.Options(host_budget=...)`), are written and read strip by strip, and never are on the device as a whole.
The image is read from the slide strip by strip, too. Outputs, gradients of all parameters and running statistics are compared in float64.
The device is the CPU, metered; the host's values are memory of the same machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from harness.cases import load_models
from harness.gradcheck import collect, worst_difference
from harness.memory import peak_rss_bytes
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

import sft
from sft.sources import open_image

SLIDE = Path(__file__).resolve().parents[1] / "examples" / "data" / "CMU-1-Small-Region.svs"
#: Relative to plain PyTorch with norms that add up in pairs. Much of a slide is one white, and ``batch_norm`` on the CPU adds pixels one
#: after another, so a million rounding errors have one sign; ``var_mean`` and ``sum`` add in pairs. The gradient of a convolution before a
#: norm is a sum over millions of pixels in which almost everything cancels.
EXACT = 1e-10

HEADERS = (
    "model, input",
    "plain, MiB",
    "budget, MiB",
    "of it parameters and their gradients, MiB",
    "projected peak, MiB",
    "measured peak, MiB",
    "host, GiB",
    "FLOPs / plain",
    "worst error",
    "with norms summed in pairs",
    "plain to plain",
    "plain, s",
    "sft, s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step on the slide."""

    model: Literal["resnet18", "unet"]
    size: tuple[int, int]
    """Rows and columns, from the slide's upper left corner."""
    share: int
    """Divisor of plain's bytes: the budget."""
    threads: int
    reference: Path
    """File with plain PyTorch's results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """Step of plain PyTorch, measured."""

    seconds: float
    process_bytes: int
    own_error: float
    """Difference of plain PyTorch's results with the norms' sums by ``var_mean`` and ``sum``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Step of `sft`, measured, and its difference from plain PyTorch."""

    plain_bytes: int
    budget_bytes: int
    resident_bytes: int
    projected_peak_bytes: int
    measured_peak_bytes: int
    host_bytes: int
    redundancy: float
    num_segments: int
    worst_error: float
    worst_error_in_pairs: float
    """Against plain PyTorch with norms that sum up in pairs."""
    worst_tensor: str
    prepare_seconds: float
    seconds: float

    @property
    def is_within(self) -> bool:
        """True if the step took the planned bytes, which are inside the budget."""
        return self.measured_peak_bytes <= self.projected_peak_bytes <= self.budget_bytes - self.resident_bytes


def make(case: Case) -> nn.Module:
    """The model in training mode, float64."""
    models = load_models()
    torch.manual_seed(0)
    if case.model == "resnet18":
        model: nn.Module = models.resnet18(2)
    else:
        model = sft.nn.WithLoss(models.unet(1, width=8, batch_norm=True), nn.BCEWithLogitsLoss())
    return model.double().train()


def inputs(case: Case) -> tuple[NDArray[np.float64], ...]:
    """The slide's pixels, as numbers from 0 to 1, ``[1, 3, rows, columns]``; for the U-Net also a mask of dark pixels to learn."""
    height, width = case.size
    read = open_image(SLIDE).read(0, 0, width, height)
    pixels: NDArray[np.float64] = np.ascontiguousarray(read.transpose(2, 0, 1)[None]) / 255.0
    return (pixels,) if case.model == "resnet18" else (pixels, (pixels.mean(axis=1, keepdims=True) < 0.7).astype(np.float64))


def loss_of(output: Tensor) -> Tensor:
    """Cross-entropy of the slide with its second class; the U-Net's output is a loss already."""
    return nn.functional.cross_entropy(output, torch.tensor([1])) if output.dim() == 2 else output


def everything(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """The output, all gradients and all buffers."""
    return {**collect(model, output.detach()), **{f"{name} (buffer)": buffer.double().clone() for name, buffer in model.named_buffers()}}


class _SummedInPairs(torch.autograd.Function):
    """BatchNorm in training mode, channels in the second dimension: its formulas with ``var_mean`` and ``sum``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        variance, mean = torch.var_mean(x, _IMAGE, correction=0, keepdim=True)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        return torch.addcmul(bias.view(1, -1, 1, 1), x - mean, scale * weight.view(1, -1, 1, 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, scale = ctx.saved_tensors
        (gradient,) = gradients
        result = (x - mean).mul_(scale)
        bias_gradient, weight_gradient = gradient.sum(_IMAGE, keepdim=True), (gradient * result).sum(_IMAGE, keepdim=True)
        count = x.numel() // x.shape[1]
        result = result.mul_(weight_gradient / -count).add_(gradient).sub_(bias_gradient / count).mul_(scale * weight.view(1, -1, 1, 1))
        return result, weight_gradient.flatten(), bias_gradient.flatten(), None


_IMAGE = (0, 2, 3)


def summed_in_pairs(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Replacement of ``torch.nn.functional.batch_norm`` in training mode."""
    assert training
    with torch.no_grad():
        variance, mean = torch.var_mean(x, _IMAGE)
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance, momentum)
    result: Tensor = _SummedInPairs.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]  # torch's own
    return result


def plain_step(case: Case) -> PlainStep:
    """Plain PyTorch's step, kept for the comparison; call it in a process of its own."""
    torch.set_num_threads(case.threads)
    x, *others = map(torch.from_numpy, inputs(case))
    results, seconds = [], []
    for norm in (nn.functional.batch_norm, summed_in_pairs):
        model = make(case)
        started = time.perf_counter()
        with patch.object(nn.functional, "batch_norm", norm):
            output = model(x, *others)
        torch.autograd.backward(loss_of(output))
        seconds.append(time.perf_counter() - started)
        results.append(everything(model, output))
        del output
    torch.save(results, case.reference)
    return PlainStep(seconds=seconds[0], process_bytes=peak_rss_bytes(), own_error=worst_difference(*results)[0])


def step(case: Case) -> Step:
    """Our step; call it in a process of its own."""
    torch.set_num_threads(case.threads)
    model, arrays = make(case), inputs(case)
    plain = sft.plan(model, [array.shape for array in arrays], budget=2**60, options=sft.Options(strategy="none"))
    started = time.perf_counter()
    net: Any = sft.compile(
        model,
        arrays,
        budget=plain.total_bytes // case.share,
        options=sft.Options(host_budget="64GiB"),
    )
    prepare_seconds = time.perf_counter() - started
    started = time.perf_counter()
    with sft.measure_peak("cpu") as peak:
        output = net(*arrays)
        torch.autograd.backward(loss_of(output))
    seconds = time.perf_counter() - started
    ours, (plain_pytorch, in_pairs) = everything(model, output), torch.load(case.reference, weights_only=True)
    error, tensor = worst_difference(plain_pytorch, ours)
    return Step(
        plain_bytes=plain.total_bytes,
        budget_bytes=plain.total_bytes // case.share,
        resident_bytes=net.plan.resident_bytes,
        projected_peak_bytes=net.plan.projected_peak_bytes,
        measured_peak_bytes=peak.num_bytes,
        host_bytes=net.plan.host_bytes,
        redundancy=net.plan.redundancy,
        num_segments=len(net.plan.segments),
        worst_error=error,
        worst_error_in_pairs=worst_difference(in_pairs, ours)[0],
        worst_tensor=tensor,
        prepare_seconds=prepare_seconds,
        seconds=seconds,
    )


def cells(case: Case, plain: PlainStep, ours: Step) -> list[str]:
    """A row of the table."""
    height, width = case.size
    sizes = [ours.plain_bytes, ours.budget_bytes, ours.resident_bytes, ours.projected_peak_bytes, ours.measured_peak_bytes]
    cells = [f"{case.model} 1x3x{height}x{width}", *map(mib, sizes), f"{ours.host_bytes / 2**30:.2f}", f"{ours.redundancy:.2f}"]
    return [
        *cells,
        f"{ours.worst_error:.0e}",
        f"{ours.worst_error_in_pairs:.0e}",
        f"{plain.own_error:.0e}",
        f"{plain.seconds:,.0f}",
        f"{ours.seconds:,.0f}",
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A training step with norms over a whole slide, in a sixteenth of plain PyTorch's bytes.")
    parser.add_argument("--share", type=positive_int, default=16, help="divisor of plain PyTorch's bytes: the budget (default: 16)")
    parser.add_argument("--scale", type=positive_int, default=1, help="divide rows and columns by this, to try it out (default: 1)")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 when a step is not exact, or takes more bytes than planned."""
    args = parse_arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while they wait take processor time from other processes
    console, stem = Console(), result_stem(args.out, "whole-norms")
    sizes: dict[Literal["resnet18", "unet"], tuple[int, int]] = {"resnet18": (2967, 2220), "unet": (2960, 2208)}
    rows, results, is_good = [], [], True
    for model, (height, width) in sizes.items():
        size = (height, width) if args.scale == 1 else (height // args.scale // 16 * 16, width // args.scale // 16 * 16)
        with tempfile.TemporaryDirectory() as folder:
            case = Case(model=model, size=size, share=args.share, threads=args.threads, reference=Path(folder) / "plain.pt")
            try:
                plain: PlainStep = call_in_process(plain_step, case)
                ours: Step = call_in_process(step, case)
            except WorkerError as error:
                console.print(f"{model}: {error.kind}: {error}", markup=False)
                return 1
        rows.append(cells(case, plain, ours))
        results.append({"model": model, "size": size, "plain": asdict(plain), "sft": asdict(ours)})
        is_good = is_good and ours.is_within and ours.worst_error_in_pairs <= EXACT
        console.print(" | ".join(rows[-1]), f"worst: {ours.worst_tensor}", markup=False)
    raw: dict[str, Any] = {"environment": environment(args.threads), "settings": {"share": args.share}, "results": results}
    notes = (
        "The slide of `examples/data`, float64, batch 1, norms in training mode; the budget is one in "
        f"{args.share} of plain PyTorch's bytes. The image and values that wait for norms are on the host, strips are on the device. "
        "Output, gradients and running statistics are compared with plain PyTorch's: the error is the largest difference "
        "over the largest value of the same module, also against plain PyTorch whose norms add up in pairs (`var_mean`, `sum`) and not one "
        "pixel after the other, and of the two plain ones against each other. "
        "The U-Net has 5 levels of 8 to 128 channels and a loss for each pixel "
        "(`sft.nn.WithLoss`). Steps were timed once each, plain PyTorch's first."
    )
    console.print(write_results(stem, raw, [Table(title="One training step", headers=HEADERS, rows=rows)], notes, None))
    return int(not is_good)


if __name__ == "__main__":
    raise SystemExit(main())
