"""The task of the demo: one slide, one label, a ResNet-18. Plain PyTorch and sft both start from exactly this.

A randomly initialised network with the default running statistics (mean 0, variance 1) does not normalise anything: its
activations grow from block to block.  So the statistics are measured once, on four crops of the slide, and then frozen,
as is usual in slide training (batches of one slide have no useful statistics). Everything else trains.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sft.sources import Image, load_tensor

# The examples are not an installed package: this path makes examples/models.py importable from any folder.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from examples.models import PooledClassifier, freeze_norm, resnet18

__all__ = ["LABEL", "MEAN", "NUM_CROPS", "STD", "StepResult", "build_model", "load_image", "tensor_bytes"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as most published weights expect them
LABEL = 1
NUM_CLASSES = 2
NUM_CROPS = 4
CROP_PX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One forward and backward pass."""

    loss: float
    seconds: float  #: forward and backward, without the optimizer
    peak_bytes: int  #: peak bytes without parameters and buffers; the input counts


def load_image(image: Image) -> Tensor:
    """The whole image at full resolution, ``[1, 3, height, width]`` in float32."""
    return load_tensor(image, mean=MEAN, std=STD)


def build_model(image: Tensor, seed: int) -> PooledClassifier:
    """A two-class ResNet-18 with frozen norm statistics, the same for the same image and seed."""
    torch.manual_seed(seed)
    model = resnet18(NUM_CLASSES)
    _calibrate_norms(model, image)
    return freeze_norm(model).train()


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def _calibrate_norms(model: nn.Module, image: Tensor) -> None:
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over the crops
    model.train()
    height_px, width_px = image.shape[2:]
    for index in range(NUM_CROPS):  # centred on the quarter points: spread out, and the same at every run
        top = max(0, height_px * (1 + 2 * (index // 2)) // 4 - CROP_PX // 2)
        left = max(0, width_px * (1 + 2 * (index % 2)) // 4 - CROP_PX // 2)
        model(image[:, :, top : top + CROP_PX, left : left + CROP_PX])
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
