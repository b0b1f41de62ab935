"""Cases of the benchmark of steps in processes of their own: all plan in parallel, then each is timed alone.

Planning takes tens of seconds on one core, a step takes milliseconds on the GPU. A case that is planned waits for its turn, so that no
other work runs on the host or on the GPU while it is timed. The turns are in the order of the cases.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty
from typing import Any

__all__ = ["Turns", "run_in_processes"]

#: Fraction of the time limit after which planned cases no longer wait for cases that still plan.
_PLANNING_PART = 0.5
#: Seconds of a turn after which a case ends, so that one slow step does not take the time of all others.
_TURN_SECONDS = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Contexts in which a case uses the device.

    Attributes:
        eager: the step of eager PyTorch whose memory is measured before planning; one case at a time.
        timed: the timed steps.
    """

    eager: contextlib.AbstractContextManager[Any]
    timed: contextlib.AbstractContextManager[Any]

    @classmethod
    def alone(cls) -> Turns:
        """Contexts of a case that has the device for itself."""
        return cls(eager=contextlib.nullcontext(), timed=contextlib.nullcontext())


@contextlib.contextmanager
def _turn(number: int, queue: Any, granted: Any) -> Iterator[None]:
    """Context that begins with the turn of a case; the parent process learns that it is planned."""
    queue.put((number, None))
    granted.wait()
    yield


def _work(run: Callable[[Turns], Any], number: int, queue: Any, eager: Any, granted: Any) -> None:
    """One case: its process."""
    queue.put((number, run(Turns(eager=eager, timed=_turn(number, queue, granted)))))


def run_in_processes(
    runs: Sequence[Callable[[Turns], Any]],
    minutes: float | None,
    report: Callable[[int, str, float], None],
    turn_seconds: float = _TURN_SECONDS,
) -> Iterator[Any]:
    """Records of cases, in the order in which they end.

    Args:
        runs: one function for each case, which a process can import; it returns the record, also after an exception.
        minutes: time limit; cases that have not ended by then have no record. ``None`` for no limit.
        report: called with the number of a case, its new state and the seconds since the start.
        turn_seconds: time limit of a turn; a case that exceeds it has no record.
    """
    context = multiprocessing.get_context("spawn")
    queue, eager = context.Queue(), context.Lock()
    granted = [context.Event() for _ in runs]
    processes = [
        context.Process(target=_work, args=(run, number, queue, eager, granted[number]), daemon=True) for number, run in enumerate(runs)
    ]
    for process in processes:
        process.start()
    started, planned, ended, current, turn_end = time.monotonic(), set[int](), set[int](), None, 0.0
    try:
        while len(ended) < len(runs):
            passed = time.monotonic() - started
            if minutes is not None and passed > 60 * minutes:
                return
            with contextlib.suppress(Empty):
                number, record = queue.get(timeout=0.2)
                report(number, "planned" if record is None else "ended", passed)
                if record is None:
                    planned.add(number)
                else:
                    ended.add(number)
                    yield record
            if current is not None and current not in ended and passed > turn_end:
                report(current, "stopped", passed)
                processes[current].terminate()
                processes[current].join()
            # A process that was killed sends nothing.
            ended |= {number for number, process in enumerate(processes) if not process.is_alive() and process.exitcode}
            if current in ended:
                current = None
            waiting = planned - ended
            all_planned = len(planned | ended) == len(runs)
            if current is None and waiting and (all_planned or (minutes is not None and passed > 60 * minutes * _PLANNING_PART)):
                current, turn_end = min(waiting), passed + turn_seconds
                report(current, "timed", passed)
                granted[current].set()
    finally:
        for process in processes:
            process.terminate()
