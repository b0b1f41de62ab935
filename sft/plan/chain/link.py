"""The link between device and host."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sft.errors import InputError

__all__ = ["HostLink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """How fast bytes leave the device and come back.

    Attributes:
        down_bytes_per_second: from the device to the host.
        up_bytes_per_second: from the host to the device.
        full_duplex: whether both ways work at once; otherwise copies take turns, in the order in which they were issued.
    """

    down_bytes_per_second: float = 12.2e9
    up_bytes_per_second: float = 12.2e9
    full_duplex: bool = True

    def __post_init__(self) -> None:
        for name in ("down_bytes_per_second", "up_bytes_per_second"):
            rate = getattr(self, name)
            if not (rate > 0 and math.isfinite(rate)):
                raise InputError(f"{name} is {rate}; a link needs a positive, finite rate")

    def down_seconds(self, num_bytes: float) -> float:
        """Time to offload so many bytes."""
        return num_bytes / self.down_bytes_per_second

    def up_seconds(self, num_bytes: float) -> float:
        """Time to bring so many bytes back."""
        return num_bytes / self.up_bytes_per_second

    def streamed_seconds(self, down_bytes: float, up_bytes: float) -> float:
        """Time for bytes of both ways that pass while one operation runs."""
        down, up = self.down_seconds(down_bytes), self.up_seconds(up_bytes)
        return max(down, up) if self.full_duplex else down + up
