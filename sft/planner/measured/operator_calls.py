"""Calls of which a time model of a GPU consists, and their seconds on the host and on the device.

Host seconds are those of a call that returns while the device still works, over many calls on tensors so small that the host is the slower
of the two. Device seconds come from CUDA events around a sequence of calls that the host issues ahead of the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sft.torch_runtime.profiling import synchronize_device

__all__ = ["convolution_calls", "convolution_operands", "device_seconds", "element_calls", "host_calls", "host_seconds"]

aten = torch.ops.aten

#: Geometry of the convolutions after image, weight and bias.
_GEOMETRY = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)


def host_seconds(call: Callable[[], object], device: torch.device, num_calls: int = 300) -> float:
    """Host seconds of a call: the least of five rounds, after one that does not count."""
    rounds: list[float] = []
    for _ in range(6):
        synchronize_device(device)
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        rounds.append((time.perf_counter() - start) / num_calls)
    synchronize_device(device)
    return min(rounds[1:])


def device_seconds(call: Callable[[], object], device: torch.device, *, least_seconds: float = 2e-3) -> float:
    """Device seconds of a call: the median of five sequences of calls, each of which takes the least seconds."""
    if device.type != "cuda":
        return host_seconds(call, device, 1)
    call()
    repeats, rounds = 1, list[float]()
    while len(rounds) < 5:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        synchronize_device(device)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        synchronize_device(device)
        seconds = float(start.elapsed_time(end)) / 1e3
        if seconds < least_seconds and repeats < 400:
            repeats = min(400, max(2 * repeats, int(repeats * least_seconds / max(seconds, 1e-6))))
            continue
        rounds.append(seconds / repeats)
    return statistics.median(rounds)


def _image(device: torch.device, channels: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(1, channels, rows, columns, device=device).to(dtype).contiguous(memory_format=torch.channels_last)


def host_calls(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of the programs of strips, on tiny tensors, channels last."""
    x, y, mean = _image(device, 64, 4, 8), _image(device, 64, 4, 8), torch.ones(64, device=device)
    weight = torch.zeros(64, 64, 3, 3, device=device, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    bias, matrix = torch.zeros(64, device=device, dtype=torch.bfloat16), torch.zeros(64, 64, device=device, dtype=torch.bfloat16)
    yield "empty", lambda: aten.empty_like(x)
    yield "view (slice)", lambda: aten.slice(x, 2, 1, 3)
    yield "view (view)", lambda: aten.view(matrix, [4096])
    yield "add", lambda: aten.add(x, y)
    yield "add_", lambda: aten.add_(x, y)
    yield "relu_", lambda: aten.relu_(x)
    yield "copy_", lambda: aten.copy_(x, y)
    yield "copy_ of a slice", lambda: aten.copy_(aten.slice(x, 2, 1, 3), aten.slice(y, 2, 1, 3))
    yield "cat", lambda: aten.cat([x, y], 2)
    yield "pad", lambda: aten.constant_pad_nd(x, [1, 1, 1, 1])
    yield "threshold_backward", lambda: aten.threshold_backward(x, y, 0)
    yield "max_pool2d", lambda: aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    yield "batch_norm, evaluation", lambda: aten.native_batch_norm(x, mean, mean, mean, mean, False, 0.1, 1e-5)
    yield "batch_norm, training", lambda: aten.native_batch_norm(x, mean, mean, mean, mean, True, 0.1, 1e-5)
    yield "sum", lambda: aten.sum(x, [0, 2, 3])
    yield "mm", lambda: aten.mm(matrix, matrix)
    yield "addmm", lambda: aten.addmm(bias, matrix, matrix)
    yield "convolution", lambda: aten.convolution(x, weight, bias, *_GEOMETRY)
    yield "convolution, no bias", lambda: aten.convolution(x, weight, None, *_GEOMETRY)
    for name, mask in (("data", [True, False, False]), ("weight", [False, True, False]), ("both and bias", [True, True, True])):
        call = _Backward(grad=y, image=x, weight=weight, mask=mask)
        yield f"convolution_backward, {name}", call


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """The call of a convolution's gradients.

    Attributes:
        grad: gradient of the result.
        image: the image.
        weight: the weight.
        mask: the gradients that are computed: of the image, the weight and the bias.
    """

    grad: Tensor
    image: Tensor
    weight: Tensor
    mask: list[bool]

    def __call__(self) -> object:
        return aten.convolution_backward(self.grad, self.image, self.weight, [len(self.weight)], *_GEOMETRY, self.mask)


def convolution_operands(
    device: torch.device, num_in: int, num_out: int, rows: int, columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Image, weight, bias and gradient of the result of a 3 x 3 convolution, channels last."""
    x, y = _image(device, num_in, rows, columns, dtype), _image(device, num_out, rows, columns, dtype)
    weight = torch.randn(num_out, num_in, 3, 3, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    return x, weight, torch.zeros(num_out, device=device, dtype=dtype), y


def convolution_calls(
    device: torch.device, num_in: int, num_out: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Callable[[], object]]:
    """A 3 x 3 convolution with and without bias, and its gradients."""
    x, weight, bias, y = convolution_operands(device, num_in, num_out, rows, columns, dtype)
    return {
        "forward": lambda: aten.convolution(x, weight, bias, *_GEOMETRY),
        "forward, no bias": lambda: aten.convolution(x, weight, None, *_GEOMETRY),
        "data": _Backward(grad=y, image=x, weight=weight, mask=[True, False, False]),
        "weight": _Backward(grad=y, image=x, weight=weight, mask=[False, True, False]),
        "bias": _Backward(grad=y, image=x, weight=weight, mask=[False, False, True]),
    }


def element_calls(device: torch.device, rows: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Operators that address elements one by one: name, elements of the larger side, and call."""
    x = _image(device, 64, rows, 2048)
    num_elements, half = x.numel(), [rows // 2, 1024]
    pooled, indices = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    yield "max_pool2d", num_elements, lambda: aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    geometry = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    yield "max_pool2d, gradient", num_elements, lambda: aten.max_pool2d_with_indices_backward(pooled, x, *geometry, indices)
    yield "bilinear interpolation", num_elements, lambda: aten.upsample_bilinear2d(pooled, [rows, 2048], False)
    shape = [1, 64, *half]
    yield "bilinear interpolation, gradient", num_elements, lambda: aten.upsample_bilinear2d_backward(x, [rows, 2048], shape, False)
    wide = _image(device, 64, rows, 2056)
    yield "copy of columns", num_elements, lambda: wide.narrow(3, 4, 2048).copy_(x)
    yield "sum of rows", num_elements, lambda: aten.sum(x, [0, 2, 3])
