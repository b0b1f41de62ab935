"""Heads of a prediction: the network together with the last step, which runs strip by strip inside of the budget."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from sft.common.errors import InputError

__all__ = ["KINDS", "Kind", "PredictionHead"]

Kind: TypeAlias = Literal["classes", "softmax", "sigmoid", "values"]
#: Kinds of predictions.
KINDS: tuple[Kind, ...] = ("classes", "softmax", "sigmoid", "values")


class PredictionHead(nn.Module):
    """A network and the last step of its prediction.

    ==============  ===========================================================================================
    ``"classes"``   index of the highest score of each pixel; of one score, 1 where it is above 0 (``sigmoid`` above one half)
    ``"softmax"``   probabilities of classes that exclude each other
    ``"sigmoid"``   probability of each channel
    ``"values"``    the network's output
    ==============  ===========================================================================================

    Args:
        model: the network; shared.
        kind: of the prediction.
        index: which output, for a network with several; a key for one that returns a dictionary. Default: the only one
        num_names: number of names of the classes or channels; 0 if they have none.
    """

    def __init__(self, model: nn.Module, kind: Kind, index: int | str | None = None, num_names: int = 0) -> None:
        super().__init__()
        self.model, self.kind, self.index, self.num_names = model, kind, index, num_names

    def forward(self, image: Tensor) -> Tensor:
        """Map ``[1, C, H, W]`` to ``[1, K, h, w]``."""
        scores = self._select(self.model(image))
        self._check_names(scores.shape[1])
        if self.kind == "classes":
            if scores.shape[1] == 1:
                return scores
            return scores.argmax(1, keepdim=True).to(torch.uint8 if scores.shape[1] <= 256 else torch.int16)
        if self.kind == "softmax":
            return scores.softmax(1, dtype=torch.float32)
        return scores.sigmoid() if self.kind == "sigmoid" else scores

    def _check_names(self, num_channels: int) -> None:
        is_binary = self.kind == "classes" and num_channels == 1
        expected = 2 if is_binary else num_channels
        if self.num_names not in (0, expected):
            counted = "one output channel, which divides pixels into two classes" if is_binary else f"{num_channels} output channels"
            raise InputError(f"names has {self.num_names} names, and the network has {counted}: give {expected} names, or none")

    def _select(self, result: Any) -> Tensor:
        if self.index is not None:
            result = getattr(result, str(self.index)) if isinstance(self.index, str) and hasattr(result, self.index) else result[self.index]
        elif isinstance(result, dict) and len(result) == 1:
            (result,) = result.values()
        elif isinstance(result, (list, tuple)) and len(result) == 1:
            (result,) = result
        if not isinstance(result, Tensor):
            names = f"; it has {', '.join(map(repr, result))}" if isinstance(result, dict) else ""
            raise InputError(
                f"predict takes one output, and the network returns {type(result).__name__}{names}; name one with index=, such "
                "as index=0 or index='out'"
            )
        if result.dim() != 4:
            raise InputError(
                f"predict writes images [1, K, h, w], and the network's output has {result.dim()} dimensions; give a network with an "
                "output for each position"
            )
        return result
