"""The next slide is opened while the current one is trained on.

To open a slide means to read its header, to find its tissue and its stains where a run wants them, and to decode the rows that the first
strip begins with. All of that would otherwise stand between two slides. Within a slide, reading runs ahead by itself, but a small network
is done with a strip before the next one is decoded. So rows of the next slide are decoded further, as far as those that its cache keeps
(`data.host_budget`) fit the same budget beside all rows of the slide at hand. What is ahead is bounded: one slide, and of it one block
of rows or what that budget has left.

One thread at a time works ahead, and whoever takes a slide waits for it first: until the slide is open and a block that is being decoded
is done. What opens slides is therefore never called by two threads at once, as long as all slides between a :meth:`SlidePrefetcher.start` and
the next :meth:`SlidePrefetcher.take` come from here.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from sft.analysis.interval import Interval
from sft.sources import Cached, Source

__all__ = ["THREAD_NAME", "Inputs", "SlidePrefetcher", "decode_first_rows", "decode_ahead"]

#: What a network is called with.
Inputs = tuple[Any, ...]

THREAD_NAME = "sft-next-slide"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefetchTask:
    """What is being opened: for whom, where the result will be, and what ends the work on it behind that."""

    key: Hashable
    result: Future[Inputs]
    enough: threading.Event
    thread: threading.Thread

    def end(self) -> None:
        """Wait until it is opened and nothing works on it any more."""
        self.enough.set()
        self.thread.join()


class SlidePrefetcher:
    """Opens one slide ahead of its use.

    >>> ahead = SlidePrefetcher()
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
        self._started: _PrefetchTask | None = None

    def start(self, key: Hashable, opened: Callable[[], Inputs], further: Callable[[Inputs], Iterable[None]] | None = None) -> None:
        """Begin to open a slide; what was begun before and not taken is dropped.

        Args:
            key: says which slide it is.
            opened: opens it; what it raises comes out of :meth:`take`.
            further: gets it more and more ready, a little with each element, until somebody takes it. Default: `None`
        """
        self.drop()
        result: Future[Inputs] = Future()
        enough = threading.Event()
        thread = threading.Thread(target=_open_inputs, args=(opened, further, result, enough), name=THREAD_NAME, daemon=True)
        self._started = _PrefetchTask(key=key, result=result, enough=enough, thread=thread)
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
                started.end()
                if started.key == key:
                    return started.result.result()
            return opened()
        finally:
            self.waited_seconds += time.perf_counter() - since

    def drop(self) -> None:
        """Wait for what was begun, and forget it, with what it may have raised."""
        started, self._started = self._started, None
        if started is not None:
            started.end()


def _open_inputs(
    opened: Callable[[], Inputs], further: Callable[[Inputs], Iterable[None]] | None, result: Future[Inputs], enough: threading.Event
) -> None:
    try:
        inputs = opened()
    except BaseException as error:  # it belongs to whoever takes the slide
        result.set_exception(error)
        return
    result.set_result(inputs)
    if further is not None:
        # What cannot be read now raises again where somebody reads it for use.
        with contextlib.suppress(Exception):
            for _ in further(inputs):
                if enough.is_set():
                    return


def decode_first_rows(source: Source) -> None:
    """Have a source decode the rows that its first strip begins with, as far as it keeps them: a block of `sft.sources.Normalized`.

    Raises:
        SourceError: they cannot be read.
    """
    batch, channels, _, *rest = source.shape
    source.rows(Interval(0, 1), torch.empty((batch, channels, 1, *rest), dtype=source.dtype, device="cpu"))


def decode_ahead(inputs: Inputs, beside: Inputs, num_bands: int = 1) -> Iterator[None]:
    """Decode rows of a slide that its cache keeps, block by block, from the top.

    Args:
        inputs: of the slide; those whose image is `sft.sources.Cached` are decoded.
        beside: those of the slide in use. Its caches may come to hold all of its rows, and the two slides share the budget.
        num_bands: ranks that share a slide. Each reads its own rows only, whichever these are, so with several nothing is decoded.

    Raises:
        SourceError: rows cannot be read.
    """
    if num_bands > 1:
        return
    taken = sum(math.prod(source.shape) for source in beside if _normalized_cache(source) is not None)  # a byte for each channel of a pixel
    for source in inputs:
        cache = _normalized_cache(source)
        if cache is not None:
            yield from cache.decode(max(0, cache.host_budget_bytes - taken))
            taken += cache.kept_bytes


def _normalized_cache(source: Source) -> Cached | None:
    image = getattr(source, "image", None)
    return image if isinstance(image, Cached) else None
