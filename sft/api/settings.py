"""Settings of one compiled module, the arguments of ``sft.compile`` that hold for all of its calls; requests to plan one kind of call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from sft.api.call_signature import CallSignature
from sft.api.memory_limits import MemoryLimits
from sft.api.outputs import OutputDestination
from sft.distributed.fsdp import ShardedWeights
from sft.distributed.mesh import LiveMesh, MeshShape
from sft.lower.context import Backend
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.measured.gpu_calibration import planning_model
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.torch_runtime.host.host_memory import HostAllocator
from sft.torch_runtime.profiling import table_folders

__all__ = ["CompileSettings", "PlanningRequest"]


@dataclass(frozen=True, kw_only=True, eq=False)
class CompileSettings:
    """Settings of one compiled module.

    Attributes:
        budget_bytes: device memory.
        options: planner options.
        optimizer: its state counts as resident; or the bytes of that state.
        plan: a plan passed by the user, for the calls that match it.
        destination: destination of outputs.
        mesh: the ranks that share an image, or the shape of a mesh without processes.
        backend: replaces the backend that the options select.
        sharding: the sharded weights, if any.
        backward_context: context of backward passes on a mesh, in which all ranks fail together.
        limits: limits that no argument states as a number.
        proposes: whether a budget error tries changes that may help.
    """

    budget_bytes: int
    options: Options = field(default_factory=Options)
    optimizer: torch.optim.Optimizer | int | None = None
    plan: Plan | None = None
    destination: OutputDestination = field(default_factory=OutputDestination)
    mesh: LiveMesh | MeshShape | None = None
    backend: Backend | None = None
    sharding: ShardedWeights | None = None
    backward_context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    proposes: bool = True

    @property
    def mesh_shape(self) -> MeshShape | None:
        """Numbers of replicas and bands; ``None`` for a single device."""
        return self.mesh.shape if isinstance(self.mesh, LiveMesh) else self.mesh

    @property
    def skips_repeats(self) -> bool:
        """True if constant strips may be skipped, by the options or by the given plan."""
        is_requested = self.options.skip_repeats or (self.plan is not None and self.plan.skips_repeats)
        return self.mesh is None and is_requested

    @property
    def host_allocator(self) -> HostAllocator:
        """Allocator of host memory for values that leave the device during a step."""
        folder = self.options.host_folder
        return HostAllocator(None if folder is None else Path(folder))

    def device_type(self, device: torch.device) -> str:
        """Kind of device that a plan for a model on ``device`` is made for; a model on the meta device may be planned for another one."""
        return self.limits.device_type or device.type

    def rates(self, device: torch.device) -> DeviceRates:
        """Rates of the device that a plan for a model on ``device`` is made for.

        Raises:
            InputError: the file of the GPU's calibrated rates cannot be read.
        """
        device_type = self.device_type(device)
        if device_type != "cuda":
            return DeviceRates(device_type)
        return DeviceRates(device_type, gpu=planning_model(device if device.type == "cuda" else torch.device("cuda"), table_folders()))

    def host_budget_bytes(self, device: torch.device) -> int | None:
        """Host bytes that the options allow a plan; ``None`` if they set no limit.

        On the CPU, device memory is host memory, so offloading saves no memory unless the options request it.
        """
        options = self.options
        is_requested = options.host_budget is not None or options.host_folder is not None or options.uses_host
        return 0 if self.device_type(device) == "cpu" and not is_requested else options.host_budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanningRequest:
    """A kind of call of a model to plan for.

    Attributes:
        model: the model.
        signature: the kind of call.
        settings: settings of the compiled module.
    """

    model: nn.Module
    signature: CallSignature
    settings: CompileSettings

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.signature.device
