"""Redundant copies of programs become views: the same bits, no more bytes, and the copies that must stay."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.lower import lower_samples, lower_whole, redundant_copies
from sft.lower.builder import ProgramBuilder
from sft.lower.custom_ops.attention import fused_attention, fused_attention_backward
from sft.lower.program import Instruction, Program, Slot, slots_of
from sft.lower.slot_strides import SlotStrides, is_row_major_copy
from sft.lower.steps import Step
from sft.torch_runtime.machine import TorchMachine
from tests.helpers.bags import AttentionBag, VisionTransformer, take_samples, take_windows
from tests.helpers.transformers import AttentionForm, ImageTransformer

aten = torch.ops.aten

_Mode = Literal["whole", "samples", "windows"]
_Function = Callable[[Tensor], Tensor]


@dataclass
class _Lowered:
    """Programs after the replacement of copies.

    Attributes:
        programs: their instructions.
        num_row_major: values that counted as row-major, and were, when a program ran.
    """

    programs: list[list[Instruction]] = field(default_factory=list)
    num_row_major: int = 0

    def count(self, function: Any) -> int:
        return sum(instruction.function is function for program in self.programs for instruction in program)

    @property
    def num_clones(self) -> int:
        """Clones into the contiguous format."""
        return sum(is_row_major_copy(instruction) for program in self.programs for instruction in program)


@contextmanager
def _lowering(mode: _Mode, *, replaces: bool = True) -> Iterator[_Lowered]:
    """Plans of this mode, with or without the replacement of copies; programs check the layouts of values as they run."""
    lowered, row_major_ports = _Lowered(), dict[int, Slot]()
    run, execute = TorchMachine._run, TorchMachine._execute
    tracked: list[SlotStrides] = []

    def replace(scope: Any, builder: Any, num_forward: int | None = None) -> int | None:
        if replaces:
            num_forward = redundant_copies.replace_redundant_copies(scope, builder, num_forward)
        lowered.programs.append(list(builder.instructions))
        for port, slot in builder.ports.items():
            if port.role == "side" and redundant_copies._is_row_major_value(scope, port.name):
                row_major_ports[id(slot)] = slot
        return num_forward

    def checked_run(machine: TorchMachine, program: Program, bindings: Any, saved: Any) -> Any:
        ports = [port for port, slot in program.ports.items() if id(slot) in row_major_ports and port in bindings]
        assert all(bindings[port].is_contiguous() for port in ports)
        tracked.append(SlotStrides(program.ports[port] for port in ports))
        return run(machine, program, bindings, saved)

    def checked_execute(machine: TorchMachine, step: Step, tensors: dict[int, Any]) -> None:
        execute(machine, step._replace(frees=()), tensors)
        instruction = step.instruction
        tracked[-1].note(instruction)
        for out in instruction.outputs:
            if out is not None and tracked[-1].is_row_major(out):
                assert tensors[out.number].is_contiguous(), instruction
                lowered.num_row_major += 1
        for number in instruction.frees:
            tensors.pop(number, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_whole, "replace_redundant_copies", replace)
        patch.setattr(lower_samples, "replace_redundant_copies", replace)
        patch.setattr(TorchMachine, "_run", checked_run)
        patch.setattr(TorchMachine, "_execute", checked_execute)
        if mode == "samples":
            take_samples(patch, 2)
        elif mode == "windows":
            take_windows(patch, 4, height=1)
        yield lowered


def _step(model: nn.Module, x: Tensor) -> tuple[list[Tensor], sft.Plan, int]:
    """Outputs and gradients of a training step of a copy of the model, the plan, and the measured peak."""
    net: Any = sft.compile(copy.deepcopy(model), [x], budget="4GiB")
    gradients = [torch.randn_like(out, generator=torch.Generator().manual_seed(0)) for out in _listed(model(x.detach()))]
    with sft.measure_peak() as peak:
        own = x.detach().clone().requires_grad_(x.requires_grad)
        outputs = _listed(net(own))
        torch.autograd.backward(outputs, gradients)
    trained = [each.grad for each in (own, *net.parameters()) if each.grad is not None]
    return [*(out.detach() for out in outputs), *trained], net._sft_engine.last_plan, peak.num_bytes


def _listed(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _assert_same_bits(model: nn.Module, x: Tensor, mode: _Mode = "whole") -> _Lowered:
    """Assert that the replacement of copies changes no bit and no FLOP, and raises no peak."""
    with _lowering(mode, replaces=False):
        expected, plain, _ = _step(model, x)
    with _lowering(mode) as lowered:
        tensors, plan, measured_bytes = _step(model, x)
    assert len(tensors) == len(expected)
    for ours, reference in zip(tensors, expected, strict=True):
        assert ours.stride() == reference.stride() and torch.equal(ours, reference)
    assert measured_bytes <= plan.projected_peak_bytes <= plain.projected_peak_bytes
    assert plan.flops == plain.flops
    return lowered


class _Functions(nn.Module):
    """Functions of 21 tokens of 8 channels, 20 patches of an image and a class token, each after a linear layer of its own.

    Functions of ``images`` read the channels-last image of the patches.
    """

    def __init__(self, functions: Sequence[_Function], images: Sequence[_Function] = ()) -> None:
        super().__init__()
        self.functions, self.images = functions, images
        self.embed, self.norm, self.token = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8), nn.Parameter(torch.ones(1, 1, 8))
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in functions)
        self.heads = nn.ModuleList(nn.LazyLinear(3) for _ in (*functions, *images))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        patches = self.embed(x)
        tokens = self.norm(torch.cat((self.token.expand(len(x), -1, -1), patches.flatten(2).transpose(1, 2)), 1))
        values = [function(layer(tokens)) for function, layer in zip(self.functions, self.inner, strict=True)]
        values += [function(patches) for function in self.images]
        return tuple(head(value) for head, value in zip(self.heads, values, strict=True))


def _in_place(x: Tensor) -> Tensor:
    rows = x.reshape(-1, 8)
    rows.mul_(2.0)
    return F.relu(rows, inplace=True) + x.reshape(-1, 8).sum(0)


def _in_place_after_a_reader(x: Tensor) -> Tensor:
    rows = x.transpose(1, 2).reshape(-1, 21).relu()
    return (rows.reshape(-1, 8, 21) * 2 + F.relu(x.transpose(1, 2), inplace=True)).transpose(1, 2)


_FUNCTIONS: dict[str, _Function] = {
    "rows of tokens": lambda x: x.reshape(-1, 8),
    "transposed": lambda x: x.transpose(1, 2).reshape(-1, 21),
    "transposed and flattened twice": lambda x: x.transpose(0, 1).flatten(0, 1).flatten(),
    "sliced": lambda x: x[:, 1:].reshape(-1, 8),
    "first samples": lambda x: x[:1].reshape(-1, 8),
    "one token": lambda x: x[:, :1].reshape(-1, 8),
    "every second token": lambda x: x[:, ::2].reshape(-1, 8),
    "read twice": lambda x: x.reshape(-1, 8) * x.mean() + x.sum(1).repeat_interleave(21, 0),
    "in place": _in_place,
    "in place after a reader": _in_place_after_a_reader,
    "heads": lambda x: x.unflatten(2, (2, 4)).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(x.shape),
    "heads as samples": lambda x: x.unflatten(2, (2, 4)).permute(2, 0, 1, 3).flatten(0, 1).cumsum(1),
    "windows and back": lambda x: (
        x.unflatten(1, (3, 7)).transpose(1, 2).reshape(x.shape).unflatten(1, (7, 3)).transpose(1, 2).flatten(1, 2)
    ),
    "expanded": lambda x: (x[:, :1].expand(-1, 4, -1) * 2).reshape(-1, 8),
    "stacked": lambda x: torch.stack([half.flatten(0, 1) for half in x[:, 1:].chunk(2, 1)], 1),
}
_IMAGE_FUNCTIONS: tuple[_Function, ...] = (
    lambda x: x.flatten(1),
    lambda x: x.flatten(2).transpose(1, 2).reshape(-1, 8),
    lambda x: x.permute(0, 2, 3, 1).reshape(-1, 8),
)


@pytest.mark.parametrize("start", range(0, len(_FUNCTIONS), 5))
def test_bits_and_bytes_of_reshapes(start: int) -> None:
    torch.manual_seed(0)
    functions = list(_FUNCTIONS.values())[start : start + 5]
    model, x = _Functions(functions, [_IMAGE_FUNCTIONS[start // 5]]), torch.randn(2, 3, 8, 10)
    model(x)
    lowered = _assert_same_bits(model, x.requires_grad_())
    assert lowered.num_row_major > 20


@pytest.mark.parametrize(
    ("name", "has_copies"), [("rows of tokens", False), ("first samples", False), ("transposed", True), ("sliced", True)]
)
def test_copies_of_reshapes(name: str, has_copies: bool) -> None:
    """Reshapes of row-major tokens are views, those of other views of tokens copies."""
    model, x = _Functions([_FUNCTIONS[name]]), torch.randn(2, 3, 8, 10)
    model(x)
    with _lowering("whole") as lowered:
        _step(model, x)
    assert (lowered.count(aten._reshape_copy.default) > 0) == has_copies


class _TwoOutputs(nn.Module):
    """A reshape that is an output, after one of an operand that is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = self.linear(torch.cat((tokens, tokens[:, :1]), 1))
        rows = tokens.reshape(-1, 8)
        return tokens, rows, self.linear(rows.reshape(-1, 3, 8))


def test_outputs_have_storages_of_their_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 10)
    _assert_same_bits(_TwoOutputs(), x.clone().requires_grad_())
    outputs = sft.compile(_TwoOutputs(), [x], budget="4GiB")(x)
    assert len({out.untyped_storage().data_ptr() for out in outputs}) == 3


@pytest.mark.parametrize("mode", get_args(_Mode))
def test_blocks_of_vision_transformers_flatten_tokens_without_copies(mode: _Mode) -> None:
    torch.manual_seed(0)
    model: nn.Module = ImageTransformer(8, 2, 2, 4, (6, 5))
    x = torch.randn(1, 3, 24, 20)
    if mode == "samples":
        model, x = AttentionBag(VisionTransformer(width=8, heads=2, depth=2), 8), torch.randn(4, 3, 64, 64)
    lowered = _assert_same_bits(model, x, mode)
    assert lowered.count(aten._reshape_copy.default) == 0
    assert lowered.count(aten.mm.default) + lowered.count(aten.addmm.default) > 20
    if mode == "whole":
        # Of each block: queries, keys, values, and two transpositions forwards and backwards each. One of the patches.
        assert lowered.num_clones <= 2 * 7 + 1


@settings(max_examples=3)
@given(
    form=st.sampled_from(get_args(AttentionForm)),
    mode=st.sampled_from(get_args(_Mode)),
    num=st.integers(1, 3),
    size=st.tuples(st.integers(1, 4), st.integers(2, 4)),
    token=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_transformer_keeps_its_bits(
    form: AttentionForm, mode: _Mode, num: int, size: tuple[int, int], token: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = ImageTransformer(8, 2, 1, 2, size, form, token=token).to(dtype)
    x = torch.randn(3 if mode == "samples" else num, 3, 2 * size[0], 2 * size[1], dtype=dtype)
    _assert_same_bits(model, x.requires_grad_(mode == "whole"), mode if mode != "windows" or size[0] > 1 else "whole")


def test_backward_passes_that_run_twice() -> None:
    torch.manual_seed(0)
    model, x = ImageTransformer(8, 2, 1, 4, (3, 2)), torch.randn(2, 3, 12, 8)
    net: Any = sft.compile(model, [x], budget="4GiB")
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    loss.backward()
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(net.parameters(), first, strict=True))


_SHAPES = ((2, 3, 4), (6, 4), (2, 12), (24,), (4, 1, 6))

#: Instructions of random programs, with their frequency.
_KINDS = ("reshape", "clone", "clone", "transpose", "narrow", "narrow", "add_", "mul_", "mul_", "mul_", "read", "read", "add")


@dataclass
class _RandomProgram:
    """A program of copies, views, sums and writes in place, as lowering rules could emit them: forward, then backward.

    Attributes:
        choices: kinds of instructions, and numbers that select their operands.
        num_forward: number of instructions of the forward half.
    """

    choices: Sequence[tuple[str, int, int]]
    num_forward: int = 0

    def build(self) -> ProgramBuilder:
        builder = ProgramBuilder(torch.float32)
        values = [builder.port("side", name, (2, 3, 4)) for name in ("row_major", "other")]
        made_forward: set[int] = set()
        reads: list[Slot] = []
        for position, (kind, first, second) in enumerate(self.choices):
            if position == len(self.choices) // 2:
                self.num_forward, made_forward = len(builder.instructions), {slot.root for slot in values}
            x, y = (values[-1 - operand % len(values)] for operand in (first, second))
            if kind == "read":
                reads.append(builder.call(aten.sum.default, x, shape=()))
            else:
                values.append(self._emit(builder, kind, x, y, second, made_forward))
        total = builder.zeros((1,))
        for slot in (*reads, builder.call(aten.sum.default, values[-1], shape=())):
            builder.call(aten.mul_.Tensor, total, 2, writes=total)
            builder.add_into(total, slot)
        if builder.owns(values[len(values) // 2]):
            builder.result("out", "value", values[len(values) // 2])
        builder.result("out", "total", total)
        return builder

    @staticmethod
    def _emit(builder: ProgramBuilder, kind: str, x: Slot, y: Slot, choice: int, made_forward: set[int]) -> Slot:
        if kind == "reshape" and math.prod(x.shape) == 24:
            shape = _SHAPES[choice % len(_SHAPES)]
            return builder.call(aten._reshape_copy.default, x, list(shape), shape=shape)
        if kind == "clone":
            return builder.row_major(x)
        if kind == "transpose" and len(x.shape) > 1:
            return builder.call(aten.transpose.int, x, 0, 1, shape=(x.shape[1], x.shape[0], *x.shape[2:]), view_of=x)
        if kind == "narrow":
            return builder.narrow(x, 0, choice % x.shape[0], 1)
        is_own = all(x.root != port.root for port in builder.ports.values()) and x.root not in made_forward
        if kind == "add_" and is_own and x.shape == y.shape and x.root != y.root:
            return builder.add_into(x, y)
        if kind == "mul_" and is_own:
            return builder.call(aten.mul_.Tensor, x, 2.0, writes=x)
        return builder.call(aten.add.Tensor, x, 1.0, shape=x.shape)


def _borrowed(builder: ProgramBuilder, num_forward: int) -> set[int]:
    """Storages of ports and results of the forward program that the backward program reads."""
    _, backward = builder.split(num_forward)
    border = {slot.root for slot in (*builder.ports.values(), *builder.results.values())}
    made = {out.root for i in backward.instructions for out in i.outputs if out is not None and out.root == out.number}
    return {slot.root for i in backward.instructions for slot in slots_of(i)} & border - made


def _run_twice(builder: ProgramBuilder, num_forward: int) -> tuple[list[Tensor], list[int]]:
    """Results of the forward program and of two runs of the backward program on its residuals; peaks, and bytes between both."""
    forward, backward = builder.split(num_forward)
    values = {"row_major": torch.arange(24.0).reshape(2, 3, 4), "other": torch.arange(24.0).reshape(4, 2, 3).permute(1, 2, 0)}
    machine, out = TorchMachine(torch.device("cpu")), list[Tensor]()
    results, saved = machine.run(forward, {port: values[port.name] for port in forward.ports})
    for _ in range(2):
        again, _ = machine.run(backward, {port: values[port.name] for port in backward.ports}, saved.fork())
        out += [tensor.clone() for _, tensor in sorted(again.items())]
    return [*(tensor for _, tensor in sorted(results.items())), *out], [
        forward.peak_bytes,
        forward.end_bytes,
        forward.end_bytes + backward.peak_bytes,
    ]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 4), st.integers(0, 4)), min_size=6, max_size=24))
@example([("add", 1, 0), ("narrow", 0, 0), ("narrow", 0, 0), ("clone", 0, 0), *[("read", 0, 0)] * 4])  # a small copy outlives its operand
def test_any_program_keeps_its_results_and_bytes(choices: list[tuple[str, int, int]]) -> None:
    program = _RandomProgram(choices)
    builder = program.build()
    num_forward = builder.prune(program.num_forward)
    assert num_forward is not None
    expected, plain_bytes = _run_twice(builder, num_forward)
    borrowed = _borrowed(builder, num_forward)
    shapes = {"row_major": (2, 3, 4), "other": (2, 3, 4)}
    graph = dict.fromkeys(shapes, SimpleNamespace(kind="operator"))
    scope: Any = SimpleNamespace(graph=graph, shapes=shapes, strided={"other"}, row_major=())
    redundant_copies.replace_redundant_copies(scope, builder, num_forward)
    tensors, num_bytes = _run_twice(builder, num_forward)
    assert all(torch.equal(ours, reference) for ours, reference in zip(tensors, expected, strict=True))
    assert all(ours <= plain for ours, plain in zip(num_bytes, plain_bytes, strict=True))
    assert _borrowed(builder, num_forward) == borrowed


@pytest.mark.parametrize("mode", ["whole", "samples"])
def test_fused_attention_reads_slices_of_one_product(mode: _Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    backend = KernelBackend(selector=None, fusion_device=FusionDevice(None))
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: backend)
    model, x = ImageTransformer(16, 2, 2, 4, (3, 2)).bfloat16(), torch.randn(4, 3, 12, 8).bfloat16()
    lowered = _assert_same_bits(model, x, mode)
    num_forward, num_backward = lowered.count(fused_attention), lowered.count(fused_attention_backward)
    assert num_forward >= 2 and num_backward >= 2 and lowered.count(aten._reshape_copy.default) == 0
    # The gradient of the product is transposed. Patches become tokens.
    assert lowered.num_clones <= num_backward + len(lowered.programs)
