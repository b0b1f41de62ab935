"""Tissue as GeoJSON, in pixels of level 0: the format of QuPath (RFC 7946, but for the coordinates).

A file with a member ``crs`` has map coordinates, as GIS programs and `sft.prediction.PolygonWriter` write them; they become pixels through
the georeference of the image (`sft.tissue.map_polygons`).

*Out*: the outline of a mask's pixels, joined where they touch by an edge, with holes. It is exact: rasterised again at the mask's own
resolution it is the same mask.

*In*: a FeatureCollection, a list of features (QuPath's older exports), one feature, or a bare geometry; Polygon, MultiPolygon and
GeometryCollection, holes included. Lines and points have no area and are left out. Outlines that cross themselves, as drawn by hand, are
split where they do (shapely's make_valid).

*Classes.* QuPath derives classes from a base class: ``Tumor: Positive`` is a ``Positive`` kind of ``Tumor``. Its exports have the full name
(``"classification": {"name": "Tumor: Positive"}``) or the parts (``{"names": ["Tumor", "Positive"]}``). A feature is selected by its full
name and by each part, so ``Tumor`` selects all tumour, ``Tumor: Positive`` that part of it. The name of the annotation itself
(``properties.name``) selects it as well.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.common.atomic_files import atomic_write
from sft.common.errors import InputError, SftError, SourceError
from sft.common.untrusted.foreign_files import require_regular_file
from sft.sources.georeference import Georeference
from sft.sources.image import missing_extra
from sft.tissue.map_polygons import MapToPixels
from sft.tissue.mask import TissueMask
from sft.tissue.polygons import Polygon, Regions

__all__ = ["import_shapely", "in_pixels", "mask_outline", "polygons_of", "property_names", "read_features", "read_geojson", "write_geojson"]

#: Classes that an error lists.
_MAX_LISTED = 20
#: Value of ``crs`` for px of level 0.
PIXELS = "pixels"
#: Decimals of pixels at most; a thousandth of a pixel means nothing.
_PIXEL_DECIMALS = 3
#: Between a class and the class derived from it.
_SEPARATOR = ": "
#: Exceptions of reading JSON of another structure.
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError)


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
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_geojson(
    path: str | os.PathLike[str],
    *,
    names: str | Sequence[str] | None = None,
    required: bool = True,
    georeference: Georeference | None = None,
    crs: str | None = None,
) -> Regions:
    """Read polygons in px of level 0.

    Args:
        path: of the file.
        names: classes that count, such as ``["Tumor", "Stroma: Positive"]``; a base class includes the classes derived from it. Features
            without a class are left out then. Default: `None` (all)
        required: False to accept names that no feature of the file has. Default: `True`
        georeference: of the image, for a file with map coordinates. Default: `None`
        crs: coordinate system of the file, such as ``"OGC:CRS84"`` (longitude and latitude); ``"pixels"`` for px of level 0. Default:
            `None` (its member ``crs``; px of level 0 without one)

    Raises:
        InputError: a name that no feature has; the message lists those that there are. Or map coordinates without a georeference.
        SourceError: the file cannot be read or is not GeoJSON, or shapely is not installed.
    """
    selected = None if names is None else frozenset((names,) if isinstance(names, str) else names)
    pairs = read_features(path, selected, georeference=georeference, crs=crs)
    features, chosen = [feature for feature, _ in pairs], [feature for feature, _ in pairs if feature.is_selected(selected)]
    polygons = [polygons_of(shape) for feature, shape in pairs if feature.is_selected(selected)]
    if selected is not None and required:
        with_area = frozenset[str]().union(*(feature.selectors for feature, pieces in zip(chosen, polygons, strict=True) if pieces))
        _check_names(path, selected, features, with_area)
    return Regions([polygon for pieces in polygons for polygon in pieces])


def read_features(
    path: str | os.PathLike[str],
    selected: Set[str] | None = None,
    *,
    georeference: Georeference | None = None,
    column: str | None = None,
    crs: str | None = None,
) -> list[tuple[_Feature, Any]]:
    """All features of a file, each with its valid geometry of shapely; None in place of the geometry of features that are not selected.

    Args:
        path: of the file.
        selected: names of the features of which the geometry is read. Default: `None` (all)
        georeference: of the image. Default: `None`
        column: property with the class of features without a ``classification``. Default: `None`
        crs: coordinate system of the file, or ``"pixels"``. Default: `None` (its member ``crs``; pixels without one)

    Raises:
        InputError: the file has map coordinates, and the image has no georeference; or its coordinates look like degrees, and it names no
            coordinate system.
        SourceError: the file cannot be read or is not GeoJSON, or shapely is not installed.
    """
    shapely = import_shapely(f"read {path}")
    try:
        require_regular_file(path)
        content = _read_json(path)
        features = list(_features(content, column))
        shapes = [
            shapely.geometry.shape(feature.geometry) if feature.geometry and feature.is_selected(selected) else None for feature in features
        ]
        system = _crs_name(content) if crs is None else None if crs == PIXELS else crs
        if system is None and crs is None and georeference is not None and georeference.crs_wkt:
            _refuse_degrees(path, shapely.get_coordinates([shape for shape in shapes if shape is not None]))
        to_pixels = None if system is None else MapToPixels(path, system, georeference)
        return [(feature, None if shape is None else in_pixels(shape, to_pixels)) for feature, shape in zip(features, shapes, strict=True)]
    except SftError:
        raise
    except (*_UNREADABLE, shapely.errors.ShapelyError) as error:
        raise SourceError(f"cannot read {path} as GeoJSON: {_reason(error)}. Export it again.") from error


def property_names(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Names of the properties that features of a file have."""
    names = {name for feature in _features(_read_json(path), None) for name in feature.properties}
    return tuple(sorted(names))


def _read_json(path: str | os.PathLike[str]) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8-sig"), parse_constant=_refuse_constant)


def _refuse_degrees(path: object, corners: npt.NDArray[np.float64]) -> None:
    """Refuse coordinates of a file without a coordinate system that can be degrees: RFC 7946 means longitude and latitude, QuPath pixels.

    Raises:
        InputError: all are within 180 and 90, and some have more decimals than pixels do.
    """
    if len(corners) and (np.abs(corners) <= (180, 90)).all() and (np.round(corners, _PIXEL_DECIMALS) != corners).any():
        (x, y), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
        raise InputError(
            f"cannot read {path}: it names no coordinate system, the image has one, and its coordinates, {x:g} to {right:g} and {y:g} to "
            f'{bottom:g}, may be longitude and latitude or pixels. Choose crs="OGC:CRS84" or crs="pixels".'
        )


def in_pixels(geometry: Any, to_pixels: MapToPixels | None) -> Any:
    """A valid geometry of shapely in pixels; lines and points of a geometry with map coordinates are left out."""
    import shapely

    if to_pixels is None:
        return shapely.make_valid(geometry)
    polygons = [shapely.Polygon(rings[0], rings[1:]) for rings in map(to_pixels.polygon, polygons_of(geometry))]
    return shapely.make_valid(shapely.MultiPolygon(polygons))


def _crs_name(content: Any) -> str | None:
    """Coordinate system that a file names; None for pixels.

    >>> _crs_name({"crs": {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::32632"}}}), _crs_name([])
    ('urn:ogc:def:crs:EPSG::32632', None)
    """
    crs = content.get("crs") if isinstance(content, dict) else None
    return None if crs is None else str(crs["properties"]["name"])


def _reason(error: Exception) -> str:
    """Reason of a failure in words.

    >>> _reason(KeyError("type")), _reason(json.JSONDecodeError("Expecting value", "", 0))
    ("an object lacks 'type'", 'no JSON (Expecting value, line 1, column 1)')
    """
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error.msg}, line {error.lineno}, column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, RecursionError):
        return "it has too many levels, one inside the other"
    if isinstance(error, KeyError):
        return f"an object lacks {error}"
    if isinstance(error, OSError):
        return str(error.strerror or error)
    if isinstance(error, (TypeError, AttributeError, IndexError)):
        return "a list, a number or null is in the place of a feature or a geometry"
    return str(error).rstrip(".")


def _refuse_constant(text: str) -> float:
    """Refuse NaN and Infinity, which are not JSON: a polygon with such a corner would be an empty one."""
    raise ValueError(f"{text} is not a JSON number")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Feature:
    """A geometry with its names.

    Attributes:
        geometry: GeoJSON; None for a feature without one.
        label: its class, otherwise its name; None for a feature without either.
        selectors: all names that select it.
    """

    geometry: Any
    label: str | None
    selectors: frozenset[str]
    ordered_names: tuple[str, ...] = ()  #: the full name of its class first, then its base classes, then its own name
    properties: tuple[str, ...] = ()  #: names of its properties

    def is_selected(self, names: Set[str] | None) -> bool:
        """True if one of the names selects it; None selects all."""
        return names is None or not self.selectors.isdisjoint(names)


def _check_names(path: str | os.PathLike[str], names: Set[str], features: Sequence[_Feature], with_area: Set[str]) -> None:
    """Refuse names that no feature with an area has; a file without features has none to compare.

    Raises:
        InputError: such a name, or no name at all.
    """
    if not names:
        raise InputError(f"cannot read {path} with names=[]: it selects nothing. Name classes, or leave names out to read all.")
    missing = sorted(names - with_area)
    if not features or not missing:
        return
    is_known = any(missing[0] in feature.selectors for feature in features)
    why = f"no feature called {missing[0]!r} has an area" if is_known else f"no feature is called {', '.join(map(repr, missing))}"
    counts = Counter(feature.label for feature in features)
    listed = [f"{'(no class)' if label is None else repr(label)} ({count})" for label, count in counts.most_common(_MAX_LISTED)]
    if len(counts) > _MAX_LISTED:
        listed.append(f"and {len(counts) - _MAX_LISTED} more")
    raise InputError(
        f"cannot read {path} with names={sorted(names)!r}: {why}. Its {len(features)} features are {', '.join(listed)}. Correct the name; "
        "required=False accepts files that lack it."
    )


def mask_outline(mask: TissueMask) -> Regions:
    """The outline of a mask's pixels, in px of level 0.

    Raises:
        SourceError: shapely is not installed.
    """
    shapely = import_shapely("outline a mask")
    # Runs of tissue in each row: where they begin and end, by turns.
    changes = np.diff(np.pad(mask.pixels, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row, column = (places.astype(float) for places in np.nonzero(changes))
    joined = shapely.union_all(shapely.box(column[0::2], row[0::2], column[1::2], row[0::2] + 1))
    step = np.array(mask.step)
    # Corners lie on the mask's grid, in integers, until here.
    return Regions([[ring * step for ring in polygon] for polygon in polygons_of(joined)])


def _features(content: Any, column: str | None) -> Iterator[_Feature]:
    """All features of a file; a bare geometry is a feature without a name. ``column`` is the property with the class."""
    if isinstance(content, list):
        for item in content:
            yield from _features(item, column)
    elif content["type"] == "FeatureCollection":
        yield from _features(content["features"], column)
    elif content["type"] == "Feature":
        properties = content.get("properties") or {}
        classes, name = _class_names(properties.get("classification")), properties.get("name")
        names: tuple[str, ...] = (name,) if isinstance(name, str) and name else ()
        value = properties.get(column) if column is not None and not classes else None
        if isinstance(value, (str, int, float)) and value != "":
            names = (str(value), *(each for each in names if each != str(value)))
        derived = tuple(_SEPARATOR.join(classes[:count]) for count in range(len(classes), 0, -1))  # the full name first
        label = next(iter((*derived, *names)), None)
        yield _Feature(
            geometry=content["geometry"],
            label=label,
            selectors=frozenset((*derived, *classes, *names)),
            ordered_names=(*derived, *names),
            properties=tuple(map(str, properties)),
        )
    else:
        yield _Feature(geometry=content, label=None, selectors=frozenset())


def _class_names(classification: Any) -> tuple[str, ...]:
    """Names of a class, the base class first.

    >>> _class_names({"name": "Tumor: Positive"}), _class_names({"names": ["Tumor", "Positive"]})
    (('Tumor', 'Positive'), ('Tumor', 'Positive'))
    >>> _class_names("Stroma"), _class_names(None)
    (('Stroma',), ())
    """
    if isinstance(classification, dict):
        classification = classification.get("names") or classification.get("name")
    names = [classification] if isinstance(classification, str) else classification or ()
    return tuple(word.strip() for name in names for word in str(name).split(_SEPARATOR) if word.strip())


def polygons_of(geometry: Any) -> list[Polygon]:
    """Polygons of a shapely geometry, none of None; lines and points are left out."""
    if geometry is None:
        return []
    if geometry.geom_type == "Polygon":
        return (
            []
            if geometry.is_empty
            else [tuple(np.asarray(ring.coords, float)[:-1, :2] for ring in (geometry.exterior, *geometry.interiors))]
        )
    return [polygon for member in getattr(geometry, "geoms", ()) for polygon in polygons_of(member)]


def import_shapely(purpose: str) -> Any:
    """The package shapely.

    Raises:
        SourceError: it is not installed.
    """
    try:
        import shapely
        import shapely.geometry
    except ImportError as error:
        raise missing_extra(purpose, "tissue", error) from error
    return shapely
