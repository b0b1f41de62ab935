"""Edges of the fluid model: ways to run the stages between two cuts, in bytes and in slots of memory.

Memory is counted in slots. Needs are rounded up, link times down (as rounded partial sums), values as rounded partial sums (Beaumont,
Eyraud-Dubois and Shilova, Euro-Par 2020, section 5.3.2), so that rounding errors do not add up along a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, inf

from sft.common.array_types import FloatArray
from sft.solvers.chain import HostLink

__all__ = ["Edge", "QuantizedEdge", "min_remaining_seconds", "quantize_edges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One way to run the stages between two cuts. Sizes in bytes.

    Attributes:
        source: start node: the number of a cut, or a code that also says if the cut is streamed.
        target: end node.
        label: the caller's description of the edge.
        forward_seconds: time of the forward.
        backward_seconds: time of the backward, including recomputation.
        forward_need_bytes: bytes that the forward adds to those before it, including outputs.
        backward_need_bytes: bytes that the backward adds to those at the time the source was complete, including gradients and outputs.
        input_bytes: |x_i|, if it is on the device.
        saved_bytes: bytes that stay for the backward in addition to input and output.
        output_bytes: |x_j|, if it is on the device.
        down_forward_bytes: bytes that stream to the host during the forward.
        up_forward_bytes: bytes that stream to the device during the forward.
        down_backward_bytes: bytes that stream to the host during the backward.
        up_backward_bytes: bytes that stream to the device during the backward.
        host_bytes: bytes on the host in any case.
        movable: True if its input and saved bytes may be offloaded.
        backward_curve: seconds of a backward that adapts to the free memory, for each number of buckets; infinite where it does not fit.
            `backward_seconds` and `backward_need_bytes` are then unused.
        bucket_bytes: unit of that curve.
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
    backward_curve: FloatArray | None = field(default=None, compare=False, repr=False)
    bucket_bytes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedEdge:
    """An `Edge` in slots.

    Attributes:
        forward_need_slots: memory that the forward adds.
        backward_need_slots: memory that the backward adds.
        input_slots: the input.
        saved_slots: values that stay in addition to input and output.
        kept_slots: saved values and output.
        host_slots: memory on the host in any case.
        forward_link_slots: bytes that the link can carry during the forward, in addition to the edge's own streams.
        backward_link_slots: the same for the backward.
        backward_busy_slots: the edge's own streams during its backward.
        forward_seconds: time of the forward, or of its streams if they take longer.
        backward_seconds: the same for the backward.
    """

    forward_need_slots: int
    backward_need_slots: int
    input_slots: int
    saved_slots: int
    kept_slots: int
    host_slots: int
    forward_link_slots: int
    backward_link_slots: int
    backward_busy_slots: float
    forward_seconds: float
    backward_seconds: float


def quantize_edges(edges: Sequence[Edge], link: HostLink, slot_bytes: int) -> list[QuantizedEdge]:
    """Convert edges to slots. Edges of one stage are rounded along the chain, so that their sums stay correct.

    Args:
        edges: in an order in which every edge into a node comes before every edge out of it.
        link: converts times to slots.
        slot_bytes: unit of memory.
    """

    def up(num_bytes: int) -> int:
        return -(-num_bytes // slot_bytes)

    quantized, rounding = [], _Rounding()
    for edge in edges:
        down_rate, up_rate = link.down_bytes_per_second / slot_bytes, link.up_bytes_per_second / slot_bytes
        forward_busy = (edge.down_forward_bytes + edge.up_forward_bytes * (0 if link.full_duplex else down_rate / up_rate)) / slot_bytes
        backward_busy = (edge.up_backward_bytes + edge.down_backward_bytes * (0 if link.full_duplex else up_rate / down_rate)) / slot_bytes
        forward_seconds = max(edge.forward_seconds, link.streamed_seconds(edge.down_forward_bytes, edge.up_forward_bytes))
        backward_seconds = max(edge.backward_seconds, link.streamed_seconds(edge.down_backward_bytes, edge.up_backward_bytes))
        input_slots = rounding.value(("x", edge.source), edge.input_bytes, slot_bytes)
        saved = rounding.value(("s", edge.source, edge.saved_bytes), edge.saved_bytes, slot_bytes)
        output = rounding.value(("x", edge.target), edge.output_bytes, slot_bytes)
        quantized.append(
            QuantizedEdge(
                forward_need_slots=up(edge.forward_need_bytes),
                backward_need_slots=up(edge.backward_need_bytes),
                input_slots=input_slots,
                saved_slots=saved,
                kept_slots=saved + output,
                host_slots=up(edge.host_bytes),
                forward_link_slots=max(0, rounding.time("F", edge, forward_seconds * down_rate - forward_busy)),
                backward_link_slots=max(0, rounding.time("B", edge, backward_seconds * up_rate - backward_busy)),
                backward_busy_slots=backward_busy,
                forward_seconds=forward_seconds,
                backward_seconds=backward_seconds,
            )
        )
    return quantized


class _Rounding:
    """Rounded partial sums along the nodes. The first edge between two nodes determines the sum."""

    def __init__(self) -> None:
        self._values: dict[object, int] = {}
        self._sum_bytes = 0
        self._times: dict[tuple[str, int], float] = {}

    def value(self, key: object, num_bytes: int, slot_bytes: int) -> int:
        """Slots of a value: the increment of the rounded-up sum of all values so far."""
        if key not in self._values:
            before = -(-self._sum_bytes // slot_bytes)
            self._sum_bytes += num_bytes
            self._values[key] = -(-self._sum_bytes // slot_bytes) - before
        return self._values[key]

    def time(self, direction: str, edge: Edge, slots: float) -> int:
        """Slots of a time: the increment of the rounded-down sum since the first node."""
        before = self._times.get((direction, edge.source), 0.0)
        self._times.setdefault((direction, edge.target), before + slots)
        return floor(before + slots + 1e-9) - floor(before + 1e-9)


def min_remaining_seconds(edges: Sequence[Edge], slots: Sequence[QuantizedEdge], end: int) -> dict[int, float]:
    """For each node the least compute time of any path from it to the end."""
    seconds = {end: 0.0}
    for edge, quantized in sorted(zip(edges, slots, strict=True), key=lambda pair: -pair[0].source):
        backward = quantized.backward_seconds if edge.backward_curve is None else float(edge.backward_curve[-1])
        total = quantized.forward_seconds + backward + seconds.get(edge.target, inf)
        seconds[edge.source] = min(seconds.get(edge.source, inf), total)
    return {node: seconds.get(node, inf) for edge in edges for node in (edge.source, edge.target)}
