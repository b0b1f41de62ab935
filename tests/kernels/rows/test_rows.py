"""Rows moved between buffers: copied and added; memory around the buffers is NaN."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tile_buffers import assert_nothing_else_written, empty_buffer
from tests.helpers.triton_gates import Gate, check_gates, meta_image
from tests.helpers.triton_process import interpret, needs_triton


def _image(rows: int, dtype: torch.dtype = torch.float64, *, seed: int = 0, contiguous: bool = False) -> Tensor:
    """A buffer of random numbers: with rows that are contiguous, or in the middle of NaN."""
    values = torch.randn(2, 5, rows, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if contiguous:
        return values.to(dtype).contiguous(memory_format=torch.channels_last)
    return empty_buffer(2, 5, (rows, 7), dtype).copy_(values)


@needs_triton
def test_interpreted_kernel(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []
    expected: list[tuple[list[Tensor], bool]] = []
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, contiguous, adds in itertools.product(dtypes, (False, True), ((False, False), (True, False))):
        sources = [_image(rows, dtype, seed=rows, contiguous=contiguous) for rows in (1, 3)]
        targets = [_image(rows, dtype, seed=rows + 5, contiguous=contiguous) for rows in (1, 3)]
        sums = [(s.float() + t.float()).to(dtype) if add else s.clone() for s, t, add in zip(sources, targets, adds, strict=True)]
        moves = list(zip(sources, targets, adds, strict=True))
        arguments = {"moves": moves, "block": (4, 4), "targets": targets}
        call = {"run": "launch", "module": "sft.kernels.rows.rows_triton", "function": "launch_move_rows", "results": ["moves"]}
        del arguments["targets"]
        jobs.append(call | {"arguments": arguments})
        expected.append((sums, contiguous))
        if dtype == torch.float32:
            jobs.append(call | {"arguments": {"moves": [(sources[1], _image(3, dtype, seed=9, contiguous=contiguous), False)]}})
            expected.append(([sources[1]], contiguous))
    for (truths, contiguous), (moves,) in zip(expected, interpret(jobs, tmp_path), strict=True):
        for (_, target, add), truth in zip(moves, truths, strict=True):
            if add and target.dtype == torch.bfloat16:  # the interpreter truncates
                torch.testing.assert_close(target, truth, rtol=2.0**-7, atol=0)
            else:
                assert torch.equal(target, truth)
            if not contiguous:
                assert_nothing_else_written(target, (target.dtype, add))


@needs_triton
def test_compiles_ahead_of_time(tmp_path: Path) -> None:
    carried, new, whole = (meta_image(64, torch.bfloat16, (rows, 4096), 2) for rows in (2, 64, 66))
    blocks = (whole[:, :, :2], whole[:, :, 2:])
    panel = [image[:, :, :, 1:-1] for image in (carried, new, *blocks)]
    gates = [
        Gate(
            module="rows.rows_triton",
            launch="launch_move_rows",
            when=(90,),
            arguments={"moves": [(carried, blocks[0], False), (new, blocks[1], False)]},
        ),
        Gate(module="rows.rows_triton", launch="launch_move_rows", arguments={"moves": [(panel[2][..., ::2], panel[0][..., ::2], True)]}),
    ]
    check_gates(gates, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    sources = [_image(2, dtype, contiguous=True).cuda(), _image(5, dtype, seed=1, contiguous=True).cuda()]
    joined = torch.cat(sources, 2).contiguous(memory_format=torch.channels_last)
    blocks = (joined[:, :, :2], joined[:, :, 2:])
    from sft.kernels.rows.rows_triton import launch_move_rows  # here, because it imports Triton

    out = torch.empty_like(joined)
    launch_move_rows([(sources[0], out[:, :, :2], False), (sources[1], out[:, :, 2:], False)])
    assert torch.equal(out, joined)
    targets = [source.clone(memory_format=torch.channels_last) for source in sources]
    launch_move_rows([(operand, target, True) for operand, target in zip(blocks, targets, strict=True)])
    assert all(torch.equal(target, source + source) for target, source in zip(targets, sources, strict=True))
