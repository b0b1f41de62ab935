"""Resources: the device and its host, the placement of a sized graph's tensors on them, and the bytes that no plan can change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.lower.context import Backend
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.plan import SegmentChoice
from sft.planner.sized_graph import SizedGraph
from sft.runtime.weight_prefetch import StreamedWeights
from sft.solvers.chain import HostLink

__all__ = ["Resources"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Resources:
    """Memory, execution mode and tensor placement for one sized graph, independent of the budget.

    Attributes:
        sized: the graph at one input size.
        resident_bytes: bytes of parameters, their gradients, buffers and optimizer state.
        overhead_bytes: bytes that the device takes in addition to all tensors: rounding of the allocator, workspaces of libraries.
        from_source: model inputs that are read strip by strip, and never resident.
        outputs_on_host: true if the model's outputs are stored on the host.
        on_host: true if the device's memory is the host's.
        host_budget_bytes: most bytes of host memory for values that leave the device during a step; ``None`` is no limit.
        host_is_files: true if these values are in files.
        rates: rates of the device.
        link: transfer rates between device and host.
        backend: rewrites parts of programs into kernels; ``None`` for ATen alone.
        skips_repeats: true if constant strips are skipped.
        deterministic: true if sums must be computed in a fixed order, which PyTorch's own derivatives do not keep on the device.
        weights: the streamed parameters; ``None`` if all are resident.
    """

    sized: SizedGraph
    resident_bytes: int = 0
    overhead_bytes: int = 0
    from_source: frozenset[str] = frozenset()
    outputs_on_host: bool = False
    on_host: bool = True
    host_budget_bytes: int | None = None
    host_is_files: bool = False
    rates: DeviceRates = field(default_factory=DeviceRates)
    link: HostLink = field(default_factory=HostLink)
    backend: Backend | None = None
    skips_repeats: bool = False
    deterministic: bool = False
    weights: StreamedWeights | None = None

    def direct_cuts(self, choices: Sequence[SegmentChoice]) -> frozenset[str]:
        """Streamed cuts of which a strip is one block of bytes for each sample, on the device and in page-locked memory.

        They are images and volumes, which have their channels last, and all their segments are tiled, the first one in full width. None is
        in a file, or compared by a strip policy.
        """
        if self.on_host or self.host_is_files or self.skips_repeats:
            return frozenset()
        untiled = {name for choice in choices if choice.mode != "tiled" for name in choice.nodes}
        return frozenset(
            name
            for choice in choices
            if choice.streamed and self.sized.num_panels(choice.nodes, choice.panel_cols) == 1
            for name in choice.streamed
            if len(self.sized.shapes[name]) in CHANNELS_LAST and untiled.isdisjoint(self.sized.graph.users[name])
        )

    @property
    def occupied_bytes(self) -> int:
        """Bytes of the budget that are taken for every plan."""
        return self.resident_bytes + self.overhead_bytes

    def fits_host(self, num_bytes: int) -> bool:
        """True if a step may take so many bytes of the host."""
        return self.host_budget_bytes is None or num_bytes <= self.host_budget_bytes

    @property
    def resident_inputs(self) -> tuple[str, ...]:
        """Model inputs that are full tensors on the device."""
        return tuple(name for name in self.sized.graph.inputs if name not in self.from_source)

    @cached_property
    def resident_input_bytes(self) -> int:
        """Bytes of the resident inputs."""
        return sum(map(self.sized.value_bytes, self.resident_inputs))

    @cached_property
    def input_grad_bytes(self) -> int:
        """Bytes of the gradients of the resident inputs that need one."""
        return sum(self.sized.value_bytes(name) for name in self.resident_inputs if name in self.sized.requires_grad)

    @cached_property
    def host_outputs(self) -> frozenset[str]:
        """Outputs that are computed and stored on the host; an input or a parameter that the model returns stays in place."""
        if not self.outputs_on_host:
            return frozenset()
        return frozenset(name for name in self.sized.graph.outputs if self.sized.graph[name].kind == "operator")

    @cached_property
    def border_bytes(self) -> int:
        """Bytes of the resident inputs, of the outputs on the device and, in training, of these outputs' gradients."""
        outputs = [name for name in self.sized.graph.results if name not in self.host_outputs]
        grads = [name for name in outputs if name in self.sized.requires_grad]
        values = dict.fromkeys((*self.resident_inputs, *outputs))
        return sum(map(self.sized.value_bytes, values)) + sum(map(self.sized.value_bytes, grads))

    @cached_property
    def step_end_bytes(self) -> int:
        """Lower bound of the peak of every plan: resident inputs, outputs on the device, and gradients that a step returns, at its end."""
        graph = self.sized.graph
        outputs = {name for name in graph.outputs if graph[name].kind == "operator"} - self.host_outputs
        gradients = (name for name in self.resident_leaves & self.sized.requires_grad if name not in self.from_source)
        return self.resident_input_bytes + sum(map(self.sized.value_bytes, outputs)) + sum(map(self.sized.value_bytes, gradients))

    @cached_property
    def resident_leaves(self) -> frozenset[str]:
        """Inputs, parameters and buffers with gradients on the device at the end of a step."""
        streamed = frozenset() if self.weights is None else frozenset(self.weights.num_bytes)
        return frozenset(node.name for node in self.sized.graph.nodes if node.kind != "operator") - streamed

    @cached_property
    def streamed_grad_bytes(self) -> int:
        """Bytes of the gradients of all streamed weights, which never exist at once."""
        names = frozenset() if self.weights is None else self.sized.requires_grad.intersection(self.weights.num_bytes)
        return sum(map(self.sized.grad_bytes, names))

    @property
    def input_placements(self) -> tuple[str, ...]:
        """Location of each input; see `sft.Plan`."""
        return tuple("source" if name in self.from_source else "device" for name in self.sized.graph.inputs)

    @property
    def output_placements(self) -> tuple[str, ...]:
        """Location of each output; see `sft.Plan`."""
        return ("host" if self.outputs_on_host else "device",) * len(self.sized.graph.outputs)
