"""BatchNorm where a batch is one slide.

A slide has no batch statistics to speak of, so they are frozen, the custom in slide training: those that pretrained weights bring, or, for
weights that bring none, statistics measured once on crops of the training slides ("calibrated"; Wu and Johnson, "Rethinking Batch", 2021).
Scales and shifts train in either case. Frozen norms also are no barrier to streaming. With ``train`` the statistics are those of each
whole slide, exactly; every such norm then keeps its input.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["calibrate_batch_norms", "set_training"]


def set_training(model: nn.Module, *, training: bool, freeze_norms: bool) -> None:
    """``model.train(training)``, with BatchNorms in eval mode where their statistics are frozen."""
    model.train(training)
    if freeze_norms:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()


def calibrate_batch_norms(network: nn.Module, crops: Iterable[Tensor]) -> int:
    """Set the statistics of all BatchNorms to the averages over crops.

    Args:
        network: what the crops go through, whole: keep them small.
        crops: ``[N, 3, h, w]`` each, wherever they are.

    Returns:
        How many norms there are.
    """
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    flags = [(module, module.training) for module in network.modules()]
    momenta = [norm.momentum for norm in norms]
    network.eval()
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average
            norm.train()
        if norms:
            device = next(norm.running_mean.device for norm in norms if norm.running_mean is not None)
            with torch.no_grad():
                for crop in crops:
                    network(crop.to(device))
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, flag in flags:
            module.training = flag
    return len(norms)
