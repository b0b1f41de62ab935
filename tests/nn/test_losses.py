"""Losses inside the compiled model: neither the output nor its gradient is ever complete, and the loss equals eager PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.common.interval import Interval
from sft.sources import LabelSource
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded

_CLASSES = 5


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return self.function(prediction, target)


class _Weighted(nn.Module):
    """A user's loss with class weights as a buffer."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction
        self.register_buffer("weight", torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0]))

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor)
        return F.cross_entropy(prediction, target, self.weight, ignore_index=2, label_smoothing=0.1, reduction=self.reduction)


def _network(axes: int = 2) -> nn.Module:
    conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    return nn.Sequential(conv(3, 6, 3, padding=1, stride=2), nn.Tanh(), nn.Upsample(scale_factor=2), conv(6, _CLASSES, 3, padding=1))


def _labels(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(_CLASSES, shape, generator=torch.Generator().manual_seed(seed))


def _scattered(prediction: Tensor, target: Tensor) -> Tensor:
    """One-hot labels as in MONAI."""
    shape = (target.shape[0], _CLASSES, *target.shape[1:])
    mask = torch.zeros(shape, dtype=prediction.dtype).scatter_(1, target.unsqueeze(1), 1)
    return (prediction.softmax(1) * mask).sum()


def _focal(prediction: Tensor, target: Tensor) -> Tensor:
    """Focal loss (Lin et al., 2017) on the class of a label."""
    log_probability = prediction.log_softmax(1).gather(1, target.unsqueeze(1))
    return -((1 - log_probability.exp()) ** 2 * log_probability).mean()


_OF_LABELS: dict[str, nn.Module] = {
    "mean": nn.CrossEntropyLoss(),
    "sum, some ignored": nn.CrossEntropyLoss(reduction="sum", ignore_index=1),
    "weighted mean, some ignored": _Weighted("mean"),
    "weighted sum": _Weighted("sum"),
    "each": _Function(lambda y, t: F.cross_entropy(y, t, reduction="none").square().mean()),
    "nll": _Function(lambda y, t: F.nll_loss(y.log_softmax(1), t, ignore_index=0)),
    "nll of an image": _Function(lambda y, t: F.nll_loss(y, t)),
    "nll of logarithms": _Function(
        lambda y, t: F.nll_loss(y.softmax(1).log(), t, weight=torch.linspace(0.5, 2.0, _CLASSES, dtype=y.dtype), ignore_index=2)
    ),
    "list of pixels": _Function(lambda y, t: F.cross_entropy(y.movedim(1, -1).reshape(-1, _CLASSES), t.reshape(-1))),
    "focal": _Function(_focal),
    "one hot": _Function(lambda y, t: (y.sigmoid() * F.one_hot(t, _CLASSES).movedim(-1, 1)).mean()),
    "scattered": _Function(_scattered),
    "dice": sft.nn.DiceLoss(),
    "dice of what counts": sft.nn.DiceLoss(squared=True, batch=True, include_background=False, ignore_index=3),
    "sum of two": _Function(lambda y, t: F.cross_entropy(y, t) + 0.5 * sft.nn.DiceLoss("sigmoid")(y, t)),
}
_OF_MASKS: dict[str, nn.Module] = {
    "mse": nn.MSELoss(),
    "l1": nn.L1Loss(reduction="sum"),
    "smooth l1": nn.SmoothL1Loss(),
    "huber": nn.HuberLoss(delta=0.3),
    "logits": nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)),
    "probabilities": _Function(lambda y, t: F.binary_cross_entropy(y.sigmoid(), t)),
    "divergence": _Function(lambda y, t: F.kl_div(y.log_softmax(1), t.softmax(1), reduction="batchmean")),
    "shares": _Function(lambda y, t: F.cross_entropy(y, t.softmax(1), label_smoothing=0.2)),
    "poisson": nn.PoissonNLLLoss(),
    "gaussian, small variances": _Function(lambda y, t: F.gaussian_nll_loss(y[:, :1], t[:, :1], y[:, 1:2].abs(), eps=0.1)),
    "gaussian, one variance": _Function(lambda y, t: F.gaussian_nll_loss(y, t, y[:, :1].exp(), full=True, reduction="sum")),
    "margin": _Function(lambda y, t: F.soft_margin_loss(y, (t > 0.5).to(y.dtype) * 2 - 1)),
    "each": _Function(lambda y, t: (F.mse_loss(y, t, reduction="none") * t).sum()),
    "dice": sft.nn.DiceLoss(),
}


def _assert_streams(loss: nn.Module, x: Tensor, target: Tensor, options: sft.Options, axes: int = 2) -> None:
    report = assert_exact(sft.nn.WithLoss(_network(axes), loss), x, target, options=options)
    assert not report.plan.notes, report.plan.notes
    assert any(segment.num_steps > 1 for segment in report.plan.segments)
    assert all(segment.mode == "tiled" or segment.output_bytes <= 4096 for segment in report.plan.segments)


@pytest.mark.parametrize("name", _OF_LABELS)
def test_losses_of_labels(name: str) -> None:
    _assert_streams(_OF_LABELS[name], image(2, 3, 22, 18), _labels(2, 22, 18), sft.Options(tile=(6, 10)))


@pytest.mark.parametrize("name", _OF_MASKS)
def test_losses_of_masks(name: str) -> None:
    target = torch.rand(2, _CLASSES, 22, 18, generator=torch.Generator().manual_seed(4))
    _assert_streams(_OF_MASKS[name], image(2, 3, 22, 18), target, sft.Options(tile=(6, None)))


@settings(max_examples=max(4, settings().max_examples // 25))
@given(
    axes=st.integers(1, 3),
    extents=st.tuples(*[st.integers(2, 7)] * 3),
    batch=st.integers(1, 3),
    tile=st.tuples(st.integers(1, 9), st.integers(3, 16)),
    name=st.sampled_from(["weighted mean, some ignored", "dice of what counts", "focal"]),
    has_channel=st.booleans(),
)
def test_any_size(axes: int, extents: tuple[int, ...], batch: int, tile: tuple[int, int], name: str, *, has_channel: bool) -> None:
    size = tuple(2 * extent for extent in extents[:axes])
    target = _labels(batch, *([1] if has_channel else []), *size)
    model = sft.nn.WithLoss(_network(axes), _OF_LABELS[name])
    assert_exact(model, image(batch, 3, *size), target, options=sft.Options(tile=tile if axes > 1 else (tile[0], None)))


def test_neither_the_output_nor_its_gradient_is_whole() -> None:
    """64 classes of a narrow network: plain PyTorch stores the output, its logarithm and its gradient; the compiled model a few strips."""
    num_classes, size = 64, 192
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, num_classes, 1))
    loss = _Function(lambda y, t: F.cross_entropy(y, t) + sft.nn.DiceLoss()(y, t))
    x, target = image(1, 3, size, size).float(), torch.randint(num_classes, (1, size, size))
    output_bytes = 4 * num_classes * size**2
    net: Any = sft.compile(sft.nn.WithLoss(model, loss), [tuple(x.shape), target], budget=output_bytes // 3)
    with sft.measure_peak() as peak:
        net(x, target).backward()
    assert peak.num_bytes <= net.plan.projected_peak_bytes <= net.plan.total_bytes <= output_bytes // 3


def test_labels_are_read_strip_by_strip() -> None:
    """Labels in a file of bytes, the image in another: the step equals that on tensors."""
    model, x, labels = _network().float(), image(1, 3, 24, 16).float(), _labels(1, 24, 16)
    expected = F.cross_entropy(model(x), labels)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    net: Any = sft.compile(sft.nn.WithLoss(model, nn.CrossEntropyLoss()), [x.shape, labels], options=sft.Options(tile=(4, None)))
    source = LabelSource(labels[0].to(torch.uint8).numpy())
    loss = net(x.numpy(), source)
    loss.backward()
    assert net.plan.input_placements == ("source", "source")
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(8, 6), (2, 8, 6), (2, 1, 8, 6)])
def test_label_sources_have_the_values_of_the_array(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    source = LabelSource(array)
    num, _, height, width = source.shape
    out = torch.empty(num, 1, 3, width, dtype=source.dtype)
    source.rows(Interval(2, 5), out)
    assert source.dtype == torch.int64
    assert torch.equal(out, torch.from_numpy(array.reshape(num, 1, height, width)[:, :, 2:5].astype(np.int64)))


@pytest.mark.parametrize("array", [np.zeros((2, 3, 8, 6), np.uint8), np.zeros((8, 6), np.float32), np.zeros(8, np.uint8)])
def test_arrays_without_labels_are_refused(array: Any) -> None:
    with pytest.raises(sft.InputError, match="labels"):
        LabelSource(array)


def test_a_model_with_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _network()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.body(x), "aux": x.mean()}

    model = sft.nn.WithLoss(Two(), nn.CrossEntropyLoss(), output="out")
    assert_exact(model, image(1, 3, 12, 8), _labels(1, 12, 8), options=sft.Options(tile=(4, None)))


class _Deep(nn.Module):
    """A network with two outputs, as of deep supervision."""

    def __init__(self, container: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.container = _network(), container

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return self.container(y, 2 * y)


@pytest.mark.parametrize("container", [lambda y, z: (y, z), lambda y, z: {"out": y, "aux": z}], ids=["tuple", "dict"])
def test_the_channel_of_labels_of_several_outputs(container: Callable[[Tensor, Tensor], Any]) -> None:
    """A loss of all outputs gets labels without their channel if its cross-entropies refuse the channel."""

    def loss(outputs: Any, target: Tensor) -> Tensor:
        first, second = outputs.values() if isinstance(outputs, dict) else outputs
        return F.cross_entropy(first, target) + 0.5 * F.cross_entropy(second, target)

    x, labels = image(1, 3, 12, 8), _labels(1, 1, 12, 8)
    model = sft.nn.WithLoss(_Deep(container), loss).double()
    torch.testing.assert_close(model(x, labels), loss(model.model(x), labels[:, 0]))
    assert_exact(model, x, labels, options=sft.Options(tile=(4, None)), steps=1)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), sft.nn.DiceLoss()], ids=["cross-entropy", "Dice"])
def test_a_loss_of_one_output_names_the_outputs(loss: nn.Module) -> None:
    x, labels = image(1, 3, 12, 8).float(), _labels(1, 1, 12, 8)
    for container, text in ((lambda y, z: (y, z), "tuple of 2 outputs"), (lambda y, z: {"out": y, "aux": z}, "dict of keys 'out', 'aux'")):
        with pytest.raises(sft.InputError, match=rf"{text}: .*WithLoss\(output=...\)"):
            sft.nn.WithLoss(_Deep(container), loss)(x, labels)
    with pytest.raises(sft.InputError, match=r"output=\.\.\."):
        sft.compile(sft.nn.WithLoss(_Deep(container), loss), [x, labels])


class _Shapes(nn.Module):
    """A loss that records the shapes of its targets, and accepts one number of dimensions."""

    def __init__(self, *accepted: int) -> None:
        super().__init__()
        self.accepted, self.shapes = accepted, list[tuple[int, ...]]()

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        self.shapes.append(tuple(t.shape))
        if t.dim() not in self.accepted:
            raise ValueError(f"no target of {t.dim()} dimensions")
        labels = t if t.dim() == 4 else t[:, None]
        return -y.log_softmax(1).gather(1, labels).mean() * t.dim()


@pytest.mark.parametrize("target_dims", [3, 4])
@pytest.mark.parametrize(
    ("accepted", "keep_channel", "received"),
    [
        ((3, 4), "auto", "as given"),
        ((3,), "auto", 3),
        ((4,), "auto", 4),
        ((3, 4), True, 4),
        ((3, 4), False, 3),
    ],
)
def test_the_channel_of_labels(target_dims: int, accepted: tuple[int, ...], keep_channel: Any, received: Any) -> None:
    """Targets are passed unchanged if the loss accepts them; the other form only after a refusal, or on request."""
    loss, x, labels = _Shapes(*accepted), image(2, 3, 12, 8), _labels(2, 12, 8)
    target = labels if target_dims == 3 else labels[:, None]
    model = sft.nn.WithLoss(_network(), loss, keep_channel=keep_channel).double()
    expected_dims = target_dims if received == "as given" else received
    shapes = {3: (2, 12, 8), 4: (2, 1, 12, 8)}
    value = model(x, target)
    assert loss.shapes[-1] == shapes[expected_dims]
    assert_exact(model, x, target, options=sft.Options(tile=(4, None)), steps=1)
    torch.testing.assert_close(value, F.cross_entropy(model.model(x), labels) * expected_dims)


def test_a_loss_that_refuses_both_forms_raises_its_error_for_the_original_target() -> None:
    model = sft.nn.WithLoss(_network(), _Shapes(7))
    x, target = image(1, 3, 12, 8).float(), _labels(1, 1, 12, 8)
    with pytest.raises(ValueError, match="no target of 4 dimensions"):
        model(x, target)
    with pytest.raises(ValueError, match="no target of 4 dimensions"):
        sft.compile(model, [x, target])


def test_a_mask_of_one_channel_stays() -> None:
    """A prediction of one channel has no labels of classes: binary losses take masks of its shape."""
    x, mask = image(2, 3, 12, 8), torch.rand(2, 1, 12, 8, generator=torch.Generator().manual_seed(4)).double()
    network = nn.Sequential(nn.Conv2d(3, 1, 3, padding=1))
    for target in (mask, mask[:, 0]):
        assert_exact(sft.nn.WithLoss(network, nn.BCEWithLogitsLoss()), x, target, options=sft.Options(tile=(4, None)), steps=1)


def test_labels_outside_the_classes_raise_and_change_nothing() -> None:
    model, x = _network(), image(1, 3, 12, 8)
    net = sft.compile(
        sft.nn.WithLoss(model.double(), nn.CrossEntropyLoss()), [x.shape, _labels(1, 12, 8)], options=sft.Options(tile=(4, None))
    )
    with pytest.raises(IndexError, match="out of bounds"):
        net(x.double(), torch.full((1, 12, 8), _CLASSES))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sft.nn.WithLoss(nn.MSELoss, nn.MSELoss()), "nn.Module, got type"),  # type: ignore[arg-type]
        (lambda: sft.nn.WithLoss(nn.Identity(), 3), "got int"),  # type: ignore[arg-type]
        (lambda: sft.nn.WithLoss(nn.Identity(), nn.MSELoss(), keep_channel="yes"), "keep_channel 'yes'"),  # type: ignore[arg-type]
        (lambda: sft.nn.WithLoss(nn.Identity(), nn.MSELoss())(torch.zeros(1)), "the target"),
        (lambda: sft.nn.DiceLoss("softmin"), "softmin"),  # type: ignore[arg-type]
        (lambda: sft.nn.DiceLoss(smooth=float("nan")), "at least 0"),
        (lambda: sft.nn.DiceLoss()(torch.zeros(1, 4, 8, 8), torch.zeros(1, 3, 8, 8)), r"\(1, 3, 8, 8\)"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(sft.InputError, match=message):
        make()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"])
def test_losses_of_whole_values_are_within_the_budget(name: str, reduction: str) -> None:
    """ATen returns some of their results in storage for all elements, as in a VQ-VAE, which compares codes twice."""

    def loss(a: Tensor, b: Tensor) -> Tensor:
        if name == "binary_cross_entropy":
            a, b = a.sigmoid(), b.sigmoid()
        value: Tensor = getattr(F, name)(a, b, reduction=reduction)
        return value

    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.codes = nn.Conv2d(3, 4, 3, padding=1), nn.Embedding(7, 4)

        def forward(self, x: Tensor) -> Tensor:
            z = self.conv(x).permute(0, 2, 3, 1).contiguous()
            index = torch.argmin(z.view(-1, 4) @ self.codes.weight.t(), 1)
            q = self.codes(index).view(z.shape)
            return loss(q, z.detach()) + 0.25 * loss(z, q.detach())

    assert_exact(seeded(Coded), image(2, 3, 12, 15))
    assert_exact(seeded(Coded), image(2, 3, 12, 15), options=sft.Options(tile=(4, None)), steps=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_counts_next_to_a_loss(dtype: torch.dtype) -> None:
    """Their number is known from the model alone; sums of weights have a dtype of their own."""

    def loss(y: Tensor, labels: Tensor) -> Any:
        confusion = torch.bincount(3 * y.argmax(1).flatten() + labels.flatten(), minlength=9)
        shares = torch.bincount(labels.flatten(), weights=(4 * y.detach().amax(1).flatten()).to(dtype), minlength=3)
        return F.cross_entropy(y, labels), confusion, shares / shares.sum()

    model, x, labels = seeded(lambda: nn.Conv2d(3, 3, 3, padding=1)), image(2, 3, 14, 12), torch.randint(0, 3, (2, 14, 12))
    net = sft.compile(sft.nn.WithLoss(model, loss), [x.shape, labels], options=sft.Options(tile=(4, None)))
    for ours, expected in zip(net(x, labels), loss(model(x), labels), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tile", [None, (4, None)])
def test_weights_of_classes_counted_in_the_batch(tile: tuple[int, int | None] | None) -> None:
    def loss(y: Tensor, labels: Tensor, minlength: int = 4) -> Tensor:
        counts = torch.bincount(labels.flatten(), minlength=minlength)
        return F.cross_entropy(y, labels, weight=1 / (counts + 1.0).to(y.dtype))

    model, x, labels = seeded(lambda: nn.Conv2d(3, 4, 3, padding=1)), image(2, 3, 14, 12), torch.randint(0, 4, (2, 14, 12))
    net = sft.compile(sft.nn.WithLoss(model, loss), [x.shape, labels], options=sft.Options(tile=tile))
    gradients = [torch.autograd.grad(value, model.weight)[0] for value in (net(x, labels), loss(model(x), labels))]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-10)
    with pytest.raises(sft.UnsupportedError, match="its size depends on the numbers; give minlength, above the largest"):
        sft.compile(sft.nn.WithLoss(model, lambda y, t: loss(y, t, 0)), [x.shape, labels])


def test_a_negative_variance_is_no_likelihood() -> None:
    """Eager PyTorch checks for one before it computes, and raises; here the loss raises."""
    loss = _Function(lambda y, t: F.gaussian_nll_loss(y, t, t))
    x, variances = image(1, 3, 10, 8), torch.ones(1, _CLASSES, 10, 8, dtype=torch.float64)
    net = sft.compile(sft.nn.WithLoss(_network(2), loss).double(), [x, variances])
    assert torch.isfinite(net(x, variances))
    variances[0, 0, 4, 4] = -1
    assert torch.isnan(net(x, variances))
    with pytest.raises(ValueError, match="negative"):
        loss(variances, variances)
    with pytest.raises(sft.UnsupportedError, match=r"test_losses\.py:\d+, gaussian_nll_loss .*var is of incorrect size"):
        sft.compile(sft.nn.WithLoss(_network(2), _Function(lambda y, t: F.gaussian_nll_loss(y, t, t[..., :3]))).double(), [x, variances])
