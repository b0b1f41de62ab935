"""What becomes of a slide on several ranks: who could not read it, and who was asked to end, is known to all before anything counts.

A rank that cannot read a slide does not leave the others waiting: before a slide is run, the ranks that share it say whether they could
open it; when everybody is through with its slides, all say how that went. On one rank nothing is said, and the same things happen.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from sft.common.errors import RankError, SourceError
from sft.wsi.data.table import SlideRecord
from sft.wsi.train.distributed import Ranks, RankScope
from sft.wsi.train.signals import EndRequested, Interruption

__all__ = [
    "SlideFailed",
    "UnreadableSlide",
    "gather_in_order",
    "gather_results",
    "next_items",
    "open_on_all_ranks",
    "reading_slide",
    "scatter_items",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableSlide:
    """What is wrong with a slide, and the rank that found out."""

    problem: str
    rank: int


class SlideFailed(Exception):
    """Slides cannot be read.

    Args:
        slides: by name.
        error: what is raised where that stops the run.
    """

    def __init__(self, slides: Mapping[str, UnreadableSlide], error: SourceError) -> None:
        self.slides, self.error = dict(slides), error


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankStatus:
    """How a rank fared.

    Attributes:
        value: what it made.
        unreadable: slides that it could not read.
        asked: the signal that asked it to end.
        broken: why it lost the ranks that share its slide.
    """

    value: Any = None
    unreadable: Mapping[str, UnreadableSlide] | None = None
    asked: signal.Signals | None = None
    broken: str | None = None


def scatter_items(items: Sequence[T], ranks: Ranks) -> list[T]:
    """Those of some items that are this rank's replica's."""
    return list(items[ranks.rank // ranks.shape.num_bands :: ranks.shape.num_replicas])


def next_items(mine: Sequence[T], following: T | None = None) -> list[T | None]:
    """What comes after each item; ``following`` after the last."""
    return [*mine[1:], following] if mine else []


def gather_in_order(parts: Sequence[Sequence[T]], ranks: Ranks) -> list[T]:
    """What the replicas made of what was dealt out to them, in the order of the items; ``parts`` are everybody's."""
    hands = [iter(part) for part in parts[:: ranks.shape.num_bands]]
    count = sum(len(part) for part in parts[:: ranks.shape.num_bands])
    return [next(hands[number % len(hands)]) for number in range(count)]


@contextmanager
def reading_slide(record: SlideRecord, ranks: Ranks) -> Iterator[None]:
    """Where a slide is read.

    Raises:
        SlideFailed: it cannot be.
    """
    try:
        yield
    except SourceError as error:
        raise SlideFailed({record.name: UnreadableSlide(problem=" ".join(str(error).split()), rank=ranks.rank)}, error) from error


def open_on_all_ranks(record: SlideRecord, make: Callable[[], T], ranks: Ranks, interruption: Interruption | None = None) -> T:
    """What ``make`` makes of a slide, once all ranks that share it have made theirs.

    Raises:
        SlideFailed: one of them cannot.
        EndRequested: one of them was asked to end.
    """
    with _share_failure(ranks, "bands"):
        if interruption is not None and interruption.received is not None:
            raise EndRequested(interruption.received)
        with reading_slide(record, ranks):
            own = make()
    _raise_failures(ranks.gathered(_RankStatus(), "bands"), ranks)
    return own


def gather_results(part: Callable[[], T], ranks: Ranks, interruption: Interruption | None = None, *, among: RankScope = "all") -> list[T]:
    """What ``part`` makes on each rank.

    Raises:
        SlideFailed: slides cannot be read, on any rank.
        EndRequested: a rank was asked to end.
        RankError: ranks lost each other.
    """
    with _share_failure(ranks, among):
        own = part()
    asked = None if interruption is None else interruption.received
    everybody = ranks.gathered(_RankStatus(value=own, asked=asked), among)
    _raise_failures(everybody, ranks)
    return [said.value for said in everybody]


@contextmanager
def _share_failure(ranks: Ranks, among: RankScope) -> Iterator[None]:
    """Tell the others what went wrong, and fail as they do."""
    try:
        yield
    except (SlideFailed, EndRequested, RankError) as error:
        # Nothing but `error` may refer to the failed step here: its traceback keeps all that the step held.
        everybody = ranks.gathered(_failure_status(error), among)
        if ranks.shape.num_ranks > 1:
            _raise_failures(everybody, ranks)
        raise


def _failure_status(error: SlideFailed | EndRequested | RankError) -> _RankStatus:
    if isinstance(error, SlideFailed):
        return _RankStatus(unreadable=error.slides)
    return _RankStatus(asked=error.signal) if isinstance(error, EndRequested) else _RankStatus(broken=error.cause)


def _raise_failures(everybody: Sequence[_RankStatus], ranks: Ranks) -> None:
    """Fail as all others do. What somebody could not read comes first: those who share the slide have lost each other over it."""
    unreadable: dict[str, UnreadableSlide] = {}
    for said in everybody:
        unreadable = {**(said.unreadable or {}), **unreadable}
    if unreadable:
        told = (f"slide {name} cannot be read (rank {found.rank}): {found.problem}" for name, found in unreadable.items())
        raise SlideFailed(unreadable, SourceError("; ".join(told)))
    asked = [said.asked for said in everybody if said.asked is not None]
    if asked:
        raise EndRequested(asked[0])
    broken = [said.broken for said in everybody if said.broken is not None]
    if broken:
        raise RankError(f"{broken[0]}. The run goes on from its last checkpoint: start the same command again.", broken[0])
