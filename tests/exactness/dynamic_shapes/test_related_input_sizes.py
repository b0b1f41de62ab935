"""Models with relations between sizes of inputs: a factor, an offset, a sum. One capture serves all sizes with the relation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
import sft.api.capture_cache
from sft.analysis.frontend.capture import Capture, capture
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded


class _Related(nn.Module):
    """Two images, each through a convolution, and a function of both."""

    def __init__(self, join: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], *, padding: int = 1) -> None:
        super().__init__()
        self.join, self.first, self.second = join, nn.Conv2d(3, 4, 3, padding=padding), nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor, guide: Tensor) -> Tensor:
        return self.join(x, guide, self.first(x), self.second(guide))


def _scaled(x: Tensor, guide: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a + F.interpolate(b, scale_factor=a.shape[2] / b.shape[2])


def _asserted(x: Tensor, guide: Tensor, a: Tensor, b: Tensor) -> Tensor:
    assert x.shape[2] == 2 * guide.shape[2]
    assert x.shape[3] == 2 * guide.shape[3]
    return F.avg_pool2d(a, 2) + b


def _valid(x: Tensor, guide: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a + b if a.shape[2:] == b.shape[2:] else a * b.mean((2, 3), keepdim=True)


def _thirds(x: Tensor, guide: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a.mean((2, 3)), b.amax((2, 3))], 1) * (2.0 if 3 * x.shape[2] == 2 * guide.shape[2] else 1.0)


def _twice_and_sum(x: Tensor, guide: Tensor, a: Tensor, b: Tensor) -> Tensor:
    assert x.shape[2] == 2 * x.shape[3]
    return a.mean((2, 3)) + b.amax((2, 3)) * (2.0 if guide.shape[2] == x.shape[2] + guide.shape[3] else 1.0)


def _sum(x: Tensor, guide: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a.mean((2, 3)) + b.amax((2, 3)) * (2.0 if guide.shape[2] == x.shape[2] + x.shape[3] else 1.0)


class _StereoPair(nn.Module):
    """An image twice as wide as high, split into two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.conv(F.avg_pool2d(x, (1, 2)) if x.shape[3] == 2 * x.shape[2] else x)
        return output


_Sizes = tuple[tuple[int, int], ...]
#: Function of two images, and heights and widths of both: two related pairs, and an unrelated one if the model accepts it.
_CASES: dict[str, tuple[Callable[[], nn.Module], list[_Sizes]]] = {
    "scaled": (lambda: _Related(_scaled), [((24, 20), (12, 10)), ((40, 36), (20, 18))]),
    "asserted": (lambda: _Related(_asserted), [((24, 20), (12, 10)), ((16, 36), (8, 18))]),
    "valid": (lambda: _Related(_valid, padding=0), [((24, 20), (22, 18)), ((17, 13), (15, 11)), ((17, 13), (9, 11))]),
    "thirds": (lambda: _Related(_thirds), [((16, 9), (24, 10)), ((8, 9), (12, 10)), ((8, 9), (13, 10))]),
    "sum": (lambda: _Related(_sum), [((8, 10), (18, 9)), ((12, 11), (23, 9)), ((12, 11), (24, 9))]),
    "twice, and a sum": (lambda: _Related(_twice_and_sum), [((12, 6), (21, 9)), ((16, 8), (27, 11))]),
    "one image": (_StereoPair, [((12, 24),), ((9, 18),), ((9, 17),)]),
}
_STRIPS = sft.Options(tile=(4, None))


def _images(sizes: _Sizes) -> list[Tensor]:
    return [image(2, channels, *size, seed=channels) for channels, size in zip((3, 2), sizes, strict=False)]


@pytest.mark.parametrize("options", [None, _STRIPS, sft.Options(tile=(5, 7))])
@pytest.mark.parametrize("name", _CASES)
def test_related_sizes_are_exact(name: str, options: sft.Options | None) -> None:
    make, cases = _CASES[name]
    for sizes in cases:
        assert_exact(seeded(make), *_images(sizes), options=options, steps=1)


@pytest.mark.parametrize("name", _CASES)
def test_a_capture_serves_all_sizes_with_the_relation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []

    def counted(*args: Any, **keywords: Any) -> Capture:
        captures.append(capture(*args, **keywords))
        return captures[-1]

    monkeypatch.setattr(sft.api.capture_cache, "capture", counted)
    make, cases = _CASES[name]
    model = seeded(make)
    net = sft.compile(model, [value.shape for value in _images(cases[0])], options=_STRIPS)
    for number, sizes in enumerate(cases):
        inputs = _images(sizes)
        torch.testing.assert_close(net(*inputs), model(*inputs), rtol=1e-12, atol=1e-12)
        assert len(captures) == (1 if number < 2 else 2)


def test_a_model_that_asserts_how_its_sizes_are_related_refuses_others() -> None:
    net = sft.compile(seeded(lambda: _Related(_asserted)), [(1, 3, 24, 20), (1, 2, 12, 10)])
    with pytest.raises(AssertionError):
        net(image(1, 3, 25, 20), image(1, 2, 12, 10))
