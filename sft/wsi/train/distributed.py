"""Distributed training: rendezvous of the ranks, distribution of slides, and sums of gradients.

Ranks form *replicas*, each with slides of its own, of *bands*, which share one slide. The slides of a group are scattered round-robin over
the replicas, and the results are gathered in the order of a single process.

All messages use one transport of the program (`sft.distributed.process_transport`), from host memory. A failing rank sends its error to
the others, and all of them fail with a :class:`sft.common.errors.RankError`. Sums are taken in the order of the replicas, so all ranks
have the same bits. Messages other than gradients are pickled; all ranks are processes of one program, started by one user.

Rendezvous uses a prefix of torchrun's store that no earlier start has written to. torchrun keeps its store when it restarts ranks, and
with it the addresses of dead processes. The count of restarts is local to a machine and does not identify a start
(https://github.com/pytorch/pytorch/issues/135712). So the first rank draws a name for this start. Each other rank writes a nonce under the
name that it reads, and accepts the name when the first rank has repeated the nonce. A name of an earlier start repeats other nonces.
"""

from __future__ import annotations

import json
import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sft.common.errors import InputError, RankError
from sft.distributed.all_reduce import DenseBuffer, all_reduce_buffers
from sft.distributed.mesh import LiveMesh, MeshShape
from sft.distributed.rank_context import RankContext
from sft.distributed.transport import RankGroup
from sft.wsi.config import RanksConfig
from sft.wsi.run.world import World

__all__ = ["SINGLE_RANK", "Ranks", "SingleRank", "World", "connect_ranks", "joined", "rendezvous_ranks"]

_POLL_SECONDS = 0.02


def connect_ranks(rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Start ``torch.distributed`` (gloo) among the processes that torchrun started, for the first time or again.

    Raises:
        RankError: they do not find each other.
    """
    from torch.distributed.rendezvous import rendezvous  # not there in every build of torch

    try:
        store, _, _ = next(iter(rendezvous("env://", rank, num_ranks, timeout=timeout)))
        start_store = dist.distributed_c10d.PrefixStore(f"sft/{rendezvous_ranks(store, rank, num_ranks, timeout)}", store)
        dist.init_process_group("gloo", store=start_store, rank=rank, world_size=num_ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # DistError and its like; a variable of the environment that is missing
        if isinstance(error, RankError):
            raise
        raise RankError(f"rank {rank} of {num_ranks} cannot connect to the others: {error}. Start all of them with torchrun.") from error


def rendezvous_ranks(store: Any, rank: int, num_ranks: int, timeout: timedelta) -> str:
    """Name of this start, equal on all ranks.

    Args:
        store: a ``torch.distributed.Store`` that all ranks share, with the entries of earlier starts.
        rank: of this process.
        num_ranks: number of ranks.
        timeout: for the other ranks.

    Raises:
        RankError: ranks are missing.
    """
    nonce, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("sft/start", nonce)
        missing = list(range(1, num_ranks))
        while missing := [other for other in missing if not store.check([f"sft/{nonce}/here/{other}"])]:
            _wait(deadline, f"ranks {missing} have not come within {timeout}")
        store.set(f"sft/{nonce}/seen", json.dumps({str(other): _text(store, f"sft/{nonce}/here/{other}") for other in range(1, num_ranks)}))
        return nonce
    name = ""
    while True:
        if store.check(["sft/start"]) and _text(store, "sft/start") != name:
            name = _text(store, "sft/start")
            store.set(f"sft/{name}/here/{rank}", nonce)
        if name and store.check([f"sft/{name}/seen"]) and json.loads(_text(store, f"sft/{name}/seen")).get(str(rank)) == nonce:
            return name
        _wait(deadline, f"rank 0 has not come within {timeout}")


def _text(store: Any, key: str) -> str:
    return bytes(store.get(key)).decode()


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise RankError(f"{problem}. Find out why, and start all ranks again.")
    time.sleep(_POLL_SECONDS)


T = TypeVar("T")
#: All ranks, or those that share this rank's slide.
RankScope = Literal["all", "bands"]
#: Ranks with the same share of different slides, or all ranks.
SumScope = Literal["replicas", "all"]
_HOST = torch.device("cpu")


class Ranks(Protocol):
    """One rank among those of a run."""

    @property
    def shape(self) -> MeshShape:
        """Numbers of replicas and bands."""

    @property
    def rank(self) -> int:
        """This one; replica by replica, band by band."""

    @property
    def mesh(self) -> Any:
        """Mesh for ``sft.compile``: the ranks that share a slide; None for one rank per slide."""

    @property
    def timeout_seconds(self) -> float:
        """Timeout of a rank for another one."""

    def gathered(self, value: T, among: RankScope = "all") -> list[T]:
        """Everybody's value, in the order of the ranks."""

    def from_first(self, make: Callable[[], T]) -> T:
        """Value made by the first rank, broadcast to the others."""

    def add_up(self, parameters: Sequence[nn.Parameter], *, among: SumScope = "replicas") -> None:
        """Make each ``.grad`` the sum over replicas, or over all ranks; one that none of them has stays None."""

    def take_buffers(self, model: nn.Module) -> None:
        """Give the buffers of the first replica to all."""

    def use_device(self, device: str) -> None:
        """Let ``cuda`` be the device that is this rank's.

        Raises:
            InputError: this machine has fewer devices than ranks.
        """


class SingleRank:
    """The only rank.

    Args:
        mesh: to plan for. Default: `None`
    """

    shape, rank, timeout_seconds = MeshShape(), 0, 1800.0

    def __init__(self, mesh: tuple[int, int] | None = None) -> None:
        self.mesh = mesh

    def gathered(self, value: T, among: RankScope = "all") -> list[T]:
        return [value]

    def from_first(self, make: Callable[[], T]) -> T:
        return make()

    def add_up(self, parameters: Sequence[nn.Parameter], *, among: SumScope = "replicas") -> None:
        pass

    def take_buffers(self, model: nn.Module) -> None:
        pass

    def use_device(self, device: str) -> None:
        pass


SINGLE_RANK = SingleRank()


class _MultiRank:
    """One of several ranks.

    Each message is guarded on its own, in addition to :meth:`together`: when a rank dies, torchrun sends SIGTERM to the others at once.
    They identify the missing rank while the signal is deferred.

    Args:
        world: the processes.
        settings: of the run.
    """

    def __init__(self, world: World, settings: RanksConfig) -> None:
        self.shape = MeshShape(num_replicas=world.num_ranks // settings.bands, num_bands=settings.bands)
        self.rank, self.timeout_seconds = world.rank, settings.timeout_seconds
        self._world = world
        self.mesh: Any = None
        if settings.bands > 1:
            from torch.distributed.device_mesh import init_device_mesh

            # The mesh only states the position of each rank; messages are sent from the device of the weights.
            extents = (self.shape.num_replicas, self.shape.num_bands)
            self.mesh = init_device_mesh("cpu", extents, mesh_dim_names=("replica", "band"))["band"]
        replica, band = divmod(world.rank, settings.bands)
        ranks = tuple(range(world.num_ranks))
        live = LiveMesh(shape=self.shape, replica=replica, band=band, ranks=ranks, timeout=timedelta(seconds=settings.timeout_seconds))
        self._rank_context = RankContext(live, _HOST)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context that fails on all ranks if it fails on one, with a barrier at its end."""
        with self._rank_context.transport.propagate_failures():
            self.gathered(None)  # all connections are opened here, so that the death of a rank is noticed at once
            yield
            self.gathered(None)

    def gathered(self, value: T, among: RankScope = "all") -> list[T]:
        transport, over = self._rank_context.transport, _over(among)
        message = _bytes_of(value)
        with transport.propagate_failures():
            sizes = [int(size) for size in transport.all_gather(over, torch.tensor([message.numel()], device="cpu"))]
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
            padded[: message.numel()] = message
            messages = transport.all_gather(over, padded)
        return [_value_of(each[:size]) for each, size in zip(messages, sizes, strict=True)]

    def from_first(self, make: Callable[[], T]) -> T:
        value: T = self._broadcast("mesh", make() if self.rank == 0 else None)
        return value

    def add_up(self, parameters: Sequence[nn.Parameter], *, among: SumScope = "replicas") -> None:
        if among == "replicas" and self.shape.num_replicas == 1:
            return  # the gradients of the bands are sums already
        present = self.gathered([parameter.grad is not None for parameter in parameters])
        staged: list[tuple[Tensor, Tensor]] = []
        for number, parameter in enumerate(parameters):
            if any(theirs[number] for theirs in present):
                if parameter.grad is None:  # this rank had no slide, or no tile
                    parameter.grad = torch.zeros_like(parameter)
                # Contiguous: the ranks' gradients may have different layouts.
                staged.append((parameter.grad, parameter.grad.to(_HOST).contiguous()))
        sums = [DenseBuffer(handle=host, num_elements=host.numel(), dtype=host.dtype) for _, host in staged]
        with self._rank_context.transport.propagate_failures():
            all_reduce_buffers(self._rank_context.machine(_HOST), sums, "replica" if among == "replicas" else "mesh", "parameters")
        for gradient, host in staged:
            gradient.copy_(host)

    def take_buffers(self, model: nn.Module) -> None:
        if self.shape.num_replicas == 1:
            return
        buffers = dict(model.named_buffers())
        first = self._broadcast("replica", {name: buffer.cpu() for name, buffer in buffers.items()})
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(first[name])

    def use_device(self, device: str) -> None:
        if torch.device(device) != torch.device("cuda") or not torch.cuda.is_available():
            return  # the CPU, or a device that was chosen by its number
        count = torch.cuda.device_count()
        if self._world.num_local > count:
            raise InputError(
                f"{self._world.num_local} ranks on a machine with {count} CUDA device(s): start at most {count} (--nproc-per-node {count})"
            )
        torch.cuda.set_device(self._world.local_rank)

    def _broadcast(self, over: RankGroup, value: Any) -> Any:
        """The value of a group's first member, on all of them."""
        transport = self._rank_context.transport
        message = _bytes_of(value)
        size = torch.tensor([message.numel()], device="cpu")
        with transport.propagate_failures():
            transport.broadcast(over, size)
            if message.numel() != int(size):
                message = torch.empty(int(size), dtype=torch.uint8, device="cpu")
            transport.broadcast(over, message)
        return _value_of(message)


@contextmanager
def joined(settings: RanksConfig, *, plans_only: bool = False) -> Iterator[Ranks]:
    """Context of this process among those of torchrun; a single process otherwise.

    A failure of one rank inside the context fails on all of them.

    Args:
        settings: of the run.
        plans_only: True if one process may plan for all ranks of a slide, without running. Default: `False`

    Raises:
        InputError: fewer ranks than bands.
        RankError: another rank failed, or is missing.
    """
    world = World.here()
    if world.num_ranks % settings.bands and not (plans_only and world.num_ranks == 1):
        started = "one process" if world.num_ranks == 1 else f"{world.num_ranks} processes"
        raise InputError(
            f"ranks.bands {settings.bands}, and {started}: start a multiple of {settings.bands} with torchrun (--nproc-per-node), or "
            "change ranks.bands"
        )
    if world.num_ranks == 1:
        yield SingleRank((1, settings.bands)) if settings.bands > 1 else SINGLE_RANK
        return
    if not (dist.is_available() and dist.is_gloo_available()):
        raise InputError(f"{world.num_ranks} processes, and this build of torch has no gloo to connect them: start one")
    is_ours = not dist.is_initialized()
    if is_ours:
        connect_ranks(world.rank, world.num_ranks, timedelta(seconds=settings.timeout_seconds))
    ranks = _MultiRank(world, settings)
    with ranks.together():
        yield ranks
    if is_ours:
        dist.destroy_process_group()


def _over(among: RankScope) -> RankGroup:
    return "mesh" if among == "all" else "band"


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _value_of(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
