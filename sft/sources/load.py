"""From an image source to a normalised tensor, strip by strip.

The obvious one-liner (read everything, convert, permute, subtract, divide) holds the image four or five times over:
as bytes, as floats, and once for every step of the arithmetic.  At 20,000 x 20,000 px each float copy is 4.8 GB.  Here
the result is allocated once and filled in place, so next to it there is never more than one strip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sft.errors import InputError
from sft.sources.image import Image, read_strips

__all__ = ["load_tensor"]

_NUM_CHANNELS = 3


def load_tensor(
    image: Image,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    rows: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Read a whole RGB image as ``(pixel / 255 - mean) / std``.

    Args:
        image: an image with three channels.
        mean: of each channel, in units of 0..1.
        std: standard deviation of each channel, in units of 0..1.
        dtype: floating-point type of the result.  Default: `torch.float32`
        rows: rows read at a time; a multiple of the file's tile height decodes every tile once.  Default: 256
        progress: called with (rows read, rows in all) after every strip.  Default: `None`

    Returns:
        Tensor of shape ``[1, 3, height, width]`` on the CPU.

    Raises:
        InputError: an argument is wrong or the image does not have three channels.
        SourceError: the pixels cannot be read.
    """
    if not dtype.is_floating_point:
        raise InputError(f"cannot load an image as {dtype}: normalised pixels are fractions. Use a floating-point dtype.")
    if len(mean) != _NUM_CHANNELS or len(std) != _NUM_CHANNELS or min(std) <= 0:
        raise InputError(
            f"cannot normalise with mean {tuple(mean)} and std {tuple(std)}: an RGB image needs "
            f"{_NUM_CHANNELS} values of each, every std above 0."
        )
    # Subtract and divide in float32 whatever the result's type: a strip of bfloat16 pixels would be rounded three
    # times.
    work_dtype = torch.promote_types(dtype, torch.float32)
    shift = torch.tensor(mean, dtype=work_dtype, device="cpu").mul_(255).view(-1, 1, 1)
    scale = torch.tensor(std, dtype=work_dtype, device="cpu").mul_(255).view(-1, 1, 1)

    height_px, width_px = image.height_px, image.width_px
    tensor = torch.empty(1, _NUM_CHANNELS, height_px, width_px, dtype=dtype, device="cpu")
    top = 0
    for pixels in read_strips(image, rows):
        if pixels.ndim != 3 or pixels.shape[2] != _NUM_CHANNELS:
            raise InputError(
                f"cannot load pixels of shape {pixels.shape}: expected [height, width, {_NUM_CHANNELS}]. Convert the source to RGB."
            )
        bottom = top + pixels.shape[0]
        strip = torch.from_numpy(pixels).permute(2, 0, 1).to(work_dtype)
        tensor[0, :, top:bottom].copy_(strip.sub_(shift).div_(scale))
        top = bottom
        if progress is not None:
            progress(top, height_px)
    return tensor
