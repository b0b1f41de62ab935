"""Threads for the length of one call, to decode the compressed tiles of a strip in parallel.

A pool that outlives its calls must be closed, does not survive ``fork``, and can leak. Starting a thread takes less time than decoding a
tile, and a strip of a slide has a hundred tiles; so the threads live as long as the call. The calling thread works, too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from sft.common.errors import InputError

__all__ = ["THREAD_NAME", "for_each", "resolve_threads"]

THREAD_NAME = "sft-decode"
_MAX_DEFAULT_THREADS = 4
#: Fewer items than this a thread, and starting it is not worth while.
_MIN_ITEMS = 2

Item = TypeVar("Item")


def resolve_threads(num_threads: int | None) -> int:
    """Number of decoding threads: the requested one, else one for each core that this process may use, at most four.

    Raises:
        InputError: fewer than one, or no number.
    """
    if num_threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(_MAX_DEFAULT_THREADS, cores)
    if not isinstance(num_threads, int) or num_threads < 1:
        raise InputError(f"cannot decode in {num_threads!r} threads: at least one does the work. Use num_threads >= 1, or None.")
    return num_threads


def for_each(function: Callable[[Item], None], items: Sequence[Item], num_threads: int) -> None:
    """Call ``function`` for every item, in up to ``num_threads`` threads; all of them have ended when this returns or raises.

    >>> seen = []
    >>> for_each(seen.append, range(5), 3)
    >>> sorted(seen)
    [0, 1, 2, 3, 4]

    Raises:
        BaseException: the error of ``function`` for the first item (in their order) among those that were tried. No further items are
            begun once one has failed.
    """
    num_threads = min(num_threads, len(items) // _MIN_ITEMS)
    if num_threads < 2:
        for item in items:
            function(item)
        return
    waiting = deque(enumerate(items))  # popleft is atomic
    failed: list[tuple[int, BaseException]] = []

    def work() -> None:
        while not failed:
            try:
                position, item = waiting.popleft()
            except IndexError:
                return
            try:
                function(item)
            except BaseException as error:  # raised again below, in the thread that called
                failed.append((position, error))

    threads = [threading.Thread(target=work, name=THREAD_NAME, daemon=True) for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failed:
        raise min(failed, key=lambda pair: pair[0])[1]
