"""Time model of a GPU: seconds of a program, as the larger of what its host and what the device takes.

The host issues instructions one after the other while the device works, so a program takes

    max(sum of host seconds, sum of kernel seconds).

- *Host*: the call of PyTorch, and the interpretation of the instruction.
- *Kernel*: the larger of its floating-point operations over the rate of its type, width and direction, and of its bytes over the memory's
  bandwidth; at least a floor.
- *Kernels that address elements one by one*, and are bound by these: the bias of a convolution (a kernel of its own), a reduction such as
  the gradient of a bias, pools, interpolation, concatenations of channels, and copies of columns or channels, which are not contiguous.
- *Convolutions and matrix products*: tiles of 128 x 128 results, one for each multiprocessor at a time. The last wave of tiles may leave
  multiprocessors idle.

Rates are of large tensors. Constants of this module relate further kernels to them; they are from traces of steps on an H200
(``benchmarks/results/2026-11-28-h200-gpu-kernels.md``), where no other source is given.

:mod:`sft.planner.cost.gpu_models` has the rates of some GPUs. They rank plans of one model; the seconds are not a forecast. Single
precision is TF32, as PyTorch's default; without it, products take 3 to 40 times as long.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

from sft.backends.conv_calls import DataGradientCall, WeightGradientCall
from sft.backends.kernel_call import kernel_call_of
from sft.backends.resize import ResizeCall
from sft.lower.concat import cat_slices, cat_slices_into
from sft.lower.custom_ops.attention import fused_attention, fused_attention_backward
from sft.lower.custom_ops.statistics import affine_channels, channel_sums
from sft.lower.custom_ops.windows import RowMajorCall
from sft.lower.program import Instruction, Program, Slot, slots_of
from sft.lower.untiled.whole_norms import BATCH_NORM_FUNCTIONS

__all__ = ["ConvolutionRates", "GpuModel"]

aten = torch.ops.aten

#: A convolution, or the gradient of its image or of its weight.
Direction = Literal["forward", "data", "weight"]
#: Operators whose products have the channels of a head last.
_ATTENTION = (fused_attention, fused_attention_backward)
#: Rate of attention over 197 tokens, relative to convolutions with the channels of a head: in the same step of the ViT-S forward 12.3 ms
#: for 0.73 TFLOP, and backward 18.5 ms for 0.92 TFLOP.
_ATTENTION_RATE = 0.2
#: Operators whose kernels address every element of the larger side: interpolation and its gradient.
_GATHERS = frozenset(
    {
        *(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default),
        *(aten.upsample_trilinear3d.default, aten.upsample_trilinear3d_backward.default),
    }
)
_POOLS = frozenset({aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default})
_POOL_GRADIENTS = frozenset({aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default})
#: Elements that a pool reads in the time that each result takes besides them: for 67 million elements 0.18 ms in windows of 2 x 2, and 0.27
#: ms in windows of 3 x 3 with stride 2, whose results are as many.
_POOL_RESULT_TAPS = 6
_POOL_RATE_TAPS = 4
#: Norms, in times of a reduction of as many elements: statistics and map (0.24 + 0.15 ms for 67 million elements, which a reduction reads
#: in 0.13 ms), the map alone, and sums and map of the gradient (0.12 + 0.18 ms). Layer norms of a ViT-S with adapters take 11.1 and 3.8 ms
#: (``benchmarks/results/2026-11-27-h200-gpu-kernels.md``).
_NORM_REDUCTIONS: dict[Callable[..., Any], float] = {
    **dict.fromkeys(BATCH_NORM_FUNCTIONS, 3.0),
    **dict.fromkeys((affine_channels, aten._native_batch_norm_legit_no_training.default), 1.1),
    aten.native_batch_norm_backward.default: 2.3,
    aten.native_layer_norm.default: 2.3,
    aten.native_layer_norm_backward.default: 1.65,
}
#: Sums of channels that are taken as wide rows, against ATen's reduction of rows of few channels.
_WIDE_SUM_RATIO = 3.0
#: Seconds of a reduction besides its elements: a kernel of few programs that wait for each other, or two. Sums of a strip of 0.5 to 8
#: million elements take 10 to 20 microseconds.
_REDUCTION_SECONDS = 12e-6
#: Calls that write all of their first operand and read none of it.
_OVERWRITES = frozenset({aten.copy_.default, aten.zero_.default, cat_slices_into})
#: Calls that copy images element by element where rows are not adjacent.
_CONCATENATIONS = (cat_slices, cat_slices_into)
#: First dimension along which a slice of an image is not contiguous: columns, and of volumes the second axis, too.
_COLUMNS_DIM = 3
#: Edge of a tile of a convolution or matrix product.
_TILE = 128
#: Least share of the rate that a kernel reaches, however few tiles it has: small problems are divided along the sum, too. 1536 results of
#: 256 channels take 9 to 11 microseconds.
_MIN_OCCUPANCY = 0.3
#: Share of a product's floor that convolutions and gradients of images have in a CUDA graph: those of one row take 5 to 6 microseconds. The
#: gradient of a weight has a kernel before it that clears its workspace.
_REPLAYED_SHARE = 0.5
#: Floor of other kernels in a CUDA graph, as a multiple of that of a kernel on few numbers: copies of two rows take 1.4 microseconds.
_REPLAYED_RATIO = 1.6
#: Most channels that are few: cuDNN pads them, and the wider the window, the less time an operation takes (rates are of 3 x 3). 3 channels
#: in windows of 7 x 7 have 1.8 times the rate.
_FEW_CHANNELS = 4
_RATE_TAPS = 9
_TAPS_EXPONENT = 1 / 3
#: Rate of our kernels for layers with few channels, relative to cuDNN's: the geometric mean over six classes of convolutions and gradients
#: of weights with at least 2**20 pixels (``benchmarks/results/2026-11-28-h200-gpu-table.md``).
_FEW_CHANNELS_RATIO = 2.6
#: Rate of cuDNN's gradients of weights where the wider side is no power of two, relative to others: of 96 -> 32, 192 -> 64 and 384 -> 128
#: channels at once, in the decoder of a U-Net, they have 0.65, 0.65 and 0.3 times the rate of the narrower side.
_ODD_WIDTH_RATIO = 0.6
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
        pooled_elements_per_second: elements that a max pool in windows of 2 x 2 reads.
        gathered_elements_per_second: elements of the larger side of an interpolation and of its gradient.
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
            if _is_strided_view(instruction, columns):
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
        # More channels are no slower: the gradient of a weight of 512 channels is measured on 512 x 256 pixels, where cuDNN has half of the
        # rate that it has on 256 x 256.
        rates = list(accumulate((each.rate(direction) for each in table), max))
        position = bisect_left([each.channels for each in table], num_channels)
        if position == len(table) or len(table) == 1:
            return rates[-1]
        low, high = table[max(0, position - 1)], table[max(1, position)]
        low_rate, high_rate = rates[max(0, position - 1)], rates[max(1, position)]
        exponent = math.log(high_rate / low_rate) / math.log(high.channels / low.channels)
        return low_rate * float((max(1, num_channels) / low.channels) ** exponent)

    def instruction_times(
        self, instruction: Instruction, columns: Container[int] = frozenset(), *, replays: bool = False
    ) -> tuple[float, float]:
        """Seconds of an instruction on the host, and on the device, where the floor of a kernel depends on ``replays``.

        Args:
            instruction: the instruction.
            columns: numbers of the slots that are views of some columns or channels of an image.
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
        if instruction.flops:
            return self._product_seconds(instruction, reads, num_bytes, replays=replays)
        floor = self._kernel_floor(replays=replays)
        host = self.call_seconds if kernel_call_of(instruction.function) is None else self.kernel_call_seconds
        num_read = max((math.prod(slot.shape) for slot in reads), default=0)
        num_written = sum(math.prod(slot.shape) for slot in written.values())
        device = max(num_bytes / self.bytes_per_second, self._addressing_seconds(instruction, num_read, num_written))
        if any(slot.number in columns for slot in (*reads, *instruction.writes)):
            device = max(device, max(num_read, num_written) / self.copied_elements_per_second)
        return self.instruction_seconds + host, device + floor

    def _kernel_floor(self, *, replays: bool) -> float:
        """Floor of a kernel that is no product."""
        return _REPLAYED_RATIO * self.min_replayed_seconds if replays else self.min_kernel_seconds

    def _addressing_seconds(self, instruction: Instruction, num_read: int, num_written: int) -> float:
        """Device seconds of an operator that addresses its elements one by one, by the elements of its largest operand and its results."""
        function = instruction.function
        if isinstance(function, RowMajorCall):  # its copies take little of the time
            function = function.function
        if function in _POOLS:
            result = next(slot for slot in (*instruction.outputs, *instruction.writes) if slot is not None)
            num_results: int = math.prod(result.shape)
            num_taps: int = math.prod(instruction.arguments[1])
            # The rate is of windows of 2 x 2.
            num_pooled = num_results * _POOL_RATE_TAPS * (_POOL_RESULT_TAPS + num_taps) / (_POOL_RESULT_TAPS + _POOL_RATE_TAPS)
            return num_pooled / self.pooled_elements_per_second
        if function in _POOL_GRADIENTS:  # each element is written, and compared with each window that contains it
            num_compared: int = math.prod(instruction.arguments[0].shape) * math.prod(instruction.arguments[2])
            return (num_written + num_compared) / self.pooled_elements_per_second
        if function in _GATHERS:
            return max(num_read, num_written) / self.gathered_elements_per_second
        if isinstance(kernel_call_of(function), ResizeCall):
            return max(num_read, num_written) / self.copied_elements_per_second
        if function in _NORM_REDUCTIONS:
            return _NORM_REDUCTIONS[function] * num_read / self.reduced_elements_per_second
        if function is aten.constant_pad_nd.default or _concatenates_elements(instruction):
            return num_written / self.copied_elements_per_second
        if function is channel_sums:
            return _REDUCTION_SECONDS + num_read / (_WIDE_SUM_RATIO * self.reduced_elements_per_second)
        return num_read / self.reduced_elements_per_second if num_read > _REDUCTION_RATIO * num_written else 0.0

    def _product_seconds(self, instruction: Instruction, reads: list[Slot], num_bytes: int, *, replays: bool) -> tuple[float, float]:
        """Seconds of a convolution or matrix product, or of the products that compute its gradients."""
        outputs = [out for out in instruction.outputs if out is not None]
        main = max(reads + outputs, key=lambda slot: slot.num_bytes)
        products = _products(instruction)
        dim = -1 if instruction.function in _ATTENTION else 1
        channels = [slot.shape[dim] for slot in (*(slot for _, slot in products), *reads) if len(slot.shape) > (3 if dim < 0 else 1)]
        num_channels, rate_ratio = min(channels, default=1), 1.0
        if num_channels <= _FEW_CHANNELS and dim > 0:
            rate_ratio = (_num_taps(instruction) / _RATE_TAPS) ** _TAPS_EXPONENT
            rate_ratio *= 1.0 if kernel_call_of(instruction.function) is None else _FEW_CHANNELS_RATIO
        elif dim < 0:
            rate_ratio = _ATTENTION_RATE
        kernel_floor = self._kernel_floor(replays=replays)
        computing, floors, host = 0.0, 0.0, self.instruction_seconds
        for direction, slot in products:
            rate = self.flops_per_second(main.dtype, num_channels, direction) * self._occupancy(slot if direction != "weight" else main)
            seconds = instruction.flops / len(products) / (rate_ratio * rate)
            if direction == "weight" and max(channels) > num_channels and max(channels).bit_count() > 1:
                seconds /= _ODD_WIDTH_RATIO
            if direction == "data" and num_channels <= _FEW_CHANNELS:
                seconds = max(seconds, math.prod(slot.shape) / self.gathered_elements_per_second)
            computing += seconds
            share = _REPLAYED_SHARE if replays and direction != "weight" else 1.0
            floors += max(kernel_floor, share * self.min_product_seconds)
            host += self.product_seconds
        device = max(num_bytes / self.bytes_per_second, computing) + floors
        if _adds_bias(instruction):
            device += math.prod(products[0][1].shape) / self.biases_per_second + kernel_floor
            host += self.call_seconds
        elif instruction.function is aten.convolution_backward.default and instruction.outputs[-1] is not None:
            device += max(math.prod(slot.shape) for slot in reads) / self.reduced_elements_per_second + kernel_floor
            host += self.call_seconds
        return host, device

    def _occupancy(self, product: Slot) -> float:
        """Share of the multiprocessors that work, on average over the waves of tiles."""
        width = product.shape[1] if len(product.shape) > 1 else 1
        height = math.prod(product.shape) // max(1, width)
        num_waves = math.ceil(height / _TILE) * math.ceil(width / _TILE) / self.num_multiprocessors
        return max(_MIN_OCCUPANCY, num_waves / math.ceil(num_waves)) if num_waves else 1.0


def _is_strided_view(instruction: Instruction, columns: Container[int]) -> bool:
    """True for a view of some columns or channels of an image, whose elements are not adjacent, or of such a view."""
    function, arguments = instruction.function, instruction.arguments
    if not arguments or type(arguments[0]) is not Slot or instruction.num_bytes or instruction.writes:
        return False
    if arguments[0].number in columns:
        return True
    is_image = len(arguments[0].shape) > _COLUMNS_DIM
    return function is aten.slice.Tensor and is_image and (arguments[1] == 1 or arguments[1] >= _COLUMNS_DIM)


def _concatenates_elements(instruction: Instruction) -> bool:
    """True for a concatenation of channels, or of slices of columns, which are not contiguous."""
    if instruction.function is aten.cat.default:
        return len(instruction.arguments) > 1 and instruction.arguments[1] == 1 and len(instruction.arguments[0][0].shape) > _COLUMNS_DIM
    if instruction.function not in _CONCATENATIONS:
        return False
    spans, dim = instruction.arguments[-2:]
    return dim == 1 or any(each.dim >= _COLUMNS_DIM for slices in spans for each in slices)


def _num_taps(instruction: Instruction) -> int:
    """Elements of the window of a convolution; those of a window of 3 x 3 for a product without one."""
    call = kernel_call_of(instruction.function)
    if isinstance(call, WeightGradientCall):
        return math.prod(call.weight[2:])
    windows = [slot.shape[2:] for slot in slots_of(instruction) if len(slot.shape) > _COLUMNS_DIM]  # of the weight, and of images
    return math.prod(min(windows, key=math.prod, default=(_RATE_TAPS,)))


def _products(instruction: Instruction) -> list[tuple[Direction, Slot]]:
    """The products of an operator with their results: the gradients of a convolution's image and weight, or what it writes first."""
    if instruction.function is aten.convolution_backward.default:
        directions: tuple[Direction, ...] = ("data", "weight")
        return [(direction, out) for direction, out in zip(directions, instruction.outputs, strict=False) if out is not None]
    # Our kernels of weights' gradients have about the rates of convolutions: 205 calls of a U-Net take 6.7 ms, by these rates 5.5.
    direction: Direction = "data" if isinstance(kernel_call_of(instruction.function), DataGradientCall) else "forward"
    return [(direction, out) for out in (*instruction.outputs, *instruction.writes)[:1] if out is not None]


def _adds_bias(instruction: Instruction) -> bool:
    """True if an operator adds a bias after its convolution in a kernel of its own; cuDNN's fused call and our kernels do not."""
    return instruction.function is aten.convolution.default and len(instruction.arguments) > 2 and instruction.arguments[2] is not None
