"""``python -m sft doctor``: installed versions, devices, and a self-check of a strip-wise step against eager PyTorch."""

from __future__ import annotations

import copy
import importlib.machinery
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import sft
from sft.api.compile import compile
from sft.api.compiled_handle import of
from sft.common.byte_units import format_bytes
from sft.common.free_memory import FreeMemory, free_device_memory, free_host_memory
from sft.common.installation import DISTRIBUTION, ENVIRONMENT_VARIABLES, install_command, installed_version, unread_variables
from sft.common.memory import measure_peak
from sft.planner.measured.gpu_calibration import planning_model
from sft.planner.options import Options
from sft.torch_runtime.profiling import table_folders

__all__ = ["show_doctor"]

#: Reported distributions; for optional ones the extra that installs them.
_PACKAGES = {
    **dict.fromkeys((DISTRIBUTION, "torch", "numpy", "sympy", "networkx", "rich"), ""),
    "triton": "triton",
    "openslide-python": "slide",
    "matplotlib": "plot",
}
_TOLERANCE = 1e-10
#: Devices on which this release was tested.
_VERIFIED = {
    "cpu": "all tests of this release",
    "cuda": "an H100 and an H200 with torch 2.11 (docs/gpu.md has what ran there); on another GPU, benchmarks/gpu.sh --stage 1 checks it",
}


def show_doctor(console: Console, *, as_json: bool) -> int:
    """Print versions, devices, and a self-check on each device; returns 1 if a self-check fails."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "imported": str(Path(sft.__file__ or "").resolve().parent),
        "shadowed": _shadowed(),
        "unread_variables": unread_variables(),
        "verified": _VERIFIED,
        "devices": [_device(device) for device in _devices()],
    }
    failed = [device for device in report["devices"] if not device["self_check"]["ok"]]
    if as_json:
        console.print(json.dumps(report, indent=2), markup=False, highlight=False, soft_wrap=True)
        return int(bool(failed))
    lines = [f"{name:18} {report[name]}" for name in ("python", "system", "processors", "threads")]
    lines.append(f"{'imported from':18} {report['imported']}")
    if report["shadowed"]:
        lines.append(f"{'WARNING':18} {report['shadowed']}")
    lines += [
        f"{'WARNING':18} the environment variable {name} is not read; there is {', '.join(ENVIRONMENT_VARIABLES)}"
        for name in report["unread_variables"]
    ]
    for name, version in report["packages"].items():
        lines.append(f"{name:18} {version or _install_hint(name)}")
    lines += [f"{'tested on ' + name:18} {text}" for name, text in _VERIFIED.items()]
    for device in report["devices"]:
        result = device["self_check"]
        lines.append(f"{device['device']:18} {device['name']}, {device['memory']}")
        if device["rates"]:
            lines.append(f"{'  plans ranked by':18} the rates of {device['rates']}")
        lines.append(f"{'  self-check':18} {'ok' if result['ok'] else 'FAILED'}: {result['message']}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return int(bool(failed))


def _install_hint(name: str) -> str:
    return f"not installed; {install_command(_PACKAGES[name])}" if _PACKAGES[name] else "not installed"


def _shadowed() -> str:
    """A warning where Python's path finds a folder named ``sft`` that is not a package, such as the root of a clone; otherwise empty.

    Only an installation by an import hook, as older versions of setuptools make it, has this defect: the folder then wins in its parent.
    """
    spec = importlib.machinery.PathFinder.find_spec("sft", ["", *sys.path])
    if spec is None or spec.origin is not None:
        return ""
    folders = ", ".join(spec.submodule_search_locations or ())
    return f"scripts in this folder import the folder {folders}, which is not a package, as sft; install again: {install_command('wsi')}"


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", number) for number in range(torch.cuda.device_count()))]


def _device(device: torch.device) -> dict[str, Any]:
    is_cpu = device.type == "cpu"
    return {
        "device": str(device),
        "name": platform.processor() or platform.machine() if is_cpu else torch.cuda.get_device_name(device),
        "memory": _memory_text(free_host_memory() if is_cpu else free_device_memory(device)),
        "rates": "" if is_cpu else planning_model(device, table_folders()).name,
        "self_check": _self_check(device),
    }


def _memory_text(memory: FreeMemory) -> str:
    return f"{format_bytes(memory.free_bytes)} free of {format_bytes(memory.total_bytes)}"


def _self_check(device: torch.device) -> dict[str, Any]:
    """Compare a training step in strips with eager PyTorch in float64, and its measured with its projected bytes."""
    try:
        error, measured_bytes, projected_bytes = _step_in_strips(device)
    except Exception as problem:  # any defect of the installation is a result of the check
        return {"ok": False, "message": f"{type(problem).__name__}: {problem}"}
    ok = error <= _TOLERANCE and measured_bytes <= projected_bytes
    message = f"relative error {error:.1e}, measured {format_bytes(measured_bytes)} of {format_bytes(projected_bytes)} projected"
    return {"ok": ok, "message": message}


def _step_in_strips(device: torch.device) -> tuple[float, int, int]:
    """Maximal relative error of output and gradients, and the measured and projected bytes."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1))
        eager = nn.Sequential(*layers).to(device, torch.float64)
        x = torch.rand(2, 3, 66, 50, device=device, dtype=torch.float64)
    net = compile(copy.deepcopy(eager), x.shape, budget="64MiB", options=Options(tile=(16, None)))
    expected = _gradients(eager, x)
    with measure_peak(device) as peak:
        actual = _gradients(net, x.clone())
    errors = [float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) for a, b in zip(actual, expected, strict=True)]
    return max(errors), peak.num_bytes, of(net).plan.projected_peak_bytes


def _gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    y.backward(torch.ones_like(y))  # a separate loss would be measured too
    return [y.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
