"""Streamed weights as an optimizer sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from sft.weights import Store, TensorSpec, UnbufferedStream, WeightStream
from sft.weights.record import RecordPart

__all__ = ["RecordStream", "StreamedRecords"]

#: How records are read: through a window, or one at a time.
RecordStream = WeightStream | UnbufferedStream


class StreamedRecords(Protocol):
    """Records in a store, as an optimizer sees them: each has some parameters, or a part of each."""

    device: torch.device
    store: Store

    @property
    def num_blocks(self) -> int:
        """How many records there are."""
        ...

    @property
    def weights(self) -> RecordStream:
        """A way to read the weights."""
        ...

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters, by name."""
        ...

    def names_of(self, block: int) -> tuple[str, ...]:
        """The parameters in a record."""
        ...

    def shape_of(self, param: Tensor) -> tuple[int, ...]:
        """The shape of what a record has of a parameter."""
        ...

    def piece(self, value: Tensor, block: int) -> Tensor:
        """What a record has of a tensor that belongs to a parameter."""
        ...

    def tensor(self, name: str, key: str) -> Tensor:
        """A tensor of the current generation that belongs to a parameter, of all records that have a part of it."""
        ...

    def window(self, store: Store, part: RecordPart, window_bytes: int | None = None) -> RecordStream:
        """A way to read a store of as many records."""
        ...

    def set_state(self, state: Mapping[str, Sequence[TensorSpec]], fill: Callable[[int, dict[str, Tensor]], None]) -> bool:
        """Make room in the records for what an optimizer keeps; whether there was this room before."""
        ...

    def rebind(self) -> None:
        """Let the parameters be those of the current generation."""
        ...
