"""Heads on a feature map, and the network of backbone and head that a run trains.

All of it streams: a global average, a maximum, and the softmax of the attention over all positions are values that `sft` collects from
strip to strip, so the feature map is never needed whole. All pooled heads weight positions and sum up. The logit of a class is therefore a
sum over positions, plus a bias, and `Evidence` returns the summands: the class-activation map is the decision itself, not an estimate.

BatchNorm where a batch is one slide.

A slide has no batch statistics to speak of, so they are frozen, the custom in slide training: those that pretrained weights bring, or, for
weights that bring none, statistics measured once on crops of the training slides ("calibrated"; Wu and Johnson, "Rethinking Batch", 2021).
Scales and shifts train in either case. Frozen norms also are not a barrier to streaming. With ``train`` the statistics are those of each
whole slide, exactly; every such norm then keeps its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from sft.wsi.model.position_resize import AxisResize, resize_positions

__all__ = [
    "AttentionHead",
    "Evidence",
    "MaximumHead",
    "PooledHead",
    "SegmentationHead",
    "SlideModel",
    "build_model",
    "calibrate_batch_norms",
    "set_training",
]


class PooledHead(nn.Module):
    """Global average pooling and a linear layer."""

    def __init__(self, num_features: int, num_outputs: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(num_features, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[N, C, h, w]`` to ``[N, K]``."""
        scores: Tensor = self.classifier(self.dropout(features.mean((2, 3))))
        return scores

    def weights(self, features: Tensor) -> Tensor:
        """The share of each position in the pooled features, ``[N, 1, h, w]``; the shares sum to 1."""
        rows, cols = features.shape[2:]
        return torch.ones_like(features[:, :1]) / (rows * cols)


class MaximumHead(nn.Module):
    """Maximum of each feature over all positions, and a linear layer: for local findings."""

    def __init__(self, num_features: int, num_outputs: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(num_features, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[N, C, h, w]`` to ``[N, K]``."""
        scores: Tensor = self.classifier(self.dropout(features.amax((2, 3))))
        return scores

    def weights(self, features: Tensor) -> Tensor:
        """Weight of each position in each pooled feature, ``[N, C, h, w]``: that of the maximum, shared between ties."""
        highest = (features == features.amax((2, 3), keepdim=True)).to(features.dtype)
        return highest / highest.sum((2, 3), keepdim=True)


class AttentionHead(nn.Module):
    """Gated attention over all positions (Ilse, Tomczak and Welling, 2018, equation 9) and a linear layer."""

    def __init__(self, num_features: int, num_outputs: int, *, hidden: int = 128, dropout: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Conv2d(num_features, hidden, 1)
        self.gate = nn.Conv2d(num_features, hidden, 1)
        self.score = nn.Conv2d(hidden, 1, 1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(num_features, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[N, C, h, w]`` to ``[N, K]``."""
        pooled = (features.flatten(2) * self._shares(features)).sum(2)
        scores: Tensor = self.classifier(self.dropout(pooled))
        return scores

    def weights(self, features: Tensor) -> Tensor:
        """The share of each position in the pooled features, ``[N, 1, h, w]``; the shares sum to 1."""
        shares: Tensor = self._shares(features).unflatten(2, tuple(features.shape[2:]))
        return shares

    def _shares(self, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.value(features)) * torch.sigmoid(self.gate(features))
        scores: Tensor = self.score(hidden)
        return scores.flatten(2).softmax(2)


class SegmentationHead(nn.Module):
    """A linear layer for each position, interpolated linearly between the centres of positions to the pixels of the image.

    The resizes are in the state dict (buffer ``resizes``): weights compute what they were trained for. Weights of earlier versions have
    none; they were trained with equal cells, and load so.

    Args:
        num_features: channels of the feature map.
        num_outputs: number of classes.
        axes: resizes of rows and columns (`sft.wsi.model.backbones.feature_resizes`). Default: `None` (positions divide the image into
            equal cells)
    """

    resizes: Tensor
    _axes: tuple[AxisResize, ...] | None = None  # models pickled by earlier versions have no such attribute

    def __init__(self, num_features: int, num_outputs: int, *, axes: Sequence[AxisResize] | None = None) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(num_features, num_outputs, 1)
        self.register_buffer("resizes", _resizes_tensor(axes))
        self._axes = None if axes is None else tuple(axes)

    def forward(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Map ``[N, C, h, w]`` to ``[N, K, *size]``."""
        scores: Tensor = self.classifier(features)
        if self._axes is not None:
            return resize_positions(scores, size, self._axes)
        return scores if tuple(scores.shape[2:]) == size else F.interpolate(scores, size, mode="bilinear", align_corners=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}classifier.weight" in state_dict:
            state_dict.setdefault(f"{prefix}resizes", _resizes_tensor(None))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not self.resizes.is_meta:
            self._axes = _resizes_of(self.resizes)


def _resizes_tensor(axes: Sequence[AxisResize] | None) -> Tensor:
    """Resizes of rows and columns as the bits of numbers ``[2, 6]``, which no change of precision rounds; zeros for equal cells."""
    rows = [[0.0] * len(fields(AxisResize))] * 2 if axes is None else [[float(value) for value in astuple(axis)] for axis in axes]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").view(torch.int64)


def _resizes_of(bits: Tensor) -> tuple[AxisResize, ...] | None:
    rows = bits.view(torch.float64).tolist()
    if not rows[0][0]:
        return None
    return tuple(
        AxisResize(stride_px=stride, on_pixels=bool(on), before=int(before), after=int(after), blend=blend, start_px=int(start))
        for stride, on, before, after, blend, start in rows
    )


class SlideModel(nn.Module):
    """Backbone and head.

    Args:
        backbone: image to feature map.
        head: one of this module's.

    Attributes:
        frozen_modules: names of modules that do not train (`sft.wsi.model.layers.freeze_modules`).
    """

    frozen_modules: tuple[str, ...] = ()

    def __init__(self, backbone: nn.Module, head: PooledHead | MaximumHead | AttentionHead | SegmentationHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, image: Tensor) -> Tensor:
        """Map ``[N, 3, H, W]`` to ``[N, K]``, or ``[N, K, H, W]`` for segmentation."""
        features = self.backbone(image)
        if isinstance(self.head, SegmentationHead):
            segmented: Tensor = self.head(features, (image.shape[2], image.shape[3]))
            return segmented
        scores: Tensor = self.head(features)
        return scores


class Evidence(nn.Module):
    """Output of a model with a pooled head, and the contribution of each position to it.

    Without dropout, ``output = evidence.sum((2, 3)) + head.classifier.bias``.
    """

    def __init__(self, model: SlideModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``[N, 3, H, W]`` to ``[N, K]`` and ``[N, K, h, w]``."""
        head = self.model.head
        assert not isinstance(head, SegmentationHead)
        features = self.model.backbone(image)
        scores = head(features)
        # Shares of many positions are too small for 16 bits.
        with torch.autocast(image.device.type, enabled=False):
            weight = head.classifier.weight
            wide = features.to(torch.promote_types(features.dtype, weight.dtype))
            evidence = F.conv2d(wide * head.weights(wide), weight[:, :, None, None])
        return scores, evidence


class PredictedClasses(nn.Module):
    """Class of each pixel, the index of its highest score, from a model with a segmentation head."""

    def __init__(self, model: SlideModel, num_classes: int) -> None:
        super().__init__()
        self.model = model
        self._dtype = torch.uint8 if num_classes <= 256 else torch.int16

    def forward(self, image: Tensor) -> Tensor:
        """Map ``[N, 3, H, W]`` to ``[N, 1, H, W]`` of integers."""
        scores: Tensor = self.model(image)
        return scores.argmax(1, keepdim=True).to(self._dtype)


def build_model(
    backbone: nn.Module,
    num_features: int,
    num_outputs: int,
    *,
    head: Literal["gap", "max", "attention", "segmentation"],
    attention_dim: int = 128,
    dropout: float = 0.0,
    axes: Sequence[AxisResize] | None = None,
) -> SlideModel:
    """Put a head on a backbone; its initial weights come from torch's generator. ``axes`` are of the segmentation head."""
    if head == "gap":
        return SlideModel(backbone, PooledHead(num_features, num_outputs, dropout=dropout))
    if head == "max":
        return SlideModel(backbone, MaximumHead(num_features, num_outputs, dropout=dropout))
    if head == "attention":
        return SlideModel(backbone, AttentionHead(num_features, num_outputs, hidden=attention_dim, dropout=dropout))
    return SlideModel(backbone, SegmentationHead(num_features, num_outputs, axes=axes))


def set_training(model: nn.Module, *, training: bool, freeze_norms: bool) -> None:
    """``model.train(training)``, with BatchNorms in eval mode where their statistics are frozen, or their modules."""
    model.train(training)
    frozen = [model] if freeze_norms else [model.get_submodule(name) for name in getattr(model, "frozen_modules", ())]
    for frozen_module in frozen:
        for module in frozen_module.modules():
            if isinstance(module, _BatchNorm):
                module.eval()


def calibrate_batch_norms(network: nn.Module, crops: Iterable[Tensor]) -> int:
    """Set the statistics of all BatchNorms to the averages over crops.

    Args:
        network: runs untiled on the crops: keep them small.
        crops: ``[N, 3, h, w]`` each, on any device.

    Returns:
        Number of norms.
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
