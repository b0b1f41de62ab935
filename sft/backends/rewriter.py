"""The pass that puts kernels into a program.

It runs once for each program, after the lowering and before dead instructions go and frees are placed. So workspaces, outputs and freed
intermediate values are counted by the same sum as everything else, and what a group no longer needs (a padded copy, indices of a pool)
disappears by itself. Matchers are asked in order, the largest groups first; what none of them takes stays as it was, to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sft.backends.conv import match_conv_backward, match_convolutions
from sft.backends.conv_pool import match_pooled_convolutions
from sft.backends.def_use import DefUse
from sft.backends.memory_format import channels_last_slots
from sft.backends.norms import match_affine_gradients, match_affines, match_frozen_norm_gradients, match_frozen_norms, match_moments
from sft.backends.pattern import MatchContext, Pattern, Rewrite
from sft.backends.pools import match_average_pools, match_max_pools
from sft.backends.resize import match_resizes
from sft.backends.row_copy import match_row_loads
from sft.backends.selector import KernelSelector
from sft.common.errors import InternalError
from sft.lower.builder import ProgramBuilder
from sft.lower.program import Instruction, Port

__all__ = ["KernelBackend"]

#: Larger groups first: what one has taken is not looked at again.
_PATTERNS: tuple[Pattern, ...] = (
    match_pooled_convolutions,
    match_convolutions,
    match_conv_backward,
    match_frozen_norms,
    match_frozen_norm_gradients,
    match_affines,
    match_affine_gradients,
    match_moments,
    match_max_pools,
    match_average_pools,
    match_resizes,
    match_row_loads,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend:
    """A backend of Triton kernels, where the selector takes them.

    Attributes:
        selector: who decides.
        computes_operands: see :class:`sft.backends.pattern.MatchContext`.
    """

    selector: KernelSelector
    computes_operands: bool = True

    def rewrite(self, builder: ProgramBuilder, laid_out: Collection[Port], *, training: bool, num_forward: int | None = None) -> int | None:
        """Replace instructions of an emitter.

        Args:
            emitter: holds the lowered program; its instructions are exchanged.
            laid_out: ports bound to images that are channels-last.
            training: whether a backward pass follows.
            turn: number of instructions of the first of two halves.

        Returns:
            The same number afterwards.
        """
        listing = DefUse(instructions=tuple(builder.instructions), ports=builder.ports, results=builder.results)
        taken: set[int] = set()
        inserted: dict[int, tuple[Instruction, ...]] = {}
        for replacement in self.replacements(listing, builder, laid_out, training=training):
            taken |= replacement.gone
            inserted |= replacement.inserted
        if not taken:
            return num_forward
        kept = [inserted.get(at, ()) if at in taken else (one,) for at, one in enumerate(listing.instructions)]
        builder.instructions[:] = _merge_rewrites(kept)
        return None if num_forward is None else len(_merge_rewrites(kept[:num_forward]))

    def replacements(self, listing: DefUse, emitter: ProgramBuilder, laid_out: Collection[Port], *, training: bool) -> Iterator[Rewrite]:
        """What is replaced, group by group; arguments as for :meth:`rewrite`."""
        question = MatchContext(
            listing=listing,
            selector=self.selector,
            emitter=emitter,
            last=channels_last_slots(listing, laid_out),
            computes_operands=self.computes_operands,
            may_fold_norms=not training,
        )
        for matcher in _PATTERNS:
            for replacement in matcher(question):
                if not question.taken.isdisjoint(replacement.gone) or not replacement.gone.issuperset(replacement.inserted):
                    raise InternalError(f"{matcher}: two groups share an instruction, at {sorted(replacement.gone)}")
                question.taken |= replacement.gone
                yield replacement


def _merge_rewrites(parts: Sequence[Sequence[Instruction]]) -> list[Instruction]:
    return [one for part in parts for one in part]
