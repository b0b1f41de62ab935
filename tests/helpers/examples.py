"""Numbers of Hypothesis examples of tests whose examples take long."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["at_most"]


def at_most(num_examples: int, *, one_in: int | None = None) -> settings:
    """Settings with the profile's number of examples, up to this number.

    Args:
        num_examples: the limit.
        one_in: raise the limit to one in this number of the profile's examples.
    """
    profile = settings().max_examples
    return settings(max_examples=min(profile, max(num_examples, profile // one_in if one_in else 0)))
