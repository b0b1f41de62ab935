"""One thread at a time where the whole process, or a model, is changed for a moment.

Capturing takes hooks off the model, puts fake tensors in the place of its parameters, patches torch and redirects what is printed. Threads
that call compiled models meanwhile (servers, validation beside training) wait where they look at models, and run their strips side by side.

Planning without pauses to look for cycles.

Python's collector is started by the number of objects that were made, and looks through all that are alive. Planning makes millions that
stay alive (programs, instructions, slots) and hardly a cycle, so that looking again and again takes long and finds nothing. Neither does
looking right behind it: what was made would count as young, and be looked through once for each generation that it grows through. It joins
the oldest at once, which is looked through when the collector finds it time for that.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused", "is_locked_by_other_thread", "patch_lock"]

_LOCK = threading.RLock()
_owner_threads: list[int] = []


@contextmanager
def patch_lock() -> Iterator[None]:
    """A context that one thread is in at a time; it may enter it again."""
    with _LOCK:
        _owner_threads.append(threading.get_ident())
        try:
            yield
        finally:
            _owner_threads.pop()


def is_locked_by_other_thread() -> bool:
    """Whether another thread is in the context right now, so that what torch says to be doing may be its."""
    owners = _owner_threads[:]
    return bool(owners) and owners[-1] != threading.get_ident()


@contextmanager
def gc_paused() -> Iterator[None]:
    """A context in which nobody looks for cycles; what is unreachable behind it is found as ever."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else somebody keeps objects out of the collector's sight
            gc.freeze()
            gc.unfreeze()
        gc.enable()
