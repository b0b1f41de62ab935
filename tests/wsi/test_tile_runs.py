"""Runs with an encoder of tiles, from a table of slides to maps: the scores are those of the plain network on all tiles."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sft.common.interval import Interval
from sft.wsi.cli import read_config
from sft.wsi.model.bags import BagModel
from sft.wsi.model.heads import set_training
from sft.wsi.train.checkpoint import CheckpointFolder, restore_weights
from sft.wsi.train.experiment import Experiment, load_experiment
from sft.wsi.train.grad_accumulation import GradientAccumulator
from tests.helpers.wsi import read_rows, real_pixels, run_wsi, tissue_places, write_config, write_slide, write_table

_MODEL = {"backbone": "tests.helpers.wsi:tile_net", "encoder": "tiles", "tile_px": 16, "head": "attention", "budget": "8MiB"}


def _write_slides(folder: Path) -> Path:
    """Slides of 80 x 64 px, each with a mask of its left side."""
    rows = []
    for number, (top, left) in enumerate(tissue_places(80)[:8]):
        crop = real_pixels()[top : top + 64, left : left + 80]
        write_slide(folder / f"s{number}.tif", crop[..., ::-1] if number % 2 else crop, num_levels=1)
        mask = np.zeros((64, 80), np.uint8)
        mask[:, : 64 if number == 5 else 48] = 1
        np.save(folder / f"m{number}.npy", mask)
        split = "val" if number >= 4 else "train"
        row = {"slide": f"s{number}.tif", "label": ("plain", "swapped")[number % 2], "split": split, "mask": f"m{number}.npy"}
        rows.append(row)
    return write_table(folder / "slides.csv", rows)


def _command(folder: Path, table: Path, name: str = "run") -> list[str]:
    config = write_config(folder / f"{name}.yaml", table, folder / name, model=_MODEL)
    return ["train", "--config", str(config), "--bootstrap", "0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiles")
    assert run_wsi(_command(folder, _write_slides(folder))) == 0
    return folder


def _experiment(run: Path) -> Experiment:
    experiment = load_experiment(read_config(run / "config.yaml"), trust="tests")
    best = CheckpointFolder(run / "checkpoints").load("best")
    assert best is not None
    restore_weights(experiment.model, best.weights, run)
    set_training(experiment.model, training=False, freeze_norms=True)
    return experiment


def _tiles(experiment: Experiment, number: int) -> Tensor:
    source = experiment.feed.source(experiment.records("val")[number])
    tiles = torch.empty(source.shape)
    source.rows(Interval(0, source.shape[2]), tiles)
    return tiles


def test_predictions_are_those_of_the_plain_network(trained: Path) -> None:
    run = trained / "run"
    experiment = _experiment(run)
    rows = read_rows(run / "val" / "predictions.csv")
    assert len(rows) == 4 and [len(_tiles(experiment, number)) for number in range(4)] == [12, 16, 12, 12]
    for number, row in enumerate(rows):
        expected = experiment.model(_tiles(experiment, number)).softmax(1)[0].tolist()
        assert [float(row["p_plain"]), float(row["p_swapped"])] == pytest.approx(expected, rel=1e-5)
    assert len(read_rows(run / "steps.csv")) == 4 and "model.encoder" in (run / "report.html").read_text()
    plan = json.loads((run / "plan.json").read_text())
    assert plan["input_shapes"] == [[12, 3, 16, 16]] and plan["input_placements"] == ["source"]


def test_a_step_is_that_of_the_plain_network(trained: Path, tmp_path: Path) -> None:
    """Gradients of a group of two slides: tiles turned with their slide, frozen norms."""
    command = _command(tmp_path, trained / "slides.csv")
    seen: list[dict[str, Tensor]] = []
    original = GradientAccumulator.accumulate

    def recorded(self: GradientAccumulator, group: Any, *args: Any, **named: Any) -> Any:
        before = {name: value.clone() for name, value in self._model.state_dict().items()}
        result = original(self, group, *args, **named)
        if not seen:
            seen.append({name: value.grad.clone() for name, value in self._model.named_parameters() if value.grad is not None})
            self._model.load_state_dict(before)
            self._model.zero_grad()
            self.set_training()
            for record in group:
                augmentation = augmentations[record.name]
                source = self._experiment.feed.source(record, augmentation)
                tiles = torch.empty(source.shape)
                source.rows(Interval(0, source.shape[2]), tiles)
                loss = self._task.slide_loss(self._model(tiles), record.target or ())
                (loss / len(group)).backward()
            seen.append({name: value.grad.clone() for name, value in self._model.named_parameters() if value.grad is not None})
        return result

    inputs, augmentations = GradientAccumulator.inputs, {}

    def watched(self: GradientAccumulator, record: Any, augmentation: Any) -> Any:
        augmentations[record.name] = augmentation
        return inputs(self, record, augmentation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientAccumulator, "accumulate", recorded)
        patch.setattr(GradientAccumulator, "inputs", watched)
        assert run_wsi([*command, "--train.epochs", "1"]) == 0
    ours, plain = seen
    assert ours.keys() == plain.keys() and len(ours) == 16
    for name, gradient in plain.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()) + 1e-8), name


def test_a_terminated_run_continues_to_the_same_bits(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _command(tmp_path, trained / "slides.csv")
    original, calls = GradientAccumulator._forward, 0

    def ending(self: GradientAccumulator, *args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    monkeypatch.setattr(GradientAccumulator, "_forward", ending)
    assert run_wsi(command) == 75
    assert run_wsi(command) == 0
    for kind in ("last", "best"):
        resumed, other = (CheckpointFolder(folder / "run" / "checkpoints").load(kind) for folder in (tmp_path, trained))
        assert resumed is not None and other is not None
        assert all(torch.equal(resumed.weights[name], other.weights[name]) for name in other.weights)
    assert (tmp_path / "run" / "val" / "predictions.csv").read_bytes() == (trained / "run" / "val" / "predictions.csv").read_bytes()


def test_maps_have_the_contribution_attention_and_gradient_of_each_tile(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained / "run"
    options = ["--names", "s4", "--saliency", "--crops", "1", "--crop-px", "16", "--out", str(tmp_path / "maps"), "--json"]
    assert run_wsi(["heatmap", str(run), *options]) == 0
    drawn, attention = json.loads(capsys.readouterr().out)["heatmaps"]
    names = [
        "map-swapped.npy",
        "map-swapped.png",
        "saliency-swapped.npy",
        "saliency-swapped.png",
        "crop-swapped-01.png",
        "crops-swapped.csv",
    ]
    assert [Path(name).name for name in drawn["files"]] == names
    assert [Path(name).name for name in attention["files"]] == ["map-attention.npy", "map-attention.png"]
    assert drawn["stride_px"] == [16, 16] and drawn["first_centre_px"] == [8, 8]
    experiment = _experiment(run)
    model, tiles = experiment.model, _tiles(experiment, 0).requires_grad_()
    assert isinstance(model, BagModel)
    model(tiles)[0, 1].backward()
    assert tiles.grad is not None
    expected = tiles.grad.square().sum(1).mean((1, 2)).sqrt().detach()
    evidence, gradient, shares = (
        np.load(tmp_path / "maps" / "s4" / f"{name}.npy") for name in ("map-swapped", "saliency-swapped", "map-attention")
    )
    for layer in (evidence, gradient, shares):
        assert layer.shape == (4, 5) and np.isnan(layer[:, 3:]).all() and np.isfinite(layer[:, :3]).all()  # the right side has no tissue
    assert np.allclose(gradient[:, :3].ravel(), expected, rtol=1e-4)
    assert np.nansum(evidence) + model.head.classifier.bias[1].item() == pytest.approx(drawn["score"], rel=1e-4)
    assert np.nansum(shares) == pytest.approx(1, rel=1e-5)
    with Image.open(tmp_path / "maps" / "s4" / "map-attention.png") as picture:
        assert min(picture.size) > 100
    assert (
        run_wsi(["predict", str(run), str(trained / "s4.tif"), "--formats", "npy", "ome.tif", "--out", str(tmp_path / "all"), "--json"])
        == 0
    )
    (written,) = json.loads(capsys.readouterr().out)["maps"]
    raster = np.load(written["files"][0])  # without its mask: of all tiles
    assert raster.shape == (3, 4, 5) and np.isfinite(raster).all()
    told = json.loads((tmp_path / "all" / "s4" / "prediction.json").read_text())
    assert told["names"] == ["plain", "swapped", "weight"] and told["scale_px"] == [16, 16] and told["origin_px"] == [0, 0]
    assert len(read_rows(tmp_path / "all" / "predictions.csv")) == 1


def test_plans_and_refusals_name_tiles(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", str(trained / "run.yaml"), "--run", str(tmp_path / "run")]
    assert run_wsi(["plan", *command, "--size", "80x64"]) == 0
    assert "Slide of 80 x 64 px (width x height), 20 tiles of 16 px, on cpu" in capsys.readouterr().out
    for options, message in (
        (["plan", *command, "--size", "8x64"], "--size 8x64: no tile of 16 px fits"),
        (["train", *command, "--train.freeze", "[backbone, head]"], "freezes all parameters"),
        (
            ["train", *command, "--model.head", "segmentation"],
            "model.encoder tiles with model.head segmentation",
        ),
        (["train", *command, "--model.norm", "train", "--ranks.bands", "2"], "model.norm train with model.encoder tiles and ranks.bands 2"),
        (["train", *command, "--model.tile_px", "4096"], "cannot take tiles of 4096 x 4096 px"),
        (["evaluate", str(trained / "run"), "--csv", str(trained / "no.csv")], "no.csv"),
    ):
        assert run_wsi(options) == 1
        assert message in capsys.readouterr().err, message
    assert not (tmp_path / "run").exists()


def test_adapters_train_in_place_of_the_encoder(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    config = write_config(tmp_path / "c.yaml", trained / "slides.csv", tmp_path / "run", model={**_MODEL, "lora_rank": 2})
    assert run_wsi(["train", "--config", str(config), "--bootstrap", "0", "--train.epochs", "1"]) == 0
    first, last = (CheckpointFolder(folder / "run" / "checkpoints").load("last") for folder in (trained, tmp_path))
    assert first is not None and last is not None
    weights = last.weights
    assert weights["backbone.mlp.0.lora_B.default.weight"].abs().max() > 0
    fresh = load_experiment(read_config(tmp_path / "run" / "config.yaml"), trust="tests").model.state_dict()
    assert torch.equal(weights["backbone.mlp.0.base_layer.weight"], fresh["backbone.mlp.0.base_layer.weight"])
    assert run_wsi(["evaluate", str(tmp_path / "run"), "--bootstrap", "0"]) == 0
    frozen = ["--train.freeze", "[backbone]", "--run", str(tmp_path / "b")]
    assert run_wsi(["train", "--config", str(config), "--bootstrap", "0", *frozen]) == 1
    assert "train.freeze [backbone] freezes all adapters of model.lora_rank 2" in capsys.readouterr().err
