"""Complex losses: repeated uses of the output, with the input, as a spectrum, by another compiled model, in another call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import sft
from tests.helpers.models import chain, image, seeded

_SHAPE = (2, 3, 14, 12)

Loss = Callable[[Sequence[nn.Module], Tensor], Tensor]


def _net() -> nn.Module:
    return chain(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 3, 3, padding=1))


def _discriminator() -> nn.Module:
    return chain(spectral_norm(nn.Conv2d(3, 4, 3, stride=2)), nn.LeakyReLU(0.2), spectral_norm(nn.Conv2d(4, 1, 3)))


def _spectra(nets: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Complex values between the output and the loss."""
    y: Tensor = nets[0](x)
    wave = torch.view_as_complex(torch.stack([y, x], -1))
    loss: Tensor = (torch.fft.rfft2(y) - torch.fft.rfft2(x)).abs().mean() + torch.fft.fft2(wave).real.square().mean()
    loss = loss + torch.linalg.svdvals(y[:, 0]).sum()
    return loss


def _everything_at_once(nets: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The output in many terms, complete and in slices, with the input and with labels."""
    y: Tensor = nets[0](x)
    labels = (torch.arange(x[:, 0].numel()) % 3).view(x[:, 0].shape)
    loss = F.mse_loss(y, x) + F.cross_entropy(y, labels, ignore_index=2) + F.cosine_similarity(y.flatten(1), x.flatten(1)).sum()
    loss = loss + y[:, :, ::2][y[:, :, ::2] > 0].sum() + y.gather(1, labels[:, None]).mean() + y.amax() + (y - y.roll(1, 0)).abs().mean()
    return loss + (x.square() * y.detach()).mean()


def _perceptual(nets: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Difference of features of a second, frozen compiled model for output and input."""
    nets[1].requires_grad_(False).eval()
    with torch.no_grad():
        target = nets[1](x.flip(2))
    return F.l1_loss(nets[1](nets[0](x)), target)


def _siamese(nets: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Several calls of one model, in sequence and nested."""
    first, second = nets[0](x), nets[0](x.flip(0) * 0.5)
    again = nets[0](first)
    loss: Tensor = (first - second).square().mean() + (again * second).mean()
    return loss


def _weighted_by_gradients(nets: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Two losses, weighted by their gradients."""
    y: Tensor = nets[0](x)
    losses = y.square().mean(), y.abs().mean()
    parameters = list(nets[0].parameters())
    norms = [torch.stack([g.norm() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]).norm() for loss in losses]
    balanced: Tensor = losses[0] / norms[0] + losses[1] / norms[1]
    return balanced


def _assert_close(ours: Sequence[Tensor | None], eager: Sequence[Tensor | None]) -> None:
    for mine, theirs in zip(ours, eager, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("loss", [_spectra, _everything_at_once, _perceptual, _siamese, _weighted_by_gradients])
def test_loss(loss: Loss) -> None:
    models = [seeded(_net, seed=seed) for seed in (0, 1)]
    shape = (*_SHAPE[:2], None, None)
    compiled: list[nn.Module] = [sft.compile(copy.deepcopy(model), shape, options=sft.Options(tile=(5, 7))) for model in models]
    results = []
    for nets in (models, compiled):
        x = image(*_SHAPE).requires_grad_()
        value = loss(nets, x)
        value.backward()
        results.append(
            [value.detach(), x.grad, *(p.grad for net in nets for p in net.parameters()), *(b for net in nets for b in net.buffers())]
        )
    _assert_close(results[1], results[0])


def test_generator_and_discriminator() -> None:
    """Alternating steps; the discriminator is called twice before its gradients are taken, and its spectral norms change in between."""
    torch.manual_seed(0)
    pair = seeded(_net), _discriminator().double()
    options = sft.Options(tile=(5, 7))
    compiled = tuple(sft.compile(copy.deepcopy(model), (*_SHAPE[:2], None, None), options=options) for model in pair)
    results = []
    for generator, discriminator in (pair, compiled):
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (generator, discriminator)]
        losses = []
        for step in range(3):
            made = generator(image(*_SHAPE, seed=step))
            optimizers[1].zero_grad()
            (F.softplus(-discriminator(image(*_SHAPE, seed=9))).mean() + F.softplus(discriminator(made.detach())).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss = F.softplus(-discriminator(made)).mean()
            loss.backward()
            optimizers[0].step()
            losses.append(loss.detach())
        results.append([*losses, *generator.state_dict().values(), *discriminator.state_dict().values()])
    _assert_close(results[1], results[0])
