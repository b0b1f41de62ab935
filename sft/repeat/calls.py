"""Instructions of repeated blocks in the programs of a compiled model (`costs`): the function that each pass calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.common.torch_internals import storage_id
from sft.kernels.rng.philox import KeyWord, key_of, philox4x32, seed_tensor, seed_word
from sft.repeat.costs import PassKind, RepeatSite
from sft.repeat.executor import Environment, Executor, StackedWeightAccess
from sft.solvers.schedule import activation_name, grad_name
from sft.torch_runtime.machine import TorchMachine

__all__ = ["BackwardPass", "ForwardPass", "InferencePass", "RepeatResiduals", "pass_function", "site_seed"]

Tensors = Sequence[Tensor]


@dataclass(slots=True)
class RepeatResiduals:
    """Residuals of repeated blocks between their forward and their backward pass.

    Attributes:
        environment: activations and saved values, without the input and the output of all blocks.
        external_storages: the storages of these two; blocks may have saved views of them.
    """

    environment: Environment
    external_storages: tuple[int, ...]

    def fork(self) -> RepeatResiduals:
        """The same tensors, for a backward pass that is not the last one."""
        return RepeatResiduals(self.environment.copy(), self.external_storages)

    @property
    def buffers(self) -> list[Tensor]:
        """One tensor for each storage."""
        values = [
            *self.environment.values.values(),
            *(value for residuals in self.environment.saved.values() for value in residuals.values.values()),
        ]
        tensors = [value for value in values if isinstance(value, Tensor)]
        by_storage = {storage_id(tensor): tensor for tensor in tensors}
        return [tensor for storage, tensor in by_storage.items() if storage not in self.external_storages]


@dataclass(frozen=True, eq=False, slots=True)
class _PassFunction:
    """One pass over all blocks. Parameters and buffers are lists, in the order of the block's names."""

    call: RepeatSite

    def _executor(self, access: StackedWeightAccess, seed: Tensor | None) -> Executor:
        repeated = self.call.repeated
        return Executor(
            programs=self.call.programs,
            machine=TorchMachine(repeated.device),
            access=access,
            seed=0 if seed is None else site_seed(seed_word(seed), self.call.site),
            wants_input_grad=self.call.wants_input_grad,
            trace=repeated.trace,
        )

    def _forward_access(self, params: Tensors, fixed: Tensors, shared: Tensors, updated: Tensors) -> StackedWeightAccess:
        repeated = self.call.repeated
        buffers = dict(zip((*repeated.fixed, *repeated.updated), (*fixed, *updated), strict=True))
        return StackedWeightAccess(
            dict(zip(repeated.params, params, strict=True)),
            buffers,
            dict(zip(repeated.shared, shared, strict=True)),
            updated=repeated.updated,
        )


class InferencePass(_PassFunction):
    """All blocks in turn with no activations kept; returns the output and, if any, the buffers' next values."""

    def __call__(self, x: Tensor, params: Tensors, fixed: Tensors, shared: Tensors, updated: Tensors, seed: Tensor | None) -> Any:
        access = self._forward_access(params, fixed, shared, updated)
        out = self._executor(access, seed).infer(x, self.call.plan.num_blocks)
        nexts = [access.next_values[name] for name in self.call.repeated.updated]
        return (out, *nexts) if nexts else out


class ForwardPass(_PassFunction):
    """The schedule up to the loss; returns the output, a :class:`RepeatResiduals`, and the buffers' next values."""

    def __call__(
        self, x: Tensor, params: Tensors, fixed: Tensors, shared: Tensors, updated: Tensors, seed: Tensor | None
    ) -> tuple[Any, ...]:
        plan, access = self.call.plan, self._forward_access(params, fixed, shared, updated)
        environment = Environment({activation_name(0): x})
        self._executor(access, seed).run(plan.operations[: plan.turn], environment, is_first=True)
        out = environment.values.pop(activation_name(plan.num_blocks))
        environment.values.pop(activation_name(0), None)
        residuals = RepeatResiduals(environment, (storage_id(x), storage_id(out)))
        return (out, residuals, *(access.next_values[name] for name in self.call.repeated.updated))


class BackwardPass(_PassFunction):
    """The schedule after the loss; returns the gradient of the input, if needed, and adds to those of the parameters (``sums``)."""

    def __call__(
        self,
        gradient: Tensor,
        x: Tensor,
        out: Tensor | None,
        residuals: RepeatResiduals,
        params: Tensors,
        fixed: Tensors,
        shared: Tensors,
        sums: Tensors,
        seed: Tensor | None,
    ) -> Tensor | None:
        repeated, plan = self.call.repeated, self.call.plan
        access = StackedWeightAccess(
            dict(zip(repeated.params, params, strict=True)),
            dict(zip(repeated.fixed, fixed, strict=True)),
            dict(zip(repeated.shared, shared, strict=True)),
            sums=dict(zip(self.call.programs.with_gradient, sums, strict=True)),
        )
        environment = residuals.environment
        environment.values |= {activation_name(0): x, grad_name(plan.num_blocks): gradient}
        if out is not None:
            environment.values[activation_name(plan.num_blocks)] = out
        self._executor(access, seed).run(plan.operations[plan.turn + 1 :], environment, is_first=False)
        return environment.values.pop(grad_name(0), None)


def pass_function(call: RepeatSite, kind: PassKind) -> Callable[..., Any]:
    """The function of a pass."""
    kinds: dict[PassKind, type[Any]] = {"inference": InferencePass, "forward": ForwardPass, "backward": BackwardPass}
    function: Callable[..., Any] = kinds[kind](call)
    return function


def site_seed(seed: KeyWord, site: int) -> KeyWord:
    """A seed for one repetition, so that masks in its blocks are independent of the model's other masks."""
    words = [seed_tensor(word, seed.device if isinstance(seed, Tensor) else torch.device("cpu")) for word in (site, 0, 0, 0x5F7)]
    low, high, _, _ = philox4x32((words[0], words[1], words[2], words[3]), key_of(seed))
    return seed_word(high << 32 | low)
