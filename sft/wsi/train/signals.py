"""Signal handling: a clean stop on a scheduler's time limit (SIGTERM) or Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

__all__ = ["EndRequested", "Interruption"]


class EndRequested(Exception):
    """A signal requested the end of the run; raised between two slides.

    Args:
        signal: the signal.
    """

    def __init__(self, signal: signal.Signals) -> None:
        self.signal = signal


class Interruption:
    """Record of SIGTERM and SIGINT while a ``with`` block runs; a second signal has its usual effect at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, self._before[self.received])
