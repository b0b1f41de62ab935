"""Order of host threads for a happens-before checker: starts and joins, queues, futures and conditions join their clocks."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.happens_before import Timeline

__all__ = ["order_threads"]


def order_threads(
    patches: pytest.MonkeyPatch, current: Callable[[], Timeline], context: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """Let thread starts and joins, queues, futures and conditions order the timelines of threads.

    Args:
        patches: undone by the caller.
        current: timeline of the calling thread.
        context: context in which new threads run.
    """
    simple_queue = queue.SimpleQueue

    class Queue:
        """``queue.SimpleQueue`` that orders threads."""

        def __init__(self) -> None:
            self._items: Any = simple_queue()

        def put(self, item: Any, *_: Any, **__: Any) -> None:
            self._items.put((item, current().snapshot()))

        def get(self, *args: Any, **kwargs: Any) -> Any:
            item, clock = self._items.get(*args, **kwargs)
            current().join(clock)
            return item

        def get_nowait(self) -> Any:
            return self.get(block=False)

        def qsize(self) -> int:
            return int(self._items.qsize())

        def empty(self) -> bool:
            return bool(self._items.empty())

    class Condition(threading.Condition):
        """``threading.Condition`` that orders threads."""

        _clock: dict[int, int]

        def __enter__(self) -> bool:
            result = super().__enter__()
            current().join(getattr(self, "_clock", {}))
            return result

        def __exit__(self, *args: Any) -> None:
            self._clock = current().snapshot()  # which includes the clock of the entry
            super().__exit__(*args)

        def wait(self, timeout: float | None = None) -> bool:
            self._clock = current().snapshot()
            result = super().wait(timeout)
            current().join(self._clock)
            return result

    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join
    set_result, result = Future.set_result, Future.result

    def start_ordered(thread: Any) -> None:
        thread.fake_start = current().snapshot()
        start(thread)

    def run_ordered(thread: Any) -> None:
        current().join(getattr(thread, "fake_start", {}))
        with context():
            run(thread)
        thread.fake_end = current().snapshot()

    def join_ordered(thread: Any, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            current().join(getattr(thread, "fake_end", {}))

    def set_ordered(future: Any, value: Any) -> None:
        future.fake_clock = current().snapshot()
        set_result(future, value)

    def result_ordered(future: Any, timeout: float | None = None) -> Any:
        value = result(future, timeout)
        current().join(getattr(future, "fake_clock", {}))
        return value

    for owner, name, function in (
        (threading.Thread, "start", start_ordered),
        (threading.Thread, "run", run_ordered),
        (threading.Thread, "join", join_ordered),
        (Future, "set_result", set_ordered),
        (Future, "result", result_ordered),
        (queue, "SimpleQueue", Queue),
    ):
        patches.setattr(owner, name, function)
    # The module's own name: other conditions of Python are used while a thread has no name yet.
    patches.setattr("sft.weights.stream.threading", SimpleNamespace(Condition=Condition, Thread=threading.Thread))
