"""Commands of ``python -m sft.wsi`` that need no network: installation check, slide metadata, tissue detection."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sft.common.byte_units import format_bytes
from sft.common.errors import InputError, SftError
from sft.common.installation import install_command, installed_version
from sft.common.terminal import print_text
from sft.common.terminal.progress_display import stages
from sft.sources import open_image
from sft.tissue import find_tissue, write_geojson
from sft.wsi.commands import CommandResult
from sft.wsi.data.slides import SlideInfo, make_thumbnail, slide_info
from sft.wsi.data.tissue import draw_tissue
from sft.wsi.errors import RunFolderError
from sft.wsi.run.files import atomic_write_with_parents, safe_name

__all__ = ["doctor", "slide_information", "tissue"]

_NEEDED = (
    "torch", "numpy", "openslide-python", "openslide-bin", "tifffile", "imagecodecs", "simplejpeg", "scikit-image", "shapely",
    "scikit-learn", "safetensors", "jsonargparse", "matplotlib", "pillow",
)  # fmt: skip
#: By the extra that installs them, if any.
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "zarr": ("zarr",),
    "tensorboard": ("tensorboard",),
    "peft": ("peft",),
    "": ("triton", "torchvision", "timm"),
}
_OVERLAY_PX = 2048


def doctor(console: Console) -> CommandResult:
    """Installed and missing packages."""
    report: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()}
    extras = {name: extra for extra, names in _OPTIONAL.items() for name in names}
    for name in (*_NEEDED, *extras):
        report[name] = installed_version(name)
    missing = [name for name in _NEEDED if report[name] is None]
    report["threads"] = torch.get_num_threads()
    report["cuda"] = torch.version.cuda
    report["devices"] = [
        {"name": torch.cuda.get_device_name(number), "memory_bytes": torch.cuda.get_device_properties(number).total_memory}
        for number in range(torch.cuda.device_count())
    ]
    for name, value in report.items():
        version_text = f"not installed{f' ({install_command(extras[name])})' if extras.get(name) else ''}" if value is None else value
        print_text(console, f"{name:18} {version_text}")
    if missing:
        raise InputError(f"missing: {', '.join(missing)}. Install them with: {install_command('wsi')}")
    return CommandResult(value=report)


def slide_information(paths: Sequence[Path], console: Console) -> CommandResult:
    """Metadata of slides; an unreadable file does not stop the report of the others."""
    values: list[dict[str, Any]] = []
    failed = 0
    for path in paths:
        try:
            info = slide_info(path)
        except SftError as error:
            failed += 1
            message = " ".join(str(error).split())
            values.append({"path": str(path), "error": message})
            print_text(console, f"{path}: {message}")
            continue
        levels = [
            {"width_px": width, "height_px": height, "mpp": mpp} for (width, height), mpp in zip(info.levels, info.level_mpp, strict=True)
        ]
        values.append(
            {
                "path": str(path),
                "num_bytes": info.num_bytes,
                "mpp": info.mpp,
                "background": info.background,
                "mpp_note": info.mpp_note,
                "nodata": _json_number(info.nodata),
                "dtype": info.dtype,
                "num_channels": info.num_channels,
                "channel_names": info.channel_names,
                "levels": levels,
            }
        )
        note = f" ({info.mpp_note}: give it in the column mpp of the table)" if info.mpp_note else ""
        print_text(console, f"{path}: {format_bytes(info.num_bytes)}, {_resolution(info.mpp)}{note}{_channels(info)}")
        for number, level in enumerate(levels):
            text = f"  level {number}: {level['width_px']} x {level['height_px']} px, {_resolution(level['mpp'])}"
            print_text(console, text)
    return CommandResult(value=values, num_failed=failed)


def tissue(
    paths: Sequence[Path], folder: Path, console: Console, *, mpp: float = 8.0, slide_mpp: float | None = None, overwrite: bool = False
) -> CommandResult:
    """Find the tissue on slides; for each write NAME-mask.png, NAME.geojson (px of the largest level) and NAME-overlay.png.

    Args:
        paths: of the slides; an unusable one does not stop the others.
        folder: output folder, created if missing.
        console: output.
        mpp: micrometres per px of the mask. Default: 8
        slide_mpp: of the slides' largest level, if the files' values are wrong or missing. Default: `None`
        overwrite: True to replace existing masks, which may have been corrected by hand. Default: `False`

    Raises:
        InputError: ``mpp`` is not a resolution.
        RunFolderError: a file cannot be written.
    """
    if not 0 < mpp < 1000:
        raise InputError(f"--mpp {mpp}: give micrometres per pixel of the mask, such as 8")
    stems = Counter(safe_name(path.stem) for path in paths)
    values: list[dict[str, Any]] = []
    for number, path in enumerate(paths, start=1):
        name = safe_name(path.stem if stems[safe_name(path.stem)] == 1 else str(path))
        try:
            with stages(f"tissue of slide {number} of {len(paths)}"):
                values.append(_find(path, folder / name, mpp, slide_mpp, overwrite))
            line = f"{path}: {values[-1]['share']:.1%} tissue, {values[-1]['files'][-1]}"
        except RunFolderError:
            raise
        except SftError as error:
            values.append({"path": str(path), "error": " ".join(str(error).split())})
            line = f"{path}: {values[-1]['error']}"
        print_text(console, line)
    return CommandResult(value=values, num_failed=sum("error" in value for value in values))


def _find(path: Path, base: Path, mpp: float, slide_mpp: float | None, overwrite: bool) -> dict[str, Any]:
    files = [base.with_name(base.name + ending) for ending in ("-mask.png", ".geojson", "-overlay.png")]
    existing = [file.name for file in files[:2] if file.exists() and not overwrite]
    if existing:
        raise InputError(f"{' and '.join(existing)} in {base.parent} may have been edited: name another --out, or give --overwrite")
    slide = open_image(path, slide_mpp=slide_mpp)
    try:
        mask = find_tissue(slide, mpp=mpp)
        small, _ = make_thumbnail(slide, _OVERLAY_PX)
    finally:
        slide.close()
    with atomic_write_with_parents(files[0]) as temporary:
        mask.save_png(temporary)
    with atomic_write_with_parents(files[1]) as temporary:
        write_geojson(temporary, mask)
    draw_tissue(files[2], small, mask)
    box = mask.bounding_box()
    return {
        "path": str(path),
        "share": mask.share,
        "box_px": None if box is None else {"x": box.x, "y": box.y, "w": box.w, "h": box.h},
        "files": [str(file) for file in files],
    }


def _resolution(mpp: float | None) -> str:
    return "resolution unknown" if mpp is None else f"{mpp:.4g} um/px"


def _channels(info: SlideInfo) -> str:
    """Channels and pixel type, unless they are RGB of 8 bits."""
    if info.num_channels == 3 and info.dtype == "uint8":
        return ""
    names = f" ({', '.join(info.channel_names)})" if info.channel_names else ""
    return f", {info.num_channels} channels of {info.dtype}{names}"


def _json_number(value: float | None) -> float | str | None:
    """A number as JSON has it: NaN and infinity as text."""
    return value if value is None or math.isfinite(value) else str(value)
