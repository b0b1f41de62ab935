"""Ways to run the stages between two cuts, and what they come to in slots of memory.

Memory goes in slots: needs rounded up, link times down (as rounded partial sums), values as rounded partial sums (Beaumont,
Eyraud-Dubois and Shilova, Euro-Par 2020, section 5.3.2), so that along a path no rounding adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, inf

import numpy as np
import numpy.typing as npt

from sft.solvers.chain import HostLink

__all__ = ["Edge", "QuantizedEdge", "min_remaining_seconds", "quantize_edges"]

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One way to run the stages between two cuts. Sizes in bytes.

    Attributes:
        source: the node that it leaves: a cut's number, or something else that says more (a streamed cut).
        target: the node that it reaches.
        label: the caller's name for what it does.
        forward_seconds: its forward.
        backward_seconds: its backward, recomputation included.
        forward_need_bytes: what the forward holds beside what was there before it, outputs included.
        backward_need_bytes: what the backward holds beside what was there when the source was complete (gradients and outputs included).
        input_bytes: |x_i|, if it is on the device.
        saved_bytes: what stays for the backward besides input and output.
        output_bytes: |x_j|, if it is on the device.
        down_forward_bytes: what passes to the host while the forward runs.
        up_forward_bytes: what comes from there.
        down_backward_bytes: the same for the backward.
        up_backward_bytes: the same for the backward.
        host_bytes: what it puts on the host in any case.
        movable: whether its input and saved bytes may be offloaded.
        backward_curve: if given, the backward takes what memory there is: its seconds for each number of buckets, infinite where it does
            not fit; `backward_seconds` and `backward_need_bytes` are not read then.
        bucket_bytes: of that curve.
    """

    source: int
    target: int
    label: object = None
    forward_seconds: float
    backward_seconds: float
    forward_need_bytes: int
    backward_need_bytes: int
    input_bytes: int
    saved_bytes: int
    output_bytes: int
    down_forward_bytes: int = 0
    up_forward_bytes: int = 0
    down_backward_bytes: int = 0
    up_backward_bytes: int = 0
    host_bytes: int = 0
    movable: bool = True
    backward_curve: _Floats | None = field(default=None, compare=False, repr=False)
    bucket_bytes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedEdge:
    """An edge in slots. Its names are those of `Edge`, shorter.

    Attributes:
        need_forward: what the forward holds beside what was there before it.
        need_backward: the same for the backward.
        entering: the input.
        saved: what stays besides input and output.
        kept: that and the output.
        host: what it puts on the host in any case.
        link_forward: what the link can carry while the forward runs, beside what the edge itself streams.
        link_backward: the same for the backward.
        busy_backward: what the edge itself streams while its backward runs.
        forward_seconds: its forward, or what it streams then, if that takes longer.
        backward_seconds: the same for the backward.
    """

    need_forward: int
    need_backward: int
    entering: int
    saved: int
    kept: int
    host: int
    link_forward: int
    link_backward: int
    busy_backward: float
    forward_seconds: float
    backward_seconds: float


def quantize_edges(edges: Sequence[Edge], link: HostLink, slot_bytes: int) -> list[QuantizedEdge]:
    """Every edge in slots. Edges of one stage are rounded along the chain, so that their sums stay true.

    Args:
        edges: in an order in which every edge that reaches a node comes before every edge that leaves it.
        link: whose times become slots.
        slot_bytes: what memory is counted in.
    """

    def up(num_bytes: int) -> int:
        return -(-num_bytes // slot_bytes)

    found, along = [], _Rounding()
    for edge in edges:
        down_rate, up_rate = link.down_bytes_per_second / slot_bytes, link.up_bytes_per_second / slot_bytes
        forward_busy = (edge.down_forward_bytes + edge.up_forward_bytes * (0 if link.full_duplex else down_rate / up_rate)) / slot_bytes
        backward_busy = (edge.up_backward_bytes + edge.down_backward_bytes * (0 if link.full_duplex else up_rate / down_rate)) / slot_bytes
        forward_seconds = max(edge.forward_seconds, link.streamed_seconds(edge.down_forward_bytes, edge.up_forward_bytes))
        backward_seconds = max(edge.backward_seconds, link.streamed_seconds(edge.down_backward_bytes, edge.up_backward_bytes))
        entering = along.value(("x", edge.source), edge.input_bytes, slot_bytes)
        saved = along.value(("s", edge.source, edge.saved_bytes), edge.saved_bytes, slot_bytes)
        output = along.value(("x", edge.target), edge.output_bytes, slot_bytes)
        found.append(
            QuantizedEdge(
                need_forward=up(edge.forward_need_bytes),
                need_backward=up(edge.backward_need_bytes),
                entering=entering,
                saved=saved,
                kept=saved + output,
                host=up(edge.host_bytes),
                link_forward=max(0, along.time("F", edge, forward_seconds * down_rate - forward_busy)),
                link_backward=max(0, along.time("B", edge, backward_seconds * up_rate - backward_busy)),
                busy_backward=backward_busy,
                forward_seconds=forward_seconds,
                backward_seconds=backward_seconds,
            )
        )
    return found


class _Rounding:
    """Rounded partial sums along the nodes, the first edge between two of them setting the sum."""

    def __init__(self) -> None:
        self._values: dict[object, int] = {}
        self._sum_bytes = 0
        self._times: dict[tuple[str, int], float] = {}

    def value(self, key: object, num_bytes: int, slot_bytes: int) -> int:
        """A value's slots: what the rounded-up sum of all so far grows by."""
        if key not in self._values:
            before = -(-self._sum_bytes // slot_bytes)
            self._sum_bytes += num_bytes
            self._values[key] = -(-self._sum_bytes // slot_bytes) - before
        return self._values[key]

    def time(self, way: str, edge: Edge, slots: float) -> int:
        """A time's slots: what the rounded-down sum from the first node grows by."""
        before = self._times.get((way, edge.source), 0.0)
        self._times.setdefault((way, edge.target), before + slots)
        return floor(before + slots + 1e-9) - floor(before + 1e-9)


def min_remaining_seconds(edges: Sequence[Edge], slots: Sequence[QuantizedEdge], end: int) -> dict[int, float]:
    """For each node the least time of computations that any path from it still takes."""
    found = {end: 0.0}
    for edge, slot in sorted(zip(edges, slots, strict=True), key=lambda pair: -pair[0].source):
        backward = slot.backward_seconds if edge.backward_curve is None else float(edge.backward_curve[-1])
        after = slot.forward_seconds + backward + found.get(edge.target, inf)
        found[edge.source] = min(found.get(edge.source, inf), after)
    return {node: found.get(node, inf) for edge in edges for node in (edge.source, edge.target)}
