"""The shared model builders have the published sizes, and freezing a norm lasts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from examples.models import (
    PooledClassifier,
    UNet,
    darknet19,
    freeze_norm,
    resnet18,
    resnet50,
    unet,
    vgg16,
)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts_are_the_published_ones() -> None:
    with torch.device("meta"):
        assert num_parameters(resnet18(1000)) == 11_689_512
        assert num_parameters(resnet50(1000)) == 25_557_032
        assert num_parameters(vgg16(1000).features) == 14_714_688
        # BatchNorm adds a weight and a bias for each of the 4,224 channels.
        assert num_parameters(vgg16(1000, batch_norm=True).features) == 14_714_688 + 2 * 4_224
        # The published weight file (79.6 MiB of fp32) holds these and a mean and a variance for each of 7,200 channels.
        assert num_parameters(darknet19(1000)) == 20_842_376
        assert round(4 * (20_842_376 + 2 * 7_200) / 2**20, 1) == 79.6


@pytest.mark.parametrize(
    ("build", "num_features", "reduction"),
    [(resnet18, 64, 32), (resnet50, 256, 32), (vgg16, 64, 32), (darknet19, 256, 32)],
)
def test_classifiers_take_odd_sizes(build: Callable[..., PooledClassifier], num_features: int, reduction: int) -> None:
    torch.manual_seed(0)
    model = build(5, width=8).double().eval()
    image = torch.randn(1, 3, 101, 67, dtype=torch.float64)
    features = model.features(image)
    assert features.shape[:2] == (1, num_features)
    assert features.shape[2] in (101 // reduction, -(-101 // reduction))
    assert model(image).shape == (1, 5)
    map_mean = torch.einsum("kc,bchw->bkhw", model.classifier.weight, features).mean((2, 3)) + model.classifier.bias
    torch.testing.assert_close(map_mean, model(image))  # the class-activation map averages to the logit


@pytest.mark.parametrize("levels", [2, 5])
def test_unet_keeps_the_resolution(levels: int) -> None:
    model: UNet = unet(4, levels=levels, width=4)
    image = torch.randn(2, 3, 48, 32)
    assert model.features(image).shape == (2, 4, 48, 32)
    assert model(image).shape == (2, 4, 48, 32)


def test_frozen_norms_survive_train_and_copies() -> None:
    model = freeze_norm(vgg16(2, batch_norm=True, width=4))
    keys = list(model.state_dict())
    for clone in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        clone.train()
        norms = [module for module in clone.modules() if isinstance(module, nn.BatchNorm2d)]
        assert len(norms) == 13 and not any(norm.training for norm in norms)
        assert clone.training and list(clone.state_dict()) == keys
        before = [buffer.clone() for buffer in clone.buffers()]
        clone(torch.randn(2, 3, 32, 32)).sum().backward()
        assert all(torch.equal(old, new) for old, new in zip(before, clone.buffers(), strict=True))
        assert all(norm.weight.grad is not None and norm.bias.grad is not None for norm in norms)


def test_freezing_changes_only_the_mode() -> None:
    model = resnet18(3, width=4)
    model(torch.randn(2, 3, 64, 64))  # running statistics other than 0 and 1
    image = torch.randn(1, 3, 50, 70)
    expected = copy.deepcopy(model).eval()(image)
    assert torch.equal(freeze_norm(model).train()(image), expected)
