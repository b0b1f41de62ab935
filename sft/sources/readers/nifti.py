"""NIfTI volumes, read in slabs of slices.

The file's last spatial axis is the slowest, so slices along it are contiguous: it is the depth here, and a volume is ``[channels, depth,
height, width]``, as networks take it. Voxels keep the order in which they are stored; ``orientation`` says which way that is. Numbers are
scaled as the header says (slope and intercept).

A compressed file (``.nii.gz``) can only be read from its start: in slabs forwards it is decompressed once, backwards once for every slab.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.common.errors import InputError, SftError, SourceError, reason_text
from sft.common.interval import Interval
from sft.common.untrusted.foreign_files import file_format, format_remedy
from sft.sources.arrays import ArrayImage
from sft.sources.image import missing_extra

__all__ = ["NiftiVolume"]

_SLAB_BYTES = 64 << 20


class NiftiVolume:
    """NIfTI file as a volume. Each process opens the file for itself, at its first read; only the path is pickled.

    Args:
        path: a ``.nii`` or ``.nii.gz`` file with three spatial axes; further axes count as channels.

    Raises:
        SourceError: the file does not exist. Other errors are raised at the first use.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._opened: tuple[int, Any] | None = None
        if not self.path.exists():
            raise SourceError(f"cannot open {self.path}: there is no such file. Check the path.")

    def __repr__(self) -> str:
        return f"NiftiVolume({str(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def close(self) -> None:
        """Let go of the file; a later read opens it again."""
        self._opened = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(channels, depth, height, width)``."""
        width, height, depth, *more = (int(extent) for extent in self._image().shape)
        return int(np.prod(more, dtype=int)), depth, height, width

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Millimetres per voxel along depth, height and width."""
        width, height, depth = (float(size) for size in self._image().header.get_zooms()[:3])
        return depth, height, width

    @property
    def affine(self) -> npt.NDArray[np.float64]:
        """Affine map from (column, row, slice, 1) to millimetres in the patient, 4 x 4, as stored."""
        return np.asarray(self._image().affine, np.float64)

    @property
    def orientation(self) -> str:
        """Directions of width, height and depth in the patient, such as ``"RAS"``: right, front, up."""
        import nibabel  # the file is open: it is there

        names: Any = nibabel.aff2axcodes
        return "".join(code or "?" for code in names(self.affine))

    def read(self, slices: Interval) -> npt.NDArray[np.float32]:
        """Slices as float32 ``[channels, slices, height, width]``.

        Raises:
            InputError: slices that the volume does not have.
            SourceError: they cannot be read.
        """
        channels, depth, height, width = self.shape
        if not slices or not Interval(0, depth).contains(slices):
            raise InputError(f"cannot read slices [{slices.start}, {slices.stop}) of {self}: it has {depth}. Stay inside them.")
        try:
            voxels = np.asarray(self._image().dataobj[:, :, slices.start : slices.stop], np.float32)
        except Exception as error:  # a damaged file raises almost anything
            self._opened = None
            raise SourceError(
                f"cannot read slices [{slices.start}, {slices.stop}) of {self.path}: {type(error).__name__}: "
                f"{reason_text(error)}. The file is cut "
                "short or damaged; copy it again."
            ) from error
        return np.ascontiguousarray(voxels.reshape(width, height, len(slices), channels, order="F").T)

    def load_tensor(self, *, mean: float = 0.0, std: float = 1.0, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """The volume as ``(voxel - mean) / std``, read slab by slab: at most one slab in addition to the result.

        Args:
            mean: in units of the voxels.
            std: in units of the voxels, above 0.
            dtype: floating-point type of the result. Default: `torch.float32`
            out: destination, such as a tensor on a mapped file. Default: `None` (a new tensor)

        Returns:
            Tensor of shape ``[1, channels, depth, height, width]`` on the CPU.

        Raises:
            InputError: an argument is wrong.
            SourceError: the file cannot be read.
        """
        channels, depth, height, width = self.shape
        if not dtype.is_floating_point or not 0 < std < math.inf or not math.isfinite(mean):
            raise InputError(f"cannot load {self} as {dtype} with mean {mean} and std {std}: use a floating-point dtype and a std above 0.")
        result = torch.empty(1, channels, depth, height, width, dtype=dtype, device="cpu") if out is None else out
        if tuple(result.shape) != (1, channels, depth, height, width):
            raise InputError(f"cannot load {self} into shape {tuple(result.shape)}: it has {(1, channels, depth, height, width)}.")
        step = max(1, _SLAB_BYTES // (4 * channels * height * width))
        for start in range(0, depth, step):
            slices = Interval(start, min(start + step, depth))
            slab = torch.from_numpy(self.read(slices)).to(torch.promote_types(dtype, torch.float32))
            result[0, :, slices.start : slices.stop] = slab.sub_(mean).div_(std)
        return result

    def plane(self, position: int, *, window: Sequence[float], channel: int = 0) -> ArrayImage:
        """One slice as a grey image.

        Args:
            position: index of the slice.
            window: voxel values that become 0 and 255; values outside are clipped.
            channel: of several. Default: 0

        Raises:
            InputError: the slice or channel does not exist, or the window is empty.
            SourceError: it cannot be read.
        """
        low, high = window
        if not low < high or not 0 <= index(channel) < self.shape[0]:
            raise InputError(f"cannot show channel {channel} of {self} in the window {(low, high)}: low must be below high.")
        voxels = self.read(Interval(index(position), index(position) + 1))[channel, 0]
        grey = np.rint(np.clip((voxels - low) / (high - low), 0, 1) * 255).astype(np.uint8)
        _, mm_high, mm_wide = self.spacing_mm
        return ArrayImage(grey, mpp=(1000 * mm_wide, 1000 * mm_high), background=(0,))

    def _image(self) -> Any:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            opened = self._opened = os.getpid(), _load_nifti(self.path)
        return opened[1]


def _load_nifti(path: Path) -> Any:
    try:
        import nibabel
    except ImportError as error:
        raise missing_extra(f"open {path}", "volume", error) from error
    try:
        # The file stays open: a compressed one would be read from its start for every slab.
        image: Any = nibabel.load(path, keep_file_open=True)
        if len(image.shape) < 3:
            raise SourceError(f"cannot use {path} as a volume: it has shape {image.shape}. Give a file with three spatial axes.")
        if np.dtype(image.get_data_dtype()).kind not in "iufb":
            raise SourceError(f"cannot use {path} as a volume: its voxels are {image.get_data_dtype()}, not real numbers. Convert them.")
    except SftError:
        raise
    except Exception as error:
        num_bytes = path.stat().st_size if path.exists() else 0
        remedy = format_remedy(file_format(path)) if path.is_file() else ""
        raise SourceError(
            f"cannot open {path} ({num_bytes} bytes): {reason_text(error)}. "
            + (remedy or "Either no NIfTI file, or cut short; compare its size with the original and copy it again.")
        ) from error
    return image
