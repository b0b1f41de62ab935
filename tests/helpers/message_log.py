"""Log of messages that all ranks of a mesh post and wait for in a step of byte counts, and a deadlock check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sft.distributed.band_region import BandRegionBuilder
from sft.distributed.communicator import Communicator
from sft.distributed.machines import BandTracingMachine
from sft.distributed.mesh import MeshShape
from sft.distributed.transport import Message, RankGroup, RankTraffic, Topic
from sft.planner.projection import Projection, project_step
from sft.runtime.moves import ScheduleOp

__all__ = ["Event", "LoggedMachine", "LoggedStep", "logged_step", "num_stuck"]


@dataclass(frozen=True, slots=True)
class Event:
    """Messages that are posted (other rank, and True if sent), or waited for.

    Attributes:
        what: the current move of the order, and strips and untiled segments that have run before.
        ticket: the same for posting and waiting.
        topic: of the messages.
        messages: pairs of the other rank and whether it is sent; none where the event is to wait.
    """

    what: tuple[str, int]
    ticket: int
    topic: Topic
    messages: tuple[tuple[int, bool], ...] = ()


@dataclass(slots=True)
class _Log:
    """A link without a peer that records its messages."""

    shape: MeshShape
    replica: int
    band: int
    traffic: RankTraffic = field(default_factory=RankTraffic)
    events: list[Event] = field(default_factory=list)
    machine: Any = None

    def post(self, over: RankGroup, topic: Topic, messages: Sequence[Message]) -> int:
        ticket = len(self.events)
        others = tuple((self._rank(over, message.member), message.is_sent) for message in messages)
        self.events.append(Event(self._now, ticket, topic, others))
        return ticket

    def wait(self, ticket: int) -> None:
        self.events.append(Event(self._now, ticket, self.events[ticket].topic))

    @property
    def _now(self) -> tuple[str, int]:
        return self.machine.move, self.machine.comm_queue.clock

    def _rank(self, over: RankGroup, member: int) -> int:
        num_bands = self.shape.num_bands
        if over == "band":
            return self.replica * num_bands + member
        return member * num_bands + self.band if over == "replica" else member


@dataclass(slots=True, kw_only=True)
class LoggedMachine(BandTracingMachine):
    """A machine of byte counts that records the current move."""

    move: str = ""

    def start_op(self, move: ScheduleOp) -> None:
        self.move = str(move)
        BandTracingMachine.start_op(self, move)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A rank's events in a step, and the cost of the step."""

    events: tuple[Event, ...]
    projection: Projection
    traffic: RankTraffic


def logged_step(bands: BandRegionBuilder, shape: MeshShape, replica: int, band: int, *, exactly: bool = True) -> LoggedStep:
    """A step of byte counts, strip by strip or (not ``exactly``) added up."""
    transport = _Log(shape, replica, band)
    comm = Communicator(transport=transport, shape=shape, replica=replica, band=band)
    transport.machine = machine = LoggedMachine(on_host=bands.problem.resources.on_host, comm=comm)
    projection = project_step(bands.problem, bands.region(band), exactly=exactly, machine=machine)
    assert not machine.row_exchanges and not machine.comm_queue.entries, "a step ends with rows under way"
    return LoggedStep(tuple(transport.events), projection, transport.traffic)


def num_stuck(ranks: Sequence[Sequence[Event]], *, in_order: bool) -> int:
    """Number of deadlocked ranks, without buffering: a message is sent when both of its ends are posted.

    Messages of one topic between two ranks meet in the order in which they are posted on either side. With ``in_order`` the messages that a
    rank posts on one topic run one after another, as on a stream: only the first incomplete one is posted.
    """
    posted: dict[tuple[int, int, Topic, bool], int] = defaultdict(int)  # from, to, topic, True for the sending end
    queues: dict[tuple[int, Topic], list[tuple[int, list[_End]]]] = defaultdict(list)
    posted_ends: set[_End] = set()
    through: set[tuple[int, int]] = set()
    at = [0] * len(ranks)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, events in enumerate(ranks):
            while at[rank] < len(events):
                event = events[at[rank]]
                if event.messages:
                    ends = []
                    for other, is_sent in event.messages:
                        key = (*((rank, other) if is_sent else (other, rank)), event.topic, is_sent)
                        posted[key] += 1
                        ends.append((key, posted[key]))
                    queues[rank, event.topic].append((event.ticket, ends))
                elif (rank, event.ticket) not in through:
                    break
                at[rank] += 1
                is_moving = True
        for queue in queues.values():
            posted_ends.update(end for _, ends in (queue[:1] if in_order else queue) for end in ends)
        for (rank, _), queue in queues.items():
            for ticket, ends in list(queue):
                if all(end in posted_ends and _other(end) in posted_ends for end in ends):
                    queue.remove((ticket, ends))
                    through.add((rank, ticket))
                    is_moving = True
    return sum(position < len(events) for position, events in zip(at, ranks, strict=True)) + sum(map(len, queues.values()))


#: Both ranks, topic, True for the sending end, and the index among these.
_End = tuple[tuple[int, int, Topic, bool], int]


def _other(end: _End) -> _End:
    (source, target, topic, is_sent), number = end
    return (source, target, topic, not is_sent), number
