"""The next slide is opened while the current one is trained on.

To open a slide means to read its header, to find its tissue and its stains where a run wants them, and to decode the rows that the first
strip begins with. All of that would otherwise stand between two slides. What is ahead is bounded: one slide, opened, with one block of its
rows; within a slide, reading runs ahead by itself.

One thread at a time works ahead, and whoever takes a slide waits for it first. What opens slides is therefore never called by two threads
at once, as long as all slides between a :meth:`SlideAhead.start` and the next :meth:`SlideAhead.take` come from here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from sft.analysis.interval import Interval
from sft.sources import Source

__all__ = ["THREAD_NAME", "Inputs", "SlideAhead", "decode_beginning"]

#: What a network is called with.
Inputs = tuple[Any, ...]

THREAD_NAME = "sft-next-slide"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """What is being opened: for whom, and where the result will be."""

    key: Hashable
    result: Future[Inputs]
    thread: threading.Thread


class SlideAhead:
    """Opens one slide ahead of its use.

    >>> ahead = SlideAhead()
    >>> ahead.start("b", lambda: ("the slide b",))
    >>> ahead.take("a", lambda: ("the slide a",)), ahead.take("b", lambda: ("b, opened again",))
    (('the slide a',), ('b, opened again',))
    >>> ahead.start("b", lambda: ("the slide b",))
    >>> ahead.take("b", lambda: ("b, opened again",))
    ('the slide b',)

    Attributes:
        waited_seconds: how long takers stood still, for slides that were opened ahead and for those that were not.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self._started: _Started | None = None

    def start(self, key: Hashable, opened: Callable[[], Inputs]) -> None:
        """Begin to open a slide; what was begun before and not taken is dropped.

        Args:
            key: says which slide it is.
            opened: opens it; what it raises comes out of :meth:`take`.
        """
        self.drop()
        result: Future[Inputs] = Future()
        thread = threading.Thread(target=_open, args=(opened, result), name=THREAD_NAME, daemon=True)
        self._started = _Started(key=key, result=result, thread=thread)
        thread.start()

    def take(self, key: Hashable, opened: Callable[[], Inputs]) -> Inputs:
        """The slide, opened: the one that was begun if it is that one, and else one that is opened now.

        Raises:
            Exception: what ``opened`` raises.
        """
        since = time.perf_counter()
        try:
            started, self._started = self._started, None
            if started is not None:
                started.thread.join()
                if started.key == key:
                    return started.result.result()
            return opened()
        finally:
            self.waited_seconds += time.perf_counter() - since

    def drop(self) -> None:
        """Wait for what was begun, and forget it, with what it may have raised."""
        started, self._started = self._started, None
        if started is not None:
            started.thread.join()


def _open(opened: Callable[[], Inputs], result: Future[Inputs]) -> None:
    try:
        result.set_result(opened())
    except BaseException as error:  # it belongs to whoever takes the slide
        result.set_exception(error)


def decode_beginning(source: Source) -> None:
    """Have a source decode the rows that its first strip begins with, as far as it keeps them: a block of `sft.sources.Normalized`.

    Raises:
        SourceError: they cannot be read.
    """
    batch, channels, _, *rest = source.shape
    source.rows(Interval(0, 1), torch.empty((batch, channels, 1, *rest), dtype=source.dtype))
