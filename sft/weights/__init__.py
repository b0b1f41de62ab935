"""Weights of many blocks off the device: records in the host's memory or in a file, and the window through which they are streamed."""

from sft.weights.disk import DiskStore as DiskStore
from sft.weights.file import WeightsFile as WeightsFile
from sft.weights.layout import RecordLayout as RecordLayout
from sft.weights.layout import TensorSpec as TensorSpec
from sft.weights.single import UnbufferedPass as UnbufferedPass
from sft.weights.single import UnbufferedStream as UnbufferedStream
from sft.weights.store import HostStore as HostStore
from sft.weights.store import Store as Store
from sft.weights.stream import StreamCounters as StreamCounters
from sft.weights.stream import StreamPass as StreamPass
from sft.weights.stream import WeightStream as WeightStream
