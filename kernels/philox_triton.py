"""Philox 4x32-10 as a Triton device function: the bits of ``philox.philox4x32``, see there.

Not ``tl.rand`` or ``tl.randint4x``: their counters and their words are Triton's to change, ours are part of a promise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sft.kernels import philox

__all__ = ["philox4x32"]

# Triton reads module constants only as constexpr.
_MULTIPLIER_0 = tl.constexpr(philox.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIERS[1])
_KEY_INCREMENT_0 = tl.constexpr(philox.KEY_INCREMENTS[0])
_KEY_INCREMENT_1 = tl.constexpr(philox.KEY_INCREMENTS[1])
_NUM_ROUNDS = tl.constexpr(philox.NUM_ROUNDS)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four uint32 blocks of random words for a counter of four uint32 blocks and a key of two, all of one shape."""
    m0 = tl.full(c0.shape, _MULTIPLIER_0, tl.uint32)
    m1 = tl.full(c0.shape, _MULTIPLIER_1, tl.uint32)
    for _ in tl.static_range(_NUM_ROUNDS):
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full(k0.shape, _KEY_INCREMENT_0, tl.uint32)
        k1 += tl.full(k1.shape, _KEY_INCREMENT_1, tl.uint32)
    return c0, c1, c2, c3
