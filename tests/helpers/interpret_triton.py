"""Kernels under Triton's interpreter, or on a GPU, served by ``serve_triton``. See ``triton_process.interpret``.

A job is a dictionary: ``run`` names a function below, the rest are its arguments; its result is a tensor, or a list of them.
"""

from __future__ import annotations

import copy
import importlib
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from sft.kernels.rng.mask_tile import MaskTile
from sft.kernels.rng.rng_triton import launch_dropout, launch_keep_mask, philox4x32
from tests.helpers.tensor_moves import StorageMoves, map_tensors


class _Numpy:
    """NumPy for the interpreter, with matrix products that add terms in order.

    On some CPUs the rounding of BLAS depends on an element's position in the matrix. On a GPU it does not, so that tiles have the bits of
    the full image.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: Any = None) -> npt.NDArray[Any]:
        out: npt.NDArray[Any] = np.multiply(a[..., :, :, None], b[..., None, :, :], dtype=dtype).sum(axis=-2)
        return out


interpreter.np = _Numpy()
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DEVICE = "cpu" if _IS_INTERPRETED else "cuda"


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call a function that writes to its arguments; compiled kernels get copies on the GPU, which are copied back."""
    if _IS_INTERPRETED:
        function(**arguments)
        return
    moves = StorageMoves("cuda")
    function(**map_tensors(arguments, moves.move))
    moves.copy_back()


@triton.jit
def philox_kernel(p_words, p_out, SIZE: tl.constexpr):
    """Rows of six words, counter and key, to rows of four."""
    row = tl.arange(0, SIZE)
    o_in = p_words + row * 6
    c0, c1, c2, c3 = tl.load(o_in), tl.load(o_in + 1), tl.load(o_in + 2), tl.load(o_in + 3)
    w0, w1, w2, w3 = philox4x32(c0, c1, c2, c3, tl.load(o_in + 4), tl.load(o_in + 5))
    o_out = p_out + row * 4
    tl.store(o_out, w0)
    tl.store(o_out + 1, w1)
    tl.store(o_out + 2, w2)
    tl.store(o_out + 3, w3)


def philox(words: Tensor) -> Tensor:
    """Philox of each row (four words of counter, two of key) of an int64 tensor; the number of rows is a power of two."""
    out = torch.zeros(len(words), 4, dtype=torch.uint32)
    _call(lambda words, out: philox_kernel[(1,)](words, out, SIZE=len(words)), {"words": words.to(torch.uint32), "out": out})
    return out.to(torch.int64)


def dropout(x: Tensor, tile: MaskTile, block: tuple[int, int] | None) -> Tensor:
    out = torch.full_like(x, float("nan"))
    _call(launch_dropout, {"x": x, "tile": tile, "out": out, "block": block})
    return out


def keep(tile: MaskTile, block: tuple[int, int] | None) -> Tensor:
    mask = torch.zeros(tile.mask_shape, dtype=torch.uint8).fill_(7).view(torch.bool)
    _call(launch_keep_mask, {"tile": tile, "mask": mask, "block": block})
    return mask


def launch(module: str, function: str, arguments: dict[str, Any], results: list[str], affected: bool = False) -> list[Tensor]:
    """Call a launch with named arguments, or as on a GPU with wrong products of computed operands; returns the written tensors."""
    called = getattr(importlib.import_module(module), function)
    with patch.object(importlib.import_module(module), "can_compute_operands", lambda device: False) if affected else nullcontext():
        _call(called, arguments)
    return [arguments[name] for name in results]


def train(kind: str, settings: dict[str, Any], backends: list[str], dtype: torch.dtype, two_phase: bool) -> tuple[list[Tensor], list[int]]:
    """Two steps with each backend of `StreamedOptimizer`, which hand the state on, or with ``"torch"`` throughout: ``torch.optim``.

    Square roots of PyTorch are rounded to nearest, as those of the kernels are.

    Returns:
        The parameters at the end, those of repeated blocks stacked; and the numbers of updates by kernels with each backend.
    """
    import sft  # imported here: other jobs need only kernels
    from sft.kernels.optim import optimizers_triton as adamw_triton
    from sft.kernels.optim import optimizers_triton as sgd_triton

    torch.manual_seed(0)
    repeat = sft.nn.Repeat(lambda: torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()), 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), repeat).to(_DEVICE, dtype)
    counts: list[int] = []

    def counted(launched: Callable[..., None]) -> Callable[..., None]:
        def count(*arguments: Any, **keywords: Any) -> None:
            counts[-1] += 1
            launched(*arguments, **keywords)

        return count

    def rounded(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
        root = (tensor.double() ** 0.5).to(tensor.dtype)
        return root if out is None else out.copy_(root)

    optimizer: Any = None
    if backends[0] == "torch":
        model = torch.nn.Sequential(model[0], repeat.unstacked())
        made = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
        optimizer = made(model.parameters(), foreach=False, **settings)
    else:
        repeat.stream("4KiB")
    with (
        patch.object(torch, "sqrt", rounded),
        patch.object(Tensor, "sqrt", rounded),
        patch.object(sgd_triton, "launch_sgd", counted(sgd_triton.launch_sgd)),
        patch.object(adamw_triton, "launch_adamw", counted(adamw_triton.launch_adamw)),
    ):
        for turn, backend in enumerate(backends):
            counts.append(0)
            if backend != "torch":
                chosen: Any = {"update": kind, "backend": backend, "two_phase": two_phase}
                state = None
                if turn:
                    state = copy.deepcopy(optimizer.state_dict())
                    optimizer.close()
                optimizer = sft.StreamedOptimizer(model, **chosen, **settings)
                if state is not None:
                    optimizer.load_state_dict(state)
            for step in range(2):
                x = torch.randn(2, 3, generator=torch.Generator().manual_seed(2 * turn + step)).to(_DEVICE, dtype)
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    if backends[0] != "torch":
        return [_on_host(param) for param in model.parameters()], counts
    first, blocks = model.children()
    stacked = [torch.stack(own) for own in zip(*(block.parameters() for block in blocks.children()), strict=True)]
    return [_on_host(param) for param in (*first.parameters(), *stacked)], counts


def _on_host(param: Tensor) -> Tensor:
    return param.detach().to("cpu", copy=True)


def run(job: dict[str, Any]) -> Any:
    """Run one job, in which a warning is an error."""
    functions: dict[str, Callable[..., Any]] = {"philox": philox, "dropout": dropout, "keep": keep, "launch": launch, "train": train}
    with warnings.catch_warnings():
        if _IS_INTERPRETED:
            warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "invalid value encountered in multiply")  # of NumPy, about infinities that a test drops
        return functions[job.pop("run")](**job)
