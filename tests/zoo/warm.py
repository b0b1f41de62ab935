"""Imports and state that all cases share: loaded once by the server that forks a process for each case.

Importing torch, the three packages and the exporter takes longer than many a case. Nothing here computes on more than one thread: a
fork would inherit the locks of the others.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import nn

import sft
from sft.common.model_zoo import import_library

__all__ = ["warm_up"]

_MODULES = ("torchvision", "timm", "monai.networks.nets", "tests.helpers.exactness", "tests.zoo.models")


def warm_up() -> None:
    """Import what the cases need, and capture a first model."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(), contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        warnings.simplefilter("ignore")
        for module in _MODULES:
            import_library(module)
    layers = (nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    sft.compile(nn.Sequential(*layers), (2, 3, 32, 32), options=sft.Options(tile=(8, None)))
