"""Lists of problems and names in error messages: the first twenty, and how many follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

__all__ = ["first_problems", "some_names"]

_NUM_SHOWN = 20


def first_problems(problems: Sequence[str]) -> list[str]:
    """The first problems, and a line that counts the others.

    >>> first_problems([f"line {number}" for number in range(2500)])[19:]
    ['line 19', 'and 2,480 more']
    """
    rest = len(problems) - _NUM_SHOWN
    return [*problems[:_NUM_SHOWN], *([f"and {rest:,} more"] if rest > 0 else [])]


def some_names(names: Collection[object]) -> str:
    """Names with commas between them, the first twenty and a count.

    >>> some_names(["a", 1]), some_names(range(25))[-15:]
    ('a, 1', '19, and 5 more')
    """
    return ", ".join(first_problems([*map(str, islice(names, _NUM_SHOWN)), *([""] * (len(names) - _NUM_SHOWN))]))
