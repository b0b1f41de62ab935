"""One thread at a time where the whole process, or a model, is changed for a moment.

Capturing takes hooks off the model, puts fake tensors in the place of its parameters, patches torch and redirects what is printed. Threads
that call compiled models meanwhile (servers, validation beside training) wait where they look at models, and run their strips side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["alone", "is_other_thread_alone"]

_LOCK = threading.RLock()
_owners: list[int] = []


@contextmanager
def alone() -> Iterator[None]:
    """A context that one thread is in at a time; it may enter it again."""
    with _LOCK:
        _owners.append(threading.get_ident())
        try:
            yield
        finally:
            _owners.pop()


def is_other_thread_alone() -> bool:
    """Whether another thread is in the context right now, so that what torch says to be doing may be its."""
    owners = _owners[:]
    return bool(owners) and owners[-1] != threading.get_ident()
