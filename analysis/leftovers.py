"""What a trace leaves behind where `forward` keeps things, taken back: it ran on tensors that do not exist.

`forward` may make a parameter when it first runs, or keep a grid in a list, in an object of the user's, or in a cache of Python's. Such a
tensor has no numbers once the trace is over, and whoever found it there would compute with nothing. So everything that a model holds is as
it was before: its attributes and registered tensors, and containers and objects below them. What is beside its classes (attributes of
classes, globals, caches of functions) may be others' as well, and is put back only where it has become a trace's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = ["REGISTRIES", "preserve_model_state", "user_attributes", "restore_container"]

#: Where a module has its tensors and submodules.
REGISTRIES = ("_parameters", "_buffers", "_modules")

#: How deep containers and objects are looked into, and how large they may be: a model may hold on to a whole program.
_MAX_DEPTH, _MAX_ITEMS = 5, 10_000

#: Packages whose objects are not looked into, nor what is beside their classes. Those of Python may belong to other threads.
_LIBRARY_PACKAGES = frozenset(sys.stdlib_module_names - {"__main__", "argparse", "types"}) | {"torch", "numpy", "sft"}

#: Containers besides dictionaries.
_COLLECTION_TYPES = (list, set, deque)

_LRU_CACHE_TYPE: Any = type(functools.lru_cache(len))
_TRACING_TYPES = (FakeTensor, FunctionalTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_MISSING = object()


#: What every module has: parameters, buffers and submodules among it.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)


def user_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that a module has besides those that every module has."""
    return ((name, value) for name, value in vars(module).items() if name not in _MODULE_INTERNALS)


@contextlib.contextmanager
def preserve_model_state(model: nn.Module) -> Iterator[None]:
    """Put back what is set meanwhile in what ``model`` holds, and what becomes a trace's beside its classes."""
    held, beside = _ContainerState(model), _NamespaceState(model)
    try:
        yield
    finally:
        held.put_back()
        beside.put_back()


class _ContainerState:
    """What a model holds."""

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        modules = list(model.modules())
        for module in modules:
            for container in (vars(module), module._non_persistent_buffers_set, *(vars(module)[name] for name in REGISTRIES)):
                self._known[id(container)] = container, _shallow_copy(container)
        for module in modules:
            for _, value in user_attributes(module):
                self._add(value, 0)

    def put_back(self) -> None:
        for container, content in self._known.values():
            restore_container(container, content)

    def _add(self, value: Any, depth: int) -> None:
        container = vars(value) if _is_user_object(value) else value
        is_container = isinstance(container, dict) or type(container) in _COLLECTION_TYPES
        if not is_container or id(container) in self._known or depth > _MAX_DEPTH or len(container) > _MAX_ITEMS:
            return
        content = _shallow_copy(container)
        self._known[id(container)] = container, content
        for item in content.values() if isinstance(content, dict) else content:
            self._add(item, depth + 1)


class _NamespaceState:
    """What is beside the classes of a model's modules: attributes of these, globals of the modules of Python that they are in."""

    def __init__(self, model: nn.Module) -> None:
        self._namespaces = [(namespace, dict(vars(namespace))) for namespace in _user_namespaces(model)]
        values = [value for _, names in self._namespaces for value in names.values()]
        self._containers = [(value, _shallow_copy(value)) for value in values if type(value) in (dict, list) and len(value) <= _MAX_ITEMS]
        caches = [value for value in values if type(value) is _LRU_CACHE_TYPE and not _is_library_object(value)]
        self._caches = [(cache, cache.cache_info().currsize) for cache in caches]

    def put_back(self) -> None:
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
                cache.cache_clear()  # it cannot be asked what it holds


def _is_user_object(value: Any) -> bool:
    """Whether a value is an object with attributes that are the user's."""
    if isinstance(value, (torch.Tensor, type, types.ModuleType, types.FunctionType)) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    return isinstance(value, nn.Module) or not _is_library_object(type(value))


def _is_tracing_value(value: Any) -> bool:
    """Whether a value is of a trace, or holds what is."""
    if type(value) in (dict, list, tuple) and len(value) <= _MAX_ITEMS:
        return any(isinstance(item, _TRACING_TYPES) for item in (list(value.values()) if type(value) is dict else value))
    if isinstance(value, nn.Module):
        return any(isinstance(tensor, _TRACING_TYPES) for tensor in (*value.parameters(), *value.buffers()))
    return isinstance(value, _TRACING_TYPES)


def _shallow_copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else type(container)(container)


def restore_container(container: Any, content: Any) -> None:
    """Let a container hold again what it held."""
    if isinstance(container, dict):
        for key in [key for key in container if key not in content]:
            del container[key]
        for key, value in content.items():
            if container.get(key, _MISSING) is not value:
                container[key] = value
        if any(a is not b for a, b in zip(container, content, strict=True)):  # their order is that of an optimizer's groups
            container.clear()
            container.update(content)
    elif len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
        container.clear()
        container.update(content) if isinstance(container, set) else container.extend(content)


def _user_namespaces(model: nn.Module) -> list[Any]:
    """The classes of a model's modules, and the modules of Python that they are in."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__ if not _is_library_object(cls))
    places = {cls.__module__: sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}
    return [*classes, *places.values()]


def _is_library_object(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _LIBRARY_PACKAGES
