"""Tissue as GeoJSON, in pixels of level 0: what QuPath exports and imports (RFC 7946, but for the coordinates).

*Out*: the outline of a mask's pixels, joined where they touch by an edge, with holes. It is exact: rasterised again at the mask's own
resolution it is the same mask.

*In*: a FeatureCollection, a list of features (QuPath's older exports), one feature, or a bare geometry; Polygon, MultiPolygon and
GeometryCollection, holes included. Lines and points have no area and are left out. Outlines that cross themselves, as drawn by hand, are
split where they do (shapely's make_valid).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sft.common.atomic_files import atomic_write
from sft.common.errors import SourceError
from sft.sources.image import missing_extra
from sft.tissue.mask import TissueMask
from sft.tissue.polygons import Polygon, Regions

__all__ = ["mask_outline", "read_geojson", "write_geojson"]


def write_geojson(path: str | os.PathLike[str], tissue: TissueMask | Regions, *, name: str = "Tissue") -> None:
    """Write a FeatureCollection with a feature for each polygon. An existing file is replaced when the new one is complete.

    Args:
        path: of the file.
        tissue: a mask, or polygons.
        name: the class that QuPath shows. Default: ``"Tissue"``

    Raises:
        SourceError: it cannot be written, or shapely is not installed.
    """
    regions = mask_outline(tissue) if isinstance(tissue, TissueMask) else tissue
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [[*ring.tolist(), ring[0].tolist()] for ring in polygon]},
            "properties": {"objectType": "annotation", "classification": {"name": name}},
        }
        for polygon in regions.polygons
    ]
    text = json.dumps({"type": "FeatureCollection", "features": features})
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def read_geojson(path: str | os.PathLike[str], *, names: Sequence[str] | None = None) -> Regions:
    """Read polygons in px of level 0.

    Args:
        path: of the file.
        names: classes that count; features without a class are left out then. Default: `None` (all)

    Raises:
        SourceError: the file cannot be read or is no GeoJSON, or shapely is not installed.
    """
    shapely = _import_shapely(f"read {path}")
    polygons: list[Polygon] = []
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        for geometry in _geometries(content, names):
            polygons += _polygons(shapely.make_valid(shapely.geometry.shape(geometry)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, shapely.errors.ShapelyError) as error:
        raise SourceError(f"cannot read {path} as GeoJSON: {type(error).__name__}: {error}. Export it again.") from error
    return Regions(polygons)


def mask_outline(mask: TissueMask) -> Regions:
    """The outline of a mask's pixels, in px of level 0.

    Raises:
        SourceError: shapely is not installed.
    """
    shapely = _import_shapely("outline a mask")
    # Runs of tissue in each row: where they begin and end, by turns.
    changes = np.diff(np.pad(mask.pixels, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row, column = (places.astype(float) for places in np.nonzero(changes))
    joined = shapely.union_all(shapely.box(column[0::2], row[0::2], column[1::2], row[0::2] + 1))
    step = np.array(mask.step)
    # Corners lie on the mask's grid, in whole numbers, until here.
    return Regions([[ring * step for ring in polygon] for polygon in _polygons(joined)])


def _geometries(content: Any, names: Sequence[str] | None) -> Iterator[Any]:
    if isinstance(content, list):
        for part in content:
            yield from _geometries(part, names)
    elif content["type"] == "FeatureCollection":
        yield from _geometries(content["features"], names)
    elif content["type"] == "Feature":
        if content["geometry"] is not None and (names is None or _class_of(content) in names):
            yield content["geometry"]
    else:
        yield content


def _class_of(feature: Any) -> str | None:
    properties = feature.get("properties") or {}
    classification = properties.get("classification") or {}
    name: str | None = classification.get("name") if isinstance(classification, dict) else classification
    return name


def _polygons(geometry: Any) -> list[Polygon]:
    """Polygons of a shapely geometry; lines and points are left out."""
    if geometry.geom_type == "Polygon":
        return (
            []
            if geometry.is_empty
            else [tuple(np.asarray(ring.coords, float)[:-1, :2] for ring in (geometry.exterior, *geometry.interiors))]
        )
    return [polygon for part in getattr(geometry, "geoms", ()) for polygon in _polygons(part)]


def _import_shapely(purpose: str) -> Any:
    try:
        import shapely
        import shapely.geometry
    except ImportError as error:
        raise missing_extra(purpose, "tissue", error) from error
    return shapely
