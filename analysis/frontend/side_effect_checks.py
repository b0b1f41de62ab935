"""Trace-time checks of side effects of ``forward``: Python and NumPy random numbers, module registration, unregistered tensors.

*External generators.* A graph would have the numbers that ``forward`` drew while it was traced, so draws from Python's or NumPy's
generators, and from iterators, are refused.

*Registrations.* The exporter sees a buffer that is set as an attribute, or registered again, and writes its value at the end of a call. It
does not see an assignment to ``_buffers``; after `forward` such a buffer is set as an attribute. Parameters, buffers and submodules that
``forward`` makes, removes or replaces in other ways would be lost after a call of the compiled model, and are refused.

*Unregistered tensors* are in plain containers, or in modules inside of these. ``parameters()``, ``to()`` and ``state_dict()`` leave them
out, and the exporter takes them for constants without a name or a gradient. Tensors that ``forward`` reads from other objects, globals or
closures are named by the line that reads them.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from sft.analysis.frontend.module_state import reachable_objects
from sft.analysis.frontend.state_snapshot import REGISTRIES, user_attributes
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import FakeTensor

__all__ = ["UnregisteredTensor", "check_registrations", "forbid_external_rng", "storage_key", "unregistered_tensors"]

_NUMPY_GENERATORS = (np.random.Generator, np.random.RandomState)
_GENERATOR_TYPES = (random.Random, *_NUMPY_GENERATORS)


@contextlib.contextmanager
def forbid_external_rng(model: nn.Module) -> Iterator[None]:
    """A context in which ``forward`` may not draw random numbers outside of torch: all steps would have those of the trace.

    Raises:
        UnsupportedError: names the generator.
    """
    sources: list[tuple[str, Any]] = [("random", random), ("numpy.random", np.random), *_model_rng_sources(model)]
    before = [_rng_state(source) for _, source in sources]
    yield
    for (name, source), was in zip(sources, before, strict=True):
        if _rng_state(source) != was:
            raise UnsupportedError(
                [
                    f"{type(model).__name__}: `forward` draws from `{name}`, and a compiled model has the same numbers in each step; "
                    "draw with operators on images (dropout, rand_like), or outside, and give what depends on it as an input"
                ]
            )


def _model_rng_sources(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Generators and iterators that modules or their objects refer to, and generators among the globals of their ``forward``."""
    for value in reachable_objects(model):
        if isinstance(value, (*_GENERATOR_TYPES, Iterator)):
            yield f"a {type(value).__qualname__} that it holds", value
    scopes = {id(scope): scope for module in model.modules() if (scope := getattr(type(module).forward, "__globals__", None)) is not None}
    for scope in scopes.values():
        yield from ((name, value) for name, value in list(scope.items()) if isinstance(value, _GENERATOR_TYPES))


def _rng_state(source: Any) -> Any:
    """A key of the position of a generator or iterator; ``None`` for one that does not show it."""
    if isinstance(source, random.Random) or source is random:
        return source.getstate()
    if isinstance(source, np.random.Generator):
        return pickle.dumps(source.bit_generator.state)
    if isinstance(source, np.random.RandomState) or source is np.random:
        return pickle.dumps(source.get_state(legacy=False))  # with any bit generator
    if isinstance(source, types.GeneratorType):
        frame = source.gi_frame
        return None if frame is None else (frame.f_lasti, [(name, id(value)) for name, value in frame.f_locals.items()])
    if isinstance(source, (itertools.count, itertools.repeat)):
        return repr(source)
    if type(source).__module__ not in ("builtins", "itertools"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # copies of itertools are deprecated
            return _reduced_state(source.__reduce__())
    except TypeError:
        return None


def _reduced_state(value: Any) -> Any:
    """The position in the arguments that rebuild an iterator, without the identity of its container, which may be new each time."""
    if isinstance(value, tuple):
        return tuple(_reduced_state(item) for item in value)
    if isinstance(value, Iterator):
        return _rng_state(value)
    if isinstance(value, (list, dict, set)):
        return len(value)
    return value if isinstance(value, (int, str, range, type(None))) else type(value)


_REGISTRY_KINDS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


@contextlib.contextmanager
def check_registrations(model: nn.Module) -> Iterator[None]:
    """A context in which `forward` may not change the registered parameters, buffers and submodules.

    Raises:
        UnsupportedError: at its end, a parameter, a buffer or a submodule with tensors is new, missing or replaced.
    """
    modules = list(model.named_modules())
    before = {(path, registry): (module, dict(vars(module)[registry])) for path, module in modules for registry in REGISTRIES}
    yield
    problems = []
    for (path, registry), (module, known) in before.items():
        current: dict[str, Any] = vars(module)[registry]
        for name in dict.fromkeys((*known, *current)):
            old, new = known.get(name), current.get(name)
            if old is new:
                continue
            full_name = f"{path}.{name}" if path else name
            if registry == "_buffers" and _same_dtype_and_shape(old, new):
                setattr(module, name, new)
            elif _has_tensors(old) or _has_tensors(new):
                problems.append(_registration_problem(full_name, _REGISTRY_KINDS[registry], old, new))
    if problems:
        raise UnsupportedError(problems)


def _same_dtype_and_shape(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return old.dtype == new.dtype and old.dim() == new.dim() and all(a == b for a, b in zip(old.shape, new.shape, strict=True))


def _has_tensors(value: Any) -> bool:
    """Return true for a tensor, and for a module that has one."""
    if isinstance(value, nn.Module):
        return any(True for _ in (*value.parameters(), *value.buffers()))
    return value is not None


def _registration_problem(name: str, kind: str, old: Any, new: Any) -> str:
    if old is None:
        return (
            f"{name}: `forward` makes this {kind} when it first runs, and a compiled model would make it again at each call; make it in "
            "`__init__`, or call the model once before it is compiled"
        )
    if new is None:
        return f"{name}: `forward` removes this {kind}, and a compiled model has it at each call; remove it before it is compiled"
    if kind == "buffer":
        return (
            f"{name}: `forward` puts a buffer of another shape or dtype in the place of this one; call the model once at this size before "
            "it is compiled, or keep the tensor in an attribute"
        )
    return (
        f"{name}: `forward` puts another {kind} in the place of this one, which a compiled model would forget; do it outside of `forward`"
    )


_PLAIN_CONTAINERS = (list, tuple, dict)


class UnregisteredTensor(NamedTuple):
    """A tensor that requires a gradient without being a parameter, and the line of `forward` that reads it first."""

    tensor: torch.Tensor
    line: str


def unregistered_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors in plain containers of modules, by a Python expression for them.

    >>> model = nn.Module()
    >>> model.scales = [torch.ones(1), torch.zeros(1)]
    >>> list(unregistered_tensors(model))
    ['scales[0]', 'scales[1]']
    """
    tensors: dict[str, torch.Tensor] = {}
    known = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in user_attributes(module):
            if isinstance(value, (*_PLAIN_CONTAINERS, nn.Module)):
                for expression, tensor in _tensors_inside(value, f"{path}.{name}" if path else name, known):
                    tensors.setdefault(expression, tensor)
    return tensors


def storage_key(value: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for a tensor and for an alias of it with the same shape and dtype, such as the exporter makes."""
    return (0 if isinstance(value, FakeTensor) else value.data_ptr(), value.shape, value.dtype)


def _tensors_inside(value: Any, path: str, known: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        if id(value) not in known:
            known.add(id(value))
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield f"{path}.{name}", tensor
            for expression, tensor in unregistered_tensors(value).items():
                yield f"{path}.{expression}", tensor
    elif isinstance(value, _PLAIN_CONTAINERS) and id(value) not in known:
        known.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_inside(item, f"{path}[{key!r}]", known)
