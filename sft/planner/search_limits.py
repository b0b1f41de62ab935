"""Search limits: thresholds of the planner's heuristics, in one frozen record that every plan prints.

They bound the effort of a search and its estimates. No limit affects the exactness of a plan or of its projection: another value can only
find another plan, or the same one in more time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sft.common.legacy_names import restore_fields

__all__ = ["SearchLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Thresholds of a plan search; costs are FLOPs (``sft.planner.cost.device_rates``), shares and factors have no unit.

    Exact projections:
        max_projections: projections per candidate grid, and per search for a tiled head with a recomputed tail.
        further_cost_share: a further proposal is projected only if its cost is below this share of the best plan's.
        certain_bytes_share: lower bound of the bytes that untiled operators need, as a share of their estimate.

    Scope of strategy ``auto``:
        near_optimal_cost: the search ends if plain PyTorch fits and costs at most this multiple of the lower bound of all plans.
        few_panels_cost: grids of more panels are searched only if the best plan costs more than this multiple of a grid's minimum.
        panel_bytes_share: more panels are tried only if they need less than this share of the bytes of fewer panels.
        min_panel_px: width of the narrowest panel, in pixels.
        recompute_cost: recomputed and offloaded stages are searched only above this multiple of plain PyTorch's FLOPs.
        streaming_cost: streamed cuts are searched only above this multiple of the first grid's minimum.
        recompute_solvers: recomputation solvers that are compared, by name: the chain's optimum, and two that may fit or win where the
            chain, which counts a skip once per crossed cut, misleads it. `revolve` and `bisect` are never faster on the benchmark networks.
        offload_solvers: offload solvers that are compared, by name; `offload-greedy` and `vdnn` are never better on the benchmark networks.

    Smallest plan:
        smallest_solvers: recomputation solvers that are compared; that of the smallest peak differs from network to network.
        num_smallest: candidates that are projected.
        num_smallest_of_few: the same for networks of few operators, which are projected fast.
        few_operators: largest number of operators of such a network.
        smaller_bytes_share: a further candidate is projected only if its estimate is below this share of the smallest peak.

    Candidate grids:
        state_slots: numbers of state slots that are tried where a state at every square root of the strips takes too many bytes.
        sampled_strides: strip heights in strides that are lowered for images below so many strides, in addition to the lowest and the full
            image.
        sampled_strides_above: the same for higher images.
        few_run_operators: largest number of operators of a run that is lowered at fewer heights; its peak moves between few operators.
        samples_of_few: indices of these heights among the sampled ones.
        num_halo_samples: cuts of a run, about, at which recomputed halos are counted.
        min_shared_extent: narrowest extent, in pixels, of the values of a strip that shares its memory profile with other image sizes;
            below it borders matter too much.
        max_restored: restored runs per strip, on average, of an acceptable state policy.
        max_counted_values: largest number of values times strips for which states are counted; above it their closed form is used.
        max_counted_strips: largest number of strips for which states in slots are counted.
        few_counted_values: largest number of distinct values for which rows are counted one by one.
        num_counted_groups: groups of strips at the end of the image that are counted.

    Stages:
        max_cut_values: values that cross a cut between stages.
        max_stages: stages of a chain.
        minor_bytes_share: a cut counts as crossed by one value if all further values have at most this share of its bytes.
        max_stage_share: cuts of several large values are considered in stages with more than this share of all activation bytes.

    Solvers on stages:
        max_rounds: corrections of a solver's budget.
        max_joint_rounds: the same for the joint solver, which takes seconds.
        max_joint_stages: longest chain for the joint solver.
        max_heads: tiled heads that are tried with an offloaded tail.
        max_tail_rounds: corrections of a solver's budget for one head.
        max_joint_heads: heads for which the joint solver runs.
        optimal_bytes_factor: the chain's smallest schedule is not exactly the model's: another may need its bytes over this factor.
        chain_bytes_factor: the chain counts a skip once per crossed cut, so its lower bound may exceed the room by this factor.
        num_buckets: resolution in memory of the recomputation table.

    Streamed cuts:
        max_single_cuts: cuts that are tried one by one after the bisection.

    Independent tiles:
        max_tiles: tiles along each side of the finest grid.
        num_value_limits: limits on the bytes of a value that are tried.
        small_stride_share: tiles end at whole strides if a stride is at most this share of a tile; most tiles then share their programs.
        min_tile_share: lower bound of the bytes of one tile, as a share of the whole model's bytes divided by the number of tiles.
        max_tile_flops: largest multiple of plain PyTorch's FLOPs.

    Alternatives that are timed (``Options(profile="measure")``):
        max_timed_flops: largest multiple of the FLOPs of the planner's plan.
        num_timed_heights: alternatives with other strip heights; on a GPU they are among the candidates of every search.

    Search on a GPU:
        num_accepted: fastest plans whose overhead is determined before a search in less memory.

    Transfer to another number of samples:
        max_transferred_flops: largest multiple of plain PyTorch's FLOPs of a plan that leaves room unused.
        transferred_room_share: share of the room above which it may have more.

    Tiled heads on a GPU:
        num_idle_values: numbers of the largest values between the segments of a tiled head that are tried off the device while the tail
            runs.

    Split runs on a GPU:
        split_flops: runs are cut where the resolution changes only if all other plans compute more than this multiple of plain PyTorch's
            FLOPs. Split runs compute 4/3 of them, and halos.
        split_seconds: the same for estimated seconds.
    """

    max_projections: int = 8
    further_cost_share: float = 0.98
    certain_bytes_share: float = 0.95

    near_optimal_cost: float = 1.05
    few_panels_cost: float = 1.05
    panel_bytes_share: float = 0.95
    min_panel_px: int = 64
    recompute_cost: float = 1.02
    streaming_cost: float = 1.05
    recompute_solvers: tuple[str, ...] = ("sqrt", "optimal", "acg")
    offload_solvers: tuple[str, ...] = ("offload-dp",)

    smallest_solvers: tuple[str, ...] = ("sqrt", "revolve", "bisect", "optimal", "acg")
    num_smallest: int = 3
    num_smallest_of_few: int = 12
    few_operators: int = 64
    smaller_bytes_share: float = 0.95

    state_slots: tuple[int, ...] = (16, 12, 8, 6, 4, 3, 2)
    sampled_strides: tuple[tuple[int, tuple[int, ...]], ...] = ((16, (1, 2, 4)), (128, (1, 4, 16)), (4096, (1, 12, 96)))
    sampled_strides_above: tuple[int, ...] = (1, 12, 96, 1024)
    few_run_operators: int = 8
    samples_of_few: tuple[int, ...] = field(default=(0, 2, -2, -1), metadata={"minimum": None})
    num_halo_samples: int = 8
    min_shared_extent: int = 8
    max_restored: float = 6.0
    max_counted_values: int = 2**17
    max_counted_strips: int = 512
    few_counted_values: int = 4
    num_counted_groups: int = 4

    max_cut_values: int = 8
    max_stages: int = 120
    minor_bytes_share: float = 0.1
    max_stage_share: float = 1 / 12

    max_rounds: int = 10
    max_joint_rounds: int = 3
    max_joint_stages: int = 32
    max_heads: int = 8
    max_tail_rounds: int = 4
    max_joint_heads: int = 1
    optimal_bytes_factor: float = 1.2
    chain_bytes_factor: float = 1.5
    num_buckets: int = 400

    max_single_cuts: int = 6

    max_tiles: int = 32
    num_value_limits: int = 16
    small_stride_share: float = 1 / 16
    min_tile_share: float = 0.5
    max_tile_flops: float = 4.0

    max_timed_flops: float = 1.5
    num_timed_heights: int = 4

    num_accepted: int = 5

    max_transferred_flops: float = 1.4
    transferred_room_share: float = 0.75

    num_idle_values: tuple[int, ...] = (1, 2, 4)

    split_flops: float = 1.3
    split_seconds: float = 1.5

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    def changes(self) -> tuple[str, ...]:
        """Fields that differ from their default, as ``name=value``."""
        return tuple(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if getattr(self, field.name) != field.default)
