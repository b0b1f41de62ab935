"""Table of functions and settings of torch and Python that a capture replaces, and the context manager that applies it.

A row is a :class:`Patch`. *Function rows* replace a function; other threads keep the original, since the replacement looks at the thread
that calls it. *Switch rows* enter a context: a setting of the whole process, or of the thread, that torch itself restores.

A row is skipped where this torch is older than ``since``, or as new as ``until``. Where this torch has no such function, or one with other
parameters, a required row raises an error, and any other row is skipped; captures then are as the row's ``without`` says.
``tests/analysis/frontend/test_torch_patches.py`` checks each row against the installed torch.

Python's builtins are not replaced. The exporter replaces ``max`` and ``min`` itself; a row replaces the function that it installs.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import torch

from sft.analysis.frontend import replacement_functions as functions
from sft.analysis.frontend import switched_settings as switches
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import TORCH_RELEASE, without_onednn, without_saved_tensor_hooks

__all__ = [
    "COMPOSITE_FUNCTIONS",
    "MODE_SWITCHES",
    "PATCHES",
    "RECURRENT_FUNCTIONS",
    "Patch",
    "apply_patches",
    "calling_frame",
]

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A replaced function or a switched setting."""

    target: str
    """Qualified name of the function, or of the setting."""

    why: str
    """Reason for the replacement."""

    without: str
    """Effect on captures where the row is skipped."""

    since: str = "2.11"
    """First release of torch with the target; 2.11 is the oldest that is supported."""

    until: str | None = None
    """First release of torch that does not need the replacement; ``None`` while all do."""

    parameters: tuple[str, ...] | None = None
    """Parameter names of the target, with a final ``"..."`` for any more; ``None`` for functions of C, which have no signature."""

    is_required: bool = False
    """True where captures without the replacement could be wrong: a torch without the target is refused."""

    replacement: Callable[[Function], Function] | None = None
    """Returns the replacement of the original. ``None`` in rows whose replacement belongs to one capture, and in switch rows."""

    switch: Callable[[], AbstractContextManager[Any]] | None = None
    """Context of a switch row."""

    @property
    def is_in_range(self) -> bool:
        """True where this release of torch is one that the row is for."""
        return _release(self.since) <= TORCH_RELEASE and (self.until is None or _release(self.until) > TORCH_RELEASE)

    def locate(self) -> tuple[Any, str] | None:
        """Owner and attribute name of the target; ``None`` where this torch has no such function, or one of other parameters."""
        path, _, name = self.target.rpartition(".")
        try:
            function = getattr(owner := _resolved(path), name)
        except (ImportError, AttributeError):
            return None
        if self.parameters is None:
            return owner, name
        names = _parameter_names(inspect.unwrap(function))
        if self.parameters[-1:] == ("...",):
            names = (*names[: len(self.parameters) - 1], "...")
        return (owner, name) if names == self.parameters else None


_resolved = functools.lru_cache(maxsize=256)(pkgutil.resolve_name)
_parameter_names = functools.lru_cache(maxsize=256)(lambda function: tuple(inspect.signature(function).parameters))


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


# -- the table --------------------------------------------------------------------------------------------------------

_NN = torch._C._nn

#: Composite functions that autocast may run in single precision, by name.
COMPOSITE_FUNCTIONS: Mapping[str, Function] = {
    name: getattr(_NN, name) for name in dir(_NN) if "upsample" in name or name == "cross_entropy_loss"
}

#: Functions of whole recurrent layers.
RECURRENT_FUNCTIONS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

#: Methods by which ``forward`` switches the grad mode or inference mode; ``set_grad_enabled`` switches when it is made.
MODE_SWITCHES = (
    *(f"{cls}.{method}" for cls in ("no_grad", "enable_grad", "inference_mode") for method in ("__enter__", "__exit__")),
    *(f"set_grad_enabled.{method}" for method in ("__init__", "__enter__", "__exit__")),
)

_SWITCH_PARAMETERS = {"__init__": ("self", "mode"), "__enter__": ("self",), "__exit__": ("self", "exc_type", "exc_value", "traceback")}
_RNN_PARAMETERS = ("input", "hidden", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first", "layer_fn")
_MODE_QUERIES = ("is_grad_enabled", "is_inference_mode_enabled", "are_deterministic_algorithms_enabled")

PATCHES: dict[str, Patch] = {
    # -- queries of `forward` about the call
    **{
        name: Patch(
            target=f"torch.{name}",
            is_required=True,
            why="`forward` branches on the mode of the call. The trace runs in one mode, returns that of the call, and adds a guard.",
            without="Models that branch on the mode have the branch of the trace in every call.",
        )
        for name in _MODE_QUERIES
    },
    **{
        name: Patch(
            target=f"torch.{name}",
            parameters=_SWITCH_PARAMETERS[name.rpartition(".")[2]],
            is_required=True,
            why="Inside of a region that `forward` itself switches, queries return the mode of the region and not that of the call.",
            without="`torch.is_grad_enabled()` under `torch.no_grad()` returns the mode of the call.",
        )
        for name in MODE_SWITCHES
    },
    "autograd_function_apply": Patch(
        target="torch.autograd.function._SingleLevelFunction.apply",
        is_required=True,
        why="An autograd function has a backward of its own, which a graph of operators lacks. Models may have bound `Function.apply` "
        "long before; the `apply` of its base class is looked up at each call.",
        without="Gradients would be those of the operators in the function's forward.",
    ),
    # -- values and types that the exporter would change
    "exporter_minmax": Patch(
        target="torch._export.non_strict_utils._tensor_min_max",
        parameters=("args", "real_callable", "tensor_callable", "kwargs"),
        why="The exporter replaces builtins.max and builtins.min by this function, which keeps Max(size, number) as an expression. "
        "TensorFlow's padding takes one in each layer; after five strides sizes fill pages, and proofs about them take minutes.",
        without="Networks with such padding are captured in minutes, or for one size only.",
        replacement=functions.minmax_by_comparison,
    ),
    "rnn_state_shapes": Patch(
        target="torch._decomp.decompositions._rnn_helper",
        until="2.13",
        parameters=_RNN_PARAMETERS,
        why="The decomposition of LSTMs returns states of each layer as [1, N, H].",
        without="What follows the states of an LSTM is captured with a dimension too many.",
        replacement=functions.rnn_state_shapes,
    ),
    "bincount_dtype": Patch(
        target="torch._subclasses.fake_impls.op_implementations_dict",
        until="2.13",
        is_required=True,
        why="On fake tensors `bincount` has the dtype of its indices; with weights it has that of sums.",
        without="What follows a sum of weights by class is computed in another dtype than eager PyTorch's.",
        switch=switches.with_bincount_dtypes,
    ),
    "pooling_sizes": Patch(
        target="torch._meta_registrations.div_rtn",
        until="2.13",
        parameters=("x", "y"),
        why="The size of a pooled image is a rounded quotient, and the function looks at the remainder: a guard on the parity of the size.",
        without="Networks that pool are captured again for even and odd heights and widths, at each pooling.",
        replacement=functions.floor_quotient,
    ),
    **{
        name: Patch(
            target=f"torch._C._nn.{name}",
            why="The exporter keeps this function whole and finds its dtype without autocast, which on GPUs runs the operator inside in "
            "single precision. The replacement casts the input first.",
            without="Under autocast on GPUs, values downstream are captured in another dtype than eager PyTorch's.",
        )
        for name in COMPOSITE_FUNCTIONS
    },
    **{
        name: Patch(
            target=f"torch._VF.{name}",
            why="Under autocast the products inside, or the kernel of a whole layer, cast operands. The exporter decomposes without it.",
            without="Under autocast, operands of two dtypes are refused, or a recurrent layer is captured step by step (torch 2.11).",
        )
        for name in ("einsum", *RECURRENT_FUNCTIONS)
    },
    "deterministic_algorithms": Patch(
        target="torch.use_deterministic_algorithms",
        why="With it torch.nn.functional replaces interpolation, padding and pooling on GPUs by indexing of whole images, which does not "
        "stream. The lowering sees to the order of sums.",
        without="These operators are not computed strip by strip.",
        switch=switches.without_deterministic_algorithms,
    ),
    "onednn": Patch(
        target="torch.backends.mkldnn.enabled",
        why="Operators are traced on fake CPU tensors; attention and LSTMs would be recorded as oneDNN calls. GPUs lack them, and the "
        "forward call of an LSTM computes the workspace of its derivative only in grad mode, in which programs do not run.",
        without="Programs for GPUs contain operators of the CPU; LSTMs in single precision cannot be differentiated.",
        switch=without_onednn,
    ),
    "module_stack": Patch(
        target="torch.fx._symbolic_trace.Tracer.call_module",
        parameters=("self", "m", "forward", "args", "kwargs"),
        why="`forward` may catch an error of a submodule, and continue. The exporter leaves the submodule on its stack of running modules.",
        without="Models that catch an error of a submodule are refused.",
        replacement=functions.balanced_module_stack,
    ),
    # -- time of a capture
    "batch_norm_shapes": Patch(
        target="torch._decomp.decompositions.native_batch_norm_helper",
        parameters=("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "functional"),
        why="The decomposition runs a dozen operations on fake tensors for the shape of each batch norm.",
        without="A third more time for capturing a ResNet.",
        replacement=functions.batch_norm_shapes,
    ),
    "grid_sample_shapes": Patch(
        target="torch._decomp.decompositions._grid_sampler_2d",
        parameters=("a", "grid", "interpolation_mode", "padding_mode", "align_corners", "_expand_grid"),
        why="The decomposition runs a hundred operations on fake tensors for the shape of each sample.",
        without="A second more for each `grid_sample`.",
        replacement=functions.grid_sample_shapes,
    ),
    "pointwise_shapes": Patch(
        target="torch._subclasses.fake_impls.get_fast_op_impls",
        why="On fake tensors of symbolic sizes a ReLU is a comparison and a choice, with proofs about their shapes.",
        without="A quarter more time for capturing a U-Net, together with interpolation by its decomposition.",
        switch=switches.with_pointwise_shapes,
    ),
    **{
        f"upsample_{kind}_shapes": Patch(
            target=f"torch._decomp.decompositions._upsample_{kind}",
            parameters=("input", "output_size", *others),
            why="The decomposition runs dozens of operations on fake tensors for the shape of each enlarged image.",
            without="Captures of U-Nets take longer.",
            replacement=functions.upsample_shapes,
        )
        for kind, others in (("linear", ("align_corners", "scales")), ("nearest", ("scales", "exact")))
    },
    "size_complexity_limit": Patch(
        target="torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_expr",
        parameters=("self", "orig_expr", "..."),
        why="Networks that cut images into windows reshape by rounded quotients of sizes, again in every block; proofs about these sizes "
        "take minutes (timm's mobilevitv2_050: 1 s for one size, two minutes for any; benchmarks/results, `capture-windows`).",
        without="Such networks are captured in minutes.",
        replacement=functions.limited_evaluate_expr,
    ),
    "node_metadata": Patch(
        target="torch.fx.experimental.proxy_tensor._extract_tensor_metadata",
        why="With each node the exporter records memory formats of its value, by proofs about symbolic strides. Nothing here reads them.",
        without="Deep networks are captured more slowly.",
        replacement=functions.no_tensor_metadata,
    ),
    "stack_traces": Patch(
        target="torch.fx.config.do_not_emit_stack_traces",
        since="2.12",
        why="With each node the exporter records the Python stack. Nothing here reads it.",
        without="Deep networks are captured more slowly.",
        switch=lambda: mock.patch.object(pkgutil.resolve_name("torch.fx.config"), "do_not_emit_stack_traces", True),
    ),
    "tracer_stack_traces": Patch(
        target="torch.fx.experimental.proxy_tensor._ModuleStackTracer.__init__",
        until="2.12",
        parameters=("self", "scope_root"),
        why="Before there was a setting for it (row `stack_traces`), the exporter's tracer recorded Python stacks always.",
        without="Deep networks are captured more slowly.",
        replacement=functions.no_stack_traces,
    ),
    "mode_stacks": Patch(
        target="torch._subclasses.fake_tensor.traceback",
        why="Each mode of fake tensors records the Python stack of its creation, with lines of source. Nothing here reads it.",
        without="A capture takes some milliseconds more in programs of deep stacks.",
        switch=switches.without_mode_stacks,
    ),
    "generated_code": Patch(
        target="torch.fx.graph_module.GraphModule.recompile",
        parameters=("self",),
        why="The exporter generates Python code of a graph six times, after each of its passes. The graph is read and not called.",
        without="A capture takes a twentieth more time.",
        replacement=functions.code_on_demand,
    ),
    "composite_operators": Patch(
        target="torch._export.utils._materialize_cpp_cia_ops",
        parameters=(),
        why="Each decomposition of a program looks up a thousand composite operators, again for each of two dozen namespaces.",
        without="A capture whose program is decomposed takes some 20 milliseconds more.",
        replacement=functions.first_call_only,
    ),
    "composite_kernels": Patch(
        target="torch.export.exported_program._override_composite_implicit_decomp",
        parameters=("cia_ops_to_callable",),
        why="Each decomposition makes eleven thousand kernels that keep composite operators whole: functions of the operator alone.",
        without="A capture whose program is decomposed takes some 90 milliseconds more.",
        replacement=switches.remembered_kernels,
    ),
    "ranges_of_sizes": Patch(
        target="torch.fx.experimental.symbolic_shapes.DimConstraints.solve",
        parameters=("self",),
        why="The exporter solves inequalities of sizes for the text of an error. Captures have their ranges from its shape environment.",
        without="A capture takes a twentieth more time.",
        replacement=functions.solve_specializations,
    ),
    "fake_tensor_cache": Patch(
        target="torch._dynamo.config.fake_tensor_cache_enabled",
        why="The exporter's cache of fake operators costs more than it saves: sizes are symbols, and few layers are alike.",
        without="Captures are slower.",
        switch=lambda: pkgutil.resolve_name("torch._dynamo.config").patch(fake_tensor_cache_enabled=False),
    ),
    # -- state that a failed export leaves
    "buffer_hooks": Patch(
        target="torch.nn.modules.module.register_module_buffer_registration_hook",
        until="2.13",
        why="The exporter sees assignments to buffers by a hook of all modules, and leaves the hook where `forward` raises.",
        without="A model whose capture has failed cannot register buffers any more.",
        switch=switches.restored_buffer_hooks,
    ),
    # -- the caller's debugging aids
    "anomaly_mode": Patch(
        target="torch.autograd.set_detect_anomaly",
        why="Anomaly detection looks at values, which fake tensors lack.",
        without="Captures fail under torch.autograd.detect_anomaly().",
        switch=lambda: torch.autograd.set_detect_anomaly(False),
    ),
    "saved_tensor_hooks": Patch(
        target="torch.autograd.graph.saved_tensors_hooks",
        why="Hooks on tensors that autograd saves would run on fake tensors.",
        without="Captures under such hooks fail, or count tensors that do not exist.",
        switch=without_saved_tensor_hooks,
    ),
    "global_module_hooks": Patch(
        target="torch.nn.modules.module.register_module_forward_hook",
        why="Hooks of all modules (of a FLOP counter) would run on fake tensors.",
        without="They see calls that never happen.",
        switch=switches.without_global_module_hooks,
    ),
    "loggers": Patch(
        target="torch.export",
        why="The exporter logs and warns of failures that are raised as well, or retried.",
        without="Warnings about the exporter's inside on the user's terminal.",
        switch=switches.quiet_loggers,
    ),
    "output": Patch(
        target="sys.stdout",
        why="`forward` may print; it runs several times while it is captured, on tensors without values. Prints of other threads appear.",
        without="Lines that the user's program does not print itself.",
        switch=switches.muted_output,
    ),
}


# -- application ------------------------------------------------------------------------------------------------------


@contextmanager
def apply_patches(
    *names: str, replacements: Mapping[str, Callable[[Function], Function]] | None = None, namespaces: Sequence[Any] = ()
) -> Iterator[None]:
    """A context in which rows of :data:`PATCHES` hold for the current thread.

    Args:
        names: rows with a replacement or a switch of their own.
        replacements: for other rows, by name, a function from the original to its replacement.
        namespaces: modules of Python that may have bound the functions by name; these names are replaced, too.
    """
    makers = {name: PATCHES[name].replacement for name in names} | dict(replacements or {})
    with ExitStack() as stack:
        for name, make in makers.items():
            patch = PATCHES[name]
            if not patch.is_in_range:
                continue
            location = patch.locate()
            if location is None:
                if patch.is_required:
                    raise UnsupportedError(
                        [f"(torch {torch.__version__}): has no {patch.target} that a capture could replace; use torch>=2.11,<2.15"]
                    )
                continue
            if make is not None:
                _replace(stack, *location, make, namespaces)
            elif patch.switch is not None:
                stack.enter_context(patch.switch())
            else:
                raise ValueError(f"patch {name} needs a replacement of the capture that applies it")
        yield


def _replace(stack: ExitStack, owner: Any, name: str, make: Callable[[Function], Function], namespaces: Sequence[Any]) -> None:
    original = getattr(owner, name)
    if not isinstance(owner, type):
        replacement: Any = _for_this_thread(original, make(original))
        for namespace in namespaces:
            for other in [other for other, value in vars(namespace).items() if value is original]:
                _set_attribute(stack, namespace, other, replacement)
    elif name in vars(owner):
        replacement = _for_this_thread(original, make(original))
    else:  # a class method that a base class of C defines
        original = _inherited_class_method(owner, name)
        replacement = classmethod(_for_this_thread(original, make(original)))
    _set_attribute(stack, owner, name, replacement)


def _inherited_class_method(owner: Any, name: str) -> Function:
    def inherited(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        return getattr(super(owner, cls), name)(*arguments, **keywords)

    return inherited


def _set_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _for_this_thread(original: Function, replacement: Function) -> Function:
    thread = threading.get_ident()

    @functools.wraps(original)
    def dispatch(*arguments: Any, **keywords: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*arguments, **keywords)

    return dispatch


def calling_frame() -> FrameType:
    """The frame that called a replaced function; for use in its replacement."""
    frame = sys._getframe(2)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return frame
