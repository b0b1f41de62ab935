"""What a plan says about several ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MeshPlan", "RankPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One band's part in a step.

    Attributes:
        rows: first row of the tallest input that the band owns, and the one behind the last.
        projected_peak_bytes: most bytes that its step makes, as `sft.Plan.projected_peak_bytes`.
        flops: what it computes.
        halo_flops: of these, what a neighbour computes too: about the bands' borders.
        repeated_flops: of these, what all bands compute: on whole tensors (0 for the first band).
        sent_row_bytes: rows of cuts and of their gradients that it sends.
        sent_global_bytes: running reductions and gradients of global values that it sends.
        sent_parameter_bytes: gradients of parameters that it sends.
        received_bytes: all that it receives.
    """

    rows: tuple[int, int]
    projected_peak_bytes: int
    flops: int
    halo_flops: int
    repeated_flops: int
    sent_row_bytes: int
    sent_global_bytes: int
    sent_parameter_bytes: int
    received_bytes: int

    @property
    def sent_bytes(self) -> int:
        """All that it sends."""
        return self.sent_row_bytes + self.sent_global_bytes + self.sent_parameter_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """A step on a mesh of ranks.

    Attributes:
        num_replicas: images that are worked on at once.
        ranks: one for each band of an image; those of other replicas are the same.
        outputs_in_bands: whether each rank returns its own rows of outputs that are images.
    """

    num_replicas: int
    ranks: tuple[RankPlan, ...]
    outputs_in_bands: bool = False

    @property
    def num_bands(self) -> int:
        """Ranks that share an image."""
        return len(self.ranks)

    @property
    def sent_bytes(self) -> int:
        """What all ranks of an image send in a step."""
        return sum(rank.sent_bytes for rank in self.ranks)

    @property
    def halo_share(self) -> float:
        """What is computed twice at the bands' borders, of all FLOPs."""
        total = sum(rank.flops for rank in self.ranks)
        return sum(rank.halo_flops for rank in self.ranks) / total if total else 0.0

    @property
    def balance(self) -> float:
        """The mean of the ranks' FLOPs over the largest: 1 where all work alike."""
        most = max((rank.flops for rank in self.ranks), default=0)
        return sum(rank.flops for rank in self.ranks) / (most * len(self.ranks)) if most else 1.0
