"""Eager reference of models with dropout or noise: the same model with positional random numbers in place of torch's.

Eager PyTorch draws masks from a generator that every operator advances; ours follow positions, a seed and the site, the number of the
random operator in the order in which they run. The compiled model draws the seed from torch's generator at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sft.kernels.rng.dropout import Distribution, PositionalDropout, positional_dropout, positional_noise
from sft.kernels.rng.mask_tile import MaskKind
from sft.kernels.rng.philox import draw_seed

__all__ = ["DropPath", "reseed", "seed_of", "with_positional_dropout"]

_attend = F.scaled_dot_product_attention
_SATURATION = -1.7580993408473766


class DropPath(nn.Module):
    """Stochastic depth, written as timm writes it."""

    def __init__(self, drop_prob: float, *, mode: MaskKind = "row", floors: bool = False) -> None:
        super().__init__()
        self.drop_prob, self.mode, self.floors = drop_prob, mode, floors

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return x
        keep = 1 - self.drop_prob
        if self.floors:  # as ConvNeXt and EfficientNet do
            shares = keep + torch.rand((x.shape[0], *(1,) * (x.dim() - 1)), dtype=x.dtype, device=x.device)
            return x.div(keep) * shares.floor_()
        mask = x.new_empty((x.shape[0] if self.mode == "row" else 1, *(1,) * (x.dim() - 1))).bernoulli_(keep)
        y: Tensor = x * mask.div_(keep)
        return y


class _PositionalAlphaDropout(nn.Module):
    """Alpha dropout: dropped elements saturate, and an affine map restores mean and variance (Klambauer et al., 2017)."""

    def __init__(self, p: float, *, site: int, kind: MaskKind) -> None:
        super().__init__()
        self.p, self.site, self.kind, self.seed = p, site, kind, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = positional_dropout(torch.ones_like(x), self.p, site=self.site, seed=self.seed, kind=self.kind).ne(0)
        a = ((1 - self.p) * (1 + self.p * _SATURATION**2)) ** -0.5
        y: Tensor = torch.where(mask, x, _SATURATION) * a - a * self.p * _SATURATION
        return y


class _Sites:
    """Counter of random operators. While the model runs, ``F.dropout`` and operators that draw noise are counted, too."""

    def __init__(self) -> None:
        self.next = self.seed = 0
        self._patches: list[pytest.MonkeyPatch] = []

    def begin(self, *_: object) -> None:
        """Start a call of the model."""
        self.next = 0
        self._patches.append(pytest.MonkeyPatch())
        self._patches[-1].setattr(F, "dropout", self._dropout)
        self._patches[-1].setattr(F, "scaled_dot_product_attention", self._attention)
        for name, distribution in _NOISE_LIKE.items():
            self._patches[-1].setattr(torch, name, partial(self._noise_like, distribution))
        for name, (distribution, place) in _NOISE_INTO.items():
            self._patches[-1].setattr(Tensor, name, self._into(distribution, place))

    def end(self, *_: object) -> None:
        """End a call, also after an exception."""
        self._patches.pop().undo()

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        self.next += 1
        return positional_dropout(input, p, site=self.next - 1, seed=self.seed, kind="element")

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *arguments: Any,
        **options: Any,
    ) -> Tensor:
        """Attention with dropout; the attention weights are its result with an identity as values."""
        if not dropout_p:
            return _attend(query, key, value, attn_mask, 0.0, *arguments, **options)
        unit = torch.eye(key.shape[-2], dtype=key.dtype).expand(*key.shape[:-2], -1, -1)
        weights = self._dropout(_attend(query, key, unit, attn_mask, 0.0, *arguments, **options), dropout_p)
        num_heads_each = query.shape[-3] // key.shape[-3] if options.get("enable_gqa") else 1
        return weights @ (value if num_heads_each == 1 else value.repeat_interleave(num_heads_each, -3))

    def _noise_like(self, distribution: Distribution, like: Tensor) -> Tensor:
        self.next += 1
        return positional_noise(like, distribution, site=self.next - 1, seed=self.seed)

    def _into(self, distribution: Distribution, place: Callable[..., tuple[float, float]]) -> Callable[..., Tensor]:
        def draw(out: Tensor, *arguments: float) -> Tensor:
            scale, shift = place(*arguments)
            return out.copy_(self._noise_like(distribution, out) * scale + shift)

        return draw


_NOISE_LIKE: dict[str, Distribution] = {"rand_like": "uniform", "randn_like": "normal"}
#: Each with a function from its arguments to a scale and a shift.
_NOISE_INTO: dict[str, tuple[Distribution, Callable[..., tuple[float, float]]]] = {
    "uniform_": ("uniform", lambda low=0.0, high=1.0: (high - low, low)),
    "normal_": ("normal", lambda mean=0.0, std=1.0: (std, mean)),
    "exponential_": ("exponential", lambda rate=1.0: (1 / rate, 0.0)),
}


class _InOrder(nn.Module):
    """A positional dropout with a site that is assigned at its call, in any order of registration, and at each reuse of a module."""

    def __init__(self, dropout: nn.Module, sites: _Sites, *, draws: bool, axes: int | None) -> None:
        super().__init__()
        self.dropout, self.sites, self.draws, self.axes = dropout, sites, draws, axes
        self.p = dropout.p  # attention hands the rate to the fused operator itself

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.draws:
            self.dropout.site = self.sites.next  # type: ignore[assignment]
            self.sites.next += 1
        if self.axes is not None and x.dim() == self.axes + 1:  # to a dropout of more axes this is one sample
            output: Tensor = self.dropout(x.unsqueeze(0)).squeeze(0)
            return output
        y: Tensor = self.dropout(x)
        return y


_REPLACEMENTS: dict[str, Callable[..., nn.Module]] = {
    "Dropout": lambda m: PositionalDropout(m.p, site=0),
    **{f"Dropout{n}d": lambda m: PositionalDropout(m.p, site=0, kind="channel") for n in (1, 2, 3)},
    "AlphaDropout": lambda m: _PositionalAlphaDropout(m.p, site=0, kind="element"),
    "FeatureAlphaDropout": lambda m: _PositionalAlphaDropout(m.p, site=0, kind="channel"),
    "DropPath": lambda m: PositionalDropout(m.drop_prob, site=0, kind=getattr(m, "mode", "row")),
    "StochasticDepth": lambda m: PositionalDropout(m.p, site=0, kind=m.mode),
}


_SITES: WeakKeyDictionary[nn.Module, _Sites] = WeakKeyDictionary()


def with_positional_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout replaced, in place where it is not one itself."""
    sites = _Sites()
    made: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        make = _REPLACEMENTS.get(type(module).__name__)
        if make is None:
            continue
        if module not in made:
            dropout = make(module)
            draws = bool(dropout.p != 0)  # at a rate of 0 there is no mask, and no site
            axes = next((n for n in (1, 2, 3) if type(module).__name__ == f"Dropout{n}d"), None)
            made[module] = _InOrder(dropout, sites, draws=draws, axes=axes).train(module.training)
        new = made[module]
        if name:
            model.set_submodule(name, new)
        else:
            model = new
    model.register_forward_pre_hook(sites.begin)
    model.register_forward_hook(sites.end, always_call=True)
    _SITES[model] = sites
    return model


def reseed(model: nn.Module, seed: int) -> None:
    """Give a model's positional dropouts their seed."""
    _SITES[model].seed = seed
    for module in model.modules():
        if isinstance(module, (PositionalDropout, _PositionalAlphaDropout)):
            module.seed = seed


def seed_of(manual_seed: int) -> int:
    """Random numbers of a compiled model after ``torch.manual_seed(manual_seed)``."""
    return draw_seed(torch.Generator().manual_seed(manual_seed))
