"""Process-wide critical sections: the lock for patching torch or a model, and a pause of the garbage collector.

*The lock.* Capturing removes hooks from the model, replaces its parameters by fake tensors, patches torch and redirects output. Other
threads that call compiled models (servers, validation next to training) wait where they inspect models; their strips run concurrently.

*The pause.* Python's cycle collector runs after a number of allocations and traverses all live objects. Planning allocates millions of
long-lived objects (programs, instructions, slots) and hardly any cycle, so these traversals take long and free no memory. A collection
right after planning would not pay either: the new objects count as young and would be traversed once per generation. They are moved to
the oldest generation at once, which is collected when the collector decides to.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager

__all__ = ["gc_paused", "is_locked_by_other_thread", "patch_lock"]

_LOCK = threading.RLock()
_owner_threads: list[int] = []


class _PatchLock(ContextDecorator):
    """The critical section; it has no state of its own, as each call of a model enters it several times."""

    def __enter__(self) -> None:
        _LOCK.acquire()
        _owner_threads.append(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        _owner_threads.pop()
        _LOCK.release()


_PATCH_LOCK = _PatchLock()


def patch_lock() -> _PatchLock:
    """A re-entrant critical section for one thread at a time; also a decorator."""
    return _PATCH_LOCK


def is_locked_by_other_thread() -> bool:
    """True if another thread is in the critical section, so that global state of torch (such as "is exporting") may belong to it."""
    owners = _owner_threads[:]
    return bool(owners) and owners[-1] != threading.get_ident()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cycle collector; garbage of the block is collected afterwards as usual."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # otherwise the application has frozen objects itself
            gc.freeze()
            gc.unfreeze()
        gc.enable()
