"""Refuse code around a parallel model that would take its parameters for whole ones, with advice what to do instead.

Refused are wrappers that would shard or reduce them again, calls of a submodule by itself, and files to which a rank
would write only its own part.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.letters import Consumed, NotServed
from autopar.runtime.patches import before_fully_shard, before_pickling, before_wrapping
from autopar.runtime.private import before_call, call_of

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
    before_pickling(_refuse_part)


def _refuse_wrapper(parameter: Tensor, wrapper: str) -> None:
    what = "is put around a parallel model, whose parameters are spread and whose gradients are reduced already"
    raise Consumed(f"{wrapper} {what}", advice=_INSTEAD)


def _refuse_part(tensor: DTensor) -> None:
    """Raise where a rank is about to pickle a tensor of which it holds only a part."""
    if tensor.device_mesh.size() == 1 or all(p.is_replicate() for p in tensor.placements):
        return
    raise NotServed(
        "a rank is about to write a tensor of a parallel model, of which it holds a part",
        seen=f"{tuple(tensor.to_local().shape)} of {tuple(tensor.shape)}, stored as {tensor.placements}",
        advice="torch.distributed.checkpoint.save({'model': model.state_dict()}, checkpoint_id=path) on all "
        "ranks,\n"
        "which any mesh or one device loads; model.save_pretrained(path) on all ranks; for one file\n"
        "torch.distributed.checkpoint.state_dict.get_model_state_dict(model,\n"
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on all ranks,\n"
        "then torch.save on rank 0; for this rank's part alone its to_local()",
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
