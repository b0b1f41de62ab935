"""Which segments, and which of their values leave for the host: a search over labels in a fluid model of the link.

A path of edges leads through the cuts ``0..n``. An edge ``(i, j)`` runs the stages ``i+1..j`` in one way; ``A`` is what it leaves on the
device (``s`` and ``x_j``), ``need_F`` and ``need_B`` what its forward and its backward need beside what was there when ``x_i`` was
complete. In the fluid model a value is offloaded whole or not at all, but its copies may be interrupted, and bytes that have left are free
at once. There it is best to offload in the order of making, to fetch in the reverse order, and to do everything as early (forward) or as
late (backward) as possible (Beaumont, Eyraud-Dubois and Shilova, Euro-Par 2020, section 5). What a prefix of the path means to the rest is
then a label ``(m, dF, dB)``: bytes on the device when ``x_i`` is complete; bytes that still wait to leave (if negative, bytes that could
have left: idle link); bytes of earlier cuts that must be back before the backward arrives here (if negative, idle link). With ``a+ = max(a,
0)``, bytes for times (link rate times seconds):

    fits       m - dF+ + need_F <= M   and   m - dF+ + need_B <= M
    wait       g_F = (m + need_F - M)+          g_B = (m - dF+ + dB+ + need_B - M)+
    link time  t_F = g_F + u_F                  t_B = g_B + u_B
    keep       m' = m + A - min(dF+, t_F)       dF' = dF - t_F                                dB' = dB - t_B
    offload    m' = m + A - min(dF+ + |x|, t_F) dF' = dF+ + |x| - t_F, (.)+ + |s| if s is     dB' = |x| + |s| + (dB - t_B)+

The published Algorithm 1 tests with dF for dF+, which refuses plans that fit, and its equation 6 has the forward's workspace in the
backward, which allows plans that do not. Between the two passes the link may still be busy: `_turn`. An edge that streams its cuts or
weights holds the link itself, so its u is shortened by those bytes.

Labels that are worse in everything are dropped, and at most so many are kept at a cut. Memory goes in slots: needs rounded up, link times
down (as rounded partial sums), values as rounded partial sums (section 5.3.2 there). The result is a guide: the schedule built from it is
judged by the simulator, with whole copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, inf

import numpy as np
import numpy.typing as npt

from sft.plan.chain.link import Link

__all__ = ["Edge", "FluidPath", "Step", "search"]

_Ints = npt.NDArray[np.int64]
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


@dataclass(frozen=True, slots=True)
class Step:
    """An edge of a path, and whether its input and saved bytes leave."""

    edge: Edge
    leaves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidPath:
    """A path from the first node to the last.

    Attributes:
        steps: its edges in order.
        seconds: what it takes in the fluid model.
    """

    steps: tuple[Step, ...]
    seconds: float


@dataclass(slots=True)
class _Labels:
    """The labels of one node, field by field; ``via`` and ``before`` lead back."""

    held: _Ints
    down: _Ints
    up: _Ints
    host: _Ints
    seconds: _Floats
    via: _Ints
    before: _Ints

    def __len__(self) -> int:
        return len(self.held)

    def take(self, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> _Labels:
        return _Labels(*(getattr(self, name)[chosen] for name in _FIELDS))


_FIELDS = ("held", "down", "up", "host", "seconds", "via", "before")


@dataclass(slots=True, kw_only=True)
class _Slots:
    """An edge in slots; link times are bytes that the link could carry."""

    need_forward: int
    need_backward: int
    entering: int
    saved: int
    kept: int
    host: int
    link_forward: int
    link_backward: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class _Search:
    edges: Sequence[Edge]
    link: Link
    slot_bytes: int
    limit: int
    host_limit: float
    most_labels: int
    slots: list[_Slots] = field(default_factory=list)
    nodes: dict[int, _Labels] = field(default_factory=dict)

    @property
    def down_rate(self) -> float:
        """Slots a second."""
        return self.link.down_bytes_per_second / self.slot_bytes

    @property
    def up_rate(self) -> float:
        return self.link.up_bytes_per_second / self.slot_bytes


def search(
    edges: Sequence[Edge],
    *,
    start: int,
    end: int,
    start_bytes: int,
    budget_bytes: int,
    link: Link,
    host_budget_bytes: int | None = None,
    slot_bytes: int = 1,
    most_labels: int = 2000,
    num_paths: int = 1,
) -> list[FluidPath]:
    """The fastest paths from node ``start`` to node ``end``, the best first; empty if none fits.

    Args:
        edges: in an order in which every edge that reaches a node comes before every edge that leaves it.
        start: the first node.
        end: the last node, behind the loss.
        start_bytes: what is on the device in the beginning.
        budget_bytes: M, without resident weights.
        link: the link.
        host_budget_bytes: most bytes that may leave.
        slot_bytes: what memory is counted in.
        most_labels: labels kept at a node; the fastest ones if there are more.
        num_paths: how many paths to return.
    """
    state = _Search(
        edges=edges,
        link=link,
        slot_bytes=slot_bytes,
        limit=budget_bytes // slot_bytes,
        host_limit=inf if host_budget_bytes is None else host_budget_bytes // slot_bytes,
        most_labels=most_labels,
    )
    state.slots = _in_slots(edges, link, slot_bytes)
    none = np.zeros(1, dtype=np.int64)
    state.nodes[start] = _Labels(none - (-start_bytes // slot_bytes), none, none, none, np.zeros(1), none - 1, none - 1)
    arriving: dict[int, list[_Labels]] = {}
    for number, edge in enumerate(edges):
        if edge.source not in state.nodes:
            if edge.source not in arriving:
                continue
            state.nodes[edge.source] = _pruned(_joined(arriving.pop(edge.source)), state.most_labels)
        for leaves in (False, True) if edge.movable and edge.input_bytes + edge.saved_bytes else (False,):
            found = _follow(state, state.nodes[edge.source], number, leaves)
            if len(found):
                arriving.setdefault(edge.target, []).append(found)
    if end not in arriving:
        return []
    state.nodes[end] = _pruned(_joined(arriving[end]), state.most_labels)
    return _best(state, end, num_paths)


def _in_slots(edges: Sequence[Edge], link: Link, slot_bytes: int) -> list[_Slots]:
    """Every edge in slots. Edges of one stage are rounded along the chain, so that their sums stay true."""

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
            _Slots(
                need_forward=up(edge.forward_need_bytes),
                need_backward=up(edge.backward_need_bytes),
                entering=entering,
                saved=saved,
                kept=saved + output,
                host=up(edge.host_bytes),
                link_forward=max(0, along.time("F", edge, forward_seconds * down_rate - forward_busy)),
                link_backward=max(0, along.time("B", edge, backward_seconds * up_rate - backward_busy)),
                seconds=forward_seconds + backward_seconds,
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


def _follow(state: _Search, labels: _Labels, number: int, leaves: bool) -> _Labels:
    """The labels at the other end of an edge."""
    slots, limit = state.slots[number], state.limit
    waiting, coming = np.maximum(labels.down, 0), np.maximum(labels.up, 0)
    below = labels.held - waiting
    host = labels.host + slots.host + (slots.entering + slots.saved if leaves else 0)
    fits = (below + slots.need_forward <= limit) & (below + slots.need_backward <= limit) & (host <= state.host_limit)
    chosen = np.flatnonzero(fits)
    labels, waiting, coming, below, host = labels.take(chosen), waiting[chosen], coming[chosen], below[chosen], host[chosen]
    wait_forward = np.maximum(labels.held + slots.need_forward - limit, 0)
    wait_backward = np.maximum(below + coming + slots.need_backward - limit, 0)
    forward, backward = wait_forward + slots.link_forward, wait_backward + slots.link_backward
    if leaves:
        queue = waiting + slots.entering
        held = labels.held + slots.kept - np.minimum(queue, forward)
        down = queue - forward
        if slots.saved:
            down = np.maximum(down, 0) + slots.saved
        up = slots.entering + slots.saved + np.maximum(labels.up - backward, 0)
    else:
        held = labels.held + slots.kept - np.minimum(waiting, forward)
        down = labels.down - forward
        up = labels.up - backward
    seconds = labels.seconds + slots.seconds + wait_forward / state.down_rate + wait_backward / state.up_rate
    return _Labels(held, down, up, host, seconds, np.full(len(chosen), 2 * number + leaves), chosen.astype(np.int64))


def _joined(parts: list[_Labels]) -> _Labels:
    return _Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


def _pruned(labels: _Labels, most: int) -> _Labels:
    """Without labels that another one equals or betters in everything; fastest first."""
    order = np.lexsort((labels.up, labels.down, labels.held, labels.seconds))
    labels = labels.take(order)
    marks = np.stack([labels.held, labels.held - np.maximum(labels.down, 0), labels.down, labels.up, labels.host], axis=1)
    kept = np.zeros(0, dtype=np.intp)
    block = 128
    for begin in range(0, len(labels), block):
        here = np.arange(begin, min(begin + block, len(labels)))
        # A label only loses to one that is no slower, and those come before it.
        lost = np.any(np.all(marks[kept][None, :, :] <= marks[here][:, None, :], axis=2), axis=1)
        here = here[~lost]
        among = np.all(marks[here][None, :, :] <= marks[here][:, None, :], axis=2)
        kept = np.concatenate([kept, here[~np.any(np.tril(among, -1), axis=1)]])
        if len(kept) >= most:
            break
    return labels.take(kept[:most])


def _steps(state: _Search, node: int, row: int) -> list[int]:
    """The edges that led to a label, as ``2 * number + leaves``, in order."""
    found = []
    while (via := int(state.nodes[node].via[row])) >= 0:
        found.append(via)
        row, node = int(state.nodes[node].before[row]), state.edges[via // 2].source
    return found[::-1]


def _best(state: _Search, end: int, num_paths: int) -> list[FluidPath]:
    labels = state.nodes[end]
    found: list[tuple[float, int, list[int]]] = []
    least = labels.seconds + _turn_at_least(state, labels)
    for row in np.argsort(least, kind="stable"):
        if len(found) >= num_paths and least[row] >= found[num_paths - 1][0]:
            break
        vias = _steps(state, end, int(row))
        seconds = float(labels.seconds[row]) + _turn(state, int(labels.held[row]), int(labels.down[row]), int(labels.up[row]), vias)
        found.append((seconds, int(row), vias))
        found.sort()
    return [
        FluidPath(steps=tuple(Step(state.edges[via // 2], bool(via % 2)) for via in vias), seconds=seconds)
        for seconds, _, vias in found[:num_paths]
    ]


def _turn_at_least(state: _Search, labels: _Labels) -> _Floats:
    down, up = labels.down / state.down_rate, labels.up / state.up_rate
    both = np.maximum(down, up) if state.link.full_duplex else down + up
    return np.where((down > 0) & (up > 0), both, np.maximum(0.0, np.where((down > 0) | (up > 0), down + up, 0.0)))


def _turn(state: _Search, held: int, down: int, up: int, vias: list[int]) -> float:
    """The wait between the passes (section 5.2.2 there, equations 9 and 10).

    If only one direction is behind, it works on while the computation goes on in the other pass, up to the other direction's first copy.
    Every operation of that time has to fit beside what is still, or already, on the device.
    """
    if down > 0 and up > 0:
        seconds = (down / state.down_rate, up / state.up_rate)
        return max(seconds) if state.link.full_duplex else sum(seconds)
    if down <= 0 and up <= 0:
        return 0.0
    leaving = down > 0
    rate = state.down_rate if leaving else state.up_rate
    window = -up / state.up_rate if leaving else -down / state.down_rate
    busy = held if leaving else held + up
    wait = max(0.0, max(down, up) / rate - window)
    elapsed, above = 0.0, 0
    for via in reversed(vias):
        if elapsed >= window:
            break
        slots = state.slots[via // 2]
        above += slots.kept
        # A forward still reads an input whose bytes have left: coming back, they would be there twice.
        need = slots.need_backward if leaving else slots.need_forward + (slots.entering if via % 2 else 0)
        wait = max(wait, (busy - above + need - state.limit) / rate - elapsed)
        elapsed += (slots.link_backward / state.up_rate) if leaving else (slots.link_forward / state.down_rate)
    return wait
