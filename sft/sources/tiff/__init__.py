"""TIFF: slides, OME-TIFF, GeoTIFF and other pyramids, decoded tile by tile."""

from sft.sources.tiff.metadata import GeoTags, has_colour_table_file, read_geo_tags, read_resolution, read_sample_tags
from sft.sources.tiff.pages import NotTiledError
from sft.sources.tiff.reader import TiffImage

__all__ = ["GeoTags", "NotTiledError", "TiffImage", "has_colour_table_file", "read_geo_tags", "read_resolution", "read_sample_tags"]
