"""What the lowering asks of a backend: to run parts of a program in another way than by ATen's operators.

A backend sees a program after it was lowered, as a list of ATen calls, and may put its own calls in their place. The lowering knows
nothing else of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from sft.lower.emitter import ProgramBuilder
from sft.lower.program import Port

__all__ = ["Backend"]


class Backend(Protocol):
    """Replaces instructions of a program."""

    def rewrite(self, emitter: ProgramBuilder, laid_out: Collection[Port], *, training: bool, turn: int | None = None) -> int | None:
        """Exchange instructions of the emitter.

        Args:
            emitter: holds the lowered program.
            laid_out: ports bound to images that are channels-last.
            training: whether a backward pass follows.
            turn: number of instructions of the first of two halves.

        Returns:
            The same number afterwards.
        """
