"""YOLO of ultralytics on images of full size: a training step, and boxes by its own non-maximum suppression."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.recipes.script import Comparison, gradient_difference, measured, recipe_parser, run


# [recipe]
def train_step(yolo: Any, net: Any, batch: dict[str, Tensor]) -> Tensor:
    """Loss of box, class and distribution of a batch, with gradients; ``net`` is the compiled ``yolo``."""
    losses, _ = yolo.loss(batch, net.train()(batch["img"]))
    loss: Tensor = losses.sum()
    loss.backward()
    return loss


def detect(net: Any, image: Tensor, confidence: float = 0.25) -> list[Tensor]:
    """Boxes ``[x1, y1, x2, y2, score, class]`` of each image, in its pixels."""
    from ultralytics.utils.nms import non_max_suppression

    with torch.no_grad():
        boxes: list[Tensor] = non_max_suppression(net.eval()(image), confidence)
    return boxes


def compiled(yolo: Any, budget: str) -> Any:
    """A model of ultralytics, ``YOLO(...).model``, inside a budget, for images of any size that its stride divides."""
    from ultralytics.cfg import get_cfg

    yolo.args = get_cfg()  # weights of the losses, which ultralytics' own trainer sets
    return sft.compile(yolo, (1, 3, None, None), budget=budget)
    # [end]


def main(argv: Sequence[str] | None = None) -> Comparison:
    """A training step and boxes with plain PyTorch and with sft."""
    parser = recipe_parser(__doc__, height=640, width=640, budget="128MiB")
    parser.add_argument("--model", default="yolov8n.yaml", help="configuration of ultralytics, with random weights")
    options = parser.parse_args(argv)
    from ultralytics.nn.tasks import DetectionModel

    torch.manual_seed(0)
    yolo: Any = DetectionModel(options.model, nc=3, verbose=False)
    plain = copy.deepcopy(yolo)
    net = compiled(yolo, options.budget)
    plain.args = yolo.args
    batch = {
        "img": torch.rand(1, 3, options.height, options.width),
        "batch_idx": torch.zeros(1),
        "cls": torch.ones(1, 1),
        "bboxes": torch.tensor([[0.3, 0.4, 0.1, 0.2]]),
    }
    _, plain_bytes = measured(lambda: train_step(plain, plain, batch))
    _, sft_bytes = measured(lambda: train_step(yolo, net, batch))
    print(f"{len(detect(net, batch['img'], 0.001)[0])} boxes")
    return Comparison(
        plain_bytes=plain_bytes,
        sft_bytes=sft_bytes,
        budget=options.budget,
        difference=gradient_difference(yolo, plain),
        measure="relative difference of the gradients",
    )


if __name__ == "__main__":
    sys.exit(run(main))
