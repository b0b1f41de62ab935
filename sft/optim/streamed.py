"""An optimizer for weights that are not on the device: :class:`StreamedOptimizer`.

Two forms, which give the same bits:

- *Fused*, the default: a block's parameters are updated in the middle of the backward pass, while they are in the window, by gradients that
  exist for this moment only. State streams through a window of its own. The results go into the next generation of the weights;
  :meth:`~StreamedOptimizer.step` makes it the current one. Until then nothing has changed: a backward pass that fails, or a
  :meth:`~StreamedOptimizer.zero_grad`, drops it. (Source: the Scorch thesis, section 4, whose update is in place at once.)
- *Two-phase*: gradients are added up in the host's memory, and ``step`` walks over the blocks once more. This is what accumulation over
  several backward passes and clipping need, since no update can begin before the last gradient is known.

Loss scaling works in both: where a gradient is infinite, the generation is dropped instead of committed.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sft.deep.streamed import BlockSink, StreamedBlocks
from sft.errors import InputError
from sft.nn.repeat import Repeat
from sft.optim.adamw import AdamWUpdate
from sft.optim.optimizer import FusedOptimizer
from sft.optim.scaling import LossScale
from sft.optim.sgd import SGDUpdate
from sft.optim.update import Update
from sft.units import parse_bytes
from sft.weights import HostStore, Layout, Reading, TensorSpec, WeightStream

__all__ = ["StreamedOptimizer"]

_UPDATES: dict[str, Callable[[], Update]] = {"sgd": SGDUpdate, "adamw": AdamWUpdate}
_HALF = (torch.bfloat16, torch.float16)
#: Name of the fp32 copy of a parameter in half precision, in the state.
_MASTER = "master"
_UPDATED = "updates"


class StreamedOptimizer(FusedOptimizer):
    """``torch.optim.SGD`` or ``AdamW`` for a model whose repeated blocks stream their weights (:meth:`sft.nn.Repeat.stream`).

    >>> import sft
    >>> model = nn.Sequential(nn.Linear(3, 4), sft.nn.Repeat(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 6).stream("1KiB"))
    >>> optimizer = StreamedOptimizer(model, "adamw", lr=1e-2)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    >>> model(torch.randn(2, 3)).square().sum().backward()  # the six blocks are updated here, into a generation of their own
    >>> optimizer.step()  # and this is where it takes effect
    >>> scheduler.step()

    Parameters of other modules are ordinary ones, with gradients of their own, and are updated in :meth:`step`. The results are those of
    ``torch.optim`` with ``foreach=False, fused=False``, bit for bit, but for clipping (see ``max_norm``). ``step`` frees the gradients, so
    ``zero_grad`` is needed only to drop some.

    What is committed, and when: ``step`` commits the streamed weights and their state of one repetition at once (in a file: by a rename),
    of several one after the other, then updates the other parameters. What raises before leaves everything as it was. A file with the
    state of another update is written anew without that state.

    Args:
        model: the model. Its repetitions stream their weights already; one optimizer a repetition.
        update: ``"sgd"``, ``"adamw"``, or an :class:`~sft.optim.Update`.
        params: parameters or groups of them with settings of their own; those of streamed blocks are the stacked ones.
            Default: `None` (all of the model)
        two_phase: whether gradients are added up in the host's memory. Default: `None` (where ``max_norm`` asks for it)
        max_norm: scale all gradients so that their joint Euclidean norm is at most this, as ``clip_grad_norm_`` does. The norm is summed
            in fp64 block by block, so its last digits may differ from torch's.
        loss_scale: a factor that :meth:`scale` puts before the loss, and that is taken out of the gradients, or ``"dynamic"`` for one that
            grows and falls as in ``torch.amp.GradScaler``. A step with gradients that are not finite is skipped. Default: `None`
        window: bytes on the device for state, and for gradients in two-phase steps. Default: `None` (two blocks each)
        settings: learning rate and so on, by torch's names.

    Raises:
        InputError: nothing of the model is streamed, a repetition has an optimizer, or a setting is out of range.
        SourceError: a file of weights cannot be rewritten with room for the state.
        BudgetError: the window is smaller than a block's state.
    """

    def __init__(
        self,
        model: nn.Module,
        update: Literal["sgd", "adamw"] | Update = "adamw",
        *,
        params: Iterable[Any] | None = None,
        two_phase: bool | None = None,
        max_norm: float | None = None,
        loss_scale: float | Literal["dynamic"] | None = None,
        window: int | str | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(update, str) and update not in _UPDATES:
            raise InputError(f"update={update!r}: choose one of {', '.join(_UPDATES)}, or give an object")
        if max_norm is not None and (two_phase is False or not max_norm > 0):
            raise InputError(
                f"max_norm={max_norm!r}, two_phase={two_phase}: clipping wants a positive norm, and knows it in two phases only"
            )
        chosen = _UPDATES[update]() if isinstance(update, str) else update
        self.two_phase = max_norm is not None if two_phase is None else two_phase
        self.max_norm = max_norm
        self.loss_scale = LossScale(loss_scale)
        self.last_step_skipped = False
        self._chains: list[_Chain] = []
        super().__init__(model.parameters() if params is None else params, chosen, **settings)
        repeats = [module for module in model.modules() if isinstance(module, Repeat) and module.streamed is not None]
        if not repeats:
            raise InputError("no part of the model streams its weights; call stream() on its repetitions first, or use sft.optim")
        if any(isinstance(repeat.streamed and repeat.streamed.sink, _Chain) for repeat in repeats):
            raise InputError("a repetition has an optimizer for its streamed weights already; close() it first")
        for repeat in repeats:
            assert repeat.streamed is not None
            part = _Chain(self, repeat.streamed, self._by_param(), None if window is None else parse_bytes(window))
            if part.params:
                self._chains.append(part)
                repeat.streamed.sink = part

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale; call ``backward`` on this."""
        return loss * self.loss_scale.value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, and updates that were not committed."""
        super().zero_grad(set_to_none)
        for part in self._chains:
            part.drop()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit what the backward pass computed (or, in two phases, compute it), and update all other parameters.

        Args:
            closure: computes the loss and the gradients, as with torch.

        Raises:
            InputError: a gradient is sparse.
            SourceError: a file cannot be written; the weights are as they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = {id(param) for part in self._chains for param in part.params.values()}
        others = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None and id(p) not in own]
        grads = [param.grad for param, _ in others]
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            raise InputError("a gradient is sparse; in-place updates take dense ones (sparse=False for the embedding)")
        if self.two_phase:
            for part in self._chains:
                part.check()
        is_finite = self.loss_scale.take_out(grads) and all(part.is_finite for part in self._chains)
        self.last_step_skipped = not is_finite
        if is_finite:
            factor = self._clipping(grads)
            try:
                if self.two_phase:
                    for part in self._chains:
                        part.sweep(factor)
                for part in self._chains:
                    part.commit()
            except BaseException:
                for part in self._chains:
                    part.undo()
                raise
        for param, group in others:
            grad, param.grad = param.grad, None
            if is_finite:
                if factor < 1.0:
                    grad.mul_(factor)
                self.update_one(param, grad, group)
            del grad
        for part in self._chains:
            part.drop()
        self.loss_scale.follow(is_finite)
        return loss

    def update_one(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update an ordinary parameter; one in half precision through an fp32 copy.

        Raises:
            InputError: the gradient is sparse.
        """
        if param.dtype not in _HALF:
            return super().update_one(param, grad, group)
        state = self.state[param]
        master = state.pop(_MASTER, None)
        if master is None:
            master = param.detach().float()
        self.state[master] = state
        super().update_one(master, grad.float(), group)
        self.state[param] = {**self.state.pop(master), _MASTER: master}
        param.copy_(master)
        return None

    def close(self) -> None:
        """Drop what is not committed, and leave the repetitions without an optimizer."""
        self.zero_grad()
        for part in self._chains:
            part.leave()
        self._chains = []

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's form, that of streamed blocks stacked. Its tensors are views of the store until the next step."""
        for part in self._chains:
            for name, param in part.params.items():
                if part.num_updates[name]:
                    self.state[param] = part.state_of(name)
        try:
            return super().state_dict()
        finally:
            for part in self._chains:
                for param in part.params.values():
                    self.state.pop(param, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class, or of the ``torch.optim`` class of the same update.

        State keeps its precision: for parameters in half precision it is fp32. Without fp32 copies in it these begin as the parameters.

        Raises:
            InputError: a tensor has another shape, or settings cannot be followed; nothing is changed.
            ValueError: it has other groups (torch's error).
            SourceError: a file of weights cannot be written; nothing is changed.
        """
        saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        found = {id(param): state_dict["state"][key] for key, param in zip(saved, params, strict=False) if key in state_dict["state"]}
        for param in params:
            for name, value in found.get(id(param), {}).items():
                if isinstance(value, Tensor) and name != "step" and value.shape != param.shape:
                    raise InputError(f"state {name} has shape {tuple(value.shape)} for a parameter of {tuple(param.shape)}")
        for part in self._chains:
            part.check_slots(
                dict(zip(map(id, params), chain.from_iterable(_repeated(group) for group in state_dict["param_groups"]), strict=False))
            )
        super().load_state_dict({"state": {}, "param_groups": copy.deepcopy(state_dict["param_groups"])})
        self.zero_grad()
        for part in self._chains:
            part.groups = self._by_param()
        own = {id(param) for part in self._chains for param in part.params.values()}
        for part in self._chains:
            part.load({name: found.get(id(param), {}) for name, param in part.params.items()})
        for param in params:
            if id(param) not in own and id(param) in found:
                dtype = torch.float32 if param.dtype in _HALF else param.dtype
                self.state[param] = {
                    name: value.clone() if name == "step" else value.detach().to(param.device, dtype, copy=True)
                    for name, value in found[id(param)].items()
                    if isinstance(value, Tensor)
                }

    def _by_param(self) -> dict[int, dict[str, Any]]:
        """The group of each parameter."""
        return {id(param): group for group in self.param_groups for param in group["params"]}

    def _clipping(self, grads: Sequence[Tensor | None]) -> float:
        """The factor that brings the norm of all gradients down to the largest allowed."""
        if self.max_norm is None:
            return 1.0
        squares = [float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for grad in grads if grad is not None]
        squares += [part.square_norm for part in self._chains]
        return min(1.0, self.max_norm / (math.sqrt(math.fsum(squares)) + 1e-6))


def _repeated(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group once for each of its parameters."""
    return [group] * len(group["params"])


class _Chain:
    """The streamed blocks of one repetition under an optimizer: the sink of their gradients, and their part of a step."""

    def __init__(
        self, optimizer: StreamedOptimizer, blocks: StreamedBlocks, groups: Mapping[int, dict[str, Any]], window_bytes: int | None
    ) -> None:
        self.optimizer, self.blocks, self.groups = optimizer, blocks, groups
        self._before = blocks.sink
        self.params = {name: p for name, p in blocks.block.named_parameters() if id(p) in groups and p.requires_grad}
        self.is_finite = True
        self.square_norm = 0.0
        self._is_written = False
        self._has_grads = False
        self.masters = frozenset(name for name, param in self.params.items() if param.dtype in _HALF)
        specs = [spec for name, param in self.params.items() for spec in self._specs(name, param)]
        resumed = blocks.set_state(specs, self._first_state) if self.params else False
        self.num_updates = self._counts() if resumed else dict.fromkeys(self.params, 0)
        self._states = self._window(blocks.store, "state", window_bytes) if specs else None
        self._grads: HostStore | None = None
        self._grad_window: WeightStream | None = None
        if optimizer.two_phase and self.params:
            self._grads, self._grad_window = self._gradients(window_bytes)
        self._reading: Reading | None = None
        self._with_gradient: set[str] = set()
        self._added_up: set[str] = set()  # the parameters whose gradients are on the host

    def _specs(self, name: str, param: Tensor) -> list[TensorSpec]:
        shape, dtype = tuple(param.shape[1:]), torch.float32 if name in self.masters else param.dtype
        slots = [*self.optimizer.update.slots(self.groups[id(param)]), *([_MASTER] if name in self.masters else [])]
        return [TensorSpec(name=f"{name}:{slot}", shape=shape, dtype=dtype, is_state=True) for slot in slots]

    def _first_state(self, block: int, views: dict[str, Tensor]) -> None:
        for name in self.masters:
            views[f"{name}:{_MASTER}"].copy_(views[name])

    def check_slots(self, groups: Mapping[int, dict[str, Any]]) -> None:
        """Whether other settings keep the same state.

        Raises:
            InputError: they do not.
        """
        for name, param in self.params.items():
            kept = self.optimizer.update.slots(self.groups[id(param)])
            wanted = self.optimizer.update.slots({**self.optimizer.defaults, **groups.get(id(param), {})})
            if kept != wanted:
                raise InputError(
                    f"the loaded settings keep {', '.join(wanted) or 'nothing'} for {name}, where this optimizer keeps "
                    f"{', '.join(kept) or 'nothing'}; make it with the same settings"
                )

    def _counts(self) -> dict[str, int]:
        """How often each parameter was updated, as the file says."""
        counts = self.blocks.store.metadata.get(_UPDATED, "0").split(",")
        if len(counts) == 1:
            counts *= len(self.params)
        return {name: int(count) for name, count in zip(self.params, counts, strict=True)}

    def _window(self, store: Any, part: Literal["weights", "state"], window_bytes: int | None) -> WeightStream:
        size = store.layouts[0].part_bytes(part)
        num_bytes = min(2, len(store.layouts)) * size if window_bytes is None else window_bytes
        return WeightStream(store, self.blocks.device, window_bytes=num_bytes, part=part, prefetch=self.blocks.prefetch)

    def _gradients(self, window_bytes: int | None) -> tuple[HostStore, WeightStream]:
        layout = Layout.of(TensorSpec(name=name, shape=tuple(p.shape[1:]), dtype=p.dtype) for name, p in self.params.items())
        store = HostStore([layout] * self.blocks.num_blocks, pin=torch.cuda.is_available())
        return store, self._window(store, "weights", window_bytes)

    def extra_bytes(self) -> int:
        """What a backward pass holds on the device beside the weights: the window of the state, and fp32 copies of gradients."""
        if self.optimizer.two_phase:
            sizes = [p[0].numel() * p.element_size() for p in self.params.values()]
            return max(sizes, default=0) if self.blocks.device.type != "cpu" else 0
        copies = max((self.params[name][0].numel() * 4 for name in self.masters), default=0)
        return copies + (0 if self._states is None else self._states.window_bytes)

    @contextlib.contextmanager
    def opened(self, order: Sequence[int]) -> Iterator[BlockSink]:
        """For one backward pass."""
        self.is_finite = True
        if self.optimizer.two_phase:
            assert self._grads is not None
            self._grads.begin()
            try:
                yield self
                self._grads.commit()
            except BaseException:
                self._grads.abort()
                raise
            self._has_grads = True
            return
        if self._is_written:
            raise InputError(
                "these weights were updated by a backward pass before, and not committed; call step() or zero_grad() after each, or give "
                "two_phase=True to add gradients up"
            )
        with self._writing(order):
            yield self
        self._is_written = True

    @contextlib.contextmanager
    def _writing(self, order: Sequence[int]) -> Iterator[None]:
        """A next generation, with the state at hand; dropped if the block fails."""
        store = self.blocks.store
        store.begin()
        try:
            with contextlib.ExitStack() as stack:
                self._reading = None if self._states is None else stack.enter_context(self._states.reading(order))
                yield
        except BaseException:
            store.abort()
            raise
        finally:
            self._reading = None

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Use, or add up, a block's gradients."""
        wanted = {name: grad for name, grad in grads.items() if name in self.params}
        if self.optimizer.two_phase:
            assert self._grads is not None
            old = self._grads.layouts[block].views(self._grads.record(block))
            new = self._grads.layouts[block].views(self._grads.next_record(block))
            for name, grad in wanted.items():
                if self._has_grads:
                    grad.add_(old[name].to(grad.device))
                new[name].copy_(grad)
            self._added_up.update(wanted)
            return False
        finite = self.optimizer.loss_scale.take_out(list(wanted.values()), is_whole_step=False)
        self.is_finite = self.is_finite and finite
        self._update(block, wanted, weights)
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
            if name in self.masters:
                master = state[f"{name}:{_MASTER}"]
                update.apply(master, grad.float(), own, group, count)
                weights[name].copy_(master)
            else:
                update.apply(weights[name], grad, own, group, count)
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
                norms = [torch.linalg.vector_norm(grads[name], dtype=torch.float64) for name in sorted(self._added_up)]
                squares += [(float(norm) * inverse) ** 2 for norm in norms]
                reading.give(block)
        self.square_norm = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
        self.is_finite = math.isfinite(self.square_norm) or self.optimizer.loss_scale.is_off

    def sweep(self, factor: float) -> None:
        """The second phase: update all blocks by the gradients that were added up."""
        if not self._has_grads or self._grad_window is None:
            return
        order = range(self.blocks.num_blocks)
        with self._writing(order), self.blocks.weights.reading(order) as weights, self._grad_window.reading(order) as grads:
            for block in order:
                views, taken = weights.take(block), grads.take(block)
                values = {name: taken[name] for name in self.params if name in self._added_up}
                self.optimizer.loss_scale.take_out(list(values.values()), is_whole_step=False)
                if factor < 1.0:
                    for grad in values.values():
                        grad.mul_(factor)
                self._update(block, values, views)
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
        self.blocks.store.commit({_UPDATED: text})
        self._is_written = False
        self.num_updates = counts
        self.blocks.rebind()

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

    def leave(self) -> None:
        """Give the blocks their former sink back."""
        self.blocks.sink = self._before

    def state_of(self, name: str) -> dict[str, Tensor]:
        """The state of a parameter, stacked, in torch's form."""
        stacked = self.blocks.store.layouts[0].stacked(self.blocks.store.all_records(), self.blocks.num_blocks)
        param = self.params[name]
        group = self.groups[id(param)]
        slots = [*self.optimizer.update.slots(group), *([_MASTER] if name in self.masters else [])]
        found = {slot: stacked[f"{name}:{slot}"] for slot in slots}
        return {"step": torch.tensor(float(self.num_updates[name])), **found} if self.optimizer.update.counts(group) else found

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
                        view.copy_(value[block])
                    elif slot == _MASTER:
                        view.copy_(weights[name])
                    else:
                        view.zero_()
                store.write(block, data, "state")
            counts = {name: self._count(states.get(name, {})) for name in self.params}
            store.commit({_UPDATED: ",".join(map(str, counts.values()))})
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
