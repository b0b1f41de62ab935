"""Where ranks meet: a part of torchrun's store that no earlier start of theirs has written to.

torchrun keeps its store when it starts ranks again, and with it the addresses of processes that are gone; a count of restarts, which each
machine keeps for itself, does not tell one start from another (https://github.com/pytorch/pytorch/issues/135712). So the first rank draws
a name for this start, and the others take a name only when the first has confirmed that it saw *them*: each writes a word of its own
under the name that it found, and waits until the first rank has repeated it. A name of an earlier start repeats other words.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sft.errors import RankError

__all__ = ["connect_ranks", "rendezvous_ranks"]

_POLL_SECONDS = 0.02


def connect_ranks(rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Start ``torch.distributed`` (gloo) among the processes that torchrun started, for the first time or again.

    Raises:
        RankError: they do not find each other.
    """
    from torch.distributed.rendezvous import rendezvous  # not there in every build of torch

    try:
        store, _, _ = next(iter(rendezvous("env://", rank, num_ranks, timeout=timeout)))
        own = dist.distributed_c10d.PrefixStore(f"sft/{rendezvous_ranks(store, rank, num_ranks, timeout)}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=num_ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # DistError and its like; a variable of the environment that is missing
        if isinstance(error, RankError):
            raise
        raise RankError(f"rank {rank} of {num_ranks} cannot connect to the others: {error}. Start all of them with torchrun.") from error


def rendezvous_ranks(store: Any, rank: int, num_ranks: int, timeout: timedelta) -> str:
    """The name of this start, on all ranks.

    Args:
        store: a ``torch.distributed.Store`` that all ranks share, with whatever earlier starts have left in it.
        rank: this one.
        num_ranks: all.
        timeout: how long to wait for the others.

    Raises:
        RankError: ranks have not come.
    """
    own, late = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("sft/start", own)
        missing = list(range(1, num_ranks))
        while missing := [other for other in missing if not store.check([f"sft/{own}/here/{other}"])]:
            _wait(late, f"ranks {missing} have not come within {timeout}")
        store.set(f"sft/{own}/seen", json.dumps({str(other): _text(store, f"sft/{own}/here/{other}") for other in range(1, num_ranks)}))
        return own
    name = ""
    while True:
        if store.check(["sft/start"]) and _text(store, "sft/start") != name:
            name = _text(store, "sft/start")
            store.set(f"sft/{name}/here/{rank}", own)
        if name and store.check([f"sft/{name}/seen"]) and json.loads(_text(store, f"sft/{name}/seen")).get(str(rank)) == own:
            return name
        _wait(late, f"rank 0 has not come within {timeout}")


def _text(store: Any, key: str) -> str:
    return bytes(store.get(key)).decode()


def _wait(late: float, problem: str) -> None:
    if time.monotonic() > late:
        raise RankError(f"{problem}. Find out why, and start all ranks again.")
    time.sleep(_POLL_SECONDS)
