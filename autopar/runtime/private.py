"""The private parts of torch that autopar needs, in one place, tried on torch 2.11.0, 2.13.0 and 2.14.1.

    TRACING             the lock of captures and joint traces: they read and patch state of the process
    clean_room          hides tracing from modes that happen to be active around it
    unwatched           hides it from hooks on what autograd saves
    FakeTensor, ...     tensors without values, and the mode that makes them
    TorchDispatchMode   sees every op that runs inside it
    TO_COPY, UNSAFE_VIEW, ASSERTIONS, ...    ops and functions that have no public name
    ThreadedRanks       ranks as threads (torch's own tests use it)
    LocalTensorMode     one process that plays all ranks
    plays_all_ranks     whether it does, here and now
    FakeStore           the store of the fake process group
    forget_shardings    clears DTensor's cache, whose meshes are those of a world that has ended
    dedup_save_plans    leaves a part of a checkpoint that several ranks hold to one of them
    validate_global_plan    compares the parts of a checkpoint with each other
    StridedShard        torch's placement of a dim that is cut by blocks of one size
    REDUCTIONS, PendingNorm    DTensor's rules of sums and norms, and its placement of a norm that is pending
    local_part          what a DTensor holds, to be written to in place
    part_of             the same where no gradient is recorded: `to_local` looks at more
    like_part           a local part as a DTensor that lies as another does: `from_local` checks and counts anew
    copy_each           copies between two lists of tensors at once
    compiled_freeing    compiled code that frees its operands; torch.compile's own holds them
    set_timeout         how long a group's collectives wait
    job_store           the key-value store that the ranks of a job share
    function_of         the Python code of a custom op
    let_go              frees what an autograd node has saved before its backward ends
    inside_backward     a checkpoint around a model runs it again there
    attention_kernel    which fused attention kernel can run a call
    fused_attention     attention that also gives the log-sum-exp of each row
    ..._backward        its backward, from an output and log-sum-exps that are given
    profiler_runs       whether torch.profiler records
    backward_again      compiled backwards that may run more than once
    before_call         notices that a part of a parallel model is called by itself
    OpOverload          one signature of an op
    by_its_parts        runs a composite op as the ops that it is made of
    Namespace           the names of a graph's nodes

Parts of torch that are replaced, and not only used, are in `patches.py` and `brief_patches.py`. The joint trace also
uses `torch.fx.experimental.proxy_tensor`, which has no public name; structures of arguments are those of
`torch.utils._pytree`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.tensor.debug
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as in_kernel_invocation_manager
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import _math_ops
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.graph import _Namespace
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

StridedShard = _StridedShard
Namespace = _Namespace
REDUCTIONS = _math_ops  # DTensor's rules of sums and norms
PendingNorm = _math_ops._NormPartial
TRACING = threading.RLock()  # one capture or joint trace at a time in a process

ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TO_COPY = torch.ops.aten._to_copy.default  # x.to(dtype), below autograd
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view of its operand, which its schema does not say
ctc_loss = torch.ops.aten._ctc_loss
ctc_loss_backward = torch.ops.aten._ctc_loss_backward
standard_gamma_grad = torch.ops.aten._standard_gamma_grad
dirichlet_grad = torch.ops.aten._dirichlet_grad
ASSERTIONS = (torch._assert, torch._assert_async)
# functions over lists of tensors, by their names for one
FOREACH = {name.removeprefix("_foreach_"): getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_")}
ATEN_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

standard_gamma = torch._standard_gamma
weight_norm = torch._weight_norm
grouped_mm = torch._grouped_mm
stft = torch._C._VariableFunctions.stft  # torch.stft pads, then calls it
# homes of functions that torch's own Python code calls
FUNCTIONS_OF_C = {
    "nn.": torch._C._nn,
    "C.": torch._C._VariableFunctions,
}
without_torch_functions = torch._C.DisableTorchFunction  # a context in which no function mode sees anything
# a context in which no class of tensors sees anything, but modes do
without_subclass_functions = torch._C.DisableTorchFunctionSubclass
without_modes = _disable_current_modes  # a context in which no mode sees anything
is_transform_active = torch._C._are_functorch_transforms_active  # vmap, grad, jvp


class FakeTensorMode(_FakeTensorMode):
    """Torch's fake mode, with grouped products in all dtypes for which there are kernels.

    Torch's own rule knows bfloat16 alone.
    """

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            return grouped_mm_on_fakes(*args, **(kwargs or {}))
        return super().dispatch(func, types, args, kwargs or {})


def grouped_mm_on_fakes(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16) or b.dtype != a.dtype:
        raise RuntimeError(f"Expected Float32, BFloat16 or Float16 matrices, got {a.dtype} and {b.dtype}")
    shape: tuple[int, ...]
    if a.dim() == 2 and b.dim() == 3:
        shape = (a.shape[0], b.shape[-1])
    elif a.dim() == 3:
        shape = (*b.shape[:-2], a.shape[-2], b.shape[-1])
    else:
        assert offs is not None
        shape = (offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


@contextlib.contextmanager
def clean_room() -> Iterator[None]:
    """A context without the caller's dispatch modes and torch.autograd.detect_anomaly.

    The latter would look for NaN in gradients that have no values here. As anomaly detection belongs to the process,
    the caller must hold the lock under which captures and joint traces run.
    """
    with torch.autograd.set_detect_anomaly(False), _disable_current_modes():
        yield


def backward_again() -> AbstractContextManager[object]:
    """A context in which torch.compile's backwards may run more than once: they do not reuse saved memory."""
    patched: AbstractContextManager[object] = functorch_config.patch(donated_buffer=False)
    return patched


def by_its_parts(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a composite op, by torch's own kernel that opens it; NotImplemented for any other op."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key):
        return NotImplemented
    return function._op_dk(key, *args, **kwargs)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """A context whose saved tensors the caller's hooks do not see: a checkpoint would count them.

    Hooks that do nothing would serve, too, but make tracing ten times slower.
    """
    held = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        held.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(held):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def settle_fake_modes() -> None:
    """Enter a fake mode in this thread before another thread does so.

    Torch 2.11 made for CUDA crashes where the first thread in a fake mode ends.
    """
    with FakeTensorMode():
        pass


class ThreadedRanks:
    """A world whose ranks are threads."""

    def __enter__(self) -> ThreadedRanks:
        from torch.testing._internal.distributed import multi_threaded_pg as threaded  # slow, and tests' alone

        self._threaded = threaded
        settle_fake_modes()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        return self

    def abort(self, error: BaseException) -> None:
        """Wake every waiting rank with an error."""
        self._threaded.ProcessLocalGroup.exception_handle(error)

    def __exit__(self, *_: Any) -> None:
        self._threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        self._threaded.ProcessLocalGroup.reset()


def plays_all_ranks() -> bool:
    """Whether one process plays all ranks here, so that one program must serve them all."""
    local_tensor = sys.modules.get("torch.distributed._local_tensor")
    return local_tensor is not None and local_tensor.local_tensor_mode() is not None


def local_part(tensor: Any) -> torch.Tensor:
    """The local part of a DTensor, in the same memory, without autograd."""
    local: torch.Tensor = tensor._local_tensor.detach()
    return local


def part_of(tensor: Any) -> torch.Tensor:
    """The local part of a DTensor where no gradient is recorded."""
    part: torch.Tensor = tensor._local_tensor
    return part


def hold_part(tensor: Any, local: torch.Tensor, like: Any = None) -> None:
    """Let a DTensor hold another local part, which lies as that of another one."""
    tensor._local_tensor = local
    if like is not None:
        tensor._spec = like._spec


def like_part(local: torch.Tensor, other: DTensor) -> DTensor:
    """A local part as a DTensor with the layout of another one; without autograd."""
    spec = other._spec
    if local.dtype != other.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, spec.tensor_meta._replace(dtype=local.dtype))
    made: DTensor = DTensor(local, spec, requires_grad=False)  # torch's own constructor
    return made


def copy_each(into: Any, values: Any) -> None:
    """Copy each value into the tensor of the same place, in as few kernels as can be; without autograd."""
    with torch.no_grad():
        torch._foreach_copy_(into, values)


FREEING = ("inductor", "aot_eager")  # backends whose code may take a list of operands and empty it


def compiled_freeing(
    graph: torch.fx.GraphModule, backend: str, given: list[Tensor]
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Code of a backend of torch.compile for a graph with one list of operands, which a call empties.

    The graph pops its operands from that list. It is compiled for tensors that lie as those in `given`.
    """
    (operands,) = graph.graph.find_nodes(op="placeholder")
    operands.meta["steal_arg"] = True  # compiled autograd marks its list of operands so
    mode = FakeTensorMode()
    made: Callable[[list[Tensor]], Sequence[Tensor]] = torch._dynamo.lookup_backend(backend)(
        graph, [[mode.from_tensor(x) for x in given]]
    )
    return made


def set_timeout(group: Any, timeout: timedelta) -> None:
    if (public := getattr(torch.distributed, "set_timeout", None)) is not None:  # torch has it since 2.14
        public(timeout, group)
    else:
        torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def job_store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def attention_kernel(query: Tensor, key: Tensor, value: Tensor) -> str:
    """The fused attention kernel for tensors like these, without mask or dropout; "" where there is none.

    The tensors have batch and heads, and one width. Only "cpu" and "flash" take grouped heads as they are.
    """
    if query.device.type == "cpu":
        return "cpu" if query.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16) else ""
    if query.device.type != "cuda":
        return ""
    grouped = query.shape[1] != key.shape[1]
    if can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, grouped)):
        return "flash"
    key, value = (x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    return "efficient" if can_use_efficient_attention(SDPAParams(query, key, value, None, 0.0, False, False)) else ""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of an attention kernel; a causal one is square, as kernels place the diagonal of others differently."""

    kernel: str
    is_causal: bool
    scale: float
    # "flash": keys before and behind the last query's own place among keys, counted from the end; None: all
    window: tuple[int, int] | None = None
    mask: Tensor | None = None  # "cpu": numbers that are added to scores


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The ends of segments that lie end to end, in 32 bits and from 0 on, and the most rows of one."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


def segmented_attention(
    call: AttentionCall, lengths: Lengths, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, width] of segments end to end, and log-sum-exps of rows [heads, rows]."""
    assert call.window is not None
    left, right = call.window
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, *_ends(lengths), 0.0, False, False, scale=call.scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return found[0], found[1]


def segmented_attention_backward(
    call: AttentionCall, lengths: Lengths, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    `tensors` are the gradient of the output, these three, the output and the log-sum-exps.
    """
    assert call.window is not None
    left, right = call.window
    seed, offset = (tensors[1].new_empty((), dtype=torch.int64) for _ in range(2))
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *tensors[:5], tensors[5].contiguous(), *_ends(lengths), 0.0, False, seed, offset, scale=call.scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return found


def _ends(lengths: Lengths) -> tuple[Any, ...]:
    return lengths.queries, lengths.keys, lengths.most_queries, lengths.most_keys


def fused_attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and the log-sum-exp of each row as [batch, heads, rows]."""
    aten = torch.ops.aten
    given = (query, key, value)
    causal = call.is_causal
    scale = call.scale
    if call.kernel == "cpu":
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(
            *given, 0.0, causal, attn_mask=call.mask, scale=scale
        )
    elif call.window is not None:
        rows, sizes = [x.transpose(1, 2) for x in given], (query.shape[-2], key.shape[-2])
        left, right = call.window
        found = aten._flash_attention_forward(
            *rows, None, None, *sizes, 0.0, False, False, scale=scale, window_size_left=left, window_size_right=right
        )
        out, log_sum = found[0].transpose(1, 2), found[1]
    elif call.kernel == "flash":
        out, log_sum = aten._scaled_dot_product_flash_attention(*given, 0.0, causal, False, scale=scale)[:2]
    else:
        found = aten._scaled_dot_product_efficient_attention(*given, None, True, 0.0, causal, scale=scale)
        out, log_sum = found[:2]
    return out, log_sum[..., : query.shape[-2]]  # the efficient kernel's are a multiple of 32


def fused_attention_backward(
    call: AttentionCall, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `out` and `log_sum` may be those of more keys than this call has."""
    aten = torch.ops.aten
    given = (gradient, query, key, value)
    is_causal = call.is_causal
    scale = call.scale
    if call.kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, out, log_sum, 0.0, is_causal, attn_mask=call.mask, scale=scale
        )
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))  # state of dropout; the call has none
    rows, keys = query.shape[-2], key.shape[-2]
    if call.window is not None:
        laid = [x.transpose(1, 2) for x in (*given, out)]
        sizes, (left, right) = (None, None, rows, keys), call.window
        found = aten._flash_attention_backward(
            *laid, log_sum.contiguous(), *sizes, 0.0, False, seed, offset, scale=scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in found)
    if call.kernel == "flash":
        found = aten._scaled_dot_product_flash_attention_backward(
            *given, out, log_sum.contiguous(), None, None, rows, keys, 0.0, is_causal, seed, offset, scale=scale
        )
    else:
        missing = -log_sum.shape[-1] % 32
        log_sum = torch.nn.functional.pad(log_sum, (0, missing), value=torch.inf) if missing else log_sum.contiguous()
        found = aten._scaled_dot_product_efficient_attention_backward(
            *given, None, out, log_sum, seed, offset, 0.0, [True, True, True, False], is_causal, scale=scale
        )[:3]
    return found


def before_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Set or clear (None) what is called in the place of a module, where module.compile() puts it.

    Copies and pickles of the module do not have it.
    """
    vars(module)["_compiled_call_impl"] = call


def call_of(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, but not what `before_call` has set."""
    return module._call_impl(*args, **kwargs)


def __getattr__(name: str) -> Any:  # few programs need these, and importing them takes long
    if name in ("LocalTensor", "LocalTensorMode"):
        import torch.distributed._local_tensor as local_tensor

        return getattr(local_tensor, name)
    if name == "FakeStore":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return FakeStore
    raise AttributeError(name)


def dedup_save_plans(plans: Sequence[Any]) -> list[Any]:
    found: list[Any] = torch.distributed.checkpoint.default_planner.dedup_save_plans(list(plans))
    return found


def validate_global_plan(plans: Sequence[Any], metadata: Any) -> list[str]:
    """Errors of the parts in a checkpoint's metadata, in words."""
    found: Any = torch.distributed.checkpoint.default_planner._validate_global_plan(list(plans), metadata)
    if isinstance(found, bool):  # torch 2.11 says whether all is well, and logs what is not
        return [] if found else ["torch's warnings before this say which"]
    return list(found)


def function_of(custom_op: str) -> Any:
    """The Python function behind a custom op, by its name; None for one written in C++."""
    return getattr(OPDEFS.get(custom_op), "_init_fn", None)


def let_go(ctx: Any) -> None:
    """Free what an autograd node has saved, unless its graph is kept for another backward.

    A second backward is torch's own error, as without this.
    """
    ctx.maybe_clear_saved_tensors()


def profiler_runs() -> bool:
    """Whether torch.profiler records."""
    return torch.autograd._profiler_enabled()


def inside_backward() -> bool:
    """Whether this thread is inside a backward."""
    return torch._C._current_graph_task_id() != -1


def forget_shardings() -> None:
    """Clear DTensor's cache of results: each holds the mesh of the world in which it first ran."""
    torch.distributed.tensor.debug._clear_sharding_prop_cache()
