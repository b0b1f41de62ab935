"""The modules, parameters and buffers of a model, collected in one traversal.

A call needs them several times, and PyTorch traverses the model each time. The result of a traversal has two kinds of facts:

- a *structure* (:class:`ModuleStructure`): modules, their names, types and constant attributes, names of tensors, and the names that share
  one. It rarely changes: a snapshot takes that of an earlier one, once all names and objects were compared;
- tensors, hooks, and values that may change in place. Each snapshot reads them anew.

This runs before each call of a model, on hundreds of dictionaries: loops over them are those of ``map``, ``chain`` and ``compress``.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain, compress
from operator import attrgetter, call, is_, itemgetter, methodcaller
from typing import Any, NamedTuple

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

_namespace_of = attrgetter("__dict__")
# Of the dictionary of a module.
_hooks_of = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = (itemgetter("_modules"), itemgetter("_parameters"), itemgetter("_buffers"))
_values = methodcaller("values")


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


class _Contents(NamedTuple):
    """Contents of a model that has a known structure.

    Attributes:
        modules: the modules, by position.
        tensors: the parameters of all modules, then the buffers, by position.
        open_values: values of the open attributes, in order.
        hooked: positions of the modules with hooks.
    """

    modules: list[nn.Module]
    tensors: list[Any]
    open_values: list[Any]
    hooked: list[int]


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
        namespaces, children, *registries = _dictionaries(modules)
        parameters, buffers = map(_all_values, registries)
        ties = _ties([*parameters, *buffers])
        tie_of = dict(zip(map(id, (*parameters, *buffers)), ties, strict=True))
        self.parameters, self.buffers = (
            [tie_of[id(t)] for t in {id(t): t for t in kind if t is not None}.values()] for kind in (parameters, buffers)
        )
        self.named_tensors = {
            f"{path}.{name}" if path else name: tie_of[id(tensor)]
            for path, position in self.named_modules
            for registry in registries
            for name, tensor in registry[position].items()
            if tensor is not None
        }
        self._num_tensors = len({-1, *ties})
        self._tied = [(position, first) for position, first in enumerate(ties) if position != first]

        keys = [{name: _constant_key(value) for name, value in own.items() if name not in MODULE_INTERNALS} for own in namespaces]
        self._constants_of = _Getters([[name for name, key in own.items() if key is not _OPEN] for own in keys])
        self._open_values_of = _Getters([[name for name, key in own.items() if key is _OPEN] for own in keys])
        self._constants = self._constants_of(namespaces)
        self._references = [*map(weakref.ref, modules)]
        self._types = [*map(type, modules)]
        dicts = [*namespaces, *children, *chain.from_iterable(registries)]
        self._lengths, self._names = [*map(len, dicts)], [*chain.from_iterable(dicts)]
        self._has_names = [*map(bool, self._lengths)]
        self._has_children, self._has_tensors = [*map(bool, children)], [*map(bool, chain.from_iterable(registries))]
        self._children = [None if child is None else positions[id(child)] for child in _all_values(children)]
        own_keys = tuple(item for own in keys for item in own.items())
        own_counts = tuple(map(len, keys))
        registered = tuple(tuple(each) for of_module in zip(children, *registries, strict=True) for each in of_module)
        self.key: Hashable = _Key((tuple(self._types), registered, tuple(self._children), tuple(ties), own_counts, own_keys))

    def read(self) -> _Contents | None:
        """The contents of the model; ``None`` if it has another structure."""
        modules: list[Any] = [reference() for reference in self._references]
        if not _all_identical(map(type, modules), self._types):
            return None
        namespaces, children, parameters, buffers = _dictionaries(modules)
        dicts = [*namespaces, *children, *parameters, *buffers]
        if [*map(len, dicts)] != self._lengths or [*chain.from_iterable(compress(dicts, self._has_names))] != self._names:
            return None
        tensors = _all_values(compress(chain(parameters, buffers), self._has_tensors))
        try:
            constants, open_values = self._constants_of(namespaces), self._open_values_of(namespaces)
        except KeyError:  # another thread has deleted an attribute
            return None
        expected_children = [None if position is None else modules[position] for position in self._children]
        is_same = (
            _all_identical(_all_values(compress(children, self._has_children)), expected_children)
            and _all_identical(constants, self._constants)
            and all(_constant_key(value) is _OPEN for value in open_values)
            and self._has_same_ties(tensors)
        )
        if not is_same:
            return None
        hooks = [*map(_hooks_of, namespaces)]
        hooked = [position for position, of_module in enumerate(hooks) if any(of_module)] if any(chain.from_iterable(hooks)) else []
        return _Contents(modules, tensors, open_values, hooked)

    def _has_same_ties(self, tensors: Sequence[Any]) -> bool:
        """True if the same positions share a tensor, or have none."""
        are_tied = all(tensors[position] is (None if first < 0 else tensors[first]) for position, first in self._tied)
        return are_tied and len({id(None), *map(id, tensors)}) == self._num_tensors


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
        self.open_values, self.structure = contents.open_values, known
        self.modules: Mapping[str, nn.Module] = dict(zip(known.paths, contents.modules, strict=True))
        paths = [known.paths[position] for position in contents.hooked]
        self.hooked: Mapping[str, nn.Module] = {path: self.modules[path] for path in paths if path}
        of_position: Any = contents.tensors.__getitem__
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


class _Getters:
    """Values of some attributes of each module, in one list.

    Args:
        names: of each module.
    """

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        self._has_names = [*map(bool, names)]
        self._getters = [_getter(own) for own in names if own]

    def __call__(self, namespaces: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The values in the dictionaries of the modules."""
        return [*chain.from_iterable(map(call, self._getters, compress(namespaces, self._has_names)))]


def _getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function that returns the entries of a dictionary; an ``itemgetter`` of one name returns no tuple."""
    return itemgetter(*names) if len(names) > 1 else lambda namespace: (namespace[names[0]],)


def _dictionaries(modules: Sequence[nn.Module]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """For each module its dictionary, and those of its children, parameters and buffers."""
    namespaces = [*map(_namespace_of, modules)]
    children, parameters, buffers = ([*map(registry, namespaces)] for registry in _REGISTRIES)
    return namespaces, children, parameters, buffers


def _all_values(dicts: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The values of all dictionaries."""
    return [*chain.from_iterable(map(_values, dicts))]


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
