"""Random numbers that follow from where they are used, not from what was drawn before.

Every draw has a generator of its own, keyed by the run's seed and by names and counters (epoch, slide, purpose). A run that is killed and
started again draws the same numbers without having to know how many were drawn.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["counter_seed", "philox_generator"]


def counter_seed(seed: int, *counters: int | str) -> int:
    """A number of 63 bits made of a seed and counters; the same on every machine.

    >>> counter_seed(0, "order", 3) == counter_seed(0, "order", 3), counter_seed(0, "order", 3) == counter_seed(0, "order", 4)
    (True, False)
    """
    digest = hashlib.blake2b(repr((int(seed), *counters)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def philox_generator(seed: int, *counters: int | str) -> np.random.Generator:
    """A counter-based generator (Philox; Salmon et al., 2011) for one purpose at one place."""
    return np.random.Generator(np.random.Philox(counter_seed(seed, *counters)))
