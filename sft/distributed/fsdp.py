"""Models with weights sharded by ``torch.distributed.fsdp.fully_shard`` (FSDP2).

FSDP gathers the weights of a module in a hook before its forward, and reduces gradients to the shards when a backward pass ends. A compiled
model does not call its submodules, so their hooks do not run; the root's hooks run around each call. This module does the rest with FSDP's
public ``unshard`` and ``reshard``: all weights are gathered during a call, and again during its backward pass. FSDP does the remaining
work: the root's hook on the outputs starts its backward pass, and at the end of that FSDP reduces the gradients of every group, with its
own divisors, over its own meshes. Gradients that are equal on all ranks already, as with a mesh of this package, are unchanged by their
mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sft.analysis.frontend.trace_context import is_sharded
from sft.common.errors import InputError, UnsupportedError
from sft.common.torch_internals import fsdp_reset

__all__ = ["FLAT_SHARDS_MESSAGE", "ShardSizes", "ShardedWeights", "local_bytes", "refuse_late_shards"]

#: Reason and remedy for the wrapper of FSDP1, whose parameters are parts of one flat tensor.
FLAT_SHARDS_MESSAGE = (
    "FullyShardedDataParallel replaces the parameters by views of one flat tensor, which a compiled model does not find; shard the weights "
    "with torch.distributed.fsdp.fully_shard before sft.compile"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSizes:
    """Bytes of one sharded parameter.

    Attributes:
        shard_bytes: bytes of this rank's shard, including padding.
        gathered_bytes: bytes of the gathered parameter, including padding.
        message_bytes: temporary bytes of gathering it, or of reducing its gradient.
    """

    shard_bytes: int
    gathered_bytes: int
    message_bytes: int


class ShardedWeights:
    """The sharded weights of a model.

    Args:
        model: the root module of ``fully_shard``.

    Raises:
        UnsupportedError: the sharding cannot be reproduced exactly, or not within the budget.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._modules: list[Any] = [module for module in model.modules() if _is_fsdp(module)]
        for module in self._modules:
            module.reshard()
        owners: dict[int, Any] = {}
        for module in self._modules:  # from the root down: the innermost module owns its parameters
            owners.update((id(p), module._get_fsdp_state()) for p in module.parameters() if is_sharded(p))
        params = {name: p for name, p in model.named_parameters() if is_sharded(p)}
        self._refuse(params, owners)
        self.sizes = {name: _shard_sizes(p) for name, p in params.items()}
        self._message_bytes: dict[int, int] = {}  # by group of FSDP
        for name, p in params.items():
            group = id(owners[id(p)])
            self._message_bytes[group] = self._message_bytes.get(group, 0) + self.sizes[name].message_bytes
        self._shards: list[Any] = []
        self._is_called = False
        self._failure = ""

    @classmethod
    def of(cls, model: nn.Module) -> ShardedWeights | None:
        """The sharded weights of a model; None if it has none.

        Raises:
            UnsupportedError: the sharding is not supported.
        """
        is_any = any(map(_is_fsdp, model.modules())) or any(map(is_sharded, model.parameters()))
        return cls(model) if is_any else None

    def resident_bytes(self, *, holds_gradients: bool) -> int:
        """Device bytes of sharded parameters: shards, their old and new gradients, gathered copies, and the largest message.

        Args:
            holds_gradients: True if complete gradients accumulate over calls (``set_requires_gradient_sync(False)``).
        """
        total = max(self._message_bytes.values(), default=0)
        for name, sizes in self.sizes.items():
            needs_grad = self._model.get_parameter(name).requires_grad
            total += sizes.shard_bytes * (3 if needs_grad else 1) + sizes.gathered_bytes * (2 if needs_grad and holds_gradients else 1)
        return total

    def holds_gradients(self) -> bool:
        """True if complete gradients of an earlier backward pass wait for the next one."""
        return any(p.grad is not None and not is_sharded(p) for p in map(self._model.get_parameter, self.sizes))

    @contextmanager
    def call_context(self) -> Iterator[None]:
        """Context of a call of the model: its weights are gathered inside.

        Raises:
            InputError: an earlier backward pass failed, and this version of FSDP cannot continue after that.
        """
        if self._failure:
            raise InputError(self._failure)
        for module in self._modules:
            module.reshard()  # weights gathered by a call without a backward pass may be outdated
        self._shards = [self._model.get_parameter(name) for name in self.sizes]
        self._gather()
        self._is_called = True
        try:
            yield
        except BaseException:
            self._reset_after_failure()
            raise
        finally:
            self._is_called = False
        for module in self._modules:
            if module is not self._model:  # the root's own hook has resharded it, if configured so
                module.reshard()

    def check_in_call(self) -> None:
        """Check that the caller runs inside the context of :meth:`call_context`.

        Raises:
            InputError: it does not.
        """
        if not self._is_called:
            raise InputError("fully_shard's hooks, which gather the weights, run around net(x) and not around net.forward(x); call net(x)")

    def backward_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Factory of the context of this call's backward pass."""
        return partial(self._backward, self._shards, _versions(self._shards))

    @contextmanager
    def _backward(self, shards: list[Any], versions: list[tuple[int, int]]) -> Iterator[None]:
        """Context of a backward pass: the weights are gathered inside.

        Raises:
            RuntimeError: the weights have changed since the call, as autograd reports for plain weights.
        """
        try:
            if versions != _versions(shards):
                raise RuntimeError(
                    "the sharded parameters of the compiled model were changed between its forward and its backward pass, which needs "
                    "those of the forward; step the optimizer after backward"
                )
            self._gather()
            yield
        except BaseException:
            self._reset_after_failure()
            raise

    def _gather(self) -> None:
        """Gather all weights.

        Raises:
            InputError: FSDP is configured not to.
        """
        for module in self._modules:
            module.unshard()
        missing = [name for name in self.sizes if is_sharded(self._model.get_parameter(name))]
        if missing:
            raise InputError(
                f"{', '.join(missing)}: still sharded; a compiled model needs all weights in both passes, "
                "leave out set_unshard_in_backward(False)"
            )

    def _reset_after_failure(self) -> None:
        """Reset FSDP after a failure; otherwise it would wait for the end of the aborted pass."""
        reset = fsdp_reset(self._model)
        if reset is not None:
            reset()
        else:
            self._failure = (
                f"a step of this model failed, and fully_shard of torch {torch.__version__} cannot continue after that; "
                "start again from the last checkpoint"
            )

    def _refuse(self, params: dict[str, Any], owners: dict[int, Any]) -> None:
        """Refuse unsupported kinds of sharding.

        Raises:
            UnsupportedError: with the parameters and modules.
        """
        name = type(self._model).__name__
        problems = []
        if self._modules and not _is_fsdp(self._model):
            problems.append(f"{name}: parts are sharded, the model is not, and only its hooks run; call fully_shard(model) last, too")
        for path, p in params.items():
            placements = [str(type(place).__name__) for place in p.placements if not place.is_replicate()]
            if id(p) not in owners or placements not in (["Shard"], []):
                problems.append(
                    f"{path}: a DTensor of placements {tuple(p.placements)} that is not of fully_shard alone; shard it with that only"
                )
            elif p.device.type != p.device_mesh.device_type:
                problems.append(
                    f"{path}: its shard is kept on {p.device} (CPUOffloadPolicy), which no budget counts; leave offload_policy out"
                )
        policies = [(path, module._get_fsdp_state()._mp_policy) for path, module in self._model.named_modules() if _is_fsdp(module)]
        problems += [
            f"{path or name}: {policy} casts where modules begin and end, which do not run; use torch.autocast, and leave mp_policy out"
            for path, policy in policies
            if any(dtype is not None for dtype in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype))
        ]
        if problems:
            raise UnsupportedError(problems)


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of this rank's shard of a tensor, or of the tensor if it is not sharded."""
    value: Any = tensor
    local = value.to_local() if is_sharded(tensor) else value
    return int(local.numel() * local.element_size())


def _versions(shards: list[Any]) -> list[tuple[int, int]]:
    """Version counters of the shards, as DTensors and as local tensors; they change when the shards do."""
    return [(shard._version, shard.to_local()._version) for shard in shards]


def _is_fsdp(module: nn.Module) -> bool:
    """True if ``fully_shard`` was applied to the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded model has loaded it
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _shard_sizes(param: Any) -> ShardSizes:
    """Sizes of a sharded parameter."""
    shard_bytes = int(param.to_local().untyped_storage().nbytes())
    shards = [(place.dim, param.device_mesh.size(dim)) for dim, place in enumerate(param.placements) if place.is_shard()]
    count = shards[0][1] if shards else 1
    # Shards along a dimension other than the first are assembled through a second copy.
    copies = 2 if shards and shards[0][0] != 0 else 1
    return ShardSizes(shard_bytes=shard_bytes, gathered_bytes=shard_bytes * count, message_bytes=shard_bytes * count * copies)


def refuse_late_shards(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse sharded parameters of a model that was compiled before it was sharded.

    Raises:
        InputError: a parameter is sharded.
    """
    if any(map(is_sharded, parameters)):
        raise InputError(
            "fully_shard sharded the weights after sft.compile, and nothing gathers them in a call; call it before sft.compile"
        )
