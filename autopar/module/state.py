"""State of a parallel model besides its parameters: its programs, and how a call finds its own."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.codegen.local_inputs import NO_ROWS, OwnRows, Parts
from autopar.codegen.lower import Lowered, lower
from autopar.graph.calls import Call
from autopar.graph.graph import Graph, changing_buffers
from autopar.graph.held import Registered
from autopar.module.attributes import Attributes, Sight
from autopar.module.cache_trial import CacheTrial
from autopar.module.limits import LIMITS
from autopar.module.padding import Padding
from autopar.module.reads import Reads
from autopar.module.relowering import lower_again
from autopar.module.runner import Runner, Setup
from autopar.module.situation import Caller, Situation
from autopar.module.stage_runner import runner_of
from autopar.module.together import Known, lowered
from autopar.module.waiting import Waiting
from autopar.module.wrapper_guards import watch_parts
from autopar.runtime.agreement import agree, goes_on
from autopar.runtime.private import unwatched
from autopar.runtime.random import RandomState
from autopar.runtime.world import all_ranks_hold, from_rank_0
from autopar.solver.plan import Plan

_ONE_BATCH = """the same batch on every rank, drawn with the same seed; or inputs="local", where each rank passes
rows of its own, as under DistributedDataParallel (model.sampler(dataset) gives them)"""


def _drawn_into(drawn: list[int]) -> int:
    """Draw a seed from torch's generator, and note it."""
    drawn.append(int(torch.randint(0, 2**62, ())))
    return drawn[-1]


class Replan(Protocol):
    """Traces the model on a call, and plans that like its first plan: on rank 0 for all ranks.

    A trial is of a call without dropout, whose batch passes at once.
    """

    @property
    def programs(self) -> Known: ...

    def __call__(
        self, model: nn.Module, call: Call, first: Plan, reads: Reads, *, is_trial: bool, has_gradients: bool
    ) -> tuple[Graph, Plan]: ...


@dataclass(slots=True, eq=False)
class Caches:
    """What a model knows of the caches with which it generates."""

    trial: CacheTrial
    length: int = 0  # tokens of the longest


@dataclass(slots=True, eq=False)
class SituatedProgram:
    """A program for calls in one situation, with gradients or without."""

    situation: Situation
    has_gradients: bool
    lowered: Lowered
    runner: Runner
    places: list[int]  # index of each input's leaf in the call
    sight: Sight
    number: int  # counts programs in the order in which they were made, alike on every rank
    calls: int = 0
    parameters: Registered = field(init=False)
    buffers: Registered = field(init=False)
    changing: Registered = field(init=False)  # buffers that a call writes

    def __post_init__(self) -> None:
        program = self.runner.program
        self.parameters = Registered(program.parameters, "_parameters")
        self.buffers = Registered(program.buffers, "_buffers")
        self.changing = changing_buffers(self.runner.graph)

    def run(self, model: nn.Module, inputs: list[Tensor], random: RandomState) -> tuple[list[Any], tuple[Tensor, ...]]:
        """Run a call; returns outputs, and new values of the buffers that change."""
        changing = {name for _, name in self.runner.graph.updates}
        # a buffer that autograd saves must not be written later
        held = zip(self.buffers.names, self.buffers.tensors(model), strict=True)
        buffers = [buffer.clone() if name in changing else buffer for name, buffer in held]
        with contextlib.ExitStack() as off:
            for kind, _ in self.situation.autocast:  # the graph has autocast's casts already
                off.enter_context(torch.autocast(kind, enabled=False))
            return self.runner(inputs, self.parameters.tensors(model), buffers, random)


class ModelState:
    """All that a ParallelModule holds besides its parameters."""

    def __init__(self, model: nn.Module, first: Lowered, setup: Setup, replan: Replan) -> None:
        self.first = first
        self.setup = setup
        self.replan = replan
        self.original = type(model)
        self.model = weakref.ref(model)
        self.caller = Caller(model)
        self.waiting = Waiting(model, setup.storage)
        self.random = RandomState(-1)
        self.hooks = model._forward_pre_hooks, model._forward_hooks  # these are in the graphs
        self.programs: list[SituatedProgram] = []
        self.last: SituatedProgram | None = None  # the one of the last call
        self.made = 0  # how many programs there have been
        self.parts: Parts | None = None  # the ranks' own rows, for inputs="local"
        self.padding: Padding | None = None  # lengths and kinds of calls, for pad_to=
        self.caches = Caches(CacheTrial(self))

    def program(self, model: nn.Module, leaves: list[Any], structure: Any) -> SituatedProgram:
        """The program for this call: a known one, or a new one."""
        # Ranks may pass rows of a batch; the situation is that of the whole batch.
        leaves, cut = self.of_all(leaves, structure)
        situation = self.caller.situation(leaves, structure)
        grad = torch.is_grad_enabled() and situation.wants_gradients
        found = next((p for p in self.programs if p.has_gradients == grad and self.fits(p, situation)), None)
        if found is None or found is not self.last:  # together, before a collective of one rank meets another's
            what = (self.original.__name__, situation.of_all_ranks(), grad, found and found.number)
            agree(what, f"calls {self.original.__name__} {self.otherwise(situation, grad)}")
        else:
            goes_on(f"calls {self.original.__name__} as before")
        if found is None:
            with unwatched():
                found = lower_again(self, model, situation, grad, self.caller.call(leaves, structure), cut)
        found.situation = situation  # attributes that are not read may have changed
        self.programs.remove(found)
        self.programs.append(found)  # the latest stands last
        self.last = found
        return found

    def otherwise(self, situation: Situation, grad: bool) -> str:
        """Text that says how a call differs from the one before."""
        before = self.last or self.programs[0]
        differs = self.caller.differs(situation, before.situation, before.sight)
        how = f"with other {', '.join(differs)} than "
        details = "; ".join(filter(None, differs.values()))
        if self.last is None:
            said = f"for the first time, {how}planned for" if differs else "for the first time"
        elif differs:
            said = f"{how}before"
        else:
            said = f"{'with' if grad else 'without'} gradients"
        return f"{said} ({details})" if details else said

    def fits(self, program: SituatedProgram, situation: Situation) -> bool:
        """Whether a program was made for this situation, or one that differs only in unread attributes."""
        return program.situation == situation or (
            program.situation.but_for(situation.said) == situation and self.caller.attributes.same_but(program.sight)
        )

    def of_all(self, leaves: list[Any], structure: Any) -> tuple[list[Any], Collection[str]]:
        """Leaves of the call of all ranks from those of this rank, and the names of those that have rows."""
        if self.parts is None:
            return leaves, ()
        whole, cut = self.parts.whole(dict(zip(self.caller.names(structure), leaves, strict=True)), structure)
        return list(whole.values()), cut

    def rows(self, graph: Graph, structure: Any, cut: Collection[str]) -> OwnRows:
        """Axes that cut the rows of inputs, and the inputs of a graph of which ranks pass rows."""
        if self.parts is None:
            return NO_ROWS
        names = self.caller.names(structure)
        places = zip(graph.inputs, self.caller.places(graph), strict=True)
        return OwnRows(self.parts.axes, frozenset(key for key, place in places if names[place] in cut))

    def lowered(self, graph: Graph, plan: Plan, grad: bool, rows: OwnRows) -> Lowered:
        """The program of this rank for a graph and a plan."""
        place = 0 if self.setup.stages is None else self.setup.stages.line.index
        here = self.setup.mesh.get_coordinate(), self.setup.device.type
        return lowered(functools.partial(lower, graph, plan, *here, grad, rows, place), self.replan.programs)

    def keep(self, situation: Situation, grad: bool, lowered: Lowered, sight: Sight) -> SituatedProgram:
        """Bind a lowered program to this rank and keep it, after checking that all ranks have the same."""
        ran = lowered.collectives if lowered.plan.pipeline is None else lowered.plan.pipeline  # stages differ
        all_ranks_hold("programs", (lowered.plan.digest, lowered.plan.mesh, ran))
        if lowered.program.is_random and self.random.seed < 0:
            mine: list[int] = []
            self.random.seed = from_rank_0(lambda: _drawn_into(mine))
            if not mine:  # All ranks draw, so that a script's next draws stay alike; ranks of one process after rank 0.
                _drawn_into(mine)
        runner = runner_of(lowered, self.setup, self.waiting)
        places = self.caller.places(lowered.graph)
        made = SituatedProgram(situation, grad, lowered, runner, places, sight, self.made)
        self.programs = [*self.programs[-LIMITS.programs + 1 :], made]
        self.made += 1
        return made

    def passes_parts(self) -> None:
        """Let ranks pass their own rows from here on, cut as the first program takes them."""
        first = self.programs[0]
        names = self.caller.names(first.situation.structure)
        axes, keys = self.first.rows
        cut = [names[place] for key, place in zip(self.first.graph.inputs, first.places, strict=True) if key in keys]
        self.parts = Parts(self.first.plan, self.setup.device, axes, names, cut)

    def check(self, inputs: list[Tensor], program: SituatedProgram) -> None:
        """Check that all ranks hold the same batch."""
        if self.parts is None:
            whole = [x for x in inputs if not isinstance(x, DTensor)]
            all_ranks_hold("input values", whole, _ONE_BATCH)
        else:
            self.parts.all_hold(
                dict(zip(program.lowered.graph.inputs, inputs, strict=True)), program.lowered.rows.inputs
            )

    @contextlib.contextmanager
    def as_before(self, model: nn.Module) -> Iterator[None]:
        """Inside the block the model is as the user wrote it: its own class, and the hooks that it had."""
        cls = type(model)
        own = model._forward_pre_hooks, model._forward_hooks
        model.__class__ = self.original
        model._forward_pre_hooks, model._forward_hooks = self.hooks
        watch_parts(model, False)
        try:
            yield
        finally:
            model.__class__ = cls
            model._forward_pre_hooks, model._forward_hooks = own
            watch_parts(model)

    def of_copy(self, model: nn.Module) -> ModelState:
        """State of a model's copy: the same programs, but its own modes, waiting gradients and random numbers."""
        with self.as_before(model):
            made = ModelState(model, self.first, self.setup, self.replan)
            made.caller.attributes = Attributes(made.caller.modules, self.caller.attributes)
            made.caller.by_position = self.caller.by_position
        made.parts = self.parts
        made.padding = self.padding
        made.random = RandomState(self.random.seed, self.random.step)
        made.hooks = self.hooks
        made.programs = [replace(p, runner=runner_of(p.lowered, self.setup, made.waiting)) for p in self.programs]
        made.made = self.made
        return made

    def __deepcopy__(self, memo: Any) -> ModelState:
        return self  # until the copy is used
