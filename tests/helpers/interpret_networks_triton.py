"""Training steps of networks with ``backend="triton"`` under Triton's interpreter, served by ``serve_triton``.

Blocks are large, since the interpreter's time depends on the number of blocks, not of elements. It also leaves its operands in reference
cycles, which are collected after each launch, so that memory can be measured.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.interpreter import GridExecutor

import sft
from sft.analysis.passes import fold_norms
from sft.api.engine import Engine
from sft.backends import conv_calls, selector
from sft.backends.autotune.benchmark import verify_on
from sft.backends.autotune.cases import CaseCollector
from sft.common.memory import measure_peak
from sft.kernels import common as blocks
from sft.kernels.conv import (
    data_grad2d_triton as conv2d_data_gradient_triton,
)
from sft.kernels.conv import (
    data_grad3d_triton as conv3d_data_gradient_triton,
)
from sft.kernels.conv import (
    forward2d_triton as conv2d_triton,
)
from sft.kernels.conv import (
    forward3d_triton as conv3d_triton,
)
from sft.kernels.conv import (
    weight_grad2d_triton as conv2d_weight_gradient_triton,
)
from sft.kernels.conv import (
    weight_grad3d_triton as conv3d_weight_gradient_triton,
)


def _sibling(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_networks = _sibling("backend_networks")


def _large_blocks() -> None:
    large = blocks.BlockSizes(pixels=256, channels=16, inner=16)
    for module in (conv2d_triton, conv2d_data_gradient_triton, conv3d_triton, conv3d_data_gradient_triton):
        vars(module)["default_blocks"] = lambda *_: large
    gradient, volume = conv2d_weight_gradient_triton.launch_weight_gradient, conv3d_weight_gradient_triton.launch_volume_weight_gradient
    conv2d_weight_gradient_triton.launch_weight_gradient = functools.partial(gradient, block=(256, 16, 128))
    conv3d_weight_gradient_triton.launch_volume_weight_gradient = functools.partial(volume, block=(256, 16, 128))


_large_blocks()


def _few_channels_of_images() -> None:
    """Only layers of images with three channels have the kernels of few channels. These loop over the elements of a window, which takes the
    interpreter long, and the other layers of these networks are narrow, too.
    """
    for module in (conv2d_triton, conv2d_weight_gradient_triton, selector, conv_calls):
        vars(module)["has_few_channels"] = lambda num_channels: num_channels < 4


_few_channels_of_images()


def _calls(net: Any) -> dict[str, int]:
    """Occurrences of each kernel call in the programs of the last plan."""
    counts: dict[str, int] = {}
    for segment in list(net._sft_engine.plan_cache.prepared.values())[-1].region.segments:
        for entry in segment._programs.values():
            for program in entry if isinstance(entry, tuple) else (entry,):
                for instruction in () if program is None else program.instructions:
                    name = getattr(instruction.function, "__qualname__", "")
                    if ".backends." in getattr(instruction.function, "__module__", ""):
                        counts[name] = counts.get(name, 0) + 1
    return counts


def steps(name: str, shape: tuple[int, ...], options: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Training steps of a network: medians over seeds of our relative L2 error and of eager PyTorch's, against fp64; bytes and operations
    of a step, measured and planned; True if a further step has the same bits; and the kernels that ran."""
    ours, eager, report = [], [], {}
    for seed in range(seeds):
        model = _networks.seeded_network(name, seed)
        net = sft.compile(copy.deepcopy(model), shape, options=sft.Options(backend="triton", **options))
        x = torch.randn(shape)
        gradient = torch.randn(model(x).shape)
        model.load_state_dict(net.state_dict())
        reference = _networks.training_step(copy.deepcopy(model).double(), x.double(), gradient)
        eager.append(_networks.relative_l2(_networks.training_step(copy.deepcopy(model), x, gradient), reference))
        before = copy.deepcopy(net.state_dict())
        with FlopCounterMode(display=False) as counter:
            results = _networks.training_step(net, x, gradient)
        ours.append(_networks.relative_l2(results, reference))
        if seed == 0:
            net.load_state_dict(before)
            report = _measured(net, x, gradient, results) | {"flops": counter.get_total_flops(), "planned_flops": net.plan.flops}
            report |= {"calls": _calls(net), "plan": net.plan.to_json()}
    return report | {"ours": statistics.median(ours), "eager": statistics.median(eager)}


def _measured(net: Any, x: torch.Tensor, gradient: torch.Tensor, before: list[torch.Tensor]) -> dict[str, Any]:
    """Bytes of a further step, and True if it has the bits of the first one."""
    launch = GridExecutor.__call__

    def launch_and_collect(*args: Any, **kwargs: Any) -> None:
        launch(*args, **kwargs)
        gc.collect()

    net.zero_grad(set_to_none=True)
    gc.collect()
    gc.freeze()
    with patch.object(GridExecutor, "__call__", launch_and_collect), measure_peak("cpu") as peak:
        leaf, arriving = x.clone().requires_grad_(), gradient.clone()
        y = net(leaf)
        y.backward(arriving)
    gc.unfreeze()
    assert leaf.grad is not None
    results = [y.detach(), leaf.grad, *(p.grad for p in net.parameters() if p.grad is not None)]
    same = all(torch.equal(a, b) for a, b in zip(results, before, strict=True))
    return {"measured": peak.num_bytes, "projected": net.plan.projected_peak_bytes, "total": net.plan.total_bytes, "same": same}


def inference(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The output without gradients: relative L2 errors, ours and eager PyTorch's, bytes, and the kernels that ran."""
    model = _networks.seeded_network(name, 0)
    net = sft.compile(copy.deepcopy(model), shape, options=sft.Options(backend="triton", **options))
    x = torch.randn(shape)
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
        ours, eager = (_networks.relative_l2([module(x)], [truth]) for module in (net, model))
    return {"ours": ours, "eager": eager, "calls": _calls(net), "flops": net.plan.flops, "plain_flops": net.plan.plain_flops}


def trials(name: str, shape: tuple[int, ...], options: dict[str, Any], dtype: str) -> list[tuple[str, str, float, float]]:
    """Classes of operations with a kernel, with the kernel's error against fp64 and ATen's."""
    collector = CaseCollector()
    model = _networks.seeded_network(name, 0).to(getattr(torch, dtype))
    engine = Engine(model, budget_bytes=2**40, options=sft.Options(**options), optimizer=None, plan=None, backend=collector)
    engine.plan_for_shapes([shape])
    errors_by_case = []
    for wanted, trial in collector.cases.items():
        errors = verify_on(trial, torch.device("cpu"))
        errors_by_case.append((wanted.operator, wanted.label, errors.kernels, errors.aten))
    return errors_by_case


def run(job: dict[str, Any]) -> Any:
    """Run one job. Without ``folds_norms`` frozen norms stay operators, as after wide convolutions."""
    torch.set_num_threads(1)
    functions: dict[str, Callable[..., Any]] = {"steps": steps, "inference": inference, "trials": trials}
    limit = fold_norms.MAX_FOLDED_ELEMENTS if job.pop("folds_norms", True) else 0
    with patch.object(fold_norms, "MAX_FOLDED_ELEMENTS", limit):
        return functions[job.pop("run")](**job)
