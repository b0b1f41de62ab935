"""Detection at native resolution: the backbone of RetinaNet or FCOS in strips; anchors, losses and boxes by torchvision."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.recipes.script import Comparison, gradient_difference, import_torchvision, measured, recipe_parser, run


# [recipe]
def unchanged(image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
    """Image and boxes as they are, in place of torchvision's resize to 800 to 1333 px."""
    return image, target


def at_native_resolution(detector: Any, budget: str) -> Any:
    """Run the backbone of a torchvision detector in strips, for images of any size and without a resize."""
    detector.transform.resize = unchanged
    detector.backbone = sft.compile(detector.backbone, (1, 3, None, None), budget=budget)
    return detector
    # [end]


def make_detector(kind: str) -> Any:
    """An untrained detector with a ResNet-18; ``retinanet_resnet50_fpn_v2(weights=...)`` gives one with weights."""
    from torchvision.models.detection import FCOS, RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    if kind == "fcos":
        return FCOS(backbone, 3, anchor_generator=AnchorGenerator(tuple((size,) for size in (8, 16, 32, 64, 128)), ((1.0,),) * 5))
    sizes = tuple((size, int(1.26 * size), int(1.59 * size)) for size in (16, 32, 64, 128, 256))
    return RetinaNet(backbone, 3, anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes)))


def step(detector: nn.Module, image: Tensor, target: dict[str, Tensor]) -> None:
    """Losses of one image, and their gradients."""
    losses = detector.train()([image], [target])
    sum(losses.values(), torch.zeros(())).backward()


def main(argv: Sequence[str] | None = None) -> Comparison:
    """A training step with plain PyTorch and with sft."""
    parser = recipe_parser(__doc__, height=640, width=640, budget="320MiB")
    parser.add_argument("--detector", choices=("retinanet", "fcos"), default="retinanet", help="detector of torchvision")
    options = parser.parse_args(argv)

    import_torchvision()
    torch.manual_seed(0)
    detector = make_detector(options.detector)
    plain = copy.deepcopy(detector)
    plain.transform.resize = unchanged
    at_native_resolution(detector, options.budget)
    image = torch.rand(3, options.height, options.width)
    target = {"boxes": torch.tensor([[20.0, 30.0, 60.0, 80.0]]), "labels": torch.tensor([1])}
    _, plain_bytes = measured(lambda: step(plain, image, target))
    _, sft_bytes = measured(lambda: step(detector, image, target))
    return Comparison(
        plain_bytes=plain_bytes,
        sft_bytes=sft_bytes,
        budget=f"{options.budget} for the backbone",
        difference=gradient_difference(detector, plain),
        measure="relative difference of the gradients",
    )


if __name__ == "__main__":
    sys.exit(run(main))
