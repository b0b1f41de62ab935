"""Modules for models that are compiled: losses that are computed strip by strip, with the model."""

from sft.nn.dice import DiceLoss as DiceLoss
from sft.nn.with_loss import WithLoss as WithLoss
