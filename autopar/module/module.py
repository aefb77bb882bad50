"""`ParallelModule`: the user's own model, whose forward runs the emitted program and whose one autograd node runs its
backward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.distributed import DistributedSampler

from autopar.codegen.arrived import for_arrived
from autopar.codegen.compiled import compile_between_collectives
from autopar.codegen.joint import Joint, bind
from autopar.codegen.lower import Lowered, lower
from autopar.codegen.parts import WHOLE, Parts, Rows, least_and_most
from autopar.codegen.schedule import is_view
from autopar.graph.calls import Call
from autopar.graph.graph import Graph, TensorType, build_outputs, info, tensor_of, write_buffer
from autopar.graph.idle import IdleHook
from autopar.letters import Anomaly, BadInput, Consumed, Disagreement, NotServed
from autopar.module.around import watch_parts, watch_what_stands_around
from autopar.module.attributes import Attributes, Reads, State, Unread
from autopar.module.checkpoint import read, teach_dtensor, whole_state
from autopar.module.emptied import from_a_list
from autopar.module.init import initialise, initialise_by_position, is_on_meta
from autopar.module.optimizers import check_step
from autopar.module.padding import (
    Bucket,
    Kind,
    Padding,
    check,
    cut_back,
    cuts_of,
    filled,
    fills_of,
    gradients_of,
    shapes_of,
)
from autopar.module.reach import check_reach
from autopar.module.situation import Caller, Situation
from autopar.module.storage import Storage, dtensor_of
from autopar.module.waiting import Waiting, let_optimizers_forget
from autopar.runtime.agreement import agree, begin_call, run_program
from autopar.runtime.collectives import bind_axes
from autopar.runtime.faults import naming_the_lost
from autopar.runtime.private import inside_backward, let_anomalies_be_looked_for, let_go, skip_together, unwatched
from autopar.runtime.random import RandomState
from autopar.runtime.world import all_ranks_hold, from_rank_0
from autopar.solver.plan import Plan

log = logging.getLogger("autopar")


class Step(torch.autograd.Function):
    """The one autograd node: emitted forward, emitted backward."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, *primals: Tensor) -> tuple[Tensor, ...]:
        with naming_the_lost("forward"):
            results = runner.forward(*(_in_order(p.to_local() if isinstance(p, DTensor) else p) for p in primals))
        count = runner.joint.outputs
        ctx.runner, ctx.waits, ctx.spread = runner, runner.waiting.on, [isinstance(p, DTensor) for p in primals]
        ctx.kept = [(i, primals[i], primals[i]._version) for i in runner.kept]
        ctx.save_for_backward(*results[count:])
        ctx.set_materialize_grads(False)
        outputs: list[Tensor] = []
        for o in results[:count]:  # autograd tells outputs apart by identity
            outputs.append(o.clone() if any(o is other for other in (*primals, *outputs)) else o)
        types = [
            *info(runner.graph.output).outputs[: len(runner.graph.output_names)],
            *(TensorType((), "bool") for _ in runner.graph.updates),
        ]
        ctx.mark_non_differentiable(*(o for o, t in zip(outputs, types, strict=True) if not t.requires_grad))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        runner: Runner = ctx.runner
        joint = runner.joint
        if torch.is_grad_enabled():  # create_graph=True
            raise NotServed(
                "a gradient of gradients is asked for, and the emitted backward has none",
                advice="torch.autograd.grad inside the model, which is traced, or create_graph=False",
            )
        for i, tangent in enumerate(tangents):
            if tangent is not None and i not in joint.differentiable:
                raise NotServed(
                    f"a gradient arrives at the output {runner.graph.output_names[i]!r}, and backward was lowered "
                    "for the loss",
                    advice=(
                        f"outputs=({runner.graph.output_names[i]!r},), or compute with that output inside the model, "
                        "or in loss="
                    ),
                )
        if changed := [runner.names[i] for i, parameter, version in ctx.kept if parameter._version != version]:
            raise NotServed(
                f"the parameter {changed[0]} was modified in place between forward and backward, which needs it "
                "as it was",
                advice="backward before optimizer.step() and load_state_dict()",
            )
        arrived = [tangents[i] for i in joint.differentiable]
        if all(t is None for t in arrived):
            return (None,) * (1 + runner.primal_count)
        filled = [None if t is None else lies.given(t) for t, lies in zip(arrived, runner.tangents, strict=True)]
        has_arrived = tuple(t is not None for t in arrived)
        runner.check_arrived(has_arrived)
        gradients: list[Any] = [None] * runner.primal_count
        with naming_the_lost("backward"):
            given = [*ctx.saved_tensors, *filled]
            let_go(ctx)
            del filled, arrived, tangents
            found = runner.gradients(given, has_arrived, ctx.waits)
            if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
                runner.refuse_nan(found)
        for i, gradient in zip(joint.gradients, found, strict=True):
            if gradient is not None:
                gradients[i] = runner.as_gradient(i, gradient) if ctx.spread[i] else gradient
        return (None, *gradients)


def _in_order(tensor: Tensor) -> Tensor:
    """The tensor as programs are traced on it: contiguous.

    A copy where it is not: a slice of a batch, a transposed tensor.
    """
    return tensor if tensor.is_contiguous() else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class Tangent:
    """How the gradient of an output lies in memory, as backward was traced on it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(output: Tensor) -> Tangent:
        on_meta = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device="meta")
        like = torch.empty_like(on_meta)
        return Tangent(like.shape, like.stride(), like.dtype)

    def given(self, gradient: Tensor) -> Tensor:
        """The gradient that has arrived; a copy where it lies otherwise: that of a sum is one number many times."""
        dims = zip(self.shape, self.stride, gradient.stride(), strict=True)
        if all(mine == theirs for size, mine, theirs in dims if size > 1):
            return gradient
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=gradient.device).copy_(gradient)


@dataclass(frozen=True, slots=True)
class How:
    """What a caller said of how the programs are run, beside what is planned."""

    backend: str | None = None  # of torch.compile
    # how outputs leave that no loss is made of: as DTensors where they are cut, all whole ("full"), all as DTensors
    # ("sharded")
    outputs: str = "auto"
    outputs_whole: tuple[str, ...] = ()  # and these whole
    passes_rows: bool = False  # inputs="local"
    pad_to: int | None = None  # lengths are brought to multiples of it


class Runner:
    """One lowered program on this rank: its two halves bound to process groups, and the tensors it takes."""

    def __init__(
        self, lowered: Lowered, mesh: Any, storage: dict[str, Storage], device: torch.device, waiting: Waiting, how: How
    ) -> None:
        self.how = how
        self.graph, self.joint, self.program, self.device, self.waiting = (
            lowered.graph,
            lowered.joint,
            lowered.program,
            device,
            waiting,
        )
        self.axes, joint = bind_axes(mesh), lowered.joint
        self.modules = {
            half: self._bound(half, getattr(joint, half)) for half in ("forward", "backward", "hold", "settle")
        }
        self.for_arrived: dict[
            tuple[str, tuple[bool, ...]], fx.GraphModule
        ] = {}  # halves for gradients that arrive at some outputs alone
        self.forward = self.modules["forward"].forward
        self.backwards = 0  # that were looked at
        ends = list(joint.settle.output_node().args[0])
        begins = joint.settle.find_nodes(op="placeholder")
        self.settled_dtypes = [n.meta["val"].dtype for n in begins]
        waits = [list(joint.hold.output_node().args[0])[i].meta["val"].dtype for i in joint.waits]
        self.waiting_dtypes = [torch.promote_types(a, n.meta["val"].dtype) for a, n in zip(waits, ends, strict=True)]
        self.names = dict(enumerate(lowered.program.parameters, len(lowered.program.inputs)))
        self.names_that_wait = [self.names[joint.gradients[i]] for i in joint.waits]
        self.primal_count = (
            len(lowered.program.inputs)
            + len(lowered.program.parameters)
            + len(lowered.program.buffers)
            + lowered.program.is_random
        )
        self.storages = (
            [None] * len(lowered.program.inputs)
            + [storage[n] for n in lowered.program.parameters]
            + [None] * (len(lowered.program.buffers) + 1)
        )
        self.kept = sorted(i for i in _kept_by(joint) if i in self.names)
        self.lies = [storage[n].placements for n in lowered.program.parameters]
        results = list(lowered.joint.forward.output_node().args[0])
        self.tangents = [Tangent.of(results[i].meta["val"]) for i in lowered.joint.differentiable]
        self.mesh = mesh

    def _bound(self, half: str, graph: fx.Graph) -> fx.GraphModule:
        """A half as a module of this rank, which takes a list and empties it; forward takes its primals."""
        module = bind(graph, self.axes)
        if self.how.backend is not None:
            module = compile_between_collectives(module, self.how.backend)
        return module if half == "forward" else from_a_list(module)

    def half(self, name: str, arrived: tuple[bool, ...]) -> Callable[[list[Any]], Sequence[Tensor | None]]:
        """The backward, or a part of it, for the gradients that have arrived.

        None comes out that depends on none of them.
        """
        if all(arrived):
            return self.modules[name].forward
        if (name, arrived) not in self.for_arrived:
            self.for_arrived[name, arrived] = self._bound(name, for_arrived(getattr(self.joint, name), arrived))
        return self.for_arrived[name, arrived].forward

    def check_arrived(self, arrived: tuple[bool, ...]) -> None:
        """While it is new: do gradients arrive at the same outputs on all ranks?"""
        if len(arrived) > 1 and self.backwards < _CHECKED_CALLS:
            self.backwards += 1
            all_ranks_hold("outputs that gradients arrive at", arrived)

    def refuse_nan(self, found: Sequence[Tensor | None]) -> None:
        """What torch's engine does under detect_anomaly, in words that name parameters; other ranks are told."""
        bad = [
            i
            for i, g in zip(self.joint.gradients, found, strict=True)
            if g is not None and g.is_floating_point() and g.isnan().any()
        ]
        if bad:
            names = ", ".join(self.names.get(i, "an input") for i in bad[:5])
            raise Anomaly(
                f"{len(bad)} gradients are not numbers: those of {names}",
                advice="the model as it was before autoparallelize, on this batch: detect_anomaly names the op",
            )

    def settle(self, totals: list[Tensor | None]) -> list[Tensor | None]:
        """Of each gradient that waits what it is when it is reduced, None where none has waited."""
        waited = {
            place: total for place, total in zip(self.joint.settled_from, totals, strict=True) if total is not None
        }
        given = [waited[k].to(dtype) if k in waited else None for k, dtype in enumerate(self.settled_dtypes)]
        has_waited = [total is not None for total in totals]
        totals.clear()  # what is handed over ends with its last use
        waited.clear()
        settled = self.half("settle", tuple(g is not None for g in given))(given)
        return [gradient if has else None for gradient, has in zip(settled, has_waited, strict=True)]

    def gradients(self, given: list[Tensor | None], arrived: tuple[bool, ...], waits: bool) -> list[Tensor | None]:
        """A gradient for each of `joint.gradients`, from a list that is emptied.

        What `waits` gives none, and what has waited is in the next.
        """
        joint = self.joint
        if not waits and self not in self.waiting.of:
            found: list[Tensor | None] = list(self.half("backward", arrived)(given))
        else:
            found = list(self.half("hold", arrived)(given))
            fresh = [found[i] for i in joint.waits]
            for i in joint.waits:
                found[i] = None
            self.waiting.add(self, fresh)
            del fresh
            if not waits:
                for i, gradient in zip(joint.waits, self.waiting.settled(self), strict=True):
                    found[i] = gradient
        if not waits:
            for other in list(self.waiting.of):  # micro-batches of other shapes
                theirs = {
                    name: g
                    for name, g in zip(other.names_that_wait, self.waiting.settled(other), strict=True)
                    if g is not None
                }
                for k, i in enumerate(joint.gradients):
                    if i in self.names and self.names[i] in theirs:
                        gradient = theirs.pop(self.names[i])
                        found[k] = gradient if found[k] is None else found[k] + gradient
                for name, gradient in theirs.items():  # of parameters that this program does not reach
                    self.waiting.deliver(name, gradient)
        return found

    def as_gradient(self, primal: int, gradient: Tensor) -> Tensor:
        """A parameter's gradient lies as the parameter does; an input's is plain."""
        storage = self.storages[primal]
        return gradient if storage is None else storage.wrap(gradient)

    def __call__(
        self, inputs: list[Tensor], parameters: list[Tensor], buffers: list[Tensor], random: RandomState
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """The outputs, and the new values of the buffers that change."""
        whole = (Replicate(),) * self.mesh.ndim
        for name, parameter, lies in zip(self.program.parameters, parameters, self.lies, strict=True):
            if (there := parameter.placements if isinstance(parameter, DTensor) else whole) != lies:
                raise NotServed(
                    f"the parameter {name} lies as {there} on the mesh, and the program reads it as {lies}",
                    advice="model.load_state_dict, or parameter.copy_: what is put in its place has to lie as it did",
                )
        if self.program.is_random and inside_backward():
            raise NotServed(
                "the model runs a second time, inside a backward, and would draw other random numbers than the "
                "first time",
                advice="torch.utils.checkpoint inside the model, which is traced, instead of around the parallel one",
            )
        key = [torch.tensor(random.next_key(), device=self.device)] if self.program.is_random else []
        outputs = Step.apply(self, *inputs, *parameters, *buffers, *key)
        kept = []
        count = len(self.graph.output_names)
        for i, (output, sharding) in enumerate(zip(outputs[:count], self.program.outputs[:count], strict=True)):
            whole, name = info(self.graph.output).outputs[i], self.graph.output_names[i]
            is_cut = any(not p.is_replicated for p in sharding.placements)
            if is_cut or (self.how.outputs == "sharded" and whole.shape):
                output = dtensor_of(
                    output, self.mesh, sharding, whole.shape
                )  # a gradient that arrives at it, beside a loss, is a letter
                if is_cut and (self.how.outputs == "full" or name in self.how.outputs_whole):
                    output = output.full_tensor()
            kept.append(output)
        return kept, outputs[count:]


def _kept_by(joint: Joint) -> set[int]:
    """The primals whose memory forward keeps for backward."""
    places = {node: i for i, node in enumerate(joint.forward.find_nodes(op="placeholder"))}
    found = set[int]()
    for node in list(joint.forward.output_node().args[0])[joint.outputs :]:
        while isinstance(node, fx.Node) and node not in places and is_view(node):
            node = node.args[0]
        found |= {places[node]} if node in places else set()
    return found


class ParallelModule(nn.Module):
    """Mixed into the model's own class by `parallelise`. Parameters are DTensors under their own names."""

    _autopar: _State

    @property
    def _own(self) -> _State:
        """What belongs to this model; a copy gets its own when it is first used."""
        if self._autopar.model() is not self:
            self._autopar = self._autopar.of_copy(self)
        return self._autopar

    @property
    def plan(self) -> Plan:
        """The plan of the call that it was made for."""
        return self._autopar.first.plan

    @property
    def graph(self) -> Graph:
        return self._autopar.first.graph

    @property
    def code(self) -> str:
        """The forward of this rank, as Python."""
        return str(self._autopar.first.program)

    @property
    def joint(self) -> Joint:
        """Forward and backward as emitted."""
        return self._autopar.first.joint

    @property
    def random_state(self) -> RandomState:
        """Seed and step of its random numbers: keep them in a checkpoint, set them to repeat a run."""
        return self._own.random

    @property
    def input_specs(self) -> dict[str, str]:
        """What every rank passes for each input.

        "global", the batch of all, or with inputs="local" its own rows of it, "S(0)@dp".
        """
        parts, lowered = self._autopar.parts, self._autopar.first
        return {
            name.removeprefix("input "): "global" if parts is None else parts.text if name in lowered.rows[1] else "R"
            for name in self.graph.inputs
        }

    def sampler(self, dataset: Any, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> DistributedSampler:
        """A sampler for this rank's data loader: with inputs="local" of the rows that it passes, else of all.

        Call its `set_epoch`, as ever.
        """
        parts = self._autopar.parts
        count, index = (1, 0) if parts is None else (parts.count, parts.index(dist.get_rank()))
        return DistributedSampler(dataset, count, index, shuffle, seed, drop_last)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Of what runs inside, gradients of parameters are not reduced.

        They wait, `.grad` stays as it is, and the next backward of a forward outside adds them and reduces.
        `zero_grad()` of the model or of an optimizer forgets them.
        """
        waiting = self._own.waiting
        before, waiting.on = waiting.on, True
        try:
            yield
        finally:
            waiting.on = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._own.waiting.forget(self.parameters())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As any module's; a whole tensor is as good as a DTensor: this rank takes its part."""
        parts = {id(p): self._own.storage[n] for n, p in self.named_parameters()}
        held = self.state_dict(keep_vars=True)
        given = OrderedDict(state_dict)
        for name, value in state_dict.items():
            if (
                isinstance(value, Tensor)
                and not isinstance(value, DTensor)
                and id(held.get(name)) in parts
                and value.shape == held[name].shape
            ):
                given[name] = nn.Parameter(
                    parts[id(held[name])].take(value.to(self._own.device), False), held[name].requires_grad
                )
        given._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
        return super().load_state_dict(given, strict, assign)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and isinstance(self._autopar, _State):
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
        """As any module's, whose copy has no gradients: torch would copy those of DTensors."""
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
                "torch.distributed.checkpoint.save({'model': model.state_dict()}, checkpoint_id=path), and "
                "autoparallelize again where it is read"
            ),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._own
        with naming_the_lost("its call"):
            leaves, structure = state.caller.arguments(args, kwargs)
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, DTensor):
                    raise BadInput(
                        f"the input {state.caller.names(structure)[i]} is a DTensor",
                        advice=(
                            'x.full_tensor(), or with inputs="local" x.to_local() where it lies as model.input_specs '
                            "says"
                        ),
                    )
            begin_call()
            leaves, bucket = (
                (leaves, None) if state.padding is None else state.padded(self, state.padding, leaves, structure)
            )
            program = state.program(self, leaves, structure)
            run_program()
            inputs = [leaves[i] for i in program.places]
            if program.calls < _CHECKED_CALLS:  # looked at while it is new
                state.check(inputs, program)
        program.calls += 1
        graph = program.runner.graph
        outputs, changed = program.run(self, inputs, state.random)
        for (_, name), value in zip(graph.updates, changed, strict=True):
            write_buffer(self, name, value)
        for hook in program.idle:
            hook.run(self, state.hooks)
        return build_outputs(graph, outputs if bucket is None else cut_back(outputs, bucket.cuts, bucket.here))


_CHECKED_CALLS = 2
_MOST_PROGRAMS = 16  # that a model keeps: what was not called for longest goes first

Again = Callable[
    [nn.Module, Call, Plan, bool], tuple[Graph, Plan]
]  # traces the model as it was before on a call, with its dropout or without, and plans that: on rank 0 for all


@dataclass(slots=True, eq=False)
class _Program:
    """What runs calls in one situation, with gradients or without."""

    situation: Situation
    has_gradients: bool
    lowered: Lowered
    runner: Runner
    places: list[int]  # of each input: which leaf of the call
    seen: State  # what its modules said of themselves when it was captured,
    unread: Unread  # and what of that was not read
    number: int  # in the order in which they were made, on every rank
    calls: int = 0
    idle: tuple[IdleHook, ...] = ()  # hooks that run beside it

    def run(self, model: nn.Module, inputs: list[Tensor], random: RandomState) -> tuple[list[Any], tuple[Tensor, ...]]:
        """The outputs, and the new values of the buffers that change."""
        names, changing = (
            self.runner.program,
            {name for _, name in self.runner.graph.updates},
        )  # what autograd keeps must not be what is written later
        buffers = [b.clone() if n in changing else b for n, b in ((n, tensor_of(model, n)) for n in names.buffers)]
        with contextlib.ExitStack() as off:
            for kind, _ in self.situation.autocast:  # its casts are in the graph
                off.enter_context(torch.autocast(kind, enabled=False))
            return self.runner(inputs, [tensor_of(model, n) for n in names.parameters], buffers, random)


class _State:
    """What a ParallelModule holds besides its parameters."""

    def __init__(
        self,
        model: nn.Module,
        first: Lowered,
        storage: dict[str, Storage],
        mesh: Any,
        device: torch.device,
        again: Again,
        how: How,
    ) -> None:
        self.first, self.storage, self.mesh, self.device, self.again, self.how, self.original = (
            first,
            storage,
            mesh,
            device,
            again,
            how,
            type(model),
        )
        self.model = weakref.ref(model)
        self.caller, self.waiting = Caller(model), Waiting(model, storage)
        self.random = RandomState(-1)
        self.hooks = model._forward_pre_hooks, model._forward_hooks  # these are in the graphs
        self.programs: list[_Program] = []
        self.last: _Program | None = None  # the one of the last call
        self.made = 0  # how many programs there have been
        self.parts: Parts | None = None  # of inputs="local"
        self.padding: Padding | None = None  # of pad_to=

    def program(self, model: nn.Module, leaves: list[Any], structure: Any) -> _Program:
        """What runs this call: one that is there, or a new one."""
        leaves, cut = self.of_all(
            leaves, structure
        )  # what ranks pass may be rows of a batch: the situation is that of the batch
        situation, grad = self.caller.situation(leaves, structure), torch.is_grad_enabled()
        found = next((p for p in self.programs if p.has_gradients == grad and self.fits(p, situation)), None)
        if (
            found is None or found is not self.last
        ):  # ranks do so together, before a collective of one meets those of another
            agree(
                (self.original.__name__, situation.of_all_ranks(), grad, found and found.number),
                f"calls {self.original.__name__} {self.otherwise(situation, grad)}",
            )
        if found is None:
            with unwatched():
                found = self.made_for(model, situation, grad, self.caller.call(leaves, structure), cut)
        found.situation = situation  # it may say else what is not read
        self.programs.remove(found)
        self.programs.append(found)  # the latest stands last
        self.last = found
        return found

    def otherwise(self, situation: Situation, grad: bool) -> str:
        """In what a call differs from the one before, for a person."""
        if self.last is None:
            return "for the first time"
        differs = situation.differs(self.last.situation)
        return f"with other {differs} than before" if differs else f"{'with' if grad else 'without'} gradients"

    def fits(self, program: _Program, situation: Situation) -> bool:
        """Was it made for this situation, or for one that differs in what is not read?"""
        return program.situation == situation or (
            replace(program.situation, said=situation.said) == situation
            and self.caller.attributes.same_but(program.seen, program.unread)
        )

    def padded(
        self, model: nn.Module, padding: Padding, leaves: list[Any], structure: Any
    ) -> tuple[list[Any], Bucket | None]:
        """The leaves of a call with its lengths brought to the next multiple; None where they are there already."""
        named = dict(zip(self.caller.names(structure), leaves, strict=True))
        shapes = shapes_of(named)
        least, most = least_and_most(shapes, self.device)
        if self.parts is None and least != most:
            raise Disagreement(
                "ranks pass sequences of different lengths",
                seen=f"here {shapes}",
                advice='the same batch on every rank, or inputs="local"',
            )
        bucket = padding.bucket(least, most, self.caller.situation(leaves, structure).kind(self.parts is None))
        if not bucket.moved:
            return leaves, None
        if (
            bucket.key not in padding.known
            or bucket.is_ambiguous
            or not self.caller.attributes.same_but(bucket.kind.seen, bucket.kind.unread)
        ):
            agree(
                (self.original.__name__, bucket.key),
                f"calls {self.original.__name__} with lengths that it has not padded before",
            )
            with unwatched(), self.caller.attributes.reads() as read:
                kind = self.tried(model, named, structure, bucket)
            padding.known[bucket.key] = replace(
                kind, seen=self.caller.attributes.now(), unread=self.caller.attributes.unread(read)
            )
        bucket.kind = padding.known[bucket.key]
        return filled(named, bucket.shapes, bucket.kind.fills), bucket

    def tried(self, model: nn.Module, named: dict[str, Any], structure: Any, bucket: Bucket) -> Kind:
        """Run a call as it is and as it is padded, forward and backward, where dropout drops nothing.

        Both must give the same.
        """
        waiting, names = Waiting(model, self.storage), list(named)
        with torch.inference_mode(False), torch.enable_grad():
            programs: list[_Program] = []
            for shapes in (bucket.here, bucket.longer):
                leaves, cut = self.of_all(filled(named, shapes, {}), structure)
                with self.as_before(model):
                    graph, plan = self.again(model, self.caller.call(leaves, structure), self.first.plan, False)
                lowered = lower(
                    graph, plan, self.mesh.get_coordinate(), self.device.type, True, self.rows(graph, structure, cut)
                )
                all_ranks_hold("programs", (plan.digest, plan.mesh, lowered.joint.collectives))
                runner = Runner(lowered, self.mesh, self.storage, self.device, waiting, replace(self.how, backend=None))
                programs.append(
                    _Program(
                        self.caller.situation(leaves, structure),
                        True,
                        lowered,
                        runner,
                        self.caller.places(graph),
                        self.caller.attributes.now(),
                        frozenset(),
                        len(programs),
                    )
                )
            exact, longer = (p.lowered.graph for p in programs)
            if exact.updates:
                raise NotServed(
                    f"with pad_to the padding would enter the buffer {exact.updates[0][1]}, which the model writes",
                    advice="pad_to=None",
                )
            called = {key: names[place] for key, place in zip(exact.inputs, programs[0].places, strict=True)}
            fills = fills_of(exact, called)
            cuts = cuts_of(exact, longer, bucket)
            check_reach(exact, longer, {key: fills.get(name, 0) for key, name in called.items()})
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            results = []
            for program, shapes, back in zip(programs, (bucket.here, bucket.longer), ((), cuts), strict=True):
                given = [
                    t.clone() if isinstance(t, Tensor) and t.is_inference() else t for t in filled(named, shapes, fills)
                ]
                outputs = cut_back(
                    program.run(model, [given[place] for place in program.places], RandomState(0))[0], back, bucket.here
                )
                results.append((outputs, gradients_of([outputs[i] for i in exact.differentiable], trained)))
        check(exact, results[0], results[1], self.device)
        return Kind(fills, cuts)

    def of_all(self, leaves: list[Any], structure: Any) -> tuple[list[Any], Collection[str]]:
        """The leaves of the call of all ranks from those of this one's, and which are rows of it."""
        if self.parts is None:
            return leaves, ()
        whole, cut = self.parts.whole(dict(zip(self.caller.names(structure), leaves, strict=True)), structure)
        return list(whole.values()), cut

    def rows(self, graph: Graph, structure: Any, cut: Collection[str]) -> Rows:
        """Of what inputs of a graph ranks pass rows."""
        if self.parts is None:
            return WHOLE
        names = self.caller.names(structure)
        return self.parts.axes, frozenset(
            key for key, place in zip(graph.inputs, self.caller.places(graph), strict=True) if names[place] in cut
        )

    def made_for(
        self, model: nn.Module, situation: Situation, grad: bool, call: Call, cut: Collection[str] = ()
    ) -> _Program:
        """Lower for a new situation. The storage of the parameters stays."""
        start, before = time.perf_counter(), self.programs[-1]
        known = next((p for p in self.programs if self.fits(p, situation)), None)
        if known is not None:  # the same graph, the other half
            graph, plan, seen, unread, idle = (
                known.lowered.graph,
                known.lowered.plan,
                known.seen,
                known.unread,
                known.idle,
            )
        else:
            with (
                self.caller.attributes.reads() as read,
                self.as_before(model),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):  # the graph is also that of a later call with gradients
                graph, plan = self.again(model, call, self.first.plan, True)
            seen, unread, idle = self.caller.attributes.now(), self.caller.attributes.unread(read), graph.idle
            for program in self.programs:
                if (
                    program.lowered.graph.digest == graph.digest
                    and replace(program.situation, said=situation.said) == situation
                ):  # what has changed made no difference
                    program.situation, program.seen, program.unread, program.idle = situation, seen, unread, idle
                    graph, plan = program.lowered.graph, program.lowered.plan
                    if program.has_gradients == grad:
                        log.warning(
                            "autopar looked at %s again, whose modules say something else, and it made no "
                            "difference: %.1f s",
                            self.original.__name__,
                            time.perf_counter() - start,
                        )
                        return program
        if late := [name for name in graph.parameters if name not in self.storage]:
            raise NotServed(
                f"the parameter {late[0]} was not there when the model was made parallel",
                advice="parameters that are there, and tied, as they were: autoparallelize after they are set",
            )
        lowered = lower(
            graph, plan, self.mesh.get_coordinate(), self.device.type, grad, self.rows(graph, situation.structure, cut)
        )
        program = self.keep(situation, grad, lowered, seen, unread)
        program.idle = idle
        if known is None:
            log.warning(
                "autopar planned and lowered %s again (%s), for %s: %.1f s",
                self.original.__name__,
                f"{plan.step_time_s * 1e3:.3g} ms a step by its figures",
                situation.differs(before.situation),
                time.perf_counter() - start,
            )
        return program

    def keep(
        self, situation: Situation, grad: bool, lowered: Lowered, seen: State, unread: Unread = frozenset()
    ) -> _Program:
        """Bind a lowered program to this rank, once all ranks have the same."""
        all_ranks_hold("programs", (lowered.plan.digest, lowered.plan.mesh, lowered.joint.collectives))
        if lowered.program.is_random and self.random.seed < 0:
            self.random.seed = from_rank_0(lambda: int(torch.randint(0, 2**62, ())))
        runner = Runner(lowered, self.mesh, self.storage, self.device, self.waiting, self.how)
        self.programs = [
            *self.programs[-_MOST_PROGRAMS + 1 :],
            _Program(
                situation,
                grad,
                lowered,
                runner,
                self.caller.places(lowered.graph),
                seen,
                unread,
                self.made,
                idle=lowered.graph.idle,
            ),
        ]
        self.made += 1
        return self.programs[-1]

    def passes_parts(self) -> None:
        """From here on ranks pass their own rows, as the first program takes them."""
        first = self.programs[0]
        names, (axes, keys) = self.caller.names(first.situation.structure), self.first.rows
        cut = [names[place] for key, place in zip(self.first.graph.inputs, first.places, strict=True) if key in keys]
        self.parts = Parts(self.first.plan, self.device, axes, names, cut)

    def check(self, inputs: list[Tensor], program: _Program) -> None:
        """Do all ranks hold the same batch?"""
        if self.parts is None:
            all_ranks_hold("input values", inputs)
        else:
            self.parts.all_hold(dict(zip(program.lowered.graph.inputs, inputs, strict=True)), program.lowered.rows[1])

    @contextlib.contextmanager
    def as_before(self, model: nn.Module) -> Iterator[None]:
        """The model as the user wrote it: its own class, and the hooks that it had."""
        cls, own = type(model), (model._forward_pre_hooks, model._forward_hooks)
        model.__class__, (model._forward_pre_hooks, model._forward_hooks) = self.original, self.hooks
        watch_parts(model, False)
        try:
            yield
        finally:
            model.__class__, (model._forward_pre_hooks, model._forward_hooks) = cls, own
            watch_parts(model)

    def of_copy(self, model: nn.Module) -> _State:
        """The state of a copy of the model: its own modes, waiting gradients and random numbers, the same programs."""
        with self.as_before(model):
            made = _State(model, self.first, self.storage, self.mesh, self.device, self.again, self.how)
            made.caller.attributes = Attributes(made.caller.modules, self.caller.attributes)
        made.parts, made.padding = self.parts, self.padding
        made.random, made.hooks = RandomState(self.random.seed, self.random.step), self.hooks
        made.programs = [
            _Program(
                p.situation,
                p.has_gradients,
                p.lowered,
                Runner(p.lowered, self.mesh, self.storage, self.device, made.waiting, self.how),
                p.places,
                p.seen,
                p.unread,
                p.number,
                p.calls,
                p.idle,
            )
            for p in self.programs
        ]
        made.made = self.made
        return made

    def __deepcopy__(self, memo: Any) -> _State:
        return self  # until the copy is used


def parallelise(
    model: nn.Module,
    call: Call,
    lowered: Lowered,
    mesh: Any,
    again: Again,
    sync: bool = True,
    init: str = "module",
    weights: str | None = None,
    how: How = How(),
    read: Reads | None = None,
) -> nn.Module:
    """Turn `model` into the parallel one, in place.

    Its class gains `ParallelModule`, its parameters become local shards.
    """
    if "forward" in vars(model):
        raise NotServed(
            f"{type(model).__name__} has a forward of its own beside its class's, which the parallel model could "
            "not replace",
            advice="a class whose forward it is",
        )
    if hidden := [
        name
        for name in ("plan", "graph", "code", "joint", "input_specs", "sampler", "random_state", "no_sync")
        if hasattr(model, name)
    ]:
        raise NotServed(
            f"{type(model).__name__} has an attribute {hidden[0]!r}, which the parallel model has too",
            advice="another name",
        )
    device = (
        torch.device(mesh.device_type, torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device("cpu")
    )
    old = list(model.parameters())
    if not sync:  # nothing is sent, so it must be there already
        all_ranks_hold("parameter values", [t for t in (*old, *model.buffers()) if not t.is_meta])
    storage = _store(model, lowered.plan, mesh, device, sync, init, weights)
    _refuse_steps_on(old)
    teach_dtensor()
    skip_together()
    let_anomalies_be_looked_for()
    watch_what_stands_around()
    let_optimizers_forget()
    state = _State(model, lowered, storage, mesh, device, again, how)
    with torch.enable_grad():
        attributes = state.caller.attributes
        state.last = state.keep(
            state.caller.situation(*state.caller.arguments(call.args, call.kwargs)),
            True,
            lowered,
            attributes.now(),
            frozenset() if read is None else attributes.unread(read),
        )
    if how.passes_rows:
        state.passes_parts()
    if how.pad_to is not None:
        leaves, structure = state.caller.arguments(call.args, call.kwargs)
        state.padding = Padding(how.pad_to, dict(zip(state.caller.names(structure), leaves, strict=True)))
    cls, names = type(model), {"__module__": type(model).__module__, "__doc__": type(model).__doc__}
    model.__class__ = type(
        f"Parallel{cls.__name__}",
        (ParallelModule, cls),
        {
            **names,
            "forward": _forward_of(cls),
            "__call__": nn.Module.__call__,
            **({"save_pretrained": _save_pretrained} if hasattr(cls, "save_pretrained") else {}),
        },
    )
    model._forward_pre_hooks, model._forward_hooks = OrderedDict(), OrderedDict()
    model._autopar = state
    watch_parts(model)
    return model


def _forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """The forward of the parallel model, which says of itself what the model's own does - trainers read its signature -
    and which a torch.compile around the model runs as it is.
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
    """As the model's own, of the whole model: gathered one tensor at a time, by all ranks together, or given.

    Written by rank 0.
    """
    state: _State = self._own
    if state_dict is None:  # every rank has a part of it
        agree((state.original.__name__, "save_pretrained"), "calls save_pretrained", is_call=False)
        full = whole_state(self)
        with state.as_before(self):
            from_rank_0(
                lambda: (
                    self.save_pretrained(save_directory, is_main_process=is_main_process, state_dict=full, **how)
                    and None
                )
            )
    elif dist.get_rank() == 0:
        with state.as_before(self):
            self.save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **how)


def _store(
    model: nn.Module, plan: Plan, mesh: Any, device: torch.device, sync: bool, init: str, weights: str | None
) -> dict[str, Storage]:
    """Replace every parameter by its shard - of rank 0's values, of a file, or of what the model's own recipes give -
    ties kept; buffers are whole.
    """
    shardings, storage = plan.parameters, dict[str, Storage]()
    made: dict[int, nn.Parameter] = {}  # of each parameter the stored one,
    buffers: dict[int, Tensor] = {}  # of each buffer on meta its values
    for name, parameter in model.named_parameters():
        storage[name] = Storage.of(parameter, shardings.get(name), mesh)

    def keep(name: str, on_meta: Tensor, values: Tensor) -> None:
        if name in storage:
            made[id(on_meta)] = nn.Parameter(
                storage[name].take(values.to(device), False), requires_grad=on_meta.requires_grad
            )
        else:
            buffers[id(on_meta)] = values.to(device)

    def places_of(name: str, tensor: Tensor) -> list[Tensor]:
        return (storage[name] if name in storage else Storage.of(tensor, None, mesh)).places()

    def keep_part(name: str, tensor: Tensor, local: Tensor) -> None:
        if name in storage:
            made[id(tensor)] = nn.Parameter(storage[name].wrap(local.to(device)), requires_grad=tensor.requires_grad)
        else:
            buffers[id(tensor)] = local.to(device)

    given = set() if weights is None else read(model, weights, places_of, keep_part)
    if is_on_meta(model, given):
        if init == "module":
            initialise(model, keep, given)
        else:
            initialise_by_position(
                model, from_rank_0(lambda: int(torch.randint(0, 2**62, ()))), places_of, keep_part, given
            )
    for name, parameter in model.named_parameters():
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(
                storage[name].take(parameter.detach().to(device), sync), requires_grad=parameter.requires_grad
            )
    for module in model.modules():
        for name, held in list(module._parameters.items()):
            if held is not None:
                module._parameters[name] = made[id(held)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = (
                    buffers[id(buffer)]
                    if id(buffer) in buffers
                    else Storage.of(buffer, None, mesh).spread(buffer.to(device), sync)
                )
        for name, held in list(vars(module).items()):  # a plain attribute is a buffer too
            if isinstance(held, Tensor):
                vars(module)[name] = Storage.of(held, None, mesh).spread(held.to(device), sync)
    return storage


_hooked = False


def _refuse_steps_on(parameters: list[nn.Parameter]) -> None:
    """An optimizer built before `autoparallelize` holds parameters that nobody trains any more.

    Its step is a letter.
    """
    global _hooked
    for parameter in parameters:
        parameter._autopar_consumed = True
    if not _hooked:
        register_optimizer_step_pre_hook(_check_step)
        _hooked = True


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(getattr(p, "_autopar_consumed", False) for group in optimizer.param_groups for p in group["params"]):
        raise Consumed(
            "this optimizer holds parameters of the model from before autoparallelize",
            advice="build the optimizer from the parallel model's parameters()",
        )
    check_step(optimizer)
