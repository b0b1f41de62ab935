"""Mesh plans: bytes, FLOPs and messages of each rank of a plan over several ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from sft.common.byte_units import format_bytes

__all__ = ["MeshPlan", "RankPlan"]

#: Bands listed one by one in the report.
_MAX_SHOWN_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Share of one band in a step.

    Attributes:
        rows: half-open range of the rows of the tallest input that the band owns.
        projected_peak_bytes: peak bytes of its step, as `sft.Plan.projected_peak_bytes`.
        flops: its FLOPs.
        repeated_flops: part of these that all bands compute: untiled operators (0 for the first band).
        sent_row_bytes: rows of segment boundary tensors and of their gradients that it sends.
        sent_global_bytes: running reductions and gradients of global values that it sends.
        sent_parameter_bytes: gradients of parameters that it sends.
        received_bytes: all bytes that it receives.
        overlapped_sent_bytes: sent bytes that are in flight while strips run: the band computes between posting and waiting.
        overlapped_received_bytes: the same of the received bytes.
    """

    rows: tuple[int, int]
    projected_peak_bytes: int
    flops: int
    repeated_flops: int
    sent_row_bytes: int
    sent_global_bytes: int
    sent_parameter_bytes: int
    received_bytes: int
    overlapped_sent_bytes: int = field(metadata={"former": "sent_beside_bytes"})
    overlapped_received_bytes: int = field(metadata={"former": "received_beside_bytes"})

    @property
    def sent_bytes(self) -> int:
        """All bytes that it sends."""
        return self.sent_row_bytes + self.sent_global_bytes + self.sent_parameter_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """A step on a mesh of ranks.

    Attributes:
        num_replicas: images that are processed at once.
        ranks: one entry per band of an image; those of other replicas are equal.
        halo_flops: FLOPs that all bands compute in addition to one band of the whole image: rows at the borders, computed by both
            neighbours.
        outputs_in_bands: true if each rank returns its own rows of outputs that are images.
    """

    num_replicas: int
    ranks: tuple[RankPlan, ...]
    halo_flops: int
    outputs_in_bands: bool = False

    @property
    def num_bands(self) -> int:
        """Ranks that share an image."""
        return len(self.ranks)

    @property
    def sent_bytes(self) -> int:
        """Bytes that all ranks of an image send in a step."""
        return sum(rank.sent_bytes for rank in self.ranks)

    @property
    def overlapped_share(self) -> float:
        """Share of the sent bytes that are in flight during computation; 1 if no bytes are sent."""
        return sum(rank.overlapped_sent_bytes for rank in self.ranks) / self.sent_bytes if self.sent_bytes else 1.0

    @property
    def halo_share(self) -> float:
        """FLOPs computed twice at the borders of bands, over those computed once."""
        once = sum(rank.flops - rank.repeated_flops for rank in self.ranks) - self.halo_flops
        return self.halo_flops / once if once else 0.0

    @property
    def balance(self) -> float:
        """Mean of the ranks' FLOPs over the largest: 1 if all compute the same."""
        largest = max((rank.flops for rank in self.ranks), default=0)
        return sum(rank.flops for rank in self.ranks) / (largest * len(self.ranks)) if largest else 1.0

    def link_seconds(self, bytes_per_second: float) -> float:
        """Seconds of the busiest rank's messages on a link of its own in each direction, without overlap."""
        return max((max(rank.sent_bytes, rank.received_bytes) for rank in self.ranks), default=0) / bytes_per_second

    def lines(self) -> list[str]:
        """Report lines: totals of all ranks, then one line for each of the first ranks and the last."""
        total = sum(rank.flops for rank in self.ranks)
        lines = [
            f"Mesh: {self.num_replicas} replica(s) of {self.num_bands} band(s)",
            f"  borders           {100 * self.halo_share:>10.3f} %  of FLOPs are computed by two neighbours",
            f"  balance           {100 * self.balance:>10.1f} %  mean over largest of the ranks' FLOPs",
            f"  sent              {format_bytes(self.sent_bytes):>12}  a step, by all ranks of an image",
            f"  overlapped        {100 * self.overlapped_share:>10.1f} %  of that is sent while strips run",
            "  band            rows   projected  FLOPs   sent rows      global  parameters",
            "          of the image        peak                         values",
        ]
        shown = {*range(_MAX_SHOWN_RANKS), self.num_bands - 1}
        for band, rank in enumerate(self.ranks):
            if band not in shown:
                if band == _MAX_SHOWN_RANKS:
                    peaks = [other.projected_peak_bytes for other in self.ranks[band:-1]]
                    lines.append(f"   ... {len(peaks)} more, projected peaks {format_bytes(min(peaks))} to {format_bytes(max(peaks))}")
                continue
            rows = f"{rank.rows[0]}..{rank.rows[1]}"
            sent = (rank.sent_row_bytes, rank.sent_global_bytes, rank.sent_parameter_bytes)
            amounts = "".join(f" {format_bytes(num_bytes):>11}" for num_bytes in sent)
            share = 100 * rank.flops / total if total else 0.0
            lines.append(f"  {band:>4} {rows:>15} {format_bytes(rank.projected_peak_bytes):>11} {share:>4.0f} %{amounts}")
        return lines
