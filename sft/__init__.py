"""Exact training of vision models on inputs that do not fit the device."""

from sft.memory import Peak as Peak
from sft.memory import measure_peak as measure_peak
