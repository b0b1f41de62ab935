"""Strip and panel sizes of a candidate: one fraction of the image, scaled to the resolution of each run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from sft.planner.options import Options
from sft.planner.plan import HaloMode, SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.runtime.strip_checkpoints import Checkpoints

__all__ = ["ALL_KEPT", "Tiling", "choose_panel_cols"]

#: Policy that keeps every state.
ALL_KEPT = Checkpoints()
#: Share of the 2^31 elements of a 32-bit index that a strip's new rows may have.
_INDEXED_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Common parameters of all tiled segments of a candidate.

    Attributes:
        problem: the planning problem.
        halo: source of the rows between strips.
        height: rows of the tallest run's source; strip heights refer to it.
        width: columns of the widest run's source; panels refer to it.
        panel_cols: columns of it per panel.
        batch_tile: batch elements per sweep.
        restart: true if the states of a panel are recomputed for its backward pass.
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
        """Tiling with panels of about equal width; ``restart`` only applies to several panels with carried halos."""
        halo: HaloMode = "recompute" if options.halo == "recompute" else "carry"
        runs = [phase.streamed for phase in problem.sized.phases.phases if phase.streamed]
        width = max(map(problem.sized.run_width, runs), default=1)
        cols = choose_panel_cols(problem, options, width, num_panels)
        return cls(
            problem=problem,
            halo=halo,
            height=max(map(problem.sized.run_height, runs), default=1),
            width=width,
            panel_cols=cols,
            batch_tile=problem.sized.batch_tile(options.batch_tile),
            restart=restart and cols < width and halo == "carry",
        )

    @property
    def num_panels(self) -> int:
        """Panels side by side."""
        return -(-self.width // self.panel_cols)

    @property
    def indexed_rows(self) -> int:
        """Rows of the tallest source for which all values of a strip stay within 32-bit element indices, without carried rows.

        GPU operators that index with 32 bits refuse larger tensors, or use slower kernels.
        """
        streamed = [name for phase in self.problem.sized.phases.phases for name in phase.streamed]
        elements = max((prod(self.problem.sized.shapes[name]) for name in streamed), default=0)
        row_elements = elements * self.batch_tile / (self.problem.sized.num_batch * self.num_panels * self.height)
        return max(1, int(_INDEXED_SHARE * 2**31 / max(1.0, row_elements)))

    @property
    def num_sweeps(self) -> int:
        """Sweeps of a run."""
        return -(-self.problem.sized.num_batch // self.batch_tile) * self.num_panels

    @property
    def num_stored_sweeps(self) -> int:
        """Sweeps with states kept at the same time."""
        return 1 if self.restart else self.num_sweeps

    def rows_of(self, names: Sequence[str], strip_rows: int) -> int:
        """Strip height of a run with smaller sources than the tallest."""
        return self.heights_of(names, (strip_rows,))[0]

    def heights_of(self, names: Sequence[str], strip_rows: Iterable[int]) -> tuple[int, ...]:
        """Strip heights of a run, for several heights of the tallest source."""
        height = self.problem.sized.run_height(names)
        return tuple(min(height, max(1, round(rows * height / self.height))) for rows in strip_rows)

    def cols_of(self, names: Sequence[str]) -> int:
        """Panel width of a run with narrower sources than the widest."""
        return max(1, round(self.panel_cols * self.problem.sized.run_width(names) / self.width))

    def choice(self, names: tuple[str, ...], strip_rows: int, policy: Checkpoints = ALL_KEPT) -> SegmentChoice:
        """Decision to tile a run."""
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
    """Columns of the widest source per panel: a forced number, or ``num_panels`` of about equal width that end at whole strides."""
    if options.tile is not None:
        return min(options.tile[1] or width, width)
    stride = max((problem.sized.stride(phase.streamed) for phase in problem.sized.phases.phases if phase.streamed), default=1)
    cols = -(-width // num_panels)
    return min(width, -(-cols // stride) * stride)
