"""Optimizers, learning-rate schedules, and counter-based seeding: a resumed run needs no state of them.

Learning rates are functions of the step. Every random draw has a generator of its own, keyed by the run's seed and by names and counters
(epoch, slide, purpose). A resumed run draws the same numbers without a count of earlier draws.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import nn

from sft.wsi.config import TrainConfig
from sft.wsi.model.heads import SlideModel
from sft.wsi.model.layers import lr_scales

__all__ = ["counter_seed", "learning_rate", "make_optimizer", "philox_generator"]


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of the parameters that train; vectors (biases, norms) are not decayed.

    With ``layer_decay`` each depth of blocks has groups of its own, whose ``lr_scale`` multiplies the learning rate of a step.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    scales = lr_scales(model, config.layer_decay) if config.layer_decay != 1 and isinstance(model, SlideModel) else {}
    groups: list[dict[str, Any]] = []
    for scale in sorted({scales.get(name, 1.0) for name in named}):
        parameters = [parameter for name, parameter in named.items() if scales.get(name, 1.0) == scale]
        scaled: dict[str, Any] = {"lr_scale": scale, "lr": config.lr * scale} if scales else {}
        groups += [
            {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": config.weight_decay, **scaled},
            {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0, **scaled},
        ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)
    if config.optimizer == "adam":
        return torch.optim.Adam(groups, lr=config.lr)
    return torch.optim.AdamW(groups, lr=config.lr)


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Linear warm-up, then constant or a half cosine (Loshchilov and Hutter, 2017) down to ``min_lr`` times the rate.

    >>> config = TrainConfig(lr=1.0, warmup_steps=2, min_lr=0.1)
    >>> [round(learning_rate(config, step, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232]

    Args:
        config: of the loop.
        step: from 0.
        num_steps: of the whole run.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    share = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def counter_seed(seed: int, *counters: int | str) -> int:
    """A number of 63 bits made of a seed and counters; the same on every machine.

    >>> counter_seed(0, "order", 3) == counter_seed(0, "order", 3), counter_seed(0, "order", 3) == counter_seed(0, "order", 4)
    (True, False)
    """
    digest = hashlib.blake2b(repr((int(seed), *counters)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def philox_generator(seed: int, *counters: int | str) -> np.random.Generator:
    """A counter-based generator (Philox; Salmon et al., 2011) for one purpose at one place."""
    return np.random.Generator(np.random.Philox(counter_seed(seed, *counters)))
