"""Host memory of the decoded rows of slides: ``data.host_budget`` in bytes, also for ``auto``."""

from __future__ import annotations

import torch

from sft.api.memory_limits import host_limit, is_automatic
from sft.common.byte_units import format_bytes, parse_bytes
from sft.planner.options import Options
from sft.wsi.config import Config

__all__ = ["cache_budget"]

#: Share of the host's free memory, less a margin; smaller where the host is the device and computes as well.
_SHARE, _SHARE_ON_CPU = 1 / 2, 1 / 4


def cache_budget(config: Config) -> tuple[int | None, str]:
    """Bytes of ``data.host_budget``, ``None`` for none, and a text about the origin of an automatic one."""
    budget = config.data.host_budget
    if budget is None:
        return None, ""
    if not is_automatic(budget):
        return parse_bytes(budget), ""
    usable_bytes, note = host_limit(Options())
    share = _SHARE_ON_CPU if torch.device(config.train.device).type == "cpu" else _SHARE
    cache_bytes = max(1, int(share * usable_bytes))
    return cache_bytes, f"{format_bytes(cache_bytes)}; {note}"
