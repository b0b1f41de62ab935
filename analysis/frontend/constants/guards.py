"""Guards on constants: present values of the expressions that captures of a model have read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from sft.analysis.frontend.constants.expressions import (
    UNKNOWN,
    Expression,
    TensorLookup,
    evaluate,
    tensor_attribute,
    value_key,
    version_of,
)
from sft.analysis.frontend.constants.tracking import ConstantRead
from sft.common.torch_internals import disable_current_modes, disable_torch_function

__all__ = ["ConstantGuards"]

#: Leaves of up to this size are compared by value at each call.
_MAX_COMPARED_BYTES = 1 << 16


class ConstantGuards:
    """Present values of the expressions that captures of a model have read.

    A value is computed again only where a tensor of its expression has changed. On the CPU small tensors are compared by value, and
    expressions of large ones are computed at each call, as eager PyTorch does. On other devices the comparison is by address and version
    counter, without a synchronization; a write through ``.data`` does not change the counter.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._lookup: TensorLookup = functools.partial(tensor_attribute, model)
        self._known: dict[str, tuple[tuple[_LeafState, ...], Any]] = {}

    def hold(self, reads: Iterable[ConstantRead]) -> bool:
        """Return true where all values are those of the capture."""
        with disable_current_modes(), disable_torch_function():
            return all(self._key(read.expression) == read.key for read in reads)

    def keys(self, reads: Iterable[ConstantRead]) -> tuple[Any, ...]:
        """The present values of reads, each expression once."""
        expressions = {read.expression.digest: read.expression for read in reads}
        self._known = {digest: known for digest, known in self._known.items() if digest in expressions}
        with disable_current_modes(), disable_torch_function():
            return tuple((digest, self._key(expressions[digest])) for digest in sorted(expressions))

    def _key(self, expression: Expression) -> Any:
        states = tuple(_LeafState(leaf.locate(self._lookup)) for leaf in sorted(expression.leaves, key=lambda leaf: leaf.digest))
        cached = self._known.get(expression.digest)
        if cached is None or len(cached[0]) != len(states) or not all(map(_LeafState.is_same, states, cached[0])):
            value = evaluate(expression, self._lookup)
            cached = states, "unknown" if value is UNKNOWN else value_key(value)
            self._known[expression.digest] = cached
        return cached[1]


class _LeafState:
    """A tensor at one time, to find out whether its values have changed since."""

    __slots__ = ("_contents", "_key", "_reference")

    def __init__(self, tensor: Tensor | None) -> None:
        self._reference = None if tensor is None else weakref.ref(tensor)
        self._key: Any = None
        self._contents: Any = None
        if tensor is None:
            return
        self._key = (tensor.data_ptr(), version_of(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.device.type == "cpu":
            is_small = tensor.numel() * tensor.element_size() <= _MAX_COMPARED_BYTES
            self._contents = value_key(tensor) if is_small else object()

    def is_same(self, other: _LeafState) -> bool:
        """Return true where both are the same tensor with the same values."""
        mine, theirs = (None if state._reference is None else state._reference() for state in (self, other))
        return mine is theirs and self._key == other._key and self._contents == other._contents
