"""The reference of gradients: finite differences detect errors of eager PyTorch, and the tests' reference is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import InexactError, assert_exact
from tests.helpers.finite_differences import judge_gradients, with_contiguous_norm_gradients
from tests.helpers.models import image, seeded


class _Tokens(nn.Module):
    """A stem with batch norm and a result that is read as tokens: the gradient has their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        y: Tensor = self.head(self.norm(tokens))
        return y


def _token_strides(gradient: Tensor) -> Tensor:
    size = gradient.shape[2:]
    tokens: Tensor = gradient.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, size)
    return tokens


def _norm_gradients(norm: nn.Module, *, is_repaired: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, output gradient, and eager PyTorch's input gradients for a contiguous output gradient and for one in token layout."""
    x, gradient = image(1, 4, 3, 2).requires_grad_(), image(1, 4, 3, 2, seed=1)
    if is_repaired:
        with_contiguous_norm_gradients(norm)
    plain, strided = (torch.autograd.grad(norm(x), x, value)[0] for value in (gradient, _token_strides(gradient)))
    return x, gradient, plain, strided


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_batch_norm_backward_of_token_strides_is_wrong_in_eager_pytorch(training: bool) -> None:
    """docs/upstream/batch_norm_backward_strides.md: on the CPU the gradient is read in the wrong order."""
    norm = seeded(lambda: nn.BatchNorm2d(4)).train(training)
    x, gradient, plain, strided = _norm_gradients(norm, is_repaired=False)
    if torch.allclose(plain, strided, rtol=1e-10):
        pytest.skip(
            f"torch {torch.__version__} computes this gradient right: say so in docs/exactness.md (Where eager PyTorch is wrong) and in "
            "docs/upstream/batch_norm_backward_strides.md"
        )
    verdict = judge_gradients(lambda value: (norm(value) * gradient).sum(), x, plain, strided)
    assert verdict.culprit == "eager PyTorch" and abs(verdict.ours - verdict.difference) < 1e-6 * abs(verdict.ours), str(verdict)
    assert judge_gradients(lambda value: (norm(value) * gradient).sum(), x, strided, plain).culprit == "ours"


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_reference_reads_gradients_of_any_strides(training: bool) -> None:
    norm = seeded(lambda: nn.BatchNorm2d(4)).train(training)
    _, _, plain, strided = _norm_gradients(norm, is_repaired=True)
    torch.testing.assert_close(plain, strided, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_stem_before_tokens_is_exact(training: bool) -> None:
    model = seeded(_Tokens).train(training)
    assert_exact(model, image(1, 3, 12, 8), options=sft.Options(tile=(4, None)))


def test_a_wrong_gradient_is_attributed() -> None:
    class Doubled(nn.Module):
        """Twice the gradient in the compiled model."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            return y.detach() + 2 * (y - y.detach()) if torch.compiler.is_compiling() else y

    with pytest.raises(InexactError, match=r"finite differences give .*: ours is wrong"):
        assert_exact(seeded(Doubled), image(1, 3, 8, 6))


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm2d(3), lambda: nn.GroupNorm(1, 3), lambda: nn.InstanceNorm2d(3)])
def test_statistics_of_norms_do_not_overflow(make: Callable[[], nn.Module]) -> None:
    """One pixel of 1e20 in a float32 map: its square is infinite in float32, and the variance is not."""
    x = image(1, 3, 64, 48).float()
    x[0, 0, 5, 5] = 1e20
    expected = make().double()(x.double())
    ours = sft.compile(make(), x.shape, options=sft.Options(tile=(16, None)))(x)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
