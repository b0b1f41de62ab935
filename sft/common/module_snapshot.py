"""What a model holds at one moment, found by one walk.

A call asks several times for modules, parameters and buffers, and PyTorch walks the whole model each time: for small images of a network
of hundreds of modules that is much of the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["ModuleSnapshot"]


class ModuleSnapshot:
    """The modules and registered tensors of a model.

    Args:
        model: the model.

    Attributes:
        places: all names of modules, also those of a module that is registered more than once; what a module holds that it is in itself
            is left out.
        modules: each module once by its first name, in the order of ``model.modules()``.
        parameters: each parameter once, in the order of ``model.parameters()``.
        buffers: each buffer once, likewise.
        tensors: parameters and buffers by all of their names.
        dtype: element type of the model's numbers: of the first parameter that is no whole number, or buffer; ``None`` where there is none.
        device: where these are, or the CPU.

    >>> contents = ModuleSnapshot(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    >>> [name for name, _ in contents.places], len(contents.parameters), sorted(contents.tensors)[:2], contents.dtype
    (['', '0', '1'], 4, ['0.bias', '0.weight'], torch.float32)
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: list[tuple[str, nn.Module]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        known: set[int] = set()
        parameters: dict[int, nn.Parameter] = {}
        buffers: dict[int, torch.Tensor] = {}
        around: set[int] = set()

        def enter(path: str, module: nn.Module) -> None:
            self.places.append((path, module))
            if id(module) not in known:
                known.add(id(module))
                self.modules[path] = module
            prefix = f"{path}." if path else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    parameters.setdefault(id(parameter), parameter)
                    self.tensors[prefix + name] = parameter
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    buffers.setdefault(id(buffer), buffer)
                    self.tensors[prefix + name] = buffer
            around.add(id(module))
            for name, child in module._modules.items():
                if child is not None and id(child) not in around:
                    enter(prefix + name, child)
            around.remove(id(module))

        enter("", model)
        self.parameters: Sequence[nn.Parameter] = tuple(parameters.values())
        self.buffers: Sequence[torch.Tensor] = tuple(buffers.values())
        numbers = next((tensor for tensor in (*self.parameters, *self.buffers) if tensor.is_floating_point()), None)
        self.dtype = None if numbers is None else numbers.dtype
        self.device = torch.device("cpu") if numbers is None else numbers.device
