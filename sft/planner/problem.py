"""Planning problem: a sized graph, its resources, the limits of the search, and a memo of derived results."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.graph import Graph, refs_in
from sft.common.weighted_lru import WeightedLRU
from sft.planner.memo import Memo
from sft.planner.resources import Resources
from sft.planner.search_limits import SearchLimits
from sft.planner.sized_graph import SizedGraph

__all__ = ["PlanningProblem"]

#: Names of the operator rules that slide a weight over an image.
_CONVOLUTIONS = ("convolution", "transposed_convolution")

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanningProblem:
    """A model at one input size, on one device.

    Attributes:
        resources: the device, the host, and the placement of tensors.
        limits: thresholds of the search for plans.
        shared: results that also hold at other image sizes; shared by all problems of one capture.
        memo: results derived from this problem. ``dataclasses.replace`` starts an empty one.
    """

    resources: Resources
    limits: SearchLimits = field(default_factory=SearchLimits)
    shared: WeightedLRU = field(default_factory=WeightedLRU, repr=False)
    memo: Memo = field(default_factory=Memo, init=False, repr=False)

    @property
    def sized(self) -> SizedGraph:
        """The graph at one input size."""
        return self.resources.sized

    def with_graph(self, graph: Graph) -> PlanningProblem:
        """The problem of another graph with the same phases and sizes."""
        sized = replace(self.sized, phases=replace(self.sized.phases, graph=graph))
        return replace(self, resources=replace(self.resources, sized=sized))

    def with_overhead(self, num_bytes: int) -> PlanningProblem:
        """The same problem with this device overhead; no derived result depends on it, so the memo is shared."""
        return self._with_resources(replace(self.resources, overhead_bytes=num_bytes))

    def with_host_budget(self, num_bytes: int | None) -> PlanningProblem:
        """The same problem with another budget of host memory; derived results depend on it by their keys."""
        return self._with_resources(replace(self.resources, host_budget_bytes=num_bytes))

    def with_replays(self) -> PlanningProblem:
        """The same problem for passes that CUDA graphs replay; derived results depend on it by the rates in their keys."""
        return self._with_resources(replace(self.resources, rates=replace(self.resources.rates, replays=True)))

    def _with_resources(self, resources: Resources) -> PlanningProblem:
        problem = replace(self, resources=resources)
        object.__setattr__(problem, "memo", self.memo)
        return problem

    def memoize_across_sizes(self, key: Hashable, make: Callable[[], ValueT], weight: int = 1) -> ValueT:
        """Result of ``make``, computed at the first call with this key and an equal :attr:`structural_key`, at any image size.

        Args:
            key: identifies the result among those of one structural key.
            make: computes it.
            weight: its size, in operators, for the eviction of old results.
        """
        return self.shared.get_or_make((self.structural_key, key), make, weight)

    @cached_property
    def structural_key(self) -> Hashable:
        """Key shared by problems that differ only in image extents along the tiled axes."""
        sized, resources = self.sized, self.resources
        axes, streamed = sized.graph.axes, sized.phases.streamed
        nodes = hashlib.sha256()
        for node in sized.graph.nodes:
            shape = node.shape
            if node.name in streamed:
                shape = axes.with_extent(axes.with_extent(sized.shapes[node.name], ROWS, 0), COLUMNS, 0)
            nodes.update(repr((node.name, node.target, node.arguments, node.dtype, shape)).encode())
        weights = None if resources.weights is None else frozenset(resources.weights.num_bytes)
        layouts = (sized.channels_last, sized.weights_in_layout, sized.row_major_weights, self.keeps_torch_layouts)
        placements = (resources.from_source, resources.outputs_on_host, resources.on_host, resources.deterministic)
        # Bound methods are equal if their objects are.
        rewrite = None if resources.backend is None else resources.backend.rewrite
        return (nodes.digest(), sized.requires_grad, *layouts, *placements, weights, rewrite)

    @cached_property
    def keeps_torch_layouts(self) -> bool:
        """True if untiled segments keep torch's layouts, instead of converting images to channels last.

        Kernels prefer channels last, but for each convolution weight in default layout torch then makes two copies per step on the CPU,
        and one of its gradient. If no input or output is channels last, and these weights have more elements than the images that
        convolutions read and write, the copies cost more time than they save. The choice holds for all plans at a size, so that all
        compute the same bits.
        """
        sized = self.sized
        if not self.resources.on_host or self.resources.backend is not None or sized.channels_last:
            return False
        copied = touched = 0
        for node in sized.graph.operators:
            if sized.phases.rows[node.name].name in _CONVOLUTIONS:
                image, weight = (next(refs_in(node.argument(key))) for key in ("input", "weight"))
                touched += math.prod(sized.shapes[image]) + math.prod(sized.shapes[node.name])
                if sized.graph[weight].kind == "parameter" and weight not in sized.weights_in_layout:
                    copied += math.prod(sized.shapes[weight])
        return copied > touched

    def images_in_layout(self, names: Iterable[str]) -> frozenset[str]:
        """Those of some images that are channels last: cuts, strips of sources, and inputs and outputs that are so for the caller."""
        graph, in_layout = self.sized.graph, self.sized.channels_last | self.resources.from_source
        outside = {*graph.inputs, *graph.outputs}
        return frozenset(name for name in names if name in in_layout or name not in outside)

    def globals_in_layout(self, names: Iterable[str], *, tiled: bool) -> frozenset[str]:
        """Those of some global tensors that are in the memory layout in which the programs of a segment compute their gradients.

        Gradients of convolutions' weights are channels last, as the images are, except in double precision those of 3-d convolutions, which
        are contiguous. Where layouts are left to torch and all parameters are contiguous, those of convolutions' weights are contiguous.
        """
        sized = self.sized
        in_layout = {name for name in sized.weights_in_layout if not _is_of_volume_convolution(sized.shapes[name])}
        if not tiled and self.keeps_torch_layouts:
            in_layout |= self._contiguous_weights_of_convolutions
        return frozenset(name for name in names if name in in_layout or sized.graph[name].kind == "operator")

    def channels_last_weights(self, names: Iterable[str]) -> frozenset[str]:
        """Those of some global tensors that are channels last: resident parameters, and folded weights, whose buffers are cuts."""
        sized, weights = self.sized, self.resources.weights
        streamed = frozenset[str]() if weights is None else frozenset(weights.num_bytes)
        parameters = sized.weights_in_layout - sized.row_major_weights - streamed
        return frozenset(
            name
            for name in names
            if len(sized.shapes[name]) in CHANNELS_LAST and (name in parameters or sized.graph[name].target == "sft.folded_weight")
        )

    @cached_property
    def _contiguous_weights_of_convolutions(self) -> frozenset[str]:
        """Parameters that only convolutions read, as weights, if all parameters are contiguous; gradients of images have other layouts."""
        graph, rows = self.sized.graph, self.sized.phases.rows
        parameters = {node.name for node in graph.nodes if node.kind == "parameter"}
        if parameters != self.sized.row_major_weights:
            return frozenset()

        def is_weight(name: str, user: str) -> bool:
            if user not in rows or rows[user].name not in _CONVOLUTIONS:
                return False
            images, weights = (set(refs_in(graph[user].argument(key))) for key in ("input", "weight"))
            return name in weights and name not in images

        return frozenset(name for name in parameters if all(is_weight(name, user) for user in graph.users[name]))


def _is_of_volume_convolution(shape: Sequence[int]) -> bool:
    """True for weights of 3-d convolutions, unless contiguous and channels last are the same layout."""
    return len(shape) == 5 and shape[1] != 1 and math.prod(shape[2:]) != 1
