"""Make a model parallel in place."""

from __future__ import annotations

import functools
import importlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.codegen.lower import Lowered
from autopar.graph.calls import Call
from autopar.graph.held import plain_tensors
from autopar.letters import Consumed, NotServed
from autopar.module.attributes import Sight
from autopar.module.checkpoint import teach_dtensor, whole_state
from autopar.module.optimizers import refuse_steps_on
from autopar.module.padding import Padding
from autopar.module.parallel import ParallelModule
from autopar.module.reads import Reads
from autopar.module.runner import How, Setup
from autopar.module.stages_of_job import Ground
from autopar.module.state import ModelState, Replan
from autopar.module.values import Source, store
from autopar.module.waiting import let_optimizers_know
from autopar.module.whole_tensors import read_and_write_as_whole
from autopar.module.wrapper_guards import watch_parts, watch_what_stands_around
from autopar.runtime.agreement import agree
from autopar.runtime.host_step import let_host_step
from autopar.runtime.patches import convert_blocks, let_anomalies_be_looked_for, skip_together
from autopar.runtime.world import all_ranks_hold, from_rank_0
from autopar.sharding.costs import DURING_BACKWARD

M = TypeVar("M", bound=nn.Module)
_NAMES = ("plan", "graph", "code", "joint", "input_specs", "sampler", "random_state", "no_sync", "hand_over")


def parallelise(
    model: M,
    call: Call,
    lowered: Lowered,
    ground: Ground,
    replan: Replan,
    source: Source,
    how: How,
    read: Reads | None,
) -> M:
    """Make `model` parallel in place: its class gains `ParallelModule`, parameters become local shards."""
    _check_names(model)
    mesh = ground.mesh
    stages = ground.stages
    is_cuda = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    old = list(model.parameters())
    if not source.sync:  # nothing is sent, so it must be there already
        plain = [t for module in model.modules() for _, t in plain_tensors(module)]
        all_ranks_hold("parameter values", [t for t in (*old, *model.buffers(), *plain) if not t.is_meta])
    _check_backends(device, lowered)
    mesh_of = (lambda name: mesh) if stages is None else stages.mesh_of
    storage = store(model, lowered.plan.parameters, mesh_of, device, source, lowered.plan.wholly_hosted)
    for name, parameter in model.named_parameters():
        if name in lowered.plan.hosted:
            let_host_step(parameter, lowered.plan.optimizer == DURING_BACKWARD)
    refuse_steps_on(old)
    _patch()
    state = ModelState(model, lowered, Setup(mesh, device, storage, how, stages), replan)
    state.caller.by_position = len(call.args)
    leaves, structure = state.caller.arguments(call.args, call.kwargs)
    with torch.enable_grad():
        attributes = state.caller.attributes
        situation = state.caller.situation(leaves, structure)
        idle = lowered.graph.idle
        sight = Sight(attributes.now(), idle=idle) if read is None else attributes.sight(read, idle)
        state.last = state.keep(situation, True, lowered, sight)
    if how.passes_rows:
        state.passes_parts()
    if how.pad_to is not None:
        state.padding = Padding(how.pad_to, dict(zip(state.caller.names(structure), leaves, strict=True)))
    model.__class__ = _class_of(type(model))
    model._forward_pre_hooks = OrderedDict()
    model._forward_hooks = OrderedDict()
    model._autopar = state
    watch_parts(model)
    return model


def _check_backends(device: torch.device, lowered: Lowered) -> None:
    """Raise where norms of parameters on the host cannot be summed over the ranks of GPUs."""
    is_apart = device.type == "cuda" and lowered.plan.wholly_hosted and dist.get_world_size() > 1
    if is_apart and "cpu:" not in dist.get_backend_config():
        raise NotServed(
            "the plan has parameters on the host, and the process group sends tensors of GPUs alone",
            seen=dist.get_backend_config(),
            advice='torch.distributed.init_process_group("cpu:gloo,cuda:nccl")',
        )


def _check_names(model: nn.Module) -> None:
    """Raise where the model has attributes whose names the parallel model needs."""
    name = type(model).__name__
    if "forward" in vars(model):
        raise NotServed(
            f"{name} has a forward of its own beside its class's, which the parallel model could not replace",
            advice="a class whose forward it is",
        )
    if hidden := [attribute for attribute in _NAMES if hasattr(model, attribute)]:
        raise NotServed(
            f"{name} has an attribute {hidden[0]!r}, which the parallel model has too", advice="another name"
        )


def _patch() -> None:
    """Apply the standing patches of torch, once (`runtime/patches.py`)."""
    teach_dtensor()
    convert_blocks()
    skip_together()
    let_anomalies_be_looked_for()
    watch_what_stands_around()
    read_and_write_as_whole()
    let_optimizers_know()


def _class_of(cls: type[nn.Module]) -> type[nn.Module]:
    """Class of the parallel model: `ParallelModule` and the model's own class."""
    own: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "forward": _forward_of(cls),
        "__call__": nn.Module.__call__,
    }
    if hasattr(cls, "save_pretrained"):
        own["save_pretrained"] = _save_pretrained
    generating = _generating() if hasattr(cls, "_prepare_cache_for_generation") else ()
    return type(f"Parallel{cls.__name__}", (ParallelModule, *generating, cls), own)


def _generating() -> tuple[type, ...]:
    """The methods by which transformers' `generate` runs, in a module that imports transformers."""
    return (importlib.import_module("autopar.module.generating").Generating,)


def _forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """The forward of the parallel model, with the signature of the model's own, which trainers inspect.

    torch.compile around the model does not trace into it.
    """

    @functools.wraps(cls.forward)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    return torch.compiler.disable(
        forward, reason="its programs are compiled where autoparallelize is told to: compile=True"
    )


def _save_pretrained(
    self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **how: Any
) -> None:
    """Write the whole model by its own `save_pretrained`, on rank 0.

    All ranks gather the state dict together, one tensor at a time, unless it is given.
    """
    state: ModelState = self._own
    if state_dict is None:  # every rank has a part of it
        agree((state.original.__name__, "save_pretrained"), "calls save_pretrained", is_call=False)
        full = whole_state(self)

        def write() -> None:
            self.save_pretrained(save_directory, is_main_process=is_main_process, state_dict=full, **how)

        with state.as_before(self):
            from_rank_0(write)
    elif dist.get_rank() == 0:
        with state.as_before(self):
            self.save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **how)


def refuse_parallel(model: Any) -> None:
    """Raise a letter where a model is parallel already, or inside a wrapper."""
    if isinstance(model, ParallelModule):
        raise Consumed(
            f"this {type(model).__name__} is parallel already",
            seen=f"mesh {model.plan.mesh}",
            advice="model.plan, or the model as it was before autoparallelize",
        )
    if (kind := type(model).__name__) in _AROUND:
        raise Consumed(f"the model stands inside a wrapper, {kind}", advice=_AROUND[kind])
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    if spread := [name for name, p in named if isinstance(p, DTensor)]:
        raise Consumed(
            f"parameters of this {kind} are spread over devices already",
            seen=", ".join(spread[:3]),
            advice="the model as it was before",
        )


_AROUND = {
    "OptimizedModule": "the model itself, with compile=True",
    "DataParallel": "model.module, which is inside",
    "DistributedDataParallel": "model.module, which is inside",
    "FullyShardedDataParallel": "model.module, which is inside",
}
