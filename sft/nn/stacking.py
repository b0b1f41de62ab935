"""Stacking of equal blocks into one module: its parameters and persistent buffers have a leading dimension for the block.

Non-persistent buffers are constants shared by all blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sft.common.errors import InputError, typed

__all__ = ["extract_block", "load_blocks", "shared_buffers", "stack_blocks", "stacked_buffers", "stacked_tensors"]


def stack_blocks(make_block: Callable[[], nn.Module], num_blocks: int) -> nn.Module:
    """The first block, its parameters and persistent buffers replaced by the stacked ones of all blocks.

    Raises:
        InputError: a block is not a module, or has another structure.
    """
    if isinstance(make_block, nn.Module) or not callable(make_block):
        raise InputError(
            f"make_block is {typed(make_block)}: give a function without arguments that makes a new block at each call, "
            "as in Repeat(lambda: Block(64), 12)"
        )
    template = make_block()
    if not isinstance(template, nn.Module):
        raise InputError(f"make_block must make an nn.Module, made {type(template).__name__}")
    if any(is_lazy(tensor) for tensor in (*template.parameters(), *template.buffers())):
        raise InputError("make_block makes a block whose parameters are not initialised yet; give its layers their number of channels")
    first = _persistent_tensors(template)
    stacks: dict[str, Tensor] = {
        name: torch.empty((num_blocks, *tensor.shape), dtype=tensor.dtype, device=tensor.device) for name, tensor in first.items()
    }
    with torch.no_grad():
        for number in range(num_blocks):
            tensors = first if number == 0 else _persistent_tensors(make_block())
            if [(n, t.shape, t.dtype) for n, t in tensors.items()] != [(n, t.shape, t.dtype) for n, t in first.items()]:
                raise InputError(f"block {number} has other parameters or buffers than block 0; make all of one structure")
            for name, tensor in tensors.items():
                stacks[name][number].copy_(tensor)
    by_id: dict[int, Tensor] = {}
    for name, tensor in first.items():
        is_param = isinstance(tensor, nn.Parameter)
        by_id[id(tensor)] = nn.Parameter(stacks[name], requires_grad=tensor.requires_grad) if is_param else stacks[name]
    for module in template.modules():
        for registry in (module._parameters, module._buffers):
            for name, value in registry.items():
                if value is not None and id(value) in by_id:
                    registry[name] = by_id[id(value)]  # type: ignore[assignment]  # one of its own kind
    return template


def _persistent_tensors(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name."""
    persistent = {
        id(module._buffers[name]) for module in block.modules() for name in set(module._buffers) - module._non_persistent_buffers_set
    }
    return {**dict(block.named_parameters()), **{name: b for name, b in block.named_buffers() if id(b) in persistent}}


def stacked_tensors(block: nn.Module) -> dict[str, Tensor]:
    """All stacked tensors by name."""
    return {**dict(block.named_parameters()), **stacked_buffers(block)}


def stacked_buffers(block: nn.Module) -> dict[str, Tensor]:
    """Buffers with an entry per block, by name."""
    shared = shared_buffers(block)
    return {name: buffer for name, buffer in block.named_buffers() if name not in shared}


def shared_buffers(block: nn.Module) -> dict[str, Tensor]:
    """Buffers shared by all blocks, by name."""
    shared = {
        (f"{prefix}." if prefix else "") + name for prefix, module in block.named_modules() for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in block.named_buffers() if name in shared}


def extract_block(block: nn.Module, number: int) -> nn.Module:
    """One block as a plain module, with copies of its weights."""
    memo: dict[int, Any] = {}
    for param in block.parameters():
        memo[id(param)] = nn.Parameter(param.detach()[number].clone(), requires_grad=param.requires_grad)
    for name, buffer in stacked_buffers(block).items():
        memo[id(block.get_buffer(name))] = buffer[number].clone()
    return copy.deepcopy(block, memo)


def load_blocks(block: nn.Module, num_blocks: int, blocks: Sequence[nn.Module]) -> None:
    """Load the parameters and buffers of plain modules.

    Raises:
        InputError: their number or structure differs; no weight is changed.
    """
    if len(blocks) != num_blocks:
        raise InputError(f"{len(blocks)} blocks for a repetition of {num_blocks}; give as many")
    stacks = stacked_tensors(block)
    states = [{**dict(module.named_parameters()), **dict(module.named_buffers())} for module in blocks]
    for number, state in enumerate(states):
        for name, stack in stacks.items():
            if name not in state or state[name].shape != stack.shape[1:]:
                raise InputError(f"block {number} has no {name} of shape {tuple(stack.shape[1:])}; give blocks of the same structure")
    with torch.no_grad():
        for number, state in enumerate(states):
            for name, stack in stacks.items():
                stack[number].copy_(state[name])
