"""Progress displays of long operations: silent for the first two seconds, without a terminal, and on all ranks but the first.

A display shows a spinner, the present stage and the elapsed time on standard error, and disappears at the end. A bar has a known number of
steps. Inside another display only the stage changes, so that functions with displays may call each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["hidden", "stages", "steps"]

#: Shorter operations have no display.
_DELAY_SECONDS = 2.0

_ACTIVE = threading.local()
_HIDDEN = object()


class _Display:
    """A display that starts after a delay, on a thread of its own."""

    def __init__(self, console: Console, stage: str, total: int | None) -> None:
        counters = () if total is None else (BarColumn(), MofNCompleteColumn())
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *counters, TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(stage, total=total)
        self._lock = threading.Lock()
        self._is_over = False
        self._timer = threading.Timer(_DELAY_SECONDS, self._start)
        self._timer.daemon = True
        self._timer.start()

    def _start(self) -> None:
        with self._lock:
            if not self._is_over:
                self._progress.start()

    def show(self, stage: str) -> None:
        """Name the present stage."""
        self._progress.update(self._task, description=stage)

    def advance(self) -> None:
        """Count a step."""
        self._progress.advance(self._task)

    def stop(self) -> None:
        """Remove the display."""
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            self._progress.stop()


@contextmanager
def stages(stage: str) -> Iterator[Callable[[str], None]]:
    """Show the stage of the block; yields a function that names the next one."""
    with _display(stage, None) as (display, _):
        yield _ignore if display is None else display.show


@contextmanager
def steps(stage: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a number of steps, as a bar or inside another display as a stage; yields a function that counts one."""
    with _display(stage, total) as (display, is_nested):
        if display is None:
            yield _count_nothing
        elif not is_nested:
            yield display.advance
        else:
            numbers = count(1)
            yield lambda: display.show(f"{stage}: {next(numbers)} of {total}")


@contextmanager
def hidden() -> Iterator[None]:
    """Show no display inside the block, which has its own."""
    outer = getattr(_ACTIVE, "display", None)
    _ACTIVE.display = _HIDDEN
    try:
        yield
    finally:
        _ACTIVE.display = outer


@contextmanager
def _display(stage: str, total: int | None) -> Iterator[tuple[_Display | None, bool]]:
    """The display of a block, or of the block around it, and true for the latter; ``None`` if nothing is shown."""
    outer = getattr(_ACTIVE, "display", None)
    if isinstance(outer, _Display):
        outer.show(stage)
        yield outer, True
        return
    console = Console(stderr=True)
    if outer is not None or not console.is_terminal or int(os.environ.get("RANK", "0") or 0) > 0:
        yield None, False
        return
    display = _ACTIVE.display = _Display(console, stage, total)
    try:
        yield display, False
    finally:
        _ACTIVE.display = None
        display.stop()


def _ignore(stage: str) -> None:
    """The function that names stages without a display."""


def _count_nothing() -> None:
    """The function that counts steps without a display."""
