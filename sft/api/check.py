"""``sft.check``: a report of the operators of a model that run in strips, and of those that cannot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sft.api.engine import Engine
from sft.api.inputs import InputShape, dtypes_of, shapes_of
from sft.common.errors import InputError, UnsupportedError
from sft.planner.options import Options

__all__ = ["CheckReport", "check", "check_capturable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Result of :func:`check`.

    Attributes:
        ok: whether the model compiles.
        problems: if not, one line per operator, with module path and remedy.
        num_streamed: operators that run in strips.
        num_whole: operators that run on full tensors.
        num_phases: phases between barriers (global values).
        whole_reasons: reasons why operators that read an image run on full tensors: one line each, with module path and remedy.
    """

    ok: bool
    problems: tuple[str, ...] = ()
    num_streamed: int = 0
    num_whole: int = 0
    num_phases: int = 0
    whole_reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.ok:
            return "cannot be compiled exactly:\n" + "\n".join(f"  - {problem}" for problem in self.problems)
        lines = [f"exact: {self.num_streamed} operators in strips, {self.num_whole} whole, {self.num_phases} phase(s) between barriers"]
        if self.whole_reasons:
            lines += ["on whole tensors, where they fit:", *(f"  - {reason}" for reason in self.whole_reasons)]
        return "\n".join(lines)


def check(model: nn.Module, input_shape: InputShape) -> CheckReport:
    """Report which operators of ``model`` run in strips, which cannot, and remedies. Never raises."""
    try:
        check_capturable(model)
        engine = Engine(model, budget_bytes=2**62, options=Options(), optimizer=None, plan=None)
        shapes = [tuple(256 if extent is None else extent for extent in shape) for shape in shapes_of(input_shape)]
        engine.plan_for_shapes(shapes, dtypes_of(input_shape))
        phases = engine.phases()
    except UnsupportedError as error:
        return CheckReport(ok=False, problems=error.problems)
    except Exception as error:
        return CheckReport(ok=False, problems=(f"{type(error).__name__}: {error}",))
    streamed = sum(len(phase.streamed) for phase in phases.phases)
    whole = sum(len(phase.tail) for phase in phases.phases)
    return CheckReport(
        ok=True,
        num_streamed=streamed,
        num_whole=whole,
        num_phases=len(phases.phases) - bool(phases.prologue),
        whole_reasons=tuple(dict.fromkeys(phases.whole_reasons.values())),
    )


def check_capturable(model: nn.Module) -> None:
    """Refuse modules that cannot be captured.

    Raises:
        InputError: a module with its own ``__call__``, a data-parallel wrapper, a scripted module, or lazy parameters.
    """
    if type(model).__call__ is not nn.Module.__call__ and not isinstance(model, (torch.fx.GraphModule, torch.jit.ScriptModule)):
        raise InputError(
            f"(the model itself): {type(model).__name__} has a `__call__` of its own, which would run around and inside of what is "
            "compiled; move what it does into `forward`, or compile nn.Sequential(model)"
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise InputError(
            f"(the model itself): {type(model).__name__} copies gradients between devices around the model; compile model.module, and wrap "
            "the compiled one in nn.parallel.DistributedDataParallel"
        )
    for path, module in model.named_modules():
        label = f"{path or '(the model itself)'}: {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(f"{label}: a scripted or traced module cannot be captured; give the module that it was made of")
        if any(is_lazy(value) for value in (*module._parameters.values(), *module._buffers.values())):
            raise InputError(f"{label}: its parameters are not initialised yet; call the model once before it is compiled")
