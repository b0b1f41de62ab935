"""Argmax storage of max pooling: the window offset (tap) of each maximum.

Windows of at most four elements take two bits for a tap, so the taps of four neighbouring channels share a byte. Larger windows take a byte
for each tap. PyTorch's index takes eight bytes.
"""

from __future__ import annotations

from sft.kernels.geometry import Geometry

__all__ = ["TAPS_PER_BYTE", "is_packed", "tap_channels"]

#: taps in a byte if they are packed
TAPS_PER_BYTE = 4


def is_packed(geometry: Geometry) -> bool:
    """True if a tap takes two bits."""
    return geometry.kernel[0] * geometry.kernel[1] <= TAPS_PER_BYTE


def tap_channels(num_channels: int, geometry: Geometry) -> int:
    """Bytes of the taps of one pixel.

    >>> from sft.kernels.geometry import KernelWindow
    >>> [tap_channels(6, Geometry.whole((8, 8), KernelWindow(kernel=k), KernelWindow(kernel=k))) for k in (2, 3)]
    [2, 6]
    """
    return -(-num_channels // TAPS_PER_BYTE) if is_packed(geometry) else num_channels
