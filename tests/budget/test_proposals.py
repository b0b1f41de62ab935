"""Remedies of a budget error: they come from the same search, and each of them works."""

from __future__ import annotations

import functools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.api import memory_limits, proposals
from sft.cli.main import main
from sft.common.free_memory import FreeMemory
from sft.planner import materialize
from sft.planner.problem import PlanningProblem
from sft.planner.remedies import COMMAND_LINE, Remedy, budget_error, message_for, with_prefix, with_remedies
from tests.helpers.models import TinyUNet

_SHAPE = (1, 3, 512, 256)


def _normed() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 8), (8, 8)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


def _refusal(model: nn.Module, inputs: object, budget: int | str, **arguments: object) -> sft.BudgetError:
    with pytest.raises(sft.BudgetError) as caught:
        sft.compile(model, inputs, budget=budget, **arguments)  # type: ignore[arg-type]
    return caught.value


@functools.cache
def _normed_and_refusal(budget: int | str) -> tuple[nn.Module, sft.BudgetError]:
    """A model and its error at a budget, for several tests, which do not change them."""
    model = _normed()
    return model, _refusal(model, _SHAPE, budget)


def _remedies(error: sft.BudgetError) -> dict[tuple[str, ...], Remedy]:
    return {remedy.settings: remedy for remedy in error.remedies if remedy.fits}


def test_frozen_norms_and_host_memory_work_as_named() -> None:
    model, error = _normed_and_refusal("4MiB")
    fitting = _remedies(error)
    assert {("norms",), ("host",)} <= set(fitting)
    host = fitting["host",]
    text = re.search(r"MiB of host memory \(Options\(host_budget='([^']+)'\)\)", str(error))
    assert text is not None
    plan = sft.plan(model, _SHAPE, budget="4MiB", options=sft.Options(host_budget=text[1]))
    assert plan.total_bytes == host.needed_bytes and plan.host_bytes == host.num_bytes
    assert all(module.training for module in model.modules())  # the attempt has not changed the model
    frozen = _normed()
    for module in frozen.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    assert sft.plan(frozen, _SHAPE, budget="4MiB").total_bytes == fitting["norms",].needed_bytes
    assert f"in {sft.format_bytes(fitting['norms',].needed_bytes)} with frozen norms (.eval() of the norms)" in str(error)


def test_an_input_that_is_read() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    shape = (1, 3, 2048, 256)
    error = _refusal(model, shape, "3MiB")
    read = _remedies(error)["read",]
    pixels = np.zeros((2048, 256, 3), np.uint8)
    plan = sft.plan(model, pixels, budget="3MiB")
    assert plan.total_bytes <= read.needed_bytes <= 3 * 2**20
    assert "an array or a file in place of a tensor" in str(error)


def test_changes_together_where_none_suffices() -> None:
    """A segmentation: input and output are both larger than the budget."""
    error = _refusal(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1)), (1, 3, 2048, 256), "3MiB")
    (settings,) = _remedies(error)
    assert settings == ("read", "output")
    assert "with an input that is read in strips" in str(error) and "and outputs on the host (output='host')" in str(error)


def test_changes_without_a_fit_name_the_remaining_bytes() -> None:
    _, error = _normed_and_refusal(1)
    assert not _remedies(error) and re.search(
        r" With .*frozen norms \(.eval\(\) of the norms\).* it still needs [\d.]+ [KM]iB\. ", str(error)
    )


def test_host_memory_is_no_change_of_a_plan_without_it() -> None:
    error = _refusal(_normed(), _SHAPE, "400KiB")
    assert list(_remedies(error)) == [("norms", "read")] and "host memory" not in str(error).partition("Raise the budget")[0]


def test_streamed_weights() -> None:
    wide = nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(6)], nn.AdaptiveAvgPool2d(1))
    error = _refusal(wide, (1, 64, 16, 16), "1200KiB")
    streamed = _remedies(error)["weights",]
    plan = sft.plan(wide, (1, 64, 16, 16), budget="1200KiB", options=sft.Options(weights="stream"))
    assert plan.total_bytes == streamed.needed_bytes


def test_the_error_survives_pickling_and_a_prefix() -> None:
    _, error = _normed_and_refusal("4MiB")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and vars(copy) == vars(error) and copy.needed_bytes == error.needed_bytes
    assert message_for(copy, COMMAND_LINE) == message_for(error, COMMAND_LINE)
    assert str(with_prefix(error, "slide a: ")) == f"slide a: {error}"
    assert str(with_prefix(sft.BudgetError("too small", needed_bytes=3), "slide a: ")) == "slide a: too small"


def test_the_budget_that_is_named_works_as_text() -> None:
    """A size with two decimals is rounded up."""
    model = _normed()
    error = _refusal(model, _SHAPE, "4MiB")
    named = re.search(r"Raise the budget to ([\d.]+ MiB) \((\d+) bytes\)", str(error))
    assert named is not None and int(named[2]) == error.needed_bytes
    assert sft.plan(model, _SHAPE, budget=named[1]).total_bytes <= sft.parse_bytes(named[1])
    assert sft.plan(model, _SHAPE, budget=error.needed_bytes).total_bytes == error.needed_bytes


def test_the_command_line_names_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", f"{__name__}:_normed", "--input", "1x3x512x256", "--budget", "4MiB", "--device", "cpu"]
    assert main(command) == 1
    message = capsys.readouterr().err
    assert "frozen norms (--frozen-norms)" in message and "--budget 13.63MiB" in message and "Options(" not in message
    host = re.search(r"host memory \((--host-budget) ([\d.]+MiB)\)", message)
    assert host is not None
    assert main([*command, host[1], host[2]]) == 0
    assert main([*command, "--frozen-norms"]) == 0


def test_remedies_that_an_interface_lacks_are_left_out() -> None:
    remedies = [Remedy(settings=("output",), needed_bytes=2**30, fits=True), Remedy(settings=("budget",), num_bytes=2**31 + 1)]
    error = budget_error("too small.", 2**31 + 1, remedies)
    assert str(error) == (
        "too small. It fits in 1.00 GiB with outputs on the host (output='host'). Raise the budget to 2.01 GiB (2147483649 bytes)."
        "\nTry: output='host'"
    )
    assert message_for(error, COMMAND_LINE) == (
        "too small. Raise the budget to 2.01 GiB (2147483649 bytes) with --budget 2.01GiB.\nTry: --budget 2.01GiB"
    )
    replaced = with_remedies(error, [Remedy(settings=("budget",), num_bytes=2**30)], " A note.")
    assert str(replaced) == (
        "too small. A note. It fits in 1.00 GiB with outputs on the host (output='host'). Raise the budget to 1.00 GiB (1073741824 bytes)."
        "\nTry: output='host'"
    )


def test_memory_that_the_host_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, folder = _normed(), sft.Options(host_folder=str(tmp_path))
    needed = sft.plan(model, _SHAPE, budget="4MiB", options=folder).host_bytes
    monkeypatch.setattr(memory_limits, "free_disk", lambda folder: FreeMemory(free_bytes=2**28 + needed // 4, total_bytes=2**40))
    error = _refusal(model, _SHAPE, "4MiB", options=folder)
    assert "are free on the disk" in str(error) and needed // 4 < _remedies(error)["host",].num_bytes <= needed


def test_attempts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "MAX_ATTEMPTS", 1)
    assert len(_remedies(_refusal(_normed(), _SHAPE, "4MiB"))) == 1
    monkeypatch.setattr(proposals, "MAX_SECONDS", -1.0)
    assert not _remedies(_refusal(_normed(), _SHAPE, "4MiB"))


def test_a_call_proposes_as_well() -> None:
    net = sft.compile(_normed(), (1, 3, None, None), budget="4MiB")
    with pytest.raises(sft.BudgetError, match=r"frozen norms \(\.eval\(\) of the norms\)"):
        net(torch.zeros(_SHAPE))


def test_an_automatic_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "free_host_memory", lambda: FreeMemory(free_bytes=260 * 2**20, total_bytes=2**30))
    with pytest.raises(sft.BudgetError, match=r"budget auto: 4\.00 MiB of 260\.\d\d MiB free on the host"):
        sft.compile(_normed(), _SHAPE)


def test_options_are_named_only_if_they_force_something() -> None:
    model: nn.Module = TinyUNet()
    assert "leave out options" not in str(_refusal(model, (1, 3, 64, 64), "20KiB"))
    assert "leave out options" in str(_refusal(model, (1, 3, 64, 64), "20KiB", options=sft.Options(tile=(8, None))))


class _Frozen(nn.Module):
    """A model with an ``eval`` that must not run while a proposal is tried."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _normed()

    def eval(self) -> _Frozen:
        raise AssertionError("eval was called")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def test_the_models_own_eval_is_not_called() -> None:
    assert ("norms",) in _remedies(_refusal(_Frozen(), _SHAPE, "4MiB"))


def test_a_remedy_that_leaves_the_programs_projects_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is another limit of the same plans; norms, inputs and weights are other problems."""
    projected: list[object] = []
    project = materialize._project

    def counted(problem: PlanningProblem, *decisions: object) -> object:
        projected.append((id(problem.memo), *decisions))
        return project(problem, *decisions)  # type: ignore[arg-type]

    monkeypatch.setattr(materialize, "_project", counted)
    problems: list[PlanningProblem] = []  # no id is used again
    changed = PlanningProblem.with_host_budget

    def noted(problem: PlanningProblem, num_bytes: int | None) -> PlanningProblem:
        problems.append(problem)
        return changed(problem, num_bytes)

    monkeypatch.setattr(PlanningProblem, "with_host_budget", noted)
    _refusal(_normed(), _SHAPE, 1)
    assert problems and any(key[0] == id(problems[0].memo) for key in projected)  # type: ignore[index]
    assert len(projected) == len(set(projected))


def test_host_memory_of_a_plan_that_does_not_fit_has_no_value() -> None:
    error = budget_error("The budget is 1 B.", 9, [Remedy(settings=("host",), needed_bytes=5), Remedy(settings=("budget",), num_bytes=9)])
    assert "With host memory (Options(host_budget=...)) it still needs 5 B." in str(error)
    assert "With host memory (--host-budget BYTES) it still needs 5 B." in message_for(error, COMMAND_LINE)


def test_changes_together_are_no_remedy_if_they_do_not_fit() -> None:
    _, error = _normed_and_refusal(1)
    assert error.remedies and not _remedies(error)
    assert all(len(remedy.settings) == 1 for remedy in error.remedies)
