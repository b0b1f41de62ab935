"""The stages of ``benchmarks/gpu.sh`` without a GPU: order, limits, archive, exit code, and commands of ``--dry-run``."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.helpers.triton_process import needs_triton

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "benchmarks" / "gpu.sh"
_STAGES = ("check", "steps", "test", "kernels", "tune", "rest")


def _python(folder: Path, command: str) -> Path:
    """A Python that reports a GPU, and runs a shell command in place of every program; ``$*`` is its command line."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\ncase "$*" in *is_available* | *find_spec*) exit 0 ;; esac\n{command}\n')
    path.chmod(0o755)
    return path


def _environment(python: Path | str, **variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("OUT", "RESULTS", "SFT_CACHE_DIR", "TRITON_CACHE_DIR")}
    return inherited | {"PYTHON": str(python), "OMP_NUM_THREADS": "1"} | variables


def _run(arguments: list[str], python: Path | str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(_SCRIPT), *arguments], env=_environment(python, **variables), capture_output=True, text=True)


def _members(archive: Path) -> dict[str, str]:
    """Texts of an archive, by name."""
    with tarfile.open(archive) as packed:
        files = [member for member in packed.getmembers() if member.isfile()]
        return {member.name: packed.extractfile(member).read().decode(errors="replace") for member in files}  # type: ignore[union-attr]  # of a file


def test_all_stages_run_in_order_and_failures_do_not_stop_them(tmp_path: Path) -> None:
    """With a Python that reports a GPU and fails in every program."""
    python, out = _python(tmp_path, "echo tried $*; exit 1"), tmp_path / "out"
    done = _run(["all", "--out", str(out)], python, COMPUTE_SANITIZER=str(python))
    assert done.returncode == 1
    assert re.findall(r"== (\w+): done", done.stdout) == list(_STAGES)
    (archive,) = out.glob("*.tar.gz")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-gpu.tar.gz", archive.name)
    members = _members(archive)
    tried = {stage: re.findall("^tried (.*)", members[f"gpu-{stage}/log.txt"], re.MULTILINE) for stage in _STAGES}
    assert [len(tried[stage]) for stage in _STAGES] == [4, 1, 1, 1, 1, 4]
    doctor, marked, smoke, rates = tried["check"]
    assert "sft doctor" in doctor and "gpu_smoke.py --processes 4" in smoke and "gpu_rates.py" in rates
    assert "-m gpu" in marked and "-n 8" in marked and "-p no:benchmark" in marked
    assert "--dtypes bf16 --backends aten" in tried["steps"][0] and "--trace" in tried["steps"][0]
    assert "-k interpreted" in tried["test"][0] and "kernel_bench.py" in tried["kernels"][0] and "sft tune" in tried["tune"][0]
    assert ["--backends auto" in tried["rest"][0], "--backends triton" in tried["rest"][1]] == [True, True]
    assert "memcheck" in tried["rest"][2] and "racecheck" in tried["rest"][3], "the slowest come last"
    limits = [float(limit) for stage in _STAGES for line in tried[stage] for limit in re.findall(r"--minutes (\S+)", line)]
    assert len(limits) == 9 and all(0 < limit < 10 for limit in limits)


def test_one_stage_by_number_or_name(tmp_path: Path) -> None:
    python = _python(tmp_path, "echo tried $*")
    for stage, word in (("check", "1"), ("steps", "steps")):
        done = _run(["--stage", word], python, OUT=str(tmp_path / stage))
        assert done.returncode == 0, done.stderr
        (archive,) = (tmp_path / stage).glob("*.tar.gz")
        assert archive.name.endswith(f"-gpu-{stage}.tar.gz") and "all well" in _members(archive)[f"gpu-{stage}/log.txt"]


def test_a_stage_without_time_left_keeps_its_results(tmp_path: Path) -> None:
    command = 'case "$*" in *doctor* | *" -m gpu"*) echo known ;; *smoke*) sleep 60 ;; *) echo tried $* ;; esac'
    started = time.monotonic()
    done = _run(["--stage", "1", "--minutes", "0.05", "--out", str(tmp_path / "out")], _python(tmp_path, command))
    assert done.returncode == 1 and time.monotonic() - started < 30
    (archive,) = (tmp_path / "out").glob("*.tar.gz")
    log = _members(archive)["gpu-check/log.txt"]
    assert log.count("known") == 2 and "out of time" in log and "no time left for it" in log and "tried" not in log


def test_a_signal_stops_the_command_and_packs_the_results(tmp_path: Path) -> None:
    """Both of two concurrent commands are stopped."""
    command = 'case "$*" in *doctor*) echo known ;; *) echo $$ >>"$PID_FILE"; echo begun; exec sleep 60 ;; esac'
    pid_file, out = tmp_path / "pids", tmp_path / "out"
    environment = _environment(_python(tmp_path, command), PID_FILE=str(pid_file))
    process = subprocess.Popen([str(_SCRIPT), "--stage", "1", "--out", str(out)], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and len(pid_file.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = pid_file.read_text().split()
    assert len(pids) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    (archive,) = out.glob("*.tar.gz")
    log = _members(archive)["gpu-check/log.txt"]
    assert "known" in log and log.count("begun") == 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a command outlives the script"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "7"], "no stage 7; there are 1 to 6: check steps"),
        (["--stage", "1", "--minutes", "soon"], "--minutes soon: give a positive number"),
        (["--stage", "1", "--minutes", "0"], "--minutes 0: give a positive number"),
        (["--stage"], "--stage needs a value"),
        (["all", "--fast"], "unknown argument --fast"),
    ],
    ids=" ".join,
)
def test_mistakes_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = _run([*arguments], _python(tmp_path, "echo tried"), OUT=str(tmp_path / "out"))
    assert done.returncode == 2 and message in done.stderr and "tried" not in done.stdout
    assert not (tmp_path / "out").exists()


def test_precompiled_kernels_are_used(tmp_path: Path) -> None:
    """With a copy of the script next to a folder of compiled kernels."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "build" / "triton-cache").mkdir(parents=True)
    script = Path(shutil.copy(_SCRIPT, tmp_path / "benchmarks"))
    environment = _environment(_python(tmp_path, 'echo "kernels in $TRITON_CACHE_DIR, table in $SFT_CACHE_DIR"'))
    done = subprocess.run([str(script), "--stage", "4", "--out", str(tmp_path)], env=environment, capture_output=True, text=True)
    assert f"kernels in {tmp_path}/build/triton-cache, table in {tmp_path}/cache" in done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_passes() -> None:
    done = subprocess.run(["shellcheck", str(_SCRIPT), str(_SCRIPT.with_name("scaling.sh"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@needs_triton
def test_a_stage_on_the_cpu(tmp_path: Path) -> None:
    done = _run(["--stage", "kernels", "--dry-run", "--out", str(tmp_path)], sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    members = _members(archive)
    assert "4 of 4 right" in members["gpu-kernels/log.txt"]
    assert any(name.endswith("-gpu-kernels-verified.json") for name in members)


@pytest.mark.slow
@needs_triton
def test_all_stages_on_the_cpu(tmp_path: Path) -> None:
    done = _run(["all", "--dry-run", "--out", str(tmp_path)], sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"== (\w+): done, \S+ all well", done.stdout) == list(_STAGES)


@needs_triton
def test_kernels_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    """They are in the folder that Triton searches before it compiles."""
    command = [sys.executable, str(_ROOT / "benchmarks" / "kernels" / "kernel_precompile.py"), "--only", "rows", "--jobs", "1"]
    environment = _environment(sys.executable, PYTHONPATH=str(_ROOT))
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([*command, "--out", str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    binaries = list(tmp_path.rglob("*.cubin"))
    assert binaries and len(binaries) == len(list(tmp_path.rglob("*.ptx")))
    assert "4 kernels for sm_90, Triton 3." in done.stdout and f"{len(binaries)} kernels, " in done.stdout
    assert json.loads((tmp_path / "contents.json").read_text())["target"] == "sm_90"
