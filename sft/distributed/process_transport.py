"""Transport between running processes, and the propagation of one rank's failure to all.

A transport owns a process group, made from the store that all ranks of the program share. A rank that fails writes the cause into the
store and closes its connections. Ranks that wait for it, or wait later, see the closed connection, read the cause, close their own
connections and raise a :class:`sft.common.errors.RankError` with the failed rank and the cause. So the failure spreads hop by hop and no
rank waits in vain. A killed process has closed its connections, too; a hanging process is detected by the timeout. After a failure the
next call opens a new group, which works if all ranks are alive.

Pending messages belong to the transport. Only the transport references the backend's work objects, which keep connections open, and it
drops all of them when it closes. So a failed step leaves no message that a later step could receive.

gloo carries all topics in one group, with a tag for each topic. With NCCL each topic has a communicator: operations of one communicator
run in the order of posting. Messages posted together run as one NCCL operation, so two ranks that send to each other do not deadlock.
A wait is put on the current stream.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sft.common.errors import RankError
from sft.distributed.machines import memory_order_view
from sft.distributed.transport import TOPICS, Message, RankGroup, RankTraffic, Topic

__all__ = ["ProcessTransport"]

#: Transports made so far for a purpose and ranks. All ranks have the same numbers, since they make their transports in the same order.
_num_transports: Counter[tuple[str, tuple[int, ...]]] = Counter()

#: Time to wait for the cause of a failure to appear in the store.
_CAUSE_WAIT = timedelta(seconds=2)
_POLL_SECONDS = 0.02


class _TransportError(Exception):
    """Failure to send a message to, or receive one from, another rank."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        super().__init__(reason)


class ProcessTransport:
    """Point-to-point messages and small collectives among the ranks of a mesh.

    Args:
        ranks: global ranks of the mesh.
        members: members of each of this rank's groups, as indices into ``ranks``, in order.
        timeout: longest wait for another rank.
        device: device of the tensors.
        purpose: user of the transport (a model, an optimizer); transports of one purpose are numbered, so that names are unique.

    Attributes:
        traffic: bytes sent and received, by topic.
    """

    def __init__(
        self, ranks: tuple[int, ...], members: dict[RankGroup, tuple[int, ...]], timeout: timedelta, device: torch.device, purpose: str
    ) -> None:
        self.ranks, self.members, self.timeout, self.device = ranks, members, timeout, device
        self.name = f"{purpose}/{'-'.join(map(str, ranks))}/{_num_transports[purpose, ranks]}"
        _num_transports[purpose, ranks] += 1
        self.traffic = RankTraffic()
        self._index = ranks.index(dist.get_rank())
        self._groups: dict[Topic, Any] | None = None
        self._generation = 0
        self._pending_works: dict[int, list[tuple[Any, int]]] = {}
        self._num_tickets = 0

    def post(self, over: RankGroup, topic: Topic, messages: Sequence[Message]) -> int:
        self._num_tickets += 1
        failure = self._try_post(self._num_tickets, over, topic, messages)
        if failure is not None:
            raise failure
        return self._num_tickets

    def wait(self, ticket: int) -> None:
        failure = self._try_wait(ticket)
        if failure is not None:
            raise failure

    def _try_post(self, ticket: int, over: RankGroup, topic: Topic, messages: Sequence[Message]) -> _TransportError | None:
        """Post messages. An error is returned, not raised: the frames of a traceback would keep the connections open."""
        group, members = self._open_groups()[topic], self.members[over]
        peer = self._index
        works: list[tuple[Any, int]] = []
        try:
            with _batched_p2p(group, self.device) as batch:
                for message in messages:
                    peer = members[message.member]
                    call = group.send if message.is_sent else group.recv
                    works.append((call([memory_order_view(message.handle)], peer, TOPICS.index(topic)), peer))
            self._pending_works[ticket] = works if batch.work is None else [(batch.work, peer)]
        except RuntimeError as error:
            return _TransportError(self.ranks[peer], str(error))
        return None

    def _try_wait(self, ticket: int) -> _TransportError | None:
        """Wait for posted messages. An error is returned, as by :meth:`_try_post`."""
        peer = self._index
        works = self._pending_works.pop(ticket)
        try:
            for work, peer in works:  # noqa: B007  # an error names the peer
                work.wait()
        except RuntimeError as error:
            return _TransportError(self.ranks[peer], str(error))
        return None

    def broadcast(self, over: RankGroup, tensor: torch.Tensor) -> None:
        """Broadcast the first member's tensor to all members. A control message, which plans do not count."""
        members = self.members[over]
        me = members.index(self._index)
        for receiver in range(1, len(members)):
            if me in (0, receiver):
                self.wait(self.post(over, "control", [Message(0 if me else receiver, tensor, is_sent=me == 0)]))

    def all_gather(self, over: RankGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather the tensors of all members, in order. A control message, which plans do not count."""
        members = self.members[over]
        count, me = len(members), members.index(self._index)
        tensors = [tensor if member == me else torch.empty_like(tensor) for member in range(count)]
        for distance in range(1, count):
            target, source = (me + distance) % count, (me - distance) % count
            messages = [Message(target, tensor, is_sent=True), Message(source, tensors[source], is_sent=False)]
            self.wait(self.post(over, "control", messages))
        return tensors

    @contextmanager
    def propagate_failures(self) -> Iterator[None]:
        """Report an error of the body to the other ranks, and raise their errors here.

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
            self._close(f"rank {self.ranks[self._index]} failed: {type(error).__name__}: {error}")
            raise

    def _error_from(self, error: _TransportError) -> RankError:
        """The error of this rank: the cause in the store or, without one, the rank that could not be reached."""
        cause = (
            self._cause() or f"rank {error.rank} does not answer (it died, hangs, or lost its connection; limit {self.timeout}): {error}"
        )
        self._close(cause)
        return RankError(
            f"{cause}. Nothing was updated on this rank ({self.ranks[self._index]}): no gradient, no buffer. Find the cause on the rank "
            "named, and start all ranks again from the last checkpoint, or call again where all of them are still there.",
            cause,
        )

    def _open_groups(self) -> dict[Topic, Any]:
        """The process group of each topic. After a failure new groups are made, once all ranks have arrived."""
        if self._groups is None:
            store, started = self._store(), time.monotonic()
            store.set(f"ready/{self._index}", "1")
            missing = list(range(len(self.ranks)))
            while missing := [index for index in missing if not store.check([f"ready/{index}"])]:
                is_late = time.monotonic() - started > self.timeout.total_seconds()
                if store.check(["cause"]) or is_late:
                    raise _TransportError(self.ranks[missing[0]], "its message has not arrived")
                time.sleep(_POLL_SECONDS)
            self._groups = _new_groups(store, self._index, len(self.ranks), self.timeout, self.device)
        return self._groups

    def _store(self) -> Any:
        return dist.distributed_c10d.PrefixStore(f"sft/{self.name}/{self._generation}", dist.distributed_c10d._get_default_store())

    def _cause(self) -> str:
        """The cause that a failing rank wrote into the store; empty if it wrote none, or the store is unreachable."""
        try:
            store = self._store()
            store.wait(["cause"], _CAUSE_WAIT)
            return bytes(store.get("cause")).decode()
        except RuntimeError:  # DistError and similar
            return ""

    def _close(self, cause: str) -> None:
        """Write the cause into the store, unless another rank did, and close the connections."""
        with suppress(RuntimeError):  # the process with the store may be gone; waiting ranks still see the closed connection
            self._store().compare_set("cause", "", cause)
        self._pending_works.clear()
        groups, self._groups = self._groups, None
        self._generation += 1
        for group in {id(group): group for group in (groups or {}).values()}.values():
            if hasattr(group, "shutdown"):
                group.shutdown()


class _MessageBatch:
    """Messages that were posted as one operation; ``work`` is None if the backend posts them one by one."""

    work: Any = None


@contextmanager
def _batched_p2p(group: Any, device: torch.device) -> Iterator[_MessageBatch]:
    """Post all messages of the body as one operation with NCCL. Groups that are made directly know no device, so it is passed."""
    batch = _MessageBatch()
    if device.type != "cuda":
        yield batch
        return
    group._start_coalescing()
    try:
        yield batch
    finally:
        batch.work = group._end_coalescing()


def _new_groups(store: Any, index: int, count: int, timeout: timedelta, device: torch.device) -> dict[Topic, Any]:
    """Create the process groups: one for all topics with gloo, one for each topic with NCCL."""
    if device.type != "cuda":
        return dict.fromkeys(TOPICS, dist.ProcessGroupGloo(store, index, count, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    stores = {topic: dist.distributed_c10d.PrefixStore(topic, store) for topic in TOPICS if topic != "control"}
    groups: dict[Topic, Any] = {topic: dist.ProcessGroupNCCL(prefixed, index, count, options) for topic, prefixed in stores.items()}
    for group in groups.values():  # otherwise NCCL connects at the first message, in which all ranks of a group must take part
        group.eager_connect_single_device(device)
    return {**groups, "control": groups["globals"]}  # a message of unexpected size ends in an error or in the timeout
