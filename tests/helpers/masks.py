"""The eager reference of a model with dropout: the same model with positional dropout in place of torch's.

Eager PyTorch draws masks from a generator that every operator advances; ours follow positions, a seed and the site, the number of the
random operator in the order in which they run. The seed is what the compiled model draws from torch's generator at each call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sft.kernels.dropout import PositionalDropout, positional_dropout
from sft.kernels.mask_tile import Kind
from sft.kernels.philox import draw_seed

__all__ = ["DropPath", "reseed", "seed_of", "with_positional_dropout"]

_SATURATION = -1.7580993408473766


class DropPath(nn.Module):
    """Stochastic depth, written as timm writes it."""

    def __init__(self, drop_prob: float, *, mode: Kind = "row") -> None:
        super().__init__()
        self.drop_prob, self.mode = drop_prob, mode

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0] if self.mode == "row" else 1, *(1,) * (x.dim() - 1))).bernoulli_(keep)
        y: Tensor = x * mask.div_(keep)
        return y


class _PositionalAlphaDropout(nn.Module):
    """Alpha dropout: dropped elements saturate, and an affine map restores mean and variance (Klambauer et al., 2017)."""

    def __init__(self, p: float, *, site: int, kind: Kind) -> None:
        super().__init__()
        self.p, self.site, self.kind, self.seed = p, site, kind, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = positional_dropout(torch.ones_like(x), self.p, site=self.site, seed=self.seed, kind=self.kind).ne(0)
        a = ((1 - self.p) * (1 + self.p * _SATURATION**2)) ** -0.5
        y: Tensor = torch.where(kept, x, _SATURATION) * a - a * self.p * _SATURATION
        return y


_REPLACEMENTS: dict[str, Callable[..., nn.Module]] = {
    "Dropout": lambda m, site: PositionalDropout(m.p, site=site),
    "Dropout2d": lambda m, site: PositionalDropout(m.p, site=site, kind="channel"),
    "AlphaDropout": lambda m, site: _PositionalAlphaDropout(m.p, site=site, kind="element"),
    "FeatureAlphaDropout": lambda m, site: _PositionalAlphaDropout(m.p, site=site, kind="channel"),
    "DropPath": lambda m, site: PositionalDropout(m.drop_prob, site=site, kind=getattr(m, "mode", "row")),
    "StochasticDepth": lambda m, site: PositionalDropout(m.p, site=site, kind=m.mode),
}


#: At a rate of 0 these return their input; the others call torch's dropout, which counts as a site.
_IDLE_AT_ZERO = frozenset({"DropPath", "StochasticDepth"})


def with_positional_dropout(model: nn.Module) -> nn.Module:
    """Replace, in place, every dropout of a model whose modules are registered in the order in which they run."""
    site = 0
    for name, module in list(model.named_modules()):
        make = _REPLACEMENTS.get(type(module).__name__)
        if make is None:
            continue
        new = make(module, site).train(module.training)
        if not name:
            return new
        model.set_submodule(name, new)
        site += module.training and not (type(module).__name__ in _IDLE_AT_ZERO and new.p == 0)
    return model


def reseed(model: nn.Module, seed: int) -> bool:
    """Give a model's positional dropouts their seed; whether it has any."""
    found = [m for m in model.modules() if isinstance(m, (PositionalDropout, _PositionalAlphaDropout))]
    for module in found:
        module.seed = seed
    return bool(found)


def seed_of(manual_seed: int) -> int:
    """What a compiled model draws after ``torch.manual_seed(manual_seed)``."""
    return draw_seed(torch.Generator().manual_seed(manual_seed))
