"""Depth and parameters beyond a device's memory: training steps of very deep ResNets, and of a GPT with parameters that exceed the budget.

The ResNets of all depths run under one budget. Checks: the metered bytes equal the projected ones and are within the budget; the number of
forwards is Griewank and Walther's closed form; a short ResNet has the bits of plain PyTorch. The GPT has many times the parameters that its
budget could hold; its first steps are compared with plain PyTorch's from the same weights.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sft

# The examples are not an installed package.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from examples.deep_gpt.network import deep_gpt, sums
from examples.deep_resnet.network import deep_resnet, num_blocks_of, stripes
from sft.nn import Repeat
from sft.solvers.simple import num_advances


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Measured step of a ResNet.

    Attributes:
        layers: its depth.
        slots: activations that are stored at once.
        forwards: of blocks, in the step.
        closed_form: forwards by Griewank and Walther's formula.
        projected_bytes: of the repeated blocks, before the step ran.
        step_bytes: metered in the whole step, with the first layer, the classifier, the loss and the update of these.
        store_bytes: weights, state and running statistics in the host's memory, two generations of each.
        build_seconds: making the model.
        plan_seconds: tracing a block and planning.
        step_seconds: forward, backward and update.
        step_cpu_seconds: of these the time on a processor, which other programs do not change much.
    """

    layers: int
    slots: int
    forwards: int
    closed_form: int
    projected_bytes: int
    step_bytes: int
    store_bytes: int
    build_seconds: float
    plan_seconds: float
    step_seconds: float
    step_cpu_seconds: float

    @property
    def is_right(self) -> bool:
        """True if counts and bytes are as required; the layers around the blocks take far less than 64 KiB."""
        return self.forwards == self.closed_form and self.projected_bytes <= self.step_bytes <= self.projected_bytes + 2**16

    def cells(self) -> list[str]:
        """The row of the table."""
        num_blocks = num_blocks_of(self.layers)
        return [
            f"{self.layers:,}",
            f"{self.slots}",
            f"{self.forwards:,}",
            f"{self.forwards / num_blocks:.3f}",
            f"{self.projected_bytes:,}",
            f"{self.step_bytes:,}",
            sft.format_bytes(self.store_bytes),
            f"{self.step_cpu_seconds:.1f}",
            f"{1e6 * self.step_cpu_seconds / (self.forwards + 2 * num_blocks):.0f}",
        ]


DEPTH_HEADERS = (
    "layers",
    "slots",
    "forwards of blocks",
    "per block",
    "projected, blocks [B]",
    "metered, step [B]",
    "host",
    "step, CPU [s]",
    "CPU / (forwards + 2 backwards) [µs]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wide:
    """Measured steps of a GPT with parameters that exceed the budget.

    Attributes:
        blocks: its depth.
        parameter_bytes: of its blocks.
        budget_bytes: for its blocks on the device: activations, windows of weights and state.
        step_bytes: metered in a whole step.
        same_losses: true if the losses are those of plain PyTorch, bit for bit.
        same_weights: true if the weights are, after the last step.
        losses: of the steps.
        step_seconds: the mean of the steps, on a processor.
        plain_seconds: the same of plain PyTorch, everything in memory.
    """

    blocks: int
    parameter_bytes: int
    budget_bytes: int
    step_bytes: int
    same_losses: bool
    same_weights: bool
    losses: list[float]
    step_seconds: float
    plain_seconds: float

    def cells(self) -> list[str]:
        """The row of the table."""
        return [
            f"{self.blocks}",
            sft.format_bytes(self.parameter_bytes),
            sft.format_bytes(self.budget_bytes),
            f"{self.parameter_bytes / self.budget_bytes:.1f}",
            sft.format_bytes(self.step_bytes),
            "yes" if self.same_losses else "no",
            "yes" if self.same_weights else "no",
            f"{self.step_seconds:.2f}",
            f"{self.plain_seconds:.2f}",
        ]


WIDE_HEADERS = (
    "blocks",
    "parameters of blocks",
    "budget of blocks",
    "ratio",
    "metered, step",
    "losses as plain",
    "weights as plain",
    "step, CPU [s]",
    "plain, CPU [s]",
)


def measure_depth(layers: int, args: argparse.Namespace) -> Depth:
    """One training step."""
    started = time.perf_counter()
    torch.manual_seed(0)
    model = deep_resnet(layers, width=args.width, budget=args.budget, window=args.window)
    optimizer = sft.StreamedOptimizer(model, "sgd", lr=1e-3, momentum=0.9)
    built = time.perf_counter()
    images, labels = stripes(args.batch, args.size, seed=1)
    blocks = model[1]
    assert isinstance(blocks, Repeat) and blocks.streamed is not None
    executed = 0

    def count(operation: str) -> None:
        nonlocal executed
        executed += operation[0] == "F"

    plan = blocks.plan_for(model[0](images))
    blocks.trace = count
    planned, on_cpu = time.perf_counter(), time.process_time()
    with sft.measure_peak() as peak:
        loss = cross_entropy(model[2](blocks(model[0](images))), labels)
        loss.backward()
        optimizer.step()
    seconds, on_cpu = time.perf_counter() - planned, time.process_time() - on_cpu
    layouts = blocks.streamed.store.layouts
    return Depth(
        layers=layers,
        slots=plan.slots,
        forwards=executed,
        closed_form=num_advances(plan.num_blocks, plan.slots) + plan.num_blocks,
        projected_bytes=plan.projected_peak_bytes,
        step_bytes=peak.num_bytes,
        store_bytes=2 * sum(layout.record_bytes for layout in layouts) + 2 * sum(b.numel() * b.element_size() for b in blocks.buffers()),
        build_seconds=built - started,
        plan_seconds=planned - built,
        step_seconds=seconds,
        step_cpu_seconds=on_cpu,
    )


def check_bits(args: argparse.Namespace) -> bool:
    """True if two steps of a short ResNet equal those of plain PyTorch."""
    torch.manual_seed(0)
    model = deep_resnet(62, width=args.width, budget=args.budget)
    blocks = model[1]
    assert isinstance(blocks, Repeat)
    plain = nn.Sequential(model[0], blocks.unstacked(), model[2])
    plain = copy.deepcopy(plain)
    blocks.stream(args.window)
    ours = sft.StreamedOptimizer(model, "sgd", lr=1e-3, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9, foreach=False)
    return _same_steps(model, plain, ours, theirs, [stripes(args.batch, args.size, seed=seed) for seed in range(2)])[0]


def _same_steps(
    model: nn.Sequential,
    plain: nn.Sequential,
    ours: torch.optim.Optimizer,
    theirs: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
) -> tuple[bool, bool, list[float], int, float, float]:
    """Equality of losses and weights, the losses, the metered peak, and the seconds of a step of both."""
    same, losses, peak_bytes, seconds = True, [], 0, [0.0, 0.0]
    for values, labels in batches:
        started = time.process_time()
        with sft.measure_peak() as peak:
            loss = cross_entropy(model(values).flatten(0, -2), labels.flatten())
            loss.backward()
            ours.step()
        middle = time.process_time()
        expected = cross_entropy(plain(values).flatten(0, -2), labels.flatten())
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        same = same and torch.equal(loss, expected)
        losses.append(loss.item())
        peak_bytes = max(peak_bytes, peak.num_bytes)
        seconds = [seconds[0] + middle - started, seconds[1] + time.process_time() - middle]
        del loss, expected
    blocks, others = model[1], plain[1]
    assert isinstance(blocks, Repeat) and isinstance(others, nn.Sequential)
    same_weights = all(
        torch.equal(blocks.block.get_parameter(name)[number], param)
        for number, block in enumerate(others)
        for name, param in block.named_parameters()
    )
    return same, same_weights, losses, peak_bytes, seconds[0] / len(batches), seconds[1] / len(batches)


def measure_wide(args: argparse.Namespace) -> Wide:
    """A few steps of a GPT, and the same in plain PyTorch."""
    torch.manual_seed(0)
    model = deep_gpt(args.gpt_blocks, width=args.gpt_width)
    blocks = model[1]
    assert isinstance(blocks, Repeat)
    plain = copy.deepcopy(nn.Sequential(model[0], blocks.unstacked(), model[2]))
    parameter_bytes = sum(p.numel() * p.element_size() for p in blocks.parameters())
    blocks.budget_bytes = parameter_bytes // 20
    blocks.stream(parameter_bytes // args.gpt_blocks + 64)
    ours = sft.StreamedOptimizer(model, "adamw", lr=1e-3, window=2 * (parameter_bytes // args.gpt_blocks + 64))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=False)
    batches = [sums(1, seed=seed) for seed in range(args.gpt_steps)]
    same, same_weights, losses, peak_bytes, seconds, plain_seconds = _same_steps(model, plain, ours, theirs, batches)
    return Wide(
        blocks=args.gpt_blocks,
        parameter_bytes=parameter_bytes,
        budget_bytes=blocks.budget_bytes,
        step_bytes=peak_bytes,
        same_losses=same,
        same_weights=same_weights,
        losses=losses,
        step_seconds=seconds,
        plain_seconds=plain_seconds,
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", nargs="*", type=positive_int, default=[1_001, 10_001, 100_001], help="depths of ResNets: 3 n + 2")
    parser.add_argument("--width", type=positive_int, default=4, help="their channels")
    parser.add_argument("--size", type=positive_int, default=4, help="side of their images in px")
    parser.add_argument("--batch", type=positive_int, default=2, help="images of a step")
    parser.add_argument("--budget", default="64KiB", help="bytes on the device for their blocks")
    parser.add_argument("--window", default="4KiB", help="bytes of these for streamed weights")
    parser.add_argument("--gpt-blocks", type=positive_int, default=192, help="depth of the GPT")
    parser.add_argument("--gpt-width", type=positive_int, default=32, help="its width")
    parser.add_argument("--gpt-steps", type=positive_int, default=3, help="its steps")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 if a count, a peak or a result is wrong."""
    args = parse_arguments()
    console = Console()
    torch.set_num_threads(args.threads)
    if not check_bits(args):
        console.print("a short ResNet does not train to the bits of plain PyTorch; nothing is reported")
        return 1
    wide = measure_wide(args)
    depths: list[Depth] = []
    report(args, wide, depths, console)
    for layers in args.layers:  # the longest case takes most of the time, so earlier results are saved first
        depths.append(measure_depth(layers, args))
        report(args, wide, depths, console)
    is_exact = wide.same_losses and wide.same_weights and wide.step_bytes <= wide.budget_bytes + 2**20
    return int(not (is_exact and all(depth.is_right for depth in depths)))


def report(args: argparse.Namespace, wide: Wide, depths: list[Depth], console: Console) -> None:
    """Write the results so far."""
    stem = result_stem(args.out, "deep")
    title = f"ResNets, {args.width} channels, {args.batch} images of {args.size} x {args.size} px, {args.budget} for the blocks, float32"
    tables = [
        Table(title=title, headers=DEPTH_HEADERS, rows=[depth.cells() for depth in depths]),
        Table(title=f"GPT, width {args.gpt_width}, AdamW, float32", headers=WIDE_HEADERS, rows=[wide.cells()]),
    ]
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "depths": [asdict(depth) for depth in depths],
        "gpt": asdict(wide),
    }
    notes = (
        "Metered: live tensor storages above the step's start that operators made; weights, state and running statistics are in the host's "
        "memory, pass through windows that are metered, and gradients are used up block by block. Forwards are counted while they run, and "
        "are num_advances(n, slots) + n (Griewank and Walther). Seconds are CPU time of one thread, with the metering, which costs a "
        "Python call for each operator."
    )
    written = write_results(stem, raw, tables, notes, None)
    for table in tables:
        console.print(table.terminal())
    console.print(written)


if __name__ == "__main__":
    raise SystemExit(main())
