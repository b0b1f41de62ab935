"""Blocks with streamed weights: record stores, windows on the device, and gradient sinks.

Parameters are in a store (host memory or a file), buffers in host memory. Each pass opens a window on either and reads the blocks in the
order of its schedule. Next values of buffers are written to the next generation of their store, which the end of the forward pass commits.
Gradients go to a *sink*: without an optimizer they are gathered in host memory and returned to autograd; an optimizer of streamed weights
installs its own sink.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sft.common.errors import InputError
from sft.solvers.schedule import Operation
from sft.weights import DiskStore, HostStore, RecordLayout, Store, StreamPass, TensorSpec, WeightStream
from sft.weights.disk_store import check_resume
from sft.weights.gradient_sinks import BlockSink, GradientSink, HostGradientSink, RequestedGradients
from sft.weights.record import RecordPart, layout_difference

__all__ = ["StreamedBlocks", "StreamedWeightAccess", "block_read_order"]


def block_read_order(operations: Sequence[Operation]) -> list[int]:
    """The block of each computation, from 0."""
    return [operation.first - 1 for operation in operations if operation.kind in ("forward", "backward")]


class StreamedWeightAccess:
    """Weights of one pass, through windows."""

    def __init__(self, blocks: StreamedBlocks, weights: StreamPass, buffers: StreamPass | None, sink: BlockSink | None) -> None:
        self._blocks, self._weights, self._buffers, self._sink = blocks, weights, buffers, sink
        self._shared = blocks.shared()
        self._changed: set[int] = set()
        self._updates = False

    def acquire(self, block: int) -> dict[str, Tensor]:
        """The tensors of a block, in the windows."""
        tensors = dict(self._weights.acquire(block))
        if self._buffers is not None:
            tensors |= self._buffers.acquire(block)
        return tensors | self._shared if self._shared else tensors

    def release(self, block: int) -> None:
        """Release the block's slots in the windows."""
        is_changed = block in self._changed
        self._changed.discard(block)
        self._weights.release(block, forget=is_changed)
        if self._buffers is not None:
            self._buffers.release(block, forget=self._updates)

    def update(self, block: int, values: Mapping[str, Tensor]) -> None:
        """Write the next values of a block's buffers to the next generation."""
        assert self._buffers is not None
        views = self._buffers.views(block)
        for name, value in values.items():
            views[name].copy_(value)
        self._buffers.write(block)
        self._updates = True

    def gradients(self, block: int, grads: dict[str, Tensor]) -> None:
        """Give the gradients to the sink."""
        assert self._sink is not None
        if self._sink.put(block, grads, self._weights.views(block)):
            self._weights.write(block)
            self._changed.add(block)

    def collect(self) -> Mapping[str, Tensor]:
        """The gradients for autograd."""
        assert self._sink is not None
        return self._sink.collect()

    def commit(self) -> None:
        """Store the next values in the buffers."""
        if self._updates:
            self._blocks.commit_buffers()


class StreamedBlocks:
    """Stores of the parameters and buffers of a repetition.

    Args:
        block: module with stacked parameters and buffers; its tensors become views of the stores.
        buffers: names of the stacked buffers.
        num_blocks: number of blocks.
        device: device of the computation.
        window_bytes: size of the window for parameters. Buffers have a window of as many blocks.
        path: file of the parameters; None keeps them in host memory.
        resume: True to take the parameters of an existing file instead of refusing it.
        durable: True if each generation of the file survives a loss of power.
        prefetch: True to read ahead in threads.

    Raises:
        InputError: the block has no parameters, or the file exists or has different blocks.
        SourceError: the file cannot be read or written.
        BudgetError: the window is smaller than a block.
    """

    def __init__(
        self,
        block: nn.Module,
        buffers: Sequence[str],
        num_blocks: int,
        *,
        device: torch.device,
        window_bytes: int,
        path: Path | None,
        resume: bool,
        durable: bool,
        prefetch: bool | None,
    ) -> None:
        self.block, self.num_blocks, self.device = block, num_blocks, device
        self.window_bytes, self.prefetch, self.path, self.durable = window_bytes, prefetch, path, durable
        self.sink: GradientSink = HostGradientSink(self.num_blocks)
        self._buffer_names = tuple(buffers)
        self._pin = torch.cuda.is_available()
        params = {name: param.detach() for name, param in block.named_parameters()}
        if not params:
            raise InputError("the block has no parameters, so there is nothing to stream")
        layout = RecordLayout.of(TensorSpec.of(name, param[0]) for name, param in params.items())
        self.store: Store
        if path is not None and (resume or path.exists()):
            self.store = self._reopen_store(path, layout, resume=resume)
        else:
            self.store = self._create_store([layout] * num_blocks, lambda number, views: _copy_block(views, params, number))
        self.weights = self._window(self.store)
        self._buffer_store, self._buffer_window = self._create_buffer_store()
        self.rebind()

    @property
    def extra_bytes(self) -> int:
        """Bytes of a pass's windows on the device."""
        return self.weights.window_bytes + (0 if self._buffer_window is None else self._buffer_window.window_bytes)

    def shared(self) -> dict[str, Tensor]:
        """Buffers that all blocks share."""
        return {name: buffer for name, buffer in self.block.named_buffers() if name not in self._buffer_names}

    @contextlib.contextmanager
    def forward(self, operations: Sequence[Operation]) -> Iterator[StreamedWeightAccess]:
        """Open the weights for a forward pass. If it fails, buffers keep their values."""
        plan = block_read_order(operations)
        with contextlib.ExitStack() as stack:
            weights = stack.enter_context(self.weights.open_pass(plan))
            buffers = None
            if self._buffer_store is not None and self._buffer_window is not None:
                self._buffer_store.begin()
                stack.callback(self._buffer_store.abort)
                buffers = stack.enter_context(self._buffer_window.open_pass(plan))
            yield StreamedWeightAccess(self, weights, buffers, None)

    @contextlib.contextmanager
    def backward(self, operations: Sequence[Operation], unwanted: Collection[str] = ()) -> Iterator[StreamedWeightAccess]:
        """Open the weights and the sink for a backward pass. The sink takes no gradients of ``unwanted`` parameters."""
        plan = block_read_order(operations)
        order = block_read_order([operation for operation in operations if operation.kind == "backward"])
        with contextlib.ExitStack() as stack:
            weights = stack.enter_context(self.weights.open_pass(plan))
            buffers = None if self._buffer_window is None else stack.enter_context(self._buffer_window.open_pass(plan))
            names = {name for name, _ in self.block.named_parameters()}.difference(unwanted)
            sink = RequestedGradients(stack.enter_context(self.sink.open_pass(order)) if names else None, names)
            yield StreamedWeightAccess(self, weights, buffers, sink)

    def commit_buffers(self) -> None:
        """Make the next generation of the buffers the current one."""
        assert self._buffer_store is not None
        self._buffer_store.commit()
        self.rebind()

    def rebind(self) -> None:
        """Make the module's parameters and buffers views of the current generations."""
        stacked = self.store.layouts[0].stacked(self.store.all_records(), self.num_blocks)
        for name, param in self.block.named_parameters():
            param.data = stacked[name]
        if self._buffer_store is not None:
            buffers = self._buffer_store.layouts[0].stacked(self._buffer_store.all_records(), self.num_blocks)
            for name in self._buffer_names:
                prefix, _, last = name.rpartition(".")
                self.block.get_submodule(prefix)._buffers[last] = buffers[name]

    def versions(self) -> tuple[int, ...]:
        """Version counters of the weights."""
        return (self.store.generation, *(param._version for param in self.block.parameters()))

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """The stacked parameters, by name."""
        return dict(self.block.named_parameters())

    def names_of(self, block: int) -> tuple[str, ...]:
        """Names of the parameters in a record; each record has a slice of all of them."""
        return tuple(self.named_parameters())

    def shape_of(self, param: Tensor) -> tuple[int, ...]:
        """Shape of one block's slice of a parameter."""
        return tuple(param.shape[1:])

    def slice_of(self, value: Tensor, block: int) -> Tensor:
        """A block's part of a stacked tensor."""
        return value[block]

    def tensor(self, name: str, key: str) -> Tensor:
        """A stacked tensor of the current generation."""
        return self.store.layouts[0].stacked(self.store.all_records(), self.num_blocks)[key]

    def window(self, store: Store, part: RecordPart, window_bytes: int | None = None) -> WeightStream:
        """A window on a store of as many blocks; by default of two blocks.

        Raises:
            BudgetError: the window is smaller than a block.
        """
        size = store.layouts[0].part_bytes(part)
        num_bytes = min(2, len(store.layouts)) * size if window_bytes is None else window_bytes
        return WeightStream(store, self.device, window_bytes=num_bytes, part=part, prefetch=self.prefetch)

    def set_state(self, state: Mapping[str, Sequence[TensorSpec]], fill: Callable[[int, dict[str, Tensor]], None]) -> bool:
        """Add an optimizer's state to the records.

        Args:
            state: specs of its tensors, by parameter.
            fill: writes their first values, given a block's number and all its tensors; unwritten tensors are zero.

        Returns:
            True if the records had this state already, with its values.
        """
        weights = [field.spec for field in self.store.layouts[0].fields if not field.spec.is_state]
        specs = [spec for specs in state.values() for spec in specs]
        layout = RecordLayout.of([*weights, *specs])
        if self.store.layouts[0] == layout:
            return bool(specs)
        old = self.store

        def copy_and_fill(number: int, views: dict[str, Tensor]) -> None:
            old_views = old.layouts[number].views(old.record(number))
            for spec in weights:
                views[spec.name].copy_(old_views[spec.name])
            fill(number, views)

        self.store = self._create_store([layout] * self.num_blocks, copy_and_fill, replaces=old)
        old.close()
        self.weights = self._window(self.store)
        self.rebind()
        return False

    def move(self, device: torch.device) -> None:
        """Use the weights on another device from now on."""
        if device != self.device:
            self.device = device
            self.weights = self._window(self.store)
            if self._buffer_store is not None:
                self._buffer_window = self._window_of_buffers(self._buffer_store)

    def close(self) -> None:
        """Close the stores, after copying parameters and buffers to separate memory."""
        for param in self.block.parameters():
            param.data = param.detach().contiguous().clone()
        for name in self._buffer_names:
            prefix, _, last = name.rpartition(".")
            module = self.block.get_submodule(prefix)
            module._buffers[last] = module._buffers[last].contiguous().clone()  # type: ignore[union-attr]  # it exists
        self.store.close()
        if self._buffer_store is not None:
            self._buffer_store.close()

    def _window(self, store: Store) -> WeightStream:
        return WeightStream(store, self.device, window_bytes=self.window_bytes, prefetch=self.prefetch)

    def _create_store(
        self, layouts: Sequence[RecordLayout], fill: Callable[[int, dict[str, Tensor]], None], *, replaces: Store | None = None
    ) -> Store:
        if self.path is not None:
            return DiskStore.create(self.path, layouts, fill, durable=self.durable, replaces=replaces)
        store = HostStore(layouts, pin=self._pin)
        for number, layout in enumerate(layouts):
            fill(number, layout.views(store.record(number)))
        return store

    def _reopen_store(self, path: Path, layout: RecordLayout, *, resume: bool) -> Store:
        check_resume(path, resume=resume)
        store = DiskStore.open(path, durable=self.durable)
        expected = sorted((field.spec for field in layout.fields), key=str)
        stored = sorted((field.spec for field in store.layouts[0].fields if not field.spec.is_state), key=str)
        if difference := layout_difference(expected, stored):
            raise InputError(f"{path} has other blocks than those repeated here: {difference}; give another path")
        if len(store.layouts) != self.num_blocks or any(each is not store.layouts[0] for each in store.layouts):
            raise InputError(f"{path} has {len(store.layouts)} blocks, and {self.num_blocks} are repeated here; give another path")
        if any(param.requires_grad for param in self.block.parameters()):  # a frozen block only reads
            store.reserve()
        return store

    def _create_buffer_store(self) -> tuple[HostStore | None, WeightStream | None]:
        if not self._buffer_names:
            return None, None
        buffers = {name: self.block.get_buffer(name).detach() for name in self._buffer_names}
        store = HostStore(
            [RecordLayout.of(TensorSpec.of(name, buffer[0]) for name, buffer in buffers.items())] * self.num_blocks, pin=self._pin
        )
        for number, layout in enumerate(store.layouts):
            _copy_block(layout.views(store.record(number)), buffers, number)
        return store, self._window_of_buffers(store)

    def _window_of_buffers(self, store: HostStore) -> WeightStream:
        """A window of as many blocks as that of the parameters."""
        size = store.layouts[0].part_bytes("weights")
        return WeightStream(store, self.device, window_bytes=size * self.weights.num_slots, prefetch=self.prefetch)


def _copy_block(views: Mapping[str, Tensor], stacked: Mapping[str, Tensor], number: int) -> None:
    for name, stack in stacked.items():
        views[name].copy_(stack[number])
