"""Tilings of images of one to three axes in tests, and a check that a plan streams the operator under test."""

from __future__ import annotations

from hypothesis import strategies as st

import sft

__all__ = ["is_tiled", "tiled_options"]


@st.composite
def tiled_options(draw: st.DrawFn, extents: tuple[int, ...]) -> sft.Options:
    """Tilings with strips from one row on, with and without panels, carried halos, checkpoints and batch tiles."""
    panel = draw(st.none() | st.integers(1, extents[1])) if len(extents) > 1 else None
    recompute = draw(st.booleans())
    return sft.Options(
        tile=(draw(st.integers(1, extents[0] + 3)), panel),
        halo="recompute" if recompute else "auto",
        state_every=None if recompute else draw(st.none() | st.integers(1, 4)),
        batch_tile=draw(st.none() | st.just(1)),
    )


def is_tiled(plan: sft.Plan, *kinds: str) -> bool:
    """True if a tiled segment has an operator of one of these kinds."""
    return any(segment.mode == "tiled" and any(kind in name for kind in kinds for name in segment.nodes) for segment in plan.segments)
