"""Changes of Python state by ``forward`` while it is traced: attributes and hooks of modules, and attributes of other objects.

Plain values (numbers, strings) and hooks that the first call changes are restored and reported. The model may compute another function at
its next call, so it is traced again with the new values. Parameters that ``forward`` freezes or unfreezes would be differentiated as
before, and hooks that it registers on the model itself would not run; both are refused.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from enum import Enum
from typing import Any

import torch
from torch import nn

from sft.analysis.frontend.state_snapshot import preserve_model_state, restore_container, user_attributes
from sft.common.errors import UnsupportedError
from sft.common.module_snapshot import PLAIN_TYPES

__all__ = [
    "HOOK_KINDS",
    "AttributeChangeHook",
    "AttributeChanges",
    "AttributeOwner",
    "ObjectChangeHook",
    "ObjectChanges",
    "is_hook_registry",
    "is_plain",
    "override_attributes",
    "override_objects",
    "preserve_attributes",
    "preserve_objects",
    "reachable_objects",
]

_MISSING = object()


#: Names of kinds of hooks in messages, by the middle part of the attribute that has them.
HOOK_KINDS = {
    "forward": "forward hook",
    "forward_pre": "forward pre-hook",
    "backward": "backward hook",
    "backward_pre": "backward pre-hook",
}
_BACKWARD_REGISTRIES = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD_REGISTRIES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)

#: New values of plain attributes, and of the dictionaries of forward hooks, by the module and the attribute's name.
AttributeChanges = dict[tuple[nn.Module, str], Any]


@contextlib.contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[AttributeChanges]:
    """A context after which module attributes are restored. Yields new values of plain attributes and hooks of the first call."""
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
        self._hooks: dict[nn.Module, dict[str, dict[int, Any]]] = {}

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], *outputs: Any) -> None:
        """Note the frozen parameters and the hooks before the call (without outputs), and the changes after it."""
        if self._is_over:
            return
        if not outputs:
            self._frozen = _frozen_parameter_names(model)
            self._hooks = {module: _hook_registries(module) for module, _ in self._before}
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
                old = before.get(name, _MISSING)
                if value is not old and is_plain(value) and (old is _MISSING or (is_plain(old) and value != old)):
                    self.changes[module, name] = copy(value)
        self._note_hooks(model)

    def _note_hooks(self, model: nn.Module) -> None:
        """Note hooks that `forward` registers or removes.

        Raises:
            UnsupportedError: a hook on the model itself or on all modules, or a backward hook, which a compiled model would not run.
        """
        paths = {id(module): path for path, module in model.named_modules()}
        problems = [
            f"(all modules): `forward` registers {name}s of all modules, which a compiled model does not run; register them outside of it"
            for kind, name in HOOK_KINDS.items()
            if vars(nn.modules.module)[f"_global_{kind}_hooks"]
        ]
        for module, before in self._hooks.items():
            path = paths.get(id(module)) or "(the model itself)"
            for name, now in _hook_registries(module).items():
                if now == before[name]:
                    continue
                if name in _BACKWARD_REGISTRIES or module is model:
                    problems.append(
                        f"{path}: `forward` registers a hook ({name}), which a compiled model does not run; use operators instead"
                    )
                else:
                    self.changes[module, name] = OrderedDict(now)
        if problems:
            raise UnsupportedError(problems)


@contextlib.contextmanager
def override_attributes(changes: AttributeChanges) -> Iterator[None]:
    """A context in which attributes and hooks have their changed values."""
    originals = {(module, name): vars(module).get(name, _MISSING) for module, name in changes}
    try:
        for (module, name), value in changes.items():
            vars(module)[name] = value
        yield
    finally:
        for (module, name), value in originals.items():
            if value is _MISSING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value


def is_hook_registry(name: str) -> bool:
    """Return true for the name of a dictionary of a module's forward hooks."""
    return name in _FORWARD_REGISTRIES


def _hook_registries(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Copies of the dictionaries of a module's hooks."""
    return {name: dict(vars(module)[name]) for name in (*_FORWARD_REGISTRIES, *_BACKWARD_REGISTRIES)}


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
