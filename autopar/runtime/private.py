"""The private parts of torch that autopar cannot do without, in one place. Tried on torch 2.11.0 and 2.13.0.

    clean_room          tracing must not be seen by modes that happen to be active around it
    unwatched           nor by hooks on what autograd saves
    ThreadedRanks       ranks as threads (torch's own tests use it)
    LocalTensorMode     one process that plays all ranks
    FakeStore           the store of the fake process group
    StridedShard        torch's placement of a dim that is cut by blocks of one size
    local_part          what a DTensor holds, to be written to in place
    set_timeout         how long a group's collectives wait
    job_store           the key-value store that the ranks of a job share
    let_go              what an autograd node has saved ends before its backward does
    inside_backward     a checkpoint around a model runs it again there
    skip_together       torch asks the first gradient alone over which ranks an inf is made known; it must be known to all

The tracer and the joint trace also use `torch._subclasses.fake_tensor`, `torch.fx.experimental.proxy_tensor` and
`torch.utils._python_dispatch`, which have no public name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def clean_room() -> Iterator[None]:
    """No dispatch mode of the caller's is active inside."""
    with _disable_current_modes():
        yield


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What autograd saves inside is not seen by hooks of the caller's: a checkpoint counts it. (Hooks that do nothing would do, and make tracing ten times slower.)"""
    held = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        held.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(held):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


class ThreadedRanks:
    """A world whose ranks are threads."""

    def __enter__(self) -> ThreadedRanks:
        from torch.testing._internal.distributed import multi_threaded_pg as threaded

        self._threaded = threaded
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        return self

    def abort(self, error: BaseException) -> None:
        """Wake every rank that waits."""
        self._threaded.ProcessLocalGroup.exception_handle(error)

    def __exit__(self, *_: Any) -> None:
        self._threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        self._threaded.ProcessLocalGroup.reset()


def local_part(tensor: Any) -> torch.Tensor:
    """The memory of a DTensor's local part, without autograd."""
    local: torch.Tensor = tensor._local_tensor.detach()
    return local


def set_timeout(group: Any, timeout: timedelta) -> None:
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def job_store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def skip_together() -> None:
    """Let GradScaler skip a step on all ranks of a mesh where one has found an inf. (torch 2.13 reduces the finding over the axes that cut the first gradient of the list: where that is a copy and another is cut, ranks part ways.)"""
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    theirs = handlers[op]
    if getattr(theirs, "of_autopar", False):
        return

    def ours(op_call: Any, args: Any, kwargs: Any) -> None:
        theirs(op_call, args, kwargs)
        mesh = args[0][0].device_mesh
        for axis in range(mesh.ndim):
            torch.distributed.all_reduce(args[1], torch.distributed.ReduceOp.MAX, group=mesh.get_group(axis))

    ours.of_autopar = True                                     # type: ignore[attr-defined]
    handlers[op] = ours


def __getattr__(name: str) -> Any:
    if name in ("LocalTensor", "LocalTensorMode"):
        import torch.distributed._local_tensor as local_tensor

        return getattr(local_tensor, name)
    if name == "StridedShard":
        from torch.distributed.tensor.placement_types import _StridedShard

        return _StridedShard
    if name == "FakeStore":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return FakeStore
    raise AttributeError(name)


def let_go(ctx: Any) -> None:
    """Give up what an autograd node has saved, unless its graph is kept for another backward. A second backward is torch's own error, as without this."""
    ctx.maybe_clear_saved_tensors()


def inside_backward() -> bool:
    """Is this thread inside a backward?"""
    return torch._C._current_graph_task_id() != -1
