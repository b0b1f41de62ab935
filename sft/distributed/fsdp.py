"""Models whose weights are sharded by ``torch.distributed.fsdp.fully_shard`` (FSDP2).

FSDP gathers the weights of a module in a hook before its forward, and brings gradients to the shards when a backward pass ends. A compiled
model does not call its submodules, so their hooks never run; the root's do, around each call. What is missing is done here with FSDP's own
public ``unshard`` and ``reshard``: all weights are whole during a call, and again during its backward pass. The rest is FSDP's: the root's
hook on the outputs begins its backward pass, and at the end of that FSDP reduces the gradients of every group, with its own divisors, over
its own meshes. Where gradients are equal on all ranks already, as with a mesh of ours, a mean of them changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sft.analysis.frontend.trace_context import is_sharded
from sft.common.errors import InputError, UnsupportedError

__all__ = ["ShardSizes", "ShardedWeights", "local_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSizes:
    """Bytes of one sharded parameter.

    Attributes:
        shard_bytes: what this rank keeps of it, padding included.
        whole_bytes: the gathered parameter, padding included.
        message_bytes: what gathering it, or reducing its gradient, holds besides.
    """

    shard_bytes: int
    whole_bytes: int
    message_bytes: int


class ShardedWeights:
    """The sharded weights of a model.

    Args:
        model: the root of what ``fully_shard`` was applied to.

    Raises:
        UnsupportedError: weights are sharded in a way that cannot be followed exactly, or inside the budget.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._parts: list[Any] = [module for module in model.modules() if _is_fsdp(module)]
        for part in self._parts:
            part.reshard()
        owners: dict[int, Any] = {}
        for part in self._parts:  # from the root down: the innermost has the last word
            owners.update((id(p), part._get_fsdp_state()) for p in part.parameters() if is_sharded(p))
        params = {name: p for name, p in model.named_parameters() if is_sharded(p)}
        self._refuse(params, owners)
        self.sizes = {name: _shard_sizes(p) for name, p in params.items()}
        self._message_bytes: dict[int, int] = {}  # of each group of FSDP
        for name, p in params.items():
            group = id(owners[id(p)])
            self._message_bytes[group] = self._message_bytes.get(group, 0) + self.sizes[name].message_bytes
        self._shards: list[Any] = []
        self._is_called = False
        self._failure = ""

    @classmethod
    def of(cls, model: nn.Module) -> ShardedWeights | None:
        """The sharded weights of a model, None where there are none.

        Raises:
            UnsupportedError: they cannot be followed.
        """
        is_any = any(map(_is_fsdp, model.modules())) or any(map(is_sharded, model.parameters()))
        return cls(model) if is_any else None

    def resident_bytes(self, *, holds_gradients: bool) -> int:
        """Bytes on the device for sharded parameters: shards and their gradients, old and new ones; whole copies; the largest message.

        Args:
            holds_gradients: whether whole gradients wait for more of them (``set_requires_gradient_sync(False)``).
        """
        total = max(self._message_bytes.values(), default=0)
        for name, sizes in self.sizes.items():
            needs_grad = self._model.get_parameter(name).requires_grad
            total += sizes.shard_bytes * (3 if needs_grad else 1) + sizes.whole_bytes * (2 if needs_grad and holds_gradients else 1)
        return total

    def holds_gradients(self) -> bool:
        """Whether whole gradients of an earlier backward pass wait for those of the next."""
        return any(p.grad is not None and not is_sharded(p) for p in map(self._model.get_parameter, self.sizes))

    @contextmanager
    def calling(self) -> Iterator[None]:
        """What a call of the model runs in: its weights are whole inside.

        Raises:
            InputError: an earlier backward pass failed, and this version of FSDP cannot go on after that.
        """
        if self._failure:
            raise InputError(self._failure)
        for part in self._parts:
            part.reshard()  # what is whole since a call without a backward pass may be out of date
        self._shards = [self._model.get_parameter(name) for name in self.sizes]
        self._gather()
        self._is_called = True
        try:
            yield
        except BaseException:
            self._start_anew()
            raise
        finally:
            self._is_called = False
        for part in self._parts:
            if part is not self._model:  # the root's own hook has done what it was asked to
                part.reshard()

    def check_called(self) -> None:
        """Whether this is inside of :meth:`calling`.

        Raises:
            InputError: it is not.
        """
        if not self._is_called:
            raise InputError("fully_shard's hooks, which gather the weights, run around net(x) and not around net.forward(x); call net(x)")

    def watched(self) -> Callable[[], AbstractContextManager[None]]:
        """What the backward pass of this call is to run in."""
        return partial(self._differentiating, self._shards, _versions(self._shards))

    @contextmanager
    def _differentiating(self, shards: list[Any], versions: list[tuple[int, int]]) -> Iterator[None]:
        """The weights are whole inside.

        Raises:
            RuntimeError: they are not those of the call, as autograd says of whole ones.
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
            self._start_anew()
            raise

    def _gather(self) -> None:
        """Make all weights whole.

        Raises:
            InputError: FSDP was told not to.
        """
        for part in self._parts:
            part.unshard()
        missing = [name for name in self.sizes if is_sharded(self._model.get_parameter(name))]
        if missing:
            raise InputError(
                f"{', '.join(missing)}: still in shards; a compiled model needs all weights in both passes, "
                "leave out set_unshard_in_backward(False)"
            )

    def _start_anew(self) -> None:
        """After a failure FSDP would wait for the end of a pass that is over."""
        if hasattr(self._model, "reset_iter_state"):
            self._model.reset_iter_state()
        else:
            self._failure = (
                f"a step of this model failed, and fully_shard of torch {torch.__version__} cannot go on after that; "
                "start again from the last checkpoint"
            )

    def _refuse(self, params: dict[str, Any], owners: dict[int, Any]) -> None:
        """
        Raises:
            UnsupportedError: these weights cannot be followed.
        """
        name = type(self._model).__name__
        problems = []
        if self._parts and not _is_fsdp(self._model):
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
        policies = [(path, part._get_fsdp_state()._mp_policy) for path, part in self._model.named_modules() if _is_fsdp(part)]
        problems += [
            f"{path or name}: {policy} casts where modules begin and end, which do not run; use torch.autocast, and leave mp_policy out"
            for path, policy in policies
            if any(dtype is not None for dtype in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype))
        ]
        if problems:
            raise UnsupportedError(problems)


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of what this rank has of a tensor."""
    value: Any = tensor
    own = value.to_local() if is_sharded(tensor) else value
    return int(own.numel() * own.element_size())


def _versions(shards: list[Any]) -> list[tuple[int, int]]:
    """What changes when the shards do, by whichever of their two names."""
    return [(shard._version, shard.to_local()._version) for shard in shards]


def _is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded model has loaded it
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _shard_sizes(param: Any) -> ShardSizes:
    shard_bytes = int(param.to_local().untyped_storage().nbytes())
    shards = [(place.dim, param.device_mesh.size(dim)) for dim, place in enumerate(param.placements) if place.is_shard()]
    count = shards[0][1] if shards else 1
    # Along other dimensions than the first, parts are put together from a second copy.
    copies = 2 if shards and shards[0][0] != 0 else 1
    return ShardSizes(shard_bytes=shard_bytes, whole_bytes=shard_bytes * count, message_bytes=shard_bytes * count * copies)
