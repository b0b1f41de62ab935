"""Train a ResNet-18 end to end on a whole slide at full resolution, in an eighth of the memory that plain PyTorch
needs.

    python examples/slide_classification/main.py

The gradients are those of plain PyTorch; the first losses of both are printed side by side. One slide cannot show generalisation: the loss
falls because the network memorises the slide.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from heatmap import class_activation_map, draw_heatmap
from outputs import write_metrics
from plain import PlainFailed, measure_in_subprocess
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from task import LABEL, NUM_CROPS, StepResult, build_model, load_image, tensor_bytes
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from examples.models import PooledClassifier
from sft.common.atomic_files import atomic_write
from sft.common.errors import SftError
from sft.sources import Slide

DEFAULT_SLIDE = Path(__file__).resolve().parents[1] / "data" / "CMU-1-Small-Region.svs"
STRIDE_PX = 32  # of a ResNet's last feature map


def main() -> int:
    """Run the demo; returns the exit status."""
    arguments = parse_arguments()
    try:
        return run(arguments, Console())
    except (SftError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--slide", type=Path, default=DEFAULT_SLIDE, help="a file that OpenSlide reads")
    parser.add_argument("--out", type=Path, default=Path("out/slide_classification"), help="folder for the results")
    parser.add_argument("--steps", type=_positive, default=3, help="training steps")
    parser.add_argument("--budget", default="350MiB", help="bytes for parameters, gradients, input and activations")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of SGD")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    return parser.parse_args()


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure plain PyTorch, train in the budget, draw the heatmap, write and print the results."""
    slide = Slide(arguments.slide)
    console.print(f"slide: {slide.path.name}, {slide.width_px} x {slide.height_px} px, {_resolution(slide)}")
    arguments.out.mkdir(parents=True, exist_ok=True)

    plain = _measure_plain(arguments, console)

    with slide:
        image = load_image(slide)
    model = build_model(image, arguments.seed)
    console.print(f"norm statistics: measured on {NUM_CROPS} crops of the slide, then frozen; all other parameters train")

    net: Any = sft.compile(model, image.shape, budget=arguments.budget)
    plan: sft.Plan = net.plan
    with atomic_write(arguments.out / "plan.txt") as temporary:
        temporary.write_text(plan.explain() + "\n", encoding="utf-8")

    metrics_path = arguments.out / "metrics.csv"
    steps = train(net, plan, image, arguments.steps, arguments.lr, metrics_path, console)

    with console.status("drawing the class-activation map"):
        probability = _draw(model, image, arguments)
    console.print(f"class {LABEL} after training: probability {probability:.4f}")

    resident_bytes = tensor_bytes(model)
    console.print(closing_table(plain, steps, resident_bytes, plan))
    console.print(f"written to {arguments.out}: metrics.csv, plan.txt, heatmap.png")
    if resident_bytes + max(step.peak_bytes for step in steps) > plan.budget_bytes:
        print("error: the measured peak is above the budget; please report this", file=sys.stderr)
        return 1
    return 0


def train(
    net: nn.Module,
    plan: sft.Plan,
    image: Tensor,
    num_steps: int,
    learning_rate: float,
    metrics_path: Path,
    console: Console,
) -> list[StepResult]:
    """Train with plain SGD; the metrics file is complete after every step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)
    target = torch.tensor([LABEL])
    steps: list[StepResult] = []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]}  peak {task.fields[peak]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=num_steps, loss="-", peak="-")
        for _ in range(num_steps):
            optimizer.zero_grad()
            start = time.perf_counter()
            with sft.measure_peak("cpu") as peak:
                loss = F.cross_entropy(net(image), target)
                loss.backward()
            seconds = time.perf_counter() - start
            optimizer.step()
            steps.append(StepResult(loss=loss.item(), seconds=seconds, peak_bytes=peak.num_bytes + image.nbytes))
            write_metrics(
                metrics_path,
                steps,
                projected_peak_bytes=plan.projected_peak_bytes,
                budget_bytes=plan.budget_bytes,
            )
            progress.update(bar, advance=1, loss=f"{steps[-1].loss:.4f}", peak=sft.format_bytes(steps[-1].peak_bytes))
    return steps


def closing_table(plain: StepResult | None, steps: list[StepResult], resident_bytes: int, plan: sft.Plan) -> Table:
    """Table of plain PyTorch and sft; bytes include the parameters and buffers, `resident_bytes`."""
    seconds = statistics.median(step.seconds for step in steps)
    peak_bytes = resident_bytes + max(step.peak_bytes for step in steps)
    table = Table(title="one slide, end to end")
    for heading in ("", "plain PyTorch", "sft", "plain / sft"):
        table.add_column(heading, justify="left" if not heading else "right")

    def add(name: str, plain_text: str, sft_text: str, ratio: float | None = None) -> None:
        table.add_row(name, plain_text, sft_text, "" if ratio is None else f"{ratio:.2f} x")

    if plain is None:
        add("peak memory, measured", "did not finish", sft.format_bytes(peak_bytes))
        add("budget", "", sft.format_bytes(plan.budget_bytes))
        add("time of a step", "", f"{seconds:.1f} s")
        add("first loss", "", f"{steps[0].loss:.7f}")
    else:
        plain_bytes = resident_bytes + plain.peak_bytes
        add(
            "peak memory, measured",
            sft.format_bytes(plain_bytes),
            sft.format_bytes(peak_bytes),
            plain_bytes / peak_bytes,
        )
        add("budget", "", sft.format_bytes(plan.budget_bytes), plain_bytes / plan.budget_bytes)
        add("time of a step", f"{plain.seconds:.1f} s", f"{seconds:.1f} s", plain.seconds / seconds)
        add("first loss", f"{plain.loss:.7f}", f"{steps[0].loss:.7f}")
    add("projected peak", "", sft.format_bytes(plan.total_bytes))
    add("loss, first -> last step", "", f"{steps[0].loss:.4f} -> {steps[-1].loss:.4f}")
    return table


def _measure_plain(arguments: argparse.Namespace, console: Console) -> StepResult | None:
    with console.status("measuring one step of plain PyTorch in another process"):
        try:
            return measure_in_subprocess(arguments.slide, arguments.seed)
        except PlainFailed as error:
            console.print(f"plain PyTorch did not finish here: {error}")
            return None


@torch.no_grad()
def _draw(model: PooledClassifier, image: Tensor, arguments: argparse.Namespace) -> float:
    """Draw the heatmap of the trained model; returns the probability of the slide's label."""
    body = sft.compile(model.features, image.shape, budget=arguments.budget)
    features = body(image)
    evidence = class_activation_map(features, model.classifier, LABEL)
    logits = model.classifier(features.mean((2, 3)))
    probability = float(logits.softmax(1)[0, LABEL])
    title = f"{arguments.slide.name}, class {LABEL}: probability {probability:.3f} after {arguments.steps} steps"
    draw_heatmap(arguments.out / "heatmap.png", image, evidence, stride_px=STRIDE_PX, title=title)
    return probability


def _resolution(slide: Slide) -> str:
    return "resolution unknown" if slide.mpp is None else f"{slide.mpp[0]:.3f} um/px"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main())
