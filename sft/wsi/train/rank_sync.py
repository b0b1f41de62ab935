"""Rank synchronization: all ranks agree on unreadable slides and requested stops before an optimizer step.

A rank that cannot read a slide must not leave the other ranks waiting. Before a slide runs, the ranks that share it exchange their success
of opening it; after all slides of a group, all ranks exchange their status. A single rank follows the same path without messages.
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
    """Problem of an unreadable slide, and the rank that met it."""

    problem: str
    rank: int


class SlideFailed(Exception):
    """Unreadable slides.

    Args:
        slides: by name.
        error: raised if it stops the run.
    """

    def __init__(self, slides: Mapping[str, UnreadableSlide], error: SourceError) -> None:
        self.slides, self.error = dict(slides), error


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankStatus:
    """Status of a rank after its slides.

    Attributes:
        value: its result.
        unreadable: its unreadable slides.
        stop_signal: the signal that requested its end.
        rank_failure: reason for the loss of the ranks that share its slide.
    """

    value: Any = None
    unreadable: Mapping[str, UnreadableSlide] | None = None
    stop_signal: signal.Signals | None = None
    rank_failure: str | None = None


def scatter_items(items: Sequence[T], ranks: Ranks) -> list[T]:
    """The items of this rank's replica."""
    return list(items[ranks.rank // ranks.shape.num_bands :: ranks.shape.num_replicas])


def next_items(mine: Sequence[T], following: T | None = None) -> list[T | None]:
    """Successor of each item; ``following`` is the successor of the last."""
    return [*mine[1:], following] if mine else []


def gather_in_order(parts: Sequence[Sequence[T]], ranks: Ranks) -> list[T]:
    """Results of all replicas in the order of the scattered items; ``parts`` has one list per rank."""
    iterators = [iter(part) for part in parts[:: ranks.shape.num_bands]]
    count = sum(len(part) for part in parts[:: ranks.shape.num_bands])
    return [next(iterators[number % len(iterators)]) for number in range(count)]


@contextmanager
def reading_slide(record: SlideRecord, ranks: Ranks) -> Iterator[None]:
    """Context in which a slide is read.

    Raises:
        SlideFailed: the slide is unreadable.
    """
    try:
        yield
    except SourceError as error:
        raise SlideFailed({record.name: UnreadableSlide(problem=" ".join(str(error).split()), rank=ranks.rank)}, error) from error


def open_on_all_ranks(record: SlideRecord, make: Callable[[], T], ranks: Ranks, interruption: Interruption | None = None) -> T:
    """Result of ``make`` for a slide, after all ranks that share the slide have made theirs.

    Raises:
        SlideFailed: one of them failed.
        EndRequested: a signal requested the end of the run.
    """
    with _share_failure(ranks, "bands"):
        if interruption is not None and interruption.received is not None:
            raise EndRequested(interruption.received)
        with reading_slide(record, ranks):
            result = make()
    _raise_failures(ranks.gathered(_RankStatus(), "bands"), ranks)
    return result


def gather_results(
    compute: Callable[[], T], ranks: Ranks, interruption: Interruption | None = None, *, among: RankScope = "all"
) -> list[T]:
    """Results of ``compute`` on all ranks.

    Raises:
        SlideFailed: unreadable slides, on any rank.
        EndRequested: a signal requested the end of the run.
        RankError: ranks lost each other.
    """
    with _share_failure(ranks, among):
        value = compute()
    stop_signal = None if interruption is None else interruption.received
    statuses = ranks.gathered(_RankStatus(value=value, stop_signal=stop_signal), among)
    _raise_failures(statuses, ranks)
    return [status.value for status in statuses]


@contextmanager
def _share_failure(ranks: Ranks, among: RankScope) -> Iterator[None]:
    """Report a failure to the other ranks, and fail as they do."""
    try:
        yield
    except (SlideFailed, EndRequested, RankError) as error:
        # Nothing but `error` may refer to the failed step here: its traceback keeps all that the step held.
        statuses = ranks.gathered(_failure_status(error), among)
        if ranks.shape.num_ranks > 1:
            _raise_failures(statuses, ranks)
        raise


def _failure_status(error: SlideFailed | EndRequested | RankError) -> _RankStatus:
    if isinstance(error, SlideFailed):
        return _RankStatus(unreadable=error.slides)
    return _RankStatus(stop_signal=error.signal) if isinstance(error, EndRequested) else _RankStatus(rank_failure=error.cause)


def _raise_failures(statuses: Sequence[_RankStatus], ranks: Ranks) -> None:
    """Raise the same error on all ranks. Unreadable slides come first: the ranks that share the slide have lost each other over it."""
    unreadable: dict[str, UnreadableSlide] = {}
    for status in statuses:
        unreadable = {**(status.unreadable or {}), **unreadable}
    if unreadable:
        problems = (f"slide {name} cannot be read (rank {slide.rank}): {slide.problem}" for name, slide in unreadable.items())
        raise SlideFailed(unreadable, SourceError("; ".join(problems)))
    stop_signals = [status.stop_signal for status in statuses if status.stop_signal is not None]
    if stop_signals:
        raise EndRequested(stop_signals[0])
    rank_failures = [status.rank_failure for status in statuses if status.rank_failure is not None]
    if rank_failures:
        raise RankError(f"{rank_failures[0]}. Start the same command again to resume from the last checkpoint.", rank_failures[0])
