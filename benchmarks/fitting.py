"""Time of a training step that also fits in memory with plain PyTorch: the plan is the untiled model, norms train.

Each network of torchvision takes its steps in float32 in a process of its own, plain and compiled in turns; the budget is ample. The result
is the median of the rounds' ratios. Needs the ``zoo`` extra.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console
from torch import Tensor, nn

import sft
from sft.common.model_zoo import ModelName

#: Names of torchvision, batch and side in pixels.
CASES = (
    ("resnet18", 2, 96),
    ("resnet18", 2, 224),
    ("resnet18", 2, 448),
    ("resnet50", 2, 224),
    ("densenet121", 2, 224),
    ("shufflenet_v2_x1_0", 2, 96),
    ("shufflenet_v2_x1_0", 2, 224),
    ("shufflenet_v2_x1_0", 2, 448),
    ("mobilenet_v2", 2, 224),
    ("vgg16_bn", 2, 224),
)
_NUM_WARMUPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Arguments of one measuring process."""

    network: str
    batch: int
    side: int
    rounds: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of each round, and the plan."""

    question: Question
    plain_seconds: tuple[float, ...]
    own_seconds: tuple[float, ...]
    segments: tuple[str, ...]

    @property
    def ratios(self) -> list[float]:
        """Ratio of both times in each round."""
        return [own / plain for own, plain in zip(self.own_seconds, self.plain_seconds, strict=True)]

    def cells(self) -> list[str]:
        """The row of the table."""
        plain, own = statistics.median(self.plain_seconds), statistics.median(self.own_seconds)
        ratios = self.ratios
        scatter = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        where = f"{self.question.batch} x {self.question.side}²"
        plan = ", ".join(f"{count} {mode}" for mode, count in Counter(self.segments).items())
        return [self.question.network, where, f"{1000 * plain:.0f}", f"{1000 * own:.0f}", scatter, plan]


def _seconds(model: nn.Module, x: Tensor) -> float:
    """One step without an optimizer."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    started = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - started


def answer(question: Question) -> Measured:
    """The steps of one network; call it in a process of its own."""
    torch.set_num_threads(question.threads)
    torch.manual_seed(0)
    name = ModelName(text=f"torchvision:{question.network}", place="network", options_place="answer")
    plain = name.factory().make({}).train()
    x = torch.randn(question.batch, 3, question.side, question.side)
    net: Any = sft.compile(copy.deepcopy(plain), tuple(x.shape), budget="1TiB")
    rounds = [(_seconds(plain, x), _seconds(net, x)) for _ in range(_NUM_WARMUPS + question.rounds)][_NUM_WARMUPS:]
    return Measured(
        question=question,
        plain_seconds=tuple(plain for plain, _ in rounds),
        own_seconds=tuple(own for _, own in rounds),
        segments=tuple(segment.mode for segment in net.plan.segments),
    )


def main() -> int:
    """Run the benchmark; 1 when a network fails."""
    parser = argparse.ArgumentParser(description="Time of a step where plain PyTorch fits.")
    parser.add_argument("--rounds", type=positive_int, default=15, help=f"rounds that count, after {_NUM_WARMUPS} warm-up")
    add_common_arguments(parser)
    args = parser.parse_args()
    console = Console()
    measurements: list[Measured] = []
    for network, batch, side in CASES:
        question = Question(network=network, batch=batch, side=side, rounds=args.rounds, threads=args.threads)
        try:
            measurements.append(call_in_process(answer, question))
        except WorkerError as error:
            console.print(f"{network}: {error.kind}: {error}", markup=False)
            return 1
        console.print(*measurements[-1].cells(), markup=False)
    headers = ("network", "images", "plain, ms", "compiled, ms", "ratio, median [least, most]", "plan")
    table = Table(title="A training step where plain PyTorch fits", headers=headers, rows=[each.cells() for each in measurements])
    raw = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "results": [asdict(each) for each in measurements],
    }
    notes = "Float32, norms in training, no optimizer; plain and compiled steps take turns in one process for each row."
    written = write_results(result_stem(args.out, "fitting"), raw, [table], notes, None)
    console.print(table.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
