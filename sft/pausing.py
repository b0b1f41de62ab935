"""Planning without pauses to look for cycles.

Python's collector is started by the number of objects that were made, and looks through all that are alive. Planning makes millions that
stay alive (programs, instructions, slots) and hardly a cycle, so that looking again and again takes long and finds nothing. Neither does
looking right behind it: what was made would count as young, and be looked through once for each generation that it grows through. It joins
the oldest at once, which is looked through when the collector finds it time for that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]


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
