"""Arguments in which torch reads the values of tensors by itself: numbers, bounds of slices, masks as indices, numbers of repetitions.

``torch.full(shape, scale)`` with a tensor of one element calls ``item()`` in C++, where a trace has no value. The functions here exchange
such arguments for values that the caller knows, and leave others as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from sft.analysis.frontend.constants.expressions import UNKNOWN, map_items
from sft.common.torch_internals import op_schema

__all__ = ["index_arguments", "number_arguments", "output_size_keyword"]

#: Functions that make a tensor of nested lists.
_DATA_FUNCTIONS = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})
#: Functions that read tensors although they have overloads for them.
_RANGE_FUNCTIONS = frozenset({"linspace", "logspace"})


@dataclass(frozen=True, slots=True)
class _NumberParameters:
    """Parameters of a function that take numbers, and never tensors."""

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()
    rest: int | None = None  # first position of sizes that are given one by one

    def has(self, position: int) -> bool:
        return position in self.positions or (self.rest is not None and position >= self.rest)


def number_arguments(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], number: Callable[[Tensor], Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a call, with numbers in place of tensors of no dimension where the function takes numbers.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        number: returns the number in a tensor, or ``UNKNOWN``.
    """

    def convert(item: Any) -> Any:
        if not isinstance(item, Tensor) or item.requires_grad or item.dim():
            return item
        value = number(item)
        return item if value is UNKNOWN else value

    name = getattr(func, "__name__", "")
    if name in ("__getitem__", "__setitem__"):
        return (args[0], _with_numeric_slices(args[1], convert), *args[2:]), kwargs
    if name in _DATA_FUNCTIONS:
        position = int(name == "new_tensor")
        data = args[position : position + 1]
        if not data or not isinstance(data[0], (list, tuple)):
            return args, kwargs
        return (*args[:position], map_items(convert, data[0]), *args[position + 1 :]), kwargs
    parameters = _number_parameters(func)
    if parameters is None:
        return args, kwargs
    args = tuple(map_items(convert, value) if parameters.has(position) else value for position, value in enumerate(args))
    return args, {key: map_items(convert, value) if key in parameters.names else value for key, value in kwargs.items()}


def _with_numeric_slices(index: Any, convert: Callable[[Any], Any]) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    converted = tuple(map_items(convert, item) if isinstance(item, slice) else item for item in items)
    return converted if isinstance(index, tuple) else converted[0]


@lru_cache(maxsize=2**10)
def _number_parameters(func: Any) -> _NumberParameters | None:
    name = getattr(func, "__name__", "")
    if name in _RANGE_FUNCTIONS:
        return _NumberParameters(frozenset(range(3)), frozenset({"start", "end", "steps"}))
    if isinstance(func, FunctionType):
        return _annotated_numbers(func) if func.__module__ in ("torch.nn.functional", "torch.functional") else None
    packet = None if not name or name.startswith("_") else getattr(torch.ops.aten, name, None)
    return None if packet is None else _schema_numbers([op_schema(getattr(packet, overload)) for overload in packet.overloads()])


def _annotated_numbers(func: FunctionType) -> _NumberParameters:
    parameters = list(inspect.signature(func).parameters.values())
    numeric = [
        (position, parameter.name)
        for position, parameter in enumerate(parameters)
        if parameter.annotation is not inspect.Parameter.empty and "Tensor" not in str(parameter.annotation)
    ]
    return _NumberParameters(frozenset(position for position, _ in numeric), frozenset(name for _, name in numeric))


def _schema_numbers(schemas: list[Any]) -> _NumberParameters:
    kinds: dict[int | str, list[str]] = {}
    rest: set[int | None] = set()
    for schema in schemas:
        if schema.name.endswith("out"):
            continue
        positional = [argument for argument in schema.arguments if not argument.kwarg_only]
        for position, argument in enumerate(positional):
            kinds.setdefault(position, []).append(str(argument.type))
        for argument in schema.arguments:
            kinds.setdefault(argument.name, []).append(str(argument.type))
        has_sizes = bool(positional) and str(positional[-1].type) in ("List[int]", "List[SymInt]")
        rest.add(len(positional) if has_sizes else None)
    numeric = [key for key, types in kinds.items() if not any("Tensor" in kind for kind in types)]
    first_size = next(iter(rest)) if len(rest) == 1 else None
    return _NumberParameters(
        frozenset(key for key in numeric if isinstance(key, int)), frozenset(key for key in numeric if isinstance(key, str)), first_size
    )


def index_arguments(func: Any, args: tuple[Any, ...], indices: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    """The arguments of ``value[index]``, with index tensors in place of masks.

    Args:
        func: the function.
        args: its arguments.
        indices: returns the index tensors of a mask, or ``UNKNOWN``.
    """
    if getattr(func, "__name__", "") != "__getitem__":
        return args
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(_is_mask(item) for item in items):
        return args
    expanded: list[Any] = []
    for item in items:
        tensors: Any = indices(item) if _is_mask(item) else UNKNOWN
        expanded += [item] if tensors is UNKNOWN else tensors
    return args[0], tuple(expanded)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and item.dim() > 0


def output_size_keyword(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], total: Callable[[Tensor], Any]) -> Mapping[str, Any]:
    """The keyword arguments of ``repeat_interleave``, with the size of its result.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        total: returns the sum of a tensor as a number, or ``UNKNOWN``.
    """
    if getattr(func, "__name__", "") != "repeat_interleave" or "output_size" in kwargs:
        return kwargs
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0] if len(args) == 1 and "repeats" not in kwargs else None)
    size = total(repeats) if isinstance(repeats, Tensor) else UNKNOWN
    return kwargs if size is UNKNOWN else {**kwargs, "output_size": size}
