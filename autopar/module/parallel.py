"""`ParallelModule`: the user's own model, whose forward runs the emitted programs."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data.distributed import DistributedSampler

from autopar.codegen.halves import Joint
from autopar.graph.carried import Carried, carried_in, handed_back
from autopar.graph.graph import Graph, build_outputs, write_updates
from autopar.letters import BadInput, NotServed
from autopar.module.hand_over import HandOver, Placements
from autopar.module.lengths import padded
from autopar.module.limits import LIMITS
from autopar.module.local_outputs import own_rows, rows_of_call
from autopar.module.padding import Bucket, cut_back
from autopar.module.state import ModelState, SituatedProgram
from autopar.progress import shown, tell
from autopar.runtime.agreement import begin_call, run_program
from autopar.runtime.faults import naming_the_lost
from autopar.runtime.random import RandomState
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.plan import Plan


class ParallelModule(nn.Module):
    """Mixin for the model's own class, added by `parallelise`; parameters are DTensors under their own names."""

    _autopar: ModelState

    @property
    def _own(self) -> ModelState:
        """The state of this model; a copy gets its own when it is first used."""
        if self._autopar.model() is not self:
            self._autopar = self._autopar.of_copy(self)
        return self._autopar

    @property
    def plan(self) -> Plan:
        """The plan of the first call, for which the model was made."""
        return self._autopar.first.plan

    @property
    def graph(self) -> Graph:
        return self._autopar.first.graph

    @property
    def code(self) -> str:
        """The forward of this rank as Python."""
        return self._autopar.first.code

    @property
    def joint(self) -> Joint:
        """Forward and backward graphs as emitted."""
        return self._autopar.first.joint

    @property
    def random_state(self) -> RandomState:
        """Seed and step of the model's random numbers: save them in a checkpoint, set them to repeat a run."""
        return self._own.random

    @property
    def input_specs(self) -> dict[str, str]:
        """The sharding in which ranks pass each input, such as "S(0)@dp" with inputs="local", or "global"."""
        parts = self._autopar.parts
        _, with_rows = self._autopar.first.rows
        found = {}
        for name in self.graph.passed:
            local = "" if parts is None else parts.text if name in with_rows else "R"
            found[name.removeprefix("input ")] = local or "global"
        return found

    def sampler(self, dataset: Any, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> DistributedSampler:
        """A sampler for this rank's data loader: of its own rows with inputs="local", else of all.

        Call its `set_epoch`, as usual.
        """
        parts = self._autopar.parts
        count, index = (1, 0) if parts is None else (parts.count, parts.index(dist.get_rank()))
        return DistributedSampler(dataset, count, index, shuffle, seed, drop_last)

    def hand_over(
        self,
        mesh: Any = None,
        placements: Placements = None,
        *,
        dtype: torch.dtype | None = None,
        cluster: Any = None,
    ) -> HandOver:
        """Parameters and buffers as (name, DTensor) on another mesh; all ranks iterate together.

        Args:
            mesh: A DeviceMesh of torch of some ranks of the job, or a mesh of all as `autoparallelize` takes it. None:
                the mesh of the model.
            placements: How tensors shall lie, by names or patterns: torch's placements, or text such as "S(0)@tp". A
                function of name and tensor, or a plan whose parameters lie so. Tensors of which nothing is said are
                whole on every rank of the mesh.
            dtype: The dtype in which floating-point tensors are handed over.
            cluster: The devices and links for the predicted seconds. None: those of the plan, where they are known.
        """
        to = self._own.setup.mesh if mesh is None else mesh
        if not hasattr(to, "device_type"):
            to = DeviceMesh.of(to).to_torch(self._own.setup.device.type)
        if cluster is None:
            cluster = Cluster.named_by(self.plan.cluster)
        return HandOver(self, to, placements, dtype, Cluster.of(cluster))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of parameters unreduced inside the block.

        They are kept apart and `.grad` stays as it is; the next backward of a forward outside adds and reduces them.
        `zero_grad()` of the model or of an optimizer drops them.
        """
        waiting = self._own.waiting
        before = waiting.on
        waiting.on = True
        try:
            yield
        finally:
            waiting.on = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._own.waiting.forget(self.parameters())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module.load_state_dict`; also takes whole tensors, of which this rank keeps its part."""
        setup = self._own.setup
        parts = {id(p): setup.storage[n] for n, p in self.named_parameters()}
        held = self.state_dict(keep_vars=True)
        given: Any = OrderedDict(state_dict)
        for name, value in state_dict.items():
            storage = parts.get(id(held.get(name)))
            is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if storage is not None and is_whole and value.shape == held[name].shape:
                local = storage.take(value.to(setup.device), False)
                given[name] = nn.Parameter(local, held[name].requires_grad)
        given._metadata = getattr(state_dict, "_metadata", None)
        return super().load_state_dict(given, strict, assign)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and isinstance(self._autopar, ModelState):
            raise NotServed(
                f"the forward of a parallel {self._autopar.original.__name__} is replaced, whose programs were "
                "traced from the one before",
                advice=(
                    "replace it before autoparallelize; around it, a function of yours that calls model(...), or "
                    "torch.autocast around the call, which is seen"
                ),
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the model without gradients, which torch would copy as it copies those of DTensors."""
        memo.update({id(p.grad): None for p in self.parameters() if p.grad is not None})
        if (own := getattr(super(), "__deepcopy__", None)) is not None:
            return own(memo)
        make, given, state, *_ = tuple(super().__reduce_ex__(4))
        made = memo[id(self)] = make(*given)
        made.__setstate__(copy.deepcopy(state, memo))
        return made

    def __copy__(self) -> Any:
        make, given, state, *_ = tuple(super().__reduce_ex__(4))
        made = make(*given)
        made.__setstate__(copy.copy(state))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotServed(
            "a parallel model is not written whole: its programs belong to the processes that run them",
            advice=(
                "autopar.save(folder, model, optimizer, step=step) on all ranks, and autoparallelize again where "
                "autopar.load reads it; or autopar.gather(model), the plain model"
            ),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._own
        with naming_the_lost("its call"):
            program, inputs, bucket = called(self, args, kwargs)
        program.calls += 1
        began = time.monotonic()
        outputs, changed = program.run(self, inputs, state.random)
        if program.calls == 1 and state.made == 1:
            with shown():
                tell("%s runs: its first forward took %.1f s", state.original.__name__, time.monotonic() - began)
        write_updates(program.runner.graph, self, changed, program.changing, with_stand_ins=True)
        if program.sight.idle or program.runner.graph.sets_attributes:
            state.caller.is_at_rest = False
        for hook in program.sight.idle:
            hook.run(self, state.hooks)
        left = left_by(self, program, outputs, bucket)
        _watch_beside_the_loss(program.runner.graph, left)
        return handed_back(build_outputs(program.runner.graph, left), (args, kwargs))


def called(
    model: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[SituatedProgram, list[Any], Bucket | None]:
    """The program of a call, its inputs, and the bucket to which the call was padded, or None."""
    state = model._own
    leaves, structure = state.caller.arguments(args, kwargs)
    carries = carried_in((args, kwargs))
    _refuse_unserved(state, leaves, structure, carries)
    begin_call()
    bucket = None
    if state.padding is not None and not carries:
        leaves, bucket = padded(state, state.padding, model, leaves, structure)
    program = state.program(model, leaves, structure)
    run_program()
    inputs = [leaves[i] for i in program.places]
    if program.calls < LIMITS.checked_calls:  # looked at while it is new
        state.check(inputs, program)
    return program, inputs, bucket


def _refuse_unserved(state: ModelState, leaves: Sequence[Any], structure: Any, carries: Sequence[Carried]) -> None:
    """Raise for arguments that programs do not take; `carries` are those that calls hand on to each other."""
    if carries and torch.is_grad_enabled():
        raise NotServed(
            f"a cache goes from call to call without gradients, and {state.original.__name__} is called with them",
            advice="torch.no_grad() around the calls, or use_cache=False",
        )
    spread = {id(tensor) for tensor in pytree.tree_leaves(carries)}
    for i, leaf in enumerate(leaves):
        if type(leaf).__name__.endswith("Cache"):
            raise BadInput(
                f"the input {state.caller.names(structure)[i]} is a {type(leaf).__name__}, whose tensors are whole",
                advice="model.generate, whose caches are sharded, or such a cache: model.new_cache(length)",
            )
        if isinstance(leaf, DTensor) and id(leaf) not in spread:
            raise BadInput(
                f"the input {state.caller.names(structure)[i]} is a DTensor",
                advice=('x.full_tensor(), or with inputs="local" x.to_local() where it lies as model.input_specs says'),
            )


def left_by(model: ParallelModule, program: SituatedProgram, outputs: list[Any], bucket: Bucket | None) -> list[Any]:
    """The outputs of a call as they leave the model: without padding, or a rank's own rows."""
    state = model._own
    graph = program.runner.graph
    left = outputs if bucket is None else cut_back(graph, outputs, bucket.cuts, bucket.here)
    if state.parts is not None and state.setup.how.gives_rows is not None:
        named = dict(zip(graph.output_names, left, strict=True))
        rows = rows_of_call(graph, program.lowered.rows.inputs)
        gives = state.setup.how.gives_rows
        left = own_rows(named, gives, state.parts, state.setup.mesh, rows, dist.get_rank())
    return left


def _watch_beside_the_loss(graph: Graph, outputs: list[Any]) -> None:
    """Let outputs beside the loss refuse `retain_grad`: they and the loss are results of one program."""
    if graph.loss is None:
        return
    for i, (name, output) in enumerate(zip(graph.output_names, outputs, strict=True)):
        if i != graph.loss and isinstance(output, Tensor) and output.requires_grad:
            output.__dict__["retain_grad"] = functools.partial(_refuse_to_retain, name)


def _refuse_to_retain(name: str) -> None:
    raise NotServed(
        f"retain_grad of the output {name!r}: the gradient of the loss does not pass it, for both are results of one "
        "program",
        advice="a loss outside of the model, of outputs to which its gradient then flows",
    )
