"""Comparison of replays of kernel calls with the just-in-time path, by a driver that launches nothing, served by ``serve_triton``.

A job has a kernel ``call``, the name of its ``method`` and ``runs``, the arguments of consecutive runs. The result has for each run the
number of launches that took Triton's just-in-time path, the launches with their arguments (pointers as offsets into the run's operands:
number of the operand and bytes), and the launches of the same run by the just-in-time path alone. With ``hook`` a launch hook is active
from the second run on, and its calls are counted; with ``counts_flops`` a FLOP counter is.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "kernels"))

from idle_driver import activate_idle_driver  # a folder of scripts

_DRIVER = activate_idle_driver()


def _readable(arguments: tuple[Any, ...], operands: list[Tensor]) -> list[Any]:
    """Arguments with pointers as operand and offset."""
    readable: list[Any] = []
    for argument in arguments:
        address = argument.data_ptr() if isinstance(argument, Tensor) else argument
        for number, operand in enumerate(operands):
            storage = operand.untyped_storage()
            if isinstance(address, int) and storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                address = (number, address - storage.data_ptr())
                break
        readable.append(address)
    return readable


def _launches(call: Any, method: str, arguments: list[Any]) -> tuple[int, list[Any]]:
    """Number of launches just in time, and all launches, of one run."""
    count = 0
    run = triton.runtime.jit.JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return run(self, *args, **kwargs)

    _DRIVER.launches.clear()
    with patch.object(triton.runtime.jit.JITFunction, "run", counted):
        getattr(call, method)(*arguments)
    operands = [value for value in arguments if isinstance(value, Tensor)]
    return count, [(name, _readable(values, operands)) for name, values in _DRIVER.launches]


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one job."""
    results = []
    for index, arguments in enumerate(job["runs"]):
        hooked = 0
        flops = None

        def hook(metadata: Any) -> None:
            nonlocal hooked
            hooked += 1

        with ExitStack() as contexts:
            if job.get("hook") and index:
                triton.knobs.runtime.launch_enter_hook.add(hook)
                contexts.callback(triton.knobs.runtime.launch_enter_hook.remove, hook)
            if job.get("counts_flops"):
                flops = contexts.enter_context(FlopCounterMode(display=False))
            num_just_in_time, launches = _launches(job["call"], job["method"], arguments)
        _, exact = _launches(dataclasses.replace(job["call"]), job["method"], arguments)
        results.append({"just_in_time": num_just_in_time, "launches": launches, "exact": exact, "hooked": hooked})
        results[-1] |= {"flops": None if flops is None else flops.get_total_flops()}
    return results
