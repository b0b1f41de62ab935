"""Predictions for images of any size, written strip by strip: writers of OME-TIFF, COG, OME-Zarr, ``.npy`` and GeoJSON."""

from sft.prediction.cog import CogWriter
from sft.prediction.npy import NpyWriter
from sft.prediction.ome_tiff import OmeTiffWriter
from sft.prediction.ome_zarr import OmeZarrWriter
from sft.prediction.polygon_tracer import LabelPolygon, PolygonTracer
from sft.prediction.polygon_writer import PolygonWriter
from sft.prediction.predict import PredictionResult
from sft.prediction.raster import PredictedRaster, RasterWriter

__all__ = [
    "CogWriter",
    "LabelPolygon",
    "NpyWriter",
    "OmeTiffWriter",
    "OmeZarrWriter",
    "PolygonTracer",
    "PolygonWriter",
    "PredictedRaster",
    "PredictionResult",
    "RasterWriter",
]
