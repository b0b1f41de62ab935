"""Rare uses of operators that were wrong or failed in a sweep over PyTorch's own samples of all operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_Function = Callable[[Tensor], Any]


class _Odd(nn.Module):
    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.scale)


_EXACT: dict[str, tuple[_Function, tuple[int, ...]]] = {
    "nothing left of the shape": (lambda x: x.squeeze(), (1, 1, 1, 1)),
    "a number in order": (lambda x: torch.masked.var(x, mask=x > 0), (5, 5, 5)),
    "negative momentum": (lambda x: F.batch_norm(x, None, None, training=True, momentum=-1.0), (3, 2, 3, 4)),
    "saved statistics": (lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[:2], (3, 2, 3, 4)),
    "covariance": (lambda x: (x.flatten(1).cov(), torch.cov(x.flatten(), correction=0), x[:, 0, 0, :1].T.cov()), (4, 3, 5, 6)),
    "correlation": (lambda x: (torch.corrcoef(x.flatten(1)), x.flatten().corrcoef()), (4, 3, 5, 6)),
    "pooled vectors": (lambda x: F.avg_pool1d(x, 2), (3, 8)),
}


@pytest.mark.parametrize("name", _EXACT)
def test_rare_uses_are_exact(name: str) -> None:
    function, shape = _EXACT[name]
    model, x = seeded(lambda: _Odd(function)), image(*shape)
    results = []
    for call in (sft.compile(model, shape), model):
        x_ours = x.clone().requires_grad_()
        out = call(x_ours)
        leaves = list(out) if isinstance(out, (tuple, list)) else [out]
        attached = [leaf for leaf in leaves if leaf.requires_grad]
        grads = torch.autograd.grad(attached, [x_ours, model.scale], [torch.full_like(leaf, 0.7) for leaf in attached])
        results.append((*leaves, *grads))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.histc(5, 0, 1),
        lambda x: x.new_full((2, 3), 1.0),
        lambda x: torch.zeros_like(x),
        torch.special.bessel_j0,
        torch.special.scaled_modified_bessel_k1,
        lambda x: torch.special.shifted_chebyshev_polynomial_w(x, 2),
        lambda x: torch.special.hermite_polynomial_he(x, torch.tensor(3)),
    ],
)
def test_results_without_a_gradient_do_not_require_grad(function: _Function) -> None:
    model, x = seeded(lambda: _Odd(function)), image(2, 3, 5, 6).abs()
    out, expected = sft.compile(model, x.shape)(x), model(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert not out.requires_grad
    assert not expected.requires_grad


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: F.max_pool2d(x, 2), (2, 6, 6)),
        (lambda x: F.lp_pool2d(x, 2, 2), (2, 6, 6)),
        (lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)), (3, 4, 4, 6)),
    ],
)
def test_pools_of_images_without_a_batch_are_refused(function: _Function, shape: tuple[int, ...]) -> None:
    with pytest.raises(sft.InputError, match=r"has no batch; expected \d dimensions, batch it with x\[None\]"):
        sft.compile(seeded(lambda: _Odd(function)), shape)


class _LookedUp(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv, self.embedding = nn.Conv2d(3, 4, 3), nn.Embedding(10, 4, **options)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        out: Tensor = self.conv(x) * self.embedding(kinds)[:, :, None, None]
        return out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 0.5}, r"embedding.weight: `forward` writes into this parameter, as an embedding with max_norm does"),
        ({"sparse": True}, r"embedding: embedding: its gradient is sparse; leave out sparse=True"),
    ],
)
def test_embeddings_that_write_or_are_sparse_are_refused(options: dict[str, Any], message: str) -> None:
    """Otherwise the weight would not change, and would have no gradient."""
    with pytest.raises(sft.UnsupportedError, match=message):
        sft.compile(seeded(lambda: _LookedUp(**options)), [(3, 3, 9, 9), torch.tensor([1, 2, 2])])


def test_computed_weights_that_are_written_to_are_refused() -> None:
    """Otherwise the gradient of their computation would be lost."""
    places = torch.tensor([[1, 2], [0, 3]])
    with pytest.raises(sft.UnsupportedError, match="max_norm writes into its weights"):
        sft.compile(seeded(lambda: _Odd(lambda x: F.embedding(places, x, max_norm=1.0))), (5, 5))


class _Alike(nn.Module):
    """Arguments that compare equal and differ."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        y = x * self.scale
        zeros = (1 / F.threshold(y, 9.0, 0.0), 1 / F.threshold(y, 9.0, -0.0), y / 0.0, y / -0.0)
        wholes = (counts.clamp(min=1), counts.clamp(min=1.0), counts.clamp(min=True), counts**2, counts**2.0)
        return (*zeros, *wholes)


@pytest.mark.parametrize("tile", [None, (4, None)])
def test_arguments_that_compare_equal_and_differ(tile: tuple[int, int | None] | None) -> None:
    """0.0 and -0.0, 1 and 1.0. Regression: a cached result of one was used for the other."""
    model = _Alike().double()
    x, counts = image(2, 3, 10, 9), torch.arange(2 * 3 * 10 * 9).view(2, 3, 10, 9) % 5
    outputs, expected = sft.compile(model, [x.shape, counts], options=sft.Options(tile=tile))(x, counts), model(x, counts)
    for number, (ours, eager) in enumerate(zip(outputs, expected, strict=True)):
        assert ours.dtype == eager.dtype and torch.equal(ours, eager), number


class _Bag(nn.Module):
    """Channels scaled by an embedding bag of a few words."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.first, self.words = nn.Conv2d(3, 4, 3, padding=1), nn.EmbeddingBag(7, 4, mode=mode)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        out: Tensor = self.first(x) * self.words(words)[..., None, None]
        return out


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_bags_of_words_take_the_bytes_that_are_projected(mode: str) -> None:
    """ATen allocates one more index."""
    words = torch.arange(10).view(2, 5) % 7
    assert_exact(seeded(lambda: _Bag(mode)), image(2, 3, 16, 12), words, options=sft.Options(tile=(5, None)), to_the_byte=True)
