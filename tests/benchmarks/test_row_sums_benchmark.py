"""The benchmark of sums of channels without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks" / "kernels"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module("row_sums")


@pytest.mark.parametrize("shape", [(1, 8, 30, 17), (2, 64, 40, 33)])
def test_all_variants_have_the_same_sums(bench: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).bfloat16().contiguous(memory_format=torch.channels_last)
    for name, function in bench.VARIANTS.items():
        torch.testing.assert_close(function(x).double(), x.double().sum((0, 2, 3)), rtol=1e-4, atol=1e-3, msg=name)


def test_without_a_gpu_the_script_refuses(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert "run it on a machine with a GPU" in capsys.readouterr().err
