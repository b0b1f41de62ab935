"""What a capture took from a model's Python attributes, so that a later change of one is noticed.

A captured graph holds ``momentum``, ``stride`` or a flag of the user's as constants. Setting one of them afterwards, exchanging an
activation or untying two weights changes what the model computes, and none of it shows in the shapes of the inputs. The fingerprint is
part of what a plan is made for: with another fingerprint the model is captured again.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from sft.analysis.loose import loose_tensors

__all__ = ["Fingerprint", "fingerprint"]

#: Comparable and hashable; equal fingerprints mean that the model's code would run the same way.
Fingerprint = tuple[Any, ...]

#: What every module has; parameters, buffers and submodules are looked at one by one, training flags elsewhere.
_INTERNAL = frozenset(nn.Module().__dict__)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)


def fingerprint(model: nn.Module) -> Fingerprint:
    """Types, plain attributes, tensor shapes and sharing of all modules of ``model``.

    Attributes that are neither numbers, strings, functions, types nor containers of these are not looked at.

    >>> model = nn.BatchNorm2d(3)
    >>> before = fingerprint(model)
    >>> model.momentum = 0.2
    >>> fingerprint(model) == before
    False
    """
    first: dict[int, int] = {}
    modules = tuple(_of_module(path, module, first) for path, module in model.named_modules(remove_duplicate=False))
    return (*modules, *((path, _place_of(tensor), _of_tensor(tensor, first)) for path, tensor in loose_tensors(model).items()))


def _place_of(tensor: torch.Tensor) -> int:
    """Where the numbers of a tensor are that a capture has as a constant: that keeps the place from being used again."""
    return tensor.data_ptr() if type(tensor) in (torch.Tensor, nn.Parameter) else 0


def _of_module(path: str, module: nn.Module, first: dict[int, int]) -> Fingerprint:
    tensors = [(name, _of_tensor(t, first)) for held in (module._parameters, module._buffers) for name, t in held.items()]
    values = [(name, _of_value(value, first)) for name, value in module.__dict__.items() if name not in _INTERNAL]
    return path, type(module), _number(module, first), tuple(tensors), tuple(values)


def _number(value: Any, first: dict[int, int]) -> int:
    """The same number for the same object: which names share a tensor."""
    return first.setdefault(id(value), len(first))


def _of_tensor(tensor: torch.Tensor | None, first: dict[int, int]) -> Any:
    return None if tensor is None else (_number(tensor, first), tensor.shape, tensor.dtype)


def _of_value(value: Any, first: dict[int, int]) -> Any:
    if isinstance(value, (*_NUMBERS, *_CALLABLES)):
        return value if type(value) is not float or value == value else "nan"
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, first)
    if isinstance(value, nn.Module) and id(value) not in first:  # one that is not registered, in a container
        return tuple(_of_module(path, module, first) for path, module in value.named_modules(remove_duplicate=False))
    if isinstance(value, (tuple, list)):
        return (type(value), *(_of_value(item, first) for item in value))
    if isinstance(value, dict):
        return (dict, *((_of_value(key, first), _of_value(item, first)) for key, item in value.items()))
    return None
