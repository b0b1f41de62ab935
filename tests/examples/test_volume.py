"""The brain and its network: positions of labels, gradients of plain PyTorch in strips, and the complete script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sft
from examples.volume.data import DARKEST, IGNORED_LABEL, TISSUES, load_brain
from examples.volume.main import Loss, class_weights, dice
from examples.volume.network import SegResNet

pytest.importorskip("nilearn")

_EVERY = 10
_MAIN = Path(__file__).resolve().parents[2] / "examples" / "volume" / "main.py"


def test_each_half_of_the_brain_has_labels_once_and_tissues_as_bright_as_they_are() -> None:
    brain = load_brain(_EVERY)
    assert brain.volume.shape[2:] == brain.left.shape[1:] == brain.right.shape[1:]
    assert ((brain.left == IGNORED_LABEL) == (brain.right != IGNORED_LABEL)).all()
    labels = torch.minimum(brain.left, brain.right)
    assert brain.volume[0][labels == 0].max() == DARKEST
    means = [brain.volume[0][labels == number].mean().item() for number in range(len(TISSUES))]
    assert means == sorted(means), "in a T1 image fluid is dark, grey matter darker than white"


def test_a_step_in_strips_has_the_gradients_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    brain = load_brain(_EVERY)
    model = SegResNet(len(TISSUES), width=4, num_blocks=(1, 1, 1), num_groups=2).double()
    with torch.no_grad():  # branches begin at zero, which would hide errors inside
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    training = sft.nn.WithLoss(model, Loss(class_weights(brain.left).double()))
    volume = brain.volume.double()
    training(volume, brain.left).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    inputs = [volume, brain.left]
    net: Any = sft.compile(training, inputs, options=sft.Options(tile=(12, None)))
    assert any(segment.num_steps > 1 for segment in net.plan.segments)
    net(volume, brain.left).backward()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected[name], rtol=0, atol=1e-11 * largest), name


def test_classes_that_are_nowhere_have_a_weight() -> None:
    weights = class_weights(torch.tensor([0] * 8 + [2] * 2 + [IGNORED_LABEL] * 7))
    assert torch.allclose(weights, torch.tensor([10 / 32, 1, 10 / 8, 1]))


def test_dice_counts_labelled_voxels_only() -> None:
    labels = torch.tensor([[[[0, 1, 2, IGNORED_LABEL, 1]]]])
    scores = dice(torch.tensor([[[[0, 1, 1, 3, 1]]]]), labels)
    assert scores[:3] == [1.0, 0.8, 0.0] and scores[3] != scores[3]


def test_the_script_trains_and_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = SegResNet(len(TISSUES), width=2, num_groups=2)
    torch.save(start.state_dict(), tmp_path / "start.pt")
    options = ["--every", "12", "--steps", "2", "--width", "2", "--share", "3", "--lr", "0", "--start", str(tmp_path / "start.pt")]
    monkeypatch.setattr(sys, "argv", [str(_MAIN), *options, "--out", str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script changes it
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(_MAIN), run_name="__main__")
    assert end.value.code == 0
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| right, never seen in the loss |" in page and page.count("white matter") == 1
    trained = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(trained.pop(name), value) for name, value in start.state_dict().items()) and not trained
