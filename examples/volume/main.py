"""Segment a whole brain at full resolution, in one piece, within fewer bytes than plain PyTorch needs.

python examples/volume/main.py --out out/volume
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# The examples are not an installed package: this path makes the others importable from any folder.
sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.volume.data import IGNORED_LABEL, TISSUES, Brain, load_brain
from examples.volume.network import SegResNet
from sft.common.byte_units import format_bytes


class Loss(nn.Module):
    """Soft Dice and cross-entropy, of the voxels that have a label: both are sums over voxels, so both are computed strip by strip.

    Args:
        weights: of the classes, in the cross-entropy.
    """

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.dice = sft.nn.DiceLoss(ignore_index=IGNORED_LABEL)
        self.entropy = nn.CrossEntropyLoss(weights, ignore_index=IGNORED_LABEL)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Map scores ``[N, K, axes...]`` and labels ``[N, axes...]`` to a number."""
        loss: Tensor = self.dice(scores, labels) + self.entropy(scores, labels)
        return loss


def main() -> int:
    """Train, predict, write results.md; returns the exit status."""
    arguments = parse_arguments()
    try:
        run(arguments)
    except (sft.SftError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/volume"), help="folder for the results")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, each on the whole volume")
    parser.add_argument("--width", type=int, default=4, help="channels of the network at full resolution")
    parser.add_argument("--share", type=float, default=0.7, help="of the bytes that plain PyTorch needs: the budget")
    parser.add_argument("--start", type=Path, help="begin with these weights, such as weights.pt of a coarser run")
    parser.add_argument("--every", type=int, default=1, help="keep every n-th voxel along each axis")
    parser.add_argument("--noise", type=float, default=0.2, help="standard deviation of the noise, in those of the brain")
    parser.add_argument("--lr", type=float, default=1.5e-2, help="learning rate of AdamW, after a half cosine")
    parser.add_argument("--seed", type=int, default=0, help="of everything")
    chosen = parser.parse_args()
    for name in ("steps", "width", "share", "every"):
        if not getattr(chosen, name) > 0:
            parser.error(f"--{name} {getattr(chosen, name)}: give a number above 0")
    return chosen


def run(arguments: argparse.Namespace) -> None:
    """Run with parsed arguments.

    Raises:
        BudgetError: the share of plain's bytes is too small.
        SourceError: nilearn is not installed.
    """
    torch.manual_seed(arguments.seed)
    brain = load_brain(arguments.every)
    model = SegResNet(len(TISSUES), width=arguments.width, num_groups=min(4, arguments.width))
    if arguments.start is not None:
        model.load_state_dict(torch.load(arguments.start, weights_only=True))
    training = sft.nn.WithLoss(model, Loss(class_weights(brain.left)))
    inputs = [brain.volume, brain.left]
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    plain_bytes = sft.plan(training, inputs, budget=2**60, options=sft.Options(strategy="none"), optimizer=optimizer).total_bytes
    budget_bytes = int(arguments.share * plain_bytes)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    net: Any = sft.compile(training, inputs, budget=budget_bytes, optimizer=optimizer)
    shape = " x ".join(map(str, brain.volume.shape[2:]))
    print(f"{shape} voxels; plain PyTorch needs {format_bytes(plain_bytes)}, the budget is {format_bytes(budget_bytes)}", flush=True)

    started = time.perf_counter()
    peak_bytes = 0
    for step in range(arguments.steps):
        noisy, labels = _noisy(brain, arguments.noise), brain.left
        if step % 2:  # so that the labelled half is not always on one side
            noisy, labels = noisy.flip(4), labels.flip(3)
        optimizer.zero_grad()
        with sft.measure_peak("cpu") as peak:
            loss = net(noisy, labels)
            loss.backward()
        optimizer.step()
        schedule.step()
        # Volume and labels existed before.
        peak_bytes = max(peak_bytes, peak.num_bytes + noisy.nbytes + labels.nbytes)
        if step % max(1, arguments.steps // 10) == 0 or step == arguments.steps - 1:
            print(f"step {step + 1} of {arguments.steps}: loss {loss.item():.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    seconds = time.perf_counter() - started

    with torch.no_grad():
        scores = sft.compile(model.eval(), brain.volume, budget=budget_bytes)(_noisy(brain, arguments.noise))
    predicted = scores.argmax(1)
    halves = {"left, trained on": brain.left, "right, never seen in the loss": brain.right}
    lines = [
        "# A brain in one piece",
        "",
        f"SegResNet of width {arguments.width} with group norms, {arguments.steps} steps on {shape} voxels ({arguments.every} mm apart), "
        "soft Dice and cross-entropy.",
        f"Plain PyTorch would need {format_bytes(plain_bytes)}, projected. Budget: {format_bytes(budget_bytes)}; planned "
        f"{format_bytes(net.plan.total_bytes)}; measured {format_bytes(peak_bytes)} above the parameters and the optimizer's state.",
        f"FLOPs of a step: {net.plan.flops / net.plan.plain_flops:.2f} times plain's. {seconds / arguments.steps:.1f} s a step.",
        "",
        "| Dice | " + " | ".join(TISSUES) + " |",
        "| --- |" + " --- |" * len(TISSUES),
        *(f"| {name} | " + " | ".join(f"{value:.3f}" for value in dice(predicted, labels)) + " |" for name, labels in halves.items()),
        "",
        f"`python examples/volume/main.py {_options(arguments)}`; {platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}.",
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    torch.save(model.state_dict(), arguments.out / "weights.pt")
    print("\n".join(lines))


def class_weights(labels: Tensor) -> Tensor:
    """Weights that balance rare classes: one over a class's share and the number of classes; one for an absent class."""
    counts = torch.stack([(labels == number).sum() for number in range(len(TISSUES))])
    return torch.where(counts > 0, counts.sum() / (len(TISSUES) * counts.clamp(min=1)), 1.0)


def dice(predicted: Tensor, labels: Tensor) -> list[float]:
    """The Dice coefficient of each tissue, of the voxels that have a label; nan for an absent one."""
    counted = labels != IGNORED_LABEL
    coefficients = []
    for number in range(len(TISSUES)):
        guess, true = (predicted == number) & counted, labels == number
        total = int(guess.sum() + true.sum())
        coefficients.append(2 * int((guess & true).sum()) / total if total else float("nan"))
    return coefficients


def _noisy(brain: Brain, deviation: float) -> Tensor:
    return brain.volume + deviation * torch.randn_like(brain.volume)


def _options(arguments: argparse.Namespace) -> str:
    return " ".join(f"--{name} {value}" for name, value in vars(arguments).items() if name != "out" and value is not None)


if __name__ == "__main__":
    sys.exit(main())
