"""Polygons of map coordinates in pixels of an image, also from another coordinate reference system.

Corners are transformed by PROJ, with x before y (longitude before latitude). An edge that is straight in the system of the polygons is a
curve in that of the image. Corners are inserted in the middle of edges until the transformed middle of every edge is within
``EDGE_TOLERANCE_PX`` of the straight line in pixels. A polygon in the image's own system keeps its corners. The accuracy is otherwise that
of PROJ's transformation between the two systems.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError
from sft.sources.georeference import Georeference
from sft.sources.image import missing_extra
from sft.tissue.polygons import Polygon

__all__ = ["EDGE_TOLERANCE_PX", "MapToPixels"]

#: Largest distance of the middle of a straight edge from the transformed one, in px.
EDGE_TOLERANCE_PX = 1 / 64
#: Times that an edge is halved at most.
_MAX_HALVINGS = 16

_Points = npt.NDArray[np.float64]


class MapToPixels:
    """Transformation of polygons from map coordinates to pixels of an image.

    Args:
        path: of the polygons, for messages.
        crs: their coordinate reference system, in any form that PROJ reads; empty for that of the image.
        georeference: of the image.

    Raises:
        InputError: the image has no georeference, or the system is unknown.
        SourceError: rasterio is not installed, and the systems must be compared.
    """

    def __init__(self, path: object, crs: str, georeference: Georeference | None) -> None:
        self._path = path
        if georeference is None:
            system = f" ({crs})" if crs else ""
            raise InputError(
                f"cannot read {path}: its polygons have map coordinates{system}, and the image has no georeference. Give georeference=."
            )
        a, b, c, d, e, f = georeference.transform
        if a * e == b * d:
            raise InputError(
                f"cannot read {path}: the transform of the image, {georeference.transform}, has no inverse. Correct the image."
            )
        self._origin, self._inverse = np.array([c, f]), np.linalg.inv(np.array([[a, b], [d, e]]))
        self._systems: tuple[Any, Any] | None = None
        if crs and georeference.crs_wkt and crs != georeference.crs_wkt:
            self._systems = self._different_systems(crs, georeference.crs_wkt)

    def polygon(self, polygon: Polygon) -> Polygon:
        """Rings in pixels.

        Raises:
            InputError: a corner has no place in the image's coordinate system.
        """
        return tuple(self._ring(np.asarray(ring, float)) for ring in polygon)

    def _different_systems(self, crs: str, image_wkt: str) -> tuple[Any, Any] | None:
        try:
            import rasterio.crs
            import rasterio.errors
        except ImportError as error:
            raise missing_extra(f"read {self._path}", "geo", error) from error
        try:
            system = rasterio.crs.CRS.from_user_input(crs)
        except (rasterio.errors.CRSError, ValueError) as error:
            raise InputError(f"cannot read {self._path}: its coordinate system {crs!r} is unknown ({error}). Write it again.") from error
        image = rasterio.crs.CRS.from_wkt(image_wkt)
        return None if system == image else (system, image)

    def _ring(self, corners: _Points) -> _Points:
        """A ring in pixels, with more corners where edges are curves."""
        if self._systems is None:
            return self._on_image(corners)
        pixels = self._to_pixels(corners)
        for _ in range(_MAX_HALVINGS):
            middles = (corners + np.roll(corners, -1, axis=0)) / 2
            middle_pixels = self._to_pixels(middles)
            deviation = np.hypot(*(middle_pixels - (pixels + np.roll(pixels, -1, axis=0)) / 2).T)
            bent = np.flatnonzero(deviation > EDGE_TOLERANCE_PX)
            if not len(bent):
                return pixels
            corners = np.insert(corners, bent + 1, middles[bent], axis=0)
            pixels = np.insert(pixels, bent + 1, middle_pixels[bent], axis=0)
        raise InputError(
            f"cannot read {self._path} in {self._names[0]}: edges have no smooth image in {self._names[1]}, the system of the image. "
            "Leave out polygons that cross the border of its map, or convert the file (ogr2ogr -t_srs)."
        )

    def _to_pixels(self, points: _Points) -> _Points:
        assert self._systems is not None
        from rasterio.warp import transform

        own, image = self._systems
        x, y = transform(own, image, points[:, 0].tolist(), points[:, 1].tolist())
        moved = np.stack([np.asarray(x, float), np.asarray(y, float)], axis=1)
        lost = np.flatnonzero(~np.isfinite(moved).all(axis=1))
        if len(lost):
            place = ", ".join(f"{value:g}" for value in points[lost[0]])
            raise InputError(
                f"cannot read {self._path} in {self._names[0]}: {len(lost)} corners, such as ({place}), have no place in {self._names[1]}, "
                "the system of the image. Correct them, or the file's coordinate system."
            )
        return self._on_image(moved)

    def _on_image(self, points: _Points) -> _Points:
        pixels: _Points = (points - self._origin) @ self._inverse.T
        return pixels

    @property
    def _names(self) -> tuple[str, str]:
        assert self._systems is not None
        first, second = (system.to_string() for system in self._systems)
        return first if len(first) < 40 else "its coordinate system", second if len(second) < 40 else "another coordinate system"
