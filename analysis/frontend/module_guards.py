"""Generators of random numbers, and iterators, that `forward` takes the next of: how far they are.

What `forward` does to the parameters, buffers and submodules that modules have registered.

The exporter sees that a buffer is another one where it is set as an attribute, or registered again, and its value is written at the end of
a call. It does not see what is put into ``_buffers``; that is set as an attribute here, behind the model. What `forward` makes, removes or
replaces otherwise would be gone after a call of the compiled model, with the numbers that it was made with; it is refused.

Tensors that modules hold in plain containers, or in modules that are in plain containers.

PyTorch does not know them: ``parameters()`` lacks them, ``to()`` and ``state_dict()`` pass them by. The exporter takes them for constants,
without a name and without a gradient. Those that `forward` finds elsewhere (in other objects, globals, closures) have no place that could
be named; the line that reads them can.
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

from sft.analysis.frontend.module_state import REGISTRIES, reachable_objects, user_attributes
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import FakeTensor

__all__ = ["UnregisteredTensor", "check_registrations", "forbid_external_rng", "storage_key", "unregistered_tensors"]

_NUMPY_GENERATORS = (np.random.Generator, np.random.RandomState)
_GENERATOR_TYPES = (random.Random, *_NUMPY_GENERATORS)


@contextlib.contextmanager
def forbid_external_rng(model: nn.Module) -> Iterator[None]:
    """Refuse what ``forward`` draws outside of torch: it runs once, and all steps would have what the first had.

    Raises:
        UnsupportedError: naming what it draws from.
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
    """Those that modules hold, or objects of theirs, and generators among the globals that their ``forward`` sees."""
    for value in reachable_objects(model):
        if isinstance(value, (*_GENERATOR_TYPES, Iterator)):
            yield f"a {type(value).__qualname__} that it holds", value
    scopes = {id(found): found for module in model.modules() if (found := getattr(type(module).forward, "__globals__", None)) is not None}
    for scope in scopes.values():
        yield from ((name, value) for name, value in list(scope.items()) if isinstance(value, _GENERATOR_TYPES))


def _rng_state(source: Any) -> Any:
    """How far a generator or an iterator is; the same for one that cannot be asked."""
    if isinstance(source, random.Random) or source is random:
        return source.getstate()
    if isinstance(source, np.random.Generator):
        return pickle.dumps(source.bit_generator.state)
    if isinstance(source, np.random.RandomState) or source is np.random:
        return pickle.dumps(source.get_state(legacy=False))  # of any generator that it was given
    if isinstance(source, types.GeneratorType):
        frame = source.gi_frame
        return None if frame is None else (frame.f_lasti, [(name, id(value)) for name, value in frame.f_locals.items()])
    if isinstance(source, (itertools.count, itertools.repeat)):
        return repr(source)
    if type(source).__module__ not in ("builtins", "itertools"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # itertools will not be copied any more
            return _reduced_state(source.__reduce__())
    except TypeError:
        return None


def _reduced_state(value: Any) -> Any:
    """What an iterator is rebuilt from: where it is, and not in what, which may be made anew each time."""
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
    """While this is on, `forward` runs for the exporter.

    Raises:
        UnsupportedError: behind it, a parameter, buffer or submodule with such is new, gone, or another one.
    """
    modules = list(model.named_modules())
    before = {(path, registry): (module, dict(vars(module)[registry])) for path, module in modules for registry in REGISTRIES}
    yield
    problems = []
    for (path, registry), (module, known) in before.items():
        now: dict[str, Any] = vars(module)[registry]
        for name in dict.fromkeys((*known, *now)):
            old, new = known.get(name), now.get(name)
            if old is new:
                continue
            place = f"{path}.{name}" if path else name
            if registry == "_buffers" and _same_dtype_and_shape(old, new):
                setattr(module, name, new)
            elif _has_tensors(old) or _has_tensors(new):
                problems.append(_registration_problem(place, _REGISTRY_KINDS[registry], old, new))
    if problems:
        raise UnsupportedError(problems)


def _same_dtype_and_shape(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return old.dtype == new.dtype and old.dim() == new.dim() and all(a == b for a, b in zip(old.shape, new.shape, strict=True))


def _has_tensors(value: Any) -> bool:
    """Whether something is a tensor, or a module that has one."""
    if isinstance(value, nn.Module):
        return any(True for _ in (*value.parameters(), *value.buffers()))
    return value is not None


def _registration_problem(place: str, kind: str, old: Any, new: Any) -> str:
    if old is None:
        return (
            f"{place}: `forward` makes this {kind} when it first runs, and a compiled model would make it again at each call; make it in "
            "`__init__`, or call the model once before it is compiled"
        )
    if new is None:
        return f"{place}: `forward` removes this {kind}, and a compiled model has it at each call; remove it before it is compiled"
    if kind == "buffer":
        return (
            f"{place}: `forward` puts a buffer of another shape or dtype in the place of this one; keep it in an attribute, or make it anew"
        )
    return (
        f"{place}: `forward` puts another {kind} in the place of this one, which a compiled model would forget; do it outside of `forward`"
    )


_PLAIN_CONTAINERS = (list, tuple, dict)


class UnregisteredTensor(NamedTuple):
    """A tensor that requires a gradient and is no parameter, and the line of `forward` that reads it first."""

    tensor: torch.Tensor
    line: str


def unregistered_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Such tensors by where they are, in the words of Python.

    >>> model = nn.Module()
    >>> model.scales = [torch.ones(1), torch.zeros(1)]
    >>> list(unregistered_tensors(model))
    ['scales[0]', 'scales[1]']
    """
    found: dict[str, torch.Tensor] = {}
    known = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in user_attributes(module):
            if isinstance(value, (*_PLAIN_CONTAINERS, nn.Module)):
                for place, tensor in _tensors_inside(value, f"{path}.{name}" if path else name, known):
                    found.setdefault(place, tensor)
    return found


def storage_key(value: torch.Tensor) -> tuple[Any, ...]:
    """What tells tensors apart that are made of others without a copy, as the exporter does."""
    return (0 if isinstance(value, FakeTensor) else value.data_ptr(), value.shape, value.dtype)


def _tensors_inside(value: Any, path: str, known: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        if id(value) not in known:
            known.add(id(value))
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield f"{path}.{name}", tensor
            for place, tensor in unregistered_tensors(value).items():
                yield f"{path}.{place}", tensor
    elif isinstance(value, _PLAIN_CONTAINERS) and id(value) not in known:
        known.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_inside(item, f"{path}[{key!r}]", known)
