"""Attention as one operator of a GPU, ``sft::fused_attention``, and its derivative: FlashAttention (Dao, 2023) for half precision.

A trace of ``scaled_dot_product_attention`` on a machine with a GPU consists of matrix products and a softmax, since the calls on fake CPU
tensors do not exist on GPUs. They compute half precision in fp32, and store the matrix of all queries and keys. These operators call the
kernels that ``scaled_dot_product_attention`` selects on a GPU without a mask and dropout; on a CPU they call its own fused kernels.

The output has the memory layout of the queries' rows: of a tensor ``[samples, queries, heads, channels]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["fused_attention", "fused_attention_backward"]

aten = torch.ops.aten

_LIBRARY = torch.library.Library("sft", "FRAGMENT")
_OPTIONS = "bool is_causal, float? scale"
_LIBRARY.define(f"fused_attention(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "fused_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def _rows(value: Tensor) -> Tensor:
    """The tensor, or a copy, with the channels of a head next to each other in memory."""
    return value if value.stride(-1) == 1 else value.contiguous()


def _in_order_of(query: Tensor, output: Tensor) -> Tensor:
    """The output, or a copy, with the heads of a token next to each other if the queries have them so: views of programs rely on it."""
    if query.stride(1) >= query.stride(2) or output.transpose(1, 2).is_contiguous():
        return output
    return output.transpose(1, 2).contiguous().transpose(1, 2)


def _forward_cuda(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    operands = (_rows(each) for each in (query, key, value))
    output, logsumexp, *_ = aten._scaled_dot_product_flash_attention.default(*operands, 0.0, is_causal, False, scale=scale)
    return _in_order_of(query, output), logsumexp


def _backward_cuda(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    operands = (_rows(each) for each in (grad, query, key, value))
    state = query.new_empty(2, dtype=torch.int64)  # of the random numbers of dropout
    lengths = (None, None, query.shape[-2], key.shape[-2])
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward.default(
        *operands, output, logsumexp, *lengths, 0.0, is_causal, state, state, scale=scale
    )
    return gradients


def _forward_cpu(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    operands = (_rows(each) for each in (query, key, value))
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(*operands, 0.0, is_causal, scale=scale)
    return _in_order_of(query, output), logsumexp


def _backward_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    operands = (_rows(each) for each in (grad, query, key, value))
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *operands, output, logsumexp, 0.0, is_causal, scale=scale
    )
    return gradients


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    samples, heads, length, channels = query.shape
    output = query.new_empty((samples, length, heads, channels)).transpose(1, 2)
    return output, query.new_empty((samples, heads, length), dtype=torch.float32)


def _backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    shapes = ((each.shape[0], each.shape[2], each.shape[1], each.shape[3]) for each in (query, key, value))
    return tuple(query.new_empty(shape).transpose(1, 2) for shape in shapes)


for _name, _implementations in (
    ("fused_attention", (_forward_cpu, _forward_cuda, _forward_fake)),
    ("fused_attention_backward", (_backward_cpu, _backward_cuda, _backward_fake)),
):
    _cpu, _cuda, _fake = _implementations
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"sft::{_name}", _fake, lib=_LIBRARY)
fused_attention = torch.ops.sft.fused_attention.default
fused_attention_backward = torch.ops.sft.fused_attention_backward.default


@register_flop_formula([torch.ops.sft.fused_attention])
def _forward_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations of two products, for shapes."""
    return int(sdpa_flop_count(query, key, value))


@register_flop_formula([torch.ops.sft.fused_attention_backward])
def _backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations of five products, for shapes."""
    return int(sdpa_backward_flop_count(grad, query, key, value))
