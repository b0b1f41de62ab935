"""A Triton driver that compiles for a GPU and launches nothing: without a GPU, launches take the time of their Python alone."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

__all__ = ["IdleDriver", "activate_idle_driver"]


class _Utils:
    """Loading of binaries, and properties of the GPU."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Handles of a module and a function, registers, spills, and the largest number of threads."""
        return 1, 1, 64, 0, 1024

    def unload_module(self, module: int) -> None:
        """Nothing to unload."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Properties of an H100."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}


class IdleDriver:
    """Driver of a simulated GPU.

    Args:
        capability: compute capability times ten.

    Attributes:
        launches: names and arguments of all launches since the driver was activated.
    """

    def __init__(self, capability: int = 90) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = _Utils()
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        self.keeps_launches = True

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """A launcher that calls the hook before a launch and notes the arguments."""
        name = str(metadata.name)

        def run(*arguments: Any) -> None:
            if arguments[7] is not None:
                arguments[7](arguments[6])
            if self.keeps_launches:
                self.launches.append((name, arguments[9:]))

        return run

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Number of the GPU."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Number of the stream."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Nothing to set."""

    def get_active_torch_device(self) -> torch.device:
        """Device of the tensors."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Module of the GPU."""
        return torch.cuda

    @staticmethod
    def is_active() -> bool:
        """True: the driver is the active one."""
        return True

    def map_python_to_cpp_type(self, name: str) -> str:
        """Name of a type in C++."""
        return name

    def get_benchmarker(self) -> None:
        """No benchmarker: there is nothing to time."""

    def assemble_tensormap_to_arg(self, *arguments: Any) -> tuple[Any, ...]:
        """Arguments of a tensor map."""
        return arguments


def activate_idle_driver(capability: int = 90) -> IdleDriver:
    """Make the driver the active one of this process."""
    idle = IdleDriver(capability)
    driver.set_active(idle)
    return idle
