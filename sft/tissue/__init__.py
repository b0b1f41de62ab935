"""Tissue masks: found by colour, drawn in QuPath, stored as PNG or GeoJSON; images masked by them, strip by strip; synthetic slides."""

from sft.tissue.annotations import AnnotationLabels, read_annotations
from sft.tissue.find import find_tissue
from sft.tissue.geojson import read_geojson, write_geojson
from sft.tissue.mask import Masked, TissueMask, crop_to_tissue
from sft.tissue.polygons import Regions
from sft.tissue.synthetic import write_synthetic_slide

__all__ = [
    "AnnotationLabels",
    "Masked",
    "Regions",
    "TissueMask",
    "crop_to_tissue",
    "find_tissue",
    "read_annotations",
    "read_geojson",
    "write_geojson",
    "write_synthetic_slide",
]
