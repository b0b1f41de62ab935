"""Calibration of the time model of a GPU: its rates, measured in seconds, and the file that keeps them.

``python -m sft tune`` calibrates the model of the GPU that it runs on, and keeps it with the tables of kernels, for this version of
PyTorch. Plans for a GPU without such a file are ranked by a shipped model (:mod:`sft.planner.cost.gpu_models`). So plans do not depend on
measurements of the moment, and ranks that share an image plan alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from sft.common.atomic_files import atomic_write
from sft.common.dataclass_json import dataclass_from_dict, parse_json_object
from sft.common.errors import InputError
from sft.planner.cost.gpu_models import H100, model_of_device
from sft.planner.cost.gpu_time import ConvolutionRates, GpuModel
from sft.planner.measured.operator_calls import convolution_calls, device_seconds, element_calls, host_calls, host_seconds

__all__ = ["calibrate", "find_model", "model_path", "planning_model", "save_model"]

_FORMAT = 1
#: Channels and columns of the 3 x 3 convolutions of the model, as in networks for images of 2048 columns.
_CONVOLUTIONS = ((3, 64, 2048), (32, 32, 2048), (64, 64, 2048), (128, 128, 1024), (256, 256, 512), (512, 512, 256))
_ROWS = 512
#: Host calls that are averaged for a constant of the model.
_POINTWISE_CALLS = ("add_", "relu_", "copy_", "cat", "threshold_backward", "max_pool2d")
_VIEW_CALLS = ("view (slice)", "view (view)", "empty")
_PRODUCT_CALLS = ("convolution, no bias", "convolution_backward, data", "convolution_backward, weight")
_HOST_CALLS = frozenset((*_POINTWISE_CALLS, *_VIEW_CALLS, *_PRODUCT_CALLS))
#: Interpolation in steps takes about the mean of these: its gradient in fp32 is faster than in half precision.
_GATHER_CALLS = ("max_pool2d, gradient", "bilinear interpolation", "bilinear interpolation, gradient")


def calibrate(device: torch.device, name: str, *, rows: int = _ROWS) -> GpuModel:
    """Measure the rates of a device.

    Args:
        device: the device.
        name: its name in sentences, with an article.
        rows: rows of the images.
    """
    with torch.no_grad():
        host = {key: host_seconds(call, device, 100) for key, call in host_calls(device) if key in _HOST_CALLS}
        call_seconds = _mean(host, _POINTWISE_CALLS)
        convolutions, seconds_by_width = [], {}
        for num_in, num_out, columns in _CONVOLUTIONS:
            seconds = {key: device_seconds(call, device) for key, call in convolution_calls(device, num_in, num_out, rows, columns).items()}
            flops = 2 * 9 * num_in * num_out * rows * columns
            convolutions.append(
                ConvolutionRates(
                    channels=num_in,
                    forward=flops / seconds["forward, no bias"],
                    data=flops / seconds["data"],
                    weight=flops / seconds["weight"],
                )
            )
            seconds_by_width[num_in] = seconds
        elements = {key: count / device_seconds(call, device) for key, count, call in element_calls(device, rows)}
        wide_seconds = seconds_by_width[256]["forward, no bias"]
        image, num_biases = seconds_by_width[64], 64 * rows * 2048
        bias_seconds = image["forward"] - image["forward, no bias"]
        quarter = convolution_calls(device, 64, 64, max(1, rows // 4), 2048)["forward, no bias"]
        floor_seconds = (4 * device_seconds(quarter, device) - image["forward, no bias"]) / 3
        host_ratio = call_seconds / H100.call_seconds
        replayed_seconds = _graph_kernel_seconds(device)
        return replace(
            H100,
            name=name,
            convolutions=tuple(convolutions),
            single_share=_share(device, torch.float32, rows, rows / wide_seconds),
            double_share=_share(device, torch.float64, max(1, rows // 8), rows / wide_seconds),
            bytes_per_second=_copy_rate(device),
            biases_per_second=num_biases / max(bias_seconds, num_biases / elements["copy of columns"]),
            reduced_elements_per_second=elements["sum of rows"],
            pooled_elements_per_second=elements["max_pool2d"],
            gathered_elements_per_second=len(_GATHER_CALLS) / sum(1 / elements[key] for key in _GATHER_CALLS),
            copied_elements_per_second=elements["copy of columns"],
            link_bytes_per_second=_link_rate(device) or H100.link_bytes_per_second,
            num_multiprocessors=_num_multiprocessors(device),
            min_kernel_seconds=2 * replayed_seconds,
            min_replayed_seconds=replayed_seconds,
            min_product_seconds=max(replayed_seconds, floor_seconds),
            call_seconds=call_seconds,
            product_seconds=_mean(host, _PRODUCT_CALLS),
            kernel_call_seconds=host_ratio * H100.kernel_call_seconds,
            view_seconds=_mean(host, _VIEW_CALLS),
            instruction_seconds=host_ratio * H100.instruction_seconds,
            program_seconds=host_ratio * H100.program_seconds,
        )


def _mean(values: Mapping[str, float], names: Sequence[str]) -> float:
    return sum(values[name] for name in names) / len(names)


def _share(device: torch.device, dtype: torch.dtype, rows: int, half_rows_per_second: float) -> float:
    """Rate of a convolution of 256 channels in another type, relative to that of half precision."""
    seconds = device_seconds(convolution_calls(device, 256, 256, rows, 512, dtype)["forward, no bias"], device)
    return min(1.0, rows / seconds / half_rows_per_second)


def _copy_rate(device: torch.device) -> float:
    """Bytes that a copy reads and writes in a second."""
    size = 2**28 if device.type == "cuda" else 2**24
    x, y = (torch.zeros(size, device=device, dtype=torch.uint8) for _ in range(2))
    return 2 * size / device_seconds(lambda: y.copy_(x), device)


def _link_rate(device: torch.device) -> float | None:
    """Bytes that cross the link from page-locked memory in a second, in the slower direction; ``None`` on a CPU."""
    if device.type != "cuda":
        return None
    size = 2**26
    x, pinned = torch.zeros(size, device=device, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8).pin_memory()
    calls = (lambda: x.copy_(pinned, non_blocking=True), lambda: pinned.copy_(x, non_blocking=True))
    return size / max(device_seconds(call, device) for call in calls)


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H100.num_multiprocessors


def _graph_kernel_seconds(device: torch.device) -> float:
    """Seconds of a kernel on few numbers in a CUDA graph; on a CPU, of its call."""
    x, num_kernels = torch.zeros(64, device=device), 200
    if device.type != "cuda":
        return host_seconds(lambda: x.add_(1), device)
    graph = torch.cuda.CUDAGraph()
    x.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(num_kernels):
            x.add_(1)
    return device_seconds(graph.replay, device) / num_kernels


def model_path(folder: Path, device_name: str) -> Path:
    """File of a calibrated model: rates depend on the GPU, and on the libraries of a version of PyTorch."""
    return folder / f"{_slug(device_name)}-torch-{_slug(torch.__version__)}-rates.json"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def save_model(path: Path, model: GpuModel) -> None:
    """Write a calibrated model atomically.

    Raises:
        SourceError: the file cannot be written.
    """
    with atomic_write(path, parents=True) as temporary:
        temporary.write_text(json.dumps({"format": _FORMAT, **asdict(model)}, indent=1) + "\n", encoding="utf-8")


def find_model(folders: Sequence[Path], device_name: str) -> GpuModel | None:
    """The calibrated model of a GPU, from the first folder that has one; ``None`` if no folder has.

    Raises:
        InputError: a file cannot be read, or is damaged.
    """
    for folder in folders:
        path = model_path(folder, device_name)
        if not path.exists():
            continue
        try:
            data = parse_json_object(path.read_text(encoding="utf-8"))
            if data.pop("format", None) != _FORMAT:
                raise InputError(f"it is not of format {_FORMAT}")
            return dataclass_from_dict(GpuModel, data)
        except (OSError, UnicodeDecodeError, InputError) as error:
            raise InputError(f"cannot read the rates of the GPU in {path}: {error}; delete it, or make another with sft tune") from error
    return None


def planning_model(device: torch.device, folders: Sequence[Path]) -> GpuModel:
    """The time model by which plans for a GPU are ranked: calibrated, shipped, or an H100's for a GPU that is not here."""
    if not torch.cuda.is_available():
        return H100
    return find_model(folders, torch.cuda.get_device_name(device)) or model_of_device(device)
