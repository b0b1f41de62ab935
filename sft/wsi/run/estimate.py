"""Duration of a run: estimated from the plan before it starts, then from the slides that it has done.

Work is counted in pixels: the time of a slide grows with its area. A training step counts each pixel once, a prediction a third of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

__all__ = ["PREDICTION_SHARE", "RunEstimate", "RunWork", "about_text", "duration_text"]

#: A prediction is a forward pass; a training step has a forward pass, and a backward pass of about twice its FLOPs.
PREDICTION_SHARE = 1 / 3
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWork:
    """Work of a run, in pixels of a training step.

    Attributes:
        num_epochs: of the run.
        num_slides: training slides of an epoch.
        epoch_work: of an epoch's training and validation slides.
        final_work: of the evaluation of the best model.
        num_replicas: slides that are processed at once.
        planned_seconds: estimated seconds of one pixel, from the plan of the largest slide.
        host_bytes: peak of the host memory: values off the device, cached rows, and for training on the CPU all of the budget that is used.
    """

    num_epochs: int
    num_slides: int
    epoch_work: float
    final_work: float
    num_replicas: int
    planned_seconds: float
    host_bytes: int

    @property
    def total(self) -> float:
        """Work of the whole run."""
        return self.num_epochs * self.epoch_work + self.final_work

    @property
    def seconds(self) -> float:
        """Estimated seconds of the whole run, from the plan."""
        return self.total * self.planned_seconds / self.num_replicas


@dataclass(slots=True)
class RunEstimate:
    """Remaining seconds of a run.

    Attributes:
        work: of the whole run.
        done: work that is done by all replicas.
        clock: seconds now.
    """

    work: RunWork
    done: float = 0.0
    clock: Callable[[], float] = monotonic
    _own: float = 0.0
    _num_slides: int = 0
    _first: tuple[float, float] | None = None
    _now: tuple[float, float] | None = None
    _started: float = field(default=-1.0)

    def start(self) -> None:
        """Start of the measurement."""
        self._started = self.clock()

    def note(self, own: float, others: float = 0.0) -> None:
        """A slide of this process is done, and slides of other replicas.

        Args:
            own: work of the slide.
            others: work of the other replicas' slides. Default: 0
        """
        self.done += own + others
        if own > 0:
            self._own += own
            self._num_slides += 1
            self._now = (self.clock(), self._own)
            self._first = self._first or self._now

    @property
    def is_measured(self) -> bool:
        """True once a slide has been timed; the estimate is from the plan before."""
        return self._now is not None and self._started >= 0

    def seconds_left(self, current: float = 0.0) -> float:
        """Estimated seconds to the end of the run.

        Args:
            current: work of the current slide that is done. Default: 0
        """
        left = max(0.0, self.work.total - self.done - current) / self.work.num_replicas
        return left * self._seconds_per_work()

    def _seconds_per_work(self) -> float:
        if self._now is None or self._first is None or self._started < 0:
            return self.work.planned_seconds
        if self._num_slides == 1:
            return (self._now[0] - self._started) / self._now[1]
        # The first slide has also compiled the network.
        return (self._now[0] - self._first[0]) / (self._now[1] - self._first[1])


def duration_text(seconds: float) -> str:
    """A duration as text, in its two largest units.

    >>> [duration_text(value) for value in (0.2, 75, 3700, 100_000, 260_000)]
    ['less than 1 s', '1 min 15 s', '1 h 2 min', '1 d 4 h', '3 d']
    """
    if seconds < 1:
        return "less than 1 s"
    for large, small, unit, small_unit in ((_DAY, _HOUR, "d", "h"), (_HOUR, _MINUTE, "h", "min"), (_MINUTE, 1, "min", "s")):
        if round(seconds / small) >= large / small:
            number, rest = divmod(round(seconds / small), large // small)
            return f"{number} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{round(seconds)} s"


def about_text(seconds: float) -> str:
    """An estimated duration.

    >>> about_text(0.5), about_text(120)
    ('less than 1 s', 'about 2 min')
    """
    return duration_text(seconds) if seconds < 1 else f"about {duration_text(seconds)}"
