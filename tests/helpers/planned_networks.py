"""Small networks with options that force each kind of plan: strips, tiles, untiled stages, states, offload, streamed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.helpers.models import Branches, ConvNet, Residual, TinyUNet
from tests.helpers.streamed_weights import BatchNormed, Vgg

__all__ = ["PLANNED_NETWORKS"]

#: Network, and options of `sft.Options`.
PLANNED_NETWORKS: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (ConvNet, {"tile": (8, None)}),
    (ConvNet, {"tile": (8, 16), "batch_tile": 1}),
    (ConvNet, {"strategy": "none"}),
    (Residual, {"tile": (16, None), "state_every": 2}),
    (TinyUNet, {"strategy": "sqrt"}),
    (TinyUNet, {"strategy": "offload-dp", "host_budget": "1GiB"}),
    (Branches, {"tile": (6, None)}),
    (BatchNormed, {"tile": (8, None)}),
    (Vgg, {"tile": (8, None)}),
    (Vgg, {"weights": "stream"}),
]
