"""Rows moved between buffers: joined, split and added, in memory that is NaN all around."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sft import InputError
from sft.kernels.rows.rows import RowMove, join_rows, move_rows, split_rows
from tests.helpers.tile_buffers import assert_nothing_else_written, empty_buffer
from tests.helpers.triton_gates import Gate, check_gates, meta_image
from tests.helpers.triton_process import interpret, needs_triton


def _image(rows: int, dtype: torch.dtype = torch.float64, *, seed: int = 0, contiguous: bool = False) -> Tensor:
    """A buffer of random numbers: with rows that are contiguous, or in the middle of NaN."""
    values = torch.randn(2, 5, rows, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if contiguous:
        return values.to(dtype).contiguous(memory_format=torch.channels_last)
    return empty_buffer(2, 5, (rows, 7), dtype).copy_(values)


@pytest.mark.parametrize(("kept", "new"), [(2, 3), (0, 4), (1, 0)])
def test_join_and_split(kept: int, new: int) -> None:
    parts = [_image(kept).requires_grad_(), _image(new, seed=1).requires_grad_()]
    joined = join_rows(*parts)
    assert torch.equal(joined, torch.cat(parts, 2)) and joined.is_contiguous(memory_format=torch.channels_last)
    gradient = _image(kept + new, seed=2)
    shares = torch.autograd.grad(joined, parts, gradient)
    assert torch.equal(torch.cat(shares, 2), gradient)
    held = [part.detach().clone(memory_format=torch.channels_last) for part in parts]
    split_rows(gradient, *held, add=(True, False))
    assert torch.equal(held[0], parts[0] + shares[0]) and torch.equal(held[1], shares[1])


def test_rows_of_one_buffer() -> None:
    """The last rows of a strip's buffer become the first of the next, in every sample, where that is safe."""
    buffer = _image(6)
    last = buffer[:, :, 4:].clone()
    move_rows(RowMove(source=buffer[:, :, 4:], target=buffer[:, :, :2]))
    assert torch.equal(buffer[:, :, :2], last)
    with pytest.raises(InputError, match="share memory"):
        RowMove(
            source=buffer[:, :, 3:],
            target=buffer[:, :, :3][:, :, :3].as_strided((2, 5, 3, 7), buffer.stride(), buffer[:, :, 1:].storage_offset()),
        )
    with pytest.raises(InputError, match="one move writes what the other reads or writes"):
        move_rows(RowMove(source=buffer[:, :, 4:], target=buffer[:, :, :2]), RowMove(source=buffer[:, :, 1:2], target=_image(1)))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match=r"the source is \(\(2, 5, 2, 7\), torch.float64\), the target \(\(2, 5, 3, 7\)"):
        RowMove(source=_image(2), target=_image(3))
    with pytest.raises(InputError, match="the target has strides"):
        RowMove(source=_image(2), target=_image(2).contiguous())
    with pytest.raises(InputError, match="do not make"):
        join_rows(_image(2), _image(3), out=_image(6))
    with pytest.raises(InputError, match="two moves differ in samples"):
        move_rows(RowMove(source=_image(1), target=_image(1)), RowMove(source=_image(1).float(), target=_image(1).float()))


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
    kept, new, whole = (meta_image(64, torch.bfloat16, (rows, 4096), 2) for rows in (2, 64, 66))
    parts = (whole[:, :, :2], whole[:, :, 2:])
    panel = [image[:, :, :, 1:-1] for image in (kept, new, *parts)]
    gates = [
        Gate(
            module="rows.rows_triton",
            launch="launch_move_rows",
            when=(90,),
            arguments={"moves": [(kept, parts[0], False), (new, parts[1], False)]},
        ),
        Gate(module="rows.rows_triton", launch="launch_move_rows", arguments={"moves": [(panel[2][..., ::2], panel[0][..., ::2], True)]}),
    ]
    check_gates(gates, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    kept, new = _image(2, dtype).cuda(), _image(5, dtype, seed=1).cuda()
    assert torch.equal(join_rows(kept, new), torch.cat([kept, new], 2))
    held = [kept.clone(memory_format=torch.channels_last), new.clone(memory_format=torch.channels_last)]
    split_rows(join_rows(kept, new), *held)
    assert torch.equal(held[0], kept + kept) and torch.equal(held[1], new + new)
