"""Labels that do not fit their prediction, by type or by shape: an ``InputError`` with the numbers, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft

_SHAPE = (1, 3, 24, 20)


def _training(loss: Callable[[Tensor, Tensor], Tensor]) -> sft.nn.WithLoss:
    return sft.nn.WithLoss(nn.Conv2d(3, 5, 3, padding=1), loss)


_LOSSES: dict[str, Any] = {
    "cross entropy": nn.CrossEntropyLoss(),
    "likelihood": lambda y, t: nn.functional.nll_loss(y.log_softmax(1), t),
    "by keyword": lambda y, t: nn.functional.cross_entropy(target=t, input=y, ignore_index=255),
}


@pytest.mark.parametrize("loss", _LOSSES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32])
def test_labels_of_another_type(loss: str, dtype: torch.dtype) -> None:
    training, labels = _training(_LOSSES[loss]), torch.zeros(1, 24, 20, dtype=torch.long)
    said = rf"dtype {dtype}, expected torch.int64: give labels.long\(\), or a sft.sources.LabelSource"
    with pytest.raises(sft.InputError, match=said):
        sft.compile(training, [_SHAPE, labels.to(dtype)])(torch.zeros(_SHAPE), labels.to(dtype))
    with pytest.raises(sft.InputError, match=said):
        sft.compile(training, [_SHAPE, labels])(torch.zeros(_SHAPE), labels.to(dtype))


@pytest.mark.parametrize("loss", _LOSSES)
@pytest.mark.parametrize("shape", [(1, 12, 20), (1, 24, 10), (2, 24, 20), (1, 20, 24)])
def test_labels_of_another_shape(loss: str, shape: tuple[int, ...]) -> None:
    training, labels = _training(_LOSSES[loss]), torch.zeros(1, 24, 20, dtype=torch.long)
    net = sft.compile(training, [_SHAPE, labels])
    net(torch.zeros(_SHAPE), labels)
    said = rf"class labels of shape \({', '.join(map(str, shape))}\) for a prediction of shape \(1, 5, 24, 20\); expected .*\(1, 24, 20\)"
    other = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(sft.InputError, match=said):
        net(torch.zeros(_SHAPE), other)
    with pytest.raises(sft.InputError, match=said):
        sft.compile(training, [_SHAPE, other])(torch.zeros(_SHAPE), other)
    assert net(torch.zeros(_SHAPE), labels).requires_grad


def _dice(prediction: Tensor, labels: Tensor) -> Tensor:
    return -(prediction.softmax(1) * nn.functional.one_hot(labels, 5).movedim(-1, 1)).mean()


@pytest.mark.parametrize("tile", [None, (5, None)], ids=["whole", "strips"])
@pytest.mark.parametrize(
    ("loss", "refusal"),
    [
        (_LOSSES["cross entropy"], r"cross_entropy.*: Target (-1|9) is out of bounds; check the labels"),
        (_dice, "one_hot: Class values must be at least 0 and less than the number of classes, 5; check the labels"),
        (lambda y, t: y.gather(1, t[:, None]).sum(), "gather: index (-1|9) is out of bounds for dimension 1 with size 5; check the labels"),
    ],
    ids=["cross entropy", "one-hot encoding", "gather"],
)
def test_labels_that_are_no_class(loss: Callable[[Tensor, Tensor], Tensor], refusal: str, tile: Any) -> None:
    """As in eager PyTorch; otherwise a one-hot encoding would ignore such pixels without an error."""
    labels = torch.zeros(1, 24, 20, dtype=torch.long)
    net = sft.compile(_training(loss), [_SHAPE, labels], options=None if tile is None else sft.Options(tile=tile))
    for value in (9, -1):
        labels[0, 17, 3] = value
        with pytest.raises((RuntimeError, IndexError)) as eager:
            _training(loss)(torch.zeros(_SHAPE), labels)
        with pytest.raises(sft.InputError, match=refusal) as refused:
            net(torch.zeros(_SHAPE), labels)
        assert isinstance(refused.value, type(eager.value))
    labels[0, 17, 3] = 4
    net(torch.zeros(_SHAPE), labels).backward()


def test_losses_and_targets_of_the_wrong_kind() -> None:
    with pytest.raises(sft.InputError, match=r"loss is the class CrossEntropyLoss; give .* CrossEntropyLoss\(\)"):
        _training(nn.CrossEntropyLoss)  # type: ignore[arg-type]  # the point
    net = sft.compile(_training(nn.CrossEntropyLoss()), [_SHAPE, torch.zeros(1, 24, 20, dtype=torch.long)])
    with pytest.raises(sft.InputError, match="must be Tensor, not list"):
        net(torch.zeros(_SHAPE), [[0] * 20] * 24)


def test_labels_of_a_classifier() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    training = sft.nn.WithLoss(model, nn.CrossEntropyLoss())
    net, x = sft.compile(training, [_SHAPE, torch.zeros(1, dtype=torch.long)]), torch.zeros(_SHAPE)
    net(x, torch.zeros(1, dtype=torch.long)).backward()
    net(x, torch.full((1, 5), 0.2)).backward()  # probabilities
    with pytest.raises(sft.InputError, match=r"class labels of shape \(3,\) for a prediction of shape \(1, 5\)"):
        net(x, torch.zeros(3, dtype=torch.long))


def test_the_budget_of_a_plan_without_the_gradient_of_the_input() -> None:
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))
    with pytest.raises(sft.BudgetError) as least:
        sft.plan(model, (1, 3, 128, 128), budget="1KiB")
    net = sft.compile(model, (1, 3, 128, 128), budget=least.value.needed_bytes)
    x = torch.zeros(1, 3, 128, 128)
    net(x).sum().backward()
    with pytest.raises(sft.BudgetError, match="this call asks for that of input 0: compile with a tensor that requires a gradient"):
        net(x.requires_grad_())


class _Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, targets: Any = None) -> Tensor:
        torch._assert(targets is not None, "targets should not be none when in training mode")
        y: Tensor = self.backbone(x)
        return y


def test_a_detector_names_its_backbone() -> None:
    with pytest.raises(sft.InputError, match=r"targets should not be none.*model.backbone = sft.compile\(model.backbone, input_shape\)"):
        sft.compile(_Detector(), _SHAPE)
