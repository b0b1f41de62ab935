"""A LightningModule with a compiled model inside; ``Trainer`` adds precision, accumulation, clipping and checkpoints."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch import Tensor, nn


# [recipe]
class Classifier(pl.LightningModule):
    """Classifier that trains ``net``, the result of ``sft.compile``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.net(image)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        image, target = batch
        loss = nn.functional.cross_entropy(self(image), target)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        image, target = batch
        self.log("right", (self(image).argmax(1) == target).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    # [end]
