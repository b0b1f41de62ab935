"""Rewriting pass that replaces instruction groups of a program by kernel calls.

The pass runs once for each program, after the lowering and before dead code elimination and the placement of frees. So the usual accounting
covers workspaces, outputs and freed intermediate values, and a value that a group no longer needs (a padded copy, the indices of a pool)
disappears by itself. Patterns run in order, the largest groups first. Instructions that no pattern matches stay as they were, to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from sft.backends.conv import match_conv_backward, match_convolutions
from sft.backends.conv_pool import match_pooled_convolutions
from sft.backends.convolution_relu import FusionDevice
from sft.backends.def_use import DefUse
from sft.backends.library_fusion import (
    match_channel_moments,
    match_channel_sums,
    match_convolution_relus,
    match_frozen_norm_image_gradients,
)
from sft.backends.memory_format import channels_last_slots, match_large_images
from sft.backends.norms import (
    match_affine_gradients,
    match_affines,
    match_frozen_norm_gradients,
    match_frozen_norms,
    match_half_affine_gradients,
    match_half_affines,
    match_moments,
)
from sft.backends.pattern import MatchContext, Pattern, Rewrite
from sft.backends.pools import (
    match_average_pools,
    match_infinite_maxima,
    match_max_pools,
    match_padded_average_pool_gradients,
    match_single_maxima,
)
from sft.backends.resize import match_resizes, selects_resize
from sft.backends.row_copy import match_row_loads
from sft.backends.selector import AlwaysKernel, KernelSelector, NoKernels
from sft.common.errors import InternalError
from sft.lower.builder import ProgramBuilder
from sft.lower.program import Instruction, Port

__all__ = ["KernelBackend"]

#: Those without a Triton kernel.
_LIBRARY_PATTERNS: tuple[Pattern, ...] = (
    match_convolution_relus,
    match_frozen_norm_image_gradients,
    match_half_affine_gradients,
    match_half_affines,
    match_channel_moments,
    match_channel_sums,
    match_padded_average_pool_gradients,
    match_single_maxima,
    match_infinite_maxima,
    match_large_images,
)
#: Larger groups first: an instruction belongs to the first rewrite that matches it.
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
    *_LIBRARY_PATTERNS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend:
    """Backend that runs Triton kernels where a selector chooses them, and fused calls of cuDNN for convolutions without a kernel.

    Attributes:
        selector: chooses between kernels and ATen; None for ATen and fused calls alone.
        computes_operands: see :class:`sft.backends.pattern.MatchContext`.
        fusion_device: see :class:`sft.backends.pattern.MatchContext`.
    """

    selector: KernelSelector | None
    computes_operands: bool = True
    fusion_device: FusionDevice | None = None

    @property
    def decomposes_norms(self) -> bool:
        """True if every kernel runs: by the time model, a norm of a whole image takes less as one call of ATen than in parts."""
        return isinstance(self.selector, AlwaysKernel)

    @property
    def without_kernels(self) -> KernelBackend | None:
        """The backend with fused calls alone; ``None`` without a selector, or with one that selects every kernel."""
        return None if self.selector is None or isinstance(self.selector, AlwaysKernel) else replace(self, selector=None)

    def resamples(self, dtype: torch.dtype, shape: Sequence[int], num_terms: Sequence[int], *, is_adjoint: bool) -> bool:
        """True if a kernel resamples images of this element type; arguments as of :func:`sft.backends.resize.selects_resize`."""
        return self.selector is not None and selects_resize(self.selector, dtype, shape, num_terms, is_adjoint=is_adjoint)

    def fuses_attention(self, dtype: torch.dtype) -> bool:
        """True if attention of this element type is one operator on the device."""
        return self.fusion_device is not None and self.fusion_device.fuses_attention(dtype)

    def rewrite(self, builder: ProgramBuilder, laid_out: Collection[Port], *, training: bool, num_forward: int | None = None) -> int | None:
        """Replace instructions of a program builder in place.

        Args:
            builder: builder of the lowered program.
            laid_out: ports bound to images that are channels-last.
            training: true if a backward pass follows.
            num_forward: number of instructions in the forward half of a joint program; None for a program of one half.

        Returns:
            ``num_forward`` after the rewrites.
        """
        def_use = DefUse(instructions=tuple(builder.instructions), ports=builder.ports, results=builder.results)
        removed: set[int] = set()
        inserted: dict[int, tuple[Instruction, ...]] = {}
        for rewrite in self.rewrites(def_use, builder, laid_out, training=training):
            removed |= rewrite.removed
            inserted |= rewrite.inserted
        if not removed:
            return num_forward
        by_position = [inserted.get(at, ()) if at in removed else (instruction,) for at, instruction in enumerate(def_use.instructions)]
        builder.instructions[:] = _concatenated(by_position)
        return None if num_forward is None else len(_concatenated(by_position[:num_forward]))

    def rewrites(self, def_use: DefUse, builder: ProgramBuilder, laid_out: Collection[Port], *, training: bool) -> Iterator[Rewrite]:
        """All rewrites, pattern by pattern; arguments as for :meth:`rewrite`.

        Raises:
            InternalError: two rewrites share an instruction.
        """
        context = MatchContext(
            def_use=def_use,
            selector=self.selector or NoKernels(),
            builder=builder,
            channels_last=channels_last_slots(def_use, laid_out),
            computes_operands=self.computes_operands,
            may_fold_norms=not training,
            fusion_device=self.fusion_device,
        )
        for pattern in _PATTERNS if self.selector is not None else _LIBRARY_PATTERNS:
            for rewrite in pattern(context):
                if not context.claimed.isdisjoint(rewrite.removed) or not rewrite.removed.issuperset(rewrite.inserted):
                    raise InternalError(f"{pattern}: two groups share an instruction, at {sorted(rewrite.removed)}")
                context.claimed |= rewrite.removed
                yield rewrite


def _concatenated(groups: Sequence[Sequence[Instruction]]) -> list[Instruction]:
    return [instruction for group in groups for instruction in group]
