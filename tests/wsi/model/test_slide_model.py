"""Backbones cut before their pooling, heads that stream, evidence that sums to the score, frozen norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sft
from examples.models import resnet18, vgg16
from sft.common.errors import InputError, SourceError
from sft.wsi.config import ModelConfig
from sft.wsi.eval.predict import options_without_download
from sft.wsi.model.backbones import cut_before_pooling, load_backbone, load_weights, num_features
from sft.wsi.model.heads import Evidence, SlideModel, build_model, calibrate_batch_norms, set_training
from sft.wsi.train.experiment import segmentation_counts
from tests.helpers.wsi import TinyNet


class _Inline(nn.Module):
    """Network that pools and classifies inside of ``forward``, as torchvision's DenseNet; the last activation is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=4, padding=1)
        self.fixed = nn.AdaptiveAvgPool2d(7)  # as in VGG: an image of fixed size
        self.classifier = nn.Linear(4 * 49, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(torch.flatten(self.fixed(nn.functional.relu(self.stem(x))), 1))
        return y


class _Branched(nn.Module):
    """Two poolings of different maps: the result depends on both, and only the first stage separates it from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, stride=4, padding=1), nn.Conv2d(4, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return torch.cat([hidden.mean((2, 3)), self.second(hidden).mean((2, 3))], 1)


class _Auxiliary(nn.Module):
    """A second classifier in training mode, as in GoogLeNet, which needs a larger image than the tests of sizes have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, stride=4, padding=1), nn.Conv2d(4, 5, 3, stride=2, padding=1)
        self.auxiliary, self.classifier = nn.Conv2d(4, 2, 99), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        extra = self.auxiliary(x) if self.training else None
        scores = self.classifier(self.second(x).mean((2, 3)))
        return (scores, extra) if self.training else scores


class _DrawsItself(nn.Module):
    """Dropout that reads the network's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.classifier = nn.Conv2d(3, 4, 3, stride=4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.stem(x), 0.5, self.training).relu()
        scores: Tensor = self.classifier(x.mean((2, 3)))
        return scores


class _ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3, stride=32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(x)
        return y.permute(0, 2, 3, 1)


class _Wrapped(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


class _Seq(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(1, keepdim=True)


def test_networks_are_cut_before_their_pooling() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 96, 64)
    inline, tiny, branched = _Inline(), TinyNet().eval(), _Branched()
    for network, features in (
        (inline, lambda: nn.functional.relu(inline.stem(x))),
        (tiny, lambda: tiny.features(x)),
        (_Wrapped(tiny), lambda: tiny.features(x)),
        (branched, lambda: branched.first(x)),
    ):
        cut = cut_before_pooling(network, "n").eval()
        assert torch.equal(cut(x), features()), type(network)
        assert set(cut.state_dict()) < set(network.state_dict()) and not any("classifier" in name for name in cut.state_dict())
    whole = nn.Conv2d(3, 2, 1)
    assert cut_before_pooling(whole, "n") is whole
    for pooled in (resnet18(2, width=4), vgg16(2, width=2)):
        assert torch.equal(cut_before_pooling(pooled, "n").eval()(x), pooled.eval().features(x))


def test_a_cut_backbone_still_trains_and_evaluates_differently() -> None:
    torch.manual_seed(0)
    cut, x = cut_before_pooling(TinyNet(), "n"), torch.randn(1, 3, 64, 64)
    dropped = [cut.train()(x) for _ in range(8)]
    assert not all(torch.equal(dropped[0], other) for other in dropped)  # dropout draws
    assert torch.equal(cut.eval()(x), cut(x))


def test_auxiliary_classifiers_are_left_out_in_every_mode() -> None:
    torch.manual_seed(0)
    for training in (True, False):
        network = _Auxiliary().train(training)
        cut = cut_before_pooling(network, "n")
        x = torch.randn(1, 3, 96, 64)
        assert torch.equal(cut(x), network.second(network.first(x)))
        assert {name.split(".")[0] for name in cut.state_dict()} == {"first", "second"} and num_features(cut, "n") == 5
        assert network.training is training and network.first.training is training


def test_a_trace_that_would_lose_its_dropout_is_refused() -> None:
    with pytest.raises(InputError, match="depend on the training flag"):
        cut_before_pooling(_DrawsItself(), "n")


def test_maps_whose_channels_come_last_are_refused() -> None:
    backbone = load_backbone("tests.wsi.model.test_slide_model:_ChannelsLast", {}, trust="tests")
    with pytest.raises(InputError, match=r"'n' \(_ChannelsLast\) gives \(1, 4, 4, 7\) for 128 x 128 px and \(1, 6, 6, 7\) .*permutes"):
        num_features(backbone, "n")


def test_backbones_that_are_none() -> None:
    for name, message in (
        ("no_such_package_at_all:net", "cannot import no_such_package_at_all"),
        ("tests.helpers.wsi:nothing", "no callable 'nothing'"),
        ("tests.helpers.wsi:write_task", "cannot be made"),
        ("tests.helpers.wsi:write_slide", "cannot be made"),
        ("torch.nn:Flatten", "no feature map"),
        ("tests.wsi.model.test_slide_model:_Seq", "no feature map"),
    ):
        with pytest.raises(InputError, match=message):
            load_backbone(name, {}, trust="tests")
    with pytest.raises(InputError, match=r"does not take an image of 128 x 128 px"):
        load_backbone("torch.nn:Conv2d", {"in_channels": 4, "out_channels": 1, "kernel_size": 3})
    assert num_features(load_backbone("tests.helpers.wsi:tiny_net", {"width": 6}, trust="tests"), "n") == 6


def test_weights_load_under_the_names_of_the_uncut_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, cut = TinyNet(), cut_before_pooling(TinyNet(), "n")
    save_file(whole.state_dict(), tmp_path / "w.safetensors")
    torch.save({"state_dict": {f"module.{name}": value for name, value in whole.state_dict().items()}}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        with torch.no_grad():
            for parameter in cut.parameters():
                parameter.zero_()
        load_weights(cut, tmp_path / name)
        assert all(torch.equal(value, whole.state_dict()[key]) for key, value in cut.state_dict().items())
    with pytest.raises(InputError, match="of another shape"):
        load_weights(cut_before_pooling(TinyNet(4), "n"), tmp_path / "w.pt")
    (tmp_path / "bad.pt").write_bytes(b"no weights")
    with pytest.raises(SourceError, match=r"bad\.pt is not read: it is damaged"):
        load_weights(cut, tmp_path / "bad.pt")


def _model(head: Any) -> SlideModel:
    torch.manual_seed(1)
    backbone = cut_before_pooling(TinyNet(), "n")
    model = build_model(backbone, 8, 3, head=head, attention_dim=4).double()
    set_training(model, training=False, freeze_norms=True)
    return model


@pytest.mark.parametrize("head", ["gap", "max", "attention", "segmentation"])
def test_heads_stream_exactly(head: Any) -> None:
    model = _model(head)
    x = torch.randn(1, 3, 136, 72, dtype=torch.float64, requires_grad=True)
    net: Any = sft.compile(model, x.shape, budget="64MiB", options=sft.Options(tile=(24, None)))
    assert any(segment.mode == "tiled" and segment.num_steps > 2 for segment in net.plan.segments)
    plain, streamed = model(x), net(x)
    assert torch.allclose(plain, streamed, rtol=1e-12, atol=1e-13)
    inputs = [x, *model.parameters()]
    weights = torch.randn_like(plain)
    pairs = zip(torch.autograd.grad(plain, inputs, weights), torch.autograd.grad(streamed, inputs, weights), strict=True)
    for expected, ours in pairs:
        # A gradient that cancels to zero (of the attention's last bias) is rounding error on both sides.
        assert (expected - ours).norm() <= 1e-11 * expected.norm() + 1e-13


def test_only_values_without_pixels_are_whole_in_heads() -> None:
    for head in ("max", "attention"):
        report = sft.check(_model(head), (1, 3, 128, 128))
        assert report.ok and not report.whole_reasons, str(report)


@pytest.mark.parametrize("head", ["gap", "max", "attention"])
def test_evidence_sums_to_the_score(head: Any) -> None:
    model = _model(head)
    x = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    scores, evidence = sft.compile(Evidence(model), x.shape, budget="64MiB", options=sft.Options(tile=(16, None)))(x)
    assert isinstance(model.head.classifier, nn.Linear)
    assert evidence.shape == (1, 3, 12, 8)
    assert torch.allclose(evidence.sum((2, 3)) + model.head.classifier.bias, scores, rtol=1e-12)
    assert torch.allclose(scores, model(x), rtol=1e-12)


def test_evidence_of_many_positions_survives_sixteen_bits() -> None:
    """A share of half a million positions underflows in fp16: a map would be mostly zero, and the rest a few steps."""
    torch.manual_seed(0)
    model = build_model(nn.Conv2d(3, 4, 1), 4, 2, head="gap").eval()
    x = torch.rand(1, 3, 700, 700)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        net = sft.compile(Evidence(model), x.shape, budget="512MiB")
        scores, evidence = net(x)
    assert isinstance(model.head.classifier, nn.Linear)
    assert evidence.dtype == torch.float32
    assert evidence.count_nonzero() == evidence.numel()
    assert torch.allclose(evidence.sum((2, 3)) + model.head.classifier.bias, scores.float(), atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pixels_are_counted_exactly_in_any_precision(dtype: torch.dtype) -> None:
    prediction = torch.zeros(1, 2, 300, 301, dtype=dtype)
    prediction[:, 1, :100] = 1
    labels = torch.zeros(1, 300, 301, dtype=torch.long)
    labels[:, :, :7] = 1
    counts = segmentation_counts(prediction, labels)
    assert counts.tolist() == [200 * 294, 200 * 301, 300 * 294, 100 * 7, 100 * 301, 300 * 7]


def test_a_trained_model_is_built_as_it_was_without_downloading_weights() -> None:
    """``pretrained`` may have further effects: torchvision's Inception then normalises its input."""

    def built(backbone: str, **options: Any) -> dict[str, Any]:
        return options_without_download(ModelConfig(backbone=backbone, options=options))

    assert built("nets:mine", pretrained=True, weights="a") == {"pretrained": True, "weights": "a"}
    assert built("timm:resnet18", pretrained=True, in_chans=3) == {"in_chans": 3}
    assert built("torchvision:resnet18", weights="DEFAULT") == built("resnet18", pretrained=True) == {}
    assert built("torchvision:inception_v3", weights="DEFAULT") == {"transform_input": True}
    assert built("torchvision:inception_v3", weights=None) == {}
    assert built("torchvision:googlenet", pretrained=True, aux_logits=True) == {"transform_input": True, "aux_logits": True}


def test_calibrated_norms_normalise_and_stay_frozen_in_training() -> None:
    torch.manual_seed(0)
    network, crops = TinyNet(), [3 * torch.randn(1, 3, 96, 96) + 2 for _ in range(6)]
    flags = [module.training for module in network.modules()]
    assert calibrate_batch_norms(network, crops) == 2
    assert flags == [module.training for module in network.modules()]
    first = network.features[1]
    assert isinstance(first, nn.BatchNorm2d) and first.momentum == 0.1
    features = torch.cat([network.features[0](crop) for crop in crops])
    assert torch.allclose(first.running_mean if first.running_mean is not None else torch.empty(0), features.mean((0, 2, 3)), atol=1e-5)
    set_training(network, training=True, freeze_norms=True)
    assert network.training and not first.training
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network(crops[0])
    assert all(torch.equal(before[name], buffer) for name, buffer in network.named_buffers())


def test_norms_are_calibrated_on_the_device_of_the_network() -> None:
    """Crops are read into the host's memory, and a network on a GPU refuses host tensors."""

    class Crop(torch.Tensor):
        asked: ClassVar[list[object]] = []

        def to(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            self.asked.append(arguments[0])
            return super().to(*arguments, **keywords)

    network = TinyNet()
    assert calibrate_batch_norms(network, [torch.randn(1, 3, 96, 96).as_subclass(Crop)]) == 2
    assert Crop.asked == [torch.device("cpu")]
