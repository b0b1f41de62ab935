"""Memory of one training step over time: plain PyTorch and sft, on the slide and the network of the demo.

Each step runs in a process of its own. A dispatch mode reads the meter of ``sft.measure_peak`` after every operator. The result has the
largest value of each hundredth of the step, and the picture of the README: ``docs/images/memory-light.svg`` and ``memory-dark.svg``.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness.report import Table, add_common_arguments, environment, mib, result_stem, write_results
from harness.workers import call_in_process
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID251 - samples after each operator, as the product's meter does

import sft
from sft.common.atomic_files import atomic_write
from sft.common.byte_units import parse_bytes
from sft.common.memory import Peak
from sft.sources import Slide

_ROOT = Path(__file__).resolve().parents[1]
_SLIDE = _ROOT / "examples" / "data" / "CMU-1-Small-Region.svs"
_NUM_BINS = 100
_THEMES = {"light": ("#24292f", "#d0495c", "#1f6feb"), "dark": ("#e6edf3", "#ff7b89", "#6cb6ff")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One method and its budget."""

    method: str
    """`plain` or `sft`."""
    budget_bytes: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Memory of one step, weights and buffers included."""

    case: Case
    loss: float
    seconds: float
    peak_bytes: int
    bin_bytes: tuple[int, ...]
    """Largest bytes in each of equal shares of the step's time."""


class _Sampler(TorchDispatchMode):
    """Reader of a meter after every operator. Enter it inside the meter, which then has counted the operator's results."""

    def __init__(self, peak: Peak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.samples: list[tuple[float, int]] = []
        self._peak = peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.samples.append((time.perf_counter(), self._peak.current_bytes))
        return result


def measure(case: Case) -> Curve:
    """Run one step of the demo and sample its memory."""
    sys.path.insert(0, str(_ROOT / "examples" / "slide_classification"))
    from task import LABEL, build_model, load_image, tensor_bytes

    torch.set_num_threads(case.threads)
    with Slide(_SLIDE) as slide:
        image = load_image(slide)
    model = build_model(image, 0)
    net = model if case.method == "plain" else sft.compile(model, image.shape, budget=case.budget_bytes)
    base_bytes = image.nbytes + tensor_bytes(model)
    start = time.perf_counter()
    with sft.measure_peak("cpu") as peak, _Sampler(peak) as sampler:
        loss = F.cross_entropy(net(image), torch.tensor([LABEL]))
        loss.backward()
    seconds = time.perf_counter() - start
    bins = [0] * _NUM_BINS
    for moment, num_bytes in sampler.samples:
        number = min(_NUM_BINS - 1, int((moment - start) / seconds * _NUM_BINS))
        bins[number] = max(bins[number], num_bytes)
    for number in range(1, _NUM_BINS):  # an operator that takes longer than a bin keeps its bytes
        bins[number] = bins[number] or bins[number - 1]
    return Curve(
        case=case,
        loss=loss.item(),
        seconds=seconds,
        peak_bytes=peak.num_bytes + base_bytes,
        bin_bytes=tuple(base_bytes + num_bytes for num_bytes in bins),
    )


def picture(plain: Curve, own: Curve, theme: str) -> Figure:
    """Curves of both steps under the budget's line, for a light or a dark page."""
    ink, plain_color, own_color = _THEMES[theme]
    with rc_context({"text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        percent = [100 * (number + 0.5) / _NUM_BINS for number in range(_NUM_BINS)]
        for curve, color in ((plain, plain_color), (own, own_color)):
            gib = [num_bytes / 2**30 for num_bytes in curve.bin_bytes]
            axes.fill_between(percent, gib, color=color, alpha=0.2, linewidth=0)
            axes.plot(percent, gib, color=color, linewidth=2)
        budget_gib = own.case.budget_bytes / 2**30
        axes.axhline(budget_gib, color=ink, linewidth=1, linestyle="--")
        axes.text(99, budget_gib + 0.04, f"budget: {sft.format_bytes(own.case.budget_bytes)}", ha="right", va="bottom")
        axes.text(
            50, plain.peak_bytes / 2**30 * 0.62, f"plain PyTorch: {sft.format_bytes(plain.peak_bytes)}", color=plain_color, ha="center"
        )
        axes.text(50, budget_gib + 0.04, f"sft: {sft.format_bytes(own.peak_bytes)}", color=own_color, ha="center", va="bottom")
        axes.set(xlim=(0, 100), ylim=(0, None), xlabel="progress of the training step (%)", ylabel="memory (GiB)")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> int:
    """Measure both steps, write the result and the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--budget", default="350MiB", help="budget of the compiled step")
    parser.add_argument("--pictures", type=Path, default=_ROOT / "docs" / "images", help="folder of the pictures")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    budget_bytes = parse_bytes(arguments.budget)
    cases = [Case(method=method, budget_bytes=budget_bytes, threads=arguments.threads) for method in ("plain", "sft")]
    plain, own = (call_in_process(measure, case) for case in cases)
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    for theme in _THEMES:
        with atomic_write(arguments.pictures / f"memory-{theme}.svg") as temporary:
            picture(plain, own, theme).savefig(temporary, format="svg")
    table = Table(
        title="Peaks of one step, parameters and buffers included",
        headers=("method", "peak MiB", "loss"),
        rows=[(curve.case.method, mib(curve.peak_bytes), f"{curve.loss:.6f}") for curve in (plain, own)],
    )
    raw = {"environment": environment(arguments.threads), "curves": [asdict(curve) for curve in (plain, own)]}
    notes = "ResNet-18 with frozen norms on the slide of `make demo`, 2220 x 2967 px; one training step each. Seconds are not comparable."
    written = write_results(result_stem(arguments.out, "memory-over-time"), raw, [table], notes, None)
    Console().print(table.terminal(), written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
