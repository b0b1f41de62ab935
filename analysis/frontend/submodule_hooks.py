"""Hooks on submodules: a capture runs forward hooks and pre-hooks as code of the model, and refuses hooks with other effects.

Submodules of a compiled model are not called. A hook that runs while the model is captured has its effect on values in the graph, as code
of ``forward`` has; the hook is part of the fingerprint, so that a new hook leads to a new capture. A hook with an effect that calls of the
compiled model would not repeat is refused:

- It changes Python state (a list, a dictionary, an attribute, a counter) that is still changed when the root's ``forward`` returns, and
  that no ``forward`` reads. Collectors that live during one call (Hugging Face's output capturing) leave nothing.
- It prints, or refers to objects and modules with effects outside of Python's memory (files, loggers, clocks).
- It is a backward hook: the backward pass computes strips, and no full gradient of an activation exists.

Hooks of all modules are refused as well. Hooks of the root run around each call.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import io
import logging
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn

from sft.analysis.frontend.module_state import HOOK_KINDS
from sft.analysis.frontend.state_snapshot import user_attributes
from sft.analysis.frontend.trace_context import REPARAMETRIZATION_HOOKS, is_fsdp_hook
from sft.common.callable_references import CallableReferences, Identity, Reference, attribute_names, code_names, function_of, package_of
from sft.common.errors import UnsupportedError
from sft.common.module_snapshot import PLAIN_TYPES, ModuleSnapshot, exact_key

__all__ = ["check_hook_kinds", "watch_submodule_hooks"]

_TRACED_KINDS = ("forward", "forward_pre")


def check_hook_kinds(contents: ModuleSnapshot) -> None:
    """Refuse backward hooks on submodules, and hooks of all modules.

    Raises:
        UnsupportedError: names all of them.
    """
    problems = [
        f"{path}: {type(module).__name__} has a {HOOK_KINDS[kind]}; no full gradient of an activation exists in a compiled model, so hooks "
        "on submodules do not run in its backward pass, remove it"
        for path, module in contents.hooked.items()
        for kind in ("backward", "backward_pre")
        if any(not is_fsdp_hook(hook) for hook in vars(module)[f"_{kind}_hooks"].values())
    ]
    global_hooks: Mapping[str, Any] = vars(nn.modules.module)
    problems += [
        f"(all modules): {_hook_name(hook)} is a {name} of all modules, and submodules are not called; remove it, or register it on the "
        "root alone"
        for kind, name in HOOK_KINDS.items()
        for hook in global_hooks[f"_global_{kind}_hooks"].values()
        if not _is_module_tracker(hook)
    ]
    if problems:
        raise UnsupportedError(problems)


def _is_module_tracker(hook: Any) -> bool:
    """Return true for PyTorch's own hooks, by which counters of operators track the running module; they change no values."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def _hook_name(hook: Any) -> str:
    function = function_of(hook)
    return str(getattr(hook, "__qualname__", None) or getattr(function, "__qualname__", None) or type(hook).__qualname__)


@contextlib.contextmanager
def watch_submodule_hooks(model: nn.Module) -> Iterator[None]:
    """A context, inside of the root's ``forward``, in which hooks on submodules run and their effects are observed.

    Raises:
        UnsupportedError: at its end, hooks have effects that calls of the compiled model would not repeat.
    """
    sites = [
        (path, module, kind, hooks, key, hook)
        for path, module in model.named_modules()
        if path
        for kind in _TRACED_KINDS
        for hooks in [vars(module)[f"_{kind}_hooks"]]
        for key, hook in hooks.items()
        if not isinstance(hook, REPARAMETRIZATION_HOOKS) and not is_fsdp_hook(hook)
    ]
    if not sites:
        yield
        return
    reads = _ForwardReads.of(model)
    observed = [_ObservedHook(path, module, kind, hook) for path, module, kind, _, _, hook in sites]
    for (*_, hooks, key, _), replacement in zip(sites, observed, strict=True):
        hooks[key] = replacement
    try:
        yield
    finally:
        for (*_, hooks, key, hook), replacement in zip(sites, observed, strict=True):
            if hooks.get(key) is replacement:
                hooks[key] = hook
    problems = [problem for hook in observed for problem in hook.problems(model, reads)]
    if problems:
        raise UnsupportedError(problems)


@dataclass(frozen=True, slots=True)
class _ForwardReads:
    """State that ``forward`` of the model's modules reads: pairs of a module's id and an attribute, and ids of values."""

    attributes: frozenset[tuple[int, str]]
    values: frozenset[int]

    @classmethod
    def of(cls, model: nn.Module) -> _ForwardReads:
        attributes, values = set[tuple[int, str]](), set[int]()
        for module in model.modules():
            function = function_of(type(module).forward)
            if function is None:
                continue
            names = attribute_names(function, type(module))
            attributes |= {(id(module), name) for name in names}
            read = [value for name, value in user_attributes(module) if name in names]
            read += [item for value in read for item in _attributes_read(value, function)]
            if package_of(type(module)) != "torch":
                read += [reference.value for reference in CallableReferences.of(function, with_globals=True).values]
            values |= {id(value) for value in read if not isinstance(value, (*PLAIN_TYPES, Enum))}
        return cls(frozenset(attributes), frozenset(values))


def _attributes_read(value: Any, function: types.FunctionType) -> list[Any]:
    """The attributes of an object that a function, or a method of the object that it names, reads."""
    if isinstance(value, (torch.Tensor, nn.Module, *_STATELESS_TYPES)) or not hasattr(value, "__dict__"):
        return []
    names = attribute_names(function, type(value))
    return [item for name, item in vars(value).items() if name in names]


@dataclass(frozen=True, slots=True)
class _StateSlot:
    """A place where a hook may leave state.

    Attributes:
        label: expression for messages.
        owner: id of the module of which it is an attribute; 0 otherwise.
        name: the attribute's name.
    """

    label: str
    owner: int = 0
    name: str = ""


class _ObservedHook:
    """A hook that notes the state that its runs change, and whether they print."""

    def __init__(self, path: str, module: nn.Module, kind: str, hook: Any) -> None:
        self._path, self._module, self._kind, self._hook = path, module, kind, hook
        self._initial = self._state()
        self._initial_ids = {slot: id(value) for slot, value in self._slots()}
        self._changed: set[_StateSlot] = set()
        self._has_run = self._prints = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, num_characters = self._state(), _num_muted_characters()
        self._has_run = True
        try:
            return self._hook(*args, **kwargs)
        finally:
            after = self._state()
            self._changed |= {slot for slot in {*before, *after} if before.get(slot) != after.get(slot)}
            self._prints |= _num_muted_characters() != num_characters

    def problems(self, model: nn.Module, reads: _ForwardReads) -> Iterator[str]:
        """Effects of the hook that calls of the compiled model would not repeat, one message for all of them."""
        if not self._has_run:  # as in eager PyTorch
            return
        final = self._state()
        effects = [
            f"changes `{slot.label}`"
            for slot in sorted(self._changed, key=lambda slot: slot.label)
            if self._initial.get(slot, _EMPTY) != final.get(slot, _EMPTY)
            and (slot.owner, slot.name) not in reads.attributes
            and self._initial_ids.get(slot) not in reads.values
        ]
        effects += ["prints"] if self._prints else []
        effects += _external_effects(self._hook, _packages_of(model, self._hook))
        if effects:
            yield (
                f"{self._path}: {type(self._module).__name__} has a {HOOK_KINDS[self._kind]} ({_hook_name(self._hook)}) that "
                f"{', '.join(effects)}; a compiled model does not call its submodules, and would not repeat this. Return the value from "
                "`forward`, or remove the hook"
            )

    def _slots(self) -> Iterator[tuple[_StateSlot, Any]]:
        """Places that the hook can reach: attributes of its module, and values that it refers to."""
        for name, value in user_attributes(self._module):
            yield _StateSlot(f"{self._path}.{name}", id(self._module), name), value
        for reference in CallableReferences.of(self._hook, with_globals=True).values:
            value = reference.value
            if isinstance(value, nn.Module):
                for name, item in user_attributes(value):
                    yield _StateSlot(f"{reference.label}.{name}", id(value), name), item
            elif not isinstance(value, _STATELESS_TYPES):
                yield _StateSlot(reference.label), value

    def _state(self) -> dict[_StateSlot, Any]:
        reader = _StateReader()
        return {slot: reader.key(value) for slot, value in self._slots()}


#: Key of a container without items: it has no data.
_EMPTY = ("empty",)

_STATELESS_TYPES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
#: Values of a state that are visited at most; the others are compared by identity.
_MAX_VALUES = 5_000
_WEAK_CONTAINERS = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


@dataclass
class _StateReader:
    """Reads keys of state: equal keys mean that no item, attribute or tensor was exchanged, added, removed or written."""

    open: set[int] = field(default_factory=set)
    num_visited: int = 0

    def key(self, value: Any) -> Any:
        """The key of a value."""
        self.num_visited += 1
        if isinstance(value, (*PLAIN_TYPES, Enum)):
            return exact_key(value)
        if isinstance(value, torch.Tensor):
            return Identity(value), 0 if value.is_inference() else value._version
        if isinstance(value, np.ndarray):
            return Identity(value), value.tobytes() if value.nbytes < 1 << 16 and not value.dtype.hasobject else b""
        if isinstance(value, (*_STATELESS_TYPES, nn.Module)) or id(value) in self.open or self.num_visited > _MAX_VALUES:
            return Identity(value)
        self.open.add(id(value))
        try:
            return self._container_key(value)
        finally:
            self.open.remove(id(value))

    def _container_key(self, value: Any) -> Any:
        if isinstance(value, _WEAK_CONTAINERS):
            value = dict(value.items()) if isinstance(value, Mapping) else set(value)
        if isinstance(value, Mapping):
            items = tuple((self.key(key), item) for key, child in value.items() if (item := self.key(child)) != _EMPTY)
            return items or _EMPTY
        if isinstance(value, (set, frozenset)):
            return frozenset(self.key(item) for item in value) or _EMPTY
        if isinstance(value, (list, tuple, deque)):
            return tuple(self.key(item) for item in value) or _EMPTY
        if package_of(type(value)) in _OPAQUE_PACKAGES or not hasattr(value, "__dict__"):
            return Identity(value)
        return type(value), tuple((name, self.key(item)) for name, item in vars(value).items())


_OPAQUE_PACKAGES = frozenset({"torch", "numpy", "builtins"}) | sys.stdlib_module_names - {"__main__"}


def _num_muted_characters() -> int:
    """Characters that code wrote while output was muted."""
    return sum(getattr(stream, "num_muted", 0) for stream in (sys.stdout, sys.stderr))


# -- effects outside of Python's memory -------------------------------------------------------------------------------

#: Modules of Python whose functions only compute.
_PURE_MODULES = frozenset(
    {
        *("abc", "builtins", "cmath", "collections", "contextlib", "contextvars", "copy", "dataclasses", "decimal", "enum", "fractions"),
        *("functools", "heapq", "inspect", "itertools", "math", "numbers", "operator", "random", "re", "statistics", "string"),
        *("types", "typing", "weakref"),
    }
)
#: Libraries that compute with tensors.
_TENSOR_LIBRARIES = frozenset(
    {"einops", "kornia", "monai", "numpy", "opt_einsum", "peft", "scipy", "sft", "timm", "torch", "torchvision", "transformers"}
)
_EFFECT_BUILTINS = frozenset({"breakpoint", "exec", "eval", "input", "next", "open", "__import__"})
_WRITERS = {torch: ("save",), np: ("save", "savez", "savez_compressed", "savetxt")}
_EFFECT_TYPES = (io.IOBase, logging.Logger, logging.Handler)
#: Types of Python and torch whose objects have no effects outside of memory, in addition to containers.
_PURE_TYPES: tuple[type, ...] = (
    *(*PLAIN_TYPES, torch.Tensor, torch.Size, nn.Module, np.ndarray, np.generic, Enum, Mapping, set, frozenset, list, tuple, deque),
    *(PurePath, datetime.date, datetime.timedelta, re.Pattern, ContextVar, weakref.ref, *_WEAK_CONTAINERS, slice, range, type(...)),
)


def _packages_of(model: nn.Module, hook: Any) -> frozenset[str]:
    """Packages that define the model's classes and the hook: their objects are compared by their state."""
    packages = {package_of(cls) for module in model.modules() for cls in type(module).__mro__}
    return frozenset(packages - _OPAQUE_PACKAGES | {package_of(function_of(hook) or type(hook)), "__main__"})


def _external_effects(hook: Any, packages: frozenset[str]) -> list[str]:
    """Effects outside of memory that the hook's references suggest."""
    collected = CallableReferences.of(hook, with_globals=True)
    effects = [text for reference in collected.values if (text := _external_effect(reference, packages)) is not None]
    for function in collected.functions:
        names = code_names(function.__code__).loaded
        effects += [
            f"calls `{name}`" for name in sorted(names & _EFFECT_BUILTINS) if name not in function.__globals__ and hasattr(builtins, name)
        ]
        modules = [reference.value for reference in collected.values if isinstance(reference.value, types.ModuleType)]
        effects += [f"calls `{module.__name__}.{name}`" for module in modules for name in _WRITERS.get(module, ()) if name in names]
    return list(dict.fromkeys(effects))


def _external_effect(reference: Reference, packages: frozenset[str]) -> str | None:
    value = reference.value
    if isinstance(value, types.MethodType):
        value = value.__self__
    if isinstance(value, types.ModuleType):
        is_pure = package_of(value) in _PURE_MODULES | _TENSOR_LIBRARIES | packages
        return None if is_pure else f"uses the module `{value.__name__}`"
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        is_pure = package_of(value) in _PURE_MODULES | _TENSOR_LIBRARIES | packages or value.__module__ is None
        return None if is_pure else f"uses `{value.__module__}.{value.__qualname__}`"
    if isinstance(value, _EFFECT_TYPES):
        return f"uses `{reference.label}`, a {type(value).__name__}"
    if isinstance(value, _PURE_TYPES) or package_of(type(value)) in packages | (_TENSOR_LIBRARIES - {"torch", "numpy", "sft"}):
        return None
    is_torch_value = package_of(type(value)) == "torch" and not type(value).__module__.startswith("torch.utils.tensorboard")
    return None if is_torch_value else f"uses `{reference.label}`, a {type(value).__name__}"
