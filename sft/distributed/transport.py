"""Transport protocol: asynchronous point-to-point messages, and the bytes that they move.

A message goes from one member of a group to another. Both post it, in the same order for each pair of ranks and topic, and continue to
compute; later each waits for it. Until then its buffer must not change. Each topic is a separate channel: messages of different topics
never match. So two topics may be posted in different orders on two ranks (messages between strips are, since ranks have different numbers
of strips).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sft.runtime.machine import Buffer

__all__ = ["TOPICS", "Message", "RankGroup", "RankTraffic", "Topic", "Transport"]

#: The ranks that share an image; the ranks with the same band of different images; all ranks of the mesh.
RankGroup = Literal["band", "replica", "mesh"]
#: Rows of images and of their gradients; global values and their gradients; gradients of parameters; and control messages before and
#: after a step. Control has a topic so that a rank that begins a step cannot receive a message of the last step instead.
Topic = Literal["rows", "globals", "parameters", "control"]

TOPICS: tuple[Topic, ...] = ("rows", "globals", "parameters", "control")


def _zero_bytes_by_topic() -> dict[Topic, int]:
    """A counter for each topic."""
    return dict.fromkeys(TOPICS, 0)


@dataclass(slots=True)
class RankTraffic:
    """Bytes that a rank sent and received, by topic.

    Attributes:
        sent_bytes: all bytes sent.
        received_bytes: all bytes received.
        overlapped_sent_bytes: bytes sent while strips ran: the rank computed between posting the message and waiting for it.
        overlapped_received_bytes: bytes received while strips ran.
    """

    sent_bytes: dict[Topic, int] = field(default_factory=_zero_bytes_by_topic)
    received_bytes: dict[Topic, int] = field(default_factory=_zero_bytes_by_topic)
    overlapped_sent_bytes: dict[Topic, int] = field(default_factory=_zero_bytes_by_topic)
    overlapped_received_bytes: dict[Topic, int] = field(default_factory=_zero_bytes_by_topic)

    def record(self, topic: Topic, sent_bytes: int, received_bytes: int, *, is_overlapped: bool) -> None:
        """Count completed messages; ``is_overlapped`` if strips ran in the meantime."""
        self.sent_bytes[topic] += sent_bytes
        self.received_bytes[topic] += received_bytes
        if is_overlapped:
            self.overlapped_sent_bytes[topic] += sent_bytes
            self.overlapped_received_bytes[topic] += received_bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One message, as seen by its sender or its receiver.

    Attributes:
        member: index in the group of the rank at the other end.
        handle: a dense buffer: the data to send, or the memory to fill.
        is_sent: True for the sender.
    """

    member: int
    handle: Buffer
    is_sent: bool


class Transport(Protocol):
    """Sends and receives messages; ``traffic`` counts completed ones."""

    traffic: RankTraffic

    def post(self, over: RankGroup, topic: Topic, messages: Sequence[Message]) -> int:
        """Start to send and to receive; returns a ticket for :meth:`wait`. The caller must keep the buffers until then."""

    def wait(self, ticket: int) -> None:
        """Wait until the posted messages are sent and received. Later operations may read the buffers."""
