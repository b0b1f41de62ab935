"""Bags of tiles: an encoder of tiles, and heads that pool the vectors of all tiles of a slide.

Tiles may be shared among ranks. A share of the tiles has a *summary*, one row of numbers: its pooled features, and the weight with which
they count. Attention over all tiles is attention within each share, and between the shares by the logarithm of their sums of
exponentials::

    softmax(s) v  =  sum_r  exp(L_r) / (sum_q exp(L_q))  z_r,      L_r = logsumexp(s_r),   z_r = softmax(s_r) v_r

So ranks exchange one row for each slide, whatever the number of tiles, and each rank differentiates its own row.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sft.wsi.model.heads import SlideModel

__all__ = ["AttentionBagHead", "BagEvidence", "BagHead", "BagModel", "BagSummary", "MaximumBagHead", "MeanBagHead", "build_bag_model"]


class BagHead(nn.Module):
    """Pooling over the tiles of a slide, and a linear layer.

    Args:
        num_features: length of the vector of a tile.
        num_outputs: number of outputs.
        dropout: probability, before the linear layer. Default: 0
    """

    def __init__(self, num_features: int, num_outputs: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(num_features, num_outputs)

    def forward(self, vectors: Tensor) -> Tensor:
        """Map the vectors of all tiles ``[N, D]`` to ``[1, K]``."""
        return self.classify(self.merge(self.summary(vectors)))

    def classify(self, pooled: Tensor, *, is_constant: bool = False) -> Tensor:
        """Map pooled features ``[1, D]`` to ``[1, K]``; ``is_constant`` if the linear layer gets no gradient."""
        dropped = self.dropout(pooled)
        if not is_constant:
            scores: Tensor = self.classifier(dropped)
            return scores
        return F.linear(dropped, self.classifier.weight.detach(), self.classifier.bias.detach())

    @abstractmethod
    def summary(self, vectors: Tensor) -> Tensor:
        """Map the vectors of a share of the tiles ``[n, D]`` to its summary ``[1, S]``."""

    @abstractmethod
    def merge(self, summaries: Tensor) -> Tensor:
        """Map the summaries of all shares ``[R, S]`` to the pooled features of the slide ``[1, D]``."""

    @abstractmethod
    def weights(self, vectors: Tensor) -> Tensor:
        """Weight of each tile in the pooled features, ``[N, 1]``, or in each of them, ``[N, D]``; weights sum to 1 over the tiles."""


class _WeightedBagHead(BagHead):
    """Pooling by a softmax over scores of the tiles."""

    def summary(self, vectors: Tensor) -> Tensor:
        """Map ``[n, D]`` to ``[1, D + 1]``: the pooled features, and the logarithm of the sum of exponentials of the scores."""
        scores = self._scores(vectors)
        pooled = (scores.softmax(0) * vectors).sum(0, keepdim=True)
        return torch.cat([pooled, scores.logsumexp(0, keepdim=True)], 1)

    def merge(self, summaries: Tensor) -> Tensor:
        """Map ``[R, D + 1]`` to ``[1, D]``."""
        return (summaries[:, -1:].softmax(0) * summaries[:, :-1]).sum(0, keepdim=True)

    def weights(self, vectors: Tensor) -> Tensor:
        """Share of each tile in the pooled features, ``[N, 1]``."""
        return self._scores(vectors).softmax(0)

    @abstractmethod
    def _scores(self, vectors: Tensor) -> Tensor:
        """Map ``[n, D]`` to ``[n, 1]``."""


class MeanBagHead(_WeightedBagHead):
    """Average over tiles: all have the same score."""

    def _scores(self, vectors: Tensor) -> Tensor:
        return torch.zeros_like(vectors[:, :1])


class AttentionBagHead(_WeightedBagHead):
    """Gated attention over tiles (Ilse, Tomczak and Welling, 2018, equation 9).

    Args:
        num_features, num_outputs, dropout: as of `BagHead`.
        hidden: hidden units of the attention. Default: 128
    """

    def __init__(self, num_features: int, num_outputs: int, *, hidden: int = 128, dropout: float = 0.0) -> None:
        super().__init__(num_features, num_outputs, dropout=dropout)
        self.value = nn.Linear(num_features, hidden)
        self.gate = nn.Linear(num_features, hidden)
        self.score = nn.Linear(hidden, 1)

    def _scores(self, vectors: Tensor) -> Tensor:
        scores: Tensor = self.score(torch.tanh(self.value(vectors)) * torch.sigmoid(self.gate(vectors)))
        return scores.to(vectors.dtype)


class MaximumBagHead(BagHead):
    """Maximum of each feature over tiles; ties share the gradient evenly."""

    def summary(self, vectors: Tensor) -> Tensor:
        """Map ``[n, D]`` to ``[1, 2 D]``: the maxima, and how many tiles have them."""
        highest = vectors.amax(0, keepdim=True)
        ties = (vectors == highest).to(vectors.dtype).sum(0, keepdim=True)
        return torch.cat([highest, ties], 1)

    def merge(self, summaries: Tensor) -> Tensor:
        """Map ``[R, 2 D]`` to ``[1, D]``."""
        highest, ties = summaries.chunk(2, 1)
        counts = torch.where(highest == highest.amax(0, keepdim=True), ties, 0).detach()
        return (counts / counts.sum(0, keepdim=True) * highest).sum(0, keepdim=True)

    def weights(self, vectors: Tensor) -> Tensor:
        """Weight of each tile in each pooled feature, ``[N, D]``: that of the maximum, shared between ties."""
        highest = (vectors == vectors.amax(0, keepdim=True)).to(vectors.dtype)
        return highest / highest.sum(0, keepdim=True)


class BagModel(SlideModel):
    """Encoder of tiles, and head over the tiles of a slide.

    Args:
        backbone: maps tiles ``[N, 3, h, w]`` to vectors ``[N, D]``, or to feature maps ``[N, D, h, w]``, which are averaged.
        head: pooling over tiles.
    """

    head: BagHead  # type: ignore[assignment]  # heads of feature maps are not heads of vectors

    def __init__(self, backbone: nn.Module, head: BagHead) -> None:
        nn.Module.__init__(self)
        self.backbone = backbone
        self.head = head

    def forward(self, image: Tensor) -> Tensor:
        """Map the tiles of a slide ``[N, 3, h, w]`` to ``[1, K]``."""
        scores: Tensor = self.head(self.vectors(image))
        return scores

    def vectors(self, tiles: Tensor) -> Tensor:
        """Map ``[N, 3, h, w]`` to ``[N, D]``, in 32 bits at least: a sum over many tiles is not for fewer."""
        features: Tensor = self.backbone(tiles)
        vectors = features.mean((2, 3)) if features.dim() == 4 else features
        return vectors.to(torch.promote_types(vectors.dtype, self.head.classifier.weight.dtype))


class BagSummary(nn.Module):
    """Summary of a share of the tiles of a slide: the part of a model that each rank computes of its own tiles.

    Args:
        model: the model.
    """

    def __init__(self, model: BagModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tiles: Tensor) -> Tensor:
        """Map ``[n, 3, h, w]`` to ``[1, S]``."""
        return self.model.head.summary(self.model.vectors(tiles))


class BagEvidence(nn.Module):
    """Output of a model, the contribution of each tile to it, and the weight of each tile.

    Without dropout, ``output = evidence.sum(0) + head.classifier.bias``.

    Args:
        model: the model.
    """

    def __init__(self, model: BagModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map ``[N, 3, h, w]`` to ``[1, K]``, ``[N, K]`` and ``[N, 1]``, the mean weight over features."""
        head = self.model.head
        vectors = self.model.vectors(tiles)
        weights = head.weights(vectors)
        # Shares of many tiles are too small for 16 bits.
        with torch.autocast(tiles.device.type, enabled=False):
            evidence = F.linear(vectors * weights, head.classifier.weight)
        return head(vectors), evidence, weights.mean(1, keepdim=True)


def build_bag_model(
    backbone: nn.Module,
    num_features: int,
    num_outputs: int,
    *,
    head: Literal["gap", "max", "attention"],
    attention_dim: int = 128,
    dropout: float = 0.0,
) -> BagModel:
    """Put a head over tiles on an encoder; its initial weights come from torch's generator."""
    if head == "gap":
        return BagModel(backbone, MeanBagHead(num_features, num_outputs, dropout=dropout))
    if head == "max":
        return BagModel(backbone, MaximumBagHead(num_features, num_outputs, dropout=dropout))
    return BagModel(backbone, AttentionBagHead(num_features, num_outputs, hidden=attention_dim, dropout=dropout))
