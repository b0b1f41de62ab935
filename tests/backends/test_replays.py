"""Replays of kernel calls: later runs launch the same kernels with the pointers of their own operands, past the just-in-time path."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sft.backends.conv_calls import ConvolutionCall, WeightGradientCall
from sft.backends.norm_calls import AffineCall
from sft.kernels.geometry import Geometry, KernelWindow
from tests.helpers.triton_process import needs_triton, replay_launches

pytestmark = needs_triton

_SIZE, _CHANNELS = (6, 16), 16
_WINDOW = KernelWindow(kernel=3, padding=1)
_CONV = ConvolutionCall(geometry=Geometry.whole(_SIZE, _WINDOW, _WINDOW), numbers="bfloat16", relu=True, flops=1234)


def _image(*, offset: int = 0, rows: int = _SIZE[0]) -> Tensor:
    """An image whose memory begins ``offset`` elements after an aligned address, with rows that are ``rows`` apart from the next sample."""
    memory = torch.zeros(2 * rows * _SIZE[1] * _CHANNELS + 64, dtype=torch.bfloat16)
    strides = (rows * _SIZE[1] * _CHANNELS, 1, _SIZE[1] * _CHANNELS, _CHANNELS)
    return memory.as_strided((2, _CHANNELS, *_SIZE), strides, offset)


def _weight(*, contiguous: bool = False) -> Tensor:
    shape = (_CHANNELS, _CHANNELS, 3, 3)
    return torch.zeros(shape, dtype=torch.bfloat16).contiguous(memory_format=torch.contiguous_format if contiguous else torch.channels_last)


def _bias() -> Tensor:
    return torch.zeros(_CHANNELS, dtype=torch.bfloat16)


def _run(call: Any, runs: list[list[Any]], folder: Path, method: str = "run", **options: Any) -> list[dict[str, Any]]:
    (results,) = replay_launches([{"call": call, "method": method, "runs": runs} | options], folder)
    for result in results:
        assert result["launches"] == result["exact"]
    return list(results)


def test_later_runs_do_not_enter_the_just_in_time_path(tmp_path: Path) -> None:
    runs = [[_image(), _image(), _weight(), _bias(), None] for _ in range(3)]
    assert [result["just_in_time"] for result in _run(_CONV, runs, tmp_path)] == [1, 0, 0]


def test_calls_of_several_launches_and_views_of_a_workspace(tmp_path: Path) -> None:
    sums = WeightGradientCall(geometry=_CONV.geometry, numbers="bfloat16", weight=(16, 16, 3, 3), has_bias=True, num_splits=2)
    runs = [[torch.zeros(sums.num_elements), _image(), _image(), _image(), None] for _ in range(2)]
    assert [result["just_in_time"] for result in _run(sums, runs, tmp_path)] == [1, 0]
    totals = [[torch.zeros(16, 16, 3, 3), torch.zeros(16), torch.zeros(sums.num_elements)] for _ in range(2)]
    results = _run(sums, totals, tmp_path, "add_gradients")
    assert [result["just_in_time"] for result in results] == [1, 0]


def test_operands_of_other_strides_or_alignment_are_recorded_anew(tmp_path: Path) -> None:
    kinds: list[dict[str, int]] = [{}, {"offset": 1}, {"rows": 9}, {}, {"offset": 1}, {"rows": 9}]
    runs = [[_image(), _image(**kind), _weight(), _bias(), None] for kind in kinds]
    assert [result["just_in_time"] for result in _run(_CONV, runs, tmp_path)] == [1, 1, 1, 0, 0, 0]


def test_an_operand_that_is_written_in_one_run_only(tmp_path: Path) -> None:
    """In place at first: the input's pointer is the output's. Later it is not."""
    affine = AffineCall(num_keys=1)
    scale, shift = torch.ones(1, _CHANNELS, 1, 1, 2).unbind(-1)
    x, y = _image(), _image()
    results = _run(affine, [[out, x, scale, shift, None] for out in (x, y, x, y)], tmp_path)
    assert [result["just_in_time"] for result in results] == [1, 1, 0, 0]


def test_copies_are_not_replayed(tmp_path: Path) -> None:
    """An input in another layout is copied by each run; its launch reads the copy."""
    runs = [[_image(), _image().contiguous(), _weight(), _bias(), None] for _ in range(2)]
    (results,) = replay_launches([{"call": _CONV, "method": "run", "runs": runs}], tmp_path)
    assert [result["just_in_time"] for result in results] == [1, 1]


def test_counters_and_hooks_see_every_launch(tmp_path: Path) -> None:
    runs = [[_image(), _image(), _weight(), _bias(), None] for _ in range(2)]
    assert [result["flops"] for result in _run(_CONV, runs, tmp_path, counts_flops=True)] == [1234, 1234]
    assert [result["hooked"] for result in _run(_CONV, runs, tmp_path, hook=True)] == [0, 1]


def test_recordings_are_no_part_of_a_call() -> None:
    call = copy.deepcopy(_CONV)
    object.__setattr__(call, "_recordings", {"key": None})
    assert call == _CONV
    assert hash(call) == hash(_CONV)
    assert repr(call) == repr(_CONV)
    assert not hasattr(pickle.loads(pickle.dumps(call)), "_recordings")
