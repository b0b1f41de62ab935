"""``torch.use_deterministic_algorithms``, out of the way of captures.

With it ``torch.nn.functional`` replaces interpolations, paddings and pools of volumes on GPUs by indexing of whole images, which has no
rows that a strip could compute. What is captured is the operator; that its sums have an order is the lowering's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["allow_nondeterministic", "needs_deterministic_sums"]


@contextlib.contextmanager
def allow_nondeterministic() -> Iterator[None]:
    """A context in which PyTorch asks for no deterministic algorithms."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=only_warns)


def needs_deterministic_sums(device: torch.device) -> bool:
    """Whether sums must be made in an order that PyTorch's own derivatives do not keep on a device. On the CPU they do."""
    return device.type != "cpu" and torch.are_deterministic_algorithms_enabled()
