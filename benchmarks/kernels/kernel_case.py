"""Cases of the kernel benchmark, and their random tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Case", "Draw", "Problem", "all_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One operation on its tensors."""

    #: our kernel; repeated calls give the same result
    ours: Callable[[], Sequence[Tensor]]
    #: PyTorch's kernels for the same result; None without an equivalent
    theirs: Callable[[], object] | None
    #: reference of our results, in fp64, or of an integer dtype if it must be equal
    exact: Callable[[], Sequence[Tensor]]
    #: least number of bytes that are read and written
    num_bytes: int
    #: multiplications and additions
    num_flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation: its constructor, a small size to verify and a large one to time."""

    name: str
    family: str
    dtypes: tuple[torch.dtype, ...]
    build: Callable[[Draw], Problem]
    #: rows and columns (or slices, rows and columns) of the timed and of the verified tensors; ``build`` takes them from ``Draw.size``
    large: tuple[int, ...]
    small: tuple[int, ...]
    #: rounding of products of fp32 numbers; exact by default
    precision: str | None = None


@dataclass(slots=True, kw_only=True)
class Draw:
    """Random tensors on a device: channels-last, of one dtype."""

    device: torch.device
    dtype: torch.dtype
    size: tuple[int, ...]
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = torch.Generator(self.device).manual_seed(0)

    def image(self, num_channels: int, size: tuple[int, ...] | None = None) -> Tensor:
        """``[1, C, *size]``."""
        size = self.size if size is None else size
        memory = torch.randn(1, *size, num_channels, generator=self.random, device=self.device).to(self.dtype)
        return memory.movedim(-1, 1)

    def weight(self, num_out: int, num_in: int, *kernel: int) -> Tensor:
        """``[num_out, num_in, *kernel]``, of such a size that sums are near one."""
        memory = torch.randn(num_out, *kernel, num_in, generator=self.random, device=self.device)
        return memory.div(math.sqrt(memory[0].numel())).to(self.dtype).movedim(-1, 1)

    def vector(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """``[size]``."""
        return torch.randn(size, generator=self.random, device=self.device).to(self.dtype if dtype is None else dtype)


def all_rows(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors that are read or written once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
