"""An account of strips that were left out since they would have made what a neighbour made (``Options(skip_repeats=True)``)."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PassSkipping", "Skipping"]


@dataclass(slots=True, kw_only=True)
class PassSkipping:
    """What one pass, forward or backward, left out.

    Attributes:
        num_strips: strips of all walks, those that run forward once more to restore states included.
        num_skipped: of these, strips that were not run.
        skipped_flops: what these would have computed; the pass ran so much less than was planned.
    """

    num_strips: int = 0
    num_skipped: int = 0
    skipped_flops: int = 0

    def note(self, *, num_run: int, num_skipped: int, flops: int) -> None:
        """Count strips of a program of so many FLOPs."""
        self.num_strips += num_run + num_skipped
        self.num_skipped += num_skipped
        self.skipped_flops += num_skipped * flops

    def __str__(self) -> str:
        return f"{self.num_skipped:,} of {self.num_strips:,} strips left out ({self.skipped_flops:.4g} FLOPs)"


@dataclass(frozen=True, slots=True)
class Skipping:
    """What a call left out; the backward pass adds its part when it runs.

    >>> print(Skipping())
    forward: 0 of 0 strips left out (0 FLOPs)
    backward: 0 of 0 strips left out (0 FLOPs)

    Attributes:
        forward: of the forward pass.
        backward: of the backward passes so far.
    """

    forward: PassSkipping = field(default_factory=PassSkipping)
    backward: PassSkipping = field(default_factory=PassSkipping)

    @property
    def skipped_flops(self) -> int:
        """Of both passes: so much less than ``plan.flops`` was computed."""
        return self.forward.skipped_flops + self.backward.skipped_flops

    def __str__(self) -> str:
        return f"forward: {self.forward}\nbackward: {self.backward}"
