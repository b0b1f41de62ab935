"""Modules for models: losses computed strip by strip inside the compiled model, and deep chains of repeated blocks."""

from typing import TYPE_CHECKING

from sft.common.lazy_exports import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from sft.nn.losses import DiceLoss as DiceLoss
    from sft.nn.losses import WithLoss as WithLoss
    from sft.nn.repeat import Repeat as Repeat
else:
    __all__, __getattr__, __dir__ = _lazy_exports(
        "sft.nn", {"sft.nn.losses": "DiceLoss WithLoss", "sft.nn.repeat": "Repeat"}, internal=("losses", "repeat")
    )
