"""Modules for models: losses computed strip by strip inside the compiled model, and deep chains of repeated blocks."""

from sft.nn.losses import DiceLoss as DiceLoss
from sft.nn.losses import WithLoss as WithLoss
from sft.nn.repeat import Repeat as Repeat
