"""Stored times: read again, added by several processes at once, and ignored in damaged lines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sft
from sft.lower.builder import ProgramBuilder
from sft.lower.program import Program
from sft.planner.measured.step_timer import TimingMachine
from sft.torch_runtime.machine import TorchMachine
from sft.torch_runtime.profiling import CACHE_VARIABLE, TimingCache, cache_folder, open_timing_cache, program_hash
from tests.helpers.capture_cache import one_capture_a_model

captures = one_capture_a_model()

_SHAPE = (1, 3, 40, 24)
_CPU = torch.device("cpu")


class _Block(nn.Module):
    """Two equal stages and a tail that saves for its backward pass."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.SiLU(), nn.Dropout(p), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.body(x))
        return output


def _measure(model: nn.Module, **options: Any) -> sft.Plan:
    return sft.plan(model, _SHAPE, options=sft.Options(tile=(8, None), profile="measure", **options))


@dataclass(frozen=True)
class _Range:
    length: Any


@dataclass(frozen=True)
class _Scaled:
    """Function with fields."""

    factor: float
    span: _Range

    def __call__(self, x: Any, y: Any) -> Any:
        return x


def test_added_times_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "costs.txt"
    costs = TimingCache(path, "some device")
    assert costs.get("a") is None and not path.exists()
    costs.add("a", 0.25)
    costs.add("b", 1e-7)
    costs.add("c", 3.0, lasting=False)
    assert costs.get("c") == 3
    again = TimingCache(path)
    assert [again.get(key) for key in "abc"] == [0.25, 1e-7, None]
    assert path.read_text().startswith("# some device\n")
    TimingCache(path).add("a", 0.5)  # from a process that began before the file existed
    assert TimingCache(path).get("a") == 0.25


def test_concurrent_writers_lose_no_times(tmp_path: Path) -> None:
    path = tmp_path / "costs.txt"

    def write(number: int) -> None:
        costs = TimingCache(path)  # separate handles, as in processes
        for index in range(50):
            costs.add(f"{number} {index}", number + index / 64)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    cache = TimingCache(path)
    assert all(cache.get(f"{number} {index}") == number + index / 64 for number in range(8) for index in range(50))


def test_damaged_lines_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "costs.txt"
    for key in "abcd":
        TimingCache(path).add(key, 0.125)
    lines = path.read_bytes().splitlines(keepends=True)
    entries = [index for index, line in enumerate(lines) if len(line) > 40 and not line.startswith(b"#")]
    assert len(entries) == 4
    lines[entries[0]] = lines[entries[0]].replace(b"0.125", b"0.225")  # the checksum is that of another number
    lines[entries[1]] = bytes([0xFF, 0, 0xFE]) + lines[entries[1]]
    path.write_bytes(b"".join(lines)[:-7])  # the last one is torn
    cache = TimingCache(path)
    assert [cache.get(key) for key in "abcd"] == [None, None, 0.125, None]
    cache.add("d", 0.5)
    assert [TimingCache(path).get(key) for key in "acd"] == [None, 0.125, 0.5]


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_folder() is None
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "sft"


def test_each_environment_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    open_timing_cache(_CPU).add("a", 1.0)
    assert open_timing_cache(_CPU).get("a") == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert open_timing_cache(_CPU).get("a") is None
    assert len(list((tmp_path / "costs").iterdir())) == 1


def test_a_plan_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    first = _measure(_Block())
    assert first.projected_seconds is not None and first.timeline.is_measured

    def refuse(*_: object) -> None:
        raise AssertionError("ran a program that was timed before")

    with monkeypatch.context() as patched:
        patched.setattr(TorchMachine, "run", refuse)
        patched.setattr(TorchMachine, "allocate", refuse)
        again = _measure(_Block())
    assert _timeless(again) == _timeless(first)
    # Half of the times are removed: a backward program is timed on the residuals of its forward program in any case.
    (file,) = (tmp_path / "costs").iterdir()
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    file.write_text("\n".join(lines[::2]))
    timed: list[Program] = []
    time_once = TimingMachine._time_program

    def note(watch: TimingMachine, program: Program, before: Program | None) -> float:
        timed.append(program)
        return time_once(watch, program, before)

    monkeypatch.setattr(TimingMachine, "_time_program", note)
    assert _timeless(_measure(_Block())) == _timeless(first)
    assert timed and len(file.read_text().split()) > 3 * len(lines[::2])


def _timeless(plan: sft.Plan) -> tuple[object, ...]:
    """Fields of a timed plan that do not depend on a clock."""
    return (plan.segments, plan.projected_peak_bytes, [entry.move for entry in plan.timeline.entries])


def test_times_are_measured_where_no_file_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    plan = _measure(_Block())
    assert plan.projected_seconds is not None and (tmp_path / "file").read_text() == "not a folder"


def test_a_progress_bar_is_shown_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    _measure(_Block())
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sft.common.terminal.progress_display._DELAY_SECONDS", 0.0)
    _measure(_Block(), progress=True)
    captured = capsys.readouterr()
    assert "timing programs" in captured.err and not captured.out


def _program(extent: int, value: float = 1.0, function: Any = torch.ops.aten.mul.Scalar, name: str = "x") -> Program:
    emitter = ProgramBuilder(dtype=torch.float32)
    source = emitter.port("source", name, (2, extent))
    emitter.result("out", name, emitter.call(function, source, value, shape=source.shape))
    return emitter.finish()


def test_programs_are_identified_by_their_content() -> None:
    plain = program_hash(_program(4))
    assert plain is not None and plain == program_hash(_program(4, name="another"))
    others = [_program(5), _program(4, 2.0), _program(4, function=torch.ops.aten.add.Scalar), _program(4, function=_doubled)]
    assert len({plain, *map(program_hash, others)}) == 5
    # Local functions and classes have no name in another process.
    scaled = [
        program_hash(_program(4, function=_Scaled(factor, _Range(length)))) for factor, length in ((2.0, 3), (2.0, 3), (2.0, 4), (1.0, 3))
    ]
    assert scaled[0] == scaled[1] is not None and len(set(scaled)) == 3
    assert program_hash(_program(4, function=_Scaled(2.0, _Range(torch.zeros(3))))) is None
    assert program_hash(_program(4, function=lambda x, y: x)) is None


def _doubled(x: torch.Tensor, _: float) -> torch.Tensor:
    return 2 * x
