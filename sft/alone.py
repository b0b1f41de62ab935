"""One thread at a time where the whole process, or a model, is changed for a moment.

Capturing takes hooks off the model, puts fake tensors in the place of its parameters, patches torch and redirects what is printed. Threads
that call compiled models meanwhile (servers, validation beside training) wait where they look at models, and run their strips side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["patch_lock", "is_locked_by_other_thread"]

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
