"""Time model of a GPU: seconds of a program, as the larger of what its host and what the device takes.

The host issues instructions one after the other while the device works, so a program takes

    max(sum of host seconds, sum of kernel seconds).

- *Host*: the call of PyTorch, and the interpretation of the instruction.
- *Kernel*: the larger of its floating-point operations over the rate of its type, width and direction, and of its bytes over the memory's
  bandwidth; at least a floor.
- *Kernels that address elements one by one*, and are bound by these: the bias of a convolution (a kernel of its own), a reduction such as
  the gradient of a bias, pools, interpolation, and copies of columns, which are not contiguous.
- *Convolutions and matrix products*: tiles of 128 x 128 results, one for each multiprocessor at a time. The last wave of tiles may leave
  multiprocessors idle.

:mod:`sft.planner.cost.gpu_models` has the rates of some GPUs. They rank plans of one model; the seconds are not a forecast. Single
precision is TF32, as PyTorch's default; without it, products take 3 to 40 times as long.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

import torch

from sft.backends.kernel_call import kernel_call_of
from sft.lower.concat import cat_slices, cat_slices_into
from sft.lower.custom_ops.attention import fused_attention, fused_attention_backward
from sft.lower.custom_ops.windows import RowMajorCall
from sft.lower.program import Instruction, Program, Slot, slots_of

__all__ = ["ConvolutionRates", "GpuModel"]

aten = torch.ops.aten

#: A convolution, or the gradient of its image or of its weight.
Direction = Literal["forward", "data", "weight"]
#: Operators whose products have the channels of a head last.
_ATTENTION = (fused_attention, fused_attention_backward)
#: Operators whose kernels address every element of the larger side: interpolation and its gradient, and gradients of pools.
_GATHERS = frozenset(
    {
        *(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default),
        *(aten.upsample_trilinear3d.default, aten.upsample_trilinear3d_backward.default),
        *(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default),
    }
)
_POOLS = frozenset({aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default})
#: Calls that write all of their first operand and read none of it.
_OVERWRITES = frozenset({aten.copy_.default, aten.zero_.default, cat_slices_into})
#: Calls that copy images element by element where rows are not adjacent.
_CONCATENATIONS = (cat_slices, cat_slices_into)
#: First dimension along which a slice of an image is not contiguous: columns, and of volumes the second axis, too.
_COLUMNS_DIM = 3
#: Edge of a tile of a convolution or matrix product.
_TILE = 128
#: Least share of the rate that a kernel reaches, however few tiles it has: small problems are divided along the sum, too.
_MIN_OCCUPANCY = 0.15
#: Least ratio of elements read to elements written of a reduction.
_REDUCTION_RATIO = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionRates:
    """FLOPs per second of half-precision convolutions with as many channels as the narrower of image and result has.

    Attributes:
        channels: number of channels.
        forward: rate of the convolution.
        data: rate of the gradient of its image.
        weight: rate of the gradient of its weight.
    """

    channels: int
    forward: float
    data: float
    weight: float

    def rate(self, direction: Direction) -> float:
        """The rate of a direction."""
        return {"forward": self.forward, "data": self.data, "weight": self.weight}[direction]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """Rates of a kind of GPU and of its host.

    Attributes:
        name: name in sentences, with an article.
        convolutions: rates of half-precision convolutions by channels, ascending; between and below them the rate is a power of the
            channels, above them that of the last.
        single_share: rate in single precision (TF32), relative to half precision.
        double_share: rate in double precision.
        bytes_per_second: bandwidth of the memory.
        biases_per_second: elements to which a convolution adds its bias.
        reduced_elements_per_second: elements that a reduction reads.
        pooled_elements_per_second: elements that a max pool reads.
        gathered_elements_per_second: elements of the larger side of an interpolation, of its gradient, and of the gradient of a pool.
        copied_elements_per_second: elements of which a copy from or to columns of an image consists.
        link_bytes_per_second: bandwidth to the host, in each direction.
        num_multiprocessors: number of multiprocessors.
        min_kernel_seconds: floor of a kernel in a stream.
        min_replayed_seconds: floor of a kernel in a CUDA graph.
        min_product_seconds: floor of a convolution or matrix product.
        call_seconds: host seconds of an operator.
        product_seconds: host seconds of a convolution or matrix product.
        kernel_call_seconds: host seconds of a Triton kernel.
        view_seconds: host seconds of an operator without a kernel.
        instruction_seconds: host seconds to interpret an instruction, in addition to its call.
        program_seconds: host seconds to bind a program.
    """

    name: str
    convolutions: tuple[ConvolutionRates, ...]
    single_share: float
    double_share: float
    bytes_per_second: float
    biases_per_second: float
    reduced_elements_per_second: float
    pooled_elements_per_second: float
    gathered_elements_per_second: float
    copied_elements_per_second: float
    link_bytes_per_second: float
    num_multiprocessors: int
    min_kernel_seconds: float
    min_replayed_seconds: float
    min_product_seconds: float
    call_seconds: float
    product_seconds: float
    kernel_call_seconds: float
    view_seconds: float
    instruction_seconds: float
    program_seconds: float

    def seconds(self, program: Program, *, replays: bool = False) -> float:
        """Seconds of a program; without those of the host where a CUDA graph ``replays`` it."""
        host_seconds, device_seconds = self.program_seconds, 0.0
        columns = set[int]()
        for instruction in program.instructions:
            if _is_view_of_columns(instruction, columns):
                columns.update(out.number for out in instruction.outputs if out is not None)
            host, device = self.instruction_times(instruction, columns, replays=replays)
            host_seconds += host
            device_seconds += device
        return device_seconds if replays else max(host_seconds, device_seconds)

    def flops_per_second(self, dtype: torch.dtype, num_channels: float = math.inf, direction: Direction = "forward") -> float:
        """FLOPs per second of products of a type, for so many channels."""
        return self._half_rate(num_channels, direction) * {2: 1.0, 4: self.single_share, 8: self.double_share}.get(dtype.itemsize, 1.0)

    def _half_rate(self, num_channels: float, direction: Direction) -> float:
        """Rate of half-precision products: a power of the channels between two measured numbers of channels."""
        table = self.convolutions
        position = bisect_left([rates.channels for rates in table], num_channels)
        if position == len(table) or len(table) == 1:
            return table[-1].rate(direction)
        low, high = table[max(0, position - 1)], table[max(1, position)]
        exponent = math.log(high.rate(direction) / low.rate(direction)) / math.log(high.channels / low.channels)
        return low.rate(direction) * float((max(1, num_channels) / low.channels) ** exponent)

    def instruction_times(
        self, instruction: Instruction, columns: Container[int] = frozenset(), *, replays: bool = False
    ) -> tuple[float, float]:
        """Seconds of an instruction on the host, and on the device, where the floor of a kernel depends on ``replays``.

        Args:
            instruction: the instruction.
            columns: numbers of the slots that are views of some columns of an image.
            replays: true if a CUDA graph replays it.
        """
        outputs = [out for out in instruction.outputs if out is not None]
        is_new = any(out.root == out.number for out in outputs)
        if (not instruction.writes and not is_new) or instruction.function is torch.empty:
            return self.instruction_seconds + self.view_seconds, 0.0
        reads = slots_of(instruction)
        written = {slot.root: slot for slot in (*outputs, *instruction.writes)}
        if instruction.function in _OVERWRITES or "out" in instruction.keywords:
            overwritten = {slot.number for slot in instruction.writes}
            reads = [slot for slot in reads if slot.number not in overwritten]
        num_bytes = sum(slot.num_bytes for slot in (*{slot.number: slot for slot in reads}.values(), *written.values()))
        floor = self.min_replayed_seconds if replays else self.min_kernel_seconds
        if instruction.flops:
            return self._product_seconds(instruction, reads, num_bytes, floor)
        host = self.call_seconds if kernel_call_of(instruction.function) is None else self.kernel_call_seconds
        num_read = max((math.prod(slot.shape) for slot in reads), default=0)
        num_written = sum(math.prod(slot.shape) for slot in written.values())
        device = max(num_bytes / self.bytes_per_second, self._addressing_seconds(instruction, num_read, num_written))
        if any(slot.number in columns for slot in (*reads, *instruction.writes)):
            device = max(device, max(num_read, num_written) / self.copied_elements_per_second)
        return self.instruction_seconds + host, device + floor

    def _addressing_seconds(self, instruction: Instruction, num_read: int, num_written: int) -> float:
        """Device seconds of an operator that addresses its elements one by one, by the elements of its largest operand and its results."""
        function = instruction.function
        if isinstance(function, RowMajorCall):  # its copies take little of the time
            function = function.function
        if function in _POOLS:
            return num_read / self.pooled_elements_per_second
        if function in _GATHERS:
            return max(num_read, num_written) / self.gathered_elements_per_second
        if function is aten.constant_pad_nd.default or (function in _CONCATENATIONS and _takes_columns(instruction)):
            return num_written / self.copied_elements_per_second
        return num_read / self.reduced_elements_per_second if num_read > _REDUCTION_RATIO * num_written else 0.0

    def _product_seconds(self, instruction: Instruction, reads: list[Slot], num_bytes: int, floor: float) -> tuple[float, float]:
        """Seconds of a convolution or matrix product, or of the products that compute its gradients."""
        outputs = [out for out in instruction.outputs if out is not None]
        main = max(reads + outputs, key=lambda slot: slot.num_bytes)
        products = _products(instruction) or [("forward", slot) for slot in (outputs or list(instruction.writes))[:1]]
        dim = -1 if instruction.function in _ATTENTION else 1
        channels = [slot.shape[dim] for slot in (*(slot for _, slot in products), *reads) if len(slot.shape) > (3 if dim < 0 else 1)]
        num_channels = min(channels, default=1)
        computing, host = 0.0, self.instruction_seconds
        for direction, slot in products:
            rate = self.flops_per_second(main.dtype, num_channels, direction) * self._occupancy(slot if direction != "weight" else main)
            computing += instruction.flops / len(products) / rate
            host += self.product_seconds
        device = max(num_bytes / self.bytes_per_second, computing) + len(products) * max(floor, self.min_product_seconds)
        if _adds_bias(instruction):
            device += math.prod(products[0][1].shape) / self.biases_per_second + floor
            host += self.call_seconds
        elif instruction.function is aten.convolution_backward.default and instruction.outputs[-1] is not None:
            device += max(math.prod(slot.shape) for slot in reads) / self.reduced_elements_per_second + floor
            host += self.call_seconds
        return host, device

    def _occupancy(self, product: Slot) -> float:
        """Share of the multiprocessors that work, on average over the waves of tiles."""
        width = product.shape[1] if len(product.shape) > 1 else 1
        height = math.prod(product.shape) // max(1, width)
        num_waves = math.ceil(height / _TILE) * math.ceil(width / _TILE) / self.num_multiprocessors
        return max(_MIN_OCCUPANCY, num_waves / math.ceil(num_waves)) if num_waves else 1.0


def _is_view_of_columns(instruction: Instruction, columns: Container[int]) -> bool:
    """True for a view of some columns of an image, or of such a view."""
    function, arguments = instruction.function, instruction.arguments
    if not arguments or type(arguments[0]) is not Slot or instruction.num_bytes or instruction.writes:
        return False
    return arguments[0].number in columns or (function is aten.slice.Tensor and arguments[1] >= _COLUMNS_DIM)


def _takes_columns(instruction: Instruction) -> bool:
    """True if a concatenation reads slices of columns."""
    spans = next(argument for argument in reversed(instruction.arguments) if isinstance(argument, tuple))
    return any(each.dim >= _COLUMNS_DIM for slices in spans for each in slices)


def _products(instruction: Instruction) -> list[tuple[Direction, Slot]]:
    """The products of an operator with their results: the gradients of a convolution's image and weight, or the first result."""
    if instruction.function is aten.convolution_backward.default:
        directions: tuple[Direction, ...] = ("data", "weight")
        return [(direction, out) for direction, out in zip(directions, instruction.outputs, strict=False) if out is not None]
    return [("forward", out) for out in instruction.outputs[:1] if out is not None]


def _adds_bias(instruction: Instruction) -> bool:
    """True if an operator adds a bias after its convolution in a kernel of its own; cuDNN's fused call and our kernels do not."""
    return instruction.function is aten.convolution.default and len(instruction.arguments) > 2 and instruction.arguments[2] is not None
