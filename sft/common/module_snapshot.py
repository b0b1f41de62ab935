"""The modules, parameters and buffers of a model, collected in one traversal.

A call needs them several times, and PyTorch traverses the model each time; for small images and a network of hundreds of modules that is a
large share of the call.
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
        named_modules: path and module, with all paths of a module that is registered more than once; never descends into an ancestor.
        modules: each module once by its first path, in the order of ``model.modules()``.
        parameters: each parameter once, in the order of ``model.parameters()``.
        buffers: each buffer once, likewise.
        tensors: parameters and buffers by all of their names.
        dtype: element type of the first floating-point parameter or buffer; ``None`` without one.
        device: device of that tensor, or the CPU.

    >>> snapshot = ModuleSnapshot(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    >>> [name for name, _ in snapshot.named_modules], len(snapshot.parameters), sorted(snapshot.tensors)[:2], snapshot.dtype
    (['', '0', '1'], 4, ['0.bias', '0.weight'], torch.float32)
    """

    def __init__(self, model: nn.Module) -> None:
        self.named_modules: list[tuple[str, nn.Module]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        visited: set[int] = set()
        parameters: dict[int, nn.Parameter] = {}
        buffers: dict[int, torch.Tensor] = {}
        ancestors: set[int] = set()

        def visit(path: str, module: nn.Module) -> None:
            self.named_modules.append((path, module))
            if id(module) not in visited:
                visited.add(id(module))
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
            ancestors.add(id(module))
            for name, child in module._modules.items():
                if child is not None and id(child) not in ancestors:
                    visit(prefix + name, child)
            ancestors.remove(id(module))

        visit("", model)
        self.parameters: Sequence[nn.Parameter] = tuple(parameters.values())
        self.buffers: Sequence[torch.Tensor] = tuple(buffers.values())
        first = next((tensor for tensor in (*self.parameters, *self.buffers) if tensor.is_floating_point()), None)
        self.dtype = None if first is None else first.dtype
        self.device = torch.device("cpu") if first is None else first.device
