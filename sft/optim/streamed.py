"""An optimizer for weights that are not on the device: :class:`StreamedOptimizer`.

Two forms, which give the same bits:

- *Fused*, the default: a block's parameters are updated in the middle of the backward pass, while they are in the window, by gradients that
  exist for this moment only. State streams through a window of its own. The results go into the next generation of the weights;
  :meth:`~StreamedOptimizer.step` makes it the current one. Until then nothing has changed: a backward pass that fails, or a
  :meth:`~StreamedOptimizer.zero_grad`, drops it. (Source: the Scorch thesis, section 4, whose update is in place at once.)
- *Two-phase*: gradients are added up in the host's memory, and ``step`` walks over the blocks once more. This is what accumulation over
  several backward passes and clipping need, since no update can begin before the last gradient is known.

Loss scaling works in both: where a gradient is infinite, the generation is dropped instead of committed.

On several ranks (``group``) each rank runs samples of its own on all weights, and gradients are means over ranks, block by block, as they
are known. Of the optimizer's state each rank keeps a share: see :mod:`sft.optim.data_parallel`.
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
from sft.optim.loss_scale import LossScale
from sft.optim.optimizer import FusedOptimizer
from sft.optim.streamed_records import HALF_DTYPES, MASTER_KEY, RecordOptimizer
from sft.optim.update import UPDATE_BACKENDS, AdamWUpdate, KernelUpdate, SGDUpdate, Update, UpdateBackend
from sft.repeat.streamed import StreamedBlocks
from sft.torch_runtime.streamed_parameters import StreamedParameters

__all__ = ["StreamedOptimizer"]

_UPDATES: dict[str, Callable[[], Update]] = {"sgd": SGDUpdate, "adamw": AdamWUpdate}


class StreamedOptimizer(FusedOptimizer):
    """``torch.optim.SGD`` or ``AdamW`` for a model whose weights are streamed: those of repeated blocks (:meth:`sft.nn.Repeat.stream`), or
    all of a compiled model (``Options(weights="stream")``).

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

    What is committed, and when: ``step`` commits the streamed weights and their state of one repetition, or compiled model, at once (in a
    file: by a rename), of several one after the other, then updates the other parameters. What raises before leaves everything as it was.
    A file with the state of another update is written anew without that state.

    Args:
        model: the model. Its repetitions stream their weights already; one optimizer a repetition. Or the compiled module, or a model
            that has one as a part.
        update: ``"sgd"``, ``"adamw"``, or an :class:`~sft.optim.Update`.
        params: parameters or groups of them with settings of their own; those of streamed blocks are the stacked ones.
            Default: `None` (all of the model)
        two_phase: whether gradients are added up in the host's memory. Default: `None` (where ``max_norm`` asks for it)
        max_norm: scale all gradients so that their joint Euclidean norm is at most this, as ``clip_grad_norm_`` does. The norm is summed
            in fp64 block by block, so its last digits may differ from torch's.
        loss_scale: a factor that :meth:`scale` puts before the loss, and that is taken out of the gradients, or ``"dynamic"`` for one that
            grows and falls as in ``torch.amp.GradScaler``. A step with gradients that are not finite is skipped. Default: `None`
        window: bytes on the device for state, and for gradients in two-phase steps. Default: `None` (two blocks each; of a compiled model
            one parameter's, and no other size can be asked for)
        group: a process group of ``torch.distributed``. Its ranks make the optimizer of equal models, and call ``backward``, ``step`` and
            ``state_dict`` together: updates are those by the mean of their gradients, and weights are equal on all of them to the last bit.
            Of the state each keeps one share of as many. A state dict has all of it, for any number of ranks; a file of weights has the
            rank's share, so each rank has its own file. Default: `None`
        group_timeout_seconds: how long to wait for another rank. Default: 1800
        backend: what computes the updates: ``"aten"`` for PyTorch's operators, or ``"triton"`` for our kernels, which pass over memory
            once. These compute SGD and AdamW with all settings but AMSGrad and tensors as AdamW's learning rate, for contiguous parameters
            in fp32 or with fp32 copies; what they do not compute goes by ATen, parameter by parameter. They need a CUDA device (or, for
            tests, ``TRITON_INTERPRET=1``), and were not verified on one: they have the bits of ``torch.optim`` on a CPU, but for a root of
            AdamW that PyTorch itself does not round to the nearest number. State dicts and files are the same. Default: ``"aten"``
        settings: learning rate and so on, by torch's names.

    Raises:
        InputError: nothing of the model is streamed, a repetition has an optimizer, a setting is out of range, the ranks differ, or
            kernels cannot run.
        RankError: another rank failed, or does not answer.
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
        group: Any = None,
        group_timeout_seconds: float = 1800.0,
        backend: UpdateBackend = "aten",
        **settings: Any,
    ) -> None:
        if isinstance(update, str) and update not in _UPDATES:
            raise InputError(f"update={update!r}: choose one of {', '.join(_UPDATES)}, or give an object")
        if isinstance(update, type):
            raise InputError(f"update={update.__name__}: that is a class; choose one of {', '.join(_UPDATES)}, or give an object")
        if max_norm is not None and (two_phase is False or not max_norm > 0):
            raise InputError(
                f"max_norm={max_norm!r}, two_phase={two_phase}: clipping wants a positive norm, and knows it in two phases only"
            )
        chosen = _UPDATES[update]() if isinstance(update, str) else update
        if backend not in UPDATE_BACKENDS:
            raise InputError(f"backend={backend!r}: updates are computed by one of {', '.join(UPDATE_BACKENDS)}; give one of these")
        if backend == "triton" and not isinstance(chosen, (SGDUpdate, AdamWUpdate)):
            raise InputError(
                f"backend='triton' with update={type(chosen).__name__}: there are kernels for {len(_UPDATES)} updates; give one of "
                f"{', '.join(_UPDATES)}, or leave backend out"
            )
        self.backend = backend
        self.two_phase = max_norm is not None if two_phase is None else two_phase
        self.max_norm = max_norm
        self.loss_scale = LossScale(loss_scale)
        self.last_step_skipped = False
        self._chains: list[RecordOptimizer] = []
        computed = KernelUpdate(chosen) if backend == "triton" and isinstance(chosen, (SGDUpdate, AdamWUpdate)) else chosen
        super().__init__(model.parameters() if params is None else params, computed, **settings)
        blocks = _streamed_parts(model)
        if not blocks:
            raise InputError(
                "no part of the model streams its weights; call stream() on its repetitions, or compile it with Options(weights='stream'), "
                "or use sft.optim"
            )
        if any(isinstance(each.sink, RecordOptimizer) for each in blocks):
            raise InputError("a part of the model has an optimizer for its streamed weights already; close() it first")
        if backend == "triton":
            check_triton(blocks[0].device)
        if group is not None and any(isinstance(each, StreamedParameters) for each in blocks):
            raise InputError("group: streamed weights of a compiled model are one process's own; leave group out, or stream a Repeat")
        self.replicas = DataParallelGroup(group, blocks[0].device, timedelta(seconds=group_timeout_seconds))
        if self.replicas.count > 1 and not isinstance(chosen, (SGDUpdate, AdamWUpdate)):
            raise InputError(
                f"update={type(chosen).__name__} with a group of {self.replicas.count} ranks, each of which updates a share of each "
                "parameter's elements; give 'sgd' or 'adamw', which look at one element at a time"
            )
        with self.replicas.guarded():
            for each in blocks:
                part = RecordOptimizer(self, each, self._by_param(), None if window is None else parse_bytes(window))
                if part.params:
                    self._chains.append(part)
            self._agree()
        for part in self._chains:
            part.enter()

    def _agree(self) -> None:
        """Make sure that all ranks begin with the same.

        Raises:
            InputError: they do not.
        """
        if self.replicas.count == 1:
            return
        own = self._own()
        asked = (
            self.two_phase,
            self.max_norm,
            self.backend,
            self.loss_scale.value,
            self.settings(),
            *(part.asked() for part in self._chains),
        )
        self.replicas.agree(asked, "give all of them the same model, the same settings, and weights that were updated as often")
        digest = hashlib.sha256()
        for part in self._chains:
            part.hash_weights(digest)
        for param in (p for group in self.param_groups for p in group["params"] if id(p) not in own):
            digest.update(param.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self.replicas.agree(digest.digest(), "their weights; seed all ranks alike, or load one checkpoint on all of them")

    def settings(self) -> list[list[tuple[str, str]]]:
        """Learning rates and so on of all groups, as text."""
        return [sorted((name, repr(value)) for name, value in group.items() if name != "params") for group in self.param_groups]

    def together(self) -> AbstractContextManager[None]:
        """A context for whole steps on several ranks: what raises inside, be it in the forward pass, ends the step on all of them at once.

        Without it a failure outside of ``backward`` and ``step`` is noticed by the others when the time is over.

        Raises:
            RankError: another rank failed.
        """
        return self.replicas.guarded()

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
            RankError: another rank failed, or does not answer. The weights are as they were, and all gradients are dropped.
            SourceError: a file cannot be written; the weights are as they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.replicas.guarded():
            self._refuse_sparse()
        try:
            with self.replicas.guarded():
                others = self._others()
                grads = [param.grad for param, _ in others]
                if self.two_phase:
                    for part in self._chains:
                        part.check()
                is_finite = self.loss_scale.take_out(grads) and all(part.is_finite for part in self._chains)
                is_finite = all(all(found) for found in self.replicas.numbers([float(is_finite)]))
                factor = self._clipping(grads) if is_finite else 1.0
                if is_finite:
                    if self.two_phase:
                        for part in self._chains:
                            part.sweep(factor)
                    self.replicas.settle()
                    for part in self._chains:
                        part.commit()
        except BaseException:
            for part in self._chains:
                part.undo()
            if self.replicas.count > 1:
                self.zero_grad()  # some may be means already, and others not
            raise
        self.last_step_skipped = not is_finite
        for param, group in others:
            grad, param.grad = param.grad, None
            assert grad is not None
            if is_finite:
                if factor < 1.0:
                    grad.mul_(factor)
                self.update_one(param, grad, group)
            del grad
        for part in self._chains:
            part.drop()
        self.loss_scale.follow(is_finite)
        return loss

    def _own(self) -> set[int]:
        """The parameters that are streamed."""
        return {id(param) for part in self._chains for param in part.params.values()}

    def _refuse_sparse(self) -> None:
        """
        Raises:
            InputError: a gradient is sparse.
        """
        grads = [p.grad for group in self.param_groups for p in group["params"] if id(p) not in self._own()]
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            raise InputError("a gradient is sparse; in-place updates take dense ones (sparse=False for the embedding)")

    def _others(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """The parameters that are not streamed and have gradients, with their groups; the gradients are means over all ranks."""
        own = self._own()
        found = [(p, group) for group in self.param_groups for p in group["params"] if id(p) not in own]
        on_ranks = self.replicas.numbers([0.0, *(float(p.grad is not None) for p, _ in found)])
        is_used = [any(has) for has in zip(*(has[1:] for has in on_ranks), strict=True)]
        found = [each for each, used in zip(found, is_used, strict=True) if used]
        for param, _ in found:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        self.replicas.average([param.grad for param, _ in found if param.grad is not None])
        return found

    def update_one(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update an ordinary parameter; one in half precision through an fp32 copy.

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
        """Drop what is not committed, and leave the repetitions without an optimizer."""
        self.zero_grad()
        for part in self._chains:
            part.leave()
        self._chains = []

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's form, that of streamed blocks stacked. Its tensors are views of the store until the next step.

        A dynamic loss scale is in it as ``"loss_scale"``, which ``torch.optim`` ignores.

        On several ranks all of them call it together, and each is given all of the state, in the host's memory.
        """
        with self.replicas.guarded():
            for part in self._chains:
                for name, param in part.params.items():
                    if part.num_updates[name]:
                        self.state[param] = part.state_of(name)
        try:
            found = super().state_dict()
            scale = self.loss_scale.state_dict()
            return {**found, "loss_scale": scale} if scale else found
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
        for part in self._chains:
            part.groups = self._by_param()
        own = self._own()
        for part in self._chains:
            part.load({name: found.get(id(param), {}) for name, param in part.params.items()})
        for param in params:
            if id(param) not in own and id(param) in found:
                dtype = torch.float32 if param.dtype in HALF_DTYPES else param.dtype
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
        squares += chain.from_iterable(self.replicas.numbers([part.square_norm for part in self._chains]))
        return min(1.0, self.max_norm / (math.sqrt(math.fsum(squares)) + 1e-6))


def _streamed_parts(model: nn.Module) -> list[StreamedBlocks | StreamedParameters]:
    """The parts of a model that stream their weights: repetitions, and compiled models."""
    found: list[StreamedBlocks | StreamedParameters] = []
    for module in model.modules():
        if isinstance(module, Repeat) and module.streamed is not None:
            found.append(module.streamed)
        engine = getattr(module, "_sft_engine", None)
        parameters = StreamedParameters.known(module) if engine is None else engine.stream_weights()
        if parameters is not None and parameters not in found:
            found.append(parameters)
    return found


def _group_per_parameter(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group once for each of its parameters."""
    return [group] * len(group["params"])
