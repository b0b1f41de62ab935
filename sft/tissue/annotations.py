"""Annotations as labels: polygons of classes, painted strip by strip and never as a full map.

=============================  =============================================================================================================
file                           classes and coordinates
=============================  =============================================================================================================
GeoJSON                        ``classification`` of QuPath: a class or a derived class ("Tumor: Positive"); otherwise a property, as GIS
                               programs write it; px of level 0. With a member ``crs``, or ``crs=``: map coordinates
XML of ASAP (CAMELYON)         ``PartOfGroup`` of an annotation; px of level 0
shapefile, GeoPackage          a column; map coordinates (extra ``geo``)
=============================  =============================================================================================================

*Map coordinates* of any coordinate reference system become pixels through the image's georeference (`sft.tissue.map_polygons`).

*Overlaps.* Polygons of one class are united. Where classes overlap, the one that is named later counts, so a class that is drawn inside of
another (necrosis in a tumour) is named after it. *Outside* of all polygons a pixel has the label ``outside``. A pixel belongs to a polygon
if its centre does (`sft.tissue.Regions`), at every resolution.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sft.common.errors import InputError, SourceError, reason_text, some_names
from sft.common.untrusted.foreign_files import require_regular_file
from sft.common.untrusted.xml_files import XmlError, parse_xml
from sft.sources.georeference import Georeference
from sft.sources.image import LevelledImage, Pixels, Size, missing_extra
from sft.tissue.geojson import import_shapely, in_pixels, polygons_of, property_names, read_features
from sft.tissue.map_polygons import MapToPixels
from sft.tissue.polygons import Regions, check_overlap

__all__ = ["AnnotationLabels", "is_annotation_file", "read_annotations"]

_GEOJSON, _XML, _VECTOR = (".geojson", ".json"), (".xml",), (".shp", ".gpkg")
#: Kinds of ASAP annotations with an area.
_AREAS = ("Polygon", "Spline", "Rectangle")
_MIN_CORNERS = 3
#: Classes that a message lists.
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Area:
    """Geometry of an annotation, with the names that select it; the first is its full name."""

    names: tuple[str, ...]
    geometry: Any  #: of shapely


def is_annotation_file(path: str | os.PathLike[str]) -> bool:
    """True for a file of polygons by its extension.

    >>> is_annotation_file("a.geojson"), is_annotation_file("a.tif")
    (True, False)
    """
    return Path(path).suffix.lower() in (*_GEOJSON, *_XML, *_VECTOR)


def read_annotations(
    path: str | os.PathLike[str],
    classes: Mapping[str, int],
    *,
    required: bool = True,
    ignore_others: bool = False,
    georeference: Georeference | None = None,
    column: str = "class",
    crs: str | None = None,
) -> list[tuple[int, Regions]]:
    """Read the polygons of classes, each with its label, in the order in which they are painted.

    Args:
        path: of a GeoJSON file, an XML file of ASAP, a shapefile or a GeoPackage.
        classes: label of each class; a base class includes the classes that are derived from it, unless these are named as well.
        required: False to accept classes that the file lacks. Default: `True`
        ignore_others: True to leave out annotations of other classes. Default: `False`
        georeference: of the image, for polygons with map coordinates. Default: `None`
        column: with the class, of shapefiles and GeoPackages; of GeoJSON, the property of features without a ``classification``. Default:
            ``"class"``
        crs: coordinate system of a GeoJSON file, such as ``"OGC:CRS84"`` (longitude and latitude); ``"pixels"`` for px of level 0. Default:
            `None` (its member ``crs``; px of level 0 without one)

    Raises:
        InputError: classes that the file lacks, or classes of the file that are not named; the message lists those that there are.
        SourceError: the file cannot be read, or a library for it is missing.
    """
    where = Path(path)
    suffix = where.suffix.lower()
    if not classes or any(int(label) != label or label < 0 for label in classes.values()):
        raise InputError(f"cannot read {path} with classes={dict(classes)!r}: give the label of each class, an integer of at least 0.")
    if suffix in _GEOJSON:
        areas = [
            _Area(names=feature.ordered_names, geometry=geometry)
            for feature, geometry in read_features(where, georeference=georeference, column=column, crs=crs)
        ]
    elif suffix in _XML:
        areas = _asap_areas(where)
    elif suffix in _VECTOR:
        areas = _vector_areas(where, georeference, column)
    else:
        raise InputError(f"cannot read annotations from {path}: give {', '.join((*_GEOJSON, *_XML, *_VECTOR))}.")
    areas = [area for area in areas if polygons_of(area.geometry)]
    chosen = [next((name for name in area.names if name in classes), None) for area in areas]
    columns = property_names(where) if suffix in _GEOJSON and not any(area.names for area in areas) else ()
    _check_classes(path, classes, areas, chosen, columns, required=required, ignore_others=ignore_others)
    layers = []
    for name, label in classes.items():
        polygons = [polygon for area, its in zip(areas, chosen, strict=True) if its == name for polygon in polygons_of(area.geometry)]
        if polygons:
            layers.append((int(label), Regions(polygons)))
    return layers


def _check_classes(
    path: object,
    classes: Mapping[str, int],
    areas: Sequence[_Area],
    chosen: Sequence[str | None],
    columns: Sequence[str],
    *,
    required: bool,
    ignore_others: bool,
) -> None:
    """Refuse classes that the file lacks, and annotations of classes that are not named.

    Raises:
        InputError: there are some.
    """
    counts = Counter(area.names[0] if area.names else "(no class)" for area in areas)
    listed = ", ".join(f"{name!r} ({count})" for name, count in counts.most_common(_MAX_LISTED)) or "none"
    if len(counts) > _MAX_LISTED:
        listed += f" and {len(counts) - _MAX_LISTED} more"
    inventory = f"Its {len(areas)} annotations are {listed}" if areas else "It has no polygons"
    if areas and columns:
        inventory += f", their properties {some_names(columns)}: column= chooses the one with the class"
    missing = [name for name in classes if name not in chosen]
    if required and missing:
        raise InputError(
            f"cannot read {path} with classes {', '.join(map(repr, classes))}: no annotation with an area has "
            f"{', '.join(map(repr, missing))}. {inventory}. Correct the name; required=False accepts files that lack it."
        )
    others = [area.names[0] if area.names else "(no class)" for area, name in zip(areas, chosen, strict=True) if name is None]
    if others and not ignore_others:
        raise InputError(
            f"cannot read {path} with classes {', '.join(map(repr, classes))}: {len(others)} annotations are of other classes, such as "
            f"{others[0]!r}. {inventory}. Name each class; ignore_others=True leaves them out."
        )


class AnnotationLabels(LevelledImage):
    """Polygons of classes as a label image of one channel, at any resolution. `sft.sources.ImageLabels` makes it a source.

    >>> square = Regions([[[(0, 0), (2, 0), (2, 2), (0, 2)]]])
    >>> AnnotationLabels([(1, square)], width_px=3, height_px=2).read(0, 0, 3, 2)[..., 0].tolist()
    [[1, 1, 0], [1, 1, 0]]

    Args:
        layers: label and regions, as of `read_annotations`; later ones are painted over earlier ones.
        width_px: of the image.
        height_px: of the image.
        scale: px of level 0, in which the regions are, for a pixel of the image, (x, y). Default: 1
        outside: label of pixels outside of all regions. Default: 0
        name: of the annotations, for messages. Default: ``"annotations"``

    Raises:
        InputError: an extent below 1, a label beyond 65535, or all polygons are outside of the image (some may be).
    """

    def __init__(
        self,
        layers: Iterable[tuple[int, Regions]],
        *,
        width_px: int,
        height_px: int,
        scale: tuple[float, float] = (1.0, 1.0),
        outside: int = 0,
        name: str = "annotations",
    ) -> None:
        self.layers, self.scale, self.outside = tuple(layers), scale, outside
        largest = max((outside, *(label for label, _ in self.layers)))
        if min(width_px, height_px) < 1 or min(scale) <= 0 or not 0 <= outside <= largest <= np.iinfo(np.uint16).max:
            raise InputError(
                f"cannot paint labels up to {largest} (outside: {outside}) on {width_px} x {height_px} px: give labels of 0 to 65535, and "
                "an image with pixels."
            )
        self.dtype: np.dtype[Any] = np.dtype(np.uint8 if largest <= np.iinfo(np.uint8).max else np.uint16)
        check_overlap(
            (regions for _, regions in self.layers),
            width_px=width_px,
            height_px=height_px,
            scale=scale,
            purpose=f"cannot paint {name} on an image of {width_px} x {height_px} px",
        )
        self._size = width_px, height_px

    def __repr__(self) -> str:
        labels = sorted({label for label, _ in self.layers})
        return f"AnnotationLabels(labels {', '.join(map(str, labels)) or 'none'}, {self._size[0]} x {self._size[1]} px)"

    @property
    def num_channels(self) -> int:
        """1."""
        return 1

    @property
    def background(self) -> tuple[int]:
        """Label outside of all regions."""
        return (self.outside,)

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of the one level."""
        return (self._size,)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """1: there is one level."""
        return (1.0,)

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """None: nothing is compressed."""
        return (None,)

    def close(self) -> None:
        """No operation: no file is open."""

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """Labels of a rectangle, ``[h, w, 1]``; see `sft.sources.Image`.

        Raises:
            InputError: the rectangle is not inside the image.
        """
        rectangle = self._rectangle(x, y, w, h, level)
        out = np.full((*rectangle.shape, 1), self.outside, self.dtype)
        for label, regions in self.layers:
            out[regions.region(*rectangle.arguments, step=self.scale)] = label
        return out


def _asap_areas(path: Path) -> list[_Area]:
    """Annotations of an ASAP file; dots and open shapes have no area."""
    shapely = import_shapely(f"read {path}")
    try:
        require_regular_file(path)
        root = parse_xml(path.read_bytes())
        annotations = list(root.iter("Annotation"))
        if root.tag != "ASAP_Annotations":
            raise SourceError(f"cannot read {path} as annotations: its root is {root.tag!r}, not 'ASAP_Annotations'. Export it from ASAP.")
        areas = []
        for annotation in annotations:
            corners = sorted(annotation.iter("Coordinate"), key=lambda corner: float(corner.get("Order", "0")))
            points = np.array([[float(corner.attrib["X"]), float(corner.attrib["Y"])] for corner in corners]).reshape(-1, 2)
            if annotation.get("Type") not in _AREAS or len(points) < _MIN_CORNERS:
                continue
            if not np.isfinite(points).all():
                raise ValueError("a corner is not a finite number")
            group = annotation.get("PartOfGroup", "")
            names = tuple(name for name in ("" if group == "None" else group, annotation.get("Name", "")) if name)
            areas.append(_Area(names=names, geometry=shapely.make_valid(shapely.Polygon(points))))
    except (OSError, XmlError, ValueError, KeyError) as error:
        if isinstance(error, SourceError):
            raise
        reason = f"a corner lacks {error}" if isinstance(error, KeyError) else error.strerror if isinstance(error, OSError) else str(error)
        raise SourceError(f"cannot read {path} as annotations of ASAP: {reason}. Export it again.") from error
    return areas


def _vector_areas(path: Path, georeference: Georeference | None, column: str) -> list[_Area]:
    """Features of a shapefile or GeoPackage, in px of the image."""
    shapely = import_shapely(f"read {path}")
    try:
        import pyogrio
    except ImportError as error:
        raise missing_extra(f"read {path}", "geo", error) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of an error that is raised as well
            meta, _, geometries, fields = pyogrio.raw.read(path)
        geometries = shapely.from_wkb(geometries)
    except Exception as error:  # pyogrio's errors have no common base
        raise SourceError(
            f"cannot read {path} as a shapefile or GeoPackage: {reason_text(error)}. Copy all of its files, or export it again."
        ) from error
    names = list(meta["fields"])
    if column not in names:
        raise InputError(
            f"cannot read classes from the column {column!r} of {path}: it has {', '.join(map(repr, names))}. Choose one: column=."
        )
    to_pixels = MapToPixels(path, meta["crs"] or "", georeference)
    return [
        _Area(names=() if value is None else (str(value),), geometry=in_pixels(geometry, to_pixels))
        for geometry, value in zip(geometries, fields[names.index(column)], strict=True)
        if geometry is not None
    ]
