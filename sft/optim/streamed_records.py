"""Streamed records under an optimizer: the gradient sink of one store, and its share of an optimizer step.

The records are the blocks of one repetition (:mod:`sft.repeat.streamed`), or the parameters of a compiled model
(:mod:`sft.torch_runtime.streamed_parameters`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sft.common.errors import InputError, SourceError
from sft.optim.data_parallel import ShardStaging
from sft.runtime.weight_prefetch import GradientTransfer
from sft.weights import HostStore, RecordLayout, StreamPass, TensorSpec, UnbufferedPass
from sft.weights.gradient_sinks import BlockSink
from sft.weights.record_view import RecordStream, StreamedRecords

if TYPE_CHECKING:
    from sft.optim.streamed import StreamedOptimizer

__all__ = ["HALF_DTYPES", "MASTER_KEY", "RecordOptimizer"]

HALF_DTYPES = (torch.bfloat16, torch.float16)
#: Name of the fp32 copy of a half-precision parameter in the state.
MASTER_KEY = "master"
#: Keys in a file's metadata: the number of updates of its weights, and the rank that owns its share of the state.
_UPDATED, _SHARE, _ALONE = "updates", "share", "0/1"
#: Bytes of a gradient's norm.
_NORM_BYTES = 8


class RecordOptimizer:
    """Optimizer of the records of one store: the sink of their gradients, and their share of a step."""

    def __init__(
        self, optimizer: StreamedOptimizer, blocks: StreamedRecords, groups: Mapping[int, dict[str, Any]], window_bytes: int | None
    ) -> None:
        self.optimizer, self.blocks, self.groups = optimizer, blocks, groups
        sink_owner: Any = blocks  # this object is a sink for blocks and for parameters
        self._former_sink: Any = sink_owner.sink
        self.params = {name: p for name, p in blocks.named_parameters().items() if id(p) in groups and p.requires_grad}
        #: on the device: true if the pass's gradients are finite; ``None`` if they are not checked
        self.finite: Tensor | None = None
        self.square_norm = 0.0
        self._is_written = False
        self._has_grads = False
        self._group = optimizer.group
        self._staging: ShardStaging | None = None
        self.masters = frozenset(name for name, param in self.params.items() if param.dtype in HALF_DTYPES)
        self._slots = {name: optimizer.update.slots(groups[id(param)]) for name, param in self.params.items()}
        specs = {name: self._specs(name, param) for name, param in self.params.items()}
        has_state = any(specs.values())
        if has_state:
            self._check_share()
        resumed = blocks.set_state(specs, self._first_state) if self.params else False
        self.num_updates = self._counts() if resumed else dict.fromkeys(self.params, 0)
        self._states = blocks.window(blocks.store, "state", window_bytes) if has_state else None
        self._grads: HostStore | None = None
        self._grad_window: RecordStream | None = None
        if optimizer.two_phase and self.params:
            self._grads, self._grad_window = self._gradients(window_bytes)
        self._state_pass: StreamPass | UnbufferedPass | None = None
        self._with_gradient: set[str] = set()
        self._accumulated: set[str] = set()  # the parameters whose gradients are on the host
        self._accumulating: set[str] = set()  # those of the running pass

    def _specs(self, name: str, param: Tensor) -> list[TensorSpec]:
        shape = self._group.shape_of_share(self.blocks.shape_of(param))
        dtype = torch.float32 if name in self.masters else param.dtype
        slots = [*self.optimizer.update.slots(self.groups[id(param)]), *([MASTER_KEY] if name in self.masters else [])]
        return [TensorSpec(name=f"{name}:{slot}", shape=shape, dtype=dtype, is_state=True) for slot in slots]

    def _first_state(self, block: int, views: dict[str, Tensor]) -> None:
        for name in self.masters.intersection(self.blocks.names_of(block)):
            views[f"{name}:{MASTER_KEY}"].copy_(self._group.local_share(views[name]))

    def _check_share(self) -> None:
        """Check that the state in a resumed file belongs to this rank.

        Raises:
            InputError: it belongs to another one.
        """
        metadata = self.blocks.store.metadata
        share, file_share = self._share(), metadata.get(_SHARE, _ALONE)
        if _UPDATED in metadata and share != file_share:
            raise InputError(
                f"the file of weights has the optimizer state of rank {file_share}, and this is rank {share} (rank/number of ranks). "
                "Give each rank its own file; for another number of ranks stream the model's state_dict to new files, and load the "
                "optimizer's state_dict"
            )

    def _share(self) -> str:
        return f"{self._group.rank}/{self._group.num_ranks}"

    def rank_invariants(self) -> Any:
        """Properties that must be equal on all ranks."""
        shapes = [(name, tuple(param.shape), str(param.dtype)) for name, param in self.params.items()]
        return self.blocks.num_blocks, shapes, self.num_updates

    def hash_weights(self, digest: Any) -> None:
        """Add all weights to a digest."""
        store = self.blocks.store
        for block, layout in enumerate(store.layouts):
            for name, view in layout.views(store.record(block)).items():
                if name in self.params:
                    digest.update(view.reshape(-1).view(torch.uint8).numpy().data)

    @property
    def _sizes(self) -> dict[str, tuple[int, torch.dtype]]:
        """Number of elements and type of a block's gradients, by parameter."""
        return {name: (math.prod(self.blocks.shape_of(param)), param.dtype) for name, param in self.params.items()}

    def check_slots(self, groups: Mapping[int, dict[str, Any]], which: str = "loaded") -> None:
        """Check that settings keep the state tensors that the store has space for.

        Args:
            groups: the settings of each parameter.
            which: adjective of the settings in the error message.

        Raises:
            InputError: they do not.
        """
        for name, param in self.params.items():
            slots = self._slots[name]
            requested = self.optimizer.update.slots({**self.optimizer.defaults, **groups.get(id(param), {})})
            if slots != requested:
                raise InputError(
                    f"the {which} settings keep {', '.join(requested) or 'nothing'} for {name}, where this optimizer keeps "
                    f"{', '.join(slots) or 'nothing'}; make it with the same settings"
                )

    def _counts(self) -> dict[str, int]:
        """Number of updates of each parameter, as stored in the file."""
        text = self.blocks.store.metadata.get(_UPDATED, "0")
        try:
            counts = [int(count) for count in str(text).split(",")]
            if len(counts) == 1:
                counts *= len(self.params)
            if len(counts) != len(self.params) or min(counts, default=0) < 0:
                raise ValueError
        except ValueError:
            raise SourceError(
                f"the file of weights is damaged: of {len(self.params)} parameters it says that they were updated {text!r} times. Load a "
                "checkpoint's state dicts into a new file."
            ) from None
        return dict(zip(self.params, counts, strict=True))

    def _gradients(self, window_bytes: int | None) -> tuple[HostStore, RecordStream]:
        blocks, shape = self.blocks, self._group.shape_of_share
        specs = {name: TensorSpec(name=name, shape=shape(blocks.shape_of(p)), dtype=p.dtype) for name, p in self.params.items()}
        # A record without any of these parameters has room for one element, as none is empty.
        placeholder = TensorSpec(name="", shape=(), dtype=torch.uint8)
        record_specs = ([specs[name] for name in blocks.names_of(block) if name in specs] for block in range(blocks.num_blocks))
        store = HostStore([RecordLayout.of(fields or [placeholder]) for fields in record_specs], pin=torch.cuda.is_available())
        return store, blocks.window(store, "weights", window_bytes)

    def updates(self, name: str) -> bool:
        """True if it updates this parameter."""
        return name in self.params

    def grad_transfer(self, record: int) -> GradientTransfer:
        """Cost of consuming the gradients of a record."""
        names = [name for name in self.blocks.names_of(record) if name in self.params]
        sizes = {name: math.prod(self.blocks.shape_of(self.params[name])) for name in names}
        grad_bytes = sum(sizes[name] * self.params[name].element_size() for name in names)
        check_bytes = self.optimizer.loss_scale.scratch_bytes(len(names))
        if self.optimizer.two_phase:
            return GradientTransfer(
                scratch_bytes=grad_bytes if self.blocks.device.type != "cpu" else 0, up_bytes=grad_bytes, down_bytes=grad_bytes
            )
        layout = self.blocks.store.layouts[record]
        copies = max((sizes[name] * 4 for name in names if name in self.masters), default=0)
        state_bytes = layout.part_bytes("state") if self._states is not None else 0
        return GradientTransfer(
            scratch_bytes=state_bytes + copies + check_bytes, up_bytes=state_bytes, down_bytes=layout.weight_bytes + state_bytes
        )

    def step_bytes(self) -> int:
        """Peak bytes on the device while a two-phase step updates records one at a time."""
        if not self.optimizer.two_phase:
            return 0
        copies = max((number * 4 for name, (number, _) in self._sizes.items() if name in self.masters), default=0)
        windows = (self.blocks.weights, self._grad_window, self._states)
        has_norms = self.optimizer.max_norm is not None or not self.optimizer.loss_scale.is_off
        num_norms = sum(name in self.params for block in range(self.blocks.num_blocks) for name in self.blocks.names_of(block))
        norm_bytes = _NORM_BYTES * num_norms if has_norms else 0
        return copies + norm_bytes + sum(window.window_bytes for window in windows if window is not None)

    def extra_bytes(self) -> int:
        """Bytes on the device during a backward pass, without the weights: the window of the state, fp32 copies of gradients, messages."""
        messages = self._group.staging_bytes(self._sizes)
        if self.optimizer.two_phase:
            sizes = [number * dtype.itemsize for number, dtype in self._sizes.values()]
            return messages + (max(sizes, default=0) if self.blocks.device.type != "cpu" else 0)
        copies = max((self._sizes[name][0] * 4 for name in self.masters), default=0)
        check_bytes = self.optimizer.loss_scale.scratch_bytes(len(self._sizes))
        return messages + copies + check_bytes + (0 if self._states is None else self._states.window_bytes)

    @contextlib.contextmanager
    def open_pass(self, order: Sequence[int]) -> Iterator[BlockSink]:
        """Sink of one backward pass, on all ranks together."""
        with self._group.guarded(), self._open_staging():
            if self._group.num_ranks > 1:
                invariants = (list(order), self.num_updates, self.optimizer.settings())
                self._group.agree(invariants, "run the same repetition of the same model, updated as often, with the same settings")
            with self._accept_gradients(order):
                yield self

    @contextlib.contextmanager
    def _open_staging(self) -> Iterator[ShardStaging]:
        """Message buffers for the duration of the block."""
        self._staging = self._group.staging(self._sizes)
        try:
            yield self._staging
        finally:
            self._staging = None

    @contextlib.contextmanager
    def _accept_gradients(self, order: Sequence[int]) -> Iterator[None]:
        """Accept the gradients of a backward pass; they are discarded if the block fails."""
        self.finite = None
        if self.optimizer.two_phase:
            assert self._grads is not None
            self._grads.begin()
            self._accumulating.clear()
            try:
                yield
                self._grads.commit()
            except BaseException:
                self._grads.abort()
                raise
            self._has_grads = True
            self._accumulated |= self._accumulating
            return
        if self._is_written:
            raise InputError(
                "these weights were updated by a backward pass before, and not committed; call step() or zero_grad() after each, or give "
                "two_phase=True to add gradients up"
            )
        with self._open_generation(order):
            yield
        self._is_written = True

    @contextlib.contextmanager
    def _open_generation(self, order: Sequence[int]) -> Iterator[None]:
        """Begin the next generation and open the window of the state; the generation is discarded if the block fails."""
        self.check_slots(self.groups, "present")
        store = self.blocks.store
        store.begin()
        self._with_gradient.clear()
        try:
            with contextlib.ExitStack() as stack:
                if self._states is not None:
                    state_pass: contextlib.AbstractContextManager[StreamPass | UnbufferedPass] = self._states.open_pass(order)
                    self._state_pass = stack.enter_context(state_pass)
                yield
        except BaseException:
            store.abort()
            raise
        finally:
            self._state_pass = None

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Apply, or accumulate, a block's gradients."""
        assert self._staging is not None
        averaged = self._staging.reduce_shares({name: grad for name, grad in grads.items() if name in self.params})
        if self.optimizer.two_phase:
            assert self._grads is not None
            old = self._grads.layouts[block].views(self._grads.record(block))
            new = self._grads.layouts[block].views(self._grads.next_record(block))
            for name, grad in averaged.items():
                if self._has_grads and name in self._accumulated:
                    grad.add_(old[name].to(grad.device))
                new[name].copy_(grad)
            self._accumulating.update(averaged)
            return False
        finite = self.optimizer.loss_scale.unscale(list(averaged.values()), is_whole_step=False)
        if finite is not None:  # no wait for the device: step() reads the flag
            self.finite = finite if self.finite is None else self.finite.logical_and_(finite)
        self._update(block, averaged, weights)
        self._staging.spread_shares({name: weights[name] for name in averaged})
        return True

    def collect(self) -> Mapping[str, Tensor]:
        """No gradients for autograd."""
        return {}

    def _update(self, block: int, grads: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Update a block's parameters and state in their windows, and write the state."""
        state = {} if self._state_pass is None else self._state_pass.acquire(block)
        update = self.optimizer.update
        self._with_gradient.update(grads)
        for name, grad in grads.items():
            slots = {slot: state[f"{name}:{slot}"] for slot in update.slots(self.groups[id(self.params[name])])}
            group, count = self.groups[id(self.params[name])], self.num_updates[name]
            weight = self._group.local_share(weights[name])
            if name in self.masters:
                master = state[f"{name}:{MASTER_KEY}"]
                update.apply(master, grad.float(), slots, group, count)
                weight.copy_(master)
            else:
                update.apply(weight, grad, slots, group, count)
        if self._state_pass is not None:
            self._state_pass.write(block)
            self._state_pass.release(block, forget=True)

    def check(self) -> None:
        """Before a two-phase step, compute the norm of all gradients and check that they are finite."""
        self.square_norm = 0.0
        if not self._has_grads or self._grad_window is None:
            return
        if self.optimizer.loss_scale.is_off and self.optimizer.max_norm is None:
            return
        inverse = 1.0 / self.optimizer.loss_scale.value
        names = [sorted(self._accumulated.intersection(self.blocks.names_of(block))) for block in range(self.blocks.num_blocks)]
        norms = torch.empty(sum(map(len, names)), dtype=torch.float64, device=self.blocks.device)  # read by the host once
        places = iter(norms)
        with self._grad_window.open_pass(range(self.blocks.num_blocks)) as grad_pass:
            for block in range(self.blocks.num_blocks):
                grads = grad_pass.acquire(block)
                for name in names[block]:
                    torch.linalg.vector_norm(grads[name], dtype=torch.float64, out=next(places))
                grad_pass.release(block)
        squares = [(norm * inverse) ** 2 for norm in norms.tolist()]
        self.square_norm = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf

    def sweep(self, factor: float) -> None:
        """Second phase: update all blocks with the accumulated gradients."""
        if not self._has_grads or self._grad_window is None:
            return
        order = range(self.blocks.num_blocks)
        with (
            self._open_staging() as staging,
            self._open_generation(order),
            self.blocks.weights.open_pass(order) as weight_pass,
            self._grad_window.open_pass(order) as grad_pass,
        ):
            for block in order:
                names = self._accumulated.intersection(self.blocks.names_of(block))
                if not names:
                    continue  # the next generation copies it
                views, gradients = weight_pass.acquire(block), grad_pass.acquire(block)
                values = {name: gradients[name] for name in self.params if name in names}
                self.optimizer.loss_scale.unscale(list(values.values()), is_whole_step=False)
                if factor < 1.0:
                    for grad in values.values():
                        grad.mul_(factor)
                self._update(block, values, views)
                staging.spread_shares({name: views[name] for name in values})
                weight_pass.write(block)
                weight_pass.release(block, forget=True)
                grad_pass.release(block, forget=True)
        self._is_written = True

    def commit(self) -> None:
        """Make the next generation the current one."""
        if not self._is_written:
            return
        counts = {name: count + (name in self._with_gradient) for name, count in self.num_updates.items()}
        numbers = [*counts.values()]
        text = str(numbers[0]) if len({*numbers}) == 1 else ",".join(map(str, numbers))
        store = self.blocks.store
        generation = store.generation
        try:
            store.commit({_UPDATED: text, **self._share_metadata()})
        finally:  # Ctrl-C may arrive right after the commit
            if store.generation != generation:
                self._is_written = False
                self.num_updates = counts
                self.blocks.rebind()

    def _share_metadata(self) -> dict[str, str]:
        """Metadata with the rank that owns the committed share of the state, if it is not the complete state."""
        return {_SHARE: self._share()} if self._group.num_ranks > 1 else {}

    def undo(self) -> None:
        """Discard the next generation, but keep accumulated gradients."""
        self.blocks.store.abort()
        self._with_gradient.clear()
        self._is_written = False

    def drop(self) -> None:
        """Discard the next generation and all gradients."""
        self.undo()
        self._has_grads = False
        self._accumulated.clear()
        self.finite, self.square_norm = None, 0.0

    def attach(self) -> None:
        """Become the gradient sink of the blocks."""
        blocks: Any = self.blocks
        blocks.sink = self

    def detach(self) -> None:
        """Restore the former gradient sink of the blocks."""
        blocks: Any = self.blocks
        blocks.sink = self._former_sink

    def state_of(self, name: str) -> dict[str, Tensor]:
        """The state of a parameter, stacked, in torch's form."""
        param = self.params[name]
        group = self.groups[id(param)]
        slots = [*self.optimizer.update.slots(group), *([MASTER_KEY] if name in self.masters else [])]
        shape = self.blocks.shape_of(param)
        state = {slot: self._group.unshard(self.blocks.tensor(name, f"{name}:{slot}"), shape) for slot in slots}
        return (
            {"step": torch.tensor(float(self.num_updates[name]), device="cpu"), **state} if self.optimizer.update.counts(group) else state
        )

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load states in torch's form."""
        store = self.blocks.store
        store.begin()
        try:
            for block, layout in enumerate(store.layouts):
                start, _ = layout.span("state")
                data = store.record(block)[start:].clone()
                views = layout.views(data, "state")
                weights = layout.views(store.record(block))
                for key, view in views.items():
                    name, _, slot = key.rpartition(":")
                    value = states.get(name, {}).get(slot)
                    if value is not None:
                        view.copy_(self._group.local_share(self.blocks.slice_of(value, block).contiguous()))
                    elif slot == MASTER_KEY:
                        view.copy_(self._group.local_share(weights[name]))
                    else:
                        view.zero_()
                store.write(block, data, "state")
            counts = {name: self._count(states.get(name, {})) for name in self.params}
            store.commit({_UPDATED: ",".join(map(str, counts.values())), **self._share_metadata()})
        except BaseException:
            store.abort()
            raise
        self.num_updates = counts
        self.blocks.rebind()

    @staticmethod
    def _count(state: Mapping[str, Any]) -> int:
        if "step" in state:
            return int(state["step"])
        return int(any(value is not None for value in state.values()))
