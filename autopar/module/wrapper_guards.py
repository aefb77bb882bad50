"""Refuse code around a parallel model that would take its parameters for whole ones, with advice what to do instead.

Refused are wrappers that would shard or reduce them again, calls of a submodule by itself, and files to which a rank
would write only its own part.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from autopar.letters import Consumed, NotServed
from autopar.runtime.owned_meshes import far_of, is_ours
from autopar.runtime.patches import answer_pickling, around_torch_save, before_fully_shard, before_wrapping
from autopar.runtime.private import before_call, call_of, local_part

_INSTEAD = (
    "the parallel model as it is: loss.backward() reduces its gradients, model.no_sync() lets them wait,\n"
    "model.sampler(dataset) divides the data;\n"
    "the Accelerator, the AutoparStrategy and the Trainers of autopar.integrations take it where others would wrap it"
)


def watch_what_stands_around() -> None:
    """Let DDP, FSDP and pickle refuse the parameters of parallel models."""
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel):
        before_wrapping(wrapper, _refuse_wrapper)
    before_fully_shard(_refuse_wrapper)
    answer_pickling(_as_pickled)
    around_torch_save(_writing_a_file)


def _refuse_wrapper(parameter: Tensor, wrapper: str) -> None:
    what = "is put around a parallel model, whose parameters are spread and whose gradients are reduced already"
    raise Consumed(f"{wrapper} {what}", advice=_INSTEAD)


class _Writing(threading.local):
    """Whether this thread is inside torch.save."""

    a_file = False


_WRITING = _Writing()


@contextlib.contextmanager
def _writing_a_file(value: Any) -> Iterator[None]:
    """Refuse parts in what torch.save is given, and let whole tensors be written as plain ones."""
    cut = []
    for path, leaf in pytree.tree_leaves_with_path(value):
        if isinstance(leaf, nn.Module):
            _refuse_models_in(leaf)
        elif is_ours(leaf) and not _is_whole(leaf):
            cut.append((pytree.keystr(path), leaf))
    if cut:
        raise _refusal(cut[0][1], cut[0][0], len(cut))
    before = _WRITING.a_file
    _WRITING.a_file = True
    try:
        yield
    finally:
        _WRITING.a_file = before


def _refuse_models_in(module: nn.Module) -> None:
    for part in module.modules():
        if hasattr(part, "_autopar"):
            part.__reduce_ex__(2)  # A parallel model refuses to be pickled.


def _is_whole(tensor: DTensor) -> bool:
    """Whether each rank holds the whole of it."""
    has_parts = tensor.device_mesh.size() > 1 and not all(p.is_replicate() for p in tensor.placements)
    return not has_parts and far_of(tensor) is None


def _as_pickled(tensor: DTensor) -> Tensor:
    """The tensor itself; inside torch.save a plain one, for programs without ranks read files, too."""
    if not _is_whole(tensor):
        raise _refusal(tensor)
    if not _WRITING.a_file:
        return tensor
    local = local_part(tensor)
    return nn.Parameter(local, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else local


def _refusal(tensor: DTensor, path: str = "", count: int = 1) -> NotServed:
    """The letter where a rank is about to pickle tensors of which it holds only a part."""
    where = f"{path}: " if path else ""
    others = f"; and {count - 1} others" if count > 1 else ""
    return NotServed(
        "a rank is about to write a tensor of a parallel model, of which it holds a part",
        seen=f"{where}{tuple(tensor.to_local().shape)} of {tuple(tensor.shape)}, stored as {tensor.placements}{others}",
        advice="autopar.save(folder, model, optimizer, scheduler, step=step) on all ranks, which autopar.load\n"
        "reads on any mesh or on one device; model.save_pretrained(path) on all ranks, for models that have it;\n"
        "for one file of the model autopar.gather(model, 0) on all ranks, and torch.save its state_dict on rank 0;\n"
        "for one of the optimizer torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer,\n"
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on all ranks, and torch.save on rank 0;\n"
        "for this rank's part alone its to_local()",
    )


def watch_parts(model: nn.Module, are_watched: bool = True) -> None:
    """Let submodules with parameters refuse to be called by themselves; `are_watched=False` ends that."""
    for path, part in model.named_modules():
        compiled = vars(part).get("_compiled_call_impl")  # a user's own stays
        is_ours = compiled is None or getattr(compiled, "func", None) is _call_part
        if path and is_ours and next(part.parameters(), None) is not None:
            before_call(part, functools.partial(_call_part, weakref.ref(part), path) if are_watched else None)


def _call_part(part: weakref.ref[nn.Module], path: str, *args: Any, **kwargs: Any) -> Any:
    module = part()
    assert module is not None
    try:
        return call_of(module, *args, **kwargs)
    except (RuntimeError, NotServed) as e:
        words = str(e.__cause__ if isinstance(e, NotServed) else e)
        if "mixed torch.Tensor and DTensor" not in words:
            raise
        raise NotServed(
            f"{path}, a part of a parallel model, is called by itself: nothing says how its input lies on the ranks",
            seen=words.splitlines()[0],
            advice="compute it inside the model or in loss=, and return it as an output;\n"
            "or call a copy of it whose parameters are whole: parameter.full_tensor() on all ranks",
        ) from e
