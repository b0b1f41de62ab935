"""Streamed weights under an optimizer: the sink of their gradients, and their part of a step.

They are the blocks of one repetition (:mod:`sft.repeat.streamed`), or the parameters of a compiled model
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
#: Name of the fp32 copy of a parameter in half precision, in the state.
MASTER_KEY = "master"
#: Names in a file's metadata: how often its weights were updated, and whose share of the state is in it.
_UPDATED, _SHARE, _ALONE = "updates", "share", "0/1"


class RecordOptimizer:
    """The records of one store under an optimizer: the sink of their gradients, and their part of a step."""

    def __init__(
        self, optimizer: StreamedOptimizer, blocks: StreamedRecords, groups: Mapping[int, dict[str, Any]], window_bytes: int | None
    ) -> None:
        self.optimizer, self.blocks, self.groups = optimizer, blocks, groups
        held: Any = blocks  # a chain is a sink of either kind
        self._before: Any = held.sink
        self.params = {name: p for name, p in blocks.named_parameters().items() if id(p) in groups and p.requires_grad}
        self.is_finite = True
        self.square_norm = 0.0
        self._is_written = False
        self._has_grads = False
        self._replicas = optimizer.replicas
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
        self._reading: StreamPass | UnbufferedPass | None = None
        self._with_gradient: set[str] = set()
        self._added_up: set[str] = set()  # the parameters whose gradients are on the host
        self._adding: set[str] = set()  # those of the running pass

    def _specs(self, name: str, param: Tensor) -> list[TensorSpec]:
        shape = self._replicas.shape_of_share(self.blocks.shape_of(param))
        dtype = torch.float32 if name in self.masters else param.dtype
        slots = [*self.optimizer.update.slots(self.groups[id(param)]), *([MASTER_KEY] if name in self.masters else [])]
        return [TensorSpec(name=f"{name}:{slot}", shape=shape, dtype=dtype, is_state=True) for slot in slots]

    def _first_state(self, block: int, views: dict[str, Tensor]) -> None:
        for name in self.masters.intersection(self.blocks.names_of(block)):
            views[f"{name}:{MASTER_KEY}"].copy_(self._replicas.own(views[name]))

    def _check_share(self) -> None:
        """Whether the state of a file that goes on is this rank's.

        Raises:
            InputError: it is another's.
        """
        metadata = self.blocks.store.metadata
        own, theirs = self._share(), metadata.get(_SHARE, _ALONE)
        if _UPDATED in metadata and own != theirs:
            raise InputError(
                f"the file of weights has the optimizer state of rank {theirs}, and this is rank {own} (of how many). Give each rank "
                "its own file; for another number of ranks stream the model's state_dict to new files, and load the optimizer's state_dict"
            )

    def _share(self) -> str:
        return f"{self._replicas.place}/{self._replicas.count}"

    def asked(self) -> Any:
        """What must be the same on all ranks."""
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
        """Elements and types of a block's gradients."""
        return {name: (math.prod(self.blocks.shape_of(param)), param.dtype) for name, param in self.params.items()}

    def check_slots(self, groups: Mapping[int, dict[str, Any]], which: str = "loaded") -> None:
        """Whether settings keep the state that the store has room for.

        Args:
            groups: the settings of each parameter.
            which: settings they are.

        Raises:
            InputError: they do not.
        """
        for name, param in self.params.items():
            kept = self._slots[name]
            wanted = self.optimizer.update.slots({**self.optimizer.defaults, **groups.get(id(param), {})})
            if kept != wanted:
                raise InputError(
                    f"the {which} settings keep {', '.join(wanted) or 'nothing'} for {name}, where this optimizer keeps "
                    f"{', '.join(kept) or 'nothing'}; make it with the same settings"
                )

    def _counts(self) -> dict[str, int]:
        """How often each parameter was updated, as the file says."""
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
        blocks, shape = self.blocks, self._replicas.shape_of_share
        specs = {name: TensorSpec(name=name, shape=shape(blocks.shape_of(p)), dtype=p.dtype) for name, p in self.params.items()}
        # A record without any of these parameters has room for one element, as none is empty.
        nothing = TensorSpec(name="", shape=(), dtype=torch.uint8)
        own = ([specs[name] for name in blocks.names_of(block) if name in specs] for block in range(blocks.num_blocks))
        store = HostStore([RecordLayout.of(found or [nothing]) for found in own], pin=torch.cuda.is_available())
        return store, blocks.window(store, "weights", window_bytes)

    def takes(self, name: str) -> bool:
        """Whether it updates this parameter."""
        return name in self.params

    def taking(self, record: int) -> GradientTransfer:
        """What it takes to take the gradients of a record."""
        names = [name for name in self.blocks.names_of(record) if name in self.params]
        sizes = {name: math.prod(self.blocks.shape_of(self.params[name])) for name in names}
        grad_bytes = sum(sizes[name] * self.params[name].element_size() for name in names)
        if self.optimizer.two_phase:
            return GradientTransfer(
                scratch_bytes=grad_bytes if self.blocks.device.type != "cpu" else 0, up_bytes=grad_bytes, down_bytes=grad_bytes
            )
        layout = self.blocks.store.layouts[record]
        copies = max((sizes[name] * 4 for name in names if name in self.masters), default=0)
        state_bytes = layout.part_bytes("state") if self._states is not None else 0
        return GradientTransfer(scratch_bytes=state_bytes + copies, up_bytes=state_bytes, down_bytes=layout.weight_bytes + state_bytes)

    def step_bytes(self) -> int:
        """Most bytes on the device while a two-phase step updates records one at a time."""
        if not self.optimizer.two_phase:
            return 0
        copies = max((number * 4 for name, (number, _) in self._sizes.items() if name in self.masters), default=0)
        windows = (self.blocks.weights, self._grad_window, self._states)
        return copies + sum(window.window_bytes for window in windows if window is not None)

    def extra_bytes(self) -> int:
        """What a backward pass holds on the device beside the weights: the window of the state, fp32 copies of gradients, messages."""
        messages = self._replicas.staging_bytes(self._sizes)
        if self.optimizer.two_phase:
            sizes = [number * dtype.itemsize for number, dtype in self._sizes.values()]
            return messages + (max(sizes, default=0) if self.blocks.device.type != "cpu" else 0)
        copies = max((self._sizes[name][0] * 4 for name in self.masters), default=0)
        return messages + copies + (0 if self._states is None else self._states.window_bytes)

    @contextlib.contextmanager
    def opened(self, order: Sequence[int]) -> Iterator[BlockSink]:
        """For one backward pass, on all ranks together."""
        with self._replicas.guarded(), self._staged():
            if self._replicas.count > 1:
                asked = (list(order), self.num_updates, self.optimizer.settings())
                self._replicas.agree(asked, "run the same repetition of the same model, updated as often, with the same settings")
            with self._begun(order):
                yield self

    @contextlib.contextmanager
    def _staged(self) -> Iterator[ShardStaging]:
        """Room for messages."""
        self._staging = self._replicas.staging(self._sizes)
        try:
            yield self._staging
        finally:
            self._staging = None

    @contextlib.contextmanager
    def _begun(self, order: Sequence[int]) -> Iterator[None]:
        """What is written in a backward pass; dropped if the block fails."""
        self.is_finite = True
        if self.optimizer.two_phase:
            assert self._grads is not None
            self._grads.begin()
            self._adding.clear()
            try:
                yield
                self._grads.commit()
            except BaseException:
                self._grads.abort()
                raise
            self._has_grads = True
            self._added_up |= self._adding
            return
        if self._is_written:
            raise InputError(
                "these weights were updated by a backward pass before, and not committed; call step() or zero_grad() after each, or give "
                "two_phase=True to add gradients up"
            )
        with self._writing(order):
            yield
        self._is_written = True

    @contextlib.contextmanager
    def _writing(self, order: Sequence[int]) -> Iterator[None]:
        """A next generation, with the state at hand; dropped if the block fails."""
        self.check_slots(self.groups, "present")
        store = self.blocks.store
        store.begin()
        self._with_gradient.clear()
        try:
            with contextlib.ExitStack() as stack:
                if self._states is not None:
                    reading: contextlib.AbstractContextManager[StreamPass | UnbufferedPass] = self._states.reading(order)
                    self._reading = stack.enter_context(reading)
                yield
        except BaseException:
            store.abort()
            raise
        finally:
            self._reading = None

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Use, or add up, a block's gradients."""
        assert self._staging is not None
        wanted = self._staging.reduced({name: grad for name, grad in grads.items() if name in self.params})
        if self.optimizer.two_phase:
            assert self._grads is not None
            old = self._grads.layouts[block].views(self._grads.record(block))
            new = self._grads.layouts[block].views(self._grads.next_record(block))
            for name, grad in wanted.items():
                if self._has_grads and name in self._added_up:
                    grad.add_(old[name].to(grad.device))
                new[name].copy_(grad)
            self._adding.update(wanted)
            return False
        finite = self.optimizer.loss_scale.take_out(list(wanted.values()), is_whole_step=False)
        self.is_finite = self.is_finite and finite
        self._update(block, wanted, weights)
        self._staging.spread({name: weights[name] for name in wanted})
        return True

    def collect(self) -> Mapping[str, Tensor]:
        """Nothing for autograd."""
        return {}

    def _update(self, block: int, grads: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Update a block's parameters and state in their windows, and write the state."""
        state = {} if self._reading is None else self._reading.take(block)
        update = self.optimizer.update
        self._with_gradient.update(grads)
        for name, grad in grads.items():
            own = {slot: state[f"{name}:{slot}"] for slot in update.slots(self.groups[id(self.params[name])])}
            group, count = self.groups[id(self.params[name])], self.num_updates[name]
            weight = self._replicas.own(weights[name])
            if name in self.masters:
                master = state[f"{name}:{MASTER_KEY}"]
                update.apply(master, grad.float(), own, group, count)
                weight.copy_(master)
            else:
                update.apply(weight, grad, own, group, count)
        if self._reading is not None:
            self._reading.write(block)
            self._reading.give(block, forget=True)

    def check(self) -> None:
        """Look at all gradients before a two-phase step: whether they are finite, and their norm."""
        self.is_finite, self.square_norm = True, 0.0
        if not self._has_grads or self._grad_window is None:
            return
        if self.optimizer.loss_scale.is_off and self.optimizer.max_norm is None:
            return
        squares = []
        inverse = 1.0 / self.optimizer.loss_scale.value
        with self._grad_window.reading(range(self.blocks.num_blocks)) as reading:
            for block in range(self.blocks.num_blocks):
                grads = reading.take(block)
                names = sorted(self._added_up.intersection(grads))
                norms = [torch.linalg.vector_norm(grads[name], dtype=torch.float64) for name in names]
                squares += [(float(norm) * inverse) ** 2 for norm in norms]
                reading.give(block)
        self.square_norm = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
        self.is_finite = math.isfinite(self.square_norm) or self.optimizer.loss_scale.is_off

    def sweep(self, factor: float) -> None:
        """The second phase: update all blocks by the gradients that were added up."""
        if not self._has_grads or self._grad_window is None:
            return
        order = range(self.blocks.num_blocks)
        with (
            self._staged() as staging,
            self._writing(order),
            self.blocks.weights.reading(order) as weights,
            self._grad_window.reading(order) as grads,
        ):
            for block in order:
                names = self._added_up.intersection(self.blocks.names_of(block))
                if not names:
                    continue  # the next generation takes it over
                views, taken = weights.take(block), grads.take(block)
                values = {name: taken[name] for name in self.params if name in names}
                self.optimizer.loss_scale.take_out(list(values.values()), is_whole_step=False)
                if factor < 1.0:
                    for grad in values.values():
                        grad.mul_(factor)
                self._update(block, values, views)
                staging.spread({name: views[name] for name in values})
                weights.write(block)
                weights.give(block, forget=True)
                grads.give(block, forget=True)
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
            store.commit({_UPDATED: text, **self._marked()})
        finally:  # Ctrl-C may come behind it
            if store.generation != generation:
                self._is_written = False
                self.num_updates = counts
                self.blocks.rebind()

    def _marked(self) -> dict[str, str]:
        """Whose state the weights are committed with, where it is not all of it."""
        return {_SHARE: self._share()} if self._replicas.count > 1 else {}

    def undo(self) -> None:
        """Drop the next generation, but not the gradients that were added up."""
        self.blocks.store.abort()
        self._with_gradient.clear()
        self._is_written = False

    def drop(self) -> None:
        """Drop the next generation, and all gradients."""
        self.undo()
        self._has_grads = False
        self._added_up.clear()
        self.is_finite = True

    def enter(self) -> None:
        """Take the gradients from now on."""
        blocks: Any = self.blocks
        blocks.sink = self

    def leave(self) -> None:
        """Give the blocks their former sink back."""
        blocks: Any = self.blocks
        blocks.sink = self._before

    def state_of(self, name: str) -> dict[str, Tensor]:
        """The state of a parameter, stacked, in torch's form."""
        param = self.params[name]
        group = self.groups[id(param)]
        slots = [*self.optimizer.update.slots(group), *([MASTER_KEY] if name in self.masters else [])]
        shape = self.blocks.shape_of(param)
        found = {slot: self._replicas.whole(self.blocks.tensor(name, f"{name}:{slot}"), shape) for slot in slots}
        return (
            {"step": torch.tensor(float(self.num_updates[name]), device="cpu"), **found} if self.optimizer.update.counts(group) else found
        )

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over states in torch's form."""
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
                        view.copy_(self._replicas.own(self.blocks.piece(value, block).contiguous()))
                    elif slot == MASTER_KEY:
                        view.copy_(self._replicas.own(weights[name]))
                    else:
                        view.zero_()
                store.write(block, data, "state")
            counts = {name: self._count(states.get(name, {})) for name in self.params}
            store.commit({_UPDATED: ",".join(map(str, counts.values())), **self._marked()})
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
