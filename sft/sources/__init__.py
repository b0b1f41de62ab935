"""Data sources: images read in strips of rows, and sinks for their gradients."""

from sft.common.errors import SkipSlideError
from sft.sources.arrays import ArrayImage, ArraySource
from sft.sources.cached import Cached
from sft.sources.error_policy import BadTile, OnError, Tolerant
from sft.sources.file_image import FileImage, ReadCostWarning
from sft.sources.georeference import Georeference
from sft.sources.host_arrays import Layout
from sft.sources.image import Image, ImageFacts, Raster, check_region, read_strips
from sft.sources.labels import ImageLabels, LabelSource, label_cells
from sft.sources.normalize import Normalized, load_tensor
from sft.sources.open import Reader, open_image
from sft.sources.readers.composite import ChannelSelection, ChannelStack, Mosaic
from sft.sources.readers.encoded import EncodedImage
from sft.sources.readers.geotiff import GeoImage, MaskMode
from sft.sources.readers.label_images import open_labels
from sft.sources.readers.nifti import NiftiVolume
from sft.sources.readers.openslide import Slide
from sft.sources.readers.zarr import ZarrImage
from sft.sources.resample import Resampled, at_mpp
from sft.sources.sink import ArraySink, RowSink
from sft.sources.source import RepeatingImage, RepeatingSource, Source, check_rows, select_samples
from sft.sources.strip_reader import StripReader
from sft.sources.tiff import NotTiledError, TiffImage
from sft.sources.tiles import Tiles
from sft.sources.value_range import percentile_range
from sft.sources.views import AtLevel, Cropped, OneLevelView, RasterView, WithMpp

__all__ = [
    "ArrayImage",
    "ArraySink",
    "ArraySource",
    "AtLevel",
    "BadTile",
    "Cached",
    "ChannelSelection",
    "ChannelStack",
    "Cropped",
    "EncodedImage",
    "FileImage",
    "GeoImage",
    "Georeference",
    "Image",
    "ImageFacts",
    "ImageLabels",
    "LabelSource",
    "Layout",
    "MaskMode",
    "Mosaic",
    "NiftiVolume",
    "Normalized",
    "NotTiledError",
    "OnError",
    "OneLevelView",
    "Raster",
    "RasterView",
    "ReadCostWarning",
    "Reader",
    "RepeatingImage",
    "RepeatingSource",
    "Resampled",
    "RowSink",
    "SkipSlideError",
    "Slide",
    "Source",
    "StripReader",
    "TiffImage",
    "Tiles",
    "Tolerant",
    "WithMpp",
    "ZarrImage",
    "at_mpp",
    "check_region",
    "check_rows",
    "label_cells",
    "load_tensor",
    "open_image",
    "open_labels",
    "percentile_range",
    "read_strips",
    "select_samples",
]
