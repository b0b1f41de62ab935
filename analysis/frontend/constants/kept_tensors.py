"""Kept tensors: values of a call that ``forward`` leaves in attributes of its modules, where the next call or the caller reads them.

A compiled model undoes such changes of attributes. That is harmless for a feature map that nothing reads. Two uses are refused:

*State.* The next call reads the tensor: ``y = self.cell(x, self.hidden); self.hidden = y.detach()``. A second trace shows it. It runs with
markers, tensors of the same shape, in place of the kept ones; a program that reads a marker depends on the call before.

*Losses.* A kept number with a gradient that no output depends on is meant for the loss: ``self.aux_loss = y.square().mean()``. The caller
would read none, or one of an earlier call of the plain model.

Values that depend neither on inputs nor on random numbers (grids of positions, cached by size) are the same in each call, and may be read
again. The constant tracker knows most of them; for others a third trace returns what is kept (:class:`ReturnsKept`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sft.analysis.frontend.constants.tracking import ConstantTracker
from sft.analysis.frontend.module_state import override_attributes
from sft.analysis.frontend.state_snapshot import is_user_object, user_attributes
from sft.common.torch_internals import pytree, storage_id

__all__ = ["KeptTensors", "ReturnsKept", "watch_kept_tensors"]

#: Limits on the depth and length of containers that are searched.
_MAX_DEPTH, _MAX_ITEMS = 5, 10_000


@dataclass(frozen=True, slots=True, eq=False)
class KeptTensor:
    """A tensor that a call leaves in an attribute.

    Attributes:
        place: path of the module, and name of the attribute.
        shape: its shape in the trace, without symbols.
        dtype: its element type.
        device: its device.
    """

    place: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def marker(self) -> Tensor:
        """A tensor of the same shape, with the memory of one element."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


@dataclass(frozen=True, slots=True)
class KeptTensors:
    """The tensors that a call keeps and that are not known to be constant.

    Attributes:
        values: new values of attributes, with a :class:`KeptTensor` in place of each tensor.
        losses: places of numbers with a gradient that no output depends on.
    """

    values: Mapping[tuple[nn.Module, str], Any] = field(default_factory=dict)
    losses: tuple[str, ...] = ()

    def with_markers(self) -> tuple[dict[tuple[nn.Module, str], Any], dict[int, str]]:
        """The values with markers in place of the tensors, and the place of each marker by the identity of its memory."""
        markers: dict[KeptTensor, Tensor] = {}

        def marked(item: Any) -> Any:
            return markers.setdefault(item, item.marker()) if isinstance(item, KeptTensor) else item

        values = {attribute: _map_items(marked, value) for attribute, value in self.values.items()}
        return values, {storage_id(marker): kept.place for kept, marker in markers.items()}


@contextlib.contextmanager
def watch_kept_tensors(model: nn.Module, tracker: ConstantTracker) -> Iterator[list[KeptTensors]]:
    """A context in which calls of ``model.forward`` note the tensors that they keep. Yields a list with an entry for each call.

    Args:
        model: the model.
        tracker: knows the values of the call that do not depend on its inputs.
    """
    inner = model.forward
    calls: list[KeptTensors] = []
    level = 0

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal level
        before = _kept_in(model)
        level += 1
        try:
            result = inner(*args, **kwargs)
        finally:
            level -= 1
        if level == 0:  # `forward` may call itself
            calls.append(_KeptSearch(tracker, [tensor for _, tensor in before], result).run(model))
        return result

    with override_attributes({(model, "forward"): forward}):
        yield calls


class ReturnsKept(nn.Module):
    """A module that calls a model, and returns the tensors that the call keeps, in a list for each attribute.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> dict[str, list[Tensor]]:
        """The kept tensors of ``model(*inputs)``."""
        before = _kept_in(self.model)
        known = {id(tensor) for _, tensor in before}
        self.model(*inputs)
        kept: dict[str, list[Tensor]] = {}
        for place, tensor in _kept_in(self.model):
            if id(tensor) not in known:
                kept.setdefault(place, []).append(tensor)
        return kept


def _kept_in(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors in attributes of a model's modules, with their places."""
    named = ((f"{path}." if path else "", module) for path, module in model.named_modules())
    return [(prefix + name, tensor) for prefix, module in named for name, value in user_attributes(module) for tensor in _tensors_in(value)]


class _KeptSearch:
    """A search for the tensors that one call keeps.

    Args:
        tracker: knows the values of the call that do not depend on its inputs.
        before: tensors in attributes before the call.
        result: the result of the call.
    """

    def __init__(self, tracker: ConstantTracker, before: list[Tensor], result: Any) -> None:
        self._tracker, self._before, self._result = tracker, before, result
        self._known = {id(tensor) for tensor in before}
        self._kept: dict[int, KeptTensor] = {}
        self._losses: dict[str, Tensor] = {}

    def run(self, model: nn.Module) -> KeptTensors:
        """The tensors that modules of a model have in their attributes now."""
        values = {}
        for path, module in model.named_modules():
            for name, value in list(user_attributes(module)):
                if any(map(self._is_kept, _tensors_in(value))):
                    replaced = functools.partial(self._replaced, f"{path}.{name}" if path else name)
                    values[module, name] = _map_items(replaced, value)
        read = _autograd_nodes(self._result) if self._losses else set()
        return KeptTensors(values, tuple(place for place, tensor in self._losses.items() if tensor.grad_fn not in read))

    def _is_kept(self, tensor: Tensor) -> bool:
        return id(tensor) not in self._known and not isinstance(tensor, nn.Parameter) and not self._tracker.is_constant(tensor)

    def _replaced(self, place: str, item: Any) -> Any:
        """An item, or what replaces a tensor that the call keeps."""
        if not isinstance(item, Tensor) or not self._is_kept(item):
            return item
        if id(item) not in self._kept:
            if item.requires_grad and all(isinstance(size, int) and size == 1 for size in item.shape):
                self._losses[place] = item
            shape = tuple(size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else 1 for size in item.shape)
            self._kept[id(item)] = KeptTensor(place, shape, item.dtype, item.device)
        return self._kept[id(item)]


def _map_items(function: Callable[[Any], Any], value: Any, depth: int = 0) -> Any:
    """A value with the results of a function in place of the items of its containers and objects, which are copied."""
    items = _items(value)
    if items is None or depth > _MAX_DEPTH:
        return function(value)
    mapped = [_map_items(function, item, depth + 1) for item in items]
    if isinstance(value, tuple):
        return type(value)(*mapped) if hasattr(value, "_fields") else tuple(mapped)
    result = copy.copy(value)
    if isinstance(value, (list, deque)):
        result.clear()
        result.extend(mapped)
    else:
        names = value if isinstance(value, dict) else vars(value)
        (result if isinstance(value, dict) else vars(result)).update(zip(names, mapped, strict=True))
    return result


def _items(value: Any) -> list[Any] | None:
    """The items of a container or the attributes of a user's object; ``None`` for other values, and for long containers."""
    if isinstance(value, nn.Module):
        return None
    if isinstance(value, (dict, list, tuple, deque)):
        items = value.values() if isinstance(value, dict) else value
    elif is_user_object(value):
        items = vars(value).values()
    else:
        return None
    return list(items) if len(items) <= _MAX_ITEMS else None


def _tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth <= _MAX_DEPTH:
        for item in _items(value) or ():
            yield from _tensors_in(item, depth + 1)


def _autograd_nodes(result: Any) -> set[Any]:
    """The nodes of the autograd graph of a result."""
    pending = [tensor.grad_fn for tensor in pytree.tree_leaves(result) if isinstance(tensor, Tensor)]
    nodes: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending += [following for following, _ in node.next_functions]
    return nodes
