"""Settings of the data of a run: table, pixels, resolution, tissue, splits, label maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sft.common.legacy_names import restore_fields
from sft.wsi.config_checks import byte_problems, pixel_problems, refuse, refuse_nulls

__all__ = ["MAX_MPP", "DataConfig"]

#: Micrometres per pixel, at most: a pixel of a map may have kilometres.
MAX_MPP = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Slides, resolution and splits.

    Args:
        csv: the table: columns slide, label, and optionally patient, split, mpp, mask, time, event.
        slides: folder that slides are relative to (default: that of the table). Files outside of it are refused.
        mpp: micrometres per pixel to train at, exactly; default: the slide's largest level.
        tissue: none; crop (to the bounding box of the tissue, found by colour or by the column mask); mask (also paints the
            background in the slide's background colour).
        host_budget: host memory in which the decoded rows of a slide are kept for its backward pass, and in the remainder, rows of
            the next slide, or auto: a share of what the host has free; default: none.
        num_folds: number of patient-disjoint folds for a table without splits; one is for testing, the next for validation.
        fold: index of the test fold, from 0.
        val_fraction: share of the patients for validation without splits and folds.
        test_fraction: share of the patients for testing, likewise.
        mask_values: for segmentation: index of the class for each value of the label maps, such as {0: 0, 255: 1} for masks of 0 and
            255; 255 as index: ignored. Default: values are class indices, 255 is ignored.
        mask_channel: for segmentation: number of the channel that holds the labels, in label maps of several (0 in PANDA).
        mask_colours: for segmentation: index of the class for each colour of RGB label maps, such as {"#000000": 0, "#ff0000": 1}; 255 as
            index: ignored.
        mask_outside: for segmentation: value of pixels that by map coordinates lie outside of a label map, such as 255; default: they are
            an error.
        background: colour of painted background, one number a channel, of 0 to 255 in RGB slides; default: that of the slide's file
            (white for scanners, the fill value of a Zarr array).
        channels: names or numbers of the channels that the network reads, in this order, such as [DAPI, CD3] or [3, 2, 1], of images
            with any number of channels and any pixel type; default: slides are RGB of 8 bits.
        value_range: pixel values that become 0 and 1: [low, high], or one pair for each channel; default: 0 and the largest value of an
            integer type (pixels of floating-point types are unchanged).
        percentiles: percentiles of each channel of each slide that become 0 and 1, such as [1, 99], in place of value_range.
        clip: true to limit pixels to their range of values.
        at: index along each axis other than channels, height and width, such as {z: 12} (OME-TIFF, Zarr).
        series: number of the image in files of several.
        invalid_pixels: use of pixels that a GeoTIFF marks as invalid: fill (they get fill_value), channel (a channel after the others: 1
            where all bands are valid), ignore, or band (an alpha band has values, such as near infrared); default: a nodata value is a
            value like others, and files with a mask or an alpha band are refused.
        fill_value: of invalid pixels.
        mask_column: for segmentation: column of shapefiles and GeoPackages with the class, and the property of GeoJSON features without a
            classification of QuPath; default: class.
        mask_crs: coordinate system of GeoJSON masks, such as OGC:CRS84 (longitude and latitude), or pixels; default: the one that the file
            names, otherwise pixels of the largest level.
        ignore_other_classes: true to leave out annotations of classes that task.classes lacks; default: they are an error.
    """

    csv: Path
    slides: Path | None = None
    mpp: float | None = None
    tissue: Literal["none", "crop", "mask"] = "none"
    host_budget: int | str | None = None
    num_folds: int | None = None
    fold: int = 0
    val_fraction: float = 0.2
    test_fraction: float = 0.0
    mask_values: dict[int, int] | None = None
    background: list[int] | None = None
    mask_channel: int | None = None
    mask_colours: dict[str, int] | None = None
    mask_outside: int | None = None
    channels: list[int | str] | None = None
    value_range: list[float] | list[list[float]] | None = None
    percentiles: list[float] | None = None
    clip: bool = False
    at: dict[str, int] | None = None
    series: int | None = None
    invalid_pixels: Literal["fill", "channel", "ignore", "band"] | None = None
    fill_value: float = 0.0
    mask_column: str = "class"
    mask_crs: str | None = None
    ignore_other_classes: bool = False

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    def __post_init__(self) -> None:
        refuse_nulls("data", self)
        problems = []
        if self.mpp is not None and not 0 < self.mpp < MAX_MPP:
            problems.append(f"data.mpp {self.mpp}: give micrometres per pixel, such as 0.5")
        if self.host_budget is not None:
            problems += byte_problems("data.host_budget", self.host_budget)
        if self.num_folds is not None and self.num_folds < 3:
            problems.append(f"data.num_folds {self.num_folds}: give at least 3, one for testing, one for validation and one to train on")
        if self.fold and self.num_folds is None:
            problems.append(f"data.fold {self.fold} without data.num_folds: say how many folds there are")
        elif not 0 <= self.fold < (self.num_folds or self.fold + 1):
            problems.append(f"data.fold {self.fold}: folds are counted from 0 to {(self.num_folds or 1) - 1}")
        if not (0 <= self.val_fraction < 1 and 0 <= self.test_fraction < 1 and self.val_fraction + self.test_fraction < 1):
            problems.append(f"data.val_fraction {self.val_fraction} and data.test_fraction {self.test_fraction}: leave slides to train on")
        problems += pixel_problems(self)
        refuse(problems)
