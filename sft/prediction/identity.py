"""Identity of a prediction: a hash of the network, its weights, the source and the settings, by which an interrupted call is recognised.

- *Network.* Its structure as text, and names, types, shapes and bytes of its parameters and buffers. Code is not part of it.
- *Source.* The pickle of the source, with its settings and views. Arrays and tensors count by their bytes. Files count by path, size and
  time of modification, so a slide is not read for its identity; folders (Zarr) by those of all files in them; URLs by their text and size.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sft.common.errors import InputError, SftError
from sft.common.transform_checks import autocast_dtype
from sft.sources.cached import Cached
from sft.sources.readers.remote import RemotePath

__all__ = ["prediction_identity", "sha256_of_text"]

#: Bytes of an array that are hashed at a time.
_BLOCK_BYTES = 1 << 26


def prediction_identity(model: nn.Module, source: Any, **settings: Any) -> str:
    """Hash of a prediction.

    Args:
        model: the network.
        source: the image.
        settings: further values that decide the result; their texts count.

    Raises:
        InputError: the source cannot be recognised in another process.
    """
    tensors = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    digest = hashlib.sha256(repr((sorted(settings.items()), autocast_dtype(device))).encode())
    digest.update(f"{type(model).__module__}.{type(model).__qualname__} {model}".encode())
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(repr(_tensor_token(value)).encode())
        else:
            digest.update(repr(value).encode())
    try:
        _SourcePickler(digest).dump(source)
    except SftError:
        raise
    except Exception as error:  # pickling runs code of the source
        raise InputError(
            f"resume: {source!r} cannot be recognised in another process ({type(error).__name__}: {error}); give a path, an image of "
            "open_image, an array, or a source that pickles; or leave resume out"
        ) from error
    return digest.hexdigest()


def sha256_of_text(text: str) -> str:
    """SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class _SourcePickler(pickle.Pickler):
    """Pickler into a hash. Arrays, tensors and files are replaced by what identifies them."""

    def __init__(self, digest: Any) -> None:
        super().__init__(_HashFile(digest), protocol=5)
        self.fast = True  # without references to equal objects, which depend on the history of the process

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind != "O":
            return ("array", value.dtype.str, value.shape, _array_digest(value))
        if isinstance(value, torch.Tensor):
            return _tensor_token(value)
        if isinstance(value, Cached):  # of any budget: the pixels are the same
            return ("cached", value.image)
        if isinstance(value, RemotePath):
            return ("url", str(value), value.stat().st_size if value.is_file() else None)
        if isinstance(value, Path) and value.exists():
            return ("file", os.path.realpath(value), *_file_tokens(value))
        return None


class _HashFile:
    """File that hashes what is written."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def write(self, data: Any) -> int:
        """Hash bytes."""
        self._digest.update(data)
        return len(data)


def _file_tokens(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of modification of a file, or of the files in a folder."""
    if path.is_file():
        status = path.stat()
        yield "", status.st_size, status.st_mtime_ns
        return
    for folder, names, files in os.walk(path):
        names.sort()
        for name in sorted(files):
            status = os.stat(os.path.join(folder, name))
            yield os.path.relpath(os.path.join(folder, name), path), status.st_size, status.st_mtime_ns


def _tensor_token(value: torch.Tensor) -> tuple[Any, ...]:
    host = value.detach().cpu().contiguous().reshape(-1)
    return ("tensor", str(value.dtype), tuple(value.shape), _array_digest(host.view(torch.uint8).numpy()))


def _array_digest(array: np.ndarray[Any, Any]) -> str:
    """SHA-256 of the elements in the order of their indices."""
    digest = hashlib.sha256()
    if array.ndim == 0 or not array.size:
        digest.update(array.tobytes())
        return digest.hexdigest()
    step = max(1, _BLOCK_BYTES // max(1, array.nbytes // len(array)))
    for start in range(0, len(array), step):
        digest.update(np.ascontiguousarray(array[start : start + step]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
