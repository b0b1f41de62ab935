"""Inputs of one call of a region: its tensors and sources, and the memory and machines of its passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sft.runtime.region import Region
from sft.sources.sink import RowSink
from sft.sources.source import Source
from sft.torch_runtime.cuda_graphs import ActiveGraphs, GraphCache
from sft.torch_runtime.device_pool import DevicePool, PoolLayout
from sft.torch_runtime.gradient_groups import GradientGroups
from sft.torch_runtime.host.host_memory import HostAllocator, HostSlabPool
from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.host.staging import HostStaging
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.pass_graphs import PassGraphs
from sft.torch_runtime.pass_settings import pass_settings
from sft.torch_runtime.pass_statistics import CallStatistics
from sft.torch_runtime.weight_streaming import BoundWeights, WeightPass

__all__ = ["PlanResources", "RegionInputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResources:
    """Memory and recordings that the calls of one plan share; all are optional.

    Attributes:
        slab_pool: slabs on the host for offloaded values and direct cuts; ``None`` if there are none.
        staging_pool: page-locked memory for copies to a CUDA device; ``None`` if a step has none.
        pool_layout: layout of the memory pool of the steps; ``None`` for the device's default pool.
        graphs: programs that are replayed as CUDA graphs.
        pass_graphs: recordings of whole passes as CUDA graphs; ``None`` if passes are not recorded.
    """

    slab_pool: HostSlabPool | None = None
    staging_pool: HostSlabPool | None = None
    pool_layout: PoolLayout | None = None
    graphs: GraphCache | None = None
    pass_graphs: PassGraphs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionInputs:
    """Inputs of one call of a region.

    Attributes:
        names: value names of the tensors.
        tensors: resident inputs, parameters and buffers.
        device: device of the region.
        updated: buffers that are overwritten right after the forward pass; the backward pass does not read them.
        new_buffers: outputs of the region that are the new contents of buffers only. The caller copies them at once.
        sources: sources of the inputs that are not resident, by value name.
        version_guards: tensors that back such sources; changing one between forward and backward raises, as for all tensors.
        sinks: factories of the gradient sinks of such inputs that need a gradient, called once for each backward pass.
        statistics: statistics of the call, updated by its passes.
        resources: memory and recordings of the region's plan.
        host_allocator: allocates cuts on the host.
        make_machine: constructor of the machine of a pass.
        active_graphs: the recordings that are alive, over all plans of the model.
        device_pool: memory pool of the passes, for a plan with a layout of it.
        backward_context: context in which a backward pass runs.
        check_retain_graph: refuses a backward pass that retains the graph and would exceed the budget.
        weights: the streamed parameters; their entries in ``tensors`` are on the host.
        gradient_groups: groups of the parameters whose gradients are copied; none for a plan without recorded passes.
        cudnn_benchmark: leave ``torch.backends.cudnn.benchmark`` as it is while strips run.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    device: torch.device
    updated: frozenset[str] = frozenset()
    new_buffers: frozenset[str] = frozenset()
    sources: Mapping[str, Source] = field(default_factory=dict)
    version_guards: tuple[torch.Tensor, ...] = ()
    sinks: Mapping[str, Callable[[], RowSink]] = field(default_factory=dict)
    statistics: CallStatistics = field(default_factory=CallStatistics)
    resources: PlanResources = field(default_factory=PlanResources)
    host_allocator: HostAllocator = field(default_factory=HostAllocator)
    make_machine: Callable[..., TorchMachine] = TorchMachine
    active_graphs: ActiveGraphs = field(default_factory=ActiveGraphs)
    device_pool: DevicePool = field(default_factory=DevicePool)
    backward_context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    check_retain_graph: Callable[[], None] = lambda: None
    weights: BoundWeights | None = None
    gradient_groups: GradientGroups = field(default_factory=GradientGroups)
    cudnn_benchmark: bool = False

    @property
    def has_pool(self) -> bool:
        """True if the passes allocate in a memory pool of their own."""
        return self.resources.pool_layout is not None

    def pass_settings(self, region: Region) -> contextlib.AbstractContextManager[None]:
        """Settings of torch during a pass of the region."""
        return pass_settings(region, self.device, cudnn_benchmark=self.cudnn_benchmark)

    def memory(self) -> contextlib.AbstractContextManager[None]:
        """Context in which a pass allocates device memory."""
        layout = self.resources.pool_layout
        return contextlib.nullcontext() if layout is None else self.device_pool.use(self.device, layout)

    def make_offloader(self, *, is_recorded: bool = False) -> HostOffloader | None:
        """Copies on the host of one step; ``None`` for a region without any."""
        slab_pool = self.resources.slab_pool
        return None if slab_pool is None else HostOffloader(self.device, slab_pool.lease(), is_recorded=is_recorded)

    def forward_weights(self) -> contextlib.AbstractContextManager[WeightPass | None]:
        """Streamed weights of a forward pass; ``None`` if all are resident."""
        return contextlib.nullcontext() if self.weights is None else self.weights.forward()

    def backward_weights(self, reached: Collection[str], grads: dict[str, Any]) -> contextlib.AbstractContextManager[WeightPass | None]:
        """Streamed weights of a backward pass, which adds to ``grads``; see :meth:`BoundWeights.backward`."""
        return contextlib.nullcontext() if self.weights is None else self.weights.backward(reached, grads)

    def machine(self, *, backward: bool, offloader: HostOffloader | None = None, weights: WeightPass | None = None) -> TorchMachine:
        """Machine of one pass."""
        resources = self.resources
        self.active_graphs.activate(resources.pass_graphs or resources.graphs)
        return self.make_machine(
            self.device,
            statistics=self.statistics.backward if backward else self.statistics.forward,
            offloader=offloader,
            host_allocator=self.host_allocator,
            graphs=resources.graphs,
            weights=weights,
            staging=HostStaging(None if resources.staging_pool is None else resources.staging_pool.lease()),
        )
