"""Snapshot and restore of Python state that ``forward`` changes while it is traced.

A trace runs ``forward`` once, on fake tensors. State that ``forward`` keeps (a parameter that it makes when it first runs, a grid in a list
or a cache, a counter) must not survive the trace: fake tensors have no values, and each attempt has to start from the same state.

- *Model state* (:func:`preserve_model_state`): attributes and registered tensors of modules, with containers and objects inside them, are
  restored. Class attributes, globals and caches of functions may belong to other code as well, and are restored only where their new value
  is one of the trace.
- *Attributes* (:func:`preserve_attributes`) and *objects* (:func:`preserve_objects`): plain values (numbers, strings) that the first call
  changes are restored and reported. The model may compute another function at its next call, so it is traced again with the new values.
  Parameters that ``forward`` freezes or unfreezes would be differentiated as before; this is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from enum import Enum
from typing import Any

import torch
from torch import nn

from sft.common.errors import UnsupportedError
from sft.common.torch_internals import FakeTensor, FunctionalTensor

__all__ = [
    "PLAIN_TYPES",
    "REGISTRIES",
    "AttributeChangeHook",
    "AttributeChanges",
    "AttributeOwner",
    "ObjectChangeHook",
    "ObjectChanges",
    "exact_key",
    "is_plain",
    "override_attributes",
    "override_objects",
    "preserve_attributes",
    "preserve_model_state",
    "preserve_objects",
    "reachable_objects",
    "restore_container",
    "user_attributes",
]

#: Attributes in which a module registers its tensors and submodules.
REGISTRIES = ("_parameters", "_buffers", "_modules")

#: Limits on the depth and length of containers in snapshots: a model may refer to a whole program.
_MAX_DEPTH, _MAX_ITEMS = 5, 10_000

#: Packages whose objects, classes and modules are left out of snapshots. Those of Python may belong to other threads.
_LIBRARY_PACKAGES = frozenset(sys.stdlib_module_names - {"__main__", "argparse", "types"}) | {"torch", "numpy", "sft"}

#: Containers other than dictionaries.
_COLLECTION_TYPES = (list, set, deque)

_LRU_CACHE_TYPE: Any = type(functools.lru_cache(len))
_TRACING_TYPES = (FakeTensor, FunctionalTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_MISSING = object()


#: Attributes of every module, registries included.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)


def user_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module other than those of every module."""
    return ((name, value) for name, value in vars(module).items() if name not in _MODULE_INTERNALS)


@contextlib.contextmanager
def preserve_model_state(model: nn.Module) -> Iterator[None]:
    """A context after which the model's state is restored, and namespaces of its classes contain no tensors of the trace."""
    containers, namespaces = _ContainerState(model), _NamespaceState(model)
    try:
        yield
    finally:
        containers.restore_state()
        namespaces.restore_state()


class _ContainerState:
    """Snapshot of the attributes and registries of all modules, and of containers and objects inside them."""

    def __init__(self, model: nn.Module) -> None:
        self._snapshots: dict[int, tuple[Any, Any]] = {}
        modules = list(model.modules())
        for module in modules:
            for container in (vars(module), module._non_persistent_buffers_set, *(vars(module)[name] for name in REGISTRIES)):
                self._snapshots[id(container)] = container, _shallow_copy(container)
        for module in modules:
            for _, value in user_attributes(module):
                self._add(value, 0)

    def restore_state(self) -> None:
        for container, content in self._snapshots.values():
            restore_container(container, content)

    def _add(self, value: Any, depth: int) -> None:
        container = vars(value) if _is_user_object(value) else value
        is_container = isinstance(container, dict) or type(container) in _COLLECTION_TYPES
        if not is_container or id(container) in self._snapshots or depth > _MAX_DEPTH or len(container) > _MAX_ITEMS:
            return
        content = _shallow_copy(container)
        self._snapshots[id(container)] = container, content
        for item in content.values() if isinstance(content, dict) else content:
            self._add(item, depth + 1)


class _NamespaceState:
    """Snapshot of the model's classes, and of the Python modules that define them."""

    def __init__(self, model: nn.Module) -> None:
        self._namespaces = [(namespace, dict(vars(namespace))) for namespace in _user_namespaces(model)]
        values = [value for _, names in self._namespaces for value in names.values()]
        self._containers = [(value, _shallow_copy(value)) for value in values if type(value) in (dict, list) and len(value) <= _MAX_ITEMS]
        caches = [value for value in values if type(value) is _LRU_CACHE_TYPE and not _is_library_object(value)]
        self._caches = [(cache, cache.cache_info().currsize) for cache in caches]

    def restore_state(self) -> None:
        for namespace, names in self._namespaces:
            for name, value in list(vars(namespace).items()):
                before = names.get(name, _MISSING)
                if value is not before and _is_tracing_value(value):
                    delattr(namespace, name) if before is _MISSING else setattr(namespace, name, before)
        for container, content in self._containers:
            if _is_tracing_value(container):
                restore_container(container, content)
        for cache, size in self._caches:
            if cache.cache_info().currsize != size:
                cache.cache_clear()  # a cache does not show its entries


def _is_user_object(value: Any) -> bool:
    """Return true for an object of the user's with an attribute dictionary."""
    if isinstance(value, (torch.Tensor, type, types.ModuleType, types.FunctionType)) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    return isinstance(value, nn.Module) or not _is_library_object(type(value))


def _is_tracing_value(value: Any) -> bool:
    """Return true for a fake tensor or symbolic number, and for a container or module that has one."""
    if type(value) in (dict, list, tuple) and len(value) <= _MAX_ITEMS:
        return any(isinstance(item, _TRACING_TYPES) for item in (list(value.values()) if type(value) is dict else value))
    if isinstance(value, nn.Module):
        return any(isinstance(tensor, _TRACING_TYPES) for tensor in (*value.parameters(), *value.buffers()))
    return isinstance(value, _TRACING_TYPES)


def _shallow_copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else type(container)(container)


def restore_container(container: Any, content: Any) -> None:
    """Restore the items of a container and their order."""
    if isinstance(container, dict):
        for key in [key for key in container if key not in content]:
            del container[key]
        for key, value in content.items():
            if container.get(key, _MISSING) is not value:
                container[key] = value
        if any(a is not b for a, b in zip(container, content, strict=True)):  # optimizers' groups have this order
            container.clear()
            container.update(content)
    elif len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
        container.clear()
        container.update(content) if isinstance(container, set) else container.extend(content)


def _user_namespaces(model: nn.Module) -> list[Any]:
    """The classes of a model's modules, and the Python modules that define them, without those of libraries."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__ if not _is_library_object(cls))
    python_modules = {cls.__module__: sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}
    return [*classes, *python_modules.values()]


def _is_library_object(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _LIBRARY_PACKAGES


#: New values of plain attributes, by the module and the attribute's name.
AttributeChanges = dict[tuple[nn.Module, str], Any]

#: Types without identity: two values of a type that are equal are interchangeable.
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def exact_key(value: Any) -> Any:
    """A key that is equal for identical plain values only: 1, 1.0 and True differ, 0.0 and -0.0 differ, NaN equals NaN.

    >>> exact_key(1) == exact_key(1.0), exact_key(0.0) == exact_key(-0.0), exact_key(float("nan")) == exact_key(float("nan"))
    (False, False, True)
    """
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


@contextlib.contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[AttributeChanges]:
    """A context after which module attributes are restored. Yields the new values of plain attributes that the first call changes."""
    change_hook = AttributeChangeHook(
        [(module, {**_mutable_attributes(module), **_container_copies(module)}) for module in model.modules()]
    )
    with preserve_model_state(model), model.register_forward_pre_hook(change_hook), model.register_forward_hook(change_hook):
        yield change_hook.changes


class AttributeChangeHook:
    """A forward hook and pre-hook that compares the attributes of a model's modules at the start and the end of its first call.

    The comparison must be inside of the call, since the exporter restores numbers itself.
    """

    def __init__(self, before: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
        self._before, self._is_over, self.changes = before, False, AttributeChanges()
        self._frozen: frozenset[str] = frozenset()

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], *outputs: Any) -> None:
        """Note the frozen parameters before the call (without outputs), and the changes after it."""
        if self._is_over:
            return
        if not outputs:
            self._frozen = _frozen_parameter_names(model)
            return
        self._is_over = True
        changed = sorted(self._frozen ^ _frozen_parameter_names(model))
        if changed:
            raise UnsupportedError(
                [
                    f"{name}: `forward` sets requires_grad of this parameter; set it outside of `forward`, before the call"
                    for name in changed
                ]
            )
        for module, before in self._before:
            for name, value in _mutable_attributes(module).items():
                old = before.get(name, value)
                if value is not old and is_plain(value) and is_plain(old) and value != old:
                    self.changes[module, name] = copy(value)


@contextlib.contextmanager
def override_attributes(changes: AttributeChanges) -> Iterator[None]:
    """A context in which attributes have their changed values."""
    originals = {(module, name): vars(module)[name] for module, name in changes}
    try:
        for (module, name), value in changes.items():
            vars(module)[name] = value
        yield
    finally:
        for (module, name), value in originals.items():
            vars(module)[name] = value


def _mutable_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that `forward` may set."""
    return {**dict(user_attributes(module)), "training": module.training}


def _frozen_parameter_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that require no gradient."""
    return frozenset(name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad)


def _container_copies(module: nn.Module) -> Mapping[str, Any]:
    """Copies of the lists and dictionaries among a module's attributes."""
    return {name: value.copy() for name, value in user_attributes(module) if type(value) in (list, dict)}


def is_plain(value: Any, containers: tuple[Any, ...] = ()) -> bool:
    """Return true for a plain value, and for an acyclic container of plain values. ``containers`` are those that enclose the value."""
    if isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        return not any(value is container for container in containers) and all(is_plain(item, (*containers, value)) for item in items)
    return type(value) in PLAIN_TYPES


#: Limits of the search for objects: depth, number of objects, items of one container.
_MAX_LEVELS, _MAX_OBJECTS, _MAX_ITEMS_OF_OBJECT = 4, 20_000, 256

_CONTAINER_TYPES = (list, tuple, dict)
_OPAQUE_TYPES = (*PLAIN_TYPES, torch.Tensor, nn.Module, Enum, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
#: Packages whose classes and objects are not searched.
_UNSEARCHED_PACKAGES = frozenset({"torch", "numpy", "builtins", "sft", "threading", "logging"})


class AttributeOwner:
    """An object or a class with attributes, compared by identity."""

    def __init__(self, value: Any) -> None:
        self._value, self._is_class = value, isinstance(value, type)
        self.name = f"(the class {value.__name__})" if self._is_class else f"(an object {type(value).__name__})"

    def values(self) -> dict[str, Any]:
        """The attributes; of a class without those with two leading underscores."""
        values = dict(vars(self._value))
        return {name: value for name, value in values.items() if not name.startswith("__")} if self._is_class else values

    def put(self, name: str, value: Any) -> None:
        """Set an attribute, without descriptors or ``__setattr__`` of the object's class."""
        if self._is_class:
            setattr(self._value, name, value)
        else:
            vars(self._value)[name] = value

    def drop(self, name: str) -> None:
        """Remove an attribute."""
        if self._is_class:
            delattr(self._value, name)
        else:
            del vars(self._value)[name]

    def restore(self, before: dict[str, Any]) -> None:
        """Restore the attributes to earlier values."""
        current = self.values()
        for name in current.keys() - before.keys():
            self.drop(name)
        for name, value in before.items():
            if name not in current or current[name] is not value:
                self.put(name, value)


#: New values of plain attributes, by the attribute's owner and name.
ObjectChanges = dict[tuple[AttributeOwner, str], Any]


def reachable_objects(model: nn.Module) -> list[Any]:
    """The modules' classes, and objects that modules and classes refer to, directly or through containers and other objects.

    Tensors, modules and plain values are left out.
    """
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__ if not _is_library_class(cls))
    objects, visited = list[Any](classes), set[int]()
    queue = [(value, 1) for cls in classes for value in vars(cls).values()]
    queue += [(value, 1) for module in model.modules() for _, value in user_attributes(module) if type(value) not in PLAIN_TYPES]
    max_length = len(queue) + _MAX_OBJECTS
    for value, level in queue:  # the loop appends to it
        if isinstance(value, _OPAQUE_TYPES) or id(value) in visited:
            continue
        visited.add(id(value))
        is_container = isinstance(value, _CONTAINER_TYPES)
        if not is_container:
            objects.append(value)
        if level < _MAX_LEVELS and len(queue) < max_length:
            items = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else _attribute_values(value)
            queue += [(item, level + 1) for item in itertools.islice(items, _MAX_ITEMS_OF_OBJECT) if type(item) not in PLAIN_TYPES]
    return objects


def _attribute_values(value: Any) -> list[Any]:
    return list(vars(value).values()) if _has_attributes(value) else []


def _has_attributes(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_library_class(type(value))


def _is_library_class(cls: type) -> bool:
    return str(cls.__module__).partition(".")[0] in _UNSEARCHED_PACKAGES


@contextlib.contextmanager
def preserve_objects(model: nn.Module) -> Iterator[ObjectChanges]:
    """A context in which changes to objects are undone after each call. Yields new values of plain attributes that the first call sets."""
    change_hook = ObjectChangeHook(
        [AttributeOwner(value) for value in reachable_objects(model) if isinstance(value, type) or _has_attributes(value)]
    )
    try:
        with model.register_forward_pre_hook(change_hook), model.register_forward_hook(change_hook):
            yield change_hook.changes
    finally:
        change_hook.restore()


class ObjectChangeHook:
    """A forward hook and pre-hook that compares and restores attributes of objects at the start and the end of calls.

    Changes outside of calls are left alone: they may be those of other threads.
    """

    def __init__(self, owners: Sequence[AttributeOwner]) -> None:
        self._owners, self._is_over, self.changes = owners, False, ObjectChanges()
        self._before: dict[AttributeOwner, dict[str, Any]] = {}
        self._contents: list[tuple[Any, Any]] = []

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], *outputs: Any) -> None:
        """Take a snapshot before a call (without outputs); note changes and restore after it."""
        if not outputs:
            self._before = {owner: owner.values() for owner in self._owners}
            values = (value for before in self._before.values() for value in before.values())
            self._contents = [(value, value.copy()) for value in values if type(value) in (list, dict)]
            return
        if not self._is_over:
            self._is_over = True
            self._note()
        self.restore()

    def _note(self) -> None:
        contents = {id(value): content for value, content in self._contents}
        for owner, before in self._before.items():
            for name, value in owner.values().items():
                old = before.get(name, _MISSING)
                old = contents.get(id(old), old)
                if value is not old and is_plain(value) and (old is _MISSING or (is_plain(old) and value != old)):
                    self.changes[owner, name] = copy(value)

    def restore(self) -> None:
        """Undo the changes since the start of the call."""
        for owner, before in self._before.items():
            owner.restore(before)
        for value, content in self._contents:
            restore_container(value, content)
        self._before, self._contents = {}, []


@contextlib.contextmanager
def override_objects(changes: ObjectChanges) -> Iterator[None]:
    """A context in which attributes of objects have their changed values."""
    originals = {owner: owner.values() for owner, _ in changes}
    try:
        for (owner, name), value in changes.items():
            owner.put(name, value)
        yield
    finally:
        for owner, before in originals.items():
            owner.restore(before)
