"""Tensors that modules hold in plain containers, or in modules that are in plain containers.

PyTorch does not know them: ``parameters()`` lacks them, ``to()`` and ``state_dict()`` pass them by. The exporter takes them for constants,
without a name and without a gradient. Those that `forward` finds elsewhere (in other objects, globals, closures) have no place that could
be named; the line that reads them can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sft.analysis.attributes import user_attributes

__all__ = ["UnregisteredTensor", "unregistered_tensors", "storage_key"]

_PLAIN_CONTAINERS = (list, tuple, dict)


class UnregisteredTensor(NamedTuple):
    """A tensor that requires a gradient and is no parameter, and the line of `forward` that reads it first."""

    tensor: torch.Tensor
    line: str


def unregistered_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Such tensors by where they are, in the words of Python.

    >>> model = nn.Module()
    >>> model.scales = [torch.ones(1), torch.zeros(1)]
    >>> list(unregistered_tensors(model))
    ['scales[0]', 'scales[1]']
    """
    found: dict[str, torch.Tensor] = {}
    known = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in user_attributes(module):
            if isinstance(value, (*_PLAIN_CONTAINERS, nn.Module)):
                for place, tensor in _tensors_inside(value, f"{path}.{name}" if path else name, known):
                    found.setdefault(place, tensor)
    return found


def storage_key(value: torch.Tensor) -> tuple[Any, ...]:
    """What tells tensors apart that are made of others without a copy, as the exporter does."""
    return (0 if isinstance(value, FakeTensor) else value.data_ptr(), value.shape, value.dtype)


def _tensors_inside(value: Any, path: str, known: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        if id(value) not in known:
            known.add(id(value))
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield f"{path}.{name}", tensor
            for place, tensor in unregistered_tensors(value).items():
                yield f"{path}.{place}", tensor
    elif isinstance(value, _PLAIN_CONTAINERS) and id(value) not in known:
        known.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_inside(item, f"{path}[{key!r}]", known)
