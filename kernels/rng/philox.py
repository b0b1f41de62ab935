"""Philox 4x32-10 in plain PyTorch: a counter-based generator, random words as a stateless function of a counter and a key.

A dropout mask that must not depend on the tiling cannot come from a generator with a state: each tile would need the number of words that
all earlier tiles drew. A counter-based generator is a bijection of 128-bit counters, selected by a 64-bit key, that passes the usual
batteries of statistical tests. The word of a position is the value of the function at its counter, in any order and on any device.

Ten rounds, each of two 32 x 32 -> 64 bit multiplications; the key grows by a constant between rounds.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3; the multipliers
and the key increments (the golden ratio and the square root of 3, less one) are from that section.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KEY_INCREMENTS", "MULTIPLIERS", "NUM_ROUNDS", "KeyWord", "draw_seed", "key_of", "philox4x32", "seed_tensor", "seed_word"]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10

_LOW_WORD = 0xFFFFFFFF


#: A word of a key: a number, or an int64 tensor with one element.
KeyWord = int | Tensor


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[KeyWord, KeyWord]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter.

    Args:
        counter: four int64 tensors of shapes that broadcast, words in [0, 2**32), the least significant first.
        key: two words in [0, 2**32), the least significant first.

    Returns:
        Four int64 tensors of the broadcast shape, words in [0, 2**32). All operations are integer operations without
        overflow, so the result is the same on every device.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox4x32((zero, zero, zero, zero), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = (high1 ^ c1) ^ k0, low1, (high0 ^ c3) ^ k1, low0
        k0 = (k0 + KEY_INCREMENTS[0]) & _LOW_WORD
        k1 = (k1 + KEY_INCREMENTS[1]) & _LOW_WORD
    return c0, c1, c2, c3


def _multiply(words: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of ``words * multiplier``.

    The product needs 64 bits, and int64 has 63. Both multipliers exceed 2**31, so ``multiplier - 2**32`` is negative and small: the product
    with it fits and has the same low word, and its high word is smaller by ``words``.
    """
    product = words * (multiplier - 2**32)
    return (product >> 32).add_(words), product.bitwise_and_(_LOW_WORD)


def key_of(seed: KeyWord) -> tuple[KeyWord, KeyWord]:
    """The key of a 64-bit seed, low word first. A negative seed counts as its two's complement.

    The key of a seed in a tensor is computed by the tensor's device, so that no host thread waits for its value.

    >>> key_of(-1) == key_of(2**64 - 1) == (0xFFFFFFFF, 0xFFFFFFFF)
    True
    """
    return seed & _LOW_WORD, (seed >> 32) & _LOW_WORD


def seed_tensor(seed: int, device: torch.device) -> Tensor:
    """The seed as an int64 tensor with one element, in two's complement.

    On a CUDA device its kernels read it, and a kernel writes it: no copy from the host. For other devices it is in host memory.

    >>> seed_tensor(2**64 - 1, torch.device("cpu"))
    tensor([-1])
    """
    value = seed - 2**64 if seed >= 2**63 else seed
    if device.type != "cuda":
        return torch.tensor([value], device="cpu")
    return torch.full((1,), value, dtype=torch.int64, device=device)


def seed_word(seed: Tensor) -> KeyWord:
    """The seed as a number if it is in host memory, otherwise the tensor: no host thread waits for a device."""
    return int(seed) if seed.device.type == "cpu" else seed


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed in [0, 2**64) from a CPU generator of torch (default: the global one).

    >>> draw_seed(torch.Generator().manual_seed(3)) == draw_seed(torch.Generator().manual_seed(3))
    True
    """
    low, high = torch.randint(2**32, (2,), dtype=torch.int64, generator=generator, device="cpu").tolist()
    return int(high << 32 | low)
