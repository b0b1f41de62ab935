"""Train a ResNet of thousands of layers inside a fixed number of bytes.

python examples/deep_resnet/main.py --layers 1001 --budget 64KiB
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

# The examples are not an installed package: this path makes the others importable from any folder.
sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.deep_resnet.network import deep_resnet, stripes
from examples.deep_training import guarded, train
from sft.nn import Repeat


def main(arguments: list[str] | None = None) -> int:
    """Train; returns the exit status."""
    chosen = parse_arguments(arguments)
    return guarded(lambda: run(chosen))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=1001, help="number of layers: 3 n + 2")
    parser.add_argument("--width", type=int, default=4, help="channels")
    parser.add_argument("--size", type=int, default=4, help="side of the images in px")
    parser.add_argument("--batch", type=int, default=8, help="images of a step")
    parser.add_argument("--budget", default="64KiB", help="bytes on the device for all blocks: activations, weights, gradients, state")
    parser.add_argument("--window", default="4KiB", help="bytes of these for streamed weights")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and images")
    parser.add_argument("--device", default="cpu", help="where to train")
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Train with parsed arguments."""
    torch.manual_seed(arguments.seed)
    model = deep_resnet(arguments.layers, width=arguments.width, budget=arguments.budget).to(arguments.device)
    blocks = model[1]
    assert isinstance(blocks, Repeat)
    blocks.stream(arguments.window)
    optimizer = sft.StreamedOptimizer(model, "sgd", lr=arguments.lr, momentum=0.9)
    batches = (stripes(arguments.batch, arguments.size, seed=arguments.seed + step) for step in range(arguments.steps))
    train(model, optimizer, batches, arguments.device)


if __name__ == "__main__":
    sys.exit(main())
