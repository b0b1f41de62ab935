"""Tensors inside nested arguments, and moves of their storages to another device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["StorageMoves", "map_tensors"]


def map_tensors(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A value with each tensor in its lists, tuples, dicts and dataclasses replaced; containers without tensors are the same objects."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, move) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        entries = {key: map_tensors(item, move) for key, item in value.items()}
        return entries if any(entries[key] is not item for key, item in value.items()) else value
    if is_dataclass(value) and not isinstance(value, type):
        old_fields = {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
        new_fields = {name: map_tensors(item, move) for name, item in old_fields.items()}
        changed = {name: item for name, item in new_fields.items() if item is not old_fields[name]}
        if not changed:
            return value
        result = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(result, name, item)  # frozen dataclasses as well
        return result
    return value


@dataclass(slots=True)
class StorageMoves:
    """Copies of storages on a device. Views of one storage become views of one copy, and bytes around a view are copied along.

    Attributes:
        device: the device.
    """

    device: str
    _storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)

    def move(self, tensor: Tensor) -> Tensor:
        """The same view of the copy of a tensor's storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = (storage, torch.UntypedStorage(storage.nbytes(), device=self.device).copy_(storage, False))
        view = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return view.set_(self._storages[storage._cdata][1], tensor.storage_offset(), tensor.shape, tensor.stride())

    def copy_back(self) -> None:
        """Copy all storages from the device back."""
        for own, device_storage in self._storages.values():
            own.copy_(device_storage, False)
