"""Georeference: coordinate system and affine transform of an image."""

from __future__ import annotations

from dataclasses import dataclass

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
