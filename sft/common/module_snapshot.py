"""The modules, parameters and buffers of a model, collected in one traversal.

A call needs them several times, and PyTorch traverses the model each time. The result of a traversal has two kinds of facts:

- a *structure* (:class:`ModuleStructure`): modules, their names, types and constant attributes, names of tensors, and the names that share
  one. It rarely changes: a snapshot takes that of an earlier one, once all names and objects were compared;
- tensors, hooks, and values that may change in place. Each snapshot reads them anew.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn

__all__ = ["MODULE_INTERNALS", "PLAIN_TYPES", "ModuleSnapshot", "ModuleStructure", "exact_key"]

#: Attributes of every module, registries included.
MODULE_INTERNALS = frozenset(nn.Module().__dict__)

#: Types without identity: two values of a type that are equal are interchangeable.
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_CALLABLE_TYPES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
#: Types of the items of constant tuples.
_ITEM_TYPES = frozenset({bool, int, type(None), str})

#: Kinds of attributes that are not constants: those whose values may change in place, and those of every module.
_OPEN, _INTERNAL = object(), object()

_hooks_of = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_REGISTRIES = (attrgetter("_parameters"), attrgetter("_buffers"))
_children_of = attrgetter("_modules")
_keys, _values = methodcaller("keys"), methodcaller("values")


def exact_key(value: Any) -> Any:
    """A key that is equal for identical plain values only: 1, 1.0 and True differ, 0.0 and -0.0 differ, NaN equals NaN.

    >>> exact_key(1) == exact_key(1.0), exact_key(0.0) == exact_key(-0.0), exact_key(float("nan")) == exact_key(float("nan"))
    (False, False, True)
    """
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


class _Key:
    """A hashable value with its hash, which is not computed again."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value, self._hash = value, hash(value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self._hash == other._hash and self._value == other._value)

    def __hash__(self) -> int:
        return self._hash


class ModuleStructure:
    """The modules of a model, with all names, types and constant attributes in them, and the names that share a tensor.

    Constants are plain values, functions, types, and tuples of plain values. They are compared by identity, as are modules. Other
    attributes are *open*: their values may change in place. A structure keeps no module and no tensor alive.

    Tensors have positions: the parameters of all modules, then the buffers of all modules.

    Attributes:
        key: equal for equal names, types, constants and shared tensors. Hooks are not part of it.
        named_modules: each path of each module, with the position of the module; never descends into an ancestor.
        paths: the first path of each module.
        named_tensors: each name of each tensor, with the position of the tensor.
        parameters: positions of the parameters, each parameter once.
        buffers: positions of the buffers, each buffer once.
    """

    def __init__(self, model: nn.Module) -> None:
        named_modules = [*_named_modules("", model)]
        modules = [*{id(module): module for _, module in named_modules}.values()]
        positions = {id(module): position for position, module in enumerate(modules)}
        self.named_modules = [(path, positions[id(module)]) for path, module in named_modules]
        first_paths: dict[int, str] = {}
        for path, position in self.named_modules:
            first_paths.setdefault(position, path)
        self.paths = [*first_paths.values()]
        parameters, buffers = (_items(modules, registry) for registry in _TENSOR_REGISTRIES)
        self._ties = _ties([*parameters, *buffers])
        first = dict(zip(map(id, (*parameters, *buffers)), self._ties, strict=True))
        self.parameters, self.buffers = (
            [first[id(t)] for t in {id(t): t for t in kind if t is not None}.values()] for kind in (parameters, buffers)
        )
        self.named_tensors = {
            f"{path}.{name}" if path else name: first[id(tensor)]
            for path, module in named_modules
            for registry in _TENSOR_REGISTRIES
            for name, tensor in registry(module).items()
            if tensor is not None
        }

        attributes = [item for module in modules for item in vars(module).items()]
        keys = [_constant_key(value) if name not in MODULE_INTERNALS else _INTERNAL for name, value in attributes]
        self._is_constant = [key is not _OPEN and key is not _INTERNAL for key in keys]
        self._is_open = [key is _OPEN for key in keys]
        self._constants = [value for _, value in compress(attributes, self._is_constant)]
        self._references = [*map(weakref.ref, modules)]
        self._types = [*map(type, modules)]
        self._names = _names_in(modules)
        self._children = [None if child is None else positions[id(child)] for child in _items(modules, _children_of)]
        own_keys = tuple((name, key) for (name, _), key in zip(attributes, keys, strict=True) if key is not _INTERNAL)
        own_counts = tuple(sum(name not in MODULE_INTERNALS for name in vars(module)) for module in modules)
        registered = tuple(tuple(registry(module).keys()) for module in modules for registry in (_children_of, *_TENSOR_REGISTRIES))
        self.key: Hashable = _Key((tuple(self._types), registered, tuple(self._children), tuple(self._ties), own_counts, own_keys))

    def read(self) -> tuple[list[nn.Module], list[torch.Tensor | None], list[Any]] | None:
        """The modules, the tensors and the values of open attributes, by position; ``None`` if the model has another structure."""
        modules: list[Any] = [reference() for reference in self._references]
        if not _all_identical(map(type, modules), self._types) or _names_in(modules) != self._names:
            return None
        children = [None if position is None else modules[position] for position in self._children]
        values = [*chain.from_iterable(map(_values, map(vars, modules)))]
        open_values = [*compress(values, self._is_open)]
        tensors = [tensor for registry in _TENSOR_REGISTRIES for tensor in _items(modules, registry)]
        is_same = (
            _all_identical(_items(modules, _children_of), children)
            and _all_identical(compress(values, self._is_constant), self._constants)
            and all(_constant_key(value) is _OPEN for value in open_values)
            and _ties(tensors) == self._ties
        )
        return (modules, tensors, open_values) if is_same else None


class ModuleSnapshot:
    """The modules and registered tensors of a model.

    Args:
        model: the model.
        known: the structure of an earlier snapshot, which is taken over if the model still has it.

    Attributes:
        structure: its structure.
        modules: each module once by its first path, in the order of ``model.modules()``.
        hooked: the submodules with hooks, likewise.
        parameters: each parameter once, in the order of ``model.parameters()``.
        buffers: each buffer once, likewise.
        tensors: parameters and buffers by all of their names.
        open_values: values of the attributes that are not constant.
        dtype: element type of the first floating-point parameter or buffer; ``None`` without one.
        device: device of that tensor, or the CPU.

    >>> snapshot = ModuleSnapshot(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    >>> [*snapshot.modules], len(snapshot.parameters), sorted(snapshot.tensors)[:2], snapshot.dtype
    (['', '0', '1'], 4, ['0.bias', '0.weight'], torch.float32)
    """

    def __init__(self, model: nn.Module, known: ModuleStructure | None = None) -> None:
        contents = None if known is None else known.read()
        while known is None or contents is None:  # again if another thread changes the model
            known = ModuleStructure(model)
            contents = known.read()
        modules, tensors, self.open_values = contents
        self.structure = known
        self.modules: Mapping[str, nn.Module] = dict(zip(known.paths, modules, strict=True))
        self.hooked: Mapping[str, nn.Module] = {path: module for path, module in self.modules.items() if path and any(_hooks_of(module))}
        of_position: Any = tensors.__getitem__
        self.parameters: Sequence[nn.Parameter] = tuple(map(of_position, known.parameters))
        self.buffers: Sequence[torch.Tensor] = tuple(map(of_position, known.buffers))
        self.tensors: Mapping[str, torch.Tensor] = dict(
            zip(known.named_tensors, map(of_position, known.named_tensors.values()), strict=True)
        )
        first = next((tensor for tensor in (*self.parameters, *self.buffers) if tensor.is_floating_point()), None)
        self.dtype = None if first is None else first.dtype
        self.device = torch.device("cpu") if first is None else first.device


def _named_modules(path: str, module: nn.Module, ancestors: tuple[nn.Module, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Each path of each module; never descends into an ancestor."""
    yield path, module
    ancestors = (*ancestors, module)
    for name, child in module._modules.items():
        if child is not None and not any(child is ancestor for ancestor in ancestors):
            yield from _named_modules(f"{path}.{name}" if path else name, child, ancestors)


def _constant_key(value: Any) -> Hashable:
    """A key that is equal for equal constants; ``_OPEN`` for other values."""
    if type(value) is tuple and _ITEM_TYPES.issuperset(map(type, value)):
        return tuple, tuple(map(type, value)), value
    if isinstance(value, _CALLABLE_TYPES):
        return value
    return exact_key(value) if isinstance(value, (*PLAIN_TYPES, Enum)) else _OPEN


def _items(modules: Iterable[nn.Module], registry: Callable[[nn.Module], Any]) -> list[Any]:
    """The entries of a registry of all modules."""
    return [*chain.from_iterable(map(_values, map(registry, modules)))]


def _names_in(modules: Sequence[nn.Module]) -> tuple[list[int], list[Any]]:
    """Names of all attributes and registered objects of modules, and the number of them in each dictionary."""
    registries = (vars, _children_of, *_TENSOR_REGISTRIES)
    dicts = [namespace for registry in registries for namespace in map(registry, modules)]
    return [*map(len, dicts)], [*chain.from_iterable(map(_keys, dicts))]


def _ties(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """For each tensor the position of its first occurrence; -1 for none.

    >>> x, y = torch.zeros(2), torch.zeros(2)
    >>> _ties([x, None, y, x])
    [0, -1, 2, 0]
    """
    first = {id(None): -1}
    return [first.setdefault(id(tensor), position) for position, tensor in enumerate(tensors)]


def _all_identical(values: Iterable[Any], expected: Iterable[Any]) -> bool:
    """True if both have the same objects, for equal lengths."""
    return all(map(is_, values, expected))
