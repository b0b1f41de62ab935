"""Where an image comes from, and where its gradient goes, in strips of rows: anything that can hand out rectangles of pixels."""

from sft.sources.array import ArraySource
from sft.sources.host import Layout
from sft.sources.image import Image, check_region, read_strips
from sft.sources.labels import LabelSource
from sft.sources.load import load_tensor
from sft.sources.normalized import Normalized
from sft.sources.sink import ArraySink, RowSink
from sft.sources.slide import Slide
from sft.sources.source import Source, check_rows, select_samples
from sft.sources.strips import StripReader

__all__ = [
    "ArraySink",
    "ArraySource",
    "Image",
    "LabelSource",
    "Layout",
    "Normalized",
    "RowSink",
    "Slide",
    "Source",
    "StripReader",
    "check_region",
    "check_rows",
    "load_tensor",
    "read_strips",
    "select_samples",
]
