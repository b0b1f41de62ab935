"""From decisions and a layout to the region that one band runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from sft.analysis.axes import ROWS
from sft.analysis.bands import BandPartition
from sft.analysis.schedule import StripSchedule, build_schedule
from sft.bands.layout import OwnershipMap, assign_ownership
from sft.bands.merge import MERGES
from sft.bands.region import BandRegion, band_shapes
from sft.bands.segments import BandSegment, BandWholeSegment, OwnedGradMask
from sft.errors import UnsupportedError
from sft.plan.build import build_region
from sft.plan.problem import PlanningProblem
from sft.plan.types import SegmentChoice
from sft.walk.segments import TiledSegment

__all__ = ["BandRegionBuilder"]


class BandRegionBuilder:
    """The same decisions for every band of an image.

    Args:
        problem: what is planned.
        choices: the decisions.
        shares: who owns which rows.
        outputs_in_bands: whether outputs that are images stay where they are made.
        num_replicas: images that are worked on at once.
        synchronized: global values that are those of all replicas together.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        choices: Sequence[SegmentChoice],
        shares: BandPartition,
        *,
        outputs_in_bands: bool = False,
        num_replicas: int = 1,
        synchronized: frozenset[str] = frozenset(),
    ) -> None:
        self.problem, self.choices = problem, tuple(choices)
        self.num_replicas, self.synchronized = num_replicas, synchronized
        self.layout: OwnershipMap = assign_ownership(problem, choices, shares, outputs_in_bands=outputs_in_bands)
        self._whole = build_region(problem, choices)
        _check_reductions(problem)

    def region(self, band: int, together: Callable[[], Any] = nullcontext) -> BandRegion:
        """What a band runs; no program is lowered before it is needed."""
        problem, layout, whole = self.problem, self.layout, self._whole
        summed = {name: held for name, held in layout.held.items() if held.is_summed}
        counts = OwnedGradMask(
            own={name: held.own[band] for name, held in summed.items()},
            extents={name: problem.extent(name, ROWS) for name in summed},
            summed=layout.summed,
            is_first=band == 0,
        )
        segments: list[BandSegment | BandWholeSegment] = [
            self._tiled(index, segment, band) if isinstance(segment, TiledSegment) else _band_whole_segment(segment, counts)
            for index, segment in enumerate(whole.segments)
        ]
        return BandRegion(
            graph=whole.graph,
            segments=segments,
            reads=whole.reads,
            makes=whole.makes,
            shapes=band_shapes(whole, layout, band),
            dtypes=whole.dtypes,
            grad_dtypes=whole.grad_dtypes,
            requires_grad=whole.requires_grad,
            outputs=whole.outputs,
            contiguous=whole.contiguous,
            from_source=whole.from_source,
            host_outputs=whole.host_outputs,
            order=whole.order,
            band=band,
            layout=layout,
            counts=counts,
            whole_shapes=problem.shapes,
            synchronized=self.synchronized,
            num_replicas=self.num_replicas,
            timetables=tuple(segment.timetable if isinstance(segment, BandSegment) else None for segment in segments),
            together=together,
        )

    def likeness(self, region: BandRegion) -> object:
        """What bands of equal cost have in common: the strips of their segments, what they hold, and what they send and receive."""
        layout, band = self.layout, region.band
        schedules = [segment.schedule for segment in region.segments if isinstance(segment, BandSegment)]
        strips = tuple(schedule.likeness() for schedule in schedules if isinstance(schedule, StripSchedule))
        crossing = tuple(
            (
                len(held.rows[band]),
                len(held.own[band]),
                tuple(
                    (len(t.rows), t.rows.start - held.own[band].start, t.source == band, t.source < t.target)
                    for t in (*held.borrowed, *held.lent)
                    if band in (t.source, t.target)
                ),
            )
            for held in layout.held.values()
        )
        return strips, crossing

    def _tiled(self, index: int, segment: TiledSegment, band: int) -> BandSegment:
        problem, layout, choice = self.problem, self.layout, self.choices[index]
        parts = layout.bands[index]
        assert parts is not None
        phases, graph = problem.phases, problem.graph
        schedule = build_schedule(graph, choice.nodes, phases.rows, phases.streamed, problem.extents(ROWS), choice.strip_rows, parts[band])
        # The bands' programs depend on nothing but this, and on the signatures of their strips.
        lowered = replace(choice, strip_rows=0, state_every=1, state_slots=0, restart=False)
        return BandSegment(
            scope=segment.scope,
            schedule=schedule,
            panels=segment.panels,
            checkpoints=segment.checkpoints,
            restart=segment.restart,
            num_batch=segment.num_batch,
            sides=segment.sides,
            from_source=segment.from_source,
            to_host=segment.to_host,
            contiguous=segment.contiguous,
            first_rows={name: held.rows[band].start for name, held in layout.held.items()},
            synchronized=self.synchronized,
            shared=problem.remembered(("programs of bands", lowered, segment.scope.outputs), dict),
        )


def _band_whole_segment(segment: Any, counts: OwnedGradMask) -> BandWholeSegment:
    """A segment on whole tensors with the plain one's programs."""
    return BandWholeSegment(
        scope=segment.scope,
        step=segment.step,
        sides=segment.sides,
        from_source=segment.from_source,
        counts=counts,
        _programs=segment._programs,
    )


def _check_reductions(problem: PlanningProblem) -> None:
    """Refuse reductions over the image that bands cannot merge.

    Raises:
        UnsupportedError: there is one.
    """
    rows = problem.phases.rows
    unknown = [node for node in problem.graph.operators if rows[node.name].role == "reduce" and rows[node.name].name not in MERGES]
    if unknown:
        raise UnsupportedError([f"{node.label}: bands cannot merge what they reduce; leave out mesh" for node in unknown])
