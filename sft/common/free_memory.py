"""Free memory of the host and of a device: the bytes that this process may still allocate, and their total.

On Linux the host has ``MemAvailable`` of ``/proc/meminfo``, and at most what the limits of this process's control groups (containers, batch
schedulers) leave. Pages of files in the cache of such a group can be dropped, so they count as free. On a CUDA device the blocks that
torch's caching allocator has reserved and not given out count as free.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["FreeMemory", "free_device_memory", "free_disk", "free_host_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Free memory at one moment.

    Attributes:
        free_bytes: bytes that this process may still allocate.
        total_bytes: bytes that exist, or that a control group allows.
    """

    free_bytes: int
    total_bytes: int


def free_host_memory(root: Path = Path("/")) -> FreeMemory:
    """Free memory of the host.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    total, available = _machine_memory(root)
    for limit, used in _group_limits(root):
        if limit < total:
            total, available = limit, min(available, limit)
        available = min(available, max(0, limit - used))
    return FreeMemory(free_bytes=available, total_bytes=total)


def free_device_memory(device: torch.device) -> FreeMemory:
    """Free memory of a device other than the CPU.

    Raises:
        RuntimeError, AttributeError, NotImplementedError: torch does not know it.
    """
    import torch

    if device.type != "cuda":
        free, total = torch.accelerator.get_memory_info(device)
        return FreeMemory(free_bytes=free, total_bytes=total)
    free, total = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats(device)
    cached = statistics.get("reserved_bytes.all.current", 0) - statistics.get("allocated_bytes.all.current", 0)
    return FreeMemory(free_bytes=free + cached, total_bytes=total)


def free_disk(folder: str | os.PathLike[str]) -> FreeMemory:
    """Free space of the file system of a folder."""
    usage = shutil.disk_usage(folder)
    return FreeMemory(free_bytes=usage.free, total_bytes=usage.total)


def _machine_memory(root: Path) -> tuple[int, int]:
    """Total and available bytes of the machine; half of the total where the available bytes are unknown."""
    values = _key_values(root / "proc" / "meminfo")
    if "MemTotal" in values and "MemAvailable" in values:
        return 1024 * values["MemTotal"], 1024 * values["MemAvailable"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total // 2


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and used bytes of this process's control groups and of the groups above them, if any have a limit."""
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, group = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        path = Path(group.lstrip("/"))
        for folder in (path, *path.parents):  # the last one is the mount itself: all that a container sees of its own group
            limit, used = _number(mount / folder / names[0]), _number(mount / folder / names[1])
            if limit is not None and used is not None:
                yield limit, used - _key_values(mount / folder / "memory.stat").get(names[2], 0)


def _number(path: Path) -> int | None:
    """The number in a file; ``None`` without a file or a number (``max``)."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _key_values(path: Path) -> dict[str, int]:
    """Numbers of a file with lines such as ``MemTotal:  1024 kB`` or ``inactive_file 4096``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}
