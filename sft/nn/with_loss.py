"""A model and its loss as one module.

A loss per pixel that is computed outside needs the model's whole output, and its gradient: at full resolution the two are often the
largest tensors of a step. Inside the compiled model each strip of the output goes into the loss as soon as it is there, and neither is
ever whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sft.errors import InputError

__all__ = ["WithLoss"]


class WithLoss(nn.Module):
    """``loss(model(*inputs), target)``, to be compiled together.

    >>> import sft
    >>> model = nn.Conv2d(3, 5, 3, padding=1)
    >>> training = sft.nn.WithLoss(model, nn.CrossEntropyLoss(ignore_index=255))
    >>> labels = torch.randint(5, (1, 64, 48))
    >>> net = sft.compile(training, [(1, 3, 64, 48), labels], budget="4MiB")
    >>> net(torch.randn(1, 3, 64, 48), labels).backward()
    >>> model.weight.grad.shape
    torch.Size([5, 3, 3, 3])

    The model stays the caller's: its parameters, its ``state_dict`` and ``train()`` are reached through it as before, and it can be
    compiled on its own for inference.

    Losses that stream: ``torch.nn``'s cross-entropy, negative log-likelihood, binary cross-entropy (with or without logits), MSE, L1,
    smooth L1, Huber, KL divergence, Poisson and soft margin with any reduction, :class:`sft.nn.DiceLoss`, and any function written with
    operators of the table in docs/operators.md, such as a sum of these. Others are exact, too, but see the whole output; ``sft.check``
    tells.

    Args:
        model: makes a prediction.
        loss: a module or function of the prediction and the target.
        output: chooses what of the model's result the loss is for, where that is not a tensor: an index or a key.
            Default: `None` (the result itself)
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor], *, output: int | str | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be an nn.Module, got {type(model).__name__}")
        if not callable(loss):
            raise InputError(f"loss must be a function of prediction and target, got {type(loss).__name__}")
        self.model = model
        self.loss = loss
        self.output = output

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss.

        Args:
            inputs: the model's inputs and, last, the target: what the loss wants. Labels may have a channel, ``[N, 1, H, W]``, as those
                of a `sft.sources.LabelSource` have.

        Raises:
            InputError: there is no target.
        """
        if len(inputs) < 2:
            raise InputError(f"WithLoss got {len(inputs)} input(s); give the model's inputs and, last, the target")
        *given, target = inputs
        prediction = self.model(*given)
        if self.output is not None:
            prediction = prediction[self.output]
        return self.loss(prediction, _class_labels(prediction, target))


def _class_labels(prediction: Any, target: Tensor) -> Tensor:
    """Labels of classes without their one channel, as torch's losses want them."""
    is_image = isinstance(prediction, Tensor) and target.dim() == prediction.dim() and target.shape[1] == 1
    is_label = target.dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
    return target.squeeze(1) if is_image and is_label and prediction.shape[1] > 1 else target
