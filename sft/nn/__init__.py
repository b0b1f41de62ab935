"""Modules for models: losses that are computed strip by strip with the model that is compiled, and deep chains of equal blocks."""

from sft.nn.losses import DiceLoss as DiceLoss
from sft.nn.losses import WithLoss as WithLoss
from sft.nn.repeat import Repeat as Repeat
