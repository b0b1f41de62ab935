"""What a trace leaves behind where `forward` keeps things, taken back: it ran on tensors that do not exist.

`forward` may make a parameter when it first runs, or keep a grid in a list, in an object of the user's, or in a cache of Python's. Such a
tensor has no numbers once the trace is over, and whoever found it there would compute with nothing. So everything that a model holds is as
it was before: its attributes and registered tensors, and containers and objects below them. What is beside its classes (attributes of
classes, globals, caches of functions) may be others' as well, and is put back only where it has become a trace's.

What `forward` sets of its modules' attributes while it is traced, and what that means for later calls.

A trace runs `forward` once, on tensors that do not exist; whatever it leaves in attributes is no use to anybody and is taken back. A size
that is kept there, or a feature map to look at, changes nothing in what is computed. A counter may, or a submodule that is put into another
mode: then the next call computes something else, which a captured graph cannot. So where numbers or strings have changed the model is
traced again as it would be then. Parameters that `forward` freezes, or thaws, would be differentiated as before; that is refused.

What `forward` changes in objects that a model holds, and in the classes of its modules: a counter of the user's, a flag.

As for the modules' own attributes (:mod:`sft.analysis.frontend.module_state`) it is taken back behind a trace, and what was plain and is
another one then is told: the model may compute something else at its next call.
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
        held.restore_state()
        beside.restore_state()


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

    def restore_state(self) -> None:
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


#: New values of plain attributes, by the module and the attribute's name.
AttributeChanges = dict[tuple[nn.Module, str], Any]

#: Types of values that are what they are: two of a type that are equal mean the same.
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def exact_key(value: Any) -> Any:
    """What differs between plain values that are equal and not the same: 1, 1.0 and True, 0.0 and -0.0. NaN is the same as NaN.

    >>> exact_key(1) == exact_key(1.0), exact_key(0.0) == exact_key(-0.0), exact_key(float("nan")) == exact_key(float("nan"))
    (False, False, True)
    """
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


@contextlib.contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[AttributeChanges]:
    """Put back what is set meanwhile; the dictionary gets what the first call changes plain attributes to, which were plain before."""
    watching = AttributeChangeHook([(module, {**_mutable_attributes(module), **_container_copies(module)}) for module in model.modules()])
    with preserve_model_state(model), model.register_forward_pre_hook(watching), model.register_forward_hook(watching):
        yield watching.changes


class AttributeChangeHook:
    """A hook that looks at a model when its first call begins, and when it ends: the exporter puts numbers back itself.

    Whoever traces a model has other tensors in the place of its parameters by then.
    """

    def __init__(self, before: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
        self._before, self._is_over, self.changes = before, False, AttributeChanges()
        self._frozen: frozenset[str] = frozenset()

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], *outputs: Any) -> None:
        """Before the call, which has no outputs yet, and behind it."""
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
    """Other values of attributes."""
    held = {(module, name): vars(module)[name] for module, name in changes}
    try:
        for (module, name), value in changes.items():
            vars(module)[name] = value
        yield
    finally:
        for (module, name), value in held.items():
            vars(module)[name] = value


def _mutable_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that `forward` may set."""
    return {**dict(user_attributes(module)), "training": module.training}


def _frozen_parameter_names(model: nn.Module) -> frozenset[str]:
    """The parameters without a gradient."""
    return frozenset(name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad)


def _container_copies(module: nn.Module) -> Mapping[str, Any]:
    """What lists and dictionaries hold."""
    return {name: value.copy() for name, value in user_attributes(module) if type(value) in (list, dict)}


def is_plain(value: Any, around: tuple[Any, ...] = ()) -> bool:
    """Whether a value is plain, or a container of plain ones that does not contain itself."""
    if isinstance(value, (list, tuple, dict)):
        held = value.values() if isinstance(value, dict) else value
        return not any(value is other for other in around) and all(is_plain(item, (*around, value)) for item in held)
    return type(value) in PLAIN_TYPES


#: How deep, and how far, objects are looked through.
_MAX_LEVELS, _MAX_OBJECTS, _MAX_ITEMS_OF_OBJECT = 4, 20_000, 256

_CONTAINER_TYPES = (list, tuple, dict)
_OPAQUE_TYPES = (*PLAIN_TYPES, torch.Tensor, nn.Module, Enum, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_UNSET = object()
_NON_USER_LIBRARIES = frozenset({"torch", "numpy", "builtins", "sft", "threading", "logging"})


class AttributeOwner:
    """An object or a class with attributes, by what it is and not by what it equals."""

    def __init__(self, value: Any) -> None:
        self._value, self._is_class = value, isinstance(value, type)
        self.name = f"(the class {value.__name__})" if self._is_class else f"(an object {type(value).__name__})"

    def values(self) -> dict[str, Any]:
        """The attributes, besides what Python keeps in a class."""
        found = dict(vars(self._value))
        return {name: value for name, value in found.items() if not name.startswith("__")} if self._is_class else found

    def put(self, name: str, value: Any) -> None:
        """Set an attribute past what the class makes of it."""
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
        """Set the attributes to what they were."""
        now = self.values()
        for name in now.keys() - before.keys():
            self.drop(name)
        for name, value in before.items():
            if name not in now or now[name] is not value:
                self.put(name, value)


#: New values of plain attributes, by what has them and the attribute's name.
ObjectChanges = dict[tuple[AttributeOwner, str], Any]


def reachable_objects(model: nn.Module) -> list[Any]:
    """What the modules hold besides tensors, modules and plain values, and their own classes; what these hold, too."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__ if not _is_library_class(cls))
    found, seen = list[Any](classes), set[int]()
    waiting = [(value, 1) for cls in classes for value in vars(cls).values()]
    waiting += [(value, 1) for module in model.modules() for _, value in user_attributes(module) if type(value) not in PLAIN_TYPES]
    most = len(waiting) + _MAX_OBJECTS
    for value, level in waiting:  # which grows
        if isinstance(value, _OPAQUE_TYPES) or id(value) in seen:
            continue
        seen.add(id(value))
        is_container = isinstance(value, _CONTAINER_TYPES)
        if not is_container:
            found.append(value)
        if level < _MAX_LEVELS and len(waiting) < most:
            items = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else _attribute_values(value)
            waiting += [(item, level + 1) for item in itertools.islice(items, _MAX_ITEMS_OF_OBJECT) if type(item) not in PLAIN_TYPES]
    return found


def _attribute_values(value: Any) -> list[Any]:
    return list(vars(value).values()) if _has_attributes(value) else []


def _has_attributes(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_library_class(type(value))


def _is_library_class(cls: type) -> bool:
    return str(cls.__module__).partition(".")[0] in _NON_USER_LIBRARIES


@contextlib.contextmanager
def preserve_objects(model: nn.Module) -> Iterator[ObjectChanges]:
    """Put back what calls set meanwhile; the dictionary gets what the first one changes plain attributes to."""
    change_hook = ObjectChangeHook(
        [AttributeOwner(value) for value in reachable_objects(model) if isinstance(value, type) or _has_attributes(value)]
    )
    try:
        with model.register_forward_pre_hook(change_hook), model.register_forward_hook(change_hook):
            yield change_hook.changes
    finally:
        change_hook.restore()


class ObjectChangeHook:
    """A hook that looks at objects when a call of a model begins, and when it ends.

    Not before or behind that: other threads may go on with what they hold.
    """

    def __init__(self, holders: Sequence[AttributeOwner]) -> None:
        self._holders, self._is_over, self.changes = holders, False, ObjectChanges()
        self._before: dict[AttributeOwner, dict[str, Any]] = {}
        self._contents: list[tuple[Any, Any]] = []

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], *outputs: Any) -> None:
        """Before the call, which has no outputs yet, and behind it."""
        if not outputs:
            self._before = {holder: holder.values() for holder in self._holders}
            values = (value for before in self._before.values() for value in before.values())
            self._contents = [(value, value.copy()) for value in values if type(value) in (list, dict)]
            return
        if not self._is_over:
            self._is_over = True
            self._note()
        self.restore()

    def _note(self) -> None:
        contents = {id(value): content for value, content in self._contents}
        for holder, before in self._before.items():
            for name, value in holder.values().items():
                old = before.get(name, _UNSET)
                old = contents.get(id(old), old)
                if value is not old and is_plain(value) and (old is _UNSET or (is_plain(old) and value != old)):
                    self.changes[holder, name] = copy(value)

    def restore(self) -> None:
        """Set what has changed since the call began to what it was."""
        for holder, before in self._before.items():
            holder.restore(before)
        for value, content in self._contents:
            restore_container(value, content)
        self._before, self._contents = {}, []


@contextlib.contextmanager
def override_objects(changes: ObjectChanges) -> Iterator[None]:
    """Other values of attributes."""
    held = {holder: holder.values() for holder, _ in changes}
    try:
        for (holder, name), value in changes.items():
            holder.put(name, value)
        yield
    finally:
        for holder, before in held.items():
            holder.restore(before)
