"""Generators of random numbers, and iterators, that `forward` takes the next of: how far they are."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn

from sft.analysis.objects import reachable_objects
from sft.errors import UnsupportedError

__all__ = ["forbid_external_rng"]

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
