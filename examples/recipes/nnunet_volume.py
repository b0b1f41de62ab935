"""nnU-Net's network on a whole volume: a training step with deep supervision, without patches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.recipes.script import Comparison, drawn_volume, gradient_difference, measured, positive, recipe_parser, run


# [recipe]
class DeepSupervision(nn.Module):
    """A network of nnU-Net and its loss at every resolution: Dice and cross-entropy, weighted with 1, 1/2, 1/4, ...

    Args:
        network: a ``PlainConvUNet`` or ``ResidualEncoderUNet`` with ``deep_supervision=True``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.dice, self.entropy = sft.nn.DiceLoss(batch=True, include_background=False), nn.CrossEntropyLoss()

    def forward(self, volume: Tensor, *labels: Tensor) -> Tensor:
        """The loss of a volume ``[N, C, D, H, W]`` and labels ``[N, d, h, w]`` of each output, the finest first."""
        losses = [
            self.dice(scores, target) + self.entropy(scores, target) for scores, target in zip(self.network(volume), labels, strict=True)
        ]
        weights = [0.5**level for level in range(len(losses))]
        weighted = [weight / sum(weights) * loss for weight, loss in zip(weights, losses, strict=True)]
        return torch.stack(weighted).sum()


def compiled_step(network: nn.Module, volume: Tensor, labels: Sequence[Tensor], budget: str) -> nn.Module:
    """The step inside a budget: ``net(volume, *labels).backward()`` for volumes of any size."""
    net: nn.Module = sft.compile(DeepSupervision(network), [volume, *labels], budget=budget)
    return net
    # [end]


def make_network(kind: str, num_classes: int) -> nn.Module:
    """A small network of dynamic_network_architectures with random weights."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet

    widths = [8, 16, 32]
    per_stage, per_decoder = ([2, 2, 2], [2, 2]) if kind == "plain" else ([1, 2, 2], [1, 1])
    network: nn.Module = (PlainConvUNet if kind == "plain" else ResidualEncoderUNet)(
        1,
        len(widths),
        widths,
        nn.Conv3d,
        3,
        [1, 2, 2],
        per_stage,
        num_classes,
        per_decoder,
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )
    return network


def main(argv: Sequence[str] | None = None) -> Comparison:
    """A training step with plain PyTorch and with sft."""
    parser = recipe_parser(__doc__, height=64, width=64, budget="128MiB")
    parser.add_argument("--depth", type=positive, default=128, metavar="PX", help="depth of the drawn volume")
    parser.add_argument("--network", choices=("plain", "residual"), default="residual", help="PlainConvUNet or ResidualEncoderUNet")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    network = make_network(options.network, num_classes=3)
    plain = copy.deepcopy(network)
    volume, finest = drawn_volume(options.depth, options.height, options.width)
    labels = [finest[:, ::stride, ::stride, ::stride].contiguous() for stride in (1, 2)]
    net = compiled_step(network, volume, labels, options.budget)
    _, plain_bytes = measured(lambda: DeepSupervision(plain)(volume, *labels).backward())
    _, sft_bytes = measured(lambda: net(volume, *labels).backward())
    return Comparison(
        plain_bytes=plain_bytes,
        sft_bytes=sft_bytes,
        budget=options.budget,
        difference=gradient_difference(network, plain),
        measure="relative difference of the gradients",
    )


if __name__ == "__main__":
    sys.exit(run(main))
