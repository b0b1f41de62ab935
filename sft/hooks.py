"""Hooks on modules that would not run: those of submodules, and those of all modules.

Submodules are not called, so what would look at their activations, or change them, is refused. Hooks of the root run around each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sft.analysis.preparation import REPARAMETRIZATION_HOOKS, is_fsdp_hook
from sft.contents import ModuleSnapshot
from sft.errors import UnsupportedError

__all__ = ["check_no_inner_hooks"]

#: What a kind of hooks is called, by the words of its attribute.
_HOOK_KINDS = {
    "forward": "forward hook",
    "forward_pre": "forward pre-hook",
    "backward": "backward hook",
    "backward_pre": "backward pre-hook",
}


def check_no_inner_hooks(contents: ModuleSnapshot) -> None:
    """Refuse hooks that eager PyTorch would run inside of a model that holds this.

    Raises:
        UnsupportedError: naming all of them.
    """
    problems = [
        f"{name}: {type(module).__name__} has a {what}; hooks on submodules do not run inside a compiled model, remove it"
        for name, module in contents.modules.items()
        if name
        for kind, what in _HOOK_KINDS.items()
        if any(not isinstance(hook, REPARAMETRIZATION_HOOKS) and not is_fsdp_hook(hook) for hook in vars(module)[f"_{kind}_hooks"].values())
    ]
    everywhere: Mapping[str, Any] = vars(nn.modules.module)
    problems += [
        f"(all modules): {getattr(hook, '__qualname__', type(hook).__qualname__)} is a {what} of all modules, and submodules are not "
        "called; remove it, or register it on the root alone"
        for kind, what in _HOOK_KINDS.items()
        for hook in everywhere[f"_global_{kind}_hooks"].values()
        if not _is_module_tracker(hook)
    ]
    if problems:
        raise UnsupportedError(problems)


def _is_module_tracker(hook: Any) -> bool:
    """Whether a hook is one of PyTorch's own, by which counters of operators know the module that is running; they change nothing."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")
