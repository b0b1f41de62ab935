"""cuDNN in benchmarks: ``torch.backends.cudnn.flags`` switches cuDNN off without ``enabled=True``, which falsifies baselines."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("sft", "analysis", "kernels", "benchmarks", "examples", "tests", "docs")


def _flag_calls(source: str) -> list[ast.Call]:
    """Calls of cuDNN's context of settings, under any of its names."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).endswith("cudnn.flags")]


def _leaves_cudnn_on(call: ast.Call) -> bool:
    return any(keyword.arg == "enabled" and ast.unparse(keyword.value) == "True" for keyword in call.keywords)


def test_no_call_switches_cudnn_off() -> None:
    paths = [path for folder in _FOLDERS for path in sorted((_ROOT / folder).rglob("*.py"))]
    texts = {path: path.read_text() for path in paths if path != Path(__file__).resolve()}
    calls = {path: _flag_calls(text) for path, text in texts.items() if "cudnn" in text}
    assert sum(map(len, calls.values())) >= 2
    assert not [f"{path.relative_to(_ROOT)}:{call.lineno}" for path, each in calls.items() for call in each if not _leaves_cudnn_on(call)]
    # An alias would hide a call from this test.
    assert not [path for path, text in texts.items() if "from torch.backends.cudnn import" in text]


def test_the_check_sees_the_mistake() -> None:
    (wrong,) = _flag_calls("with torch.backends.cudnn.flags(benchmark=True): pass")
    assert not _leaves_cudnn_on(wrong)
    (right,) = _flag_calls("with cudnn.flags(enabled=True): pass")
    assert _leaves_cudnn_on(right)


@pytest.mark.parametrize("search", [False, True])
def test_baselines_of_convolutions_run_with_cudnn(search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every baseline of the convolution benchmark, in its own settings and inside those of the script."""
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks" / "kernels"))
    cases, gpu = importlib.import_module("kernel_convolutions"), importlib.import_module("harness.gpu")
    draw = importlib.import_module("kernel_case").Draw
    settings: list[tuple[bool, bool, bool]] = []
    cudnn = torch.backends.cudnn

    def noted(*_: Any, **__: Any) -> torch.Tensor:
        settings.append((cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32))
        return torch.zeros(1)

    before = cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    problems = {
        precision: cases._forward(3, 4, precision=precision)(draw(device=torch.device("cpu"), dtype=torch.float32, size=(5, 6)))
        for precision in (None, "tf32")
    }
    monkeypatch.setattr("torch.nn.functional.conv2d", noted)
    with gpu.convolution_settings(search=search):
        assert (cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32) == (True, search, False)
        for problem in problems.values():
            problem.theirs()
    assert settings == [(True, search, False), (True, search, True)]
    assert (cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before
