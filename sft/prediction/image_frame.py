"""Place of an image: the pixels of its file, its resolution and its map coordinates, from any chain of views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sft.analysis.tiling.position_grid import PositionGrid
from sft.prediction.raster import PredictedRaster
from sft.sources.georeference import Georeference
from sft.sources.resample import Resampled
from sft.sources.views import AtLevel, Cropped

__all__ = ["ImageFrame"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFrame:
    """Place of the image that a network sees.

    Attributes:
        scale: pixels of the file's largest level per pixel of the image, (x, y).
        origin_px: top left corner of the image, in pixels of the file's largest level, (x, y).
        mpp: micrometres per pixel of the image, (x, y); ``None`` if unknown.
        georeference: map coordinates of the image's pixels; ``None`` if it has none.
    """

    scale: tuple[float, float] = (1.0, 1.0)
    origin_px: tuple[float, float] = (0.0, 0.0)
    mpp: tuple[float, float] | None = None
    georeference: Georeference | None = None

    @classmethod
    def of(cls, source: Any) -> ImageFrame:
        """The frame of a source: of its image, through crops, levels and reductions; the default for an array or a tensor."""
        image = source
        views: list[Any] = []
        while image is not None and len(views) < 100:
            views.append(image)
            image = getattr(image, "image", None)
        scale, origin = np.ones(2), np.zeros(2)
        for view in reversed(views):
            if isinstance(view, Cropped):
                origin = origin + scale * (view.x, view.y)
            elif isinstance(view, AtLevel):
                scale = scale * view.downsample
            elif isinstance(view, Resampled):
                scale = scale * (float(view.scale[0]), float(view.scale[1]))
        first = next((view for view in views if hasattr(view, "mpp")), None)
        return cls(
            scale=(float(scale[0]), float(scale[1])),
            origin_px=(float(origin[0]), float(origin[1])),
            mpp=getattr(first, "mpp", None),
            georeference=next((view.georeference for view in views if hasattr(view, "georeference")), None),
        )

    def raster(self, shape: tuple[int, ...], grids: tuple[PositionGrid, ...] | None, **properties: Any) -> PredictedRaster:
        """The raster of an output.

        Args:
            shape: ``[1, K, h, w]`` of the output.
            grids: places of its rows and columns in the image; ``None`` for the image's own pixels.
            properties: ``kind``, ``dtype`` and ``names``.
        """
        kind = properties["kind"]
        stride, start = (1.0, 1.0), (0.0, 0.0)
        if grids is not None:
            rows, columns = grids
            stride, start = (float(columns.stride_px), float(rows.stride_px)), (float(columns.start_px), float(rows.start_px))
        dtype = properties["dtype"]
        georeference = None if self.georeference is None else self.georeference.shifted(*start).scaled(*stride)
        return PredictedRaster(
            height_px=shape[2],
            width_px=shape[3],
            num_channels=1 if kind == "classes" else shape[1],
            dtype=dtype,
            is_classes=kind == "classes",
            names=properties["names"],
            scale=(self.scale[0] * stride[0], self.scale[1] * stride[1]),
            origin_px=(self.origin_px[0] + self.scale[0] * start[0], self.origin_px[1] + self.scale[1] * start[1]),
            mpp=None if self.mpp is None else (self.mpp[0] * stride[0], self.mpp[1] * stride[1]),
            georeference=georeference,
            value_scale=float(np.iinfo(dtype).max) if kind in ("softmax", "sigmoid") and dtype.kind == "u" else 1.0,
        )
