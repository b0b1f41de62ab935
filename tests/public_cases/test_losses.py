"""Unchanged losses of segmentation libraries through ``WithLoss``.

The modules here follow the operators of the libraries' losses, which are not installed with the tests: one-hot targets, axes of sums, and
assertions about shapes of labels. If MONAI is installed, its losses are tested too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import chain, image, seeded

_CLASSES, _SHAPE = 4, (2, 3, 20, 16)
_OPTIONS = sft.Options(tile=(6, 16))


def _network(num_classes: int = _CLASSES) -> nn.Module:
    return chain(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, num_classes, 3, padding=1))


def _labels(num_classes: int = _CLASSES) -> Tensor:
    return torch.randint(num_classes, (_SHAPE[0], *_SHAPE[2:]), generator=torch.Generator().manual_seed(1))


# --- MONAI ----------------------------------------------------------------------------------------------------------


def _monai_one_hot(labels: Tensor, num_classes: int) -> Tensor:
    shape = list(labels.shape)
    if shape[1] != 1:
        raise AssertionError("labels should have a channel with length equal to one.")
    shape[1] = num_classes
    return torch.zeros(size=shape, dtype=torch.float, device=labels.device).scatter_(dim=1, index=labels.long(), value=1)


class _MonaiLoss(nn.Module):
    """Base of MONAI's losses over regions; subclasses compute one number per class from three sums."""

    class_weight: Tensor | None

    def __init__(self, *, to_onehot_y: bool = True, batch: bool = False, weight: list[float] | None = None) -> None:
        super().__init__()
        self.to_onehot_y, self.batch = to_onehot_y, batch
        self.register_buffer("class_weight", None if weight is None else torch.as_tensor(weight))

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        probabilities = torch.softmax(input, 1)
        if self.to_onehot_y:
            target = _monai_one_hot(target, input.shape[1])
        if target.shape != probabilities.shape:
            raise AssertionError(f"ground truth has different shape ({target.shape}) from input ({probabilities.shape})")
        reduce_axis: list[int] = torch.arange(2, len(input.shape)).tolist()
        if self.batch:
            reduce_axis = [0, *reduce_axis]
        both = torch.sum(probabilities * target, dim=reduce_axis)
        score = self.score(both, torch.sum(probabilities, dim=reduce_axis), torch.sum(target, dim=reduce_axis))
        if self.class_weight is not None:
            if self.class_weight.ndim == 0:
                self.class_weight = torch.as_tensor([self.class_weight] * input.shape[1])
            if self.class_weight.min() < 0:
                raise ValueError("the value/values of the `weight` should be no less than 0.")
            score = score * self.class_weight.to(score)
        return torch.mean(score)

    def score(self, both: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
        raise NotImplementedError


class MonaiDice(_MonaiLoss):
    def score(self, both: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
        return 1.0 - (2 * both + 1e-5) / (predicted + true + 1e-5)


class MonaiTversky(_MonaiLoss):
    def score(self, both: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
        return 1.0 - (both + 1e-5) / (both + 0.3 * (predicted - both) + 0.7 * (true - both) + 1e-5)


class MonaiGeneralizedDice(_MonaiLoss):
    """Weights are reciprocals of the squared sizes of classes; infinite ones become the largest finite one."""

    def score(self, both: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
        weights: Tensor = torch.reciprocal(true * true)
        is_infinite = torch.isinf(weights)
        weights = torch.where(is_infinite, torch.zeros_like(weights), weights)
        weights = weights + is_infinite * weights.amax(dim=-1, keepdim=True)
        score: Tensor = 1.0 - (2 * (both * weights).sum(-1) + 1e-5) / (((predicted + true) * weights).sum(-1) + 1e-5)
        return score


class MonaiDiceCE(nn.Module):
    """Cross-entropy of class labels without a channel; the loss removes the channel."""

    def __init__(self) -> None:
        super().__init__()
        self.dice, self.ce = MonaiDice(), nn.CrossEntropyLoss()

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if input.dim() != target.dim():
            raise ValueError("the number of dimensions for input and target should be the same")
        loss: Tensor = self.dice(input, target) + self.ce(input, target.squeeze(1).long() if target.shape[1] == 1 else target)
        return loss


class MonaiFocal(nn.Module):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        target = _monai_one_hot(target, input.shape[1])
        if target.shape != input.shape:
            raise ValueError(f"ground truth has different shape ({target.shape}) from input ({input.shape})")
        target = target.to(input.dtype)
        loss = input - input * target - F.logsigmoid(input)
        weighted: Tensor = (F.logsigmoid(-input * (target * 2 - 1)) * 2.0).exp() * loss
        return weighted.mean()


_MONAI: dict[str, Callable[[], nn.Module]] = {
    "Dice": MonaiDice,
    "Dice over the batch": lambda: MonaiDice(batch=True),
    "Dice of weighted classes": lambda: MonaiDice(weight=[0.5, 1.0, 2.0, 1.0]),
    "Dice of one weight": lambda: MonaiTversky(weight=None),
    "generalized Dice": MonaiGeneralizedDice,
    "Dice and cross-entropy": MonaiDiceCE,
    "focal": MonaiFocal,
}


@pytest.mark.parametrize("has_channel", [True, False], ids=["N1HW", "NHW"])
@pytest.mark.parametrize("name", _MONAI)
def test_project_monai_monai_1592_losses_that_tracers_cannot_follow(name: str, has_channel: bool) -> None:
    """MONAI's losses read the axes of their sums from ``torch.arange(2, len(input.shape)).tolist()``."""
    model = seeded(lambda: sft.nn.WithLoss(_network(), _MONAI[name]()))
    labels = _labels()[:, None] if has_channel else _labels()
    assert_exact(model, image(*_SHAPE), labels, options=_OPTIONS, steps=1)
    torch.testing.assert_close(model(image(*_SHAPE), labels), model.loss(model.model(image(*_SHAPE)), _labels()[:, None]))


def test_a_negative_weight_is_the_error_of_the_loss() -> None:
    model = seeded(lambda: sft.nn.WithLoss(_network(), MonaiDice(weight=[0.5, -1.0, 2.0, 1.0])))
    with pytest.raises(ValueError, match="should be no less than 0"):
        sft.compile(model, [_SHAPE, _labels()[:, None]])


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("DiceLoss", {"to_onehot_y": True, "softmax": True}),
        ("DiceLoss", {"to_onehot_y": True, "softmax": True, "squared_pred": True, "batch": True, "include_background": False}),
        ("DiceLoss", {"to_onehot_y": True, "softmax": True, "weight": [0.5, 1.0, 2.0, 1.0]}),
        ("DiceLoss", {"to_onehot_y": True, "softmax": True, "jaccard": True}),
        ("DiceCELoss", {"to_onehot_y": True, "softmax": True}),
        ("DiceFocalLoss", {"to_onehot_y": True, "softmax": True}),
        ("GeneralizedDiceLoss", {"to_onehot_y": True, "softmax": True}),
        ("GeneralizedDiceFocalLoss", {"to_onehot_y": True, "softmax": True}),
        ("TverskyLoss", {"to_onehot_y": True, "softmax": True}),
        ("FocalLoss", {"to_onehot_y": True}),
        ("FocalLoss", {"to_onehot_y": True, "use_softmax": True}),
    ],
)
def test_losses_of_monai_itself(name: str, keywords: dict[str, Any]) -> None:
    losses = pytest.importorskip("monai.losses")
    model = seeded(lambda: sft.nn.WithLoss(_network(), getattr(losses, name)(**keywords)))
    for labels in (_labels()[:, None], _labels()):
        assert_exact(model, image(*_SHAPE), labels, options=_OPTIONS, steps=1)


# --- segmentation-models-pytorch ------------------------------------------------------------------------------------


class SmpDice(nn.Module):
    """Dice loss that flattens predictions and labels; labels may have a channel or not."""

    def __init__(self, kind: str = "dice", classes: list[int] | None = None, ignore_index: int | None = None) -> None:
        super().__init__()
        self.kind, self.ignore_index = kind, ignore_index
        self.classes = None if classes is None else torch.tensor(classes)

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        assert y_true.size(0) == y_pred.size(0)
        batch, num_classes = y_true.size(0), y_pred.size(1)
        y_pred = y_pred.log_softmax(dim=1).exp().view(batch, num_classes, -1)
        y_true = y_true.view(batch, -1)
        if self.ignore_index is None:
            target = F.one_hot(y_true, num_classes).permute(0, 2, 1)
        else:
            mask = y_true != self.ignore_index
            y_pred = y_pred * mask.unsqueeze(1)
            target = F.one_hot((y_true * mask).to(torch.long), num_classes).permute(0, 2, 1) * mask.unsqueeze(1)
        target = target.type_as(y_pred)
        both, cardinality = (y_pred * target).sum((0, 2)), (y_pred + target).sum((0, 2))
        if self.kind == "dice":
            score = 2.0 * both / cardinality.clamp_min(1e-7)
        elif self.kind == "jaccard":
            score = both / (cardinality - both).clamp_min(1e-7)
        else:
            positives, negatives = (y_pred * (1 - target)).sum((0, 2)), ((1 - y_pred) * target).sum((0, 2))
            score = both / (both + 0.4 * positives + 0.6 * negatives).clamp_min(1e-7)
        loss = 1.0 - score
        loss *= (target.sum((0, 2)) > 0).to(loss.dtype)
        return (loss if self.classes is None else loss[self.classes]).mean()


class SmpFocal(nn.Module):
    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        loss = torch.zeros((), dtype=y_pred.dtype)
        for number in range(y_pred.size(1)):
            target, logits = (y_true == number).long().type_as(y_pred), y_pred[:, number, ...]
            if target.shape != logits.shape:
                raise ValueError(f"Target size ({target.shape}) must be the same as input size ({logits.shape})")
            logpt = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            loss = loss + ((1.0 - torch.exp(-logpt)).pow(2.0) * logpt).mean()
        return loss


class SmpLovasz(nn.Module):
    """The Lovasz-softmax: errors are sorted, which needs all of them; absent classes are left out by a branch on a sum."""

    def __init__(self, classes: str = "all") -> None:
        super().__init__()
        self.classes = classes

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        num_classes = y_pred.size(1)
        probabilities = torch.movedim(y_pred.softmax(dim=1), 1, -1).contiguous().view(-1, num_classes)
        labels, losses = y_true.view(-1), []
        for number in range(num_classes):
            foreground = (labels == number).type_as(probabilities)
            if self.classes == "present" and foreground.sum() == 0:
                continue
            errors, order = torch.sort((foreground - probabilities[:, number]).abs(), 0, descending=True)
            true = foreground[order.detach()]
            jaccard = 1.0 - (true.sum() - true.cumsum(0)) / (true.sum() + (1 - true).cumsum(0))
            losses.append(torch.dot(errors, torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])))
        return torch.stack(losses).mean()


_SMP: dict[str, Callable[[], nn.Module]] = {
    "dice": SmpDice,
    "dice of some classes": lambda: SmpDice(classes=[1, 3]),
    "dice without ignored": lambda: SmpDice(ignore_index=2),
    "jaccard": lambda: SmpDice("jaccard"),
    "tversky": lambda: SmpDice("tversky"),
    "focal": SmpFocal,
    "lovasz": SmpLovasz,
}


@pytest.mark.parametrize("has_channel", [True, False], ids=["N1HW", "NHW"])
@pytest.mark.parametrize("name", _SMP)
def test_losses_in_the_manner_of_segmentation_models_pytorch(name: str, has_channel: bool) -> None:
    model = seeded(lambda: sft.nn.WithLoss(_network(), _SMP[name]()))
    labels = _labels()[:, None] if has_channel else _labels()
    assert_exact(model, image(*_SHAPE), labels, options=_OPTIONS, steps=1)


def test_a_branch_on_labels_is_refused_as_control_flow() -> None:
    model = sft.nn.WithLoss(_network(), SmpLovasz("present"))
    with pytest.raises(sft.UnsupportedError) as refused:
        sft.compile(model, [_SHAPE, _labels()])
    assert "public_cases/test_losses.py:" in str(refused.value) and "control flow" in str(refused.value)
    assert 'if self.classes == "present" and foreground.sum() == 0:' in str(refused.value)


# --- kornia ---------------------------------------------------------------------------------------------------------


class KorniaDice(nn.Module):
    """Ignored pixels are masked; where none is ignored, a branch on the labels leaves the mask out."""

    def __init__(self, *, is_compilable: bool, weight: Tensor | None = None) -> None:
        super().__init__()
        self.is_compilable, self.weight = is_compilable, weight

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        if pred.shape[-2:] != target.shape[-2:]:
            raise ValueError(f"pred and target shapes must be the same. Got: {pred.shape} and {target.shape}")
        mask = target != 2
        if not (self.is_compilable and torch.compiler.is_compiling()) and mask.all():
            mask = torch.ones_like(mask)
        weight = torch.ones(pred.shape[1]) if self.weight is None else self.weight
        if weight.min() < 0 or int(weight.numel()) != pred.shape[1]:
            raise ValueError("the weights are not those of the classes")
        target = F.one_hot(target * mask, pred.shape[1]).movedim(-1, 1).to(pred.dtype) * mask[:, None]
        soft = pred.softmax(1) * mask[:, None]
        both, cardinality = (soft * target).sum((1, 2, 3)), (soft + target).sum((1, 2, 3))
        return (1 - 2 * both / (cardinality + 1e-8)).mean() * float(weight.sum() / len(weight))


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5, 1.0])], ids=["equal", "weighted"])
def test_kornia_kornia_3792_masks_of_ignored_pixels(weight: Tensor | None) -> None:
    """Branches on constant weights are followed; the branch on labels is, too, where the loss leaves it out while it is compiled."""
    model = seeded(lambda: sft.nn.WithLoss(_network(), KorniaDice(is_compilable=True, weight=weight)))
    assert_exact(model, image(*_SHAPE), _labels(), options=_OPTIONS, steps=1)


def test_kornia_kornia_3792_a_branch_on_labels_is_refused_at_its_line() -> None:
    model = sft.nn.WithLoss(_network(), KorniaDice(is_compilable=False))
    with pytest.raises(sft.UnsupportedError) as refused:
        sft.compile(model, [_SHAPE, _labels()])
    message = str(refused.value)
    assert "public_cases/test_losses.py:" in message and "mask.all():`" in message and "control flow" in message
    assert "sft.nn.DiceLoss" in message
