"""What `forward` changes in objects that a model holds, and in the classes of its modules: a counter of the user's, a flag.

As for the modules' own attributes (:mod:`sft.analysis.attributes`) it is taken back behind a trace, and what was plain and is another one
then is told: the model may compute something else at its next call.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator, Sequence
from copy import copy
from enum import Enum
from typing import Any

import torch
from torch import nn

from sft.analysis.attributes import PLAIN_TYPES, is_plain, user_attributes
from sft.analysis.leftovers import restore_container

__all__ = ["AttributeOwner", "ObjectChangeHook", "ObjectChanges", "reachable_objects", "preserve_objects", "override_objects"]

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
    noticing = ObjectChangeHook(
        [AttributeOwner(value) for value in reachable_objects(model) if isinstance(value, type) or _has_attributes(value)]
    )
    try:
        with model.register_forward_pre_hook(noticing), model.register_forward_hook(noticing):
            yield noticing.changes
    finally:
        noticing.restore()


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
