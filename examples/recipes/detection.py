"""Detection at native resolution: backbone and head of RetinaNet or FCOS in strips; anchors, losses and boxes by torchvision."""

from __future__ import annotations

import copy
import functools
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
class LevelMaps(nn.Module):
    """Backbone and head as maps: scores, boxes and, in FCOS, centreness of each level of the pyramid."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.body, self.fpn = detector.backbone.body, detector.backbone.fpn
        self.scores, self.boxes = detector.head.classification_head, detector.head.regression_head

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """One tensor ``[N, channels, h, w]`` for each level."""
        maps = {}
        for name, feature in self.fpn(self.body(image)).items():
            near_boxes = self.boxes.conv(feature)
            level = [self.scores.cls_logits(self.scores.conv(feature)), self.boxes.bbox_reg(near_boxes)]
            if hasattr(self.boxes, "bbox_ctrness"):
                level[1:] = [level[1].relu(), self.boxes.bbox_ctrness(near_boxes)]
            maps[name] = torch.cat(level, 1)
        return maps


def head_outputs(num_anchors: int, sizes: dict[str, int], levels: list[Tensor]) -> dict[str, Tensor]:
    """Outputs of torchvision's head, ``[N, anchors, values]`` each, from the maps."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in sizes}
    for level in levels:
        for name, values in zip(sizes, level.split([num_anchors * size for size in sizes.values()], 1), strict=True):
            outputs[name].append(values.unflatten(1, (num_anchors, -1)).permute(0, 3, 4, 1, 2).flatten(1, 3))
    return {name: torch.cat(values, 1) for name, values in outputs.items()}


def at_native_resolution(detector: Any, budget: str) -> nn.Module:
    """Run backbone and head in strips, on images of any size without a resize; returns the compiled part."""
    scores, boxes = detector.head.classification_head, detector.head.regression_head
    sizes = {"cls_logits": scores.num_classes, "bbox_regression": 4}
    if hasattr(boxes, "bbox_ctrness"):
        sizes["bbox_ctrness"] = 1
    net: nn.Module = sft.compile(LevelMaps(detector), (1, 3, None, None), budget=budget)
    detector.transform.resize = lambda image, target=None: (image, target)
    detector.backbone.forward = net.__call__
    detector.head.forward = functools.partial(head_outputs, boxes.bbox_reg.out_channels // 4, sizes)
    return net
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
    at_native_resolution(detector, options.budget)
    plain.transform.resize = detector.transform.resize
    image = torch.rand(3, options.height, options.width)
    target = {"boxes": torch.tensor([[20.0, 30.0, 60.0, 80.0]]), "labels": torch.tensor([1])}
    _, plain_bytes = measured(lambda: step(plain, image, target))
    _, sft_bytes = measured(lambda: step(detector, image, target))
    return Comparison(
        plain_bytes=plain_bytes,
        sft_bytes=sft_bytes,
        budget=f"{options.budget} for backbone and head",
        difference=gradient_difference(detector, plain),
        measure="relative difference of the gradients",
    )


if __name__ == "__main__":
    sys.exit(run(main))
