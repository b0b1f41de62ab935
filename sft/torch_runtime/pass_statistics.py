"""Statistics of a call: inputs read while its passes ran, and strips left out; progress while it runs.

A listener gets the FLOPs of each program, a strip of a segment, when it is issued. On the CPU the programs before it have then run; a GPU
has a delay of at most some programs. Without a listener a program costs one test of a list.

>>> flops = []
>>> with report_flops(flops.append):
...     note_flops(5)
>>> flops
[5]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = [
    "LISTENERS",
    "CallStatistics",
    "PassReading",
    "PassSkipping",
    "PassStatistics",
    "Reading",
    "Skipping",
    "note_flops",
    "report_flops",
]

#: Listeners of this process. The backward pass of a GPU runs in a thread of autograd's, so they belong to no thread.
LISTENERS: list[Callable[[int], None]] = []


@dataclass(slots=True, kw_only=True)
class PassReading:
    """Statistics of the inputs that one pass, forward or backward, read from their sources.

    Attributes:
        read_seconds: time that reader threads spent reading and normalising.
        waited_seconds: time that the pass waited for a strip.
        num_rows_read: rows read; a row of two batch elements counts twice, a row that strips share counts once.
        read_bytes: bytes that the sources delivered, in the network's element type.
    """

    read_seconds: float = 0.0
    waited_seconds: float = 0.0
    num_rows_read: int = 0
    read_bytes: int = 0

    @property
    def hidden_fraction(self) -> float:
        """Fraction of the reading time that overlapped with computation, in 0..1; 1 for a pass without reads."""
        return 1.0 if self.read_seconds <= 0 else min(1.0, max(0.0, 1 - self.waited_seconds / self.read_seconds))

    def __str__(self) -> str:
        return (
            f"{self.num_rows_read:,} rows in {self.read_seconds:.2f} s, waited {self.waited_seconds:.2f} s "
            f"({100 * self.hidden_fraction:.0f} % hidden)"
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """Statistics of the inputs that a call read; the backward pass adds its share when it runs.

    >>> print(Reading())
    forward: 0 rows in 0.00 s, waited 0.00 s (100 % hidden)
    backward: 0 rows in 0.00 s, waited 0.00 s (100 % hidden)

    Attributes:
        forward: statistics of the forward pass.
        backward: statistics of the backward passes so far.
    """

    forward: PassReading = field(default_factory=PassReading)
    backward: PassReading = field(default_factory=PassReading)

    def __str__(self) -> str:
        return f"forward: {self.forward}\nbackward: {self.backward}"


@dataclass(slots=True, kw_only=True)
class PassSkipping:
    """Statistics of the strips that one pass, forward or backward, left out.

    Attributes:
        num_strips: number of strips of all sweeps, including those that run forward again to restore states.
        num_skipped: number of strips that did not run.
        skipped_flops: FLOPs of these strips, which the pass saved.
    """

    num_strips: int = 0
    num_skipped: int = 0
    skipped_flops: int = 0

    def note(self, *, num_run: int, num_skipped: int, flops: int) -> None:
        """Count strips of a program with that many FLOPs."""
        self.num_strips += num_run + num_skipped
        self.num_skipped += num_skipped
        self.skipped_flops += num_skipped * flops

    def __str__(self) -> str:
        return f"{self.num_skipped:,} of {self.num_strips:,} strips left out ({self.skipped_flops:.4g} FLOPs)"


@dataclass(frozen=True, slots=True)
class Skipping:
    """Statistics of the strips that a call left out; the backward pass adds its share when it runs.

    >>> print(Skipping())
    forward: 0 of 0 strips left out (0 FLOPs)
    backward: 0 of 0 strips left out (0 FLOPs)

    Attributes:
        forward: statistics of the forward pass.
        backward: statistics of the backward passes so far.
    """

    forward: PassSkipping = field(default_factory=PassSkipping)
    backward: PassSkipping = field(default_factory=PassSkipping)

    @property
    def skipped_flops(self) -> int:
        """FLOPs saved in both passes, compared with ``plan.flops``."""
        return self.forward.skipped_flops + self.backward.skipped_flops

    def __str__(self) -> str:
        return f"forward: {self.forward}\nbackward: {self.backward}"


@dataclass(frozen=True, slots=True)
class PassStatistics:
    """All statistics of one pass.

    Attributes:
        reading: inputs that it read.
        skipping: strips that it left out.
    """

    reading: PassReading = field(default_factory=PassReading)
    skipping: PassSkipping = field(default_factory=PassSkipping)


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """All statistics of one call.

    Attributes:
        reading: inputs that its passes read.
        skipping: strips that its passes left out.
    """

    reading: Reading = field(default_factory=Reading)
    skipping: Skipping = field(default_factory=Skipping)

    @property
    def forward(self) -> PassStatistics:
        """Statistics of the forward pass."""
        return PassStatistics(self.reading.forward, self.skipping.forward)

    @property
    def backward(self) -> PassStatistics:
        """Statistics of the backward passes."""
        return PassStatistics(self.reading.backward, self.skipping.backward)


@contextmanager
def report_flops(listener: Callable[[int], None]) -> Iterator[None]:
    """Call ``listener`` with the FLOPs of each program that compiled models of this process run, and of each strip that they skip.

    The sum over a call and its backward pass is ``plan.flops``. The listener must be quick, and must not raise.
    """
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


def note_flops(flops: int) -> None:
    """Report FLOPs to the listeners."""
    for listener in tuple(LISTENERS):
        listener(flops)
