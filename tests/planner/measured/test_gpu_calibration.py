"""Calibrated rates of a GPU: measured, kept in a file, and used by plans."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sft
from sft.common.errors import InputError
from sft.planner.cost.gpu_models import H100
from sft.planner.measured import gpu_calibration
from sft.planner.measured.gpu_calibration import calibrate, find_model, model_path, planning_model, save_model
from sft.torch_runtime.profiling import table_folders

_NAME = "NVIDIA Test GPU"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with properties only."""
    properties = SimpleNamespace(name=_NAME, major=8, minor=0, multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: _NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: every rate is finite, and half of the rows do not halve it."""
    monkeypatch.setattr(gpu_calibration, "_CONVOLUTIONS", ((3, 64, 256), (64, 64, 256), (256, 256, 64)))
    model = calibrate(torch.device("cpu"), "this CPU", rows=4)
    values = [value for value in asdict(model).values() if isinstance(value, float)]
    assert all(0 < value < math.inf for value in values)
    assert [rates.channels for rates in model.convolutions] == [3, 64, 256]
    assert model.flops_per_second(torch.float64) <= model.flops_per_second(torch.bfloat16)
    assert model.name == "this CPU" and model.bytes_per_second != H100.bytes_per_second


def test_a_file_keeps_the_rates(tmp_path: Path) -> None:
    model = replace(H100, name="this GPU", bytes_per_second=1.25e12)
    assert find_model([tmp_path], _NAME) is None
    path = model_path(tmp_path / "later", _NAME)
    save_model(path, model)
    assert find_model([tmp_path, tmp_path / "later"], _NAME) == model
    assert find_model([tmp_path / "later"], "another GPU") is None
    for text in ("{", "[]", path.read_text().replace('"format": 1', '"format": 0'), path.read_text().replace("1250000000000.0", '"fast"')):
        path.write_text(text)
        with pytest.raises(InputError, match=r"cannot read the rates of the GPU in .*sft tune"):
            find_model([tmp_path / "later"], _NAME)


@pytest.mark.usefixtures("gpu")
def test_plans_take_calibrated_rates_first(tmp_path: Path) -> None:
    device = torch.device("cuda")
    assert planning_model(device, [tmp_path]).name == f"the {_NAME} (its properties)"
    model = replace(H100, name="this GPU (calibrated)")
    save_model(model_path(tmp_path, _NAME), model)
    assert planning_model(device, [tmp_path]) == model


def test_an_absent_gpu_has_the_rates_of_an_h100(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    save_model(model_path(tmp_path, _NAME), replace(H100, name="another"))
    assert planning_model(torch.device("cuda"), [tmp_path]) == H100


@pytest.mark.usefixtures("gpu")
def test_a_plan_names_and_uses_the_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_CACHE_DIR", str(tmp_path))
    (folder,) = table_folders()
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    seconds = []
    for name, factor in (("this GPU (calibrated)", 1.0), ("this slow GPU (calibrated)", 0.1)):
        rates = tuple(
            replace(each, forward=factor * each.forward, data=factor * each.data, weight=factor * each.weight) for each in H100.convolutions
        )
        save_model(model_path(folder, _NAME), replace(H100, name=name, convolutions=rates, bytes_per_second=factor * H100.bytes_per_second))
        plan = sft.plan(model, (1, 3, 1024, 1024), budget="4GiB", device="cuda")
        assert f"by the rates of {name}" in " ".join(plan.explain().split())
        assert sft.Plan.from_json(plan.to_json()).gpu_name == name
        seconds.append(plan.estimated_seconds)
    assert seconds[1] > 3 * seconds[0]
