"""World: the processes of this program, as torchrun started them; known without torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

__all__ = ["World"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Processes of this program, as torchrun started them.

    Attributes:
        num_ranks: number of ranks.
        rank: index of this process.
        local_rank: index on this machine.
        num_local: number of ranks on this machine.
    """

    num_ranks: int = 1
    rank: int = 0
    local_rank: int = 0
    num_local: int = 1

    @classmethod
    def here(cls) -> World:
        """World of ``torch.distributed`` if it is initialised, otherwise of the environment."""
        dist = sys.modules.get("torch.distributed")  # not initialised where nothing has imported it
        if dist is not None and dist.is_available() and dist.is_initialized():
            num_ranks, rank = dist.get_world_size(), dist.get_rank()
        else:
            num_ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(num_ranks=num_ranks, rank=rank, local_rank=local_rank, num_local=int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
