"""The link of running processes, and what becomes of it when one of them fails.

The link is a process group of its own, made from the store that all ranks of the program share. When a rank fails it writes down why, and
closes the link. Whoever waits for it, or comes to wait later, finds the connection closed, reads the cause in the store, and fails with a
:class:`sft.errors.RankError` that names the rank and the cause; closing its own link in turn, so that within one hop after another nobody
waits. A process that died without a word has closed its connections, too; one that hangs is noticed when the timeout is over. After a
failure the next call makes a new link, which works if all ranks are still there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sft.bands.comm import Over, Traffic
from sft.bands.machines import dense
from sft.errors import RankError
from sft.walk.machine import Handle

__all__ = ["ProcessLink"]

#: How long a rank looks for a cause that another has not written down yet.
_PATIENCE = timedelta(seconds=2)
_POLL_SECONDS = 0.02


class _LinkBroken(Exception):
    """A message could not be sent or received."""

    def __init__(self, rank: int, why: str) -> None:
        self.rank = rank
        super().__init__(why)


class ProcessLink:
    """Swaps with the other ranks of a mesh.

    Args:
        ranks: the global ranks of the mesh.
        members: for each group of ours the members, as places in ``ranks``, in order.
        timeout: how long to wait for another rank.
        device: where the tensors are.
        name: of this link among those of the program; the same on all ranks.
    """

    def __init__(self, ranks: tuple[int, ...], members: dict[Over, tuple[int, ...]], timeout: timedelta, device: torch.device, name: str):
        self.ranks, self.members, self.timeout, self.device, self.name = ranks, members, timeout, device, name
        self.traffic = Traffic()
        self._place = ranks.index(dist.get_rank())
        self._group: Any = None
        self._generation = 0

    def swap(self, over: Over, send: tuple[int, Handle] | None, receive: tuple[int, Handle] | None) -> None:
        failure = self._swapped(over, send, receive)
        if failure is not None:
            raise failure

    def _swapped(self, over: Over, send: tuple[int, Handle] | None, receive: tuple[int, Handle] | None) -> _LinkBroken | None:
        """Swap; what went wrong is returned, so that no frame of a traceback keeps the connections open."""
        group, members = self._opened(), self.members[over]
        works = {}
        place = self._place
        try:
            for call, message in ((group.send, send), (group.recv, receive)):
                if message is not None:
                    place = members[message[0]]
                    works[call([dense(message[1])], place, 0)] = place
            for work in works:
                place = works[work]
                work.wait()
        except RuntimeError as error:
            return _LinkBroken(self.ranks[place], str(error))
        return None

    def broadcast(self, over: Over, tensor: torch.Tensor) -> None:
        """Fill a tensor with the first member's; a control message, which no plan counts."""
        members = self.members[over]
        me = members.index(self._place)
        for other in range(1, len(members)):
            if me == 0:
                self.swap(over, (other, tensor), None)
            elif me == other:
                self.swap(over, None, (0, tensor))

    def gathered(self, over: Over, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, in order; a control message."""
        members = self.members[over]
        count, me = len(members), members.index(self._place)
        found = [tensor if place == me else torch.empty_like(tensor) for place in range(count)]
        for distance in range(1, count):
            source = (me - distance) % count
            self.swap(over, ((me + distance) % count, tensor), (source, found[source]))
        return found

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Tell the other ranks about whatever goes wrong inside, and fail as they do when it goes wrong there.

        Raises:
            RankError: another rank failed.
        """
        try:
            yield
        except _LinkBroken as error:
            raise self._because_of(error) from error
        except RankError:
            raise
        except BaseException as error:
            self._close(f"rank {self.ranks[self._place]} failed: {type(error).__name__}: {error}")
            raise

    def _because_of(self, error: _LinkBroken) -> RankError:
        """What this rank says, which is what it has been told, or else whom it could not reach."""
        told = self._cause()
        cause = told or f"rank {error.rank} does not answer (it died, hangs, or lost its connection; limit {self.timeout}): {error}"
        self._close(cause)
        return RankError(
            f"{cause}. Nothing was updated on this rank ({self.ranks[self._place]}): no gradient, no buffer. Find the cause on the rank "
            "named, and start all ranks again from the last checkpoint, or call again where all of them are still there.",
            cause,
        )

    def _opened(self) -> Any:
        """The process group, made anew after a failure, once all ranks are there."""
        if self._group is None:
            store, started = self._store(), time.monotonic()
            store.set(f"ready/{self._place}", "1")
            missing = list(range(len(self.ranks)))
            while missing := [place for place in missing if not store.check([f"ready/{place}"])]:
                is_late = time.monotonic() - started > self.timeout.total_seconds()
                if store.check(["cause"]) or is_late:
                    raise _LinkBroken(self.ranks[missing[0]], "it has not come")
                time.sleep(_POLL_SECONDS)
            self._group = _new_group(store, self._place, len(self.ranks), self.timeout, self.device)
        return self._group

    def _store(self) -> Any:
        return dist.distributed_c10d.PrefixStore(f"sft/{self.name}/{self._generation}", dist.distributed_c10d._get_default_store())

    def _cause(self) -> str:
        """What a failing rank wrote down; empty where nobody did, or the store is gone."""
        try:
            store = self._store()
            store.wait(["cause"], _PATIENCE)
            return bytes(store.get("cause")).decode()
        except RuntimeError:  # DistError and its like
            return ""

    def _close(self, cause: str) -> None:
        """Write down why, once for all ranks, and close the connections."""
        with suppress(RuntimeError):  # the process that held the store may be gone; who waits for us sees the connection closed
            self._store().compare_set("cause", "", cause)
        group, self._group = self._group, None
        self._generation += 1
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()
        del group


def _new_group(store: Any, place: int, count: int, timeout: timedelta, device: torch.device) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, place, count, options)
    return dist.ProcessGroupGloo(store, place, count, timeout)
