"""Backports of functions that the interpreter of Triton before 3.9 lacks. See ``serve_triton``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
from triton.runtime import interpreter


def _index(tensor: Any) -> int:
    return int(tensor.handle.data.item())


def _with_newer_numpy(patch: Callable[..., None]) -> Callable[..., None]:
    """Loop bounds of an array of one element, of which NumPy 2.4 takes no ``int``."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", _index)

    return patched


def _rounded_once(self: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` of fp32: in fp64, where the product is exact and the sum is rounded to odd (Boldo and Melquiond, 2008)."""
    if x.data.dtype != np.float32:
        return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
    product, term = x.data.astype(np.float64) * y.data.astype(np.float64), z.data.astype(np.float64)
    total = product + term
    rounded_term = total - product
    error = (product - (total - rounded_term)) + (term - rounded_term)
    even = (total.view(np.int64) & 1 == 0) & (error != 0)
    total = np.where(even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)


def repair() -> None:
    """Adapt an older Triton: 3.6 (of torch 2.11) does not support NumPy 2.4, and 3.6 to 3.8 (of torch 2.11 to 2.14) round an fma twice."""
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    if release < (3, 7):
        interpreter._patch_lang_tensor = _with_newer_numpy(interpreter._patch_lang_tensor)
    if release < (3, 9):
        interpreter.InterpreterBuilder.create_fma = _rounded_once
