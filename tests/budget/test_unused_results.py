"""Unused results of operators: they are allocated with the others, and count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft

#: Operators of a matrix with several results, and the number of these.
_OPERATORS: dict[str, tuple[Callable[[Tensor], Sequence[Tensor]], int]] = {
    "topk": (lambda x: torch.topk(x, 2, -1), 2),
    "sort": (lambda x: torch.sort(x, dim=0, stable=True), 2),
    "max": (lambda x: torch.max(x, 1), 2),
    "median": (lambda x: torch.median(x, 0), 2),
    "nanmedian": (lambda x: torch.nanmedian(x, 1), 2),
    "mode": (lambda x: torch.mode(x, 1), 2),
    "kthvalue": (lambda x: torch.kthvalue(x, 2, 1), 2),
    "cummax": (lambda x: torch.cummax(x, 0), 2),
    "aminmax": (lambda x: torch.aminmax(x, dim=1), 2),
    "var_mean": (lambda x: torch.var_mean(x, 1), 2),
    "std_mean": (lambda x: torch.std_mean(x, 0), 2),
    "frexp": (lambda x: torch.frexp(x.detach()), 2),
    "qr": (lambda x: torch.linalg.qr(x), 2),
    "svd": (lambda x: torch.linalg.svd(x, full_matrices=False), 3),
    "split": (lambda x: torch.split(x, 2, 1), 2),
    "chunk": (lambda x: torch.chunk(x, 2, 0), 2),
    "unbind": (lambda x: torch.unbind(x, 1)[:3], 3),
    "unbind_copy": (lambda x: torch.ops.aten.unbind_copy.int(x, 1)[:3], 3),
    "split_copy": (lambda x: torch.ops.aten.split_copy.Tensor(x, 2, 1), 2),
    "layer_norm": (lambda x: (nn.functional.layer_norm(x, x.shape[1:]),), 1),
    "group_norm": (lambda x: (nn.functional.group_norm(x[..., None], 1),), 1),
    "max_pool1d": (lambda x: nn.functional.max_pool1d(x, 2, return_indices=True), 2),
}


class _Selection(nn.Module):
    """Some of the results of an operator."""

    def __init__(self, name: str, used: Sequence[int]) -> None:
        super().__init__()
        self.name, self.used = name, tuple(used)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        results = _OPERATORS[self.name][0](self.layer(x))
        return [results[index] * 2 for index in self.used]


def _measure(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, *, training: bool, **options: Any) -> tuple[int, int]:
    """Measured and projected peak of one step."""
    x = torch.rand(shape, dtype=dtype, requires_grad=training)
    with torch.set_grad_enabled(training):
        net = sft.compile(model.to(dtype), [x], budget="1GiB", **options)
        plan = sft.of(net).plan_for(x)
        with sft.measure_peak() as peak:
            outputs = net(x.detach().clone().requires_grad_(training))
            differentiable = [y for y in ([outputs] if isinstance(outputs, Tensor) else outputs) if y.requires_grad]
            if differentiable:
                torch.autograd.backward(differentiable, [torch.ones_like(y) for y in differentiable])
    return peak.num_bytes, plan.projected_peak_bytes


@st.composite
def _selections(draw: st.DrawFn) -> tuple[str, list[int]]:
    name = draw(st.sampled_from(sorted(_OPERATORS)))
    return name, draw(st.lists(st.integers(0, _OPERATORS[name][1] - 1), min_size=1, unique=True))


@settings(deadline=None)
@given(selection=_selections(), rows=st.integers(4, 40), dtype=st.sampled_from((torch.float32, torch.float64)), training=st.booleans())
def test_peak_with_any_selection_of_results(selection: tuple[str, list[int]], rows: int, dtype: torch.dtype, training: bool) -> None:
    measured, projected = _measure(_Selection(*selection), (rows, 4), dtype, training=training)
    assert measured == projected


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.LayerNorm(1), (640, 1)),
        (nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.LayerNorm((4, 9, 9))), (1, 1, 9, 9)),
        (nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveMaxPool2d((3, 2))), (1, 1, 9, 9)),
    ],
    ids=["statistics of a norm", "statistics after strips", "indices of a pool"],
)
@pytest.mark.parametrize("tile", [None, (1, None)], ids=["whole", "strips"])
def test_peak_in_inference_includes_values_read_by_derivatives_only(model: nn.Module, shape: tuple[int, ...], tile: Any) -> None:
    options = None if len(shape) < 4 else sft.Options(tile=tile)
    measured, projected = _measure(model, shape, torch.float32, training=False, options=options)
    assert measured == projected
