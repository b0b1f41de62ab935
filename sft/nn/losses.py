"""Losses inside a compiled model: :class:`WithLoss` joins a model and its loss, :class:`DiceLoss` is soft Dice in sums over pixels.

A loss per pixel that is computed outside the model needs the model's full output and its gradient, which at full resolution are often the
largest tensors of a step. Inside the compiled model each strip of the output is consumed by the loss at once, and neither tensor is ever
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sft.common.errors import InputError
from sft.common.torch_internals import pytree

__all__ = ["DiceLoss", "WithLoss"]

Activation = Literal["softmax", "sigmoid", "none"]


class DiceLoss(nn.Module):
    """Soft Dice loss (Milletari, Navab and Ahmadi, "V-Net", 2016): one minus the mean Dice coefficient over classes and samples.

    The coefficient is ``(2 * sum(p * t) + smooth) / (sum(p) + sum(t) + smooth)``. Its sums over pixels are computed strip by strip.

    >>> loss = DiceLoss("none", smooth=0.0)
    >>> mask = torch.zeros(1, 1, 4, 4)
    >>> mask[..., :2] = 1
    >>> loss(mask, mask).item(), loss(1 - mask, mask).item(), loss(torch.ones_like(mask), mask).item()
    (0.0, 1.0, 0.3333333134651184)

    Args:
        activation: turns the prediction into probabilities: softmax over classes, sigmoid of each class, or none.
        smooth: added to numerator and denominator; a class that is absent and never predicted has a loss of 0.
        squared: whether the denominator sums squares, as V-Net does. Default: `False`
        batch: whether one coefficient is for all samples together. Default: `False`
        include_background: whether the first class counts. Default: `True`
        ignore_index: label of ignored pixels. Default: `None`
    """

    def __init__(
        self,
        activation: Activation = "softmax",
        *,
        smooth: float = 1.0,
        squared: bool = False,
        batch: bool = False,
        include_background: bool = True,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("softmax", "sigmoid", "none"):
            raise InputError(f"activation {activation!r}: choose softmax, sigmoid or none")
        if not smooth >= 0:
            raise InputError(f"smooth {smooth!r}: give a number of at least 0")
        self.activation, self.smooth, self.squared, self.batch = activation, smooth, squared, batch
        self.include_background, self.ignore_index = include_background, ignore_index

    def extra_repr(self) -> str:
        """Arguments, for ``repr``."""
        return f"{self.activation!r}, smooth={self.smooth}, squared={self.squared}, batch={self.batch}"

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The loss, a scalar.

        Args:
            prediction: ``[N, C, axes...]``.
            target: labels ``[N, axes...]`` or ``[N, 1, axes...]`` (integers below C), or masks ``[N, C, axes...]``.

        Raises:
            InputError: their shapes do not match.
        """
        num_classes, dims = prediction.shape[1], list(range(2, prediction.dim()))
        probabilities = self._probabilities(prediction)
        mask, valid = self._mask(target, num_classes, probabilities)
        if valid is not None:
            probabilities = probabilities * valid
        if not self.include_background and num_classes > 1:
            probabilities, mask = probabilities[:, 1:], mask[:, 1:]
        power = 2 if self.squared else 1
        sums = [(probabilities * mask).sum(dims), (probabilities**power).sum(dims), (mask**power).sum(dims)]
        common, predicted, true = (value.sum(0) if self.batch else value for value in sums)
        return (1 - (2 * common + self.smooth) / (predicted + true + self.smooth)).mean()

    def _probabilities(self, prediction: Tensor) -> Tensor:
        if self.activation == "none":
            return prediction
        return prediction.softmax(1) if self.activation == "softmax" else prediction.sigmoid()

    def _mask(self, target: Tensor, num_classes: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """The true classes as one-hot channels, and the mask of pixels that count, if some are ignored."""
        if target.dim() == like.dim() - 1:
            target = target.unsqueeze(1)
        if target.dim() != like.dim() or target.shape[1] not in (1, num_classes):
            raise InputError(
                f"a target of shape {tuple(target.shape)} for a prediction of {tuple(like.shape)}; give labels [N, axes...] or masks "
                f"of {num_classes} channels"
            )
        valid = None if self.ignore_index is None else (target != self.ignore_index).to(like.dtype)
        if target.shape[1] == num_classes:
            mask = target.to(like.dtype)
            return (mask, None) if valid is None else (torch.where(valid > 0, mask, torch.zeros_like(mask)), valid)
        classes = torch.arange(num_classes, device=target.device).view(num_classes, *[1] * (like.dim() - 2))
        return (target == classes).to(like.dtype), valid


class WithLoss(nn.Module):
    """``loss(model(*inputs), target)`` as one module, to be compiled together.

    >>> import sft
    >>> model = nn.Conv2d(3, 5, 3, padding=1)
    >>> training = sft.nn.WithLoss(model, nn.CrossEntropyLoss(ignore_index=255))
    >>> labels = torch.randint(5, (1, 64, 48))
    >>> net = sft.compile(training, [(1, 3, 64, 48), labels], budget="4MiB")
    >>> net(torch.randn(1, 3, 64, 48), labels).backward()
    >>> model.weight.grad.shape
    torch.Size([5, 3, 3, 3])

    The model is shared: its parameters, ``state_dict`` and ``train()`` are accessed through it as before, and it can be compiled
    separately for inference.

    Losses that stream: ``torch.nn``'s cross-entropy, negative log-likelihood, binary cross-entropy (with or without logits), MSE, L1,
    smooth L1, Huber, KL divergence, Poisson and soft margin with any reduction, :class:`sft.nn.DiceLoss`, and any function written with
    operators of the table in docs/operators.md, such as a sum of these. Other losses are exact too, but need the full output; ``sft.check``
    reports them.

    Targets reach the loss as they are given, as in ``loss(model(*inputs), target)``. Conventions differ: torch's cross-entropy takes labels
    ``[N, H, W]``, MONAI's losses take ``[N, 1, H, W]``. With ``keep_channel="auto"`` a loss that raises an error for a target of one of the
    two shapes gets the other one. A loss that accepts the target as it is given is never asked again, and if it refuses both, its error is
    the one for the target as given.

    >>> label_image = labels[:, None]
    >>> bool(training(torch.ones(1, 3, 64, 48), label_image) == training(torch.ones(1, 3, 64, 48), labels))
    True

    Args:
        model: computes the prediction.
        loss: a module or function of the prediction and the target.
        output: index or key of the prediction in the model's result, if that is not a tensor. Default: `None` (the result itself)
        keep_channel: the loss takes targets with a channel dimension of size one (`True`) or without it (`False`). Default: `"auto"`
            (as given, and the other one only where the loss raises an error)
    """

    keep_channel: bool | Literal["auto"] = "auto"  # of pickles of earlier versions

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        *,
        output: int | str | None = None,
        keep_channel: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be an nn.Module, got {type(model).__name__}")
        if isinstance(loss, type):
            raise InputError(f"loss is the class {loss.__name__}; give an instance, {loss.__name__}()")
        if not callable(loss):
            raise InputError(f"loss must be a function of prediction and target, got {type(loss).__name__}")
        if keep_channel != "auto" and not isinstance(keep_channel, bool):
            raise InputError(f"keep_channel {keep_channel!r}: choose True, False or 'auto'")
        self.model = model
        self.loss = loss
        self.output = output
        self.keep_channel = keep_channel

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss.

        Args:
            inputs: the model's inputs and, last, the target of the loss. Labels may have a channel, ``[N, 1, H, W]``, as those
                of a `sft.sources.LabelSource` have, or lack it.

        Raises:
            InputError: no target is given.
        """
        if len(inputs) < 2:
            raise InputError(f"WithLoss got {len(inputs)} input(s); give the model's inputs and, last, the target")
        *model_inputs, target = inputs
        prediction = self.model(*model_inputs)
        if self.output is not None:
            prediction = prediction[self.output]
        other_target = _other_channel_convention(prediction, target)
        if self.keep_channel == "auto":
            return self._loss_by_convention(prediction, target, other_target)
        has_channel = other_target is not None and target.dim() == prediction.dim()
        return self.loss(prediction, target if other_target is None or has_channel == self.keep_channel else other_target)

    def _loss_by_convention(self, prediction: Any, target: Tensor, other_target: Tensor | None) -> Tensor:
        try:
            return self.loss(prediction, target)
        except (AttributeError, *_REFUSALS) as error:
            if isinstance(error, (AttributeError, TypeError)) and isinstance(prediction, (tuple, list, Mapping)):
                raise InputError(
                    f"the loss refuses the model's result, {_outputs_text(prediction)}: {error}. Choose one by WithLoss(output=...), "
                    "or give a loss of all of them"
                ) from error
            if other_target is None or isinstance(error, AttributeError) or _is_about_tracing(error):
                raise
            try:
                return self.loss(prediction, other_target)
            except _REFUSALS as other_error:
                if _is_about_tracing(other_error):
                    raise
                raise error from other_error


#: Errors by which losses refuse the shape of a target.
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


def _is_about_tracing(error: Exception) -> bool:
    """Return true for an error about memory, or about a value that a trace does not have, and not about a shape."""
    is_class_of_torch = type(error).__module__.partition(".")[0] == "torch"
    return is_class_of_torch or any(word in str(error) for word in ("Fake", "tensor subclasses"))


def _outputs_text(prediction: Any) -> str:
    """Type of a result of several outputs, with their keys or number."""
    keys = f"keys {', '.join(map(repr, prediction))}" if isinstance(prediction, Mapping) else f"{len(prediction)} outputs"
    return f"{type(prediction).__name__} of {keys}"


def _other_channel_convention(prediction: Any, target: Any) -> Tensor | None:
    """A target without its channel of size one, or with one where it lacks it; ``None`` where it has channels like the prediction."""
    outputs = [output for output in pytree.tree_leaves(prediction) if isinstance(output, Tensor)]  # several: deep supervision
    if not outputs or not isinstance(target, Tensor) or outputs[0].dim() < 3:
        return None
    prediction = outputs[0]
    if target.dim() == prediction.dim() - 1:
        return target.unsqueeze(1)
    has_channel = target.dim() == prediction.dim() and target.shape[1] == 1
    return target.squeeze(1) if has_channel and prediction.shape[1] > 1 else None
