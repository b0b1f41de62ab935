"""Python time of kernel calls, with a driver that launches nothing: the first and later launches, next to Triton's just-in-time path.

    python -P benchmarks/kernels/launch_overhead.py [--rounds 7]

Process time, the least of a few rounds; without the time of the CUDA driver and of the argument conversion in C.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import triton
from idle_driver import activate_idle_driver  # a folder of scripts
from torch import Tensor

from sft.backends import kernel_call
from sft.backends.conv_calls import ConvolutionCall, DataGradientCall, WeightGradientCall
from sft.backends.norm_calls import AffineCall, FrozenNormCall
from sft.kernels.geometry import Geometry, KernelWindow

_SIZE, _CHANNELS = (34, 64), 64
_CALLS = 400


def _image(num_channels: int = _CHANNELS) -> Tensor:
    return torch.zeros(1, *_SIZE, num_channels, dtype=torch.bfloat16).permute(0, 3, 1, 2)


def _calls() -> dict[str, Callable[[], None]]:
    window = KernelWindow(kernel=3, padding=1)
    geometry = Geometry.whole(_SIZE, window, window)
    x, out = _image(), _image()
    weight = torch.zeros(_CHANNELS, 3, 3, _CHANNELS, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    bias, vector = torch.zeros(_CHANNELS, dtype=torch.bfloat16), torch.ones(_CHANNELS)
    conv = ConvolutionCall(geometry=geometry, numbers="bfloat16", relu=True)
    data = DataGradientCall(geometry=geometry, numbers="bfloat16")
    sums = WeightGradientCall(geometry=geometry, numbers="bfloat16", weight=tuple(weight.shape), has_bias=True, num_splits=8)
    workspace, total = torch.zeros(sums.num_elements), torch.zeros(_CHANNELS, _CHANNELS, 3, 3)
    frozen, affine = FrozenNormCall(eps=1e-5, relu=True), AffineCall(num_keys=1)
    scale, shift = torch.zeros(1, _CHANNELS, 1, 1, 2).unbind(-1)
    return {
        "convolution": lambda: conv.run(out, x, weight, bias, None),
        "data gradient": lambda: data.run(out, x, weight, x, None),
        "weight gradient": lambda: sums.run(workspace, x, x, x, None),
        "sums of slots": lambda: sums.add_gradients(total, vector, workspace),
        "frozen norm": lambda: frozen.run(out, x, vector, vector, vector, vector, None),
        "affine map": lambda: affine.run(out, x, scale, shift, None),
    }


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """Process time of a call, the least of the rounds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(_CALLS):
            call()
        times.append((time.process_time() - start) / _CALLS)
    return 1e6 * min(times)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    idle = activate_idle_driver()
    idle.keeps_launches = False
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Triton {triton.__version__}, {platform.processor() or platform.machine()}, 1 thread\n")
    print("| call | just in time, us | replayed, us |\n| --- | --- | --- |")
    for name, call in _calls().items():
        call()
        replayed = microseconds(call, rounds)
        with patch.object(kernel_call, "has_dispatch_mode", lambda: True), patch.object(torch.ops.sft, "kernel_flops", None):
            just_in_time = microseconds(call, rounds)
        print(f"| {name} | {just_in_time:.1f} | {replayed:.1f} |", flush=True)
    a, b = torch.zeros(1, 8, 8, 8), torch.zeros(1, 8, 8, 8)
    print(f"| torch.add | - | {microseconds(lambda: torch.add(a, b), rounds):.1f} |")


if __name__ == "__main__":
    main()
