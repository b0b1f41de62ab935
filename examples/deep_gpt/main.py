"""Train a GPT whose parameters exceed the device budget many times.

python examples/deep_gpt/main.py --blocks 192 --ratio 20
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

# The examples are not an installed package: this path makes the others importable from any folder.
sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.deep_gpt.network import deep_gpt, sums
from examples.deep_training import guarded, train
from sft.nn import Repeat


def main(arguments: list[str] | None = None) -> int:
    """Train; returns the exit status."""
    chosen = parse_arguments(arguments)
    return guarded(lambda: run(chosen))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=192, help="number of blocks")
    parser.add_argument("--width", type=int, default=32, help="of the vectors")
    parser.add_argument("--batch", type=int, default=2, help="lines of a step")
    parser.add_argument("--ratio", type=float, default=20.0, help="parameters of the blocks over the bytes that these get on the device")
    parser.add_argument("--file", type=Path, help="keep the weights and the optimizer's state in this file (default: in the host's memory)")
    parser.add_argument("--resume", action="store_true", help="continue with that file")
    parser.add_argument("--max-norm", type=float, help="clip gradients; they are then added up on the host first")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and lines")
    parser.add_argument("--device", default="cpu", help="where to train")
    chosen = parser.parse_args(arguments)
    for name in ("blocks", "width", "batch", "ratio"):
        if not getattr(chosen, name) > 0:
            parser.error(f"--{name} {getattr(chosen, name)}: give a number above 0")
    if chosen.resume and chosen.file is None:
        parser.error("--resume continues with a file: name it with --file")
    return chosen


def run(arguments: argparse.Namespace) -> None:
    """Train with parsed arguments."""
    torch.manual_seed(arguments.seed)
    model = deep_gpt(arguments.blocks, width=arguments.width).to(arguments.device)
    blocks = model[1]
    assert isinstance(blocks, Repeat)
    parameter_bytes = sum(param.numel() * param.element_size() for param in blocks.parameters())
    blocks.budget_bytes = int(parameter_bytes / arguments.ratio)
    block_bytes = parameter_bytes // arguments.blocks + 64  # a block's record is filled up to whole cache lines
    blocks.stream(block_bytes, path=arguments.file, resume=arguments.resume)
    optimizer = sft.StreamedOptimizer(model, "adamw", lr=arguments.lr, max_norm=arguments.max_norm, window=2 * block_bytes)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    print(
        f"{sft.format_bytes(parameter_bytes)} of parameters in {arguments.blocks} blocks, {sft.format_bytes(blocks.budget_bytes)} for them"
    )
    batches = (sums(arguments.batch, seed=arguments.seed + step) for step in range(arguments.steps))
    train(model, optimizer, batches, arguments.device, scheduler)


if __name__ == "__main__":
    sys.exit(main())
