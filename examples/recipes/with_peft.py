"""Low-rank adapters (peft) of an encoder of tiles, trained end to end by labels of slides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn


def adapted(encoder: nn.Module, layers: Sequence[str], rank: int = 8) -> nn.Module:
    """The encoder with frozen weights, and adapters of some linear layers.

    Args:
        encoder: such as a vision transformer of timm.
        layers: names of linear layers, ``("qkv", "proj")`` for those of timm.
        rank: rank of the adapters.
    """
    model: nn.Module = get_peft_model(encoder, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(layers)))
    return model


def train(net: nn.Module, bags: Iterable[tuple[Tensor, Tensor]], num_epochs: int = 1) -> None:
    """Train the adapters and the head.

    Args:
        net: result of ``sft.compile``.
        bags: pairs of tiles ``[N, 3, h, w]``, a `sft.sources.Tiles` or a tensor, and labels ``[1]``.
        num_epochs: passes over the bags.
    """
    # [recipe]
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(num_epochs):
        for tiles, label in bags:
            nn.functional.cross_entropy(net(tiles), label).backward()
            optimizer.step()
            optimizer.zero_grad()
    # [end]
