"""Memory limits of a compiled module: ``budget="auto"``, and the host memory that a plan may use where no option sets a limit.

Both are read once, when the model is compiled, so that every later plan of the module has the same limits. A part of the free memory is
left: a tenth on the host, where processes grow; a twentieth on a GPU, where a plan counts the allocator's rounding itself; and 256 MiB at
least. An automatic budget is rounded down to five binary digits (9.5 GiB, 10 GiB, 10.5 GiB): small changes of the free memory then give the
same budget, plan and bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from sft.common.byte_units import format_bytes, parse_bytes
from sft.common.errors import BudgetError, InputError
from sft.common.free_memory import FreeMemory, free_device_memory, free_disk, free_host_memory
from sft.common.installation import environment_number
from sft.distributed.fsdp import local_bytes
from sft.planner.options import Options

__all__ = ["AUTO", "MemoryLimits", "automatic_budget", "host_limit", "is_automatic", "planned_device_type", "resolve_limits"]

#: The budget that asks for the free memory of the device.
AUTO = "auto"

_HOST_MARGIN, _DEVICE_MARGIN, _MIN_MARGIN_BYTES = 0.1, 0.05, 256 * 2**20
_BINARY_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Limits that no argument states as a number, and their origin.

    Attributes:
        budget_note: origin of an automatic budget, for reports; empty for a given one.
        host_bytes: most bytes of the host (or of the disk of ``host_folder``) that a plan may use; ``None`` for no limit.
        host_note: origin of that limit.
        device_type: kind of device that is planned for, ``"cpu"`` or ``"cuda"``; empty for that of the model's device.
    """

    budget_note: str = ""
    host_bytes: int | None = None
    host_note: str = ""
    device_type: str = ""

    def on_ranks(self, own_bytes: int, least_bytes: int, num_ranks: int) -> MemoryLimits:
        """The limits of a rank whose automatic budget is the least of all ranks."""
        note = f"budget auto: {format_bytes(least_bytes)}, the least of {num_ranks} ranks"
        return self if own_bytes == least_bytes else replace(self, budget_note=note)

    def check_host(self, needed_bytes: int) -> None:
        """Check that the host has the memory of a plan.

        Raises:
            BudgetError: it has not.
        """
        if self.host_bytes is not None and needed_bytes > self.host_bytes:
            raise BudgetError(
                f"the values that a step offloads take {format_bytes(needed_bytes)}, but of the host's memory "
                f"{format_bytes(self.host_bytes)} can be used ({self.host_note}). Lower Options(host_budget=...) to that, give "
                "Options(host_folder=...) to keep these values on a disk, or raise the budget.",
                needed_bytes=needed_bytes,
            )


def is_automatic(budget: object) -> bool:
    """True for the budget ``"auto"``."""
    return isinstance(budget, str) and budget == AUTO


def planned_device_type(model: nn.Module, device: torch.device | str | None) -> str:
    """Kind of device that a model on the meta device is planned for; empty if ``device`` is the model's place instead.

    Raises:
        InputError: the device has no such name.
    """
    if device is None or not _is_meta(model):
        return ""
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device {str(device)!r}: write 'cpu' or 'cuda'") from error


def resolve_limits(
    model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | int | None, *, budget: float | str, device_type: str
) -> tuple[int, MemoryLimits]:
    """The budget in bytes, and the other limits.

    Args:
        model: the model, on the device of the computation or on the meta device.
        options: planner options.
        optimizer: its present state counts as memory of the model.
        budget: bytes, or ``"auto"``.
        device_type: kind of device that a model on the meta device is planned for; empty otherwise.

    Raises:
        InputError: the budget is not a number of bytes, or the free memory of the device cannot be read.
    """
    device = _device_of(model, device_type)
    if is_automatic(budget):
        budget_bytes, budget_note = automatic_budget(device, options, _own_bytes(model, optimizer, device))
    else:
        budget_bytes, budget_note = parse_bytes(budget), ""
    if _is_meta(model) and device_type != "cpu" and not torch.cuda.is_available():
        return budget_bytes, MemoryLimits(budget_note=budget_note, device_type=device_type)  # for another machine, with its own host
    host_bytes, host_note = host_limit(options)
    return budget_bytes, MemoryLimits(budget_note=budget_note, host_bytes=host_bytes, host_note=host_note, device_type=device_type)


def automatic_budget(device: torch.device, options: Options, own_bytes: int = 0) -> tuple[int, str]:
    """The free memory of a device less a margin, and its description.

    Args:
        device: the device.
        options: planner options; on the CPU the host budget is taken from the same memory.
        own_bytes: bytes on the device that belong to the model, and count in its budget.

    Raises:
        InputError: the device is not in this machine.
    """
    if device.type == "cpu":
        memory, name, margin = _shared(free_host_memory()), "the host", _HOST_MARGIN
    else:
        memory, name, margin = _device_memory(device), str(device), _DEVICE_MARGIN
    available = memory.free_bytes + own_bytes
    usable = available - max(_MIN_MARGIN_BYTES, int(margin * available))
    if device.type == "cpu" and options.host_folder is None:
        usable = usable // 2 if options.uses_host and options.host_budget is None else usable - (options.host_budget_bytes or 0)
    if usable <= 0:
        raise BudgetError(
            f"budget 'auto': of {format_bytes(memory.total_bytes)} on {name} {format_bytes(available)} are free, and nothing is left for a "
            "step after the margin. Free some memory, or give the budget in bytes.",
            needed_bytes=_MIN_MARGIN_BYTES,
        )
    rounded = _round_down(usable)
    return rounded, f"budget auto: {format_bytes(rounded)} of {format_bytes(available)} free on {name}"


def _device_memory(device: torch.device) -> FreeMemory:
    """Free memory of a device other than the CPU.

    Raises:
        InputError: it is not in this machine, or does not tell its memory.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("budget 'auto' is the free memory of the device, and this machine has no CUDA device; give bytes, such as '11GiB'")
    try:
        return free_device_memory(device)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        raise InputError(f"budget 'auto': the free memory of {device} is unknown ({error}); give bytes, such as '11GiB'") from error


def host_limit(options: Options) -> tuple[int, str]:
    """Bytes that a plan may use in addition to the device's budget, of the host or of the disk of ``host_folder``, and their origin."""
    if options.host_folder is not None:
        memory, name = free_disk(options.host_folder), f"the disk of {options.host_folder}"
    else:
        memory, name = _shared(free_host_memory()), "the host"
    usable = max(0, memory.free_bytes - max(_MIN_MARGIN_BYTES, int(_HOST_MARGIN * memory.free_bytes)))
    return usable, f"{format_bytes(memory.free_bytes)} are free on {name}"


def _shared(memory: FreeMemory) -> FreeMemory:
    """Part of a rank in the memory of a machine on which torchrun has started several."""
    count = environment_number("LOCAL_WORLD_SIZE", 1, least=1)
    return FreeMemory(free_bytes=memory.free_bytes // count, total_bytes=memory.total_bytes)


def _round_down(num_bytes: int) -> int:
    """The largest number with five binary digits that is not larger.

    >>> [_round_down(value) / 2**20 for value in (100 * 2**20, 1023 * 2**20, 2**30)]
    [100.0, 992.0, 1024.0]
    """
    shift = max(0, num_bytes.bit_length() - _BINARY_DIGITS)
    return num_bytes >> shift << shift


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _is_meta(model: nn.Module) -> bool:
    return any(tensor.device.type == "meta" for tensor in _tensors(model))


def _device_of(model: nn.Module, device_type: str) -> torch.device:
    """Device whose memory is the budget: of a model on the meta device the named one, or the GPU of this machine, or the CPU."""
    device = next((tensor.device for tensor in _tensors(model)), torch.device("cpu"))
    if device.type != "meta":
        return device
    return torch.device(device_type or ("cuda" if torch.cuda.is_available() else "cpu"))


def _own_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | int | None, device: torch.device) -> int:
    """Bytes that the model and its optimizer have allocated on the device already, and that a plan counts."""
    tensors = list(_tensors(model))
    tensors += [tensor.grad for tensor in model.parameters() if tensor.grad is not None]
    if isinstance(optimizer, torch.optim.Optimizer):
        tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum({id(tensor): local_bytes(tensor) for tensor in tensors if tensor.device.type == device.type}.values())
