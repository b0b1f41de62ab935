"""Gradients of slices: concatenated or added in place, never a tensor of zeros for each slice, and exact."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.lower import builder as builders
from sft.lower.concat import DimSlice, cat_slices_into, partition_dim, sum_slices
from sft.lower.program import Instruction, Program
from tests.helpers.bags import take_samples

aten = torch.ops.aten


class _Slices(nn.Module):
    """Weighted slices of the channels of an image, or of pooled features, summed."""

    def __init__(self, slices: list[slice | int], *, pooled: bool, reads_whole: bool = False, mixed: bool = False) -> None:
        super().__init__()
        self.slices, self.pooled, self.reads_whole = slices, pooled, reads_whole
        self.features = nn.Conv2d(2, 12, 3, padding=1)
        self.mix = nn.Conv2d(12, 12, 3, padding=1) if mixed else None
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(())) for _ in slices])

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        if self.pooled:
            x = x.mean((2, 3)).unflatten(1, (3, -1)).transpose(0, 1)  # [3, N, C]
        total = sum(((weight * _selected(x, each, self.pooled)).tanh() for weight, each in zip(self.weights, self.slices, strict=True)))
        assert isinstance(total, Tensor)
        if self.reads_whole:
            total = total + (x * x).mean()
        if self.pooled:
            return total
        total = total.mean((2, 3))
        return total if self.mix is None else total + self.mix(x).mean((2, 3))


def _selected(x: Tensor, selection: slice | int, pooled: bool) -> Tensor:
    """Mean over the sliced dimension: all slices have results of one shape."""
    if not pooled:
        return (x[:, selection : selection + 1] if isinstance(selection, int) else x[:, selection]).mean(1, keepdim=True)
    return x[selection] if isinstance(selection, int) else x[selection].mean(0)


def _programs(model: nn.Module, x: Tensor, budget: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, list[Instruction]]:
    """The compiled model, and the instructions of its programs."""
    programs: list[Program] = []
    build = builders._build_program

    def recorded(*arguments: Any) -> Program:
        programs.append(build(*arguments))
        return programs[-1]

    monkeypatch.setattr(builders, "_build_program", recorded)
    net = sft.compile(model, [x], budget=budget, options=sft.Options(**options))
    assert programs
    return net, [instruction for program in programs for instruction in program.instructions]


def _assert_exact(model: nn.Module, net: Any, x: Tensor) -> None:
    results = []
    for each in (model, net):
        own = x.clone().requires_grad_()
        out = each(own)
        out.square().sum().backward()
        results.append([out.detach(), own.grad, *(parameter.grad for parameter in each.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-11)


@st.composite
def _drawn_slices(draw: st.DrawFn, extent: int) -> list[slice | int]:
    """Slices with positive steps, and single indices: a partition of the extent in random order, or any."""
    if draw(st.booleans()):
        cuts = sorted({0, extent, *draw(st.lists(st.integers(1, extent - 1), max_size=3))})
        return draw(st.permutations([slice(low, high) for low, high in itertools.pairwise(cuts)]))
    index = st.integers(0, extent - 1)
    ranges = st.tuples(index, st.integers(1, extent), st.sampled_from([1, 1, 2])).map(lambda t: slice(t[0], t[0] + t[1], t[2]))
    return draw(st.lists(st.one_of(index, ranges), min_size=1, max_size=4))


@given(data=st.data(), pooled=st.booleans(), reads_whole=st.booleans(), mixed=st.booleans(), strips=st.booleans())
def test_gradients_of_slices_are_exact(data: st.DataObject, pooled: bool, reads_whole: bool, mixed: bool, strips: bool) -> None:
    slices = data.draw(_drawn_slices(3 if pooled else 12))
    model = _Slices(slices, pooled=pooled, reads_whole=reads_whole, mixed=mixed).double()
    x = torch.randn(2, 2, 24, 9, dtype=torch.float64)
    options = sft.Options(tile=(5, None)) if strips else sft.Options()
    net = sft.compile(copy.deepcopy(model), [x], budget="1GiB", options=options)
    _assert_exact(model, net, x)


@pytest.mark.parametrize("tile", [(5, None), None])
@pytest.mark.parametrize("pooled", [False, True])
def test_slices_of_a_partition_are_concatenated(monkeypatch: pytest.MonkeyPatch, pooled: bool, tile: Any) -> None:
    slices: list[slice | int] = [0, 2, 1] if pooled else [slice(4, 9), slice(0, 4), slice(9, 12)]
    model = _Slices(slices, pooled=pooled).double()
    x = torch.randn(2, 2, 24, 9, dtype=torch.float64)
    net, instructions = _programs(copy.deepcopy(model), x, "1GiB", monkeypatch, **({} if tile is None else {"tile": tile}))
    functions = [instruction.function for instruction in instructions]
    assert aten.slice_backward.default not in functions and aten.select_backward.default not in functions
    sums = [each.arguments for each in instructions if each.function in (sum_slices, cat_slices_into)]
    assert sums and all(partition_dim(spans, shape) is not None for _, spans, shape, *_ in sums if isinstance(spans[0], DimSlice))
    _assert_exact(model, net, x)


class _PackedAttention(nn.Module):
    """Queries, keys and values as ``unbind`` or ``chunk`` of one product."""

    def __init__(self, width: int, *, unbinds: bool) -> None:
        super().__init__()
        self.patches, self.qkv, self.unbinds = nn.Conv2d(3, width, 4, stride=4), nn.Linear(width, 3 * width), unbinds
        self.out, self.token = nn.Linear(width, width), nn.Parameter(torch.randn(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        packed = self.qkv(torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1))
        if self.unbinds:
            query, key, value = packed.unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        else:
            query, key, value = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in packed.chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2)).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("unbinds", [True, False])
@pytest.mark.parametrize("samples", [False, True])
def test_queries_keys_and_values_have_one_gradient(monkeypatch: pytest.MonkeyPatch, unbinds: bool, samples: bool) -> None:
    model = _PackedAttention(16, unbinds=unbinds).double()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    if samples:
        take_samples(monkeypatch, 2)
    net, instructions = _programs(copy.deepcopy(model), x, "1GiB", monkeypatch)
    functions = [instruction.function for instruction in instructions]
    assert aten.slice_backward.default not in functions and aten.select_backward.default not in functions
    sums = {each.arguments[1:] for each in instructions if each.function is sum_slices}  # of one sample, two or all
    assert sums
    for spans, shape, order, _ in sums:
        assert len(spans) == 3 and partition_dim(spans, shape) is not None
        assert order == ((1, 3, 0, 2, 4) if unbinds else (0, 1, 2))  # the gradient of the product's rows is a view of the sum
    _assert_exact(model, net, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_requested_memory_order_and_type(dtype: torch.dtype) -> None:
    first, second = torch.randn(2, 1, 4).to(dtype), torch.randn(2, 2, 4).to(dtype)
    spans = (DimSlice(1, 2, 1), DimSlice(1, 0, 2))
    total = sum_slices((first, second), spans, (2, 3, 4), (1, 0, 2), torch.float32)
    assert total.dtype == torch.float32 and total.permute(1, 0, 2).is_contiguous()
    torch.testing.assert_close(total, torch.cat([second, first], 1).float(), rtol=0, atol=0)
    overlapping = sum_slices((first, second), (DimSlice(1, 1, 1), DimSlice(1, 0, 2)), (2, 3, 4), (0, 1, 2), torch.float32)
    expected = torch.zeros(2, 3, 4)
    expected[:, :2] += second
    expected[:, 1:2] += first
    torch.testing.assert_close(overlapping, expected, rtol=0, atol=0)
    assert overlapping.is_contiguous()
