"""References of a Python callable: closure cells, defaults, bound arguments, attributes of its object, and globals that its code names.

Bytecode gives the names that a function loads and stores, those of functions inside it included. Attributes of the object of a method are
followed if the method, or another method that it names, loads them.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["CallableReferences", "CodeNames", "Identity", "Reference", "attribute_names", "code_names", "function_of", "package_of"]

#: Depth to which functions that a callable refers to are followed.
_MAX_DEPTH = 5

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_FROM_DICT_OR_GLOBALS")
_LIBRARY_PACKAGES = frozenset({"torch", "numpy", "sft", "builtins"}) | sys.stdlib_module_names - {"__main__"}


class Identity:
    """A value compared by identity; it keeps the value alive, so that its address is not reused."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


@dataclass(frozen=True, slots=True)
class CodeNames:
    """Names in the bytecode of a function.

    Attributes:
        loaded: globals and attributes that it loads; not those that it only clears (``self.taps.clear()``).
        stored_globals: globals that it assigns.
        imported: modules that it imports.
    """

    loaded: frozenset[str]
    stored_globals: frozenset[str]
    imported: frozenset[str]


@dataclass(frozen=True, slots=True)
class Reference:
    """A value that a callable refers to.

    Attributes:
        label: expression for messages, such as ``taps`` or ``self.taps``.
        value: the value.
    """

    label: str
    value: Any


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> CodeNames:
    """Names in a code object and in those inside it."""
    loaded, stored, imported = set[str](), set[str](), set[str]()
    instructions = list(dis.get_instructions(code))
    for instruction, successor in zip(instructions, [*instructions[1:], None], strict=True):
        name = str(instruction.argval)
        if instruction.opname in _LOADS and not (successor is not None and successor.argval == "clear" and successor.opname in _LOADS):
            loaded.add(name)
        elif instruction.opname == "STORE_GLOBAL":
            stored.add(name)
        elif instruction.opname == "IMPORT_NAME":
            imported.add(name)
        elif isinstance(instruction.argval, types.CodeType):
            inner = code_names(instruction.argval)
            loaded |= inner.loaded
            stored |= inner.stored_globals
            imported |= inner.imported
    return CodeNames(frozenset(loaded), frozenset(stored), frozenset(imported))


def attribute_names(function: types.FunctionType, owner: Any) -> frozenset[str]:
    """Names that a function loads, and that methods of the class ``owner`` load whose names are among them."""
    return _attribute_names(function, owner)


@functools.lru_cache(maxsize=4096)
def _attribute_names(function: types.FunctionType, owner: Hashable) -> frozenset[str]:
    names = set(code_names(function.__code__).loaded)
    if not isinstance(owner, type) or package_of(owner) == "builtins":
        return frozenset(names)
    visited, queue = {function.__name__}, list(names)
    for name in queue:  # the loop appends to it
        method = None if name in visited else _class_function(owner, name)
        visited.add(name)
        if method is not None:
            new = code_names(method.__code__).loaded - names
            names |= new
            queue += new
    return frozenset(names)


def _class_function(owner: type, name: str) -> types.FunctionType | None:
    """The Python function of a method or property of a class."""
    value = next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), None)
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def function_of(value: Any) -> types.FunctionType | None:
    """The Python function that runs when a value is called; ``None`` for functions of C."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        value = getattr(type(value), "__call__", None)  # noqa: B004  # the function, not a test
    return value if isinstance(value, types.FunctionType) else None


@dataclass(frozen=True, slots=True)
class CallableReferences:
    """References of a callable, and of the functions among them that no library defines.

    Attributes:
        values: the values.
        functions: the callable's own function, and the functions that it refers to.
        owners: objects with attributes among the values.
    """

    values: tuple[Reference, ...]
    functions: tuple[types.FunctionType, ...]
    owners: tuple[Any, ...]

    @classmethod
    def of(cls, function: Any, *, with_globals: bool) -> CallableReferences:
        """Collect them.

        Args:
            function: a function, method, partial, or callable object.
            with_globals: also globals that its code names. Closures and bound objects belong to the callable; globals may be shared.
        """
        collector = _ReferenceCollector(with_globals=with_globals)
        collector.add_callable(function, 0)
        return cls(tuple(collector.values), tuple(collector.functions), tuple(collector.owners))

    @property
    def stored_globals(self) -> list[tuple[dict[str, Any], str]]:
        """Namespaces and names of the globals that the functions assign."""
        return [(function.__globals__, name) for function in self.functions for name in code_names(function.__code__).stored_globals]

    @property
    def cells(self) -> list[types.CellType]:
        """Closure cells of the functions."""
        return [cell for function in self.functions for cell in function.__closure__ or ()]


class _ReferenceCollector:
    def __init__(self, *, with_globals: bool) -> None:
        self.values: list[Reference] = []
        self.functions: list[types.FunctionType] = []
        self.owners: list[Any] = []
        self._with_globals, self._visited = with_globals, set[int]()

    def add_callable(self, value: Any, depth: int) -> None:
        if id(value) in self._visited or depth > _MAX_DEPTH:
            return
        self._visited.add(id(value))
        function = function_of(value)
        if isinstance(value, functools.partial):
            for position, argument in enumerate(value.args):
                self._add(f"argument {position}", argument, function, depth)
            for name, argument in value.keywords.items():
                self._add(name, argument, function, depth)
            self.add_callable(value.func, depth)
        elif isinstance(value, types.MethodType):
            self._add_owner("self", value.__self__, function)
            self.add_callable(value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            self._add_function(value, depth)
        elif function is not None:
            self._add_owner("self", value, function)
            self.add_callable(function, depth)

    def _add_owner(self, label: str, owner: Any, function: types.FunctionType | None) -> None:
        """Attributes of an object that a function may use; a module or a class is one value."""
        if isinstance(owner, (nn.Module, type, types.ModuleType)):
            self.values.append(Reference(label, owner))
            return
        self.owners.append(owner)
        names = None if function is None else attribute_names(function, type(owner))
        for name, value in _attributes(owner):
            if names is None or name in names:
                self.values.append(Reference(f"{label}.{name}", value))

    def _add_function(self, function: types.FunctionType, depth: int) -> None:
        if depth and package_of(function) in _LIBRARY_PACKAGES:
            return
        self.functions.append(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._add(name, cell.cell_contents, function, depth)
            except ValueError:  # not assigned yet
                continue
        for value in function.__defaults__ or ():
            self._add("a default", value, function, depth)
        for name, value in ((function.__kwdefaults__ or {}) | vars(function)).items():
            self._add(name, value, function, depth)
        if self._with_globals:
            names = code_names(function.__code__)
            for name in sorted(names.loaded | names.stored_globals):
                if name in function.__globals__:
                    self._add(name, function.__globals__[name], function, depth)
            for name in sorted(names.imported & sys.modules.keys()):
                self._add(name, sys.modules[name], function, depth)

    def _add(self, label: str, value: Any, function: types.FunctionType | None, depth: int) -> None:
        self.values.append(Reference(label, value))
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.add_callable(value, depth + 1)
        elif _is_user_object(value):
            self._add_owner(label, value, function)


def _is_user_object(value: Any) -> bool:
    is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, types.ModuleType))
    return is_object and package_of(type(value)) not in _LIBRARY_PACKAGES


def package_of(value: Any) -> str:
    """Top-level package of a module, or of the module that defines a function or class."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from dict(getattr(value, "__dict__", {})).items()
    for cls in type(value).__mro__:
        for name in vars(cls).get("__slots__", ()):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
