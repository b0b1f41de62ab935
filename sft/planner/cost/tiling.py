"""How a survey tiles every run: strips and panels of the run's own size, the same share of the image for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from sft.planner.options import Options
from sft.planner.plan import HaloMode, SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["ALL_KEPT", "Tiling", "choose_panel_cols"]

ALL_KEPT = Checkpoints()
#: Of the elements that 32 bits count a strip's new rows have this share at most.
_INDEXED_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """What all tiled segments of a candidate have in common.

    Attributes:
        problem: what is planned.
        halo: how strips get the rows between them.
        height: rows of the tallest run's source, of which strip heights are counted.
        width: columns of the widest run's source, of which panels are counted.
        panel_cols: columns of it to a panel.
        batch_tile: samples to a walk.
        restart: whether the states of a panel are made again for its backward pass.
    """

    problem: PlanningProblem
    halo: HaloMode
    height: int
    width: int
    panel_cols: int
    batch_tile: int
    restart: bool

    @classmethod
    def of(cls, problem: PlanningProblem, options: Options, num_panels: int, *, restart: bool) -> Tiling:
        """Panels of about equal width; ``restart`` where there are several, and states at all."""
        halo: HaloMode = "recompute" if options.halo == "recompute" else "carry"
        runs = [phase.streamed for phase in problem.phases.phases if phase.streamed]
        width = max(map(problem.run_width, runs), default=1)
        cols = choose_panel_cols(problem, options, width, num_panels)
        return cls(
            problem=problem,
            halo=halo,
            height=max(map(problem.run_height, runs), default=1),
            width=width,
            panel_cols=cols,
            batch_tile=problem.batch_tile(options.batch_tile),
            restart=restart and cols < width and halo == "carry",
        )

    @property
    def num_panels(self) -> int:
        """Panels side by side."""
        return -(-self.width // self.panel_cols)

    @property
    def indexed_rows(self) -> int:
        """Rows of the tallest source whose strips have no value of more elements than 32 bits count; carried rows come on top.

        Operators of GPUs that index with so many bits refuse larger tensors, or run something slower instead.
        """
        streamed = [name for phase in self.problem.phases.phases for name in phase.streamed]
        most = max((prod(self.problem.shapes[name]) for name in streamed), default=0)
        row_elements = most * self.batch_tile / (self.problem.num_batch * self.num_panels * self.height)
        return max(1, int(_INDEXED_SHARE * 2**31 / max(1.0, row_elements)))

    @property
    def num_walks(self) -> int:
        """Times that a run is walked from top to bottom."""
        return -(-self.problem.num_batch // self.batch_tile) * self.num_panels

    @property
    def num_stores(self) -> int:
        """Walks whose states are held at a time."""
        return 1 if self.restart else self.num_walks

    def rows_of(self, names: Sequence[str], strip_rows: int) -> int:
        """The strip height of a run whose sources are smaller than the tallest."""
        return self.heights_of(names, (strip_rows,))[0]

    def heights_of(self, names: Sequence[str], strip_rows: Iterable[int]) -> tuple[int, ...]:
        """The same for several strip heights."""
        height = self.problem.run_height(names)
        return tuple(min(height, max(1, round(rows * height / self.height))) for rows in strip_rows)

    def cols_of(self, names: Sequence[str]) -> int:
        """The panel width of a run whose sources are narrower than the widest."""
        return max(1, round(self.panel_cols * self.problem.run_width(names) / self.width))

    def choice(self, names: tuple[str, ...], strip_rows: int, policy: Checkpoints = ALL_KEPT) -> SegmentChoice:
        """The decision about a run."""
        return SegmentChoice(
            nodes=names,
            mode="tiled",
            strip_rows=self.rows_of(names, strip_rows),
            state_every=policy.every,
            state_slots=policy.slots,
            batch_tile=self.batch_tile,
            panel_cols=self.cols_of(names) if self.num_panels > 1 else 0,
            halo=self.halo,
            restart=self.restart,
        )


def choose_panel_cols(problem: PlanningProblem, options: Options, width: int, num_panels: int) -> int:
    """Columns of the widest source to a panel: a forced number, or ``num_panels`` of about equal width that end at whole strides."""
    if options.tile is not None:
        return min(options.tile[1] or width, width)
    stride = max((problem.stride(phase.streamed) for phase in problem.phases.phases if phase.streamed), default=1)
    even = -(-width // num_panels)
    return min(width, -(-even // stride) * stride)
