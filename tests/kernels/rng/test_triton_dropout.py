"""The Triton kernels of dropout: the bits of the reference, and limits of resources for sm_80 and sm_90."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from sft.kernels.rng.dropout import MaskKind, dropout, keep_mask
from sft.kernels.rng.dropout_reference import reference_dropout, reference_keep_mask
from sft.kernels.rng.mask_tile import MaskTile
from sft.kernels.rng.philox import seed_tensor
from tests.helpers.triton_process import compile_kernels, interpret, needs_triton

_KINDS: tuple[MaskKind, ...] = get_args(MaskKind)
_MODULE = "sft.kernels.rng.rng_triton"


def _tile(shape: tuple[int, int, int, int], kind: MaskKind = "element", p: float = 0.3) -> MaskTile:
    """A tile at a far position of a large image, with all words of the counter in use."""
    extents = (shape[0] + 2, shape[1], 4_000_000, 70_001)
    origin = (2, 3_000_000, 69_003)
    return MaskTile(shape=shape, extents=extents, origin=origin, seed=2**64 - 5, site=2**32 - 1, draw=3, p=p, kind=kind)


def _input(tile: MaskTile, dtype: torch.dtype, layout: str) -> Tensor:
    """A tile of random numbers, with an infinity, a NaN and negative numbers: channels last, contiguous, or a view."""
    n, c, h, w = tile.shape
    x = torch.randn(n, c, h + 3, w + 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0, 1, 1:3] = torch.tensor([float("inf"), float("nan")])
    if layout != "contiguous":
        x = x.to(memory_format=torch.channels_last)
    x = x[:, :, 1 : h + 1, 1 : w + 1]
    return x if layout == "view" else x.contiguous(memory_format=torch.channels_last if layout == "last" else torch.contiguous_format)


def _assert_same_bits(ours: Tensor, reference: Tensor) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.dtype.itemsize]
    assert torch.equal(ours.isnan(), reference.isnan()), "NaNs"
    ours, reference = (t.nan_to_num(1.0).contiguous().view(bits) for t in (ours, reference))
    assert torch.equal(ours, reference), f"{int((ours != reference).sum())} of {ours.numel()} elements differ"


def _reference(x: Tensor, tile: MaskTile) -> Tensor:
    out = torch.full_like(x, float("nan"))
    reference_dropout(x, tile, out)
    return out


@needs_triton
def test_interpreted_kernels_give_the_bits_of_the_reference(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []
    shapes = [(2, 7, 2, 9), (1, 1, 3, 4), (1, 3, 1, 33), (2, 130, 1, 2), (3, 10, 1, 1)]
    blocks = [None, (4, 4), (2, 8)]
    for index, (shape, kind) in enumerate((shape, kind) for shape in shapes for kind in _KINDS):
        tile = _tile(shape, kind)
        block, layout = blocks[index % 3], ("last", "contiguous", "view")[index % 3]
        dtype = (torch.float32, torch.float64, torch.float16)[index // 3 % 3]
        jobs.append({"run": "dropout", "x": _input(tile, dtype, layout), "tile": tile, "block": block if shape[1] < 100 else None})
        if index % 3 == 0:
            seed = seed_tensor(2**64 - 5, torch.device("cpu"))
            jobs.append({"run": "keep", "tile": replace(tile, seed=seed) if index % 2 else tile, "block": None})
    for p in (0.0, 2**-32, 0.5, 1 - 2**-32, 1.0):
        tile = _tile((1, 5, 2, 6), p=p)
        jobs.append({"run": "dropout", "x": _input(tile, torch.float32, "view"), "tile": tile, "block": None})
        jobs.append({"run": "keep", "tile": tile, "block": (4, 8)})
    for job, result in zip(jobs, interpret(jobs, tmp_path), strict=True):
        if job["run"] == "keep":
            reference = reference_keep_mask(replace(job["tile"], seed=2**64 - 5), torch.device("cpu"))
            assert torch.equal(result, reference), job
        else:
            _assert_same_bits(result, _reference(job["x"], job["tile"]))


@needs_triton
def test_interpreted_bfloat16(tmp_path: Path) -> None:
    """The interpreter truncates to bfloat16, a GPU rounds: the mask is the same, values are within one step, 2**-7."""
    tile = _tile((1, 9, 2, 17), p=0.25)
    x = _input(tile, torch.bfloat16, "last").nan_to_num(1.0, posinf=2.0)
    (result,) = interpret([{"run": "dropout", "x": x, "tile": tile, "block": None}], tmp_path)
    reference = _reference(x, tile)
    assert torch.equal(result == 0, reference == 0)
    torch.testing.assert_close(result.double(), reference.double(), rtol=2**-7, atol=0)


def _compilation(kernel: str, dtype: str, last: bool, kind: MaskKind, target: str) -> dict[str, Any]:
    """Compilation job of ``launch_dropout`` for channels-last (``last``) or contiguous tiles."""
    geometry = ["num_channels", "num_rows", "num_columns"]
    rule = ["start", "index_n", "index_g", "index_h", "index_w", "site", "draw", "threshold"]
    constants: dict[str, Any] = {"COLUMNS": 16 if last else 512, "CHANNELS": 128 if last else 4}
    signature = dict.fromkeys(geometry, "i32") | dict.fromkeys(rule, "i64")
    if kernel == "keep_kernel":
        pointers = {"p_mask": "*u8", "p_seed": "*i64"}
    else:
        pointers = {"p_x": f"*{dtype}", "p_out": f"*{dtype}", "p_seed": "*i64"}
        strides = [f"{name}_{axis}" for name in ("x", "out") for axis in "nchw"]
        unit = {"x_c": 1, "out_c": 1} if last else {"x_w": 1, "out_w": 1}
        signature |= dict.fromkeys(strides, "i32") | {"scale": "fp64"}
        constants |= unit | {"PER_COLUMN": kind == "element", "PER_CHANNEL": kind in ("element", "channel")}
        constants |= {"COMPUTE": "tl.float64" if dtype == "fp64" else "tl.float32"}
        geometry += [name for name in strides if name not in unit]
    aligned = [*pointers, *(name for name in geometry if name not in ("num_rows", "num_columns"))]
    job = {"module": _MODULE, "kernel": kernel, "target": target, "aligned": aligned}
    return job | {"signature": signature | pointers, "constants": constants}


_VARIANTS: list[tuple[str, str, bool, MaskKind]] = [
    ("dropout_kernel", "bf16", True, "element"),
    ("dropout_kernel", "bf16", False, "element"),
    ("dropout_kernel", "fp32", True, "element"),
    ("dropout_kernel", "fp64", True, "element"),
    ("dropout_kernel", "bf16", True, "channel"),
    ("dropout_kernel", "bf16", True, "row"),
    ("keep_kernel", "", False, "element"),
]


@needs_triton
@pytest.mark.parametrize("variant", _VARIANTS, ids=lambda variant: " ".join(map(str, variant)))
def test_compiles_ahead_of_time(variant: tuple[str, str, bool, MaskKind], tmp_path: Path) -> None:
    """For sm_80 and sm_90: no spills, few registers, little shared memory, and wide loads where channels are contiguous."""
    jobs = [_compilation(*variant, target) for target in ("sm_80", "sm_90")]
    if variant == _VARIANTS[0]:
        jobs.append(jobs[0] | {"constants": jobs[0]["constants"] | {"num_channels": 1}, "aligned": ["p_x", "p_out"]})
    for target, cost in zip(("sm_80", "sm_90"), compile_kernels(jobs, tmp_path), strict=False):
        assert cost["binary_bytes"] > 0 and cost["spilled_bytes"] == 0, (target, cost)
        assert cost["registers"] <= 80, (target, cost)
        assert cost["shared_bytes"] <= 8192, (target, cost)
        if variant[0] == "dropout_kernel" and variant[2]:
            assert cost["wide_loads"] == cost["loads"] - 1 > 0, (target, cost)  # one more, of the seed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["last", "contiguous", "view"])
@pytest.mark.parametrize("kind", _KINDS)
def test_on_a_gpu(kind: MaskKind, layout: str, dtype: torch.dtype) -> None:
    """Output, gradient and mask have the bits that the CPU's reference gives."""
    for p in (0.0, 0.3, 1.0):
        tile = _tile((2, 37, 5, 131), kind, p)
        arguments: Any = {name: getattr(tile, name) for name in ("extents", "origin", "seed", "site", "draw", "p", "kind")}
        x = _input(tile, dtype, layout)
        z = x.cuda().detach().requires_grad_()
        y = dropout(z, **arguments)
        (dz,) = torch.autograd.grad(y, z, x.cuda())
        _assert_same_bits(y.detach().cpu(), _reference(x, tile))
        _assert_same_bits(dz.cpu(), _reference(x, tile))
        on_device = dropout(z.detach(), **arguments | {"seed": seed_tensor(2**64 - 5, z.device)})
        _assert_same_bits(on_device.cpu(), y.detach().cpu())
        mask = keep_mask(tile.shape, device="cuda", **arguments)
        assert torch.equal(mask.cpu(), keep_mask(tile.shape, **arguments))
