"""Sample axis: the dimension of a value that counts samples, and its propagation through a graph.

An operator is *independent along samples* if a result for some samples is a function of these samples of its operands: a linear layer, a
norm of one sample, attention within a sample, a permutation, a reshape that keeps samples apart. A rule for each such operator
(:mod:`sft.analysis.ir.ops.sample_rules`) gives the sample axis of its result; an operator without a rule counts as an exchange of samples.

An operator may also read an operand *in full*: attention computes some queries from all keys and values. The operand must then be complete
before the run begins, so it is a value from outside of the run, or of an earlier run.

**Position of the samples.** A dimension of extent ``outer * N * inner`` holds ``N`` samples if its index is ``(o * N + sample) * inner +
i``. A reshape to ``[N * T, C]`` gives ``inner = T``, one of ``[T, N, C]`` to ``[T * N, C]`` gives ``outer = T``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops.base import Operator
from sft.analysis.ir.targets import RANDOM_TARGETS

__all__ = ["SampleAxis", "SampleLevel", "SampleRule", "SampleTracker"]

#: Operators that make a value of a given shape from nothing, or from an operand that is equal for all samples.
_UNIFORM_TARGETS = frozenset(
    {"aten.expand.default", "aten.zeros.default", "aten.ones.default", "aten.full.default", "sft.mask", "sft.noise"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAxis:
    """Position of the samples in a value.

    Attributes:
        dim: the dimension.
        outer: indices of the dimension that are outside of the samples.
        inner: indices of the dimension for each sample.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def is_leading(self) -> bool:
        """True if the samples are contiguous blocks of the first dimension, so that a slice of it holds some of them."""
        return self.dim == 0 and self.outer == 1

    @property
    def has_positions(self) -> bool:
        """True if a slice is a block of positions, from which random numbers are drawn: samples, channels, rows or columns."""
        return self.dim < 4 and self.outer == 1

    def extent(self, num_samples: int) -> int:
        """Extent of the dimension for a number of samples."""
        return self.outer * num_samples * self.inner

    def resize(self, shape: Sequence[int], num_samples: int) -> tuple[int, ...]:
        """The shape for a number of samples."""
        return (*shape[: self.dim], self.extent(num_samples), *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLevel:
    """Samples of a run: the elements of the batch, the rows of windows of an image, the windows of a row, or the tokens of a sequence.

    Attributes:
        num_samples: number of samples.
        axes: position of the samples in the values of the run, and in those from outside that it takes sample by sample.
    """

    num_samples: int
    axes: Mapping[str, SampleAxis]


@dataclass(kw_only=True)
class SampleTracker:
    """Propagates sample axes through a graph, operator by operator in execution order.

    Attributes:
        graph: the graph at one input size.
        rows: row of the operator table of each operator.
        streamed: values in the layout of images, whose first dimension counts samples.
        per_sample: other values with an entry for each sample in their first dimension, which operators on images read.
        num_samples: number of samples, more than one.
        rules: by target, rules of operators on untiled values.
        image_rules: the same, of operators that are special on images, too.
        excluded: operators that must not be made for some samples alone.
        axes: sample axes so far; values from outside that are taken sample by sample are included.
        shared: values without a sample axis that some operator reads for all samples.
        uniform: operators that are equal for all samples, or depend on their number only, and are made where they are read.
        read_in_full: by operator, operands that have samples, of which it reads all.
    """

    graph: Graph
    rows: Mapping[str, Operator]
    streamed: frozenset[str]
    per_sample: frozenset[str]
    num_samples: int
    rules: Mapping[str, SampleRule]
    image_rules: Mapping[str, SampleRule]
    excluded: frozenset[str] = frozenset()
    axes: dict[str, SampleAxis] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    uniform: set[str] = field(default_factory=set)
    read_in_full: dict[str, frozenset[str]] = field(default_factory=dict)
    _taken: list[str] = field(default_factory=list)
    _full: set[str] = field(default_factory=set)

    def track(self, node: Node) -> bool:
        """True if an operator is independent along samples; its sample axis is then recorded.

        That of an excluded operator is recorded, too, if runs can read its result sample by sample.
        """
        self._taken.clear()
        self._full.clear()
        axis = self._axis_of(node)
        if axis is not None and node.shape[axis.dim] != axis.extent(self.num_samples):
            axis = None
        is_inside = axis is not None and node.name not in self.excluded
        if not is_inside:
            for name in self._taken:
                del self.axes[name]
                self.uniform.discard(name)
        if axis is not None and (is_inside or self.is_sliceable(node.name, axis)):
            self.axes[node.name] = axis
        if is_inside:
            self.read_in_full |= {node.name: frozenset(self._full)} if self._full else {}
            self.shared.update(name for name in node.operands if name not in self.axes)
        return is_inside

    def take_all(self, name: str) -> bool:
        """True if an operator may read all samples of an operand; images are read by samples alone."""
        if name in self.streamed or name in self.uniform:
            return False
        if name in self.axes:
            self._full.add(name)
        return True

    def _axis_of(self, node: Node) -> SampleAxis | None:
        row = self.rows[node.name]
        if row.is_extra_result:
            return None
        if node.target in self.image_rules:
            return self.image_rules[node.target](self, node)
        if row.role != "whole":
            return self._axis_of_image(node, reduces=row.role == "reduce")
        rule = self.rules.get(node.target)
        return rule(self, node) if rule is not None and any(name in self.axes for name in node.operands) else None

    def _axis_of_image(self, node: Node, *, reduces: bool) -> SampleAxis | None:
        """Sample axis of an operator on images: sweeps run it for some samples at a time; a reduction may be one of each sample."""
        leading = SampleAxis(dim=0)
        for name in node.operands:
            if name in self.streamed or name in self.per_sample:
                if self.take(name, leading) != leading:
                    return None
            elif name in self.axes:
                return None
        return leading if not reduces or node.name in self.per_sample else None

    def is_sliceable(self, name: str, axis: SampleAxis) -> bool:
        """True if a slice of one dimension of a value holds some samples, so that it may cross the border of a run."""
        return axis.outer == 1

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a value."""
        return self.graph[name].shape

    def take(self, name: str, axis: SampleAxis) -> SampleAxis | None:
        """Sample axis of an operand: the known one; of a value from outside ``axis``, if its samples can be read there."""
        sample_axis = self.axes.get(name)
        if sample_axis is not None:
            return sample_axis
        shape = self.shape(name)
        if name in self.shared or not 0 <= axis.dim < len(shape) or shape[axis.dim] != axis.extent(self.num_samples):
            return None
        is_uniform = self._is_uniform(self.graph[name], axis)
        if not is_uniform and not self.is_sliceable(name, axis):
            return None
        self.axes[name] = axis
        self._taken.append(name)
        if is_uniform:
            self.uniform.add(name)
        return axis

    def _is_uniform(self, node: Node, axis: SampleAxis) -> bool:
        """True if a value can be made for some samples alone."""
        if node.target not in _UNIFORM_TARGETS or node.name in self.excluded or any(name in self.axes for name in node.operands):
            return False
        if node.target == "aten.expand.default":
            shape = self.shape(node.operands[0])
            dim = axis.dim - (len(node.shape) - len(shape))
            return dim < 0 or shape[dim] == 1
        return node.target not in RANDOM_TARGETS or axis.has_positions


#: The sample axis of an operator's result; ``None`` if the operator exchanges samples.
SampleRule = Callable[[SampleTracker, Node], SampleAxis | None]
