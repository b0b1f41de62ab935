"""Sums of slots: in the order of the splits, written or added, in the layout and type of the destination."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.common.errors import InternalError
from tests.helpers.triton_process import interpret, needs_triton


def _in_order(slots: Tensor) -> Tensor:
    total = torch.zeros_like(slots[0])
    for split in slots:
        total = total + split
    return total


def _slots(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def _destination(shape: tuple[int, ...], dtype: torch.dtype, *, channels_last: bool) -> Tensor:
    out = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return out.contiguous(memory_format=formats[len(shape)]) if channels_last else out


@needs_triton
def test_sums_of_weight_and_bias(tmp_path: Path) -> None:
    """Weights of images, volumes and depthwise convolutions, contiguous and channels-last; 300 elements take two programs."""
    jobs: list[dict[str, Any]] = []
    expected: list[list[Tensor]] = []
    for kernel, num_in in (((3, 2), 5), ((2, 1, 3), 4), ((3, 3), 1), ((1, 1), 30)):
        for channels_last in (False, True):
            for add in (False, True):
                slots, vector_slots = _slots(4, 10, *kernel, num_in), _slots(4, 10)
                out = _destination((10, num_in, *kernel), torch.float32, channels_last=channels_last)
                vector_out = torch.arange(20.0)[::2]
                truths = [_in_order(slots).movedim(-1, 1), _in_order(vector_slots)]
                expected.append([truth + start if add else truth for truth, start in zip(truths, (out, vector_out), strict=True)])
                arguments = {"slots": slots, "out": out, "vector_slots": vector_slots, "vector_out": vector_out, "add": add}
                results = ["out", "vector_out"]
                call = {"run": "launch", "module": "sft.kernels.reduce.reduce_triton", "function": "launch_reduce", "results": results}
                jobs.append(call | {"arguments": arguments})
    for truths, results in zip(expected, interpret(jobs, tmp_path), strict=True):
        for truth, result in zip(truths, results, strict=True):
            assert torch.equal(result, truth)


@needs_triton
def test_double_sums_are_rounded_once(tmp_path: Path) -> None:
    """fp64 slots of norms: added in fp64, stored in fp32, fp16 or bf16, which the interpreter truncates."""
    slots = _slots(513, 2, 7, dtype=torch.float64)
    jobs: list[dict[str, Any]] = [
        {
            "run": "launch",
            "module": "sft.kernels.reduce.reduce_triton",
            "function": "launch_reduce",
            "arguments": {"slots": slots, "out": torch.ones(2, 7, 1, 1, dtype=dtype), "add": add},
            "results": ["out"],
        }
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for add in (False, True)
    ]
    for job, (result,) in zip(jobs, interpret(jobs, tmp_path), strict=True):
        truth = _in_order(slots) + (1 if job["arguments"]["add"] else 0)
        tolerance = 2.0**-7 if result.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(result.view(2, 7).double(), truth.to(result.dtype).double(), rtol=tolerance, atol=0)


@needs_triton
def test_destinations_that_are_not_dense_are_refused() -> None:
    from sft.kernels.reduce.reduce_triton import launch_reduce  # here, because it imports Triton

    with pytest.raises(InternalError, match="not dense"):
        launch_reduce(_slots(2, 4, 3, 3, 5), torch.zeros(4, 5, 6, 3)[:, :, ::2])
    with pytest.raises(InternalError, match="not dense"):
        launch_reduce(_slots(2, 4, 5), torch.zeros(5, 4).t())
