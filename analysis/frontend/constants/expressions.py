"""Constant expressions: values that ``forward`` computes from numbers and from the model's own tensors, and not from its inputs.

An expression is a record of calls. It is evaluated only where ``forward`` reads its value as a Python number: at capture, and again where a
tensor that it depends on has changed. The evaluation runs on real tensors, without the modes of the trace, and writes to no tensor of the
model. Random and uninitialized values, and operators outside of ATen, are not constants.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sft.common.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    disable_current_modes,
    disable_torch_function,
    op_schema,
    pytree,
    storage_id,
)

__all__ = [
    "UNKNOWN",
    "Blank",
    "Call",
    "Expression",
    "Leaf",
    "NotConstantError",
    "ResultItem",
    "TensorLookup",
    "autocast_state",
    "evaluate",
    "has_values",
    "map_items",
    "tensor_attribute",
    "value_key",
    "version_of",
]

#: The value of an expression that has none.
UNKNOWN = object()

#: Largest result of one call of an evaluation: constants that decide something are small.
_MAX_RESULT_BYTES = 64 * 2**20


#: Returns the tensor of the model with a qualified name, if there is one.
TensorLookup = Callable[[str], Tensor | None]


class NotConstantError(Exception):
    """A value is random, uninitialized, too large, or of an operator with effects that are not known."""


class Expression:
    """Base class of constant expressions; immutable.

    Args:
        operands: expressions that it is computed from.
        identity: anything else that it depends on, with a ``repr`` that tells it.

    Attributes:
        operands: as above.
        leaves: the tensors that it depends on.
        digest: equal for expressions of equal structure on the same tensors.
    """

    __slots__ = ("digest", "leaves", "operands")
    digest: str
    leaves: frozenset[Leaf]
    operands: tuple[Expression, ...]

    def __init__(self, operands: Sequence[Expression], *identity: Any) -> None:
        self.operands = tuple(operands)
        self.leaves = frozenset().union(*(operand.leaves for operand in operands))
        key = (type(self).__name__, [operand.digest for operand in operands], identity)
        self.digest = hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


class Leaf(Expression):
    """A tensor of the model.

    Args:
        path: qualified name of a parameter, a buffer or an attribute of a module; empty for a tensor of another object.
        tensor: that tensor, where there is no path.
    """

    __slots__ = ("path", "tensor")

    def __init__(self, path: str, tensor: Tensor | None = None) -> None:
        super().__init__((), path, id(tensor))
        self.path, self.tensor = path, tensor
        self.leaves = frozenset((self,))

    def locate(self, lookup: TensorLookup) -> Tensor | None:
        """The present tensor; ``None`` where there is none of that name, or one without values in memory."""
        value = lookup(self.path) if self.path else self.tensor
        return value if value is not None and has_values(value) else None


class Blank(Expression):
    """Zeros that stand for a tensor of which only the type, the device and the shape are read."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__((), shape, dtype, device)
        self.shape, self.dtype, self.device = shape, dtype, device


class Call(Expression):
    """A call of a function of torch.

    Args:
        function: the function.
        arguments: its arguments, with expressions in place of tensors.
        keywords: its keyword arguments, likewise.
        writes_first: the call writes to its first argument, and the expression is the value after it.
        autocast: dtype of autocast by type of device, where it was on.
        max_result_bytes: bytes of its largest result in the trace.
    """

    __slots__ = ("arguments", "autocast", "function", "keywords", "max_result_bytes", "writes_first")

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        *,
        writes_first: bool = False,
        autocast: tuple[tuple[str, torch.dtype], ...] = (),
        max_result_bytes: int = 0,
    ) -> None:
        operands: list[Expression] = []

        def key(item: Any) -> Any:
            if isinstance(item, Expression):
                operands.append(item)
                return "operand"
            return (item.dtype.str, item.shape, item.tobytes()) if isinstance(item, (np.ndarray, np.generic)) else item

        structure = map_items(key, (arguments, dict(keywords)))
        super().__init__(operands, function, structure, writes_first, autocast)
        self.function, self.arguments, self.keywords = function, arguments, keywords
        self.writes_first, self.autocast, self.max_result_bytes = writes_first, autocast, max_result_bytes


class ResultItem(Expression):
    """One tensor of a call with several results."""

    __slots__ = ("call", "index")

    def __init__(self, call: Call, index: int) -> None:
        super().__init__((call,), index)
        self.call, self.index = call, index


def has_values(tensor: Tensor) -> bool:
    """Return true for a plain tensor with values in memory."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    with disable_torch_function():  # every function mode would see the reads
        return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def version_of(tensor: Tensor) -> int:
    """Number of writes to a tensor. Inference tensors have no counter."""
    with disable_torch_function():
        return -1 if tensor.is_inference() else tensor._version


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """Map the items of nested tuples, lists, dictionaries and slices."""
    if isinstance(value, slice):
        return slice(*(function(item) for item in (value.start, value.stop, value.step)))
    if type(value) in (tuple, list, torch.Size):
        return (tuple if type(value) is torch.Size else type(value))(map_items(function, item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_items(function, item) for item in value))
    if type(value) is dict:
        return {key: map_items(function, item) for key, item in value.items()}
    return function(value)


def tensor_attribute(model: nn.Module, path: str) -> Tensor | None:
    """The tensor attribute of a module with a qualified name; ``None`` where the model has none of that name."""
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, Tensor) else None


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(expression: Expression, lookup: TensorLookup) -> Any:
    """The value of an expression on the model's present tensors; :data:`UNKNOWN` where it has none.

    Errors of a call (a number that is read from a tensor of several elements) leave the value unknown as well: the trace raises them.
    """
    values: dict[int, Any] = {}
    with disable_current_modes(), disable_torch_function():
        try:
            for item in _in_order(expression):
                values[id(item)] = _evaluate_one(item, values, lookup)
        except Exception:
            return UNKNOWN
    return values[id(expression)]


def _in_order(expression: Expression) -> Iterator[Expression]:
    """An expression after its operands, each once. A loop, since expressions may be deeper than Python's stack."""
    visited, stack = set[int](), [(expression, False)]
    while stack:
        item, is_ready = stack.pop()
        if is_ready:
            yield item
        elif id(item) not in visited:
            visited.add(id(item))
            stack.append((item, True))
            stack += [(operand, False) for operand in item.operands]


def _evaluate_one(item: Expression, values: Mapping[int, Any], lookup: TensorLookup) -> Any:
    if isinstance(item, Leaf):
        tensor = item.locate(lookup)
        if tensor is None:
            raise NotConstantError
        return tensor.detach()
    if isinstance(item, Blank):
        return torch.zeros((), dtype=item.dtype, device=_with_values(item.device)).expand(item.shape)
    if isinstance(item, ResultItem):
        return [leaf for leaf in pytree.tree_leaves(values[id(item.call)]) if isinstance(leaf, Tensor)][item.index]
    assert isinstance(item, Call)
    if item.max_result_bytes > _MAX_RESULT_BYTES:
        raise NotConstantError
    arguments, keywords = map_items(
        lambda value: values[id(value)] if isinstance(value, Expression) else _with_values(value),
        (item.arguments, dict(item.keywords)),
    )
    if item.writes_first:
        arguments = (arguments[0].clone(), *arguments[1:])
    protected = {storage_id(values[id(operand)]) for operand in item.operands if isinstance(values[id(operand)], Tensor)}
    with _autocast_as(item.autocast), _ConstantOps(protected):
        result = item.function(*arguments, **keywords)
    return arguments[0] if item.writes_first else result


def _with_values(value: Any) -> Any:
    """An argument, with the CPU in place of the meta device: models on it make constants there, which have no values."""
    is_meta = isinstance(value, (torch.device, str)) and str(value) == "meta"
    return torch.device("cpu") if is_meta else value


class _ConstantOps(TorchDispatchMode):
    """A dispatch mode that raises NotConstantError for operators whose results are not constants.

    Args:
        protected: identities of memory that may not be written.
    """

    def __init__(self, protected: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._protected = protected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        for value in pytree.tree_leaves(result):
            is_new = isinstance(value, Tensor) and storage_id(value) not in self._protected
            if is_new and value.untyped_storage().nbytes() > _MAX_RESULT_BYTES:
                raise NotConstantError
        return result

    def _check(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name, schema = op.name(), op_schema(op)
        if op.namespace not in _PURE_NAMESPACES or torch.Tag.nondeterministic_seeded in op.tags or name.startswith(_UNINITIALIZED_OPS):
            raise NotConstantError
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            is_written = is_written and any(
                isinstance(item, Tensor) and storage_id(item) in self._protected for item in pytree.tree_leaves(value)
            )
            if is_written or (argument.name in _TRAINING_ARGUMENTS and value is True):
                raise NotConstantError


_PURE_NAMESPACES = frozenset({"aten", "prims", "prim", "torchvision"})
_UNINITIALIZED_OPS = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_")
#: Arguments by which norms write to their running statistics, against their schemas.
_TRAINING_ARGUMENTS = frozenset({"training", "train", "use_input_stats"})


_AUTOCAST_DEVICES = ("cpu", "cuda")


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The dtype of autocast by type of device, where it is on."""
    devices = [device_type for device_type in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device_type)]
    return tuple((device_type, torch.get_autocast_dtype(device_type)) for device_type in devices)


@contextlib.contextmanager
def _autocast_as(state: tuple[tuple[str, torch.dtype], ...]) -> Iterator[None]:
    """A context in which autocast is as recorded."""
    recorded = dict(state)
    with contextlib.ExitStack() as stack:
        for device_type in _AUTOCAST_DEVICES:
            dtype, is_on = recorded.get(device_type), torch.is_autocast_enabled(device_type)
            if is_on != (dtype is not None) or (is_on and torch.get_autocast_dtype(device_type) != dtype):
                stack.enter_context(torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False))
        yield


def value_key(value: Any) -> Any:
    """A hashable key of a value that ``forward`` reads: equal for equal numbers of one type, and for tensors of equal bits."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(value_key, value))
    if isinstance(value, Tensor):
        with disable_current_modes(), disable_torch_function():
            numbers = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
        return tuple(value.shape), str(value.dtype), hashlib.blake2b(numbers.tobytes()).hexdigest()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.shape, value.dtype.str, value.tobytes()
    return type(value).__name__, repr(value)
