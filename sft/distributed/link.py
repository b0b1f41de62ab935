"""What crosses the links, and the link itself: messages that are posted now and waited for later.

A message goes from one member of a group to another. Both post it, in the same order for each pair of ranks and topic, and go on with their
arithmetic; later each waits for it. Until then its buffer stays as it is. Topics are channels of their own: where messages of two topics
are posted in another order on one rank than on another (one is between strips, of which ranks have different numbers), they do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sft.runtime.machine import Buffer

__all__ = ["TOPICS", "Message", "RankGroup", "RankTraffic", "Topic", "Transport"]

#: The ranks that share an image, those that have the same band of other images, or all of the mesh.
RankGroup = Literal["band", "replica", "mesh"]
#: What is sent: rows of images and of their gradients, global values and their gradients, gradients of parameters; and what ranks agree on
#: before and behind a step, so that one that begins a step never takes what another still sends of the last for an answer.
Topic = Literal["rows", "globals", "parameters", "control"]

TOPICS: tuple[Topic, ...] = ("rows", "globals", "parameters", "control")


def _zero_bytes_by_topic() -> dict[Topic, int]:
    return dict.fromkeys(TOPICS, 0)


@dataclass(slots=True)
class RankTraffic:
    """Bytes that a rank sent and received, by topic.

    ``sent_beside_bytes`` and ``received_beside_bytes`` are those of messages that were under way while strips ran: the rank computed
    between posting them and waiting for them.
    """

    sent_bytes: dict[Topic, int] = field(default_factory=_zero_bytes_by_topic)
    received_bytes: dict[Topic, int] = field(default_factory=_zero_bytes_by_topic)
    sent_beside_bytes: dict[Topic, int] = field(default_factory=_zero_bytes_by_topic)
    received_beside_bytes: dict[Topic, int] = field(default_factory=_zero_bytes_by_topic)

    def note(self, topic: Topic, sent_bytes: int, received_bytes: int, *, is_beside: bool) -> None:
        """Count messages that have been waited for."""
        self.sent_bytes[topic] += sent_bytes
        self.received_bytes[topic] += received_bytes
        if is_beside:
            self.sent_beside_bytes[topic] += sent_bytes
            self.received_beside_bytes[topic] += received_bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One message, seen from one of its ends.

    Attributes:
        member: of the group, that it goes to or comes from.
        handle: a dense buffer: what is sent, or what is filled.
        is_sent: which of the two.
    """

    member: int
    handle: Buffer
    is_sent: bool


class Transport(Protocol):
    """The way to the other ranks."""

    traffic: RankTraffic

    def post(self, over: RankGroup, topic: Topic, messages: Sequence[Message]) -> int:
        """Begin to send and to receive; returns a ticket to wait with. Whoever posts keeps the buffers until then."""

    def wait(self, ticket: int) -> None:
        """Wait until what was posted has been sent, and is there: what runs next may read it."""
