"""Modules for models: losses that are computed strip by strip with the model that is compiled, and deep chains of equal blocks."""

from sft.nn.dice import DiceLoss as DiceLoss
from sft.nn.repeat import Repeat as Repeat
from sft.nn.with_loss import WithLoss as WithLoss
