"""The examples of deep chains at a tiny size: a budget that holds, and the bits of plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sft
from examples.deep_gpt import main as gpt
from examples.deep_gpt.network import CONTEXT, deep_gpt, sums
from examples.deep_resnet import main as resnet
from examples.deep_resnet.network import deep_resnet, num_blocks_of, stripes
from sft.nn import Repeat


def test_a_resnet_of_any_depth_takes_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for layers in (92, 302):
        torch.manual_seed(0)
        model = deep_resnet(layers, budget="16KiB", window="4KiB")
        blocks = model[1]
        assert isinstance(blocks, Repeat)
        optimizer = sft.StreamedOptimizer(model, "sgd", lr=0.01)
        images, labels = stripes(2, 4, seed=0)
        with sft.measure_peak() as peak:
            cross_entropy(model[2](blocks(model[0](images))), labels).backward()
            optimizer.step()
        assert blocks.plan_for(model[0](images)).projected_peak_bytes <= 16 * 1024
        peaks.append(peak.num_bytes)
    assert max(peaks) - min(peaks) <= 1024 and max(peaks) <= 32 * 1024
    with pytest.raises(sft.InputError, match="3 n"):
        num_blocks_of(100)


def test_a_gpt_of_twenty_times_its_budget_has_the_bits_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    model = deep_gpt(200, width=16).double()
    blocks = model[1]
    assert isinstance(blocks, Repeat)
    plain = copy.deepcopy(nn.Sequential(model[0], blocks.unstacked(), model[2]))
    parameter_bytes = sum(param.numel() * param.element_size() for param in blocks.parameters())
    blocks.budget_bytes = parameter_bytes // 20
    blocks.stream(parameter_bytes // 200 + 64)
    ours = sft.StreamedOptimizer(model, "adamw", lr=1e-2, window=2 * (parameter_bytes // 200 + 64))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    tokens, targets = sums(1, seed=0)
    for _ in range(2):
        with sft.measure_peak() as peak:
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            ours.step()
        around = 16 * 8 * (3 * CONTEXT + 14) * 8  # embedding and classifier: activations and gradients
        assert peak.num_bytes <= blocks.budget_bytes + around
        expected = cross_entropy(plain(tokens).flatten(0, 1), targets.flatten())
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        assert torch.equal(loss, expected)
    others = plain[1]
    assert isinstance(others, nn.Sequential)
    for number, block in enumerate(others):
        for name, param in block.named_parameters():
            assert torch.equal(blocks.block.get_parameter(name)[number], param)


def test_the_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resnet.main(["--layers", "32", "--steps", "2", "--batch", "2", "--budget", "24KiB"]) == 0
    assert "10 blocks" in capsys.readouterr().out
    assert resnet.main(["--layers", "33"]) == 1
    assert "3 n + 2" in capsys.readouterr().err
    weights = ["--file", str(tmp_path / "w"), "--blocks", "40", "--width", "16", "--steps", "1", "--batch", "1", "--ratio", "4"]
    assert gpt.main(weights) == 0
    assert gpt.main(weights) == 1
    assert "resume" in capsys.readouterr().err
    assert gpt.main([*weights, "--resume", "--max-norm", "1"]) == 0
    assert "loss" in capsys.readouterr().out
