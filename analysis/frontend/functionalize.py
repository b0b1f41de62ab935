"""An exported program without writes: every operator makes a new value, and a value never changes.

``torch.export`` hands over what ``forward`` called, in-place forms included. ``ExportedProgram.run_decompositions({})`` removes them by
tracing the program twice more, which takes 0.74 to 0.87 of the time of capturing our example models (`benchmarks/capture.py`). What
networks write is simple, though: an activation in place on a value that nobody else looks at, the statistics of a norm. Such a program is
rewritten here directly, by one rule: after a write the old name means the new value. The rule is sound while no other name of the same
memory is read after the write; which names those are follows from the operators' schemas. Anything else (a view that is read after its base
was written, inner graphs, operators that this module does not know) goes the long way, and the result is the same graph.

Under autocast the long way also puts in the casts of operands. Here they come from ``sft.analysis.frontend.autocast``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.node import map_arg

from sft.analysis.frontend.autocast import AutocastPolicy, OperandCast, replace_tensor_operands, tensor_operands
from sft.analysis.frontend.module_guards import UnregisteredTensor
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import OpOverload, is_composite_op, op_schema

__all__ = ["FunctionalProgram", "functionalize", "functionalize_by_rewriting"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class FunctionalProgram:
    """A program whose operators write nothing.

    Attributes:
        program: what was exported, or decomposed: its signature, symbols and constants.
        nodes: the operators in order.
        outputs: what the program returns.
        updates: the buffer that a value is written to at the end, by the value's name.
        foreign: tensors that `forward` reads, and that require a gradient without being parameters.
    """

    program: ExportedProgram
    nodes: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    updates: Mapping[str, str]
    foreign: tuple[UnregisteredTensor, ...] = ()


def functionalize(exported: ExportedProgram, casts: AutocastPolicy | None = None) -> FunctionalProgram:
    """The program without writes.

    Args:
        exported: what ``torch.export`` made.
        casts: what autocast does, where it is on.

    Raises:
        UnsupportedError: a parameter is written into.
    """
    return functionalize_by_rewriting(exported, casts) or _functionalize_by_decomposition(exported)


def _functionalize_by_decomposition(exported: ExportedProgram) -> FunctionalProgram:
    for node in exported.graph_module.graph.nodes:
        if (view := _view_of(node)) is not None:
            (node.target, node.args), node.kwargs = view, {}
    program: ExportedProgram = exported.run_decompositions({})
    signature, nodes = program.graph_signature, tuple(program.graph.nodes)
    returned: Any = nodes[-1].args[0]
    written = [spec.target for spec in signature.output_specs if spec.kind.name == "PARAMETER_MUTATION"]
    if written:
        raise UnsupportedError(
            [
                f"{path}: `forward` writes into this parameter, as an embedding with max_norm does; its gradient would be that of the "
                "value before. Change it after the optimizer's step, under torch.no_grad"
                for path in written
            ]
        )
    # By place: what is written to a buffer, or to an input, may be returned as well.
    outputs = (o for o, spec in zip(returned, signature.output_specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT)
    return FunctionalProgram(program=program, nodes=nodes[:-1], outputs=tuple(outputs), updates=dict(signature.buffers_to_mutate))


def _view_of(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The view that an operator hands on without saying so: the exporter takes it for a copy, which writes do not reach."""
    if node.op != "call_function":
        return None
    if node.target is aten.dropout.default:
        operand, p, train = _all_arguments(node)
        return None if train and p else (aten.alias.default, (operand,))
    if node.target is aten.type_as.default:
        given, made = tensor_operands(node)[0].meta["val"], node.meta["val"]
        return (aten.alias.default, node.args[:1]) if given.dtype == made.dtype and given.device == made.device else None
    if node.target is aten.einsum.default and len(operands := tensor_operands(node)) == 1:
        before, _, after = str(node.args[0]).replace(" ", "").partition("->")
        is_permutation = before.isalpha() and len(set(before)) == len(before) and sorted(before) == sorted(after)
        return (aten.permute.default, (operands[0], [before.index(letter) for letter in after])) if is_permutation else None
    return None


def functionalize_by_rewriting(exported: ExportedProgram, casts: AutocastPolicy | None = None) -> FunctionalProgram | None:
    """The program without writes where the rule above holds, and ``None`` elsewhere."""
    try:
        return _InPlaceRewriter(exported, casts).finish()
    except _NeedsDecompositionError:
        return None


class _NeedsDecompositionError(Exception):
    """The program goes the long way."""


#: Operators made of others that stay as they are: they write nothing, and their result is memory of its own.
_COMPOSITE_OPS = frozenset(
    f"aten.{name}"
    for name in (
        *("adaptive_avg_pool1d.default", "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default", "avg_pool1d.default"),
        *("max_pool1d.default", "max_pool2d.default", "max_pool3d.default"),
        *("conv1d.default", "conv1d.padding", "conv2d.default", "conv2d.padding", "conv3d.default", "conv3d.padding"),
        *("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"),
        *("group_norm.default", "layer_norm.default", "rms_norm.default"),
        *("linear.default", "matmul.default", "softmax.int", "log_softmax.int", "selu.default", "square.default"),
        *("pad.default", "var.dim", "var_mean.dim", "std.dim", "std_mean.dim", "cosine_similarity.default"),
        *("prelu.default", "relu6.default", "log_sigmoid.default", "scaled_dot_product_attention.default"),
        *("cross_entropy_loss.default", "grid_sampler.default", "kl_div.default", "l1_loss.default", "nll_loss_nd.default"),
        *("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec"),
        *("_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec", "_upsample_nearest_exact3d.vec"),
        *("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec", "upsample_bicubic2d.vec"),
        *("_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.vec"),
    )
)

#: Operators made of others whose result may be memory of their operand.
_COMPOSITE_VIEW_OPS = frozenset(
    f"aten.{name}"
    for name in (
        *("broadcast_tensors.default", "chunk.default", "contiguous.default", "einsum.default"),
        *("flatten.using_ints", "reshape.default", "unflatten.int"),
    )
)

#: Operators made of others that do more than look at memory in another way.
_COMPUTING_COMPOSITE_OPS = _COMPOSITE_OPS | {"aten.einsum.default"}

#: What of them is a change of shape; a graph knows no memory, so that no copy is needed.
_RESHAPE_OPS = frozenset(
    f"aten.{name}" for name in ("flatten.using_ints", "reshape.default", "reshape_as.default", "unflatten.int", "view_as.default")
)

_CAST_OPS = frozenset({"aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten.type_as.default"})

#: Operators that write their first operand and have a form that does not, of the same name and arguments.
_IN_PLACE_OPS = frozenset(
    {
        *("add_", "sub_", "mul_", "div_", "neg_", "exp_", "clamp_", "clamp_min_", "clamp_max_", "copy_", "detach_"),
        *("relu_", "leaky_relu_", "elu_", "silu_", "mish_", "sigmoid_", "hardsigmoid_", "hardswish_", "hardtanh_", "tanh_", "threshold_"),
    }
)


class _InPlaceRewriter:
    def __init__(self, exported: ExportedProgram, casts: AutocastPolicy | None) -> None:
        self._exported, self._casts = exported, casts
        self._graph = fx.Graph()
        self._now: dict[fx.Node, Any] = {}  # what the old node means, after the writes so far
        self._named: dict[fx.Node, fx.Node] = {}  # of a node that returns what it wrote, whose other name it is
        self._memory: dict[fx.Node, set[fx.Node]] = {}  # all nodes that may share memory with this one
        self._position = {node: index for index, node in enumerate(exported.graph.nodes)}
        signature = exported.graph_signature
        self._buffers = dict(signature.inputs_to_buffers)
        self._updates: dict[str, fx.Node] = {}
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise _NeedsDecompositionError  # an exporter that has rewritten the writes already

    def finish(self) -> FunctionalProgram:
        *nodes, last = self._exported.graph.nodes
        for node in nodes:
            self._add(node)
        outputs = map_arg(last.args[0], self._now.__getitem__)
        return FunctionalProgram(
            program=self._exported,
            nodes=tuple(self._graph.nodes),
            outputs=tuple(outputs),
            updates={self._updates[buffer].name: buffer for buffer in self._buffers.values() if buffer in self._updates},
        )

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._now[node] = self._graph.node_copy(node)
            self._memory[node] = {node}
            return
        if node.op != "call_function":
            raise _NeedsDecompositionError
        value: Any = node.meta.get("val")
        if not isinstance(node.target, OpOverload):
            self._keep(node)
            return
        name, schema = str(node.target), op_schema(node.target)
        if value is None and not node.users and not schema.is_mutable:
            return  # an assertion; a graph's shapes and dtypes are checked at each call
        casts = () if self._casts is None else self._casts.of(node, looks_inside=name in _COMPUTING_COMPOSITE_OPS)
        if casts is None:
            raise _NeedsDecompositionError
        if casts:
            self._cast_operands(node, casts)
        elif name == "aten.batch_norm.default":
            self._batch_norm(node)
        elif name == "aten.dropout.default":
            self._dropout(node)
        elif name == "aten.dropout_.default":
            self._dropout_in_place(node)
        elif name == "aten.feature_dropout.default":
            self._feature_dropout(node)
        elif name == "aten.instance_norm.default":
            # It writes its running statistics, its schema does not say so, and the long way does not either.
            self._make(node, node.target, node.args, node.kwargs, shares=False)
        elif name == "aten.bernoulli_.float":
            self._write(node, aten.bernoulli.p, (node.args[0], node.args[1] if len(node.args) > 1 else 0.5))
        elif name in _CAST_OPS:
            self._cast(node)
        elif name in _RESHAPE_OPS:
            sizes = node.args[1] if name == "aten.reshape.default" else list(value.shape)
            self._make(node, aten.view.default, (node.args[0], sizes), shares=True)
        elif name == "aten.expand_as.default":
            self._make(node, aten.expand.default, (node.args[0], list(value.shape)), shares=True)
        elif name in ("aten.swapaxes.default", "aten.swapdims.default"):
            self._make(node, aten.transpose.int, node.args, shares=True)
        elif name == "aten.movedim.int":
            _, source, destination = _all_arguments(node)
            self._make(node, aten.permute.default, (node.args[0], _moved_order(value.dim(), source, destination)), shares=True)
        elif schema.is_mutable:
            self._write_simply(node)
        elif (
            not isinstance(value, (torch.SymInt, int)) and is_composite_op(node.target) and name not in _COMPOSITE_OPS | _COMPOSITE_VIEW_OPS
        ):
            raise _NeedsDecompositionError
        else:
            self._keep(node)

    # -- operators --------------------------------------------------------------------------------------------------

    def _keep(self, node: fx.Node) -> None:
        shares = True
        if isinstance(node.target, OpOverload):
            shares = str(node.target) in _COMPOSITE_VIEW_OPS or any(
                result.alias_info is not None for result in op_schema(node.target).returns
            )
        self._make(node, node.target, node.args, node.kwargs, shares=shares)

    def _cast_operands(self, node: fx.Node, casts: Sequence[OperandCast]) -> None:
        """An operator that stays as it is, behind the casts of what it reads."""
        overload: Any = node.target
        if op_schema(overload).is_mutable or (is_composite_op(overload) and str(overload) not in _COMPUTING_COMPOSITE_OPS):
            raise _NeedsDecompositionError
        operands, cast = tensor_operands(node), {}
        for place, dtype in casts:
            operand = operands[place]
            given = operand.meta["val"]
            made = cast[place] = self._create(aten._to_copy.default, (self._now[operand],), {"dtype": dtype})
            made.meta = {**node.meta, "val": given.new_empty(given.shape, dtype=dtype)}
            self._now[made], self._memory[made] = made, {made}
        args, kwargs = replace_tensor_operands(node, [cast.get(place, operand) for place, operand in enumerate(operands)])
        self._make(node, overload, args, kwargs, shares=str(overload) in _COMPOSITE_VIEW_OPS)

    def _dropout(self, node: fx.Node) -> None:
        operand, p, train = _all_arguments(node)
        if train and p == 1:
            raise _NeedsDecompositionError
        if train and p:
            self._make(node, aten.native_dropout.default, (operand, p, True), shares=False)
            made = self._now[node]
            made.meta["val"] = (node.meta["val"],)
            self._now[node] = self._result(made, 0, node)
        else:
            self._make(node, aten.clone.default, (operand,), shares=True)

    def _dropout_in_place(self, node: fx.Node) -> None:
        operand, p, train = _all_arguments(node)
        if train and not 0 < p < 1:
            raise _NeedsDecompositionError
        if not train:
            self._write(node, aten.alias.default, (operand,))
            return
        mask: Any = self._now[operand]
        for target, *arguments in ((aten.empty_like.default,), (aten.bernoulli.p, 1 - p), (aten.div.Scalar, 1 - p)):
            mask = self._create(target, (mask, *arguments))
            mask.meta = dict(node.meta)
        self._now[mask] = mask
        self._write(node, aten.mul.Tensor, (operand, mask))

    def _feature_dropout(self, node: fx.Node) -> None:
        operand, p, train = _all_arguments(node)
        if train and p == 1:
            raise _NeedsDecompositionError
        if not train or not p:
            self._now[node] = self._now[operand]
            self._memory[node] = self._memory[operand]
            self._memory[node].add(node)
            return
        value = node.meta["val"]
        sizes = [*value.shape[:2], *(1 for _ in value.shape[2:])]
        mask: Any = self._now[operand]
        for target, *arguments in ((aten.new_empty.default, sizes), (aten.bernoulli.p, 1 - p), (aten.div.Scalar, 1 - p)):
            mask = self._create(target, (mask, *arguments))
            mask.meta = {**node.meta, "val": value.new_empty(sizes)}
        self._now[mask] = mask
        self._make(node, aten.mul.Tensor, (operand, mask), shares=False)

    def _cast(self, node: fx.Node) -> None:
        operand, made = node.args[0], node.meta["val"]
        assert isinstance(operand, fx.Node)
        given = operand.meta["val"]
        if given.device != made.device:
            raise _NeedsDecompositionError
        if given.dtype == made.dtype:
            self._make(node, aten.clone.default, (operand,), shares=True)
        else:
            self._make(node, aten._to_copy.default, (operand,), {"dtype": made.dtype}, shares=False)

    def _batch_norm(self, node: fx.Node) -> None:
        operand, weight, bias, mean, variance, train, momentum, eps, _ = _all_arguments(node)
        if train and isinstance(mean, fx.Node) and isinstance(variance, fx.Node):
            target = aten._native_batch_norm_legit_functional.default
            args: tuple[Any, ...] = (operand, weight, bias, mean, variance, True, momentum, eps)
        elif train:
            target, args = aten._native_batch_norm_legit.no_stats, (operand, weight, bias, True, momentum, eps)
        else:
            target, args = aten._native_batch_norm_legit_no_training.default, (operand, weight, bias, mean, variance, momentum, eps)
        self._make(node, target, args, shares=False)
        made = self._now[node]
        made.meta["val"] = (node.meta["val"],)
        self._now[node] = self._result(made, 0, node)
        if target is aten._native_batch_norm_legit_functional.default:
            for index, buffer in ((3, mean), (4, variance)):
                self._rename(buffer, self._result(made, index, buffer), node)

    def _result(self, made: fx.Node, index: int, like: fx.Node) -> fx.Node:
        """One of several results, which looks as ``like`` does."""
        result = self._create(operator.getitem, (made, index))
        result.meta = {**made.meta, "val": like.meta["val"]}
        return result

    def _write_simply(self, node: fx.Node) -> None:
        overload: Any = node.target
        packet = op_schema(overload).name.removeprefix("aten::")
        if packet not in _IN_PLACE_OPS or not _keeps_dtype(node):
            raise _NeedsDecompositionError
        self._write(node, getattr(getattr(aten, packet.removesuffix("_")), overload._overloadname), node.args, node.kwargs)

    def _write(self, node: fx.Node, pure: OpOverload, args: tuple[Any, ...], kwargs: Any = None) -> None:
        """An operator that writes its first operand and returns it, as one that does not."""
        written = node.args[0]
        assert isinstance(written, fx.Node)
        self._make(node, pure, args, kwargs, shares=False)
        self._named[node] = self._named.get(written, written)
        self._memory[node] = self._memory[written]
        self._memory[node].add(node)
        self._rename(written, self._now[node], node)

    def _create(self, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        # Named after the operator, as the exporter does.
        name = op_schema(target).name.removeprefix("aten::") if isinstance(target, OpOverload) else None
        return self._graph.create_node("call_function", target, args, kwargs, name=name)

    # -- names ------------------------------------------------------------------------------------------------------

    def _make(self, node: fx.Node, target: Any, args: Any, kwargs: Any = None, *, shares: bool) -> None:
        made = self._create(target, map_arg(tuple(args), self._now.__getitem__), map_arg(dict(kwargs or {}), self._now.__getitem__))
        made.meta = dict(node.meta)
        self._now[node] = made
        memory = {node}
        if shares:
            for operand in node.all_input_nodes:
                memory |= self._memory[operand]
        for other in memory:
            self._memory[other] = memory

    def _rename(self, old: fx.Node, new: fx.Node, write: fx.Node) -> None:
        """From ``write`` on, ``old`` means ``new``."""
        root = self._named.get(old, old)
        for other in self._memory[old]:
            if self._named.get(other, other) is root:
                self._now[other] = new
            elif any(self._position[user] > self._position[write] for user in other.users):
                raise _NeedsDecompositionError
        if root.op == "placeholder":
            if root.name not in self._buffers:
                raise _NeedsDecompositionError
            self._updates[self._buffers[root.name]] = new


def _keeps_dtype(node: fx.Node) -> bool:
    """Whether writing in place and making a new value give the same type."""
    dtypes = {operand.meta["val"].dtype for operand in node.all_input_nodes if isinstance(operand.meta["val"], torch.Tensor)}
    return len(dtypes) == 1


def _moved_order(rank: int, source: int, destination: int) -> list[int]:
    """The order of dimensions in which one has moved."""
    order = [dim for dim in range(rank) if dim != source % rank]
    order.insert(destination % rank, source % rank)
    return order


def _all_arguments(node: fx.Node) -> tuple[Any, ...]:
    assert isinstance(node.target, OpOverload)
    if len(node.args) != len(op_schema(node.target).arguments):
        raise _NeedsDecompositionError
    return node.args
