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
backward, which allows plans that do not. Between the two passes the link may still be busy: `_loss_wait_seconds`. An edge that streams its
cuts or weights holds the link itself, so its u is shortened by those bytes.

A nested backward (see `paths`) runs in the memory that is free when its turn comes, which a label knows.

Labels that are worse in everything are dropped, those that cannot become faster than a known schedule, too, and at most so many are kept
at a cut. Sizes and times are those of `edges`, rounded to slots. The result is a guide: the schedule built from it is judged by the
simulator, with whole copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from sft.solvers.chain import HostLink
from sft.solvers.edges import Edge, QuantizedEdge, min_remaining_seconds, quantize_edges

__all__ = ["FluidPath", "PathStep", "search_paths"]

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PathStep:
    """An edge of a path, whether its input and saved bytes leave, and the buckets for its backward if it has a curve."""

    edge: Edge
    leaves: bool
    num_buckets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidPath:
    """A path from the first node to the last.

    Attributes:
        steps: its edges in order.
        seconds: what it takes in the fluid model.
    """

    steps: tuple[PathStep, ...]
    seconds: float


@dataclass(slots=True)
class _Labels:
    """The labels of one node, field by field; ``via`` and ``before`` lead back, ``buckets`` is what the last edge's backward may hold."""

    held: _Ints
    down: _Ints
    up: _Ints
    host: _Ints
    seconds: _Floats
    via: _Ints
    before: _Ints
    buckets: _Ints

    def __len__(self) -> int:
        return len(self.held)

    def take(self, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> _Labels:
        return _Labels(*(getattr(self, name)[chosen] for name in _FIELDS))


_FIELDS = ("held", "down", "up", "host", "seconds", "via", "before", "buckets")


@dataclass(slots=True, kw_only=True)
class _SearchState:
    edges: Sequence[Edge]
    link: HostLink
    slot_bytes: int
    limit: int
    host_limit: float
    max_labels: int
    incumbent_seconds: float
    estimates: Mapping[int, tuple[_Floats, int]]
    least_after: dict[int, float] = field(default_factory=dict)
    slots: list[QuantizedEdge] = field(default_factory=list)
    nodes: dict[int, _Labels] = field(default_factory=dict)

    @property
    def down_rate(self) -> float:
        """Slots a second."""
        return self.link.down_bytes_per_second / self.slot_bytes

    @property
    def up_rate(self) -> float:
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
    estimates: Mapping[int, tuple[_Floats, int]] | None = None,
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
        max_labels: labels kept at a node; if there are more, the most promising by ``estimates``, and the fastest.
        num_paths: how many paths to return.
        incumbent_seconds: paths that are no faster are of no use.
        estimates: for a node the seconds that the rest may take, for each number of free buckets, and the bucket's bytes.
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
    none = np.zeros(1, dtype=np.int64)
    state.nodes[start] = _Labels(none - (-start_bytes // slot_bytes), none, none, none, np.zeros(1), none - 1, none - 1, none)
    arriving: dict[int, list[_Labels]] = {}
    for number, edge in enumerate(edges):
        if edge.source not in state.nodes:
            if edge.source not in arriving:
                continue
            state.nodes[edge.source] = _prune_dominated(state, edge.source, _concat_labels(arriving.pop(edge.source)))
        for leaves in (False, True) if edge.movable and edge.input_bytes + edge.saved_bytes else (False,):
            found = _extend_labels(state, state.nodes[edge.source], number, leaves)
            if len(found):
                arriving.setdefault(edge.target, []).append(found)
    if end not in arriving:
        return []
    state.nodes[end] = _prune_dominated(state, end, _concat_labels(arriving[end]))
    return _best_paths(state, end, num_paths)


def _extend_labels(state: _SearchState, labels: _Labels, number: int, leaves: bool) -> _Labels:
    """The labels at the other end of an edge."""
    slots, limit = state.slots[number], state.limit
    below = labels.held - np.maximum(labels.down, 0)
    host = labels.host + slots.host + (slots.entering + slots.saved if leaves else 0)
    fits = (below + slots.need_forward <= limit) & (host <= state.host_limit)
    buckets, need_backward, seconds = _backward_options(state, number, below, np.maximum(labels.up, 0))
    fits &= (below + need_backward <= limit) & np.isfinite(seconds)
    fits &= labels.seconds + slots.forward_seconds + seconds + state.least_after[state.edges[number].target] < state.incumbent_seconds
    chosen = np.flatnonzero(fits)
    labels, below, host = labels.take(chosen), below[chosen], host[chosen]
    buckets, need_backward, seconds = buckets[chosen], need_backward[chosen], seconds[chosen]
    waiting, coming = np.maximum(labels.down, 0), np.maximum(labels.up, 0)
    wait_forward = np.maximum(labels.held + slots.need_forward - limit, 0)
    wait_backward = np.maximum(below + coming + need_backward - limit, 0)
    forward, backward = wait_forward + slots.link_forward, wait_backward + _link_backward(state, number, seconds)
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
    total = labels.seconds + slots.forward_seconds + seconds + wait_forward / state.down_rate + wait_backward / state.up_rate
    return _Labels(held, down, up, host, total, np.full(len(chosen), 2 * number + leaves), chosen.astype(np.int64), buckets)


def _backward_options(state: _SearchState, number: int, below: _Ints, coming: _Ints) -> tuple[_Ints, _Ints, _Floats]:
    """For each label the buckets, the need in slots and the seconds of an edge's backward.

    With a curve it takes the memory that is free without a wait; if it cannot run in that, the least that it can run in.
    """
    edge, slots = state.edges[number], state.slots[number]
    curve = edge.backward_curve
    if curve is None:
        none = np.zeros(len(below), dtype=np.int64)
        return none, none + slots.need_backward, np.full(len(below), slots.backward_seconds)
    least = int(np.argmax(np.isfinite(curve)))
    free = (state.limit - below - coming) * state.slot_bytes // edge.bucket_bytes
    buckets = np.clip(free, least, len(curve) - 1)
    seconds = np.maximum(curve[buckets], state.link.streamed_seconds(edge.down_backward_bytes, edge.up_backward_bytes))
    return buckets, -(-buckets * edge.bucket_bytes // state.slot_bytes), seconds


def _link_backward(state: _SearchState, number: int, seconds: _Floats) -> _Ints:
    """What the link can carry while an edge's backward runs, in slots."""
    slots = state.slots[number]
    if state.edges[number].backward_curve is None:
        return np.full(len(seconds), slots.link_backward, dtype=np.int64)
    return np.maximum(0, np.floor(seconds * state.up_rate - slots.busy_backward + 1e-9)).astype(np.int64)


def _concat_labels(parts: list[_Labels]) -> _Labels:
    return _Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


def _prune_dominated(state: _SearchState, node: int, labels: _Labels) -> _Labels:
    """Without labels that another betters or equals in everything, that come too late, or, if there are too many, that promise least."""
    most = state.max_labels
    if state.incumbent_seconds < inf:
        least = labels.seconds + np.maximum(state.least_after[node], _link_seconds(state, labels))
        labels = labels.take(least < state.incumbent_seconds)
    if len(labels) > 8 * most:
        labels = labels.take(_most_promising(state, node, labels, 4 * most))
    order = np.lexsort((labels.up, labels.down, labels.held, labels.seconds))
    labels = labels.take(order)
    marks = (labels.held, labels.held - np.maximum(labels.down, 0), labels.down, labels.up, labels.host)

    def bettered(these: npt.NDArray[np.intp], by: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """For each of these labels which of the others are no worse in any mark."""
        found = np.ones((len(these), len(by)), dtype=bool)
        for mark in marks:
            found &= mark[by][None, :] <= mark[these][:, None]
        return found

    kept = np.zeros(0, dtype=np.intp)
    block = 128
    for begin in range(0, len(labels), block):
        here = np.arange(begin, min(begin + block, len(labels)))
        # A label only loses to one that is no slower, and those come before it.
        here = here[~bettered(here, kept).any(axis=1)]
        kept = np.concatenate([kept, here[~np.tril(bettered(here, here), -1).any(axis=1)]])
    labels = labels.take(kept)
    return labels.take(_most_promising(state, node, labels, most)) if len(labels) > most else labels


def _most_promising(state: _SearchState, node: int, labels: _Labels, most: int) -> npt.NDArray[np.intp]:
    """The rows of so many labels, in order: by what the whole may take if nothing more leaves, or all that waits has; and the fastest."""
    after = state.least_after[node]
    wholes = []
    for held in (labels.held, labels.held - np.maximum(labels.down, 0)):
        rest = np.full(len(labels), after)
        if node in state.estimates:
            curve, bucket_bytes = state.estimates[node]
            rest = curve[np.clip((state.limit - held) * state.slot_bytes // bucket_bytes, 0, len(curve) - 1)]
        wholes.append(labels.seconds + np.where(np.isfinite(rest), np.maximum(rest, _link_seconds(state, labels)), 1e9 + after))
    chosen = np.zeros(len(labels), dtype=bool)
    for whole, share in ((wholes[0], most // 2), (wholes[1], most * 3 // 4), (labels.seconds, most)):
        order = np.argsort(np.where(chosen, np.inf, whole), kind="stable")
        chosen[order[: share - int(chosen.sum())]] = True
    return np.flatnonzero(chosen)


def _link_seconds(state: _SearchState, labels: _Labels) -> _Floats:
    """What the link still has to carry, at least, until the backward is back at the same cut."""
    down, up = np.maximum(labels.down, 0) / state.down_rate, np.maximum(labels.up, 0) / state.up_rate
    return np.maximum(down, up) if state.link.full_duplex else down + up


def _backtrack(state: _SearchState, node: int, row: int) -> list[tuple[int, int]]:
    """The edges that led to a label, as ``2 * number + leaves``, with their buckets, in order."""
    found = []
    while (via := int(state.nodes[node].via[row])) >= 0:
        labels = state.nodes[node]
        found.append((via, int(labels.buckets[row])))
        row, node = int(labels.before[row]), state.edges[via // 2].source
    return found[::-1]


def _best_paths(state: _SearchState, end: int, num_paths: int) -> list[FluidPath]:
    labels = state.nodes[end]
    found: list[tuple[float, int, list[tuple[int, int]]]] = []
    least = labels.seconds + _min_loss_wait_seconds(state, labels)
    for row in np.argsort(least, kind="stable"):
        if len(found) >= num_paths and least[row] >= found[num_paths - 1][0]:
            break
        vias = _backtrack(state, end, int(row))
        seconds = float(labels.seconds[row]) + _loss_wait_seconds(
            state, int(labels.held[row]), int(labels.down[row]), int(labels.up[row]), vias
        )
        found.append((seconds, int(row), vias))
        found.sort()
    return [
        FluidPath(steps=tuple(PathStep(state.edges[via // 2], bool(via % 2), buckets) for via, buckets in vias), seconds=seconds)
        for seconds, _, vias in found[:num_paths]
    ]


def _min_loss_wait_seconds(state: _SearchState, labels: _Labels) -> _Floats:
    down, up = labels.down / state.down_rate, labels.up / state.up_rate
    both = np.maximum(down, up) if state.link.full_duplex else down + up
    return np.where((down > 0) & (up > 0), both, np.maximum(0.0, np.where((down > 0) | (up > 0), down + up, 0.0)))


def _loss_wait_seconds(state: _SearchState, held: int, down: int, up: int, vias: list[tuple[int, int]]) -> float:
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
    for via, buckets in reversed(vias):
        if elapsed >= window:
            break
        slots, edge = state.slots[via // 2], state.edges[via // 2]
        above += slots.kept
        # A forward still reads an input whose bytes have left: coming back, they would be there twice.
        need = slots.need_forward + (slots.entering if via % 2 else 0)
        carried = slots.link_forward
        if leaving:
            need, carried = slots.need_backward, slots.link_backward
        if leaving and edge.backward_curve is not None:
            need = -(-buckets * edge.bucket_bytes // state.slot_bytes)
            carried = int(_link_backward(state, via // 2, edge.backward_curve[buckets : buckets + 1])[0])
        wait = max(wait, (busy - above + need - state.limit) / rate - elapsed)
        elapsed += carried / (state.up_rate if leaving else state.down_rate)
    return wait
