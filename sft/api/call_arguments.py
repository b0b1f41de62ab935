"""Arguments of a call: tensors in containers and by name, and constants.

A call ``net(*args, **keywords)`` is bound to the signature of the model's ``forward``, and flattened to its inputs (tensors and sources)
and its *structure*: the containers, the keywords, and the constants (numbers, texts, flags). A capture holds for one structure, so
constants are compared by value at each call. A call with tensors by position only has no structure.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from sft.api.inputs import InputShape, is_streamable_input
from sft.common.byte_units import is_integer
from sft.common.errors import InputError
from sft.common.module_snapshot import PLAIN_TYPES, exact_key
from sft.common.torch_internals import pytree

__all__ = ["CallArguments", "CallStructure", "bind_arguments", "bind_shapes", "describes_shapes", "use_structure"]

_CONSTANTS = (bool, int, float, str)


class _InputPlaceholder:
    """Stands for an input in a structure."""

    def __repr__(self) -> str:
        return "*"


_INPUT = _InputPlaceholder()


@dataclass(frozen=True, slots=True, eq=False)
class CallStructure:
    """Containers, keywords and constants of a call.

    Attributes:
        spec: pytree of the pair ``(args, keywords)``.
        leaves: constants, and a placeholder for each input.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @property
    def _key(self) -> tuple[Any, ...]:
        return tuple(_INPUT if leaf is _INPUT else exact_key(leaf) for leaf in self.leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallStructure) and self._key == other._key and self.spec == other.spec

    def __hash__(self) -> int:
        return hash((self._key, self.spec.num_nodes))

    def __repr__(self) -> str:
        args, keywords = pytree.tree_unflatten(list(self.leaves), self.spec)
        return ", ".join((*map(repr, args), *(f"{name}={value!r}" for name, value in keywords.items())))

    def unflatten(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords of the call with these inputs."""
        remaining = iter(inputs)
        args, keywords = pytree.tree_unflatten([next(remaining) if leaf is _INPUT else leaf for leaf in self.leaves], self.spec)
        return tuple(args), dict(keywords)


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Inputs of a call, and its structure.

    Attributes:
        inputs: tensors and sources in order.
        structure: the rest of the call; ``None`` if all arguments are inputs by position.
    """

    inputs: tuple[Any, ...]
    structure: CallStructure | None = None


def bind_arguments(model: nn.Module, args: Sequence[Any], keywords: Mapping[str, Any]) -> CallArguments:
    """Bind arguments to the model's ``forward``; trailing arguments equal to their defaults are dropped.

    Raises:
        InputError: they do not fit the signature, or one is neither an input nor a constant.
    """
    if not keywords and all(_is_input(value) for value in args):
        return CallArguments(tuple(args))
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **keywords)
    except TypeError as error:
        raise InputError(f"{f'keyword inputs {sorted(keywords)}' if keywords else 'inputs'}: {error}; forward takes {signature}") from error
    for name in list(reversed(bound.arguments)):
        if not _is_default(bound.arguments[name], signature.parameters[name].default):
            break
        del bound.arguments[name]
    if not bound.kwargs and all(_is_input(value) for value in bound.args):
        return CallArguments(bound.args)
    leaves, spec = pytree.tree_flatten((bound.args, bound.kwargs), is_leaf=is_streamable_input)
    _refuse_unknown_leaves(spec, leaves)
    inputs = tuple(leaf for leaf in leaves if _is_input(leaf))
    if not inputs and leaves:
        types = ", ".join(type(value).__name__ for value in (*bound.args, *bound.kwargs.values()))
        opened = ", such as sft.sources.open_image(path)" if any(isinstance(leaf, str) for leaf in leaves) else ""
        raise InputError(f"the call has no input, only arguments of type {types}; give a tensor, an array, an image or a source{opened}")
    return CallArguments(inputs, CallStructure(spec, tuple(_INPUT if _is_input(leaf) else leaf for leaf in leaves)))


@dataclass(frozen=True, slots=True)
class _ShapeEntry:
    """The shape of an input, in the place of the input."""

    shape: Any


def bind_shapes(model: nn.Module, input_shape: InputShape) -> tuple[InputShape, CallStructure | None]:
    """The ``input_shape`` of ``sft.compile`` as a sequence of shapes, and the structure of the calls that it describes.

    A mapping describes a call by names, ``net(**batch)``. A mapping inside a sequence describes a dictionary among the arguments, and a
    sequence of shapes inside a sequence a list or tuple of inputs, ``net([first, second])``.

    Raises:
        InputError: as :func:`bind_arguments`.
    """
    if isinstance(input_shape, Mapping):
        arguments = bind_arguments(model, (), {name: _with_entries(value) for name, value in input_shape.items()})
    elif isinstance(input_shape, (list, tuple)) and any(map(_is_container, input_shape)):
        arguments = bind_arguments(model, tuple(_with_entries(item) for item in input_shape), {})
    else:
        return input_shape, None
    return [value.shape if isinstance(value, _ShapeEntry) else value for value in arguments.inputs], arguments.structure


def _is_container(item: Any) -> bool:
    """True for a description of an argument that contains inputs, and is not the shape of one."""
    is_several = isinstance(item, (list, tuple)) and any(isinstance(entry, (list, tuple, torch.Tensor)) for entry in item)
    return isinstance(item, Mapping) or is_several


def _with_entries(value: Any) -> Any:
    """A nested description of arguments with an entry for each shape."""
    if isinstance(value, Mapping):
        return {name: _with_entries(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        if all(extent is None or is_integer(extent) for extent in value):
            return _ShapeEntry(value)
        items = [_with_entries(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def describes_shapes(args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """True for arguments that contain a shape in the place of an input."""
    leaves = pytree.tree_leaves((list(map(_with_entries, args)), _with_entries(keywords)), is_leaf=is_streamable_input)
    return any(isinstance(leaf, _ShapeEntry) for leaf in leaves)


def _is_input(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, _ShapeEntry)) or is_streamable_input(value)


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and isinstance(value, _CONSTANTS) and value == default)


def _refuse_unknown_leaves(spec: pytree.TreeSpec, leaves: Sequence[Any]) -> None:
    """Refuse objects that are neither inputs nor constants.

    Raises:
        InputError: names their places.
    """
    paths = [path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(leaves))), spec))[0]]
    problems = [
        f"argument {pytree.keystr(path[1:])} is a {type(leaf).__module__}.{type(leaf).__qualname__}"
        f"{' (numpy.asarray makes it an array)' if hasattr(leaf, '__array_interface__') else ''}; give tensors, arrays, sources, and "
        "constants (numbers, texts, flags), in lists, tuples, dictionaries, or classes registered with torch.export.register_dataclass"
        for path, leaf in zip(paths, leaves, strict=True)
        if not _is_input(leaf) and not isinstance(leaf, (*PLAIN_TYPES, Enum))
    ]
    if problems:
        raise InputError("; ".join(problems))


@contextlib.contextmanager
def use_structure(model: nn.Module, structure: CallStructure | None) -> Iterator[None]:
    """A context in which ``model.forward`` takes the inputs of a structure by position."""
    if structure is None:
        yield
        return
    own_forward, instance_forward = model.forward, vars(model).get("forward")

    def restore() -> None:
        del vars(model)["forward"]
        if instance_forward is not None:
            vars(model)["forward"] = instance_forward

    def forward(*inputs: Any) -> Any:
        args, keywords = structure.unflatten(inputs)
        restore()  # for a model that calls its own ``forward`` again, with arguments of its choice
        try:
            return own_forward(*args, **keywords)
        finally:
            vars(model)["forward"] = forward

    vars(model)["forward"] = forward
    try:
        yield
    finally:
        restore()
