"""Layer-wise learning rates, and modules that do not train."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sft.common.errors import InputError
from sft.wsi.cli import read_config
from sft.wsi.config import TrainConfig
from sft.wsi.model.backbones import cut_before_pooling
from sft.wsi.model.heads import SlideModel, build_model, set_training
from sft.wsi.model.layers import block_depths, freeze_modules, lr_scales
from sft.wsi.train.checkpoint import CheckpointFolder
from sft.wsi.train.experiment import load_experiment
from sft.wsi.train.optim import make_optimizer
from tests.helpers.wsi import run_wsi as main
from tests.helpers.wsi import write_config, write_task


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class _Residual(nn.Module):
    """A stem, two stages of two blocks and of one, and a classifier, named as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, stride=4, padding=3), nn.BatchNorm2d(4)
        self.layer1, self.layer2 = nn.Sequential(_Block(4), _Block(4)), nn.Sequential(_Block(4))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.avgpool(self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))).flatten(1))
        return scores


def _model(backbone: nn.Module | None = None, head: Any = "gap") -> SlideModel:
    return build_model(backbone or cut_before_pooling(_Residual(), "r"), 4, 2, head=head)


def test_depths_are_stem_blocks_and_head() -> None:
    depths = block_depths(_model())
    by_depth: dict[int, set[str]] = {}
    for name, depth in depths.items():
        by_depth.setdefault(depth, set()).add(re.sub(r"(layer\d\.\d).*", r"\1", name).removesuffix(".weight").removesuffix(".bias"))
    assert [by_depth[depth] for depth in sorted(by_depth)] == [
        {"backbone.conv1", "backbone.bn1"}, {"backbone.layer1.0"}, {"backbone.layer1.1"}, {"backbone.layer2.0"}, {"head.classifier"}
    ]  # fmt: skip
    assert set(depths) == {name for name, _ in _model().named_parameters()}
    scales = lr_scales(_model(), 0.5)
    assert scales["head.classifier.bias"] == 1.0 and scales["backbone.layer2.0.bn2.weight"] == 0.5 and scales["backbone.bn1.bias"] == 0.0625


def test_every_parameter_has_a_depth_in_networks_of_other_kinds() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.stages = nn.ModuleList([nn.ModuleDict({"a": nn.Conv2d(3, 3, 1)}), nn.ModuleDict({"b": nn.Conv2d(3, 4, 1)})])

    for backbone, head in ((Embedded(), "attention"), (nn.Conv2d(3, 4, 3), "max"), (nn.Identity(), "gap")):
        model = _model(backbone, head)
        depths = block_depths(model)
        assert set(depths) == {name for name, _ in model.named_parameters()}
        assert {depth for name, depth in depths.items() if name.startswith("head")} == {max(depths.values())}
    assert [block_depths(_model(Embedded()))[f"backbone.{name}"] for name in ("scale", "stages.0.a.bias", "stages.1.b.bias")] == [0, 1, 2]


def test_a_network_of_timm_has_the_groups_of_its_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules outside of the network's matcher, such as a last norm, are in the group of the head."""

    class Matched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks, self.norm = nn.Conv2d(3, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)), nn.BatchNorm2d(4)

        def group_matcher(self, coarse: bool = False) -> dict[str, str]:
            assert not coarse
            return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)"}

    def group_with_matcher(named: Any, matcher: dict[str, str], reverse: bool = False) -> dict[str, int]:
        def key(name: str) -> tuple[float, ...]:
            for order, pattern in enumerate(matcher.values()):
                if fit := re.match(pattern, name):
                    return (order, *map(float, fit.groups()))
            return (float("inf"),)

        assert reverse
        keys = {name: key(name) for name, _ in named}
        order = sorted(set(keys.values()))
        return {name: order.index(value) for name, value in keys.items()}

    monkeypatch.setitem(sys.modules, "timm.models", SimpleNamespace(group_with_matcher=group_with_matcher))
    scales = lr_scales(_model(Matched()), 0.5)
    assert scales["backbone.stem.weight"] == 0.125 and scales["backbone.blocks.0.bias"] == 0.25 and scales["backbone.blocks.1.bias"] == 0.5
    assert scales["backbone.norm.weight"] == scales["head.classifier.weight"] == 1.0


def test_the_optimizer_gives_each_depth_its_rate() -> None:
    model = _model()
    plain = make_optimizer(model, TrainConfig(lr=0.1))
    assert [group["weight_decay"] for group in plain.param_groups] == [1e-4, 0.0] and "lr_scale" not in plain.param_groups[0]
    scaled = make_optimizer(model, TrainConfig(lr=0.1, layer_decay=0.5))
    scales = lr_scales(model, 0.5)
    rates: dict[nn.Parameter, float] = {}
    for group in scaled.param_groups:
        rates |= dict.fromkeys(group["params"], group["lr"])
        assert group["lr"] == pytest.approx(0.1 * group["lr_scale"])
        assert all((parameter.dim() > 1) == (group["weight_decay"] > 0) for parameter in group["params"])
    assert {name: rates[parameter] for name, parameter in model.named_parameters()} == pytest.approx(
        {name: 0.1 * scale for name, scale in scales.items()}
    )


def test_frozen_modules_get_no_gradient_and_keep_their_norms() -> None:
    model = _model()
    assert freeze_modules(model, ["backbone.conv1", "backbone.bn1", "backbone.layer1*"]) == (
        "backbone.conv1",
        "backbone.bn1",
        "backbone.layer1",
    )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith(("backbone.layer2", "head"))}
    set_training(model, training=True, freeze_norms=False)
    modes = {name: module.training for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert modes == {name: "layer2" in name for name in modes} and len(modes) == 7
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model, TrainConfig(lr=0.1))
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith(("backbone.layer2", "head")) for name in changed), "running statistics included"


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (
            ["backbone.layer9"],
            r"train.freeze 'backbone.layer9' fits no module of the network. Its modules are: backbone, head, backbone.conv1",
        ),
        (["backbone.layer1", "stem"], "train.freeze 'stem' fits no module"),
        (["*"], "freezes all parameters"),
        (["backbone", "head"], "freezes all parameters"),
    ],
)
def test_names_that_fit_nothing_are_refused(patterns: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        freeze_modules(_model(), patterns)


def test_a_run_with_frozen_modules_and_layer_decay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_task(tmp_path, num_slides=6, size_px=96)
    train = {"epochs": 1, "layer_decay": 0.5, "freeze": ["backbone.features.0", "backbone.features.1"], "clip_norm": 1.0}
    config = write_config(tmp_path / "c.yaml", table, tmp_path / "run", train=train, model={"norm": "train"})
    assert main(["train", "--config", str(config), "--dry-run", "--json"]) == 0
    output, said = capsys.readouterr()
    told = json.loads(output)["training"]
    assert told["frozen"] == ["backbone.features.0", "backbone.features.1"] and told["lr_scales"] == [0.5, 1.0]
    assert (
        "frozen: backbone.features.0, backbone.features.1; " in said
        and "layer decay 0.5: 2 depths, learning rates of 0.5 to 1 times" in said
    )
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    last = CheckpointFolder(tmp_path / "run" / "checkpoints").load("last")
    assert last is not None and last.state["settings"]["train.freeze"] == train["freeze"]
    assert [group["lr_scale"] for group in last.state["optimizer"]["param_groups"]] == [0.5, 0.5, 1.0, 1.0]
    rates = [group["lr"] for group in last.state["optimizer"]["param_groups"]]
    assert rates[2] == 2 * rates[0] > 0
    initial = load_experiment(read_config(config), trust="tests").model.state_dict()
    changed = {name for name, value in initial.items() if not torch.equal(value, last.weights[name])}
    assert not any(name.startswith(("backbone.features.0.", "backbone.features.1.")) for name in changed)
    assert {"backbone.features.3.weight", "backbone.features.4.running_mean", "head.classifier.weight"} <= changed
    assert main(["evaluate", str(tmp_path / "run"), "--bootstrap", "0"]) == 0
    capsys.readouterr()
    for options, message in (
        (["--train.layer_decay", "1.0"], "train.layer_decay (was 0.5, is 1.0)"),
        (["--train.freeze", "[]"], "train.freeze (was ["),
        (["--train.freeze", "[stem]"], "train.freeze 'stem' fits no module"),
        (["--train.layer_decay", "0"], "train.layer_decay 0.0: give a factor above 0"),
        (["--train.layer_decay", "1.5"], "train.layer_decay 1.5"),
    ):
        assert main(["train", "--config", str(config), *options]) == 1
        assert message in capsys.readouterr().err
