"""Weights and biases that frozen norms are folded into, of all norms of an untiled segment at once.

:mod:`sft.analysis.passes.fold_norms` has two operators for each norm. Each would be about ten calls on a few numbers, and a launch takes
microseconds on a GPU. Vectors of all norms are concatenated instead, so that a norm takes one launch, that of its weight:

.. code-block:: text

    var, gamma, mean, beta = cat(vectors of all norms)         inverse = rsqrt(var + eps)         scale = inverse * gamma
    W' = W * scale, for each norm                              shift = beta - mean * scale        c', ... = shift

The derivative is written out, with gradients ``dW'`` and ``dc'`` of the folded weights and biases (Jacob et al. 2018, section 3.2)::

    dW = dW' * scale      dbeta = dc'      dc = dc' * scale      dgamma = (sum(dW' * W) + dc' * (c - mean)) * inverse

All numbers of half precision are widened to fp32, and results are rounded once. Norms of different settings are in different groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from sft.analysis.ir.graph import Node, Ref
from sft.analysis.passes.fold_norms import name_of_bias
from sft.common.torch_internals import copy_tensors
from sft.lower.builder import ProgramBuilder
from sft.lower.context import SegmentInfo, accumulation_dtype
from sft.lower.program import DEVICE, Slot

__all__ = ["FoldedNorm", "FoldedNorms", "find_folded_norms"]

aten = torch.ops.aten

#: Operands of a folded norm that are vectors of its channels.
_VECTORS = ("running_var", "running_mean", "norm_weight", "norm_bias", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedNorm:
    """A frozen norm that is folded into a convolution.

    Attributes:
        weight: operator of the folded weight.
        bias: operator of the folded bias.
    """

    weight: Node
    bias: Node

    @property
    def operands(self) -> dict[str, str]:
        """Names of the operands that exist: ``weight`` and ``bias`` of the convolution, and those of the norm."""
        values = {
            "weight": self.weight.argument("self"),
            "bias": self.bias.argument("self"),
            "norm_weight": self.weight.argument("norm_weight"),
            **{key: self.bias.argument(key) for key in ("norm_bias", "running_mean", "running_var")},
        }
        return {key: value.name for key, value in values.items() if type(value) is Ref}


def find_folded_norms(scope: SegmentInfo) -> tuple[FoldedNorms, ...]:
    """Groups of folded norms of which all operands are from outside of the segment."""
    inside, groups = frozenset(scope.names), dict[tuple[Any, ...], list[FoldedNorm]]()
    for name in scope.names:
        node = scope.graph[name]
        if node.target == "sft.folded_weight" and name_of_bias(node) in inside:
            norm = FoldedNorm(weight=node, bias=scope.graph[name_of_bias(node)])
            if _is_fixed(scope, norm, inside):
                groups.setdefault(_settings(scope, norm), []).append(norm)
    return tuple(FoldedNorms(scope=scope, norms=tuple(norms)) for norms in groups.values())


def _is_fixed(scope: SegmentInfo, norm: FoldedNorm, inside: frozenset[str]) -> bool:
    """True if all operands are global values from outside, of one type after widening; statistics have no gradient."""
    operands = norm.operands
    if not inside.union(scope.streamed, scope.per_sample, scope.strided).isdisjoint(operands.values()):
        return False
    if any(operands[key] in scope.requires_grad for key in ("running_mean", "running_var")):
        return False
    return len({accumulation_dtype(scope.dtype_of(name)) for name in operands.values()}) == 1


def _settings(scope: SegmentInfo, norm: FoldedNorm) -> tuple[Any, ...]:
    """Properties that all norms of a group share."""
    operands = ((key, scope.dtype_of(name), name in scope.requires_grad) for key, name in norm.operands.items())
    return norm.weight.argument("eps"), scope.dtype_of(norm.weight.name), *operands


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedNorms:
    """Folded norms of equal settings, which are computed together.

    Attributes:
        scope: the segment.
        norms: the norms.
    """

    scope: SegmentInfo
    norms: tuple[FoldedNorm, ...]
    _saved: dict[str, Slot] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """All operators."""
        return tuple(node.name for norm in self.norms for node in (norm.weight, norm.bias))

    def forward(self, builder: ProgramBuilder, slot_of: Callable[[str], Slot]) -> dict[str, Slot]:
        """Emit the folded weights and biases; returns them by name.

        Args:
            builder: takes the calls.
            slot_of: slot of a global value.
        """
        flat, total = self._flat_vectors(builder, slot_of), sum(self._channels)

        def vector(function: Any, *arguments: Any) -> Slot:
            return builder.call(function, *arguments, shape=(total,), dtype=self._wide)

        inverse = vector(aten.rsqrt.default, vector(aten.add.Tensor, flat["running_var"], self.norms[0].weight.argument("eps")))
        scale = vector(aten.mul.Tensor, inverse, flat["norm_weight"]) if "norm_weight" in flat else inverse
        mean = flat["running_mean"]
        centered = vector(aten.sub.Tensor, flat["bias"], mean) if "bias" in flat else mean
        shift = vector(aten.mul.Tensor, centered, scale)
        if "bias" in flat:
            shift = vector(aten.add.Tensor, shift, flat["norm_bias"]) if "norm_bias" in flat else shift
        else:
            shift = vector(aten.sub.Tensor, flat["norm_bias"], shift) if "norm_bias" in flat else vector(aten.neg.default, shift)
        self._saved.update(inverse=inverse, scale=scale, centered=centered)
        results: dict[str, Slot] = {}
        for norm, factor in zip(self.norms, self._split(builder, scale), strict=True):
            weight = slot_of(norm.operands["weight"])
            target = self._target(builder, norm.weight.name, weight)
            results[norm.weight.name] = self._scale(builder, weight, factor, target)
        biases = {norm.bias.name: self._target(builder, norm.bias.name, slot_of(norm.operands["running_mean"])) for norm in self.norms}
        _copy(builder, tuple(biases.values()), self._split(builder, shift))
        return results | biases

    def backward(
        self, builder: ProgramBuilder, slot_of: Callable[[str], Slot], gradients: Mapping[str, Slot], emit: Callable[[str, Slot], None]
    ) -> None:
        """Emit the gradients of the operands.

        Args:
            builder: takes the calls.
            slot_of: slot of a global value.
            gradients: gradients of the folded weights and biases, by name.
            emit: takes the gradient of an operand: a new tensor in its layout, and in the type in which its gradient is accumulated.
        """
        total, needed = sum(self._channels), [key for key in self.norms[0].operands if self._needs(key)]
        sums = builder.call(torch.empty, (total,), shape=(total,), dtype=self._wide, keywords={"dtype": self._wide, "device": DEVICE})
        factors, rows = self._split(builder, self._saved["scale"]), self._split(builder, sums)
        for norm, factor, row in zip(self.norms, factors, rows, strict=True):
            grad, weight = gradients.get(norm.weight.name), slot_of(norm.operands["weight"])
            if grad is None:
                grad = builder.zeros(weight.shape, self._wide)
            if "norm_weight" in needed:
                self._sum_products(builder, grad, weight, row)
            if "weight" in needed:
                target = self._like(builder, weight, self.scope.grad_dtype(norm.operands["weight"]))
                emit(norm.operands["weight"], self._scale(builder, grad, factor, target))
        vectors = self._vector_gradients(builder, gradients, sums, [key for key in needed if key != "weight"])
        pairs = []
        for key, value in vectors.items():
            for norm, piece in zip(self.norms, self._split(builder, value), strict=True):
                name = norm.operands[key]
                pairs.append((name, self._like(builder, slot_of(name), self.scope.grad_dtype(name)), piece))
        if pairs:
            _copy(builder, tuple(target for _, target, _ in pairs), tuple(piece for *_, piece in pairs))
        for name, target, _ in pairs:
            emit(name, target)

    def _vector_gradients(
        self, builder: ProgramBuilder, gradients: Mapping[str, Slot], sums: Slot, needed: Sequence[str]
    ) -> dict[str, Slot]:
        """Gradients of the vectors of all norms, from sums of products of weights and their gradients."""
        if not needed:
            return {}
        pieces = [gradients.get(norm.bias.name) for norm in self.norms]
        filled = [
            builder.zeros((count,), self._wide) if piece is None else piece for piece, count in zip(pieces, self._channels, strict=True)
        ]
        if len({piece.dtype for piece in filled}) > 1:
            filled = [builder.cast(piece, self._wide) for piece in filled]
        grad = builder.cast(_concatenate(builder, filled), self._wide)

        def vector(function: Any, *arguments: Any, **keywords: Any) -> Slot:
            return builder.call(function, *arguments, shape=grad.shape, dtype=self._wide, keywords=keywords)

        values: dict[str, Slot] = {}
        if "norm_weight" in needed:
            sign = 1 if "bias" in self.norms[0].operands else -1  # without a bias the centered one is minus the mean
            by_scale = vector(aten.addcmul.default, sums, grad, self._saved["centered"], value=sign)
            values["norm_weight"] = vector(aten.mul.Tensor, by_scale, self._saved["inverse"])
        if "norm_bias" in needed:
            values["norm_bias"] = grad
        if "bias" in needed:
            values["bias"] = vector(aten.mul.Tensor, grad, self._saved["scale"])
        return values

    @property
    def _wide(self) -> torch.dtype:
        """Element type of the computation."""
        return accumulation_dtype(self.scope.dtype_of(self.norms[0].operands["running_var"]))

    @property
    def _channels(self) -> list[int]:
        """Number of channels of each norm."""
        return [self.scope.global_shape(norm.operands["running_var"])[0] for norm in self.norms]

    def _needs(self, key: str) -> bool:
        return self.norms[0].operands[key] in self.scope.requires_grad

    def _flat_vectors(self, builder: ProgramBuilder, slot_of: Callable[[str], Slot]) -> dict[str, Slot]:
        """For each vector operand the one of all norms; those of one element type are concatenated and widened together."""
        total, by_dtype, flat = sum(self._channels), dict[torch.dtype, list[str]](), dict[str, Slot]()
        for key in _VECTORS:
            if key in self.norms[0].operands:
                by_dtype.setdefault(self.scope.dtype_of(self.norms[0].operands[key]), []).append(key)
        for keys in by_dtype.values():
            joined = _concatenate(builder, [slot_of(norm.operands[key]) for key in keys for norm in self.norms])
            joined = builder.cast(joined, self._wide)
            flat |= {key: builder.narrow(joined, 0, number * total, total) for number, key in enumerate(keys)}
        return flat

    def _split(self, builder: ProgramBuilder, flat: Slot) -> tuple[Slot, ...]:
        """The vector of each norm."""
        starts = accumulate(self._channels, initial=0)
        return tuple(builder.narrow(flat, 0, start, count) for start, count in zip(starts, self._channels, strict=False))

    def _target(self, builder: ProgramBuilder, name: str, like: Slot) -> Slot:
        """Storage for a result: the output of the segment, or a new tensor if operators of the segment read it."""
        dtype = self.scope.dtype_of(name)
        if name in self.scope.outputs and frozenset(self.scope.names).isdisjoint(self.scope.graph.users[name]):
            return builder.port("out", name, like.shape, dtype)
        return self._like(builder, like, dtype)

    @staticmethod
    def _like(builder: ProgramBuilder, slot: Slot, dtype: torch.dtype) -> Slot:
        """A new tensor with the layout of another one."""
        return builder.call(torch.empty_like, slot, shape=slot.shape, dtype=dtype, keywords={"dtype": dtype})

    def _scale(self, builder: ProgramBuilder, value: Slot, factor: Slot, target: Slot) -> Slot:
        """Write a weight, or its gradient, times a factor of each channel into ``target``; rounded once."""
        shape = (factor.shape[0], *[1] * (len(value.shape) - 1))
        factor = builder.call(aten.view.default, factor, shape, shape=shape, view_of=factor)
        scratch_bytes = self._cast_bytes(value, target)
        return builder.call(aten.mul.out, value, factor, keywords={"out": target}, writes=target, scratch_bytes=scratch_bytes)

    def _sum_products(self, builder: ProgramBuilder, grad: Slot, weight: Slot, row: Slot) -> None:
        """Write the sum over each channel of a weight times its gradient."""
        grad = builder.cast(grad, self._wide)
        scratch_bytes = self._cast_bytes(weight)
        product = builder.call(aten.mul.Tensor, grad, weight, shape=grad.shape, dtype=self._wide, scratch_bytes=scratch_bytes)
        dims = tuple(range(1, len(weight.shape)))
        builder.call(aten.sum.IntList_out, product, dims, False, keywords={"out": row}, writes=row)

    def _cast_bytes(self, *slots: Slot) -> int:
        """Bytes of widened copies that an operator makes on a CPU; a GPU's kernels widen each element."""
        elements = sum(slot.num_bytes // slot.dtype.itemsize for slot in slots if slot.dtype != self._wide)
        return elements * self._wide.itemsize if self.scope.on_host else 0


def _concatenate(builder: ProgramBuilder, slots: Sequence[Slot]) -> Slot:
    """Vectors one after the other; a single one is not copied."""
    if len(slots) == 1:
        return slots[0]
    return builder.call(aten.cat.default, tuple(slots), shape=(sum(slot.shape[0] for slot in slots),), dtype=slots[0].dtype)


def _copy(builder: ProgramBuilder, targets: tuple[Slot, ...], sources: tuple[Slot, ...]) -> None:
    """Copy vectors in one launch, in which they are rounded."""
    builder.call_measured(copy_tensors, (targets, sources), (), writes=targets, peak_bytes=0, flops=0)
