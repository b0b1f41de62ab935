"""Model fingerprint: Python attributes and hooks of modules, compared before each call.

A captured graph has ``momentum``, ``stride`` or a flag of the user's as constants. Setting one of them later, exchanging an
activation or untying two weights changes the model's function, and the shapes of the inputs do not show it. The fingerprint is part of the
key of a capture: with a new fingerprint the model is captured again. Forward hooks on submodules are code of the model
(:mod:`sft.analysis.frontend.submodule_hooks`): the hooks, and values that they carry, are part of the fingerprint.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
from collections import deque
from collections.abc import Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from sft.analysis.frontend.state_snapshot import user_attributes
from sft.analysis.frontend.trace_context import is_fsdp_hook
from sft.common.callable_references import CallableReferences, Identity
from sft.common.module_snapshot import PLAIN_TYPES, ModuleSnapshot, exact_key

__all__ = ["Fingerprint", "module_fingerprint"]

#: Comparable and hashable; equal fingerprints mean that the model's code would run the same way.
Fingerprint = tuple[Any, ...]

#: Arrays of up to this size are compared by value at each call, larger ones by identity.
_MAX_BYTES = 1 << 16

#: Types whose values are interchangeable where they are equal.
_LITERAL_TYPES = frozenset({bool, int, type(None), str})

_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")

_CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)


def module_fingerprint(contents: ModuleSnapshot) -> Fingerprint:
    """Types, plain attributes, tensor shapes and sharing of all modules of a model, and forward hooks on submodules.

    Includes the items of containers, dataclasses and namespaces, also tensors and modules; values of NumPy arrays, or the identity of large
    ones; numbers, strings, functions and types. Attributes of other types are ignored.

    >>> model = nn.BatchNorm2d(3)
    >>> before = module_fingerprint(ModuleSnapshot(model))
    >>> model.momentum = 0.2
    >>> module_fingerprint(ModuleSnapshot(model)) == before
    False
    """
    tensors = (*map(_shape_of, contents.tensors.values()), *map(_dtype_of, contents.tensors.values()))
    if not contents.open_values and not contents.hooked:
        return contents.structure.key, tensors, (), ()
    reader = _FingerprintReader([*contents.modules.values(), *contents.tensors.values()])
    hooks = tuple((path, reader.of_hooks(module)) for path, module in contents.hooked.items())
    return contents.structure.key, tensors, tuple(map(reader.of_value, contents.open_values)), hooks


class _FingerprintReader:
    """Reads attributes and hooks. Objects are numbered, so that the fingerprint shows which names share one.

    Args:
        registered: the modules and tensors of the model, in an order that its structure determines.
    """

    def __init__(self, registered: Sequence[Any]) -> None:
        self._numbers, self._open = dict(zip(map(id, registered), range(len(registered)), strict=True)), set[int]()

    def of_hooks(self, module: nn.Module) -> Fingerprint:
        """Forward hooks of a module, in the order of their calls."""
        before, after = (tuple(map(self._of_hook, hooks.values())) for hooks in (module._forward_pre_hooks, module._forward_hooks))
        return before, after

    def _of_loose_module(self, path: str, module: nn.Module) -> Fingerprint:
        """Fingerprint of a module in a plain container, which PyTorch has not registered."""
        registries = (module._parameters, module._buffers)
        tensors = [(name, self._of_tensor(t, is_loose=True)) for registry in registries for name, t in registry.items()]
        values = [(name, self.of_value(value)) for name, value in user_attributes(module)]
        return path, type(module), self._number(module), tuple(tensors), tuple(values), self.of_hooks(module)

    def _of_hook(self, hook: Any) -> Any:
        """A hook and the values that it carries in closures, defaults and bound objects."""
        if is_fsdp_hook(hook):
            return None
        carried = CallableReferences.of(hook, with_globals=False).values
        return Identity(hook), tuple(self.of_value(reference.value, is_loose=True) for reference in carried)

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(id(value), len(self._numbers))

    def _of_tensor(self, tensor: torch.Tensor | None, *, is_loose: bool) -> Any:
        if tensor is None:
            return None
        key = (self._number(tensor), tensor.shape, tensor.dtype)
        # A capture keeps the values of a loose tensor as a constant, so its address is not reused.
        return (*key, tensor.data_ptr()) if is_loose and type(tensor) in (torch.Tensor, nn.Parameter) else key

    def of_value(self, value: Any, *, is_loose: bool = False) -> Any:
        """Fingerprint of an attribute, or with ``is_loose`` of an object in a container."""
        kind = type(value)
        if kind in _LITERAL_TYPES:  # the common case
            return kind, value
        if kind is tuple and _LITERAL_TYPES.issuperset(map(type, value)):
            return kind, tuple(map(type, value)), value
        if isinstance(value, (*PLAIN_TYPES, *_CALLABLES, Enum)):
            return value if isinstance(value, _CALLABLES) else exact_key(value)
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value, is_loose=is_loose)
        if isinstance(value, nn.Module):
            if id(value) in self._numbers:
                return self._number(value)
            return tuple(self._of_loose_module(path, module) for path, module in value.named_modules())
        if isinstance(value, bytearray):
            return bytes(value)
        if isinstance(value, np.ndarray):
            numbers = value.tobytes() if value.nbytes <= _MAX_BYTES and not value.dtype.hasobject else id(value)
            return value.shape, value.dtype.str, numbers
        if id(value) in self._open:
            return self._number(value)  # it contains itself
        self._open.add(id(value))
        try:
            return self._of_container(value)
        finally:
            self._open.remove(id(value))

    def _of_container(self, value: Any) -> Any:
        if isinstance(value, (tuple, list, deque)):
            return (type(value), *(self.of_value(item, is_loose=True) for item in value))
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(self.of_value(item, is_loose=True) for item in value)
        if dataclasses.is_dataclass(value):
            value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        elif isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
            value = vars(value)
        if isinstance(value, dict):
            return (dict, *((self.of_value(key), self.of_value(item, is_loose=True)) for key, item in value.items()))
        return None
