"""Weights of many blocks off the device: records in the host's memory or in a file, and the window through which they are streamed."""

from sft.weights.disk import DiskStore as DiskStore
from sft.weights.file import WeightsFile as WeightsFile
from sft.weights.layout import Layout as Layout
from sft.weights.layout import TensorSpec as TensorSpec
from sft.weights.single import SingleReading as SingleReading
from sft.weights.single import SingleStream as SingleStream
from sft.weights.store import HostStore as HostStore
from sft.weights.store import Store as Store
from sft.weights.stream import Counters as Counters
from sft.weights.stream import Reading as Reading
from sft.weights.stream import WeightStream as WeightStream
