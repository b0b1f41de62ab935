""":class:`StreamedOptimizer`, an optimizer for weights that are stored off the device.

It has two modes with the same bits:

- *Fused*, the default: a block's parameters are updated during the backward pass, while they are in the window, with gradients that exist
  only for that moment. Optimizer state streams through its own window. The results form the next generation of the weights, which
  :meth:`~StreamedOptimizer.step` makes current. Until then no weight has changed: a failing backward pass or a
  :meth:`~StreamedOptimizer.zero_grad` discards it. (Source: the Scorch thesis, section 4, with immediate updates in place.)
- *Two-phase*: gradients are accumulated in host memory, and ``step`` sweeps over the blocks again. Accumulation over several backward
  passes and clipping need this mode, since no update can begin before the last gradient is known.

Loss scaling works in both: if a gradient is not finite, the generation is discarded instead of committed.

On several ranks (``group``) each rank runs its own samples on all weights, and gradients are averaged over ranks, block by block, as they
become known. Each rank keeps a share of the optimizer's state: see :mod:`sft.optim.data_parallel`.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sft.backends.resolve import check_triton
from sft.common.byte_units import parse_bytes
from sft.common.errors import InputError
from sft.nn.repeat import Repeat
from sft.optim.data_parallel import DataParallelGroup
from sft.optim.loss_scale import LossScale, all_true, gradient_norms
from sft.optim.optimizer import FusedOptimizer
from sft.optim.streamed_records import HALF_DTYPES, MASTER_KEY, RecordOptimizer
from sft.optim.update import UPDATE_BACKENDS, AdamWUpdate, KernelUpdate, SGDUpdate, Update, UpdateBackend
from sft.repeat.streamed import StreamedBlocks
from sft.torch_runtime.streamed_parameters import StreamedParameters

__all__ = ["StreamedOptimizer"]

_UPDATES: dict[str, Callable[[], Update]] = {"sgd": SGDUpdate, "adamw": AdamWUpdate}


class StreamedOptimizer(FusedOptimizer):
    """``torch.optim.SGD`` or ``AdamW`` for a model with streamed weights.

    These are the weights of repeated blocks (:meth:`sft.nn.Repeat.stream`), or all of a compiled model (``Options(weights="stream")``).

    >>> import sft
    >>> model = nn.Sequential(nn.Linear(3, 4), sft.nn.Repeat(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 6).stream("1KiB"))
    >>> optimizer = StreamedOptimizer(model, "adamw", lr=1e-2)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    >>> model(torch.randn(2, 3)).square().sum().backward()  # updates the six blocks, into the next generation
    >>> optimizer.step()  # makes it the current one
    >>> scheduler.step()

    Parameters of other modules are resident, have ordinary gradients, and are updated in :meth:`step`. The results are those of
    ``torch.optim`` with ``foreach=False, fused=False``, bit for bit, except for clipping (see ``max_norm``). ``step`` frees the gradients,
    so ``zero_grad`` is needed only to discard some.

    *Commit order.* ``step`` commits the streamed weights and state of one repetition or compiled model at once (in a file: by a rename), of
    several one after the other, then updates the other parameters. An exception before that leaves all of them unchanged. A file with the
    state of another update is rewritten without that state.

    Args:
        model: the model. Its repetitions already stream their weights, and have at most one optimizer each. Or the compiled module, or a
            model that contains one.
        update: ``"sgd"``, ``"adamw"``, or an :class:`~sft.optim.Update`.
        params: parameters or groups of them with their own settings; for streamed blocks the stacked parameters.
            Default: `None` (all of the model)
        two_phase: whether gradients are accumulated in host memory. Default: `None` (if ``max_norm`` requires it)
        max_norm: scale all gradients so that their joint Euclidean norm is at most this, as ``clip_grad_norm_`` does. The norm is summed
            in fp64 block by block, so its last digits may differ from torch's.
        loss_scale: a factor that :meth:`scale` puts on the loss and that gradients are divided by, or ``"dynamic"`` for one that
            grows and shrinks as in ``torch.amp.GradScaler``. A step with gradients that are not finite is skipped. Default: `None`
        window: bytes on the device for state, and for gradients in two-phase steps. Default: `None` (two blocks each; for a compiled model
            one parameter's, the only size supported)
        group: a process group of ``torch.distributed``. Its ranks make the optimizer of equal models, and call ``backward``, ``step`` and
            ``state_dict`` together: updates use the mean of their gradients, and weights are equal on all ranks to the last bit.
            Each rank keeps one share of the state. A state dict contains all of it, for any number of ranks; a file of weights contains the
            rank's share, so each rank has its own file. Default: `None`
        group_timeout_seconds: how long to wait for another rank. Default: 1800
        backend: implementation of the updates: ``"aten"`` for PyTorch's operators, or ``"triton"`` for our kernels, which pass over memory
            once. These compute SGD and AdamW with all settings except AMSGrad and a tensor as AdamW's learning rate, for contiguous
            parameters in fp32 or with fp32 copies; other parameters fall back to ATen one by one. They need a CUDA device (or, for tests,
            ``TRITON_INTERPRET=1``), and were not verified on one: they have the bits of ``torch.optim`` on a CPU, except for a root of
            AdamW that PyTorch itself does not round to the nearest number. State dicts and files are the same. Default: ``"aten"``
        settings: learning rate and so on, by torch's names.

    Raises:
        InputError: the model has no streamed weights, a repetition has an optimizer, a setting is out of range, the ranks differ, or
            kernels cannot run.
        RankError: another rank failed or does not respond.
        SourceError: a file of weights cannot be rewritten with space for the state.
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
        group: Any = None,
        group_timeout_seconds: float = 1800.0,
        backend: UpdateBackend = "aten",
        **settings: Any,
    ) -> None:
        if max_norm is not None and (two_phase is False or not max_norm > 0):
            raise InputError(f"max_norm={max_norm!r}, two_phase={two_phase}: clipping needs a positive max_norm and two_phase=True")
        resolved_update = _resolve_update(update, backend)
        self.backend = backend
        self.two_phase = max_norm is not None if two_phase is None else two_phase
        self.max_norm = max_norm
        self.loss_scale = LossScale(loss_scale)
        self.last_step_skipped = False
        self._record_optimizers: list[RecordOptimizer] = []
        computed_update = (
            KernelUpdate(resolved_update)
            if backend == "triton" and isinstance(resolved_update, (SGDUpdate, AdamWUpdate))
            else resolved_update
        )
        super().__init__(model.parameters() if params is None else params, computed_update, **settings)
        streamed = _streamed_parts(model)
        _check_streamed_parts(streamed, has_group=group is not None)
        if backend == "triton":
            check_triton(streamed[0].device)
        self.group = DataParallelGroup(group, streamed[0].device, timedelta(seconds=group_timeout_seconds))
        if self.group.num_ranks > 1 and not isinstance(resolved_update, (SGDUpdate, AdamWUpdate)):
            raise InputError(
                f"update={type(resolved_update).__name__} with a group of {self.group.num_ranks} ranks, each of which updates a share of "
                "each parameter's elements; give 'sgd' or 'adamw', which are elementwise"
            )
        with self.group.guarded():
            for blocks in streamed:
                records = RecordOptimizer(self, blocks, self._group_by_id(), None if window is None else parse_bytes(window))
                if records.params:
                    self._record_optimizers.append(records)
            self._agree()
        for records in self._record_optimizers:
            records.attach()

    def _agree(self) -> None:
        """Check that all ranks begin with the same settings and weights.

        Raises:
            InputError: they differ.
        """
        if self.group.num_ranks == 1:
            return
        streamed_ids = self._streamed_ids()
        setup = (
            self.two_phase,
            self.max_norm,
            self.backend,
            self.loss_scale.value,
            self.settings(),
            *(records.rank_invariants() for records in self._record_optimizers),
        )
        self.group.agree(setup, "give all of them the same model, the same settings, and weights that were updated as often")
        digest = hashlib.sha256()
        for records in self._record_optimizers:
            records.hash_weights(digest)
        for param in (p for group in self.param_groups for p in group["params"] if id(p) not in streamed_ids):
            digest.update(param.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self.group.agree(digest.digest(), "their weights; seed all ranks alike, or load one checkpoint on all of them")

    def settings(self) -> list[list[tuple[str, str]]]:
        """Settings of all groups (learning rates and so on), as text."""
        return [sorted((name, repr(value)) for name, value in group.items() if name != "params") for group in self.param_groups]

    def together(self) -> AbstractContextManager[None]:
        """A context for complete steps on several ranks: an exception inside, also in the forward pass, ends the step on all ranks at once.

        Without it the other ranks notice a failure outside of ``backward`` and ``step`` only when the timeout expires.

        Raises:
            RankError: another rank failed.
        """
        return self.group.guarded()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale; call ``backward`` on the result."""
        return loss * self.loss_scale.value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, and updates that were not committed."""
        super().zero_grad(set_to_none)
        for records in self._record_optimizers:
            records.drop()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit the updates of the backward pass (in two-phase mode, compute them first), and update all resident parameters.

        Args:
            closure: computes the loss and the gradients, as in torch.

        Raises:
            InputError: a gradient is sparse.
            RankError: another rank failed or does not respond. The weights are unchanged, and all gradients are discarded.
            SourceError: a file cannot be written; the weights are unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.group.guarded():
            self._refuse_sparse()
        try:
            with self.group.guarded():
                resident = self._resident_gradients()
                is_finite, factor = self._commit_streamed([param.grad for param, _ in resident])
        except BaseException:
            for records in self._record_optimizers:
                records.undo()
            if self.group.num_ranks > 1:
                self.zero_grad()  # some may be averaged already, some not
            raise
        self.last_step_skipped = not is_finite
        for param, group in resident:
            grad, param.grad = param.grad, None
            assert grad is not None
            if is_finite:
                if factor < 1.0:
                    grad.mul_(factor)
                self.update_one(param, grad, group)
            del grad
        for records in self._record_optimizers:
            records.drop()
        self.loss_scale.update(is_finite)
        return loss

    def _commit_streamed(self, grads: Sequence[Tensor | None]) -> tuple[bool, float]:
        """Commit the updates of streamed weights if all gradients, of all ranks, are finite.

        Returns:
            True if they are, and the factor that clips the resident gradients.
        """
        if self.two_phase:
            for records in self._record_optimizers:
                records.check()
        is_finite = all_true([self.loss_scale.unscale(grads), *(records.finite for records in self._record_optimizers)])
        is_finite &= self.loss_scale.is_off or all(math.isfinite(records.square_norm) for records in self._record_optimizers)
        is_finite = all(all(flags) for flags in self.group.all_gather_numbers([float(is_finite)]))
        if not is_finite:
            return False, 1.0
        factor = self._clip_factor(grads)
        if self.two_phase:
            for records in self._record_optimizers:
                records.sweep(factor)
        self.group.barrier()
        for records in self._record_optimizers:
            records.commit()
        return True, factor

    def _streamed_ids(self) -> set[int]:
        """Ids of the streamed parameters."""
        return {id(param) for records in self._record_optimizers for param in records.params.values()}

    def _refuse_sparse(self) -> None:
        """
        Raises:
            InputError: a gradient is sparse.
        """
        grads = [p.grad for group in self.param_groups for p in group["params"] if id(p) not in self._streamed_ids()]
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            raise InputError("a gradient is sparse; in-place updates take dense ones (sparse=False for the embedding)")

    def _resident_gradients(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """The resident parameters that have gradients, with their groups; the gradients are averaged over all ranks."""
        streamed_ids = self._streamed_ids()
        resident = [(p, group) for group in self.param_groups for p in group["params"] if id(p) not in streamed_ids]
        on_ranks = self.group.all_gather_numbers([0.0, *(float(p.grad is not None) for p, _ in resident)])
        is_used = [any(has) for has in zip(*(has[1:] for has in on_ranks), strict=True)]
        resident = [pair for pair, used in zip(resident, is_used, strict=True) if used]
        for param, _ in resident:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        self.group.average([param.grad for param, _ in resident if param.grad is not None])
        return resident

    def update_one(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a resident parameter; one in half precision through an fp32 copy.

        Raises:
            InputError: the gradient is sparse.
        """
        if param.dtype not in HALF_DTYPES:
            return super().update_one(param, grad, group)
        state = self.state[param]
        master = state.pop(MASTER_KEY, None)
        if master is None:
            master = param.detach().float()
        self.state[master] = state
        super().update_one(master, grad.float(), group)
        self.state[param] = {**self.state.pop(master), MASTER_KEY: master}
        param.copy_(master)
        return None

    def close(self) -> None:
        """Discard uncommitted updates, and detach the repetitions from this optimizer."""
        self.zero_grad()
        for records in self._record_optimizers:
            records.detach()
        self._record_optimizers = []

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's form, stacked for streamed blocks. Its tensors are views of the store until the next step.

        A dynamic loss scale is stored as ``"loss_scale"``, which ``torch.optim`` ignores.

        On several ranks all of them call it together, and each receives the complete state in host memory.
        """
        with self.group.guarded():
            for records in self._record_optimizers:
                for name, param in records.params.items():
                    if records.num_updates[name]:
                        self.state[param] = records.state_of(name)
        try:
            state = super().state_dict()
            scale = self.loss_scale.state_dict()
            return {**state, "loss_scale": scale} if scale else state
        finally:
            for records in self._record_optimizers:
                for param in records.params.values():
                    self.state.pop(param, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of the ``torch.optim`` class of the same update.

        State keeps its precision: for parameters in half precision it is fp32. Missing fp32 copies are initialised from the parameters.

        Raises:
            InputError: a tensor has another shape, or settings are not supported; no state is changed.
            ValueError: its groups differ (torch's error).
            SourceError: a file of weights cannot be written; no state is changed.
        """
        keys = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        states = {id(param): state_dict["state"][key] for key, param in zip(keys, params, strict=False) if key in state_dict["state"]}
        for param in params:
            for name, value in states.get(id(param), {}).items():
                if isinstance(value, Tensor) and name != "step" and value.shape != param.shape:
                    raise InputError(f"state {name} has shape {tuple(value.shape)} for a parameter of {tuple(param.shape)}")
        for records in self._record_optimizers:
            records.check_slots(
                dict(
                    zip(
                        map(id, params),
                        chain.from_iterable(_group_per_parameter(group) for group in state_dict["param_groups"]),
                        strict=False,
                    )
                )
            )
        self.loss_scale.load_state_dict(state_dict.get("loss_scale", {}))
        super().load_state_dict({"state": {}, "param_groups": copy.deepcopy(state_dict["param_groups"])})
        self.zero_grad()
        for records in self._record_optimizers:
            records.groups = self._group_by_id()
        streamed_ids = self._streamed_ids()
        for records in self._record_optimizers:
            records.load({name: states.get(id(param), {}) for name, param in records.params.items()})
        for param in params:
            if id(param) not in streamed_ids and id(param) in states:
                dtype = torch.float32 if param.dtype in HALF_DTYPES else param.dtype
                self.state[param] = {
                    name: value.clone() if name == "step" else value.detach().to(param.device, dtype, copy=True)
                    for name, value in states[id(param)].items()
                    if isinstance(value, Tensor)
                }

    def _group_by_id(self) -> dict[int, dict[str, Any]]:
        """The group of each parameter, by id."""
        return {id(param): group for group in self.param_groups for param in group["params"]}

    def _clip_factor(self, grads: Sequence[Tensor | None]) -> float:
        """The factor that limits the norm of all gradients to ``max_norm``."""
        if self.max_norm is None:
            return 1.0
        squares = [norm**2 for norm in gradient_norms([grad for grad in grads if grad is not None])]
        squares += chain.from_iterable(self.group.all_gather_numbers([records.square_norm for records in self._record_optimizers]))
        return min(1.0, self.max_norm / (math.sqrt(math.fsum(squares)) + 1e-6))


def _resolve_update(update: str | Update, backend: UpdateBackend) -> Update:
    """The update rule of a name, or the given one.

    Raises:
        InputError: the update or the backend is not supported.
    """
    names = ", ".join(_UPDATES)
    if isinstance(update, str) and update not in _UPDATES:
        raise InputError(f"update={update!r}: choose one of {names}, or give an object")
    if isinstance(update, type):
        raise InputError(f"update={update.__name__}: that is a class; choose one of {names}, or give an object")
    resolved: Update = _UPDATES[update]() if isinstance(update, str) else update
    if backend not in UPDATE_BACKENDS:
        raise InputError(f"backend={backend!r}: updates are computed by one of {', '.join(UPDATE_BACKENDS)}; give one of these")
    if backend == "triton" and not isinstance(resolved, (SGDUpdate, AdamWUpdate)):
        raise InputError(
            f"backend='triton' with update={type(resolved).__name__}: there are kernels for {len(_UPDATES)} updates; give one of {names}, "
            "or leave backend out"
        )
    return resolved


def _check_streamed_parts(streamed: Sequence[StreamedBlocks | StreamedParameters], *, has_group: bool) -> None:
    """Check the parts of a model that stream their weights.

    Raises:
        InputError: no part does, one has an optimizer already, or one does not support a group of ranks.
    """
    if not streamed:
        raise InputError(
            "no part of the model streams its weights; call stream() on its repetitions, or compile it with Options(weights='stream'), "
            "or use sft.optim"
        )
    if any(isinstance(blocks.sink, RecordOptimizer) for blocks in streamed):
        raise InputError("a part of the model has an optimizer for its streamed weights already; close() it first")
    if has_group and any(isinstance(blocks, StreamedParameters) for blocks in streamed):
        raise InputError("group: streamed weights of a compiled model are one process's own; leave group out, or stream a Repeat")


def _streamed_parts(model: nn.Module) -> list[StreamedBlocks | StreamedParameters]:
    """The parts of a model that stream their weights: repetitions and compiled models."""
    parts: list[StreamedBlocks | StreamedParameters] = []
    for module in model.modules():
        if isinstance(module, Repeat) and module.streamed is not None:
            parts.append(module.streamed)
        engine = getattr(module, "_sft_engine", None)
        parameters = StreamedParameters.known(module) if engine is None else engine.stream_weights()
        if parameters is not None and parameters not in parts:
            parts.append(parameters)
    return parts


def _group_per_parameter(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group repeated for each of its parameters."""
    return [group] * len(group["params"])
