"""Random operators: dropout, masks and noise, identical on strips and on full tensors.

A random number is a function of the element's position in the full tensor (counter-based, see ``kernels/rng/mask_tile.py``). The position
of the strip is bound when the program runs (the ``origin`` port), so strips of one signature share their program. The backward pass
evaluates the mask again instead of saving it. A strip of a value that is not an image may have some channels, from the fourth number of its
origin on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

import torch

from sft.analysis.ir.graph import refs_in
from sft.common.memory import measure_peak
from sft.kernels.rng.dropout import Distribution, dropout, write_mask, write_noise
from sft.kernels.rng.dropout_reference import reference_block
from sft.kernels.rng.mask_tile import CHANNELS_PER_CALL, MaskTile, ceil_div
from sft.kernels.rng.philox import seed_word
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.rules.base import Rule

__all__ = ["DropoutRule", "NoiseRule", "RandomMaskRule"]

Extents = tuple[int, int, int, int]

#: Bytes of the key of a seed in device memory: two words, and the two of the next round.
_DEVICE_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class _RandomCall:
    """One random operator; its methods are called with the seed and the strip's origin when the program runs.

    Attributes:
        extents: extents of the full tensor as ``[N, C, H, W]``.
        site: number of the random operator in the model.
        p: probability of a drop.
        column_px: pixels of a column: the extent of a third axis.
        has_channels: True if the second dimension is channels; otherwise it is rows.
    """

    extents: Extents
    site: int
    p: float = 0.0
    column_px: int = 1
    has_channels: bool = True

    def drop(self, x: torch.Tensor, seed: torch.Tensor, origin: tuple[int, ...], *, out: torch.Tensor) -> None:
        """Write ``x`` times mask times scale."""
        for tile, target, extents, start in self._tiles(x, out, origin):
            dropout(tile, origin=start, extents=extents, seed=seed_word(seed), site=self.site, draw=0, p=self.p, kind="element", out=target)

    def mask(self, out: torch.Tensor, seed: torch.Tensor, origin: tuple[int, ...]) -> None:
        """Write the mask: one for kept elements, zero for dropped ones."""
        for _, target, extents, start in self._tiles(out, out, origin):
            write_mask(self._tile(target, seed, extents, start), target)

    def noise(
        self, out: torch.Tensor, seed: torch.Tensor, origin: tuple[int, ...], distribution: Distribution, scale: float, shift: float
    ) -> None:
        """Write random numbers of a distribution, scaled and shifted."""
        for _, target, extents, start in self._tiles(out, out, origin):
            write_noise(self._tile(target, seed, extents, start), distribution, target)
        if (scale, shift) != (1.0, 0.0):
            out.mul_(scale).add_(shift)

    def as_image(self, shape: tuple[int, ...]) -> Extents:
        """The shape of a strip as samples, channels, rows and columns."""
        return _as_image_shape(shape, self.has_channels)

    def _tile(self, target: torch.Tensor, seed: torch.Tensor, extents: Extents, start: tuple[int, int, int]) -> MaskTile:
        samples, channels, rows, columns = target.shape
        shape = (samples, channels, rows, columns)
        return MaskTile(shape=shape, extents=extents, origin=start, seed=seed_word(seed), site=self.site, draw=0, p=self.p, kind="element")

    def _tiles(
        self, x: torch.Tensor, out: torch.Tensor, origin: tuple[int, ...]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Extents, tuple[int, int, int]]]:
        """Tiles with all channels that make up a strip: part of the operand, part of the result, extents of the full tensor, and origin.

        A strip of some channels (the tokens of ``[N, tokens, width]``) is divided into groups of four, which share random words: a group
        is then a sample of four channels. Groups that the strip has a part of are computed in a buffer.
        """
        shape = self.as_image(tuple(x.shape))
        x, out = x.view(shape), out.view(shape)
        if shape[1] == self.extents[1]:
            yield x, out, self.extents, (origin[0], origin[1], origin[2] * self.column_px)
            return
        num_groups = ceil_div(self.extents[1], CHANNELS_PER_CALL)
        extents = (self.extents[0] * num_groups, CHANNELS_PER_CALL, *self.extents[2:])
        sample, row, column, channel = (*origin, 0)[:4]
        buffer = x.new_empty((1, CHANNELS_PER_CALL, *shape[2:]))
        for number, channels in product(range(shape[0]), _split_groups(channel, channel + shape[1])):
            group, skipped = divmod(channels.start, CHANNELS_PER_CALL)
            start = ((sample + number) * num_groups + group, row, column)
            tile, target = (each[number, channels.start - channel : channels.stop - channel] for each in (x, out))
            if len(channels) % CHANNELS_PER_CALL == 0 and not skipped:
                yield *(each.unflatten(0, (-1, CHANNELS_PER_CALL)) for each in (tile, target)), extents, start
                continue
            inside = buffer.zero_()[0, skipped : skipped + len(channels)]
            inside.copy_(tile)
            yield buffer, buffer, extents, start
            target.copy_(inside)


def _split_groups(start: int, stop: int) -> Iterator[range]:
    """Channels from ``start`` to ``stop``, divided where a partial group of four begins or ends.

    >>> list(_split_groups(3, 14)), list(_split_groups(1, 3))
    ([range(3, 4), range(4, 12), range(12, 14)], [range(1, 3)])
    """
    first, last = ceil_div(start, CHANNELS_PER_CALL) * CHANNELS_PER_CALL, stop // CHANNELS_PER_CALL * CHANNELS_PER_CALL
    borders = (start, first, last, stop) if first <= last else (start, stop)
    yield from (range(low, high) for low, high in pairwise(borders) if low < high)


def _as_image_shape(shape: tuple[int, ...], has_channels: bool) -> Extents:
    """A shape as samples, channels, rows and columns, as in ``positional_dropout``."""
    padded = (*shape, 1, 1, 1) if has_channels else (shape[0], 1, *shape[1:])
    return (padded[0], padded[1], padded[2], math.prod(padded[3:]))


def _random_call_of(ctx: NodeContext) -> _RandomCall:
    node = ctx.node
    shape, is_streamed = ctx.scope.full_shapes.get(node.name, ctx.scope.shapes[node.name]), node.name in ctx.scope.streamed
    axes = ctx.scope.axes
    column_px = math.prod(axes.of(shape)[2:]) if is_streamed else 1
    has_channels = not is_streamed or len(shape) >= axes.rank
    return _RandomCall(_as_image_shape(shape, has_channels), node.argument("site"), node.argument("p", 0.0), column_px, has_channels)


def _seed_and_origin(ctx: NodeContext) -> tuple[Slot, Slot]:
    """The slots of the seed and of the origin."""
    (seed,) = refs_in(ctx.node.argument("seed"))
    return ctx.global_slot(seed), ctx.builder.port("origin", ctx.node.name, ())


@lru_cache(maxsize=256)
def _scratch_bytes(block: Extents, dtype: torch.dtype) -> int:
    """Temporary bytes to evaluate the mask of a block: the integers of Philox, in plain PyTorch."""
    x = torch.empty(block, dtype=dtype, device="meta")
    seed = torch.zeros(1, dtype=torch.int64, device="cpu")  # explicit, as the caller may have another default device
    with measure_peak("meta") as peak:
        _RandomCall(block, 0, 0.5).drop(x, seed, (0, 0, 0), out=x)
    return peak.num_bytes


def _block_of(ctx: NodeContext, shape: tuple[int, ...]) -> tuple[Extents, int]:
    """Sizes of the largest block of a mask of ``shape``, and bytes of the buffer for a group of which the strip has a part."""
    call = _random_call_of(ctx)
    image = call.as_image(shape)
    if image[1] == call.extents[1]:
        return reference_block(image), 0
    num_pixels = math.prod(image[2:])
    groups = (max(1, image[1] // CHANNELS_PER_CALL), CHANNELS_PER_CALL, *image[2:])
    return reference_block(groups), CHANNELS_PER_CALL * num_pixels * ctx.scope.dtype_of(ctx.node.name).itemsize


def _scratch_of(ctx: NodeContext, shape: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    block, buffer_bytes = _block_of(ctx, shape)
    return buffer_bytes + _key_bytes(ctx) + _scratch_bytes(block, ctx.scope.dtype_of(ctx.node.name))


def _key_bytes(ctx: NodeContext) -> int:
    return 0 if ctx.scope.on_host else _DEVICE_KEY_BYTES


@lru_cache(maxsize=256)
def _noise_scratch_bytes(block: Extents, distribution: Distribution, dtype: torch.dtype) -> int:
    """Temporary bytes to evaluate the noise of a block."""
    out, seed = torch.empty(block, dtype=dtype, device="meta"), torch.zeros(1, dtype=torch.int64, device="cpu")
    with measure_peak("meta") as peak:
        _RandomCall(block, 0).noise(out, seed, (0, 0, 0), distribution, 1.0, 0.0)
    return peak.num_bytes


class DropoutRule(Rule):
    """Element-wise dropout: a diagonal linear map, its own adjoint."""

    in_place = True
    overwrites = True

    def forward(self, ctx: NodeContext) -> Slot:
        operand = ctx.operand_slot(ctx.node.argument("self"))
        target = ctx.destination if ctx.destination is not None else ctx.overwrite
        return self._apply(ctx, operand, target)

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        ctx.add_grad(ctx.node.argument("self"), self._apply(ctx, grad, grad if owned else None), owned=True)

    @staticmethod
    def _apply(ctx: NodeContext, value: Slot, target: Slot | None) -> Slot:
        builder = ctx.builder
        out = target if target is not None else builder.empty(value.shape, value.dtype)
        scratch_bytes = _scratch_of(ctx, value.shape)
        return builder.call(
            _random_call_of(ctx).drop, value, *_seed_and_origin(ctx), writes=out, keywords={"out": out}, scratch_bytes=scratch_bytes
        )


class RandomMaskRule(Rule):
    """A random mask of ones and zeros; no gradient passes through it."""

    in_place = True

    def forward(self, ctx: NodeContext) -> Slot:
        builder, name = ctx.builder, ctx.node.name
        shape = ctx.out_shape if name in ctx.scope.streamed else ctx.global_shape(name)
        out = ctx.destination if ctx.destination is not None else builder.empty(shape, ctx.scope.dtype_of(name))
        return builder.call(_random_call_of(ctx).mask, out, *_seed_and_origin(ctx), writes=out, scratch_bytes=_scratch_of(ctx, shape))

    def backward(self, ctx: NodeContext, grad: Slot, owned: bool) -> None:
        raise AssertionError("a mask has no gradient")


class NoiseRule(RandomMaskRule):
    """Random numbers; no gradient passes through them."""

    def forward(self, ctx: NodeContext) -> Slot:
        builder, node = ctx.builder, ctx.node
        shape = ctx.out_shape if node.name in ctx.scope.streamed else ctx.global_shape(node.name)
        dtype, distribution = ctx.scope.dtype_of(node.name), node.argument("distribution")
        out = ctx.destination if ctx.destination is not None else builder.empty(shape, dtype)
        block, buffer_bytes = _block_of(ctx, shape) if 0 not in shape else (None, 0)
        scratch_bytes = 0 if block is None else buffer_bytes + _key_bytes(ctx) + _noise_scratch_bytes(block, distribution, dtype)
        parameters = (distribution, node.argument("scale"), node.argument("shift"))
        return builder.call(_random_call_of(ctx).noise, out, *_seed_and_origin(ctx), *parameters, writes=out, scratch_bytes=scratch_bytes)
