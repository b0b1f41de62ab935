"""Snapshot and restore of the state of a model that a trace may change: attributes, registries and hooks of modules, and shared state.

A trace runs ``forward`` on fake tensors. All that it leaves is taken back:

- attributes, registered tensors, submodules and hooks of modules, with containers and objects inside them;
- state that hooks refer to: closures, bound objects, and globals;
- class attributes, globals and caches of functions, which may belong to other code as well, only where their new value is one of the trace.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sft.common.callable_references import CallableReferences, function_of
from sft.common.module_snapshot import MODULE_INTERNALS
from sft.common.torch_internals import FakeTensor, FunctionalTensor

__all__ = ["REGISTRIES", "is_user_object", "preserve_model_state", "restore_container", "user_attributes"]

#: Attributes in which a module registers its tensors and submodules.
REGISTRIES = ("_parameters", "_buffers", "_modules")

#: Limits on the depth and length of containers in snapshots: a model may refer to a whole program.
_MAX_DEPTH, _MAX_ITEMS = 5, 10_000

#: Size of the arrays that are restored where hooks refer to them.
_MAX_ARRAY_BYTES = 1 << 24

#: Packages whose objects, classes and modules are left out of snapshots. Those of Python may belong to other threads.
_LIBRARY_PACKAGES = frozenset(sys.stdlib_module_names - {"__main__", "argparse", "types"}) | {"torch", "numpy", "sft"}

#: Containers other than dictionaries.
_COLLECTION_TYPES = (list, set, deque)

_LRU_CACHE_TYPE: Any = type(functools.lru_cache(len))
_TRACING_TYPES = (FakeTensor, FunctionalTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
#: Containers of weak references, which keep them in an attribute ``data``.
_WEAK_CONTAINERS: Any = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_MISSING = object()


def user_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module other than those of every module."""
    return ((name, value) for name, value in vars(module).items() if name not in MODULE_INTERNALS)


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
    """Snapshot of the attributes, registries and hooks of all modules, and of containers and objects inside them."""

    def __init__(self, model: nn.Module) -> None:
        self._snapshots: dict[int, tuple[Any, Any]] = {}
        modules = list(model.modules())
        self._classes = [(module, type(module)) for module in modules]
        for module in modules:
            for container in (vars(module), *(vars(module).get(name) for name in MODULE_INTERNALS)):
                if isinstance(container, (dict, set)):
                    self._snapshots[id(container)] = container, _shallow_copy(container)
        for module in modules:
            for _, value in user_attributes(module):
                self._add(value, 0)
        hooks = [hook for module in modules for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())]
        hooks = [hook for hook in hooks if not _is_library_object(function_of(hook) or type(hook))]
        collected = [CallableReferences.of(hook, with_globals=True) for hook in hooks]
        for references in collected:
            for value in (*references.owners, *(each.value for each in references.values), *map(vars, references.functions)):
                self._add(value, 0)
        arrays = [each.value for references in collected for each in references.values if isinstance(each.value, np.ndarray)]
        self._arrays = [(array, array.copy()) for array in arrays if array.nbytes <= _MAX_ARRAY_BYTES and array.flags.writeable]
        self._cells = [(cell, cell.cell_contents) for references in collected for cell in references.cells if _is_assigned(cell)]
        self._globals = [
            (namespace, name, namespace[name])
            for references in collected
            for namespace, name in references.stored_globals
            if name in namespace
        ]

    def restore_state(self) -> None:
        for module, cls in self._classes:
            if type(module) is not cls:
                module.__class__ = cls
        for container, content in self._snapshots.values():
            restore_container(container, content)
        for array, content in self._arrays:
            array[...] = content
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                cell.cell_contents = value
        for namespace, name, value in self._globals:
            namespace[name] = value

    def _add(self, value: Any, depth: int) -> None:
        container = vars(value) if is_user_object(value) else value.data if isinstance(value, _WEAK_CONTAINERS) else value
        is_container = isinstance(container, dict) or type(container) in _COLLECTION_TYPES
        if not is_container or id(container) in self._snapshots or depth > _MAX_DEPTH or len(container) > _MAX_ITEMS:
            return
        content = _shallow_copy(container)
        self._snapshots[id(container)] = container, content
        for item in content.values() if isinstance(content, dict) else content:
            self._add(item, depth + 1)


def _is_assigned(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises ValueError where it has none
    except ValueError:
        return False
    return True


class _NamespaceState:
    """Snapshot of the model's classes, and of the Python modules that define them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module) for module in model.modules()}
        self._namespaces = [(namespace, dict(vars(namespace))) for namespace in _user_namespaces(model)]
        values = [value for _, names in self._namespaces for value in names.values()]
        containers = [value.data if isinstance(value, _WEAK_CONTAINERS) else value for value in values]
        self._containers = [
            (value, _shallow_copy(value))
            for value in containers
            if (isinstance(value, dict) or type(value) in _COLLECTION_TYPES) and len(value) <= _MAX_ITEMS
        ]
        caches = [value for value in values if type(value) is _LRU_CACHE_TYPE and not _is_library_object(value)]
        self._caches = [(cache, cache.cache_info().currsize) for cache in caches]

    def restore_state(self) -> None:
        for namespace, names in self._namespaces:
            for name, value in list(vars(namespace).items()):
                before = names.get(name, _MISSING)
                if value is not before and _is_tracing_value(value):
                    delattr(namespace, name) if before is _MISSING else setattr(namespace, name, before)
        for container, content in self._containers:
            if _is_tracing_value(container) or self._registers_model(container, content):
                restore_container(container, content)
        for cache, size in self._caches:
            if cache.cache_info().currsize != size:
                cache.cache_clear()  # a cache does not show its entries

    def _registers_model(self, container: Any, content: Any) -> bool:
        """Return true where a container has a new item that stands for one of the model's modules or hooks."""
        if isinstance(container, dict):
            new = [item for key, value in container.items() if content.get(key, _MISSING) is not value for item in (key, value)]
        else:
            old = {id(item) for item in content}
            new = [item for item in container if id(item) not in old]
        return any(self._stands_for_module(item) for item in new)

    def _stands_for_module(self, item: Any) -> bool:
        if isinstance(item, weakref.ref):
            item = item()
        return isinstance(item, RemovableHandle) or id(item) in self._modules or (type(item) is int and item in self._modules)


def is_user_object(value: Any) -> bool:
    """Return true for an object of the user's with an attribute dictionary."""
    if isinstance(value, (torch.Tensor, type, types.ModuleType, types.FunctionType)) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    return isinstance(value, nn.Module) or not _is_library_object(type(value))


def _is_tracing_value(value: Any) -> bool:
    """Return true for a fake tensor or symbolic number, and for a container or module that has one."""
    if (isinstance(value, dict) or type(value) in (*_COLLECTION_TYPES, tuple)) and len(value) <= _MAX_ITEMS:
        return any(isinstance(item, _TRACING_TYPES) for item in (list(value.values()) if isinstance(value, dict) else list(value)))
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
