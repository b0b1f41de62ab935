"""Inputs that are read strip by strip: the same values as for tensors, for every kind of source and every tiling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sft
from sft.common.interval import Interval
from sft.sources import ArraySink, ArraySource, Normalized, Slide, Tiles
from tests.helpers.exactness import gradient_errors, relative_error
from tests.helpers.models import ConvNet, Residual, chain, image, seeded
from tests.helpers.poison import poisoned
from tests.helpers.sources import Watched, reader_threads, write_tiled_tiff

TOLERANCE = 1e-10
MEAN, STD = (0.7, 0.5, 0.6), (0.2, 0.3, 0.25)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert reader_threads() == []


class SkipFromInput(nn.Module):
    """Model that reads the input three times, with norms over the image in between: each read is in its own segment."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Conv2d(7, 4, 5, padding=2), nn.BatchNorm2d(4)
        self.shortcut = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.first(x)))
        z = self.norm2(self.second(torch.cat([y, x], 1)))
        return torch.cat([torch.relu(z + self.shortcut(x)), x], 1)


class ByPixel(nn.Module):
    """A linear layer on each pixel, untiled: its residuals are views of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.permute(0, 2, 3, 1))
        return y


_NETS: dict[str, Callable[[], nn.Module]] = {
    "pooled": ConvNet,
    "residual": Residual,
    "skip from the input": SkipFromInput,
    "norm of the input": lambda: chain(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 5, padding=2, stride=2), nn.ReLU()),
    "mean of the input": lambda: chain(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)),
    "unread rows": lambda: chain(nn.Conv2d(3, 4, 1, stride=3), nn.Tanh()),
}


def check(
    model: nn.Module, x: Any, pixels: Tensor, options: sft.Options, *, target: Any = None, gradient: Callable[[], Tensor] | None = None
) -> Any:
    """Take two training steps from ``x`` and from the same ``pixels`` in eager PyTorch: all results must agree, in the projected bytes.

    Args:
        model: in float64.
        x: input of the compiled model.
        pixels: ``[N, C, H, W]``.
        options: of the compiled model.
        target: its ``input_grad``.
        gradient: content of the target after the step, ``[N, C, H, W]``.

    Returns:
        The compiled model.
    """
    eager, ours = copy.deepcopy(model), copy.deepcopy(model)
    net = sft.compile(ours, x, options=options)
    for _ in range(2):
        reference = pixels.clone().requires_grad_(target is not None)
        y_eager = eager(reference)
        with poisoned():
            y = net(x, input_grad=target)
        assert relative_error(y, y_eager) <= TOLERANCE
        assert y.requires_grad == y_eager.requires_grad
        direction = image(*y.shape, seed=3).to(y.dtype)
        y_eager.backward(direction)
        with poisoned():
            y.backward(direction)
        errors = gradient_errors({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in eager.named_parameters()})
        assert max(errors.values(), default=0.0) <= TOLERANCE, errors
        buffers = dict(net.named_buffers())
        assert all(relative_error(buffers[name], b) <= TOLERANCE for name, b in eager.named_buffers())
        if gradient is not None and reference.grad is not None:
            assert relative_error(gradient(), reference.grad) <= TOLERANCE
        for module in (net, eager):
            module.zero_grad(set_to_none=True)
    check_budget(net, x, target)
    with torch.no_grad():
        assert relative_error(net(x), eager(pixels)) <= TOLERANCE
    return net


def check_budget(net: Any, x: Any, target: Any) -> sft.Plan:
    """Measured <= projected, tight, within the budget; FLOPs as planned."""
    plan: sft.Plan = net.plan_for(x, input_grad=target)
    assert plan.input_placements == ("source",)

    def step() -> None:
        y = net(x, input_grad=target)
        y.backward(torch.ones_like(y))

    net.zero_grad(set_to_none=True)
    with sft.measure_peak("cpu") as peak:
        step()
    net.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as counter:
        step()
    net.zero_grad(set_to_none=True)
    measured, projected = peak.num_bytes, plan.projected_peak_bytes
    assert 0 < measured <= projected <= measured + max(measured // 100, 64 * 1024), (measured, projected)
    assert plan.total_bytes <= plan.budget_bytes
    assert counter.get_total_flops() == plan.flops
    return plan


def random_pixels(*shape: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def as_tensor(pixels: npt.NDArray[np.uint8]) -> Tensor:
    """NHWC pixels as a tensor for eager PyTorch."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).double() / 255


def normalised(pixels: npt.NDArray[np.uint8]) -> Tensor:
    """Pixels normalised with `MEAN` and `STD`."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (MEAN, STD))
    return (as_tensor(pixels) - mean) / std


# --- kinds of sources -----------------------------------------------------------------------------------------------

_ARRAYS: dict[str, Callable[[npt.NDArray[np.uint8]], Any]] = {
    "uint8 NHWC": lambda p: p,
    "uint8 HWC": lambda p: p[0],
    "uint8 NCHW": lambda p: np.ascontiguousarray(p.transpose(0, 3, 1, 2)),
    "uint8 CHW": lambda p: np.ascontiguousarray(p[0].transpose(2, 0, 1)),
    "float64 NCHW": lambda p: np.ascontiguousarray(as_tensor(p).numpy()),
    "float64 HWC": lambda p: np.ascontiguousarray(p[0] / 255.0),
    "source": lambda p: ArraySource(p, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", _ARRAYS)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_every_kind_of_array(kind: str, rows: int) -> None:
    pixels = random_pixels(1, 26, 18, 3)
    target = np.full((1, 3, 26, 18), np.nan)
    options = sft.Options(tile=(rows, None), state_every=2)
    check(seeded(ConvNet), _ARRAYS[kind](pixels), as_tensor(pixels), options, target=target, gradient=lambda: torch.from_numpy(target))


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_a_file_that_is_mapped(tmp_path: Path, layout: str) -> None:
    """From a file, and the gradient into one."""
    pixels = random_pixels(1, 40, 24, 3)
    order = [layout.index(axis) for axis in "HWC"]
    np.save(tmp_path / "image.npy", pixels[0].transpose(np.argsort(order)))
    x = np.load(tmp_path / "image.npy", mmap_mode="r")
    shape = tuple({"H": 40, "W": 24, "C": 3}[axis] for axis in layout)
    target = np.lib.format.open_memmap(tmp_path / "grad.npy", mode="w+", dtype=np.float64, shape=shape)

    def gradient() -> Tensor:
        return torch.from_numpy(np.load(tmp_path / "grad.npy")).permute(*[layout.index(axis) for axis in "CHW"])[None]

    options = sft.Options(tile=(6, None), state_every=3)
    check(seeded(Residual), x, as_tensor(pixels), options, target=target, gradient=gradient)


def test_a_path_is_read_by_a_source(tmp_path: Path) -> None:
    pixels = random_pixels(1, 20, 15, 3)
    np.save(tmp_path / "image.npy", pixels[0])
    source = ArraySource(tmp_path / "image.npy", mean=MEAN, std=STD, dtype=torch.float64)
    check(seeded(ConvNet), source, normalised(pixels), sft.Options(tile=(4, None)))


def test_a_slide(tmp_path: Path) -> None:
    """A slide itself gives pixels / 255; a normalising source gives its own scale."""
    pytest.importorskip("openslide")
    pixels = random_pixels(1, 70, 44, 3)
    write_tiled_tiff(tmp_path / "slide.tiff", pixels[0])
    target = np.zeros((70, 44, 3))
    options = sft.Options(tile=(9, None), state_every=2)
    with Slide(tmp_path / "slide.tiff") as slide:
        check(
            seeded(ConvNet),
            slide,
            as_tensor(pixels),
            options,
            target=target,
            gradient=lambda: torch.from_numpy(target).permute(2, 0, 1)[None],
        )
        source = Normalized(slide, mean=MEAN, std=STD, dtype=torch.float64)
        check(seeded(ConvNet), source, normalised(pixels), options)


def test_a_tensor_on_the_host_with_a_target_for_its_gradient() -> None:
    """It becomes a source, and changing it before the backward pass raises, as for all tensors."""
    model, x = seeded(Residual), image(2, 3, 24, 16)
    target = torch.full_like(x, torch.nan)
    net = check(model, Watched(x), x, sft.Options(tile=(5, None)))
    eager = x.clone().requires_grad_()
    model(eager).square().sum().backward()
    net(x, input_grad=target).square().sum().backward()
    assert eager.grad is not None and relative_error(target, eager.grad) <= TOLERANCE
    loss = net(x, input_grad=target).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


# --- tilings --------------------------------------------------------------------------------------------------------


@st.composite
def _cases(draw: st.DrawFn) -> tuple[tuple[int, int, int, int], sft.Options, bool, bool, str]:
    shape = (draw(st.integers(1, 3)), draw(st.integers(9, 30)), draw(st.integers(9, 20)), 3)
    tile = draw(st.one_of(st.none(), st.tuples(st.integers(1, shape[1]), st.none() | st.integers(5, shape[2]))))
    options = sft.Options(strategy="none")
    if tile is not None:
        options = sft.Options(
            tile=tile,
            halo=draw(st.sampled_from(["carry", "carry", "recompute"])),
            state_every=draw(st.integers(1, 5)),
            batch_tile=draw(st.one_of(st.none(), st.integers(1, 3))),
        )
    return shape, options, draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(["uint8 NHWC", "uint8 NCHW", "float64 NCHW"]))


@pytest.mark.parametrize("name", _NETS)
def test_any_tiling_is_exact(name: str) -> None:
    model = seeded(_NETS[name])

    @settings(max_examples=max(3, settings().max_examples // 25))
    @given(case=_cases())
    def any_case(case: tuple[tuple[int, int, int, int], sft.Options, bool, bool, str]) -> None:
        shape, options, wants_gradient, training, kind = case
        pixels = random_pixels(*shape)
        target = np.full(shape, np.nan) if wants_gradient else None
        check(
            copy.deepcopy(model).train(training),
            _ARRAYS[kind](pixels),
            as_tensor(pixels),
            options,
            target=target,
            gradient=None if target is None else lambda: torch.from_numpy(target).permute(0, 3, 1, 2),
        )

    any_case()


def test_untiled_residuals_may_be_views_of_the_image() -> None:
    pixels = random_pixels(2, 12, 9, 3)
    target = np.zeros((2, 12, 9, 3))
    gradient = torch.from_numpy(target).permute(0, 3, 1, 2)
    check(seeded(ByPixel), pixels, as_tensor(pixels), sft.Options(), target=target, gradient=lambda: gradient)
    check(seeded(ByPixel), pixels, as_tensor(pixels), sft.Options())


class _Two(nn.Module):
    """Two images of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 5, padding=2), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.left(a)) * self.right(b)
        return y


@pytest.mark.parametrize("second", ["source", "tensor"])
def test_several_inputs(second: str) -> None:
    """Each has its own reader; one of them may be a tensor on the device."""
    model = seeded(_Two)
    pixels, b = random_pixels(1, 23, 14, 3), image(1, 3, 23, 14)
    targets = (np.zeros((23, 14, 3)), np.zeros((1, 3, 23, 14)) if second == "source" else None)
    net: Any = sft.compile(copy.deepcopy(model), [(1, 3, 23, 14)] * 2, options=sft.Options(tile=(4, None), state_every=2))
    b_input: Any = Watched(b) if second == "source" else b.clone().requires_grad_()
    y = net(pixels, b_input, input_grad=targets)
    y.square().sum().backward()
    a_eager, b_eager = as_tensor(pixels).requires_grad_(), b.clone().requires_grad_()
    y_eager = model(a_eager, b_eager)
    y_eager.square().sum().backward()
    assert a_eager.grad is not None and b_eager.grad is not None
    assert relative_error(y, y_eager) <= TOLERANCE
    assert relative_error(torch.from_numpy(targets[0]).permute(2, 0, 1)[None], a_eager.grad) <= TOLERANCE
    mine = b_input.grad if second == "tensor" else torch.from_numpy(targets[1])
    assert relative_error(mine, b_eager.grad) <= TOLERANCE
    plan = net.plan_for(pixels, b_input, input_grad=targets)
    assert plan.input_placements == ("source", "source" if second == "source" else "device")


# --- gradients of the input -----------------------------------------------------------------------------------------


def test_frozen_parameters_and_a_gradient_of_the_input() -> None:
    """No tensor requires grad, but the image's gradient is requested."""
    model = seeded(Residual).requires_grad_(False)
    pixels, target = random_pixels(1, 30, 20, 3), np.full((30, 20, 3), np.nan)
    net = sft.compile(copy.deepcopy(model), pixels, options=sft.Options(tile=(6, None)))
    y = net(pixels, input_grad=target)
    assert y.requires_grad
    y.square().sum().backward()
    x = as_tensor(pixels).requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    assert relative_error(torch.from_numpy(target).permute(2, 0, 1)[None], x.grad) <= TOLERANCE
    assert not net(pixels).requires_grad


def test_a_second_backward_pass_replaces_the_gradients_of_the_first() -> None:
    pixels, target = random_pixels(1, 30, 20, 3), np.full((30, 20, 3), 7.0)
    net = sft.compile(seeded(Residual), pixels, options=sft.Options(tile=(6, None), state_every=2))
    loss = net(pixels, input_grad=target).square().sum()
    loss.backward(retain_graph=True)
    first = target.copy()
    loss.backward()
    assert np.array_equal(first, target) and np.abs(first).max() > 0


def test_a_sink_of_the_callers_own() -> None:
    """It is not reset: a second pass adds to it."""
    pixels, array = random_pixels(2, 30, 20, 3), np.zeros((2, 30, 20, 3))
    sink = ArraySink(array, shape=(2, 3, 30, 20), dtype=torch.float64)
    net = sft.compile(seeded(Residual), pixels, options=sft.Options(tile=(6, None), batch_tile=1))
    net(pixels, input_grad=sink).square().sum().backward()
    once = array.copy()
    net(pixels, input_grad=sink).square().sum().backward()
    assert np.allclose(array, 2 * once, rtol=1e-12, atol=0) and np.abs(once).max() > 0


def test_a_wider_target() -> None:
    """float32 gradients into a float64 array, without rounding: those of a float32 tensor, to the bit."""
    model = seeded(Residual).float()
    x = image(1, 3, 30, 20).float()
    target = np.zeros((1, 3, 30, 20))
    net = sft.compile(model, x.shape, options=sft.Options(tile=(30, None)))
    x_ours = x.clone().requires_grad_()
    net(x_ours).square().sum().backward()
    net(x.numpy(), input_grad=target).square().sum().backward()
    assert x_ours.grad is not None
    torch.testing.assert_close(torch.from_numpy(target), x_ours.grad.double(), rtol=1e-5, atol=1e-6)


# --- other devices ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_host_tensor_and_a_model_on_a_gpu() -> None:
    model, x = seeded(Residual), image(2, 3, 40, 32)
    target = torch.zeros_like(x)
    net = sft.compile(copy.deepcopy(model), x.shape, device="cuda", options=sft.Options(tile=(8, None), state_every=2))
    y = net(x, input_grad=target)
    y.square().sum().backward()
    eager = x.clone().requires_grad_()
    y_eager = model(eager)
    y_eager.square().sum().backward()
    assert eager.grad is not None
    assert relative_error(y.cpu(), y_eager) <= TOLERANCE and relative_error(target, eager.grad) <= TOLERANCE


def test_pixels_of_files_and_tiles_are_those_before_normalisation(tmp_path: Path) -> None:
    pixels = random_pixels(70, 40, 3)
    write_tiled_tiff(tmp_path / "image.tif", pixels)
    image = Slide(tmp_path / "image.tif")
    source, tiles = Normalized(image, mean=MEAN, std=STD), Tiles(image, 16)
    rows, bag = torch.empty(1, 3, 30, 40, dtype=torch.uint8), torch.empty(len(tiles), 3, 16, 16, dtype=torch.uint8)
    source.pixel_rows(Interval(20, 50), rows)
    tiles.pixel_rows(Interval(0, 16), bag)
    assert np.array_equal(rows[0].permute(1, 2, 0).numpy(), image.read(0, 20, 40, 30))
    for (x, y), tile in zip(tiles.positions_px.tolist(), bag, strict=True):
        assert np.array_equal(tile.permute(1, 2, 0).numpy(), image.read(x, y, 16, 16))
    with pytest.raises(sft.InputError, match=r"tensor of torch\.float32: it holds torch\.uint8"):
        source.pixel_rows(Interval(0, 30), torch.empty(1, 3, 30, 40))
