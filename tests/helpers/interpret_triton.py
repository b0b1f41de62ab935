"""Served by ``serve_triton``: run kernels under Triton's interpreter. See ``triton_process.interpret``.

A job is a dictionary: ``run`` names a function below, the rest are its arguments; its result is a tensor, or a list of them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from sft.kernels.dropout_triton import launch_dropout, launch_keep_mask
from sft.kernels.mask_tile import MaskTile
from sft.kernels.philox_triton import philox4x32


class _Numpy:
    """NumPy as the interpreter sees it, with products of matrices that add up in the order of the terms.

    On some CPUs BLAS rounds an element by its place in the matrix. On a GPU it does not, so that tiles have the bits of the whole.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: Any = None) -> npt.NDArray[Any]:
        out: npt.NDArray[Any] = np.multiply(a[..., :, :, None], b[..., None, :, :], dtype=dtype).sum(axis=-2)
        return out


interpreter.np = _Numpy()


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
    philox_kernel[(1,)](words.to(torch.uint32), out, SIZE=len(words))
    return out.to(torch.int64)


def dropout(x: Tensor, tile: MaskTile, block: tuple[int, int] | None) -> Tensor:
    out = torch.full_like(x, float("nan"))
    launch_dropout(x, tile, out, block)
    return out


def keep(tile: MaskTile, block: tuple[int, int] | None) -> Tensor:
    mask = torch.zeros(tile.mask_shape, dtype=torch.uint8).fill_(7).view(torch.bool)
    launch_keep_mask(tile, mask, block)
    return mask


def launch(module: str, function: str, arguments: dict[str, Any], results: list[str]) -> list[Tensor]:
    """Call a launch with named arguments; the arguments that it has written are the result."""
    getattr(importlib.import_module(module), function)(**arguments)
    return [arguments[name] for name in results]


def run(job: dict[str, Any]) -> Any:
    """One job, in which a warning is an error."""
    functions: dict[str, Callable[..., Any]] = {"philox": philox, "dropout": dropout, "keep": keep, "launch": launch}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "invalid value encountered in multiply")  # NumPy, of the infinities that a test drops
        return functions[job.pop("run")](**job)
