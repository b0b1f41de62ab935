"""Weights stored off the device: records in host memory or in a file, and the window through which they are streamed."""

from sft.weights.disk_store import DiskStore as DiskStore
from sft.weights.disk_store import WeightsFile as WeightsFile
from sft.weights.record import RecordLayout as RecordLayout
from sft.weights.record import TensorSpec as TensorSpec
from sft.weights.store import HostStore as HostStore
from sft.weights.store import Store as Store
from sft.weights.stream import StreamCounters as StreamCounters
from sft.weights.stream import StreamPass as StreamPass
from sft.weights.stream import WeightStream as WeightStream
from sft.weights.unbuffered_stream import UnbufferedPass as UnbufferedPass
from sft.weights.unbuffered_stream import UnbufferedStream as UnbufferedStream
