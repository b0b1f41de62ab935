"""Checks of class labels: their type while the loss is traced, and their shape at each size.

The exporter traces cross-entropy with labels of any integer type and of any extents; eager PyTorch refuses them when it computes. Labels
come from the caller, so that a mismatch is an error of the call's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy as sp
import torch
from torch.overrides import TorchFunctionMode

from sft.analysis.ir.graph import Graph, refs_in
from sft.common.errors import InputRuntimeError

__all__ = ["ClassLabelMode", "LabelShapes", "check_label_dtype"]

#: Losses of torch whose labels are classes, by the name of the function and of the operators to which it is traced.
_FUNCTIONS = ("cross_entropy", "nll_loss")
_OPERATORS = frozenset(
    f"aten.{name}.default"
    for name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss2d", "nll_loss", "nll_loss2d_forward", "nll_loss_forward")
)


def check_label_dtype(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check the type of the labels of a loss function of ``torch.nn.functional``; other functions are ignored.

    Raises:
        InputError: it is not an integer of 64 bits.
    """
    operands = _operands(func, args, kwargs)
    if operands is None:
        return
    prediction, target = operands
    if target.dim() == prediction.dim() and target.is_floating_point():  # probabilities of classes
        return
    is_byte_vector = target.dtype == torch.uint8 and prediction.dim() <= 2  # as in eager PyTorch
    if target.dtype != torch.int64 and not is_byte_vector:
        raise InputRuntimeError(
            f"class labels of {func.__name__} have dtype {target.dtype}, expected torch.int64: give labels.long(), or a "
            "sft.sources.LabelSource, which converts what it reads"
        )


def _operands(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Prediction and target of a call of a loss function."""
    if getattr(func, "__module__", None) != "torch.nn.functional" or func.__name__ not in _FUNCTIONS:
        return None
    named = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
    prediction, target = named.get("input"), named.get("target")
    return (prediction, target) if isinstance(prediction, torch.Tensor) and isinstance(target, torch.Tensor) else None


class ClassLabelMode(TorchFunctionMode):
    """A function mode that checks type and shape of class labels; for runs on tensors whose sizes are numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_label_dtype(func, args, kwargs)
        operands = _operands(func, args, kwargs)
        if operands is not None:
            _check_shapes(func.__name__, tuple(operands[0].shape), tuple(operands[1].shape))
        return func(*args, **kwargs)


def _check_shapes(name: str, prediction: tuple[int, ...], target: tuple[int, ...]) -> None:
    if not prediction:
        return
    labels = (*prediction[:1], *prediction[2:]) if len(prediction) > 1 else ()
    if target not in (labels, prediction):  # probabilities of classes have the shape of the prediction
        raise InputRuntimeError(
            f"{name}: class labels of shape {target} for a prediction of shape {prediction}; expected labels of shape {labels}, "
            "one for each pixel of the prediction"
        )


@dataclass(frozen=True, slots=True)
class LabelShapes:
    """Shapes of the prediction and the labels of a loss of a captured model.

    Attributes:
        label: the operator, for messages.
        prediction: shape ``(N, C, ...)``, symbolic in the input's extents.
        target: shape of the labels.
    """

    label: str
    prediction: tuple[Any, ...]
    target: tuple[Any, ...]

    @classmethod
    def of(cls, graph: Graph) -> tuple[LabelShapes, ...]:
        """Those of all losses in a graph."""
        shapes = []
        for node in graph.operators:
            names = [*refs_in(node.argument("self")), *refs_in(node.argument("target"))] if node.target in _OPERATORS else []
            if len(names) == 2:
                shapes.append(cls(node.label, graph[names[0]].shape, graph[names[1]].shape))
        return tuple(shapes)

    def check(self, symbols: Mapping[Any, int]) -> None:
        """Check them at one size.

        Raises:
            InputError: the labels do not fit the prediction.
        """
        prediction, target = (
            tuple(int(value) if (value := sp.sympify(extent).subs(symbols)).is_Integer else -1 for extent in shape)
            for shape in (self.prediction, self.target)
        )
        if -1 not in (*prediction, *target):
            _check_shapes(self.label, prediction, target)
