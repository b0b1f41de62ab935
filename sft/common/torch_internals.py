"""Private parts of torch, under names of this project.

All other modules import them from here, so that a change of torch shows in one place. Replacements of torch's own functions are rows of
:mod:`sft.analysis.frontend.torch_patches`. Ruff (TID251) refuses private modules of torch in any other file.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

__all__ = [
    "CHECKPOINT_NOOP",
    "FSDP_HOOK_MODULE",
    "MODE_DECORATOR_MODULE",
    "REGISTER_PYTREE_NODE",
    "SET_GRAD_ENABLED",
    "TORCH_RELEASE",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "OpOverload",
    "TorchDispatchMode",
    "add_number",
    "apply_function",
    "batching_or_differentiating_transform",
    "break_dynamo_graph",
    "clear_cublas_workspaces",
    "copy_tensors",
    "cuda_allocator_backend",
    "current_dispatch_modes",
    "disable_current_modes",
    "disable_torch_function",
    "forget_real_tensors",
    "fsdp_reset",
    "has_autocast_kernel",
    "has_dispatch_mode",
    "is_batched_tensor",
    "is_composite_op",
    "is_dynamo_loaded",
    "is_jit_tracing",
    "is_parametrization_cached",
    "is_traceable_wrapper_subclass_type",
    "is_under_functorch_transform",
    "multiplies_in_convolution",
    "op_schema",
    "pytree",
    "set_algorithm_search",
    "set_grad_enabled_silently",
    "storage_id",
    "task_retains_graph",
    "unwrapped",
    "will_engine_execute",
    "without_onednn",
    "without_parametrization_cache",
    "without_saved_tensor_hooks",
]

#: Major and minor number of the installed torch.
TORCH_RELEASE: tuple[int, int] = tuple(map(int, torch.__version__.split(".")[:2]))  # type: ignore[assignment]  # of two numbers

#: The autograd function by which non-reentrant checkpoints keep their inputs, up to torch 2.12; it computes nothing.
CHECKPOINT_NOOP: Any = getattr(checkpoint, "_NoopSaveInputs", None)

#: Module of the hooks by which ``fully_shard`` gathers and frees weights.
FSDP_HOOK_MODULE = "torch.distributed.fsdp._fully_shard"

#: Module of the function that enters a mode around a decorated function.
MODE_DECORATOR_MODULE = "torch.utils._contextlib"

#: Name of the function that registers a container of outputs, for messages: torch has no public one.
REGISTER_PYTREE_NODE = "torch.utils._pytree.register_pytree_node"

#: The function that all switches of the grad mode call; function modes see it.
SET_GRAD_ENABLED = torch._C._set_grad_enabled

#: The function that names the implementation of a convolution.
_SELECT_CONVOLUTION: Callable[..., Any] = torch._C._select_conv_backend


def add_number(targets: Sequence[torch.Tensor], number: float) -> None:
    """Add a number to tensors of one type; on a GPU with one kernel."""
    torch._foreach_add_([*targets], number)


def clear_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS; the next product of each thread and stream allocates another one.

    Not after a CUDA graph with products was recorded: it has their addresses.
    """
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # a build for CUDA
        torch._C._cuda_clearCublasWorkspaces()


def forget_real_tensors(mode: FakeTensorMode) -> None:
    """Drop a finished mode's weak references to real tensors, with which ``torch.utils.swap_tensors`` refuses a tensor.

    Caches of torch keep the modes of earlier exports.
    """
    converter = mode.fake_tensor_converter.meta_converter
    converter.describer.lookup_tensor.clear()
    converter.describer.lookup_storage.clear()


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target; on a GPU with one kernel for all tensors of a type, as each launch takes microseconds."""
    dtypes = [source.dtype for source in sources]
    for dtype in dict.fromkeys(dtypes):
        is_chosen = [each is dtype for each in dtypes]
        torch._foreach_copy_([*compress(targets, is_chosen)], [*compress(sources, is_chosen)])


def multiplies_in_convolution(name: str, args: tuple[Any, ...]) -> bool:
    """True if a convolution on a GPU, or its gradient, is PyTorch's own, which multiplies matrices, and not one of cuDNN.

    Args:
        name: name of an operator, without its overload.
        args: its arguments.
    """
    if name not in ("convolution", "convolution_backward") or not args[0].is_cuda:
        return False
    x, weight, bias = args[:3] if name == "convolution" else (*args[1:3], None)
    settings = args[3:9] if name == "convolution" else args[4:10]
    return "Slow" in _SELECT_CONVOLUTION(x, weight, bias, *settings).name


def op_schema(op: Any) -> Any:
    """The schema of an ATen operator: its arguments, results and aliases; ``None`` for a higher-order operator."""
    return getattr(op, "_schema", None)


def is_composite_op(op: OpOverload) -> bool:
    """Return true for a composite operator: it calls other operators, and its gradient is theirs."""
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def has_autocast_kernel(op: OpOverload, device_type: str) -> bool:
    """Return true where autocast has a kernel of its own for an operator on a kind of device (``"cpu"``, ``"cuda"``)."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), f"Autocast{device_type.upper()}"))


def storage_id(value: torch.Tensor) -> int:
    """An identity of a tensor's memory, which fake tensors have as well."""
    return int(value.untyped_storage()._cdata)


# -- modes ------------------------------------------------------------------------------------------------------------


def disable_current_modes() -> AbstractContextManager[Any]:
    """Return a context without the dispatch modes of this thread."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def current_dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes of this thread, outermost first."""
    return _get_current_dispatch_mode_stack()


def has_dispatch_mode() -> bool:
    """Return true where a dispatch mode of this thread is on (for each launch of a kernel, so it must be quick)."""
    return bool(torch._C._len_torch_dispatch_stack())


def disable_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which function modes and ``__torch_function__`` see no calls."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


def set_grad_enabled_silently(is_enabled: bool) -> None:
    """Set the grad mode without a call that function modes see."""
    with disable_torch_function():
        SET_GRAD_ENABLED(is_enabled)


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """A context without the default hooks on tensors that autograd saves."""
    autograd: Any = torch._C._autograd
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def without_onednn() -> Iterator[None]:
    """A context without oneDNN. ``torch.backends.mkldnn.flags`` also sets options that warn on other devices than the CPU.

    The setting is that of the process: the last of the threads that are in such a context at a time restores it.
    """
    with _onednn_lock:
        _onednn_before.append(torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        with _onednn_lock:
            was_enabled = _onednn_before.pop()
            if not _onednn_before:
                torch._C._set_mkldnn_enabled(was_enabled)


_onednn_lock = threading.Lock()
#: The setting at the begin of each context that is open: the last one that closes takes the first entry.
_onednn_before: list[bool] = []


# -- CUDA -------------------------------------------------------------------------------------------------------------


def set_algorithm_search(is_enabled: bool) -> None:
    """Set ``torch.backends.cudnn.benchmark``, also after ``torch.backends.disable_global_flags()``."""
    torch._C._set_cudnn_benchmark(is_enabled)


def cuda_allocator_backend() -> str:
    """Allocator of device memory: ``"native"``, ``"cudaMallocAsync"`` or ``"pluggable"``."""
    query: Callable[[], str] | None = getattr(torch._C, "_cuda_getAllocatorBackend", None)  # torch for the CPU has none
    return "native" if query is None or not torch.cuda.is_initialized() else query()


# -- transforms and compilers -----------------------------------------------------------------------------------------


def is_jit_tracing() -> bool:
    """Return true inside ``torch.jit.trace``."""
    return bool(torch._C._is_tracing())


def is_under_functorch_transform() -> bool:
    """Return true inside a transform of ``torch.func`` (``grad``, ``vmap``, ``jvp``)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def batching_or_differentiating_transform() -> str | None:
    """Name of the innermost running transform of ``torch.func`` if it is ``vmap`` or ``grad`` (of which ``vjp`` and ``jacrev`` consist)."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return None if interpreter is None else {kinds.Vmap: "vmap", kinds.Grad: "grad"}.get(interpreter.key())


def is_parametrization_cached() -> bool:
    """Return true inside ``torch.nn.utils.parametrize.cached()``, where each parametrized tensor is computed once."""
    return bool(parametrize._cache_enabled)


@contextmanager
def without_parametrization_cache() -> Iterator[None]:
    """Leave ``torch.nn.utils.parametrize.cached()``: a trace must compute parametrized tensors, and must not leave its own in the cache."""
    enabled, cache = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = enabled, cache


def is_batched_tensor(value: torch.Tensor) -> bool:
    """Return true for a tensor that stands for a batch inside ``vmap``, or for gradients with ``is_grads_batched``."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(value) or functorch.is_legacy_batchedtensor(value))


def is_dynamo_loaded() -> bool:
    """Return true where ``torch.compile`` has been imported."""
    return "torch._dynamo" in sys.modules


def break_dynamo_graph(reason: str) -> None:
    """Tell ``torch.compile`` not to compile the running function; an error with ``fullgraph=True``."""
    torch._dynamo.graph_break(msg=reason)


# -- the autograd engine ----------------------------------------------------------------------------------------------


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a function outside of transforms of ``torch.func``, to tensors that :func:`unwrapped` has returned.

    ``Function.apply`` looks at the transforms, at the signature of the function, and at each argument in Python, which takes as long as all
    the rest.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # a method of C
    return apply(*args)


def unwrapped(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors without the wrappers that a finished transform of ``torch.func`` has left on them, which autograd does not look through."""
    return tuple(map(torch._C._functorch.unwrap_if_dead, tensors))


def task_retains_graph() -> bool:
    """Return true where the current backward pass retains its graph, or if this torch has no such query."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(query()) if query is not None else True


def will_engine_execute(node: Any) -> bool:
    """Return true where the current backward pass computes the input of a node of the autograd graph.

    Raises:
        RuntimeError: the node is a leaf of ``torch.autograd.grad``.
    """
    return bool(torch._C._will_engine_execute_node(node))


# -- FSDP -------------------------------------------------------------------------------------------------------------


def fsdp_reset(model: Any) -> Callable[[], None] | None:
    """The function that resets ``fully_shard`` after a failed pass; ``None`` where this torch has none and its state is not known here.

    ``reset_iter_state`` is public from torch 2.13 on. The state of 2.11 and 2.12 has the same parts, and is reset in the same way.

    Args:
        model: the root module of ``fully_shard``.
    """
    reset: Callable[[], None] | None = getattr(model, "reset_iter_state", None)
    if reset is None and (2, 11) <= TORCH_RELEASE < (2, 13):
        return partial(_reset_fsdp_iteration, model._get_fsdp_state())
    return reset


def _reset_fsdp_iteration(root: Any) -> None:
    stream, communication, iteration = root._device_handle.current_stream(), root._comm_ctx, root._state_ctx

    def wait_for(work: Any) -> None:
        if getattr(work, "event", None) is not None:
            stream.wait_event(work.event)

    wait_for(communication.all_gather_state)
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):  # torch 2.12
        for scattered in communication.reduce_scatter_states:
            wait_for(scattered)
        communication.reduce_scatter_states.clear()
    else:
        wait_for(communication.reduce_scatter_state)
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for state in iteration.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            if group is not None:
                _reset_fsdp_group(group, stream, wait_for)
    iteration.iter_forward_root = None
    iteration.post_backward_final_callback_queued = False


def _reset_fsdp_group(group: Any, stream: Any, wait_for: Callable[[Any], None]) -> None:
    if group._all_gather_result is not None:
        if group._all_gather_result.all_gather_event is not None:
            stream.wait_event(group._all_gather_result.all_gather_event)
        if hasattr(group._all_gather_result.all_gather_work, "wait"):
            group._all_gather_result.all_gather_work.wait()
        group._all_gather_result = None
    if group._post_reduce_event is not None:
        stream.wait_event(group._post_reduce_event)
        group._post_reduce_event = None
    wait_for(group._all_reduce_state)
    group._all_reduce_state = None
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
        group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()
