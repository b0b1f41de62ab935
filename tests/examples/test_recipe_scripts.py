"""Recipes: each script runs and agrees with plain PyTorch, and its page shows its code. Recipes of missing libraries are skipped."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.model_zoo import import_library
from tests.helpers.models import seeded

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = {
    "instead_of_sliding_window": "sliding-window",
    "satellite_scene": "satellite",
    "multichannel_zarr": "multichannel-zarr",
    "detection": "detection",
    "yolo": "yolo",
    "hf_trainer": "hf-trainer",
    "monai_engine": "monai",
    "nnunet_volume": "nnunet",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.[a-z_]+. is deprecated"),  # ignite
    pytest.mark.filterwarnings("ignore:::ultralytics"),
    pytest.mark.filterwarnings("ignore:::monai"),
    pytest.mark.filterwarnings("ignore:::ignite"),
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::torch.utils.data"),  # pinned memory without a GPU, requested by trainers
]


def _recipe(name: str) -> Any:
    return importlib.import_module(f"examples.recipes.{name}")


def _libraries(*names: str) -> None:
    """Skip without some libraries."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
        if name == "torchvision":
            import_library("torchvision")


@pytest.mark.parametrize("name", _PAGES)
def test_the_documentation_shows_them(name: str) -> None:
    source = (_ROOT / "examples" / "recipes" / f"{name}.py").read_text()
    page = (_ROOT / "docs" / "recipes" / f"{_PAGES[name]}.md").read_text()
    shown = textwrap.dedent(source.partition("# [recipe]\n")[2].partition("# [end]")[0]).strip()
    assert shown in page
    assert f"python examples/recipes/{name}.py" in page
    assert len(page.split()) <= 400
    assert "## When not to use it" in page


@pytest.mark.parametrize("name", _PAGES)
def test_scripts_have_a_command_line(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the libraries of the recipe."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(_ROOT / "examples" / "recipes" / f"{name}.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert end.value.code == 0 and "--budget BYTES" in text and "--height PX" in text
    assert re.search(r"\(default: \d+MiB\)", " ".join(text.split()))


def test_a_slide_without_a_sliding_window(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile = pytest.importorskip("tifffile")
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--height", "320", "--width", "384", "--budget", "8MiB"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(_ROOT / "examples" / "recipes" / "instead_of_sliding_window.py"), run_name="__main__")
    assert end.value.code == 0
    printed = r"peak: plain PyTorch [\d.]+ MiB, sft [\d.]+ MiB \(budget 8MiB\)\npixels with another class: 0"
    assert re.search(printed, capsys.readouterr().out)
    assert tifffile.imread(tmp_path / "classes.ome.tif").shape == (320, 384)
    assert json.loads((tmp_path / "classes.geojson").read_text())["features"]


def test_a_satellite_scene(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    comparison = _recipe("satellite_scene").main(["--out", str(tmp_path), "--height", "600", "--width", "500", "--budget", "8MiB"])
    assert comparison.difference == 0 and comparison.sft_bytes < comparison.plain_bytes
    with rasterio.open(tmp_path / "scene.tif") as scene, rasterio.open(tmp_path / "cover.tif") as cover:
        assert (cover.crs, cover.transform, cover.shape) == (scene.crs, scene.transform, scene.shape)
        counts = np.bincount(cover.read(1).ravel(), minlength=3)
    areas = (tmp_path / "cover.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[-1]) for row in areas] == pytest.approx([100 * count for count in counts[1:]], rel=0.01)


def test_a_multichannel_image(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    comparison = _recipe("multichannel_zarr").main(["--out", str(tmp_path), "--height", "300", "--width", "260", "--budget", "4MiB"])
    assert comparison.difference <= 1 / 65535 and comparison.sft_bytes < comparison.plain_bytes
    values = zarr.open_group(str(tmp_path / "types.zarr"), mode="r")["0"][:]
    assert values.shape == (4, 300, 260) and np.abs(values.sum(0).astype(int) - 65535).max() <= 4


@pytest.mark.parametrize("budget", ["1.00 KiB", "many"])
def test_refusals_are_one_line(budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tifffile")
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--height", "256", "--width", "256", "--budget", budget])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(_ROOT / "examples" / "recipes" / "instead_of_sliding_window.py"), run_name="__main__")
    message = capsys.readouterr().err
    assert end.value.code == 1 and message.startswith("error: ") and message.count("\n") == 1 and budget in message


class _BranchHead(nn.Module):
    """A branch of a detector's head, with torchvision's names."""

    def __init__(self, names: dict[str, int], num_anchors: int) -> None:
        super().__init__()
        self.num_classes = 3
        self.conv = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        for name, size in names.items():
            self.add_module(name, nn.Conv2d(6, num_anchors * size, 3, padding=1))


class _Head(nn.Module):
    """Head of RetinaNet, or with centreness of FCOS, written as torchvision writes it."""

    def __init__(self, is_fcos: bool) -> None:
        super().__init__()
        centreness, self.num_anchors = ({"bbox_ctrness": 1}, 1) if is_fcos else ({}, 2)
        self.classification_head = _BranchHead({"cls_logits": 3}, self.num_anchors)
        self.regression_head: Any = _BranchHead({"bbox_reg": 4, **centreness}, self.num_anchors)

    def forward(self, features: list[Tensor]) -> dict[str, Tensor]:
        scores, boxes, is_fcos = self.classification_head, self.regression_head, self.num_anchors == 1
        outputs: dict[str, list[Tensor]] = {}
        for feature in features:
            near = boxes.conv(feature)
            regression = boxes.bbox_reg(near)
            maps = {
                "cls_logits": (scores.cls_logits(scores.conv(feature)), 3),  # type: ignore[operator]
                "bbox_regression": (regression.relu() if is_fcos else regression, 4),
                **({"bbox_ctrness": (boxes.bbox_ctrness(near), 1)} if is_fcos else {}),
            }
            for name, (values, size) in maps.items():
                n, _, h, w = values.shape
                values = values.view(n, -1, size, h, w).permute(0, 3, 4, 1, 2).reshape(n, -1, size)
                outputs.setdefault(name, []).append(values)
        return {name: torch.cat(columns, 1) for name, columns in outputs.items()}


class _Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fpn = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU()), _Levels()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels: dict[str, Tensor] = self.fpn(self.body(x))
        return levels


class _Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.inner(x)
        return {"0": fine, "pool": nn.functional.max_pool2d(fine, 1, 2)}


def _assert_same_outputs(detector: Any, plain: Any, shape: tuple[int, int], budget: str) -> Any:
    """Compare outputs of the recipe's compiled detector head, and names of its weights, with the plain detector."""
    names = list(detector.state_dict())
    net = _recipe("detection").at_native_resolution(detector, budget)
    assert list(detector.state_dict()) == names == list(plain.state_dict())
    assert [id(value) for value in detector.parameters()] == [id(value) for value in dict(detector.named_parameters()).values()]
    x = torch.rand(1, 3, *shape)
    for is_training in (False, True):
        ours, theirs = (each.train(is_training).head(list(each.backbone(x).values())) for each in (detector, plain))
        assert list(ours) == list(theirs)
        for name, values in theirs.items():
            torch.testing.assert_close(ours[name], values, rtol=1e-4, atol=1e-5, msg=name)
    return net


@pytest.mark.parametrize("is_fcos", [False, True], ids=["retinanet", "fcos"])
def test_a_head_in_the_compiled_part_of_a_detector(is_fcos: bool) -> None:
    def make() -> nn.Module:
        detector = nn.Module()
        detector.backbone, detector.head = _Pyramid(), _Head(is_fcos)
        detector.transform = nn.Module()
        return detector

    detector = seeded(make).float()
    net = _assert_same_outputs(detector, copy.deepcopy(detector), (64, 48), "288KiB")
    assert any(segment.mode == "tiled" for segment in net.plan_for((1, 3, 64, 48)).segments)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "budget"), [("retinanet", "360MiB"), ("fcos", "450MiB")])
def test_a_detector_at_native_resolution(kind: str, budget: str) -> None:
    _libraries("torchvision")
    recipe = _recipe("detection")
    comparison = recipe.main(["--detector", kind, "--height", "512", "--width", "448", "--budget", budget])
    # In float32 rounding switches single ReLUs, which change the gradients of one box.
    assert comparison.difference < 1e-2 and comparison.sft_bytes < comparison.plain_bytes
    torch.manual_seed(0)
    detector = recipe.make_detector(kind).double()
    plain = copy.deepcopy(detector)
    net = recipe.at_native_resolution(detector, "1GiB")
    plain.transform.resize = detector.transform.resize
    image, boxes = torch.rand(3, 512, 448, dtype=torch.float64), torch.tensor([[20.0, 30.0, 60.0, 80.0]], dtype=torch.float64)
    for each in (plain, detector):
        recipe.step(each, image, {"boxes": boxes, "labels": torch.tensor([1])})
    assert recipe.gradient_difference(detector, plain) < 1e-12
    assert net is not None
    detector = recipe.make_detector(kind)
    _assert_same_outputs(detector, copy.deepcopy(detector), (128, 96), "1GiB")


@pytest.mark.slow
def test_yolo(monkeypatch: pytest.MonkeyPatch) -> None:
    _libraries("ultralytics")
    # Ultralytics takes torchvision's suppression where it is imported, which lacks its operators with another build of torch.
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    comparison = _recipe("yolo").main(["--height", "384", "--width", "320", "--budget", "64MiB"])
    assert comparison.difference < 1e-4 and comparison.sft_bytes < comparison.plain_bytes


@pytest.mark.slow
def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    _libraries("transformers")
    comparison = _recipe("hf_trainer").main(["--height", "128", "--width", "96", "--budget", "8MiB"])
    assert comparison.difference < 1e-5
    from transformers import Trainer, TrainingArguments

    recipe = _recipe("hf_trainer")
    model, dataset = recipe.segformer(), recipe.Stripes(64, 48, 3)
    net = sft.compile(copy.deepcopy(model), {name: column[None] for name, column in dataset[0].items()}, budget="16MiB")
    folder = str(tmp_path)
    arguments = TrainingArguments(folder, per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True)
    theirs, ours = (Trainer(model=each, args=arguments).predict(dataset) for each in (model, net))
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-5)
    np.testing.assert_allclose(ours.predictions, theirs.predictions, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_engine_of_monai() -> None:
    _libraries("monai", "ignite")
    comparison = _recipe("monai_engine").main(["--depth", "48", "--height", "32", "--width", "32", "--budget", "6MiB"])
    assert comparison.difference < 1e-5 and comparison.sft_bytes < comparison.plain_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "residual"])
def test_the_networks_of_nnunet(kind: str) -> None:
    _libraries("dynamic_network_architectures")
    comparison = _recipe("nnunet_volume").main(["--network", kind, "--depth", "48", "--height", "32", "--width", "32", "--budget", "32MiB"])
    assert comparison.difference < 1e-4 and comparison.sft_bytes < comparison.plain_bytes


class _TwoOutputs(nn.Module):
    """A network like nnU-Net's: scores at two resolutions, the finest first."""

    def __init__(self) -> None:
        super().__init__()

        def block(num_in: int, num_out: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv3d(num_in, num_out, 3, stride, 1), nn.InstanceNorm3d(num_out, affine=True), nn.LeakyReLU(inplace=True)
            )

        self.fine, self.coarse = block(1, 4, 1), block(4, 6, 2)
        self.up, self.join = nn.ConvTranspose3d(6, 4, 2, 2), block(8, 4, 1)
        self.heads = nn.ModuleList((nn.Conv3d(4, 3, 1), nn.Conv3d(6, 3, 1)))

    def forward(self, volume: Tensor) -> list[Tensor]:
        fine = self.fine(volume)
        coarse = self.coarse(fine)
        joined = self.join(torch.cat((self.up(coarse), fine), 1))
        return [self.heads[0](joined), self.heads[1](coarse)]


def test_deep_supervision_of_a_stand_in() -> None:
    """A volume in one piece, as in MIC-DKFZ/nnUNet#1838."""
    recipe = _recipe("nnunet_volume")
    network, plain = seeded(_TwoOutputs), seeded(_TwoOutputs)
    generator = torch.Generator().manual_seed(0)
    volume = torch.rand((1, 1, 24, 12, 16), generator=generator, dtype=torch.float64)
    finest = torch.randint(3, (1, 24, 12, 16), generator=generator)
    labels = [finest, finest[:, ::2, ::2, ::2].contiguous()]
    net = sft.compile(recipe.DeepSupervision(network), [volume, *labels], options=sft.Options(tile=(6, None)))
    expected, loss = recipe.DeepSupervision(plain)(volume, *labels), net(volume, *labels)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    for a, b in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-10)
