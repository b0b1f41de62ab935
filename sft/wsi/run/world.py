"""World: the processes of this program, as torchrun started them; known without torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from sft.common.errors import InputError
from sft.common.installation import environment_number

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
        """World of ``torch.distributed`` if it is initialised, otherwise of the environment.

        Raises:
            InputError: the environment has no such world; a rank that is quiet by mistake would hide all errors.
        """
        dist = sys.modules.get("torch.distributed")  # not initialised where nothing has imported it
        if dist is not None and dist.is_available() and dist.is_initialized():
            num_ranks, rank = dist.get_world_size(), dist.get_rank()
        else:
            num_ranks, rank = environment_number("WORLD_SIZE", 1, least=1), environment_number("RANK", 0, least=0)
        num_local = environment_number("LOCAL_WORLD_SIZE", num_ranks, least=1)
        local_rank = environment_number("LOCAL_RANK", rank, least=0)
        if rank >= num_ranks or local_rank > rank or local_rank >= num_local:
            raise InputError(
                f"the environment variables RANK {rank}, WORLD_SIZE {num_ranks}, LOCAL_RANK {local_rank} and LOCAL_WORLD_SIZE {num_local} "
                "contradict each other: start all ranks with torchrun, which sets them, or unset them for one process"
            )
        return cls(num_ranks=num_ranks, rank=rank, local_rank=local_rank, num_local=num_local)
