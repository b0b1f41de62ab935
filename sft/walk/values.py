"""What segments run on and leave behind: whole tensors by value name."""

from __future__ import annotations

from dataclasses import dataclass, field

from sft.walk.machine import Buffer, StripLoader

__all__ = ["Gradients", "ValueBindings"]


@dataclass(slots=True)
class ValueBindings:
    """Whole tensors by value name: cuts, parameters, buffers, global values; of inputs that are not resident, the sources; of outputs
    that leave strip by strip, what takes them on the host.

    ``readers`` are those of the running walk, by input; ``reads_skipped`` says whether they read strips that are left out, too.
    """

    by_name: dict[str, Buffer] = field(default_factory=dict)
    readers: dict[str, StripLoader] = field(default_factory=dict)
    reads_skipped: bool = False


@dataclass(slots=True)
class Gradients:
    """Gradients of whole tensors by value name, on the host for outputs that leave strip by strip.

    ``sinks`` take those of inputs that are not resident.
    """

    by_name: dict[str, Buffer] = field(default_factory=dict)
    sinks: dict[str, Buffer] = field(default_factory=dict)
