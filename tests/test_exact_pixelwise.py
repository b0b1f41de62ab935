"""Functions of one pixel, or of one pixel of several values: each streams, and is what it is on the whole image."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sft

from .helpers.exactness import assert_exact
from .helpers.models import image, seeded

#: Of two images; the second is positive.
_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "frac": lambda x, y: x.frac() * y,
    "trunc": lambda x, y: (3 * x).trunc() * y,
    "deg2rad": lambda x, y: torch.deg2rad(x) + torch.rad2deg(y),
    "angle": lambda x, y: torch.angle(x) * y,
    "lgamma": lambda x, y: torch.lgamma(y + 1) + torch.digamma(y + 2) * x,
    "erfinv": lambda x, y: torch.erfinv(x.tanh() / 2) * y,
    "bessel": lambda x, y: torch.i0(x) + torch.special.i0e(x) + torch.special.i1(x) * torch.special.i1e(y),
    "entropy": lambda x, y: torch.special.entr(y) + torch.special.erfcx(x),
    "normal": lambda x, y: torch.special.log_ndtr(x) + torch.special.ndtri(x.sigmoid() / 2 + 0.25) * y,
    "round": lambda x, y: x.round(decimals=1) * y,
    "logical_xor": lambda x, y: torch.where((x > 0).logical_xor(y > 0.5), x, y),
    "bitwise": lambda x, y: torch.where(((x > 0) & (y > 0.5)) | ~(x > -1) ^ (y < 2), x, y),
    "bitwise of numbers": lambda x, y: x * (((8 * y).int() & 3) | 4) + ((8 * y).int() ^ 1),
    "isnan": lambda x, y: torch.where(torch.isnan(x / x.relu()) | torch.isinf(1 / x.relu()), x, y),
    "isfinite": lambda x, y: torch.where(torch.isfinite(1 / x.relu()), x, y) * torch.signbit(x),
    "isposinf": lambda x, y: torch.where(torch.isposinf(1 / x.relu()) | torch.isneginf(-1 / y.floor()), x, y),
    "clamp_min": lambda x, y: torch.clamp_min(x, y - 1) + torch.clamp_max(x, y),
    "remainder": lambda x, y: x % 0.7 + x % y + 2.5 % y.detach(),
    "fmod": lambda x, y: torch.fmod(x, 0.7) + torch.fmod(x, y),
    "copysign": lambda x, y: torch.copysign(y, x) + torch.copysign(x, -1.0),
    "floor_divide": lambda x, y: x.detach() // 0.3 + x.detach() // y.detach() + x * torch.div(x, y, rounding_mode="trunc"),
    "fmax": lambda x, y: torch.fmax(x, y) + torch.fmin(2 * x, y),
    "hypot": lambda x, y: torch.hypot(x, y),
    "heaviside": lambda x, y: torch.heaviside(x.detach(), y.detach()) * y,
    "logaddexp": lambda x, y: torch.logaddexp(x, y) + torch.logaddexp2(x, y),
    "max": lambda x, y: torch.max(x, y) + torch.min(2 * x, y),
    "xlogy": lambda x, y: torch.xlogy(x, y) + torch.xlogy(2.0, y) + torch.xlogy(x, 3.0),
    "xlog1py": lambda x, y: torch.special.xlog1py(x, y) + torch.special.xlog1py(2.0, y) + torch.special.xlog1py(x, 3.0),
}


class _Between(nn.Module):
    """A function of two images between convolutions."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.before(x).chunk(2, 1)
        found: Tensor = self.after(self.function(left, right.square() + 0.1))
        return found


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions_of_pixels(name: str) -> None:
    model, shape = seeded(lambda: _Between(_FUNCTIONS[name])), (2, 3, 25, 18)
    report = sft.check(model, shape)
    assert report.num_whole == 0, report.whole_reasons
    assert_exact(model, image(*shape), options=sft.Options(tile=(6, 9)), steps=1)


class _Repeated(nn.Module):
    def __init__(self, repeats: tuple[int, ...]) -> None:
        super().__init__()
        self.repeats = repeats
        self.before, self.after = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2 * repeats[1], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.after(self.before(x).repeat(*self.repeats))
        return found


@pytest.mark.parametrize("times", [1, 3])
def test_channels_repeated(times: int) -> None:
    model, shape = seeded(lambda: _Repeated((1, times, 1, 1))), (2, 3, 25, 18)
    assert sft.check(model, shape).num_whole == 0
    assert_exact(model, image(*shape), options=sft.Options(tile=(6, 9)), steps=1)


@pytest.mark.parametrize("repeats", [(2, 1, 1, 1), (1, 2, 1, 2)])
def test_a_batch_or_an_image_repeated_runs_whole(repeats: tuple[int, ...]) -> None:
    model = seeded(lambda: _Repeated(repeats))
    (reason,) = sft.check(model, (2, 3, 25, 18)).whole_reasons
    assert f"repeats {repeats} times along [N, channels, ...]; only channels" in reason
    assert_exact(model, image(2, 3, 25, 18), options=sft.Options(tile=(6, 9)), steps=1)
