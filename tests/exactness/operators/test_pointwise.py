"""Functions of one pixel, or of one pixel of several values: each streams, with the result on the full image."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

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
        output: Tensor = self.after(self.function(left, right.square() + 0.1))
        return output


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
        output: Tensor = self.after(self.before(x).repeat(*self.repeats))
        return output


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


def _assigned(write: Callable[[Tensor, Tensor], object], *, last: bool = False) -> Callable[[Tensor], Tensor]:
    """A copy of an image, channels last or not, into which ``write`` puts a function of the image."""

    def function(x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1) if last else x
        y = x.clone()
        write(y, x)
        return y.permute(0, 3, 1, 2) if last else y

    return function


def _swap(y: Tensor, x: Tensor) -> None:
    y[:, 0], y[:, 1] = x[:, 1], x[:, 0]


def _box(y: Tensor, x: Tensor) -> None:
    """The box of a detector, written over its raw numbers."""
    y[..., 0:2] = x[..., 0:2].sigmoid() * 2 - 0.5
    y[..., 3] = y[..., 3].exp()


def _halves(x: Tensor) -> Tensor:
    """Halves of the channels written crosswise into zeros of the image's size."""
    y = x.new_zeros(x.shape)
    y[:, :2] = x[:, 2:] * 2
    y[:, 2:] = x[:, :2].tanh()
    return y


def _shift(y: Tensor, x: Tensor) -> None:
    """Channels shifted along the image (Yu et al. 2021), which is channels last."""
    y[:, 1:, :, :1], y[:, :, 1:, 1:2] = x[:, :-1, :, :1], x[:, :, :-1, 1:2]
    y[:, :, 0] = x[:, :, 1]


#: Functions of four channels that depend on their order, or compute it.
_OF_CHANNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda x: x.sort(1, descending=True)[0] * torch.linspace(1, 2, 4, dtype=x.dtype).view(4, 1, 1),
    "sort, channels last": lambda x: x.permute(0, 2, 3, 1).sort(-1)[0].permute(0, 3, 1, 2),
    "argsort": lambda x: x.gather(1, x.argsort(1)) * torch.linspace(1, 2, 4, dtype=x.dtype).view(4, 1, 1),
    "topk": lambda x: torch.cat([*x.topk(3, 1)[:1], x.topk(1, 1, largest=False)[0] * 2], 1),
    "places": lambda x: x * x.topk(1, 1)[1] + x * x.sort(1)[1],
    "kthvalue": lambda x: x.kthvalue(2, 1, keepdim=True)[0] * x + x.kthvalue(3, 1)[0][:, None],
    "median": lambda x: x - x.median(1, keepdim=True)[0] + x.nanmedian(1, keepdim=True)[0].square(),
    "mode": lambda x: x * (2 * x).round().mode(1, keepdim=True)[0] + x.mode(1)[0][:, None],
    "cummax": lambda x: x.cummax(1)[0] + x.cummin(1)[0] * 2,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "roll": lambda x: x.roll(1, 1) * x + x.view(x.shape[0], 2, 2, *x.shape[2:]).roll((1, 1), (1, 2)).flatten(1, 2).tanh(),
    "a part becomes a number": _assigned(lambda y, _: y[:, 1:3].fill_(0.25)),
    "a channel becomes zero": _assigned(lambda y, _: y[:, -1].zero_()),
    "a part becomes a tensor's number": _assigned(lambda y, _: y.__setitem__((slice(None), slice(1, 3)), 0.5)),
    "a channel becomes another": _assigned(lambda y, x: y.__setitem__((slice(None), 2), x[:, 0] * 2)),
    "every other channel": _assigned(lambda y, x: y.__setitem__((slice(None), slice(1, None, 2)), x[:, ::2].tanh())),
    "a part is multiplied": _assigned(lambda y, _: y[:, :2].mul_(3)),
    "a part is clamped": _assigned(lambda y, _: y[:, 1:].clamp_(min=0)),
    "two change places": _assigned(_swap),
    "boxes, channels last": _assigned(_box, last=True),
    "put into zeros": _halves,
    "cosine similarity": lambda x: x * F.cosine_similarity(x, x.tanh(), dim=1)[:, None],
    "cosine similarity to weights": lambda x: x * F.cosine_similarity(x, x.new_ones(1, 4, 1, 1), -3, 2.0)[:, None],
    "every other row": _assigned(lambda y, _: y[:, :, ::2].mul_(2)),
    "shifted": _assigned(_shift, last=True),
}


class _OfChannels(nn.Module):
    """A function of an image of four channels between convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.after(torch.sin(self.function(self.before(x))))
        return output


@pytest.mark.parametrize("name", _OF_CHANNELS)
def test_functions_of_the_channels_of_pixels(name: str) -> None:
    model, shape = seeded(lambda: _OfChannels(_OF_CHANNELS[name])), (2, 3, 25, 18)
    assert sft.check(model, shape).whole_reasons == ()
    assert_exact(model, image(*shape), options=sft.Options(tile=(6, 9)), steps=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sort(2)[0],
        lambda x: x.roll(1),
        _assigned(lambda y, _: y[:1].mul_(2)),
    ],
    ids=["sort", "roll of all", "assignment"],
)
def test_functions_along_the_image_run_whole(function: Callable[[Tensor], Tensor]) -> None:
    model, shape = seeded(lambda: _OfChannels(function)), (2, 3, 25, 18)
    assert sft.check(model, shape).whole_reasons
    assert_exact(model, image(*shape), options=sft.Options(tile=(6, 9)), steps=1)


class _Frames(nn.Module):
    """Frames of a film, [N, channels, T, height, width], convolved as images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        frames: Tensor = self.conv(x.transpose(1, 2).flatten(0, 1))
        return frames


@pytest.mark.parametrize(
    ("model", "shape", "words"),
    [
        (lambda: _OfChannels(lambda x: x.sort(2)[0]), (2, 3, 25, 18), "sort: along dimension 2 of 4"),
        (lambda: _OfChannels(_assigned(lambda y, _: y[:1].mul_(2))), (2, 3, 25, 18), "assign an image of the size of the slice"),
        (lambda: _OfChannels(lambda x: torch.fft.rfft2(x).abs()), (2, 3, 25, 18), "transform before the compiled model"),
        (
            lambda: _OfChannels(lambda x: torch.grid_sampler(x, x[:, :2].permute(0, 2, 3, 1), 0, 0, False)),
            (2, 3, 25, 18),
            "warp before the compiled model",
        ),
        (_Frames, (1, 3, 4, 25, 18), "2 axes, and the model's input is read as [N, channels, depth, height, width]; give frames"),
    ],
)
def test_untiled_operators_have_a_remedy(model: Callable[[], nn.Module], shape: tuple[int, ...], words: str) -> None:
    assert any(words in reason for reason in sft.check(model(), shape).whole_reasons)
