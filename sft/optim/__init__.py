"""Optimizers that update one parameter at a time: the arithmetic of ``torch.optim`` bit for bit, in place and without a second gradient."""

from sft.optim.optimizer import SGD as SGD
from sft.optim.optimizer import AdamW as AdamW
from sft.optim.optimizer import FusedOptimizer as FusedOptimizer
from sft.optim.update import AdamWUpdate as AdamWUpdate
from sft.optim.update import SGDUpdate as SGDUpdate
from sft.optim.update import Update as Update
