"""Settings of torch during a pass: no autocast, and no search for convolution algorithms while strips run.

Programs contain every cast that they need, so autocast is off, whatever the caller's setting.

With ``torch.backends.cudnn.benchmark`` cuDNN times its algorithms for each new shape, on each thread, and uses all memory that is free
while it does. A plan in strips has tens of shapes (first, inner and last strips of every segment), so a search takes many seconds at every
new image size, and it may select an algorithm with a workspace of gibibytes, for which smaller strips would have to pay. Without the search
cuDNN selects by its heuristics. A plan without strips keeps the setting: its shapes are those of plain PyTorch.

The setting is global, and passes on several devices may overlap: the first one turns the search off, the last one restores it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from sft.common.torch_internals import set_algorithm_search
from sft.runtime.region import Region
from sft.runtime.tiled_segment import TiledSegment

__all__ = ["autocast_disabled", "pass_settings"]


class _SearchSwitch:
    """Switch that several threads may turn off at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._was_on = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context without the search."""
        with self._lock:
            if self._num_users == 0:
                self._was_on = torch.backends.cudnn.benchmark
                set_algorithm_search(False)
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    set_algorithm_search(self._was_on)


_SWITCH = _SearchSwitch()


@contextlib.contextmanager
def pass_settings(region: Region, device: torch.device, *, cudnn_benchmark: bool = False) -> Iterator[None]:
    """Context in which a region runs.

    Args:
        region: the region.
        device: its device.
        cudnn_benchmark: true to leave the algorithm search as it is for strips, too (``Options.cudnn_benchmark``).
    """
    has_strips = any(isinstance(segment, TiledSegment) for segment in region.segments)
    with autocast_disabled(device), _SWITCH.off() if has_strips and not cudnn_benchmark else contextlib.nullcontext():
        yield


def autocast_disabled(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context in which autocast does not change this device's operators."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
