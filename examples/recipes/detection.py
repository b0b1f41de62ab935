"""Detection at native resolution: the backbone of RetinaNet or FCOS in strips, anchors, losses and boxes by torchvision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import sft


# [recipe]
def at_native_resolution(detector: Any, height: int, width: int, budget: str) -> Any:
    """Run the backbone of a torchvision detector in strips; images of this size are not resized."""
    detector.transform.min_size, detector.transform.max_size = (min(height, width),), max(height, width)
    detector.backbone = sft.compile(detector.backbone, (1, 3, None, None), budget=budget)
    return detector
    # [end]


def main(height: int = 256, width: int = 320) -> dict[str, Tensor]:
    """A training step of an untrained RetinaNet; the losses."""
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    torch.manual_seed(0)
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    sizes = tuple((size,) for size in (16, 32, 64, 128, 256))
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    detector = at_native_resolution(RetinaNet(backbone, num_classes=3, anchor_generator=anchors), height, width, "512MiB")
    image = torch.rand(3, height, width)
    target = {"boxes": torch.tensor([[20.0, 30.0, 60.0, 80.0]]), "labels": torch.tensor([1])}
    losses: dict[str, Tensor] = detector.train()([image], [target])
    sum(losses.values(), torch.zeros(())).backward()
    return losses


if __name__ == "__main__":
    print(main())
