"""Silent errors of other exact-tiling libraries, each as a test of ours.

Each test has the name of the fault: gradients or outputs that were wrong by 1 to 130 %, without an error or a warning. Unsupported
operators are refused by name here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import sft
from tests.helpers.exactness import assert_exact, relative_error
from tests.helpers.models import Around, Branches, ConvNet, Residual, TinyUNet, chain, image, seeded


def _strips(rows: int, width: int, state_every: int | None = None) -> sft.Options:
    return sft.Options(tile=(rows, width), state_every=state_every)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_overlapping_max_pool(rows: int) -> None:
    model = seeded(lambda: Around(nn.MaxPool2d(3, 2, 1)))
    assert_exact(model, image(1, 3, 32, 16), options=_strips(rows, 16))


@pytest.mark.parametrize("batch", [2, 5])
def test_bias_gradient_at_batch_above_one(batch: int) -> None:
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)))
    report = assert_exact(model, image(batch, 3, 17, 9), options=_strips(4, 9))
    assert report.param_grad_error <= 1e-12


def test_bias_gradient_exists() -> None:
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)))
    net = sft.compile(model, (1, 3, 16, 8), options=_strips(4, 8))
    net(image(1, 3, 16, 8)).sum().backward()
    for layer in model:
        assert isinstance(layer, nn.Conv2d) and layer.bias is not None
        assert layer.bias.grad is not None and bool(layer.bias.grad.abs().min() > 0)


@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_input_gradient_at_seams(rows: int) -> None:
    """Each row of the input gradient is compared alone: a norm over the image hides one wrong row at a seam."""
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 5, padding=2), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3, padding=1)))
    net = sft.compile(model, (1, 3, 24, 12), options=_strips(rows, 12))
    x_eager, x_ours = (image(1, 3, 24, 12).requires_grad_() for _ in range(2))
    model(x_eager).square().sum().backward()
    net(x_ours).square().sum().backward()
    assert x_ours.grad is not None and x_eager.grad is not None
    for row in range(24):
        assert relative_error(x_ours.grad[:, :, row], x_eager.grad[:, :, row]) <= 1e-11, f"row {row}"


@pytest.mark.parametrize(("height", "width"), [(29, 17), (31, 19), (23, 11), (13, 9)])
def test_indivisible_sizes(height: int, width: int) -> None:
    assert_exact(seeded(ConvNet), image(1, 3, height, width), options=_strips(5, width, 2))


@pytest.mark.parametrize("rows", [3, 7])
def test_odd_strips(rows: int) -> None:
    assert_exact(seeded(Residual), image(1, 3, 32, 16), options=_strips(rows, 16))


def test_dilation() -> None:
    model = seeded(lambda: Around(nn.Conv2d(4, 4, 3, padding=4, dilation=4)))
    assert_exact(model, image(1, 3, 21, 13), options=_strips(2, 13))


def test_kernel_not_square() -> None:
    model = seeded(lambda: Around(nn.Conv2d(4, 4, (5, 3), padding=(2, 1))))
    assert_exact(model, image(1, 3, 21, 13), options=_strips(2, 13))


def test_stride_above_one() -> None:
    model = seeded(lambda: Around(nn.Conv2d(4, 4, 3, stride=2, padding=1)))
    assert_exact(model, image(1, 3, 21, 13), options=_strips(2, 13))


def test_valid_convolution() -> None:
    model = seeded(lambda: Around(nn.Conv2d(4, 4, 3)))
    assert_exact(model, image(1, 3, 21, 13), options=_strips(2, 13))


def test_second_step_s_output_gradient_is_not_the_first_s() -> None:
    model = seeded(lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)))
    net = sft.compile(model, (1, 3, 16, 8), options=_strips(4, 8))
    gradients = []
    for scale in (1.0, 2.0):
        x = image(1, 3, 16, 8).requires_grad_()
        y = net(x)
        y.backward(torch.full_like(y, scale))
        assert x.grad is not None
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], 2 * gradients[0])


def test_many_steps_in_a_row() -> None:
    assert_exact(seeded(ConvNet), image(2, 3, 19, 13), options=_strips(4, 13), steps=5)


def test_several_outputs() -> None:
    assert_exact(seeded(Branches), image(2, 3, 19, 13), options=_strips(4, 13))


def test_only_one_of_several_outputs_is_used() -> None:
    """The gradient of an unused output is zero, or None: never the earlier content of a buffer."""
    model = seeded(Branches)
    net = sft.compile(model, (1, 3, 19, 13), options=_strips(4, 13))
    gradients = []
    for module in (model, net):
        x = image(1, 3, 19, 13).requires_grad_()
        module(x)["maps"][1][0].sum().backward()
        assert x.grad is not None and model.coarse.weight.grad is not None
        head = model.head.weight.grad
        assert head is None or not bool(head.any())
        gradients.append((x.grad, model.coarse.weight.grad))
        model.zero_grad(set_to_none=True)
    for eager, ours in zip(*gradients, strict=True):
        assert relative_error(ours, eager) <= 1e-11


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_u_net_with_nearest_upsampling(rows: int) -> None:
    assert_exact(seeded(TinyUNet), image(1, 3, 32, 12), options=_strips(rows, 12, 2))


_RESAMPLED: dict[str, Callable[[], nn.Module]] = {
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "transposed_overlapping": lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1),
}


@pytest.mark.parametrize("name", _RESAMPLED)
def test_upsampling_looks_across_seams(name: str) -> None:
    """DistConv's bilinear upsampling stops at its shard; lightstream and SFT-AE have no upsampling that runs."""
    assert_exact(seeded(lambda: Around(_RESAMPLED[name]())), image(1, 3, 13, 11), options=_strips(3, 4), steps=1)


def test_even_kernel_that_is_no_stride() -> None:
    """DistConv requires integer multiples, ShardTensor a stride equal to an even kernel."""
    model = seeded(lambda: Around(nn.Conv2d(4, 4, (4, 2), stride=(3, 1), padding=(2, 1), groups=2)))
    assert_exact(model, image(1, 3, 21, 13), options=_strips(4, 5), steps=1)


def test_odd_tiles_of_a_strided_network() -> None:
    """lightstream's output has another shape then, or other values: sizes must be multiples of the total stride."""
    assert_exact(seeded(Residual), image(1, 3, 33, 22), options=sft.Options(tile=(7, 5), halo="recompute"), steps=1)


def test_volumes() -> None:
    """lightstream lists Conv3d, but does not support it."""
    model = seeded(lambda: chain(nn.Conv3d(2, 3, 3, padding=1), nn.MaxPool3d(3, 2, 1), nn.Conv3d(3, 2, (3, 1, 2), stride=2)))
    assert_exact(model, image(2, 2, 11, 7, 5), options=_strips(3, 4), steps=1)


def test_running_statistics_move_once_a_step() -> None:
    """SFT-AE drops weight, bias and statistics of a norm; a norm that runs once for each tile updates them as often."""
    model = seeded(lambda: Around(nn.BatchNorm2d(4))).train()
    net = sft.compile(copy.deepcopy(model), (1, 3, 16, 12), options=_strips(2, 5))
    x = image(1, 3, 16, 12)
    for module in (model, net):
        module(x).sum().backward()
    ours, eager = dict(net.named_buffers()), dict(model.named_buffers())
    assert int(ours["layer.num_batches_tracked"]) == 1
    for name in ("layer.running_mean", "layer.running_var"):
        assert relative_error(ours[name], eager[name]) <= 1e-12


def test_residual_network() -> None:
    assert_exact(seeded(Residual), image(2, 3, 37, 18), options=_strips(4, 18, 3))


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)],
    ids=lambda layer: type(layer).__name__,
)
def test_norms_measure_the_whole_image(layer: nn.Module) -> None:
    """lightstream (11-40 % off) and DistConv take the statistics of each tile or shard."""
    assert_exact(seeded(lambda: Around(copy.deepcopy(layer))).train(), image(2, 3, 33, 20), options=_strips(4, 20, 3), steps=3)


@pytest.mark.parametrize("cols", [20, 7])
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.5)], ids=lambda layer: type(layer).__name__)
def test_recomputed_strips_see_the_mask_of_the_forward_pass(layer: nn.Module, cols: int) -> None:
    """lightstream's recomputation draws another mask; SFT-AE's tiles disagree where they overlap."""
    assert_exact(seeded(lambda: Around(layer)).train(), image(2, 3, 33, 20), options=sft.Options(tile=(4, cols), state_every=3))


def test_the_input_gradient_at_the_seams_of_tiles() -> None:
    """lightstream's is wrong in a row and a column at each seam."""
    options = sft.Options(tile=(8, 6), halo="recompute")
    report = assert_exact(seeded(lambda: Around(nn.Conv2d(4, 4, 3, padding=1))), image(1, 3, 33, 20), options=options)
    assert report.input_grad_error <= 1e-12


class _Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.poisson(x.abs())


_PADDED: dict[str, Callable[[], nn.Module]] = {
    "reflect_conv": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "replicate_conv": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate"),
    "circular_conv": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    "reflection_pad": lambda: nn.ReflectionPad2d(1),
    "replication_pad": lambda: nn.ReplicationPad2d(1),
    "circular_pad": lambda: nn.CircularPad2d(1),
    "constant_pad": lambda: nn.ConstantPad2d((2, -1, 1, 3), 0.7),
}


@pytest.mark.parametrize("name", _PADDED)
def test_padding_is_that_of_the_image_and_not_of_a_strip(name: str) -> None:
    """lightstream drops all modes but zeros, without an error (16 % off)."""
    assert_exact(seeded(lambda: Around(_PADDED[name]())), image(1, 3, 16, 12), options=_strips(4, 7))


def test_never_silently_wrong() -> None:
    model = seeded(lambda: Around(_Noise()))
    with pytest.raises(sft.UnsupportedError) as caught:
        sft.compile(model, (1, 3, 16, 12), options=_strips(4, 12))(image(1, 3, 16, 12))
    (line,) = caught.value.problems
    assert "poisson" in line and re.search(r"\blayer\b", line), f"operator or module path is not named in {line}"


def test_all_problems_are_reported_at_once() -> None:
    model = seeded(lambda: Around(chain(_Noise(), nn.ReLU(), _Noise())))
    with pytest.raises(sft.UnsupportedError) as caught:
        sft.compile(model, (1, 3, 16, 12), options=_strips(4, 12))
    assert "layer.0" in str(caught.value) and "layer.2" in str(caught.value)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm2d(4)])
def test_refused_in_training_is_exact_in_eval(layer: nn.Module) -> None:
    model = seeded(lambda: Around(layer)).eval()
    assert_exact(model, image(1, 3, 17, 12), options=_strips(4, 12))


class _NoiseInTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.poisson(x.abs()) if self.training else x


def test_switched_to_training_after_compile() -> None:
    """A plan of eval mode is not used for a model in training mode."""
    model = seeded(lambda: Around(_NoiseInTraining())).eval()
    net = sft.compile(model, (1, 3, 16, 12), options=_strips(4, 12))
    net(image(1, 3, 16, 12))
    net.train()
    with pytest.raises(sft.UnsupportedError, match="layer"):
        net(image(1, 3, 16, 12))
