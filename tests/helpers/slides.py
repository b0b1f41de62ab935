"""Small slide files of known pixels, as scanners and converters write them, and damage at known positions."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SLIDE", "SLIDE_SIZE", "decode_threads", "open_files", "overwrite_tile", "tissue_like", "write_slide"]

Pixels = npt.NDArray[np.uint8]

SLIDE = Path(__file__).resolve().parents[2] / "examples" / "data" / "CMU-1-Small-Region.svs"
SLIDE_SIZE = 2220, 2967


def tissue_like(height: int, width: int, seed: int = 0) -> Pixels:
    """Smooth pixels with some noise, for lossy codecs."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [127 + 90 * np.sin(x / (7 + 3 * c) + c) * np.cos(y / (11 + 2 * c)) for c in range(3)]
    return np.clip(np.stack(waves, axis=-1) + rng.normal(0, 9, (height, width, 3)), 0, 255).astype(np.uint8)


def write_slide(
    path: Path, pixels: Pixels, *, num_levels: int = 1, aperio: bool = False, mpp: float | None = 0.5, tile_px: int = 64, **options: Any
) -> list[Pixels]:
    """Write a pyramid of tiles; each level takes every second pixel of the one before. Returns the levels' pixels before compression.

    Args:
        path: of the file.
        pixels: ``[height, width, 3]`` or ``[height, width]``.
        num_levels: of the pyramid.
        aperio: with the description that makes it an SVS.
        mpp: micrometres per px, in the description or in the tags; None leaves it out.
        tile_px: side of a tile.
        options: of ``tifffile.TiffWriter.write``, such as ``compression="jpeg"``.
    """
    import tifffile

    levels = [np.ascontiguousarray(pixels[:: 2**level, :: 2**level]) for level in range(num_levels)]
    height, width = pixels.shape[:2]
    stated = "" if mpp is None else f"|MPP = {mpp:.4f}"
    resolution: dict[str, Any] = (
        {} if mpp is None or aperio else {"resolution": (10_000 / mpp, 10_000 / mpp), "resolutionunit": "CENTIMETER"}
    )
    with tifffile.TiffWriter(path) as writer:
        for number, level in enumerate(levels):
            writer.write(
                level,
                tile=(tile_px, tile_px),
                photometric="rgb" if pixels.ndim == 3 else "minisblack",
                subfiletype=0 if number == 0 or aperio else 1,
                description=f"Aperio Image Library v1\n{width}x{height} |AppMag = 20{stated}" if aperio and number == 0 else None,
                metadata=None,
                software=False,
                **(resolution if number == 0 else {}),
                **options,
            )
    return levels


def overwrite_tile(source: Path, target: Path, tile: int, *, share: float = 0.5, level: int = 0, num_bytes: int = 30) -> Path:
    """A copy of a slide in which some bytes in the middle of one tile are inverted.

    Args:
        source: the slide.
        target: the copy.
        tile: counted by rows.
        share: position of the damage as a share of the tile's bytes.
        level: counted among the file's pages.
        num_bytes: number of inverted bytes.
    """
    import tifffile

    with tifffile.TiffFile(source) as tiff:
        page: Any = tiff.pages[level]
        offset, size = page.dataoffsets[tile], page.databytecounts[tile]
    content = bytearray(source.read_bytes())
    start = offset + int(size * share)
    stop = min(start + num_bytes, offset + size)
    content[start:stop] = bytes(255 - value for value in content[start:stop])
    target.write_bytes(content)
    return target


def decode_threads() -> list[threading.Thread]:
    """Threads that decode tiles; there must be none between reads."""
    return [thread for thread in threading.enumerate() if thread.name == "sft-decode"]


def open_files(path: Path) -> int:
    """Number of open handles of this process on a file (Linux; 0 on other systems)."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return 0
    num_open = 0
    for entry in folder.iterdir():
        try:
            num_open += entry.resolve() == path.resolve()
        except OSError:  # the descriptor that lists the folder
            continue
    return num_open
