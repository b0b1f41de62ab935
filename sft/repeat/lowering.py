"""A traced block as flat programs: what runs when it runs for the first time, again, and backwards.

Five programs come from one trace, by leaving out what nobody wants and by cutting between forward and backward:

- ``first``, ``first_save``: the output and the buffers' next values; the latter also leaves what ``backward`` reads.
- ``again``, ``again_save``: the same without the buffers' next values. A recomputation runs these, so each buffer changes once a step.
- ``backward``, and ``backward_last`` for a block whose input wants no gradient.

Views of the input and of parameters are made again in the backward program instead of being saved: weights may have left the device in
between. Random masks are functions of a seed, the call's place in the block (*site*), the block's number (*draw*) and the position of the
element, so a recomputation has the same bits whatever it does in which order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sft.common.errors import InternalError, UnsupportedError
from sft.common.memory import measure_peak
from sft.common.torch_internals import op_schema, storage_id
from sft.kernels.rng.dropout import write_mask
from sft.kernels.rng.mask_tile import MaskTile
from sft.lower.builder import ProgramBuilder
from sft.lower.program import Instruction, Port, Program, Slot
from sft.repeat.trace import BlockTrace

__all__ = ["DRAW", "GRAD_INPUT", "GRAD_OUTPUT", "INPUT", "OUTPUT", "BlockPrograms", "lower_block"]

aten = torch.ops.aten

INPUT = Port("source", "x")
OUTPUT = Port("out", "x")
GRAD_OUTPUT = Port("grad_out", "x")
GRAD_INPUT = Port("grad_source", "x")
#: Bound to (seed, block number).
DRAW = Port("origin", "draw")

#: Norms that change running statistics in place: where these stand among the arguments, and where it says that they do.
_UPDATING = {aten.native_batch_norm.default: (3, 4, 5), aten.cudnn_batch_norm.default: (3, 4, 5)}
#: Their derivatives, which read none in training: where they stand, and where it says so (None: only training comes here).
_UPDATING_BACKWARD: dict[Any, tuple[int, int, int | None]] = {
    aten.native_batch_norm_backward.default: (3, 4, 7),
    aten.cudnn_batch_norm_backward.default: (3, 4, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrograms:
    """The programs of a block.

    Attributes:
        first: forward, for the first time.
        first_save: the same, leaving what ``backward`` reads.
        again: forward, recomputed.
        again_save: the same, leaving what ``backward`` reads.
        backward: the gradients of the input and of the parameters.
        backward_last: the gradients of the parameters.
        constants: tensors that the block made of Python values.
        output_bytes: of the output's storage.
        grad_bytes: of the input's gradient's.
        saved_bytes: what ``first_save`` leaves besides the output.
        reads_output: whether ``backward`` reads the output.
        param_grad_bytes: of the parameters' gradients.
        updated: the buffers that change.
        with_gradient: the parameters that get one.
        is_random: whether there are random masks.
    """

    first: Program
    first_save: Program
    again: Program
    again_save: Program
    backward: Program
    backward_last: Program
    constants: dict[Port, Tensor]
    output_bytes: int
    grad_bytes: int
    saved_bytes: int
    reads_output: bool
    param_grad_bytes: int
    updated: tuple[str, ...]
    with_gradient: tuple[str, ...]
    is_random: bool


def lower_block(trace: BlockTrace) -> BlockPrograms:
    """Make the programs.

    Raises:
        UnsupportedError: a random operator that follows no position, or a buffer that is changed and that the output depends on.
    """
    first = _BlockLowering(trace, again=False).forward_only()
    first_save, _ = _BlockLowering(trace, again=False).both(input_grad=True)
    lowering = _BlockLowering(trace, again=True)
    again_save, backward = lowering.both(input_grad=True)
    again = _BlockLowering(trace, again=True).forward_only()
    _, backward_last = _BlockLowering(trace, again=True).both(input_grad=False)
    if first_save.residuals != again_save.residuals:
        raise InternalError("a recomputed block leaves something else for its backward pass than the block left")
    updated = lowering.updated
    stateful = [name for name in updated for program in (again_save, backward) if Port("side", name) in program.ports]
    if stateful:
        raise UnsupportedError(
            [f"buffer {name} of the repeated block: it is changed, and the output depends on it; keep it fixed" for name in {*stateful}]
        )
    sizes = {out.number: out.num_bytes for i in first_save.instructions for out in i.outputs if out is not None}
    roots = {out.number: out.root for i in first_save.instructions for out in i.outputs if out is not None}
    kept = {roots[number] for number in first_save.residuals}
    output_root = first_save.results[OUTPUT].root
    grads = {port: size for port, size in backward.result_bytes.items() if port.role == "grad_side"}
    return BlockPrograms(
        first=first,
        first_save=first_save,
        again=again,
        again_save=again_save,
        backward=backward,
        backward_last=backward_last,
        constants=lowering.constants,
        output_bytes=first_save.result_bytes[OUTPUT],
        grad_bytes=backward.result_bytes[GRAD_INPUT],
        saved_bytes=sum(sizes[root] for root in kept if root != output_root),
        reads_output=output_root in kept,
        param_grad_bytes=sum(grads.values()),
        updated=tuple(updated),
        with_gradient=tuple(port.name for port in grads),
        is_random=any(DRAW in program.ports for program in (first, again_save, backward)),
    )


class _BlockLowering:
    """One emission of a trace."""

    def __init__(self, trace: BlockTrace, *, again: bool) -> None:
        self.trace, self.again = trace, again
        self.nodes = list(trace.graph.graph.nodes)
        self.emitter = ProgramBuilder(dtype=self.nodes[0].meta["val"].dtype)
        self.constants: dict[Port, Tensor] = {}
        self._slots: dict[Node, Slot] = {}
        self._behind: dict[Node, Slot] = {}  # views of ports, made again for the backward pass
        self._num_sites = 0
        self._sites: dict[Node, int] = {}
        *inputs, gradient = [node for node in self.nodes if node.op == "placeholder"]
        first = 1 + len(trace.params)
        ports = [INPUT, *(Port("side", name) for name in (*trace.params, *trace.buffers)), GRAD_OUTPUT]
        for node, port in zip((*inputs, gradient), ports, strict=True):
            self._slots[node] = self._port(port, node.meta["val"])
        self._buffers = dict(zip(inputs[first:], trace.buffers, strict=True))
        self._from_grad = self._depending_on(gradient)
        self._outputs = next(node for node in self.nodes if node.op == "output").args[0]
        self._written = self._statistics()

    @property
    def updated(self) -> list[str]:
        """The buffers whose next value is another one."""
        found = []
        for (buffer, name), value in zip(self._buffers.items(), self._updates(), strict=True):
            is_clone = value.target is aten.clone.default and self._plain(value.args[0]) is buffer
            if not is_clone or value in self._written:
                found.append(name)
        return found

    def forward_only(self) -> Program:
        """The forward program."""
        self._forward()
        return self.emitter.finish()

    def both(self, *, input_grad: bool) -> tuple[Program, Program]:
        """The forward program that leaves what the backward program reads, and that one."""
        self._forward()
        turn = len(self.emitter.instructions)
        for node in self.nodes:
            if node in self._from_grad:
                self._emit(node)
        first = 1 + len(self._buffers)
        ports = [GRAD_INPUT, *(Port("grad_side", name) for name in self.trace.params)]
        for port, value in zip(ports, self._outputs[first:], strict=True):
            if value is not None and (input_grad or port != GRAD_INPUT):
                self._result(port, value)
        return self.emitter.split(turn)

    def _forward(self) -> None:
        for node in self.nodes:
            if node.op == "get_attr":
                value = getattr(self.trace.graph, str(node.target))
                port = Port("constant", str(node.target))
                self.constants[port] = value
                self._slots[node] = self._port(port, value)
            elif node.op == "call_function" and node not in self._from_grad:
                self._emit(node)
        self._result(OUTPUT, self._outputs[0])
        if not self.again:
            names = set(self.updated)
            for name, value in zip(self._buffers.values(), self._updates(), strict=True):
                if name in names:
                    self._result(Port("update", name), value)

    def _updates(self) -> list[Node]:
        return [self._plain(value) for value in self._outputs[1 : 1 + len(self._buffers)]]

    def _port(self, port: Port, value: Tensor) -> Slot:
        return self.emitter.port(port.role, port.name, value.shape, value.dtype)

    def _depending_on(self, gradient: Node) -> set[Node]:
        found = {gradient}
        for node in self.nodes:
            if node.op == "call_function" and found.intersection(node.all_input_nodes):
                found.add(node)
        return found - {gradient}

    def _statistics(self) -> set[Node]:
        """Clones of running statistics that norms write to."""
        found: set[Node] = set()
        for node in self.nodes:
            if node.target in _UPDATING:
                low, high, training = _UPDATING[node.target]
                if node.args[training]:
                    found.update(self._plain(node.args[place]) for place in (low, high) if isinstance(node.args[place], Node))
        return found

    @staticmethod
    def _plain(node: Any) -> Node:
        """The node itself, or the one that it is another name of."""
        while node.target in (aten.detach.default, aten.alias.default):
            node = node.args[0]
        found: Node = node
        return found

    def _result(self, port: Port, value: Node) -> None:
        """Hand a value out, in a storage of its own."""
        slot = self._slots[self._plain(value)]
        taken = {other.root for other in self.emitter.results.values()} | {other.root for other in self.emitter.ports.values()}
        if slot.root in taken:
            slot = self.emitter.call(aten.clone.default, slot, shape=slot.shape, dtype=slot.dtype)
        self.emitter.result(port.role, port.name, slot)

    def _emit(self, node: Node) -> None:
        if node.target is operator.getitem and isinstance(node.args[0], Node) and isinstance(node.args[0].meta["val"], (tuple, list)):
            return  # made by the call that it belongs to
        if node.target in (aten.detach.default, aten.alias.default):
            return
        self._call(node, self._slots, node in self._from_grad)

    def _call(self, node: Node, table: dict[Node, Slot], is_backward: bool) -> None:
        """Emit a call; its results go to ``table``."""
        value, target = node.meta["val"], node.target
        has_many = isinstance(value, (tuple, list))
        made: dict[Any, Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem} if has_many else {0: node}
        outputs: list[Slot | None] = []
        for place, tensor in enumerate(value if has_many else (value,)):
            user = made.get(place)
            if user is None or tensor is None:
                outputs.append(None)
                continue
            shared = self._shared(node, tensor, is_backward)
            slot = self.emitter.slot(tensor.shape, tensor.dtype, None if shared is None else shared.root)
            table[user] = slot
            outputs.append(slot)
        arguments = [self._convert(argument, is_backward) for argument in node.args]
        keywords = {name: self._convert(argument, is_backward) for name, argument in node.kwargs.items()}
        function: Callable[..., Any] = target  # type: ignore[assignment]  # of a call node it is one
        writes: tuple[Slot, ...] = ()
        if target in _UPDATING and node.args[_UPDATING[target][2]]:
            low, high, _ = _UPDATING[target]
            if self.again:
                arguments[low] = arguments[high] = None
            else:
                writes = tuple(slot for slot in (arguments[low], arguments[high]) if slot is not None)
        elif target in _UPDATING_BACKWARD:
            low, high, training = _UPDATING_BACKWARD[target]
            if training is None or node.args[training]:
                arguments[low] = arguments[high] = None
        elif torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) and not _has_zero_dropout(node):
            function, arguments, keywords = self._random(node, arguments)
        if has_many and len(outputs) == 1:
            function, has_many = partial(_single_result, function), False
        if writes:
            num_bytes = sum(out.num_bytes for out in outputs if out is not None and out.root == out.number)
            self.emitter.instructions.append(
                Instruction(function, tuple(arguments), keywords, tuple(outputs), writes=writes, num_bytes=num_bytes)
            )
        else:
            self.emitter.call_into(
                function, tuple(arguments), keywords, tuple(outputs), has_many=has_many, scratch_bytes=_scratch_bytes(function, arguments)
            )

    def _shared(self, node: Node, tensor: Tensor, is_backward: bool) -> Slot | None:
        """The argument whose storage a result shares."""
        storage = storage_id(tensor)
        for argument in node.all_input_nodes:
            value = argument.meta["val"]
            for place, item in enumerate(value if isinstance(value, (tuple, list)) else (value,)):
                if isinstance(item, Tensor) and storage_id(item) == storage:
                    if isinstance(value, (tuple, list)):
                        raise InternalError(f"{node}: a view of result {place} of a call with several results")
                    return self._slot(argument, is_backward)
        return None

    def _slot(self, node: Node, is_backward: bool) -> Slot:
        node = self._plain(node)
        slot = self._slots[node]
        external = slot.number != slot.root and any(slot.root == port.number for port in self.emitter.ports.values())
        if not (is_backward and external) or node in self._from_grad:
            return slot
        if node not in self._behind:
            producer = node.args[0] if node.target is operator.getitem and isinstance(node.args[0], Node) else node
            self._call(producer if isinstance(producer.meta["val"], (tuple, list)) else node, self._behind, True)
        return self._behind[node]

    def _convert(self, value: Any, is_backward: bool) -> Any:
        if isinstance(value, Node):
            return self._slot(value, is_backward)
        if isinstance(value, (list, tuple)):
            return tuple(self._convert(item, is_backward) for item in value)
        return value

    def _random(self, node: Node, arguments: list[Any]) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """A random mask as a function of positions."""
        site = self._sites.setdefault(node, len(self._sites))
        draw = self.emitter.port(DRAW.role, DRAW.name, (), torch.int64)
        if node.target is aten.bernoulli.p and len(node.args) == 2:
            tensor = node.meta["val"]
            return _bernoulli, [draw, tuple(tensor.shape), node.args[1], site, tensor.dtype, tensor.device], {}
        if node.target is aten.native_dropout.default and node.args[2]:
            return _native_dropout, [draw, arguments[0], node.args[1], site], {}
        raise UnsupportedError([f"(the repeated block): {node.target} draws random numbers that follow no position; use dropout"])


def _scratch_bytes(function: Callable[..., Any], arguments: Sequence[Any]) -> int:
    """What evaluating a random mask takes besides its results: in plain PyTorch the integers of Philox."""
    if function is _bernoulli:
        return _mask_scratch_bytes(tuple(arguments[1]), arguments[4])
    if function is _native_dropout:
        # The product with the mask is there while it is scaled.
        product: int = arguments[1].num_bytes
        return max(_mask_scratch_bytes(tuple(arguments[1].shape), torch.bool) - product, product)
    return 0


@lru_cache(maxsize=256)
def _mask_scratch_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    with measure_peak("meta") as peak:
        mask = _bernoulli((0, 0), shape, 0.5, 0, dtype, torch.device("meta"))
    return peak.num_bytes - mask.numel() * mask.element_size()


def _has_zero_dropout(node: Node) -> bool:
    """Whether it is an operator with dropout inside (attention) that is told to drop nothing."""
    names = [argument.name for argument in op_schema(node.target).arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def _single_result(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The one result of a call that returns a tuple."""
    (result,) = function(*arguments, **keywords)
    return result


def _bernoulli(draw: tuple[int, int], shape: tuple[int, ...], kept: float, site: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ones with a probability of ``kept``, and zeros."""
    seed, block = draw
    padded = (*shape, 1, 1, 1, 1)
    extents = (padded[0], padded[1], padded[2], max(1, torch.Size(shape[3:]).numel()))
    tile = MaskTile(shape=extents, extents=extents, origin=(0, 0, 0), seed=seed, site=site, draw=block, p=1 - kept, kind="element")
    out = torch.empty(extents, dtype=dtype, device=device)
    write_mask(tile, out)
    return out.view(tuple(shape))


def _native_dropout(draw: tuple[int, int], x: Tensor, p: float, site: int) -> tuple[Tensor, Tensor]:
    """``aten.native_dropout`` with such a mask."""
    mask = _bernoulli(draw, tuple(x.shape), 1 - p, site, torch.bool, x.device)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
