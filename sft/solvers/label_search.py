"""Label search over segments and offload sets, in a fluid model of the link.

A path of edges leads through the cuts ``0..n``. An edge ``(i, j)`` runs the stages ``i+1..j`` in one way. ``A`` are the bytes that it
leaves on the device (``s`` and ``x_j``); ``need_F`` and ``need_B`` are the bytes that its forward and backward add to those present when
``x_i`` was complete. In the fluid model a value is offloaded completely or not at all, but its copies may be interrupted, and bytes are
free as soon as they have left. The best order is then to offload in the order of creation, to fetch in the reverse order, and to copy as
early (forward) or as late (backward) as possible (Beaumont, Eyraud-Dubois and Shilova, Euro-Par 2020, section 5). The effect of a prefix of
the path on the remaining path is a label ``(m, dF, dB)``: bytes on the device when ``x_i`` is complete; bytes that still wait to leave (if
negative, bytes that could have left: idle link); bytes of earlier cuts that must be back before the backward arrives here (if negative,
idle link). With ``a+ = max(a, 0)``, times converted to bytes (link rate times seconds):

    fits       m - dF+ + need_F <= M   and   m - dF+ + need_B <= M
    wait       g_F = (m + need_F - M)+          g_B = (m - dF+ + dB+ + need_B - M)+
    link time  t_F = g_F + u_F                  t_B = g_B + u_B
    keep       m' = m + A - min(dF+, t_F)       dF' = dF - t_F                                dB' = dB - t_B
    offload    m' = m + A - min(dF+ + |x|, t_F) dF' = dF+ + |x| - t_F, (.)+ + |s| if s is     dB' = |x| + |s| + (dB - t_B)+

The published Algorithm 1 tests with dF for dF+, which refuses plans that fit, and its equation 6 has the forward's workspace in the
backward, which allows plans that do not fit. Between the two passes the link may still be busy: `_loss_wait_seconds`. An edge that streams
its cuts or weights occupies the link itself, so its u is shortened by those bytes.

A nested backward (see `joint_paths`) uses the memory that is free when it runs, which a label knows.

Dominated labels are dropped, also those that cannot become faster than a known schedule, and the number of labels at a cut is limited.
Sizes and times are those of `edges`, rounded to slots. The result is a proposal: its schedule is simulated with complete copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from sft.common.array_types import FloatArray, IntArray
from sft.solvers.chain import HostLink
from sft.solvers.edges import Edge, QuantizedEdge, min_remaining_seconds, quantize_edges

__all__ = ["FluidPath", "PathStep", "search_paths"]


@dataclass(frozen=True, slots=True)
class PathStep:
    """An edge of a path, with True if its input and saved bytes leave, and the number of buckets of its backward if that has a curve."""

    edge: Edge
    leaves: bool
    num_buckets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidPath:
    """A path from the first node to the last.

    Attributes:
        steps: its edges in order.
        seconds: its time in the fluid model.
    """

    steps: tuple[PathStep, ...]
    seconds: float


@dataclass(slots=True)
class _Labels:
    """Labels of one node, field by field.

    ``device``, ``down`` and ``up`` are ``m``, ``dF`` and ``dB``; ``host`` is the memory on the host. ``via`` (edge and offload decision)
    and ``parent`` (row at the edge's source) lead back; ``buckets`` is the memory of the last edge's backward.
    """

    device: IntArray
    down: IntArray
    up: IntArray
    host: IntArray
    seconds: FloatArray
    via: IntArray
    parent: IntArray
    buckets: IntArray

    def __len__(self) -> int:
        return len(self.device)

    def take(self, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> _Labels:
        """A selection of the labels."""
        return _Labels(*(getattr(self, name)[chosen] for name in _FIELDS))


_FIELDS = ("device", "down", "up", "host", "seconds", "via", "parent", "buckets")


@dataclass(slots=True, kw_only=True)
class _SearchState:
    """Parameters and state of one search.

    Attributes:
        limit: M, in slots.
        host_limit: most slots on the host.
        incumbent_seconds: time of the best known schedule.
        estimates: for a node the remaining seconds by free buckets, and the bucket's bytes.
        least_after: for a node the least compute time after it.
        slots: the edges in slots.
        nodes: the labels of the nodes reached so far.
    """

    edges: Sequence[Edge]
    link: HostLink
    slot_bytes: int
    limit: int
    host_limit: float
    max_labels: int
    incumbent_seconds: float
    estimates: Mapping[int, tuple[FloatArray, int]]
    least_after: dict[int, float] = field(default_factory=dict)
    slots: list[QuantizedEdge] = field(default_factory=list)
    nodes: dict[int, _Labels] = field(default_factory=dict)

    @property
    def down_rate(self) -> float:
        """Rate to the host, in slots per second."""
        return self.link.down_bytes_per_second / self.slot_bytes

    @property
    def up_rate(self) -> float:
        """Rate to the device, in slots per second."""
        return self.link.up_bytes_per_second / self.slot_bytes


def search_paths(
    edges: Sequence[Edge],
    *,
    start: int,
    end: int,
    start_bytes: int,
    budget_bytes: int,
    link: HostLink,
    host_budget_bytes: int | None = None,
    slot_bytes: int = 1,
    max_labels: int = 2000,
    num_paths: int = 1,
    incumbent_seconds: float = inf,
    estimates: Mapping[int, tuple[FloatArray, int]] | None = None,
) -> list[FluidPath]:
    """Fastest paths from node ``start`` to node ``end``, best first; empty if none fits.

    Args:
        edges: in an order in which every edge into a node comes before every edge out of it.
        start: the first node.
        end: the last node, after the loss.
        start_bytes: bytes on the device at the start.
        budget_bytes: M, without resident weights.
        link: the link.
        host_budget_bytes: most bytes that may leave.
        slot_bytes: unit of memory.
        max_labels: most labels at a node; of more, the most promising by ``estimates`` and the fastest are kept.
        num_paths: number of paths to return.
        incumbent_seconds: time of a known schedule; slower paths are dropped.
        estimates: for a node the remaining seconds, for each number of free buckets, and the bucket's bytes.
    """
    state = _SearchState(
        edges=edges,
        link=link,
        slot_bytes=slot_bytes,
        limit=budget_bytes // slot_bytes,
        host_limit=inf if host_budget_bytes is None else host_budget_bytes // slot_bytes,
        max_labels=max_labels,
        incumbent_seconds=incumbent_seconds,
        estimates=estimates or {},
    )
    state.slots = quantize_edges(edges, link, slot_bytes)
    state.least_after = min_remaining_seconds(edges, state.slots, end)
    zero = np.zeros(1, dtype=np.int64)
    state.nodes[start] = _Labels(zero - (-start_bytes // slot_bytes), zero, zero, zero, np.zeros(1), zero - 1, zero - 1, zero)
    arriving: dict[int, list[_Labels]] = {}
    for number, edge in enumerate(edges):
        if edge.source not in state.nodes:
            if edge.source not in arriving:
                continue
            state.nodes[edge.source] = _prune_dominated(state, edge.source, _concat_labels(arriving.pop(edge.source)))
        for leaves in (False, True) if edge.movable and edge.input_bytes + edge.saved_bytes else (False,):
            labels = _extend_labels(state, state.nodes[edge.source], number, leaves)
            if len(labels):
                arriving.setdefault(edge.target, []).append(labels)
    if end not in arriving:
        return []
    state.nodes[end] = _prune_dominated(state, end, _concat_labels(arriving[end]))
    return _best_paths(state, end, num_paths)


def _extend_labels(state: _SearchState, labels: _Labels, number: int, leaves: bool) -> _Labels:
    """Labels at the target of an edge."""
    slots, limit = state.slots[number], state.limit
    settled = labels.device - np.maximum(labels.down, 0)
    host = labels.host + slots.host_slots + (slots.input_slots + slots.saved_slots if leaves else 0)
    fits = (settled + slots.forward_need_slots <= limit) & (host <= state.host_limit)
    buckets, need_backward, seconds = _backward_options(state, number, settled, np.maximum(labels.up, 0))
    fits &= (settled + need_backward <= limit) & np.isfinite(seconds)
    fits &= labels.seconds + slots.forward_seconds + seconds + state.least_after[state.edges[number].target] < state.incumbent_seconds
    chosen = np.flatnonzero(fits)
    labels, settled, host = labels.take(chosen), settled[chosen], host[chosen]
    buckets, need_backward, seconds = buckets[chosen], need_backward[chosen], seconds[chosen]
    waiting, returning = np.maximum(labels.down, 0), np.maximum(labels.up, 0)
    wait_forward = np.maximum(labels.device + slots.forward_need_slots - limit, 0)
    wait_backward = np.maximum(settled + returning + need_backward - limit, 0)
    forward, backward = wait_forward + slots.forward_link_slots, wait_backward + _link_backward(state, number, seconds)
    if leaves:
        queue = waiting + slots.input_slots
        device = labels.device + slots.kept_slots - np.minimum(queue, forward)
        down = queue - forward
        if slots.saved_slots:
            down = np.maximum(down, 0) + slots.saved_slots
        up = slots.input_slots + slots.saved_slots + np.maximum(labels.up - backward, 0)
    else:
        device = labels.device + slots.kept_slots - np.minimum(waiting, forward)
        down = labels.down - forward
        up = labels.up - backward
    total = labels.seconds + slots.forward_seconds + seconds + wait_forward / state.down_rate + wait_backward / state.up_rate
    return _Labels(device, down, up, host, total, np.full(len(chosen), 2 * number + leaves), chosen.astype(np.int64), buckets)


def _backward_options(state: _SearchState, number: int, settled: IntArray, returning: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
    """For each label the buckets, the need in slots and the seconds of an edge's backward.

    A backward with a curve takes the memory that is free without a wait; if it does not fit, the least memory that it can run in.
    """
    edge, slots = state.edges[number], state.slots[number]
    curve = edge.backward_curve
    if curve is None:
        zero = np.zeros(len(settled), dtype=np.int64)
        return zero, zero + slots.backward_need_slots, np.full(len(settled), slots.backward_seconds)
    least = int(np.argmax(np.isfinite(curve)))
    free = (state.limit - settled - returning) * state.slot_bytes // edge.bucket_bytes
    buckets = np.clip(free, least, len(curve) - 1)
    seconds = np.maximum(curve[buckets], state.link.streamed_seconds(edge.down_backward_bytes, edge.up_backward_bytes))
    return buckets, -(-buckets * edge.bucket_bytes // state.slot_bytes), seconds


def _link_backward(state: _SearchState, number: int, seconds: FloatArray) -> IntArray:
    """Slots that the link can carry during an edge's backward."""
    slots = state.slots[number]
    if state.edges[number].backward_curve is None:
        return np.full(len(seconds), slots.backward_link_slots, dtype=np.int64)
    return np.maximum(0, np.floor(seconds * state.up_rate - slots.backward_busy_slots + 1e-9)).astype(np.int64)


def _concat_labels(parts: list[_Labels]) -> _Labels:
    """All labels of several arrays."""
    return _Labels(*(np.concatenate([getattr(labels, name) for labels in parts]) for name in _FIELDS))


def _prune_dominated(state: _SearchState, node: int, labels: _Labels) -> _Labels:
    """Drop labels that another label equals or betters in every field, that cannot beat the incumbent, or, of too many, the least
    promising.
    """
    max_labels = state.max_labels
    if state.incumbent_seconds < inf:
        least_seconds = labels.seconds + np.maximum(state.least_after[node], _link_seconds(state, labels))
        labels = labels.take(least_seconds < state.incumbent_seconds)
    if len(labels) > 8 * max_labels:
        labels = labels.take(_most_promising(state, node, labels, 4 * max_labels))
    order = np.lexsort((labels.up, labels.down, labels.device, labels.seconds))
    labels = labels.take(order)
    compared = (labels.device, labels.device - np.maximum(labels.down, 0), labels.down, labels.up, labels.host)
    criteria = [_shortest(each) for each in compared]
    kept, block = np.zeros(0, dtype=np.intp), 128
    for begin in range(0, len(labels), block):
        here = np.arange(begin, min(begin + block, len(labels)))
        # A label is dominated only by one that is no slower, and those come first.
        for first in range(0, len(kept), 4 * block):
            here = here[~_dominated(criteria, here, kept[first : first + 4 * block]).any(axis=1)]
        kept = np.concatenate([kept, here[~np.tril(_dominated(criteria, here, here), -1).any(axis=1)]])
    labels = labels.take(kept)
    return labels.take(_most_promising(state, node, labels, max_labels)) if len(labels) > max_labels else labels


def _shortest(values: IntArray) -> IntArray:
    """The values from zero on, in the shortest type that holds them: it takes less time to compare."""
    offsets = values - values.min(initial=0)
    shortest: IntArray = offsets.astype(np.min_scalar_type(int(offsets.max(initial=0))))
    return shortest


def _dominated(criteria: Sequence[IntArray], rows: npt.NDArray[np.intp], rivals: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """For each of the rows the rivals that are no worse in any criterion."""
    dominates = np.ones((len(rows), len(rivals)), dtype=bool)
    for criterion in criteria:
        dominates &= criterion[rivals][None, :] <= criterion[rows][:, None]
    return dominates


def _most_promising(state: _SearchState, node: int, labels: _Labels, max_labels: int) -> npt.NDArray[np.intp]:
    """Rows of the most promising labels, in order.

    Half are chosen by the total time if no further bytes leave, a quarter by the total time if all waiting bytes have left, and the
    remaining quarter by the time so far.
    """
    after = state.least_after[node]
    totals = []
    for device in (labels.device, labels.device - np.maximum(labels.down, 0)):
        remaining = np.full(len(labels), after)
        if node in state.estimates:
            curve, bucket_bytes = state.estimates[node]
            remaining = curve[np.clip((state.limit - device) * state.slot_bytes // bucket_bytes, 0, len(curve) - 1)]
        totals.append(labels.seconds + np.where(np.isfinite(remaining), np.maximum(remaining, _link_seconds(state, labels)), 1e9 + after))
    chosen = np.zeros(len(labels), dtype=bool)
    for total, share in ((totals[0], max_labels // 2), (totals[1], max_labels * 3 // 4), (labels.seconds, max_labels)):
        order = np.argsort(np.where(chosen, np.inf, total), kind="stable")
        chosen[order[: share - int(chosen.sum())]] = True
    return np.flatnonzero(chosen)


def _link_seconds(state: _SearchState, labels: _Labels) -> FloatArray:
    """Least time of the link until the backward is back at the same cut."""
    down, up = np.maximum(labels.down, 0) / state.down_rate, np.maximum(labels.up, 0) / state.up_rate
    return np.maximum(down, up) if state.link.full_duplex else down + up


def _backtrack(state: _SearchState, node: int, row: int) -> list[tuple[int, int]]:
    """Edges that led to a label, as ``2 * number + leaves``, with their buckets, in order."""
    steps = []
    while (via := int(state.nodes[node].via[row])) >= 0:
        labels = state.nodes[node]
        steps.append((via, int(labels.buckets[row])))
        row, node = int(labels.parent[row]), state.edges[via // 2].source
    return steps[::-1]


def _best_paths(state: _SearchState, end: int, num_paths: int) -> list[FluidPath]:
    """The fastest paths to the last node, including the wait at the loss."""
    labels = state.nodes[end]
    paths: list[tuple[float, int, list[tuple[int, int]]]] = []
    least_seconds = labels.seconds + _min_loss_wait_seconds(state, labels)
    for row in np.argsort(least_seconds, kind="stable"):
        if len(paths) >= num_paths and least_seconds[row] >= paths[num_paths - 1][0]:
            break
        vias = _backtrack(state, end, int(row))
        seconds = float(labels.seconds[row]) + _loss_wait_seconds(
            state, int(labels.device[row]), int(labels.down[row]), int(labels.up[row]), vias
        )
        paths.append((seconds, int(row), vias))
        paths.sort()
    return [
        FluidPath(steps=tuple(PathStep(state.edges[via // 2], bool(via % 2), buckets) for via, buckets in vias), seconds=seconds)
        for seconds, _, vias in paths[:num_paths]
    ]


def _min_loss_wait_seconds(state: _SearchState, labels: _Labels) -> FloatArray:
    """Lower bound on the wait at the loss, for all labels."""
    down, up = labels.down / state.down_rate, labels.up / state.up_rate
    both = np.maximum(down, up) if state.link.full_duplex else down + up
    return np.where((down > 0) & (up > 0), both, np.maximum(0.0, np.where((down > 0) | (up > 0), down + up, 0.0)))


def _loss_wait_seconds(state: _SearchState, device: int, down: int, up: int, vias: list[tuple[int, int]]) -> float:
    """Wait between the passes (Euro-Par 2020, section 5.2.2, equations 9 and 10).

    If only one direction is late, it continues while the other pass computes, until the other direction's first copy. Every operation of
    that time has to fit next to the bytes that are still, or already, on the device.
    """
    if down > 0 and up > 0:
        seconds = (down / state.down_rate, up / state.up_rate)
        return max(seconds) if state.link.full_duplex else sum(seconds)
    if down <= 0 and up <= 0:
        return 0.0
    leaving = down > 0
    rate = state.down_rate if leaving else state.up_rate
    window = -up / state.up_rate if leaving else -down / state.down_rate
    busy_slots = device if leaving else device + up
    wait = max(0.0, max(down, up) / rate - window)
    elapsed, above_slots = 0.0, 0
    for via, buckets in reversed(vias):
        if elapsed >= window:
            break
        slots, edge = state.slots[via // 2], state.edges[via // 2]
        above_slots += slots.kept_slots
        # A forward still reads an input whose bytes have left: returning now, they would exist twice.
        need_slots = slots.forward_need_slots + (slots.input_slots if via % 2 else 0)
        carried_slots = slots.forward_link_slots
        if leaving:
            need_slots, carried_slots = slots.backward_need_slots, slots.backward_link_slots
        if leaving and edge.backward_curve is not None:
            need_slots = -(-buckets * edge.bucket_bytes // state.slot_bytes)
            carried_slots = int(_link_backward(state, via // 2, edge.backward_curve[buckets : buckets + 1])[0])
        wait = max(wait, (busy_slots - above_slots + need_slots - state.limit) / rate - elapsed)
        elapsed += carried_slots / (state.up_rate if leaving else state.down_rate)
    return wait
