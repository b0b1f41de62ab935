"""The link of running processes, and what becomes of it when one of them fails.

The link is a process group of its own, made from the store that all ranks of the program share. When a rank fails it writes down why, and
closes the link. Whoever waits for it, or comes to wait later, finds the connection closed, reads the cause in the store, and fails with a
:class:`sft.common.errors.RankError` that names the rank and the cause; closing its own link in turn, so that within one hop after another
nobody waits. A process that died without a word has closed its connections, too; one that hangs is noticed when the timeout is over. After
a failure the next call makes a new link, which works if all ranks are still there.

Messages that are under way belong to the link: it alone holds on to what the backend calls their work, which keeps connections open, and
lets go of all of it when it closes. So a step that fails leaves no message behind that another step could take for its own.

gloo carries all topics over one group, told apart by their tags. With NCCL each topic has a communicator of its own, as what is posted to
one communicator runs in the order of posting, and what is posted together runs as one operation, so that two ranks that send to each
other do not wait for each other; waiting puts the wait on the current stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sft.common.errors import RankError
from sft.distributed.link import TOPICS, Message, RankGroup, RankTraffic, Topic
from sft.distributed.machines import memory_order_view

__all__ = ["ProcessTransport"]

#: How long a rank looks for a cause that another has not written down yet.
_CAUSE_WAIT = timedelta(seconds=2)
_POLL_SECONDS = 0.02


class _TransportError(Exception):
    """A message could not be sent or received."""

    def __init__(self, rank: int, why: str) -> None:
        self.rank = rank
        super().__init__(why)


class ProcessTransport:
    """Messages to and from the other ranks of a mesh.

    Args:
        ranks: the global ranks of the mesh.
        members: for each group of ours the members, as places in ``ranks``, in order.
        timeout: how long to wait for another rank.
        device: where the tensors are.
        name: of this link among those of the program; the same on all ranks.
    """

    def __init__(
        self, ranks: tuple[int, ...], members: dict[RankGroup, tuple[int, ...]], timeout: timedelta, device: torch.device, name: str
    ):
        self.ranks, self.members, self.timeout, self.device, self.name = ranks, members, timeout, device, name
        self.traffic = RankTraffic()
        self._place = ranks.index(dist.get_rank())
        self._groups: dict[Topic, Any] | None = None
        self._generation = 0
        self._under_way: dict[int, list[tuple[Any, int]]] = {}
        self._num_tickets = 0

    def post(self, over: RankGroup, topic: Topic, messages: Sequence[Message]) -> int:
        self._num_tickets += 1
        failure = self._posted(self._num_tickets, over, topic, messages)
        if failure is not None:
            raise failure
        return self._num_tickets

    def wait(self, ticket: int) -> None:
        failure = self._waited(ticket)
        if failure is not None:
            raise failure

    def _posted(self, ticket: int, over: RankGroup, topic: Topic, messages: Sequence[Message]) -> _TransportError | None:
        """Post; what went wrong is returned, so that no frame of a traceback keeps the connections open."""
        group, members = self._opened()[topic], self.members[over]
        place = self._place
        works: list[tuple[Any, int]] = []
        try:
            with _batched_p2p(group, self.device) as batch:
                for message in messages:
                    place = members[message.member]
                    call = group.send if message.is_sent else group.recv
                    works.append((call([memory_order_view(message.handle)], place, TOPICS.index(topic)), place))
            self._under_way[ticket] = works if batch.work is None else [(batch.work, place)]
        except RuntimeError as error:
            return _TransportError(self.ranks[place], str(error))
        return None

    def _waited(self, ticket: int) -> _TransportError | None:
        """Wait; what went wrong is returned, likewise."""
        place = self._place
        works = self._under_way.pop(ticket)
        try:
            for work, other in works:
                place = other
                work.wait()
        except RuntimeError as error:
            return _TransportError(self.ranks[place], str(error))
        return None

    def broadcast(self, over: RankGroup, tensor: torch.Tensor) -> None:
        """Fill a tensor with the first member's; a control message, which no plan counts."""
        members = self.members[over]
        me = members.index(self._place)
        for other in range(1, len(members)):
            if me in (0, other):
                self.wait(self.post(over, "control", [Message(0 if me else other, tensor, is_sent=me == 0)]))

    def gathered(self, over: RankGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, in order; a control message."""
        members = self.members[over]
        count, me = len(members), members.index(self._place)
        found = [tensor if place == me else torch.empty_like(tensor) for place in range(count)]
        for distance in range(1, count):
            target, source = (me + distance) % count, (me - distance) % count
            messages = [Message(target, tensor, is_sent=True), Message(source, found[source], is_sent=False)]
            self.wait(self.post(over, "control", messages))
        return found

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Tell the other ranks about whatever goes wrong inside, and fail as they do when it goes wrong there.

        Raises:
            RankError: another rank failed.
        """
        try:
            yield
        except _TransportError as error:
            raise self._error_from(error) from error
        except RankError:
            raise
        except BaseException as error:
            self._close(f"rank {self.ranks[self._place]} failed: {type(error).__name__}: {error}")
            raise

    def _error_from(self, error: _TransportError) -> RankError:
        """What this rank says, which is what it has been told, or else whom it could not reach."""
        told = self._cause()
        cause = told or f"rank {error.rank} does not answer (it died, hangs, or lost its connection; limit {self.timeout}): {error}"
        self._close(cause)
        return RankError(
            f"{cause}. Nothing was updated on this rank ({self.ranks[self._place]}): no gradient, no buffer. Find the cause on the rank "
            "named, and start all ranks again from the last checkpoint, or call again where all of them are still there.",
            cause,
        )

    def _opened(self) -> dict[Topic, Any]:
        """The process group of each topic, made anew after a failure, once all ranks are there."""
        if self._groups is None:
            store, started = self._store(), time.monotonic()
            store.set(f"ready/{self._place}", "1")
            missing = list(range(len(self.ranks)))
            while missing := [place for place in missing if not store.check([f"ready/{place}"])]:
                is_late = time.monotonic() - started > self.timeout.total_seconds()
                if store.check(["cause"]) or is_late:
                    raise _TransportError(self.ranks[missing[0]], "it has not come")
                time.sleep(_POLL_SECONDS)
            self._groups = _new_groups(store, self._place, len(self.ranks), self.timeout, self.device)
        return self._groups

    def _store(self) -> Any:
        return dist.distributed_c10d.PrefixStore(f"sft/{self.name}/{self._generation}", dist.distributed_c10d._get_default_store())

    def _cause(self) -> str:
        """What a failing rank wrote down; empty where nobody did, or the store is gone."""
        try:
            store = self._store()
            store.wait(["cause"], _CAUSE_WAIT)
            return bytes(store.get("cause")).decode()
        except RuntimeError:  # DistError and its like
            return ""

    def _close(self, cause: str) -> None:
        """Write down why, once for all ranks, and close the connections."""
        with suppress(RuntimeError):  # the process that held the store may be gone; who waits for us sees the connection closed
            self._store().compare_set("cause", "", cause)
        self._under_way.clear()
        groups, self._groups = self._groups, None
        self._generation += 1
        for group in {id(group): group for group in (groups or {}).values()}.values():
            if hasattr(group, "shutdown"):
                group.shutdown()


class _MessageBatch:
    """What was posted together as one operation, where the backend does that."""

    work: Any = None


@contextmanager
def _batched_p2p(group: Any, device: torch.device) -> Iterator[_MessageBatch]:
    """Post everything inside as one operation, with NCCL (whose groups, made directly, are told no device)."""
    batch = _MessageBatch()
    if device.type != "cuda":
        yield batch
        return
    group._start_coalescing()
    try:
        yield batch
    finally:
        batch.work = group._end_coalescing()


def _new_groups(store: Any, place: int, count: int, timeout: timedelta, device: torch.device) -> dict[Topic, Any]:
    if device.type != "cuda":
        return dict.fromkeys(TOPICS, dist.ProcessGroupGloo(store, place, count, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    prefixed = {topic: dist.distributed_c10d.PrefixStore(topic, store) for topic in TOPICS if topic != "control"}
    groups: dict[Topic, Any] = {topic: dist.ProcessGroupNCCL(part, place, count, options) for topic, part in prefixed.items()}
    for group in groups.values():  # else NCCL connects at a first message, to which all ranks of a group must come
        group.eager_connect_single_device(device)
    return {**groups, "control": groups["globals"]}  # there a message of another size ends in an error, or in the timeout
