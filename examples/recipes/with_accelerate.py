"""A loop with Hugging Face Accelerate around a compiled model: accumulation, clipping, mixed precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn


def train(accelerator: Accelerator, net: nn.Module, batches: Iterable[Any], num_epochs: int = 1) -> nn.Module:
    """Train, and return the model without Accelerate's wrappers.

    Args:
        accelerator: precision, devices and number of batches of a step.
        net: result of ``sft.compile``.
        batches: pairs of images and targets, a ``DataLoader`` as a rule.
        num_epochs: passes over the batches.
    """
    # [recipe]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer, batches = accelerator.prepare(net, optimizer, batches)
    for _ in range(num_epochs):
        for image, target in batches:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(image), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    trained: nn.Module = accelerator.unwrap_model(net)
    # [end]
    return trained
