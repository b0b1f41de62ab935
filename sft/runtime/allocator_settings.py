"""Settings of PyTorch's CUDA caching allocator (``PYTORCH_ALLOC_CONF``), and the sizes of blocks that follow from them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from sft.common.errors import InputError

__all__ = ["AllocatorSettings"]

_MIB: Final = 2**20
_MIN_BLOCK_BYTES: Final = 512
_MOST_ROUNDING_BYTES: Final = 20 * _MIB
#: Variables of the environment, in the order in which torch reads them.
_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Settings that the simulator follows, and the threshold at which unused segments are released, which lowers reserved bytes.
_DESCRIBED: Final = frozenset(
    {
        "expandable_segments",
        "garbage_collection_threshold",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "release_lock_on_cudamalloc",
        "roundup_power2_divisions",
    }
)
#: Settings about host memory.
_HOST_PREFIX: Final = "pinned_"
#: ``roundup_power2_divisions`` has an entry for each power of two from 1 MiB on.
_NUM_DIVISION_INTERVALS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the caching allocator that change its reserved bytes.

    Attributes:
        expandable_segments: segments grow instead of multiplying.
        max_split_size_bytes: blocks of this size or more are not split; ``None`` for no limit.
        max_non_split_rounding_bytes: largest rest that a request of ``max_split_size_bytes`` or more may leave in a block.
        roundup_power2_divisions: number of divisions between two powers of two to which sizes are rounded up. Entry ``i`` is for sizes from
            ``2**i`` MiB on; the first one also for smaller sizes, the last one for all larger ones. Empty for none.
        is_native: false for ``backend:cudaMallocAsync``, which this simulator does not describe.
        undescribed: settings that may change reserved bytes, and that this simulator does not follow.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = _MOST_ROUNDING_BYTES
    roundup_power2_divisions: tuple[int, ...] = ()
    is_native: bool = True
    undescribed: tuple[str, ...] = ()

    @classmethod
    def of_environment(cls) -> AllocatorSettings:
        """Settings of ``PYTORCH_CUDA_ALLOC_CONF``, or of ``PYTORCH_ALLOC_CONF``.

        Raises:
            InputError: a value is malformed.
        """
        text = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
        return cls.parse(text)

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Settings in the form of the variable, such as ``"max_split_size_mb:512,expandable_segments:True"``.

        Raises:
            InputError: a value is malformed.

        >>> AllocatorSettings.parse("expandable_segments:True").expandable_segments
        True
        """
        options = dict(re.findall(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\[]+)", text))
        split_mb = options.get("max_split_size_mb")
        try:
            return cls(
                expandable_segments=options.get("expandable_segments", "").strip().lower() == "true",
                max_split_size_bytes=None if split_mb is None else int(split_mb) * _MIB,
                max_non_split_rounding_bytes=int(options.get("max_non_split_rounding_mb", _MOST_ROUNDING_BYTES // _MIB)) * _MIB,
                roundup_power2_divisions=_parse_divisions(options.get("roundup_power2_divisions", "").strip()),
                is_native=options.get("backend", "native").strip() == "native",
                undescribed=tuple(f"{name}:{value.strip()}" for name, value in options.items() if not _is_described(name, value.strip())),
            )
        except ValueError as error:
            raise InputError(
                f"the allocator settings {text!r} have a value that is not a number ({error}); see PYTORCH_ALLOC_CONF"
            ) from error

    def block_bytes(self, num_bytes: int) -> int:
        """Size of a request after rounding."""
        if num_bytes < _MIN_BLOCK_BYTES:
            return _MIN_BLOCK_BYTES
        divisions = 0
        if self.roundup_power2_divisions:
            interval = num_bytes.bit_length() - _MIB.bit_length()
            divisions = self.roundup_power2_divisions[min(max(interval, 0), _NUM_DIVISION_INTERVALS - 1)]
        if divisions > 1 and num_bytes > _MIN_BLOCK_BYTES * divisions:
            floor = 1 << (num_bytes.bit_length() - 1)
            step = max(1, floor // divisions)
            return -(-num_bytes // step) * step
        return -(-num_bytes // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES


def _is_described(name: str, value: str) -> bool:
    """True for a setting that the simulator follows, or that cannot raise reserved bytes."""
    return name in _DESCRIBED or name.startswith(_HOST_PREFIX) or (name, value) == ("backend", "native")


def _parse_divisions(text: str) -> tuple[int, ...]:
    """Divisions by interval: a number for all sizes, or ``[256:1,512:2,>:4]`` with powers of two in MiB."""
    if not text:
        return ()
    if not text.startswith("["):
        return (int(text),) * _NUM_DIVISION_INTERVALS
    intervals, interval = [0] * _NUM_DIVISION_INTERVALS, -1
    for bound, count in (entry.split(":") for entry in text.strip("[] ").split(",")):
        if bound.strip() == ">":
            intervals[interval + 1 :] = [int(count)] * (_NUM_DIVISION_INTERVALS - interval - 1)
            continue
        first, interval = interval < 0, min(int(bound).bit_length() - 1, _NUM_DIVISION_INTERVALS - 1)
        intervals[0 if first else interval : interval + 1] = [int(count)] * (interval + 1 if first else 1)
    return tuple(intervals)
