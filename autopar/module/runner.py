"""Run one lowered program on this rank: its halves bound to process groups, and the tensors that it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar.codegen.accumulated import into_sums, waiting_dtypes
from autopar.codegen.bound_calls import by_bindings, keep_for_backward
from autopar.codegen.buffers import buffer_of, is_view
from autopar.codegen.compiled import compile_between_collectives
from autopar.codegen.freeing_calls import from_a_list
from autopar.codegen.halves import Joint, bind
from autopar.codegen.local import LocalProgram
from autopar.codegen.lower import Lowered
from autopar.codegen.partial_backward import for_arrived
from autopar.codegen.ranges import with_ranges
from autopar.graph import walks
from autopar.graph.graph import info
from autopar.graph.tensor_form import TensorForm
from autopar.letters import Anomaly, NotServed
from autopar.module.limits import LIMITS
from autopar.module.step import outputs_of
from autopar.module.storage import Storage, dtensor_of
from autopar.module.waiting import Waiting
from autopar.runtime.backward_steps import hand_over, handing_over
from autopar.runtime.collectives import bind_axes
from autopar.runtime.host import HOST, begin_to_host, end_to_host, settle_copies
from autopar.runtime.private import inside_backward, like_part, profiler_runs
from autopar.runtime.random import RandomState
from autopar.runtime.world import all_ranks_hold
from autopar.sharding.placement import Sharding

if TYPE_CHECKING:
    from autopar.module.stages_of_job import StagesOfJob


@dataclass(frozen=True, slots=True)
class How:
    """Options for running programs, beside the plan."""

    backend: str | None = None  # backend of torch.compile
    # how outputs leave the model: DTensors where they are cut ("auto"), all whole ("full"), all DTensors ("sharded")
    outputs: str = "auto"
    outputs_whole: tuple[str, ...] = ()  # these leave whole in any case
    passes_rows: bool = False  # inputs="local"
    # outputs="local": for each output by name, whether a rank gets its own rows of it
    gives_rows: Mapping[str, bool] | None = None
    pad_to: int | None = None  # lengths are brought to multiples of it
    loss: Callable[..., Any] | None = None  # loss= of the outputs and the inputs; the programs contain it


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """Everything that the programs of a model share: mesh, device, storage of parameters, options."""

    mesh: Any
    device: torch.device
    storage: dict[str, Storage]
    how: How
    stages: StagesOfJob | None = None  # shared by the stages of a pipeline


_FROM_PRIMALS = ("beginning", "forward")


class Halves:
    """The graphs of a program as modules of this rank; while torch.profiler runs, ops carry their names in the plan."""

    def __init__(self, joint: Joint, program: LocalProgram, axes: Mapping[str, Any], backend: str | None) -> None:
        self.joint = joint
        self.places = {node.name: info(node).key for node in program.fx.nodes if "info" in node.meta}
        self.axes = dict(axes)
        self.backend = backend
        # Keys: a name, the outputs at which gradients arrive (empty for all), whether ops are profiler ranges.
        self.modules: dict[tuple[str, tuple[bool, ...], bool], fx.GraphModule] = {}
        self.graphs: dict[str, fx.Graph] = {n: getattr(joint, n) for n in ("forward", "backward", "hold", "settle")}
        if joint.beginning is not None:
            self.graphs["beginning"] = joint.beginning
        # Parameters that may be stepped while backward goes on.
        self.hands_over = [n.args[1] for n in joint.backward.find_nodes(op="call_function", target=hand_over)]
        dtypes = waiting_dtypes(joint)
        self.sums = {"hold": dict(zip(joint.waits, dtypes, strict=True))}  # part of backward -> dtypes of its sums
        if joint.parts is not None:
            self.graphs |= {"inward": joint.parts.inward, "weights": joint.parts.weights}
            self.sums["weights"] = dict(enumerate(dtypes))
        for name in self.graphs:
            self._module(name, (), False)

    def _module(self, name: str, arrived: tuple[bool, ...], is_watched: bool) -> fx.GraphModule:
        key = name, arrived, is_watched
        if key not in self.modules:
            graph = self.graphs[name]
            graph = for_arrived(graph, arrived) if arrived else graph
            graph = into_sums(graph, self.sums[name]) if name in self.sums else graph
            if is_watched:
                graph = with_ranges(graph, "forward" if name in _FROM_PRIMALS else "backward", self.places)
            self.modules[key] = self._bound(name, graph)
        return self.modules[key]

    def _bound(self, name: str, graph: fx.Graph) -> fx.GraphModule:
        """A half as a module that empties a list of operands; forward takes its primals as arguments."""
        module = bind(graph, self.axes)
        keep_for_backward(module.graph)
        if self.backend is not None:
            module = compile_between_collectives(module, self.backend)
        else:
            by_bindings(module.graph)
            module.recompile()
        return module if name in _FROM_PRIMALS else from_a_list(module)

    def half(self, name: str, arrived: tuple[bool, ...]) -> Callable[[list[Any]], Sequence[Tensor | None]]:
        """Backward, or a part of it, for the output gradients that have arrived.

        Results that depend on none of these are None.
        """
        return self._module(name, () if all(arrived) else arrived, self._is_watched).forward

    def hold(self, sums: Sequence[Tensor | None], given: list[Any], arrived: tuple[bool, ...]) -> list[Tensor | None]:
        """Backward of a micro-batch, from a list of operands that is emptied.

        Gradients that wait are added to their sums in place, and the results at `joint.waits` are the new sums.
        """
        given[:0] = sums
        return list(self.half("hold", arrived)(given))

    def begin(self, *primals: Any) -> Sequence[Tensor]:
        """The operands that forward takes behind the primals: every turn reads them, and they are made once."""
        has_one = self.joint.beginning is not None
        return self._module("beginning", (), self._is_watched).forward(*primals) if has_one else ()

    def forward(self, *primals: Any) -> Sequence[Tensor]:
        """Outputs, then the values saved for backward."""
        return self._module("forward", (), self._is_watched).forward(*primals)

    @property
    def _is_watched(self) -> bool:
        """Whether a profiler runs and the halves are not compiled; compiled code has names of its own."""
        return self.backend is None and profiler_runs()


class Primals:
    """The inputs of a program: the call's inputs, then parameters, then buffers, then the random key."""

    def __init__(
        self, program: LocalProgram, joint: Joint, storage: dict[str, Storage], on_host: Collection[str]
    ) -> None:
        first = len(program.inputs)
        self.count = first + len(program.parameters) + len(program.buffers) + program.is_random
        self.names = dict(enumerate(program.parameters, first))
        self.storages = {i: storage[name] for i, name in self.names.items()}
        self.placements = [of_one.placements for of_one in self.storages.values()]
        # the place among parameters of one of which this rank has a part: it tells on which device the model is
        stored = enumerate(zip(self.names.values(), self.storages.values(), strict=True))
        self.witness = next((k for k, (name, one) in stored if one.is_here and name not in on_host), None)
        self.on_host = {i for i, name in self.names.items() if name in on_host}
        self.kept = sorted(i for i in _kept_by(joint) if i in self.names)  # parameters that backward needs as they are
        self.gradients: dict[int, DTensor] = {}  # parameter -> a DTensor without memory, to lay out its gradient by

    def as_gradient(self, primal: int, gradient: Tensor) -> Tensor:
        """A parameter's gradient as a DTensor that lies like the parameter; an input's as it is."""
        if primal not in self.storages:
            return gradient
        if primal in self.on_host and not HOST.holds(gradient):  # It has waited for that of other micro-batches.
            gradient = end_to_host(begin_to_host(gradient))
        known = self.gradients.get(primal)
        if known is None or known.dtype != gradient.dtype:
            known = self.storages[primal].wrap(gradient.new_empty(()).expand(gradient.shape))
            self.gradients[primal] = known
        return like_part(gradient, known)

    def check(self, parameters: Sequence[Tensor], mesh: Any, device: torch.device) -> None:
        """Raise where a parameter does not lie as the program reads it, or is on another device."""
        if self.witness is not None and (moved := parameters[self.witness].device) != device:
            raise NotServed(
                f"the model was moved to {moved}, and its programs run on {device}",
                advice=f"model.to({str(device)!r}) before a call; autopar.gather(model) is a plain model to move",
            )
        here = dict(zip(self.names.values(), parameters, strict=True))
        if away := [self.names[i] for i in self.on_host if here[self.names[i]].device.type != "cpu"]:
            raise NotServed(
                f"the parameter {away[0]} was moved to a device, and the plan has it on the host",
                advice="the parallel model as it is, which is not moved",
            )
        whole = (Replicate(),) * mesh.ndim
        for name, parameter, lies in zip(self.names.values(), parameters, self.placements, strict=True):
            there = parameter.placements if isinstance(parameter, DTensor) else whole
            if there != lies:
                raise NotServed(
                    f"the parameter {name} lies as {there} on the mesh, and the program reads it as {lies}",
                    advice="model.load_state_dict, or parameter.copy_: what is put in its place has to lie as it did",
                )


def _kept_by(joint: Joint) -> set[int]:
    """Indices of the primals whose memory forward keeps for backward."""
    places = {node: i for i, node in enumerate(joint.forward.find_nodes(op="placeholder"))}
    found = set[int]()
    for kept in list(joint.forward.output_node().args[0])[joint.outputs :]:
        node = walks.origin(kept, is_view) if isinstance(kept, fx.Node) else kept
        if node in places:
            found.add(places[node])
    return found


def carried_outputs(lowered: Lowered) -> dict[int, int]:
    """The outputs that calls carry on, each with the input on whose memory forward writes it, or -1."""
    names = dict(lowered.graph.carried)
    found = {i: -1 for i, name in enumerate(lowered.graph.output_names) if name in names}
    forward = lowered.joint.forward
    given = forward.find_nodes(op="placeholder")
    results = forward.output_node().args[0]
    for place, output in lowered.program.written.items():
        if buffer_of(results[output]) is given[place]:
            found[output] = place
    return found


def tangents_of(joint: Joint) -> list[TensorForm]:
    """Layouts of the gradients that arrive at the outputs of a program."""
    results = list(joint.forward.output_node().args[0])
    return [TensorForm.of(results[i].meta["val"]).of_gradient for i in joint.differentiable]


class Settlement:
    """The gradients of a program that accumulate unreduced over micro-batches, and their reduction at the end."""

    def __init__(self, halves: Halves, names: dict[int, str]) -> None:
        self.halves = halves
        joint = halves.joint
        self.names = [names[joint.gradients[i]] for i in joint.waits]
        self.given_dtypes = [n.meta["val"].dtype for n in joint.settle.find_nodes(op="placeholder")]
        self.waiting_dtypes = waiting_dtypes(joint)

    def settle(self, totals: list[Tensor | None]) -> list[Tensor | None]:
        """Reduce the accumulated gradients, from a list that is emptied; None where none has accumulated."""
        places = self.halves.joint.settled_from
        waited = {place: total for place, total in zip(places, totals, strict=True) if total is not None}
        has_waited = [total is not None for total in totals]
        totals.clear()  # `waited` alone holds the sums now: each ends once it is cast, or used
        given = [waited.pop(k).to(dtype) if k in waited else None for k, dtype in enumerate(self.given_dtypes)]
        settled = self.halves.half("settle", tuple(g is not None for g in given))(given)
        return [gradient if has else None for gradient, has in zip(settled, has_waited, strict=True)]


class Runner:
    """Runs one lowered program on this rank."""

    def __init__(self, lowered: Lowered, setup: Setup, waiting: Waiting) -> None:
        self.graph = lowered.graph
        self.joint = lowered.joint
        self.program = lowered.program
        self.setup = setup
        self.waiting = waiting
        self.axes = self._axes()
        self.primals = Primals(lowered.program, lowered.joint, setup.storage, lowered.plan.wholly_hosted)
        own = lowered.own
        self.halves = Halves(lowered.joint, own, self.axes, setup.how.backend)
        self.settlement = Settlement(self.halves, dict(enumerate(own.parameters, len(own.inputs))))
        self.outputs = lowered.joint.outputs
        self.differentiable = lowered.joint.differentiable
        self.shardings = lowered.program.outputs
        self.tangents = tangents_of(lowered.joint)
        self.carried = carried_outputs(lowered)  # outputs that are carried -> inputs that they lie on, or -1
        self.backwards = 0  # number of backwards checked

    @property
    def gets(self) -> tuple[int, ...]:
        """The primals that get a gradient."""
        return self.joint.gradients

    @property
    def waits(self) -> tuple[int, ...]:
        """The places in `gets` of gradients that wait for their reduction."""
        return self.joint.waits

    def _axes(self) -> dict[str, Any]:
        """The axes of collectives and parts, by name."""
        return dict(bind_axes(self.setup.mesh))

    def settle_copies(self) -> None:
        """Let the host wait for copies of its parameters and gradients, which it may read or change."""
        if self.primals.on_host:
            settle_copies(self.setup.device)

    def results(self, given: Iterable[Tensor]) -> Sequence[Tensor]:
        """Run forward on these primals; returns outputs, then the values saved for backward."""
        return self.halves.forward(*given)

    def check_arrived(self, arrived: tuple[bool, ...]) -> None:
        """Check on the first backwards that gradients arrive at the same outputs on all ranks."""
        if len(arrived) > 1 and self.backwards < LIMITS.checked_calls:
            self.backwards += 1
            all_ranks_hold("outputs that gradients arrive at", arrived)

    def refuse_nan(self, found: Sequence[Tensor | None]) -> None:
        """Raise detect_anomaly's error, naming parameters whose gradients are NaN; other ranks are told."""
        bad = []
        for i, gradient in zip(self.gets, found, strict=True):
            if gradient is not None and gradient.is_floating_point() and gradient.isnan().any():
                bad.append(self.primals.names.get(i, "an input"))
        if bad:
            raise Anomaly(
                f"{len(bad)} gradients are not numbers: those of {', '.join(bad[:5])}",
                advice="the model as it was before autoparallelize, on this batch: detect_anomaly names the op",
            )

    def gradients(self, given: list[Tensor | None], arrived: tuple[bool, ...], waits: bool) -> list[Tensor | None]:
        """A gradient for each of `joint.gradients`, from a list of operands that is emptied.

        Where it `waits`, gradients of parameters are kept unreduced and are None here; else they include all that has
        waited.
        """
        if not waits and self not in self.waiting.of:
            with self._handing_over() as stepped:
                found: list[Tensor | None] = list(self.halves.half("backward", arrived)(given))
            for k, i in enumerate(self.gets):
                if self.primals.names.get(i) in stepped:
                    found[k] = None
        else:
            found = self._held(given, arrived, waits)
        return found if waits else self._with_others(found)

    def _handing_over(self) -> contextlib.AbstractContextManager[Collection[str]]:
        """Let optimizers step parameters whose gradients become final; gives the names of those.

        Where others wait, or are looked at, none does.
        """
        if self.waiting.of or not self.halves.hands_over or torch.is_anomaly_enabled():
            return contextlib.nullcontext(())
        return handing_over(self.waiting.parameter, self.halves.hands_over)

    def _held(self, given: list[Tensor | None], arrived: tuple[bool, ...], waits: bool) -> list[Tensor | None]:
        """The gradients; those of parameters are added to waiting ones, and are reduced unless `waits`."""
        found = self.halves.hold(self.waiting.sums(self), given, arrived)
        self.waiting.of[self] = self._taken_out(found)
        return found if waits else self._with_settled(found)

    def _taken_out(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Those of the gradients that wait; None takes their places."""
        taken = [found[i] for i in self.waits]
        for i in self.waits:
            found[i] = None
        return taken

    def _with_settled(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients with the reduced sums of those that have waited."""
        for i, gradient in zip(self.waits, self.waiting.settled(self), strict=True):
            found[i] = gradient
        return found

    def _with_others(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients with those added that wait in other programs, from micro-batches of other shapes."""
        for other in list(self.waiting.of):
            self._add_those_of(other, found)
        return found

    def _add_those_of(self, other: Runner, found: list[Tensor | None]) -> None:
        """Add the gradients that wait in another program.

        Gradients of parameters that this program does not reach are added to `.grad` directly.
        """
        settled = zip(other.settlement.names, self.waiting.settled(other), strict=True)
        theirs = {name: gradient for name, gradient in settled if gradient is not None}
        for k, i in enumerate(self.gets):
            name = self.primals.names.get(i)
            if name in theirs:
                gradient = theirs.pop(name)
                mine = found[k]
                found[k] = gradient if mine is None else mine + gradient
        for name, gradient in theirs.items():
            self.waiting.deliver(name, gradient)

    def __call__(
        self, inputs: list[Tensor], parameters: list[Tensor], buffers: list[Tensor], random: RandomState
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """Outputs, and new values of the buffers that change."""
        self.primals.check(parameters, self.setup.mesh, self.setup.device)
        if self.program.is_random and inside_backward():
            raise NotServed(
                "the model runs a second time, inside a backward, and would draw other random numbers than the "
                "first time",
                advice="torch.utils.checkpoint inside the model, which is traced, instead of around the parallel one",
            )
        key = [torch.tensor(random.next_key(), device=self.setup.device)] if self.program.is_random else []
        outputs = outputs_of(self, [*inputs, *parameters, *buffers, *key])
        count = len(self.graph.output_names)
        shardings = self.shardings[:count]
        there = {output: inputs[place] for output, place in self.carried.items() if place >= 0}
        every = zip(outputs[:count], shardings, strict=True)
        kept = [there[i] if i in there else self._left(i, *both) for i, both in enumerate(every)]
        return kept, outputs[count:]

    def _left(self, place: int, output: Tensor, sharding: Sharding) -> Tensor:
        """An output as it leaves the model: plain, a DTensor, or gathered."""
        how = self.setup.how
        whole = info(self.graph.output).outputs[place]
        is_cut = any(not p.is_replicated for p in sharding.placements)
        if place in self.carried:
            return dtensor_of(output.contiguous(), self.setup.mesh, sharding, whole.shape)
        if not is_cut and not (how.outputs == "sharded" and whole.shape):
            return output
        # a gradient that arrives at it, beside a loss, is an error
        mesh = self.setup.mesh if self.setup.stages is None else self.setup.stages.whole_mesh
        spread = dtensor_of(output, mesh, sharding, whole.shape)
        is_wanted_whole = how.outputs == "full" or self.graph.output_names[place] in how.outputs_whole
        return spread.full_tensor() if is_cut and is_wanted_whole else spread
