"""Functionalization of exported programs: in-place operators become operators that return new values.

``torch.export`` returns the calls of ``forward``, in-place forms included. ``run_decompositions({})`` removes these by tracing the program
twice more, which takes 0.74 to 0.87 of the time of capturing our example models (`benchmarks/capture.py`).

Most networks write in simple ways: an activation in place on a value with no other reader, the statistics of a norm. Such programs are
*rewritten* directly, by one rule: after a write, the written name means the new value. The rule is sound while no alias of the written
memory is read after the write; aliases follow from the operators' schemas. Other programs (a view that is read after a write to its base,
inner graphs, others) are *decomposed* by the exporter, to the same graph. Under autocast, decomposition inserts casts of operands;
for rewriting they come from :mod:`sft.analysis.frontend.autocast`. Composite operators with casts inside are decomposed before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import OutputKind
from torch.fx.node import map_arg

from sft.analysis.frontend.autocast import AutocastPolicy, OperandCast, replace_tensor_operands, tensor_operands
from sft.analysis.frontend.constants.kept_tensors import KeptTensors
from sft.analysis.frontend.constants.tracking import ConstantRead
from sft.analysis.frontend.side_effect_checks import UnregisteredTensor
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import OpOverload, is_composite_op, op_schema

__all__ = ["FunctionalProgram", "functionalize", "functionalize_by_rewriting"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class FunctionalProgram:
    """A program without in-place operators.

    Attributes:
        program: the exported or decomposed program, for its signature, symbols and constants.
        nodes: placeholders and operators in order.
        outputs: values that the program returns.
        updates: buffers that are updated at the end of a call, by the name of their new value.
        unregistered: tensors that `forward` reads and that require a gradient without being parameters.
        reads: values that `forward` reads from tensors of the model.
        kept: tensors that `forward` leaves in attributes.
    """

    program: ExportedProgram
    nodes: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    updates: Mapping[str, str]
    unregistered: tuple[UnregisteredTensor, ...] = ()
    reads: tuple[ConstantRead, ...] = ()
    kept: KeptTensors | None = None


def functionalize(exported: ExportedProgram, casts: AutocastPolicy | None = None) -> FunctionalProgram:
    """Functionalize a program, by rewriting where possible and by decomposition otherwise.

    Args:
        exported: program of ``torch.export``.
        casts: casts of autocast, where it is on.

    Raises:
        UnsupportedError: the program writes to a parameter.
    """
    return functionalize_by_rewriting(exported, casts) or _functionalize_by_decomposition(exported, casts)


def _functionalize_by_decomposition(exported: ExportedProgram, casts: AutocastPolicy | None) -> FunctionalProgram:
    entered: set[OpOverload] = set()
    for node in exported.graph_module.graph.nodes:
        if (view := _view_of(node)) is not None:
            (node.target, node.args), node.kwargs = view, {}
        elif casts is not None and _may_cast_inside(node):
            inside = casts.of(node, looks_inside=True)
            if inside is None:
                entered.add(node.target)
            elif inside:
                _insert_casts(exported.graph_module.graph, node, inside)
    if entered:  # into operators of their own, which the next decomposition casts
        rules = default_decompositions()
        exported = exported.run_decompositions({target: rules[target] for target in entered if target in rules})
    program: ExportedProgram = exported.run_decompositions({})
    signature, nodes = program.graph_signature, tuple(program.graph.nodes)
    returned: Any = nodes[-1].args[0]
    written = [spec.target for spec in signature.output_specs if spec.kind.name == "PARAMETER_MUTATION"]
    if written:
        problem = (
            "`forward` writes into this parameter, as an embedding with max_norm does; its gradient would be that of the value before. "
            "Change it after the optimizer's step, under torch.no_grad"
        )
        raise UnsupportedError([f"{path}: {problem}" for path in written])
    # By position: a value may be both returned and written to a buffer or an input.
    outputs = (o for o, spec in zip(returned, signature.output_specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT)
    return FunctionalProgram(program=program, nodes=nodes[:-1], outputs=tuple(outputs), updates=dict(signature.buffers_to_mutate))


def _may_cast_inside(node: fx.Node) -> bool:
    """Return true for an operator that the exporter keeps whole, inside of which autocast may cast: a recurrent cell, ``linalg.solve``."""
    if not isinstance(node.target, OpOverload) or str(node.target) in _COMPOSITE_OPS | _COMPOSITE_VIEW_OPS | _CAST_OPS:
        return False
    return is_composite_op(node.target) and not op_schema(node.target).is_mutable


def _insert_casts(graph: fx.Graph, node: fx.Node, casts: Sequence[OperandCast]) -> None:
    """Cast operands of a node before it."""
    operands: list[Any] = list(tensor_operands(node))
    with graph.inserting_before(node):
        for index, dtype in casts:
            operands[index] = graph.call_function(aten._to_copy.default, (operands[index],), {"dtype": dtype})
    node.args, node.kwargs = replace_tensor_operands(node, operands)


def _view_of(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The view that an operator returns against its schema: the exporter takes it for a copy, which writes to the operand do not change."""
    if node.op != "call_function":
        return None
    if node.target is aten.dropout.default:
        operand, p, train = _all_arguments(node)
        return None if train and p else (aten.alias.default, (operand,))
    if node.target is aten.type_as.default:
        operand, result = tensor_operands(node)[0].meta["val"], node.meta["val"]
        is_same = operand.dtype == result.dtype and operand.device == result.device
        return (aten.alias.default, node.args[:1]) if is_same else None
    if node.target is aten.einsum.default and len(operands := tensor_operands(node)) == 1:
        source, _, target = str(node.args[0]).replace(" ", "").partition("->")
        is_permutation = source.isalpha() and len(set(source)) == len(source) and sorted(source) == sorted(target)
        return (aten.permute.default, (operands[0], [source.index(letter) for letter in target])) if is_permutation else None
    return None


def functionalize_by_rewriting(exported: ExportedProgram, casts: AutocastPolicy | None = None) -> FunctionalProgram | None:
    """Functionalize a program by rewriting; ``None`` where it needs decomposition."""
    try:
        return _InPlaceRewriter(exported, casts).finish()
    except _NeedsDecompositionError:
        return None


class _NeedsDecompositionError(Exception):
    """The program cannot be rewritten."""


#: Composite operators that are kept: they write no operand, and their result is new memory.
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

#: Composite operators whose result may alias an operand.
_COMPOSITE_VIEW_OPS = frozenset(
    {"aten.flatten.using_ints", "aten.unflatten.int"}
    | {f"aten.{name}.default" for name in ("broadcast_tensors", "chunk", "contiguous", "einsum", "reshape")}
)

#: Composite operators that compute, so autocast may know an operator inside.
_COMPUTING_COMPOSITE_OPS = _COMPOSITE_OPS | {"aten.einsum.default"}

#: Composite operators that only change the shape; a graph has no memory layout, so they become views.
_RESHAPE_OPS = frozenset(
    f"aten.{name}" for name in ("flatten.using_ints", "reshape.default", "reshape_as.default", "unflatten.int", "view_as.default")
)

_CAST_OPS = frozenset({"aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten.type_as.default"})

#: In-place operators with a functional form of the same name and arguments; they write their first operand.
_IN_PLACE_OPS = frozenset(
    {
        *("add_", "sub_", "mul_", "div_", "neg_", "exp_", "clamp_", "clamp_min_", "clamp_max_", "copy_", "detach_"),
        *("relu_", "leaky_relu_", "elu_", "silu_", "mish_", "sigmoid_", "hardsigmoid_", "hardswish_", "hardtanh_", "tanh_", "threshold_"),
    }
)


class _InPlaceRewriter:
    """Copies a program node by node, with current values in place of written names."""

    def __init__(self, exported: ExportedProgram, casts: AutocastPolicy | None) -> None:
        self._exported, self._casts = exported, casts
        self._graph = fx.Graph()
        self._current: dict[fx.Node, Any] = {}  # value of each old node, after the writes so far
        self._roots: dict[fx.Node, fx.Node] = {}  # for the result of a write, the first name of the written tensor
        self._aliases: dict[fx.Node, set[fx.Node]] = {}  # nodes that may share memory with a node, itself included
        self._position = {node: index for index, node in enumerate(exported.graph.nodes)}
        signature = exported.graph_signature
        self._buffers = dict(signature.inputs_to_buffers)
        self._updates: dict[str, fx.Node] = {}
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise _NeedsDecompositionError  # this exporter has functionalized already

    def finish(self) -> FunctionalProgram:
        *nodes, last = self._exported.graph.nodes
        for node in nodes:
            self._add(node)
        outputs = map_arg(last.args[0], self._current.__getitem__)
        return FunctionalProgram(
            program=self._exported,
            nodes=tuple(self._graph.nodes),
            outputs=tuple(outputs),
            updates={self._updates[buffer].name: buffer for buffer in self._buffers.values() if buffer in self._updates},
        )

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._current[node] = self._graph.node_copy(node)
            self._aliases[node] = {node}
            return
        if node.op != "call_function":
            raise _NeedsDecompositionError
        value: Any = node.meta.get("val")
        if not isinstance(node.target, OpOverload):
            self._keep(node)
            return
        name, schema = str(node.target), op_schema(node.target)
        if value is None and not node.users and not schema.is_mutable:
            return  # an assertion; shapes and dtypes are checked at each call
        casts = () if self._casts is None else self._casts.of(node, looks_inside=name in _COMPUTING_COMPOSITE_OPS)
        if casts is None:
            raise _NeedsDecompositionError
        if casts:
            self._cast_operands(node, casts)
        elif name in self._RULES:
            self._RULES[name](self, node)
        elif (view := _reshaping_view(node)) is not None:
            self._make(node, *view, shares=True)
        elif schema.is_mutable:
            self._write_simply(node)
        elif isinstance(value, (torch.SymInt, int)) or not is_composite_op(node.target) or name in _COMPOSITE_OPS | _COMPOSITE_VIEW_OPS:
            self._keep(node)
        else:
            raise _NeedsDecompositionError

    def _keep(self, node: fx.Node) -> None:
        target = node.target
        is_view = not isinstance(target, OpOverload) or str(target) in _COMPOSITE_VIEW_OPS
        shares = is_view or any(result.alias_info is not None for result in op_schema(target).returns)
        self._make(node, target, node.args, node.kwargs, shares=shares)

    def _cast_operands(self, node: fx.Node, casts: Sequence[OperandCast]) -> None:
        """An operator that is kept, after casts of its operands."""
        overload: Any = node.target
        if op_schema(overload).is_mutable or (is_composite_op(overload) and str(overload) not in _COMPUTING_COMPOSITE_OPS):
            raise _NeedsDecompositionError
        operands, cast = tensor_operands(node), {}
        for index, dtype in casts:
            operand = operands[index]
            value = operand.meta["val"]
            copy = cast[index] = self._create(aten._to_copy.default, (self._current[operand],), {"dtype": dtype})
            copy.meta = {**node.meta, "val": value.new_empty(value.shape, dtype=dtype)}
            self._current[copy], self._aliases[copy] = copy, {copy}
        args, kwargs = replace_tensor_operands(node, [cast.get(index, operand) for index, operand in enumerate(operands)])
        self._make(node, overload, args, kwargs, shares=str(overload) in _COMPOSITE_VIEW_OPS)

    def _dropout(self, node: fx.Node) -> None:
        operand, p, train = _all_arguments(node)
        if train and p == 1:
            raise _NeedsDecompositionError
        if train and p:
            self._make(node, aten.native_dropout.default, (operand, p, True), shares=False)
            dropout = self._current[node]
            dropout.meta["val"] = (node.meta["val"],)
            self._current[node] = self._result(dropout, 0, node)
        else:
            self._make(node, aten.clone.default, (operand,), shares=True)

    def _dropout_in_place(self, node: fx.Node) -> None:
        operand, p, train = _all_arguments(node)
        if train and p == 1:
            raise _NeedsDecompositionError
        if train and p:
            self._write(node, aten.mul.Tensor, (operand, self._scaled_mask(node)))
        else:
            self._write(node, aten.alias.default, (operand,))

    def _feature_dropout(self, node: fx.Node) -> None:
        operand, p, train = _all_arguments(node)
        if train and p == 1:
            raise _NeedsDecompositionError
        if train and p:
            self._make(node, aten.mul.Tensor, (operand, self._scaled_mask(node)), shares=False)
            return
        self._current[node] = self._current[operand]
        self._aliases[node] = self._aliases[operand]
        self._aliases[node].add(node)

    def _scaled_mask(self, node: fx.Node) -> fx.Node:
        """Ones over the probability of a dropout's elements to be kept, and zeros; of whole channels for a feature dropout."""
        operand, p, _ = _all_arguments(node)
        blank: tuple[Any, ...] = (aten.empty_like.default,)
        value = node.meta["val"]
        if "feature" in str(node.target):
            sizes = [*value.shape[:2], *(1 for _ in value.shape[2:])]
            value, blank = value.new_empty(sizes), (aten.new_empty.default, sizes)
        mask: Any = self._current[operand]
        for target, *arguments in (blank, (aten.bernoulli.p, 1 - p), (aten.div.Scalar, 1 - p)):
            mask = self._create(target, (mask, *arguments))
            mask.meta = {**node.meta, "val": value}
        self._current[mask] = mask
        return mask  # type: ignore[no-any-return]

    def _cast(self, node: fx.Node) -> None:
        operand, result = node.args[0], node.meta["val"]
        assert isinstance(operand, fx.Node)
        value = operand.meta["val"]
        if value.device != result.device:
            raise _NeedsDecompositionError
        if value.dtype == result.dtype:
            self._make(node, aten.clone.default, (operand,), shares=True)
        else:
            self._make(node, aten._to_copy.default, (operand,), {"dtype": result.dtype}, shares=False)

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
        norm = self._current[node]
        norm.meta["val"] = (node.meta["val"],)
        self._current[node] = self._result(norm, 0, node)
        if target is aten._native_batch_norm_legit_functional.default:
            for index, buffer in ((3, mean), (4, variance)):
                self._rename(buffer, self._result(norm, index, buffer), node)

    def _instance_norm(self, node: fx.Node) -> None:
        # It writes its running statistics against its schema; decomposition leaves the write out, too.
        self._make(node, node.target, node.args, node.kwargs, shares=False)

    def _bernoulli_in_place(self, node: fx.Node) -> None:
        self._write(node, aten.bernoulli.p, (node.args[0], node.args[1] if len(node.args) > 1 else 0.5))

    #: Operators with a rule of their own.
    _RULES: ClassVar[Mapping[str, Callable[[_InPlaceRewriter, fx.Node], None]]] = {
        "aten.batch_norm.default": _batch_norm,
        "aten.dropout.default": _dropout,
        "aten.feature_dropout.default": _feature_dropout,
        **dict.fromkeys(("aten.dropout_.default", "aten.feature_dropout_.default"), _dropout_in_place),
        "aten.instance_norm.default": _instance_norm,
        "aten.bernoulli_.float": _bernoulli_in_place,
        **dict.fromkeys(_CAST_OPS, _cast),
    }

    def _result(self, node: fx.Node, index: int, like: fx.Node) -> fx.Node:
        """One of several results of an operator, with the shape and dtype of ``like``."""
        result = self._create(operator.getitem, (node, index))
        result.meta = {**node.meta, "val": like.meta["val"]}
        return result

    def _write_simply(self, node: fx.Node) -> None:
        overload: Any = node.target
        packet = op_schema(overload).name.removeprefix("aten::")
        if packet not in _IN_PLACE_OPS or not _keeps_dtype(node):
            raise _NeedsDecompositionError
        self._write(node, getattr(getattr(aten, packet.removesuffix("_")), overload._overloadname), node.args, node.kwargs)

    def _write(self, node: fx.Node, pure: OpOverload, args: tuple[Any, ...], kwargs: Any = None) -> None:
        """Replace an operator that writes and returns its first operand by its functional form."""
        written = node.args[0]
        assert isinstance(written, fx.Node)
        self._make(node, pure, args, kwargs, shares=False)
        self._roots[node] = self._roots.get(written, written)
        self._aliases[node] = self._aliases[written]
        self._aliases[node].add(node)
        self._rename(written, self._current[node], node)

    def _create(self, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        # Named after the operator, as in the exporter.
        name = op_schema(target).name.removeprefix("aten::") if isinstance(target, OpOverload) else None
        return self._graph.create_node("call_function", target, args, kwargs, name=name)

    def _make(self, node: fx.Node, target: Any, args: Any, kwargs: Any = None, *, shares: bool) -> None:
        new = self._create(target, map_arg(tuple(args), self._current.__getitem__), map_arg(dict(kwargs or {}), self._current.__getitem__))
        new.meta = dict(node.meta)
        self._current[node] = new
        aliases = {node}
        if shares:
            for operand in node.all_input_nodes:
                aliases |= self._aliases[operand]
        for alias in aliases:
            self._aliases[alias] = aliases

    def _rename(self, old: fx.Node, new: fx.Node, write: fx.Node) -> None:
        """Let ``old`` mean ``new`` after ``write``."""
        root = self._roots.get(old, old)
        for alias in self._aliases[old]:
            if self._roots.get(alias, alias) is root:
                self._current[alias] = new
            elif any(self._position[user] > self._position[write] for user in alias.users):
                raise _NeedsDecompositionError
        if root.op == "placeholder":
            if root.name not in self._buffers:
                raise _NeedsDecompositionError
            self._updates[self._buffers[root.name]] = new


def _reshaping_view(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The view in place of an operator that only changes the shape; ``None`` for other operators."""
    name = str(node.target)
    if name in _RESHAPE_OPS:
        return aten.view.default, (node.args[0], node.args[1] if name == "aten.reshape.default" else list(node.meta["val"].shape))
    if name == "aten.expand_as.default":
        return aten.expand.default, (node.args[0], list(node.meta["val"].shape))
    if name in ("aten.swapaxes.default", "aten.swapdims.default"):
        return aten.transpose.int, node.args
    if name == "aten.movedim.int":
        _, source, destination = _all_arguments(node)
        return aten.permute.default, (node.args[0], _moved_order(node.meta["val"].dim(), source, destination))
    return None


def _keeps_dtype(node: fx.Node) -> bool:
    """Return true where the in-place form and the functional form have the same dtype."""
    return len({operand.meta["val"].dtype for operand in node.all_input_nodes if isinstance(operand.meta["val"], torch.Tensor)}) == 1


def _moved_order(rank: int, source: int, destination: int) -> list[int]:
    """The permutation of ``movedim`` for one dimension."""
    order = [dim for dim in range(rank) if dim != source % rank]
    order.insert(destination % rank, source % rank)
    return order


def _all_arguments(node: fx.Node) -> tuple[Any, ...]:
    assert isinstance(node.target, OpOverload)
    if len(node.args) != len(op_schema(node.target).arguments):
        raise _NeedsDecompositionError
    return node.args
