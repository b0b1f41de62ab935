"""Where an image comes from, and where its gradient goes, in strips of rows: anything that can hand out rectangles of pixels."""

from sft.errors import SkipSlideError
from sft.sources.array import ArraySource
from sft.sources.array_image import ArrayImage
from sft.sources.cached import Cached
from sft.sources.damage import BadTile, OnError, Tolerant
from sft.sources.host import Layout
from sft.sources.image import Image, check_region, read_strips
from sft.sources.labels import LabelSource
from sft.sources.load import load_tensor
from sft.sources.normalized import Normalized
from sft.sources.open import Reader, open_image
from sft.sources.raster import FileImage, ImageFacts, Raster
from sft.sources.repeating import RepeatingImage
from sft.sources.resample import Resampled, at_mpp
from sft.sources.sink import ArraySink, RowSink
from sft.sources.slide import Slide
from sft.sources.source import RepeatingSource, Source, check_rows, select_samples
from sft.sources.strips import StripReader
from sft.sources.tiff import NotTiledError, TiffImage
from sft.sources.views import AtLevel, Cropped, OneLevelView, RasterView, WithMpp
from sft.sources.volume import NiftiVolume
from sft.sources.zarr_image import ZarrImage

__all__ = [
    "ArrayImage",
    "ArraySink",
    "ArraySource",
    "AtLevel",
    "BadTile",
    "Cached",
    "Cropped",
    "FileImage",
    "Image",
    "ImageFacts",
    "LabelSource",
    "Layout",
    "NiftiVolume",
    "Normalized",
    "NotTiledError",
    "OnError",
    "OneLevelView",
    "Raster",
    "RasterView",
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
    "Tolerant",
    "WithMpp",
    "ZarrImage",
    "at_mpp",
    "check_region",
    "check_rows",
    "load_tensor",
    "open_image",
    "read_strips",
    "select_samples",
]
