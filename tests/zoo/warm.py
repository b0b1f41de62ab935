"""What every case needs and none changes: imported once by the process from which each case's own is forked.

Importing torch, the three packages and the exporter takes longer than many a case. Nothing here computes on more than one thread: a
fork would inherit the locks of the others.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings

import torch
from torch import nn

import sft

__all__ = ["warm_up"]

_MODULES = ("torchvision", "timm", "monai.networks.nets", "tests.helpers.exactness", "tests.zoo.models")


def warm_up() -> None:
    """Import what the cases need, and capture a first model."""
    torch.set_num_threads(1)
    _stand_in_for_compiled_operators()
    with warnings.catch_warnings(), contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        warnings.simplefilter("ignore")
        for module in _MODULES:
            importlib.import_module(module)
    layers = (nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    sft.compile(nn.Sequential(*layers), (2, 3, 32, 32), options=sft.Options(tile=(8, None)))


def _stand_in_for_compiled_operators() -> None:
    """torchvision's compiled part is built for one build of torch and does not load with others; then importing the rest fails over the
    names of two operators that no convolutional network calls (pytorch/vision#9085). Declared, they need no code."""
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # a torchvision that fits has them
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
