"""The interface between streamed weights and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from sft.weights import Store, TensorSpec, UnbufferedStream, WeightStream
from sft.weights.record import RecordPart

__all__ = ["RecordStream", "StreamedRecords"]

#: A reader of records: through a window, or one at a time.
RecordStream = WeightStream | UnbufferedStream


class StreamedRecords(Protocol):
    """Records in a store, each with some parameters or a slice of each, as an optimizer accesses them."""

    device: torch.device
    store: Store

    @property
    def num_blocks(self) -> int:
        """Number of records."""
        ...

    @property
    def weights(self) -> RecordStream:
        """Reader of the weights."""
        ...

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters, by name."""
        ...

    def names_of(self, block: int) -> tuple[str, ...]:
        """Names of the parameters in a record."""
        ...

    def shape_of(self, param: Tensor) -> tuple[int, ...]:
        """Shape of a parameter's slice in a record."""
        ...

    def slice_of(self, value: Tensor, block: int) -> Tensor:
        """Slice of a parameter-shaped tensor that belongs to a record."""
        ...

    def tensor(self, name: str, key: str) -> Tensor:
        """A tensor of the current generation that belongs to a parameter, assembled over all records with a slice of it."""
        ...

    def window(self, store: Store, part: RecordPart, window_bytes: int | None = None) -> RecordStream:
        """Reader of a store with as many records."""
        ...

    def set_state(self, state: Mapping[str, Sequence[TensorSpec]], fill: Callable[[int, dict[str, Tensor]], None]) -> bool:
        """Add the optimizer's state to the records; true if the store already had it."""
        ...

    def rebind(self) -> None:
        """Point the parameters to the current generation."""
        ...
