"""Served by ``serve_triton``: training steps of networks with ``backend="triton"``, under Triton's interpreter.

Blocks are large, since the interpreter takes its time by the block and not by the element. It also leaves its operands in cycles of
references, which are collected after each launch, so that memory can be measured.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.interpreter import GridExecutor

import sft
from sft.kernels import blocks, conv2d_gradient_triton, conv2d_triton, conv3d_triton
from sft.memory import measure_peak


def _sibling(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_networks = _sibling("backend_networks")


def _large_blocks() -> None:
    large = blocks.Blocks(pixels=256, channels=16, inner=16)
    for module in (conv2d_triton, conv3d_triton):
        module.default_blocks = lambda *_: large
    gradient, volume = conv2d_gradient_triton.launch_weight_gradient, conv3d_triton.launch_volume_weight_gradient
    conv2d_gradient_triton.launch_weight_gradient = functools.partial(gradient, block=(256, 16, 128))
    conv3d_triton.launch_volume_weight_gradient = functools.partial(volume, block=(256, 16, 128))


_large_blocks()


def _calls(net: Any) -> dict[str, int]:
    """How often each kernel call stands in the programs of the last plan."""
    found: dict[str, int] = {}
    for segment in list(net._sft_engine._ready.values())[-1].region.segments:
        for held in segment._programs.values():
            for program in held if isinstance(held, tuple) else (held,):
                for instruction in () if program is None else program.instructions:
                    name = getattr(instruction.function, "__qualname__", "")
                    if ".backends." in getattr(instruction.function, "__module__", ""):
                        found[name] = found.get(name, 0) + 1
    return found


def _compiled(name: str, seed: int, shape: tuple[int, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    model = _networks.seeded_network(name, seed)
    return model, sft.compile(copy.deepcopy(model), shape, options=sft.Options(backend="triton", **options))


def errors(name: str, shape: tuple[int, ...], options: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Medians over seeds of our relative L2 error and of eager PyTorch's, against fp64; and the kernels that ran."""
    ours, eager, net = [], [], None
    for seed in range(seeds):
        model, net = _compiled(name, seed, shape, options)
        x = torch.randn(shape)
        gradient = torch.randn(model(x).shape)
        model.load_state_dict(net.state_dict())
        reference = _networks.training_step(copy.deepcopy(model).double(), x.double(), gradient)
        eager.append(_networks.relative_l2(_networks.training_step(copy.deepcopy(model), x, gradient), reference))
        ours.append(_networks.relative_l2(_networks.training_step(net, x, gradient), reference))
    return {"ours": statistics.median(ours), "eager": statistics.median(eager), "calls": _calls(net), "plan": net.plan.to_json()}


def accounts(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Bytes and operations of one step, measured and planned; whether a second step has the same bits."""
    _, net = _compiled(name, 0, shape, options)
    x = torch.randn(shape)
    steps = []
    launch = GridExecutor.__call__

    def launch_and_collect(*args: Any, **kwargs: Any) -> None:
        launch(*args, **kwargs)
        gc.collect()

    gc.collect()
    gc.freeze()
    with patch.object(GridExecutor, "__call__", launch_and_collect), measure_peak("cpu") as peak:
        steps.append(_measured(net, x))
    gc.unfreeze()
    with FlopCounterMode(display=False) as counter:
        steps.append(_measured(net, x))
    same = all(torch.equal(a, b) for a, b in zip(*steps, strict=True))
    plan = net.plan
    found = {"measured": peak.num_bytes, "projected": plan.projected_peak_bytes, "total": plan.total_bytes}
    return found | {"flops": counter.get_total_flops(), "planned_flops": plan.flops, "same": same}


def _measured(net: Any, x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    y = net(leaf)
    y.backward(torch.ones_like(y))
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job."""
    torch.set_num_threads(1)
    return {"errors": errors, "accounts": accounts}[job.pop("run")](**job)
