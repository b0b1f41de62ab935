"""GeoJSON polygons of a predicted map of classes, for QuPath and GIS programs, and a table of their counts and areas."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError
from sft.prediction.polygon_tracer import LabelPolygon, PolygonTracer
from sft.prediction.raster import FileWriter, PredictedRaster, RasterRows
from sft.sources.image import missing_extra

__all__ = ["PolygonWriter"]

#: Colours of classes in QuPath, after the background (the palette "tab10" of Matplotlib without grey).
_COLOURS = (
    (31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189), (140, 86, 75), (227, 119, 194),
    (188, 189, 34), (23, 190, 207),
)  # fmt: skip
#: The code of a coordinate system at the end of its WKT, in versions 1 and 2.
_EPSG = re.compile(r'(?:AUTHORITY|ID)\["EPSG",\s*"?(\d+)"?\]\s*\]\s*$')


@dataclass(slots=True)
class _ClassTotals:
    """Number and area of the polygons of a class."""

    num_objects: int = 0
    area_px: int = 0


class PolygonWriter(FileWriter):
    """Writer of a GeoJSON feature for each connected component of a class, with holes.

    Outlines follow pixel edges exactly (components touch by an edge), unless ``simplify_px`` is given. Coordinates are pixels of the
    input's largest level, as QuPath reads them; for an input with map coordinates they are those, and the file names the coordinate system.
    Next to ``map.geojson``, ``map.csv`` has the number of polygons and the area of each class. Areas are those of the pixels, before
    simplification.

    Args:
        path: of the file, such as ``map.geojson``.
        ignored: classes without polygons. Default: class 0
        min_area_px: smaller components are left out, here and in the table. Default: 1
        simplify_px: largest distance, in raster pixels, of a simplified outline from the exact one (Douglas and Peucker 1973, valid
            polygons; needs shapely). Default: 0
        coordinates: ``"pixels"``, ``"map"``, or ``"auto"`` for map coordinates where the input has them. Default: ``"auto"``

    Raises:
        InputError: an argument is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ignored: Sequence[int] = (0,),
        min_area_px: int = 1,
        simplify_px: float = 0.0,
        coordinates: Literal["auto", "pixels", "map"] = "auto",
    ) -> None:
        super().__init__(path)
        if coordinates not in ("auto", "pixels", "map"):
            raise InputError(f"coordinates {coordinates!r}: choose 'auto', 'pixels' or 'map'")
        if not 0 <= simplify_px < float("inf"):
            raise InputError(f"simplify_px {simplify_px}: give a distance of at least 0 px")
        self._ignored, self._min_area_px, self._simplify_px, self._coordinates = tuple(ignored), min_area_px, simplify_px, coordinates
        self._file: IO[str] | None = None

    @property
    def table_path(self) -> Path:
        """Path of the table of counts and areas."""
        return self.path.with_suffix(".csv")

    def begin(self, raster: PredictedRaster) -> None:
        """Begin a raster; see `RasterWriter`."""
        if not raster.is_classes:
            raise InputError(f"{self.path}: polygons outline classes, and the prediction has {raster.num_channels} channels of values; "
                             "choose kind='classes', or write an image")  # fmt: skip
        if self._coordinates == "map" and raster.georeference is None:
            raise InputError(f"{self.path}: coordinates='map', and the input has no map coordinates; choose 'pixels'")
        if self._simplify_px:
            try:
                import shapely  # noqa: F401
            except ImportError as error:
                raise missing_extra(f"simplify polygons of {self.path}", "tissue", error) from error
        self._raster = raster
        self._tracer = PolygonTracer(width_px=raster.width_px, ignored=self._ignored)
        self._totals: dict[int, _ClassTotals] = {}
        self._num_features = 0
        self._classes: dict[int, str] = {}
        self._area_units = self._units()
        self._is_pixel_grid = not self._uses_map and raster.scale == (1.0, 1.0) and raster.origin_px == (0.0, 0.0) and not self._simplify_px
        try:
            self._file = self._new_partial().open("w", encoding="utf-8")
        except OSError as error:
            raise self._refusal(error) from error
        header: dict[str, Any] = {"type": "FeatureCollection"}
        wkt = raster.georeference.crs_wkt if self._uses_map and raster.georeference else ""
        if wkt:
            code = _EPSG.search(wkt)
            header["crs"] = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:EPSG::{code.group(1)}" if code else wkt}}
        self._put(json.dumps(header)[:-1] + ', "features": [')

    def write(self, rows: RasterRows) -> None:
        """Write the next rows; see `RasterWriter`."""
        self._add(self._tracer.add(rows[0]))

    def finish(self) -> None:
        """Complete the file under its temporary name; see `RasterWriter`."""
        self._add(self._tracer.finish())
        self._put("\n]}\n")
        assert self._file is not None
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            self._table = self._new_temporary(".csv")
            self._write_table(self._table)
        except OSError as error:
            raise self._refusal(error) from error

    def publish(self) -> None:
        """Rename the file and its table to their final paths; see `RasterWriter`."""
        if self._partial is None:
            return
        try:
            os.replace(self._table, self.table_path)
        except OSError as error:
            raise self._refusal(error) from error
        super().publish()

    def discard(self) -> None:
        """Remove all temporary files; no effect after ``publish``."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().discard()

    @property
    def _uses_map(self) -> bool:
        return self._raster.georeference is not None and self._coordinates != "pixels"

    def _put(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(text)
        except OSError as error:
            raise self._refusal(error) from error

    def _add(self, polygons: Sequence[LabelPolygon]) -> None:
        for polygon in polygons:
            if polygon.area_px < self._min_area_px:
                continue
            totals = self._totals.setdefault(polygon.label, _ClassTotals())
            totals.num_objects += 1
            totals.area_px += polygon.area_px
            self._put((",\n" if self._num_features else "\n") + self._feature(polygon))
            self._num_features += 1

    def _feature(self, polygon: LabelPolygon) -> str:
        """The feature of a polygon as JSON."""
        rings: Sequence[npt.NDArray[Any]] = polygon.rings
        if self._simplify_px:
            rings = _simplified(rings, self._simplify_px)
        if polygon.label not in self._classes:
            colour = _COLOURS[(polygon.label - 1) % len(_COLOURS)]
            classification = {"name": self._raster.name(polygon.label), "color": colour}
            self._classes[polygon.label] = json.dumps({"objectType": "annotation", "classification": classification}, ensure_ascii=False)
        areas = json.dumps({f"Area {unit}": polygon.area_px * factor for unit, factor in self._area_units}, ensure_ascii=False)
        coordinates = json.dumps([self._positions(ring) for ring in rings])
        return (
            f'{{"type": "Feature", "geometry": {{"type": "Polygon", "coordinates": {coordinates}}}, '
            f'"properties": {self._classes[polygon.label][:-1]}, "measurements": {areas}}}}}'
        )

    def _positions(self, ring: npt.NDArray[Any]) -> list[list[float]]:
        """Coordinates of a closed ring."""
        positions: list[list[float]]
        if self._is_pixel_grid:
            positions = ring.tolist()
            positions.append(positions[0])
            return positions
        closed = np.concatenate([ring, ring[:1]])
        if self._uses_map:
            assert self._raster.georeference is not None
            x, y = self._raster.georeference.point(closed[:, 0], closed[:, 1])  # type: ignore[arg-type]
            positions = np.stack([x, y], axis=1).tolist()
        else:
            positions = (closed * np.array(self._raster.scale) + np.array(self._raster.origin_px)).tolist()
        return positions

    def _units(self) -> list[tuple[str, float]]:
        """Units of areas, each with its factor from raster pixels."""
        raster = self._raster
        units = [("px", raster.scale[0] * raster.scale[1])]
        if self._uses_map and raster.georeference is not None:
            a, b, _, d, e, _ = raster.georeference.transform
            units.append(("map units^2", abs(a * e - b * d)))
        elif raster.mpp is not None:
            units.append(("µm^2", raster.mpp[0] * raster.mpp[1]))
        return units

    def _write_table(self, path: Path) -> None:
        columns = {"px": "area_px", "µm^2": "area_um2", "map units^2": "area_map_units2"}
        units = self._area_units
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["class", "name", "polygons", *(columns[unit] for unit, _ in units)])
            named = set(range(len(self._raster.names))) - set(self._ignored)
            for label in sorted(named | set(self._totals)):
                totals = self._totals.get(label, _ClassTotals())
                areas = [format(totals.area_px * factor, ".15g") for _, factor in units]
                table.writerow([label, self._raster.name(label), totals.num_objects, *areas])


def _simplified(rings: Sequence[npt.NDArray[Any]], tolerance: float) -> list[npt.NDArray[Any]]:
    """A polygon with fewer corners; still valid."""
    import shapely

    polygon = shapely.Polygon(rings[0], rings[1:]).simplify(tolerance, preserve_topology=True)
    return [np.asarray(ring.coords)[:-1] for ring in (polygon.exterior, *polygon.interiors)]
