"""Where an image comes from: anything that can hand out rectangles of pixels."""

from sft.sources.image import Image, check_region, read_strips
from sft.sources.load import load_tensor
from sft.sources.slide import Slide

__all__ = ["Image", "Slide", "check_region", "load_tensor", "read_strips"]
