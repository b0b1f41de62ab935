"""Georeference: coordinate system and affine transform of an image."""

from __future__ import annotations

from dataclasses import dataclass

from sft.common.errors import InputError

__all__ = ["Georeference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Georeference:
    """Map coordinates of an image's pixels.

    ``transform`` holds the coefficients ``(a, b, c, d, e, f)`` in the order of the package ``affine`` and of rasterio. The corner of column
    ``x`` and row ``y`` has the map coordinates ``(a x + b y + c, d x + e y + f)``.

    >>> scene = Georeference(crs_wkt="", transform=(10.0, 0.0, 500.0, 0.0, -10.0, 900.0))
    >>> scene.shifted(3, 2).transform
    (10.0, 0.0, 530.0, 0.0, -10.0, 880.0)
    >>> scene.scaled(4, 4).transform
    (40.0, 0.0, 500.0, 0.0, -40.0, 900.0)

    Attributes:
        crs_wkt: coordinate reference system as WKT; empty if the file has none.
        transform: coefficients, in units of the coordinate system per px (``c`` and ``f``: in its units).
    """

    crs_wkt: str
    transform: tuple[float, float, float, float, float, float]

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Map coordinates of a position in px from the top left corner.

        >>> Georeference(crs_wkt="", transform=(10.0, 0.0, 500.0, 0.0, -10.0, 900.0)).point(0.5, 0.5)
        (505.0, 895.0)
        """
        a, b, c, d, e, f = self.transform
        return a * x + b * y + c, d * x + e * y + f

    def shifted(self, x: float, y: float) -> Georeference:
        """Georeference of a crop that begins at column ``x`` and row ``y``."""
        a, b, _, d, e, _ = self.transform
        c, f = self.point(x, y)
        return Georeference(crs_wkt=self.crs_wkt, transform=(a, b, c, d, e, f))

    def scaled(self, x: float, y: float) -> Georeference:
        """Georeference of the image reduced by ``x`` and ``y``: px of this image per px of the reduced one."""
        a, b, c, d, e, f = self.transform
        return Georeference(crs_wkt=self.crs_wkt, transform=(a * x, b * y, c, d * x, e * y, f))

    def pixels_of(self, other: Georeference) -> tuple[tuple[tuple[float, float], tuple[float, float]], tuple[float, float]]:
        """Pixels of this image as a function of those of another one, in one coordinate system: the matrix, and the other's corner.

        >>> scene, crop = (Georeference(crs_wkt="", transform=(10.0, 0.0, x, 0.0, -10.0, 900.0)) for x in (500.0, 530.0))
        >>> scene.pixels_of(crop)
        (((1.0, 0.0), (0.0, 1.0)), (3.0, 0.0))

        Raises:
            InputError: the transform of this image has no inverse.
        """
        a, b, c, d, e, f = self.transform
        scale = a * e - b * d
        if not scale:
            raise InputError(f"cannot align images by map coordinates: the transform {self.transform} has no inverse. Correct the file.")

        def position(x: float, y: float) -> tuple[float, float]:
            """Column and row of a distance on the map."""
            return (e * x - b * y) / scale + 0.0, (a * y - d * x) / scale + 0.0

        p, q, r, s, t, u = other.transform
        (xx, yx), (xy, yy) = position(p, s), position(q, t)
        return ((xx, xy), (yx, yy)), position(r - c, u - f)
