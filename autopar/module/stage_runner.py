"""Run a pipeline: this rank's stages, in the order of its plan.

    F    forward of a stage on the rows of one turn: what it reads arrives, and what later stages read is sent on
    B    its backward: gradients arrive from those stages, and those of what it had read are sent back
    I    the part of backward that earlier stages wait for
    W    the rest: the gradients of parameters

Then every rank has the sums that turns add up in the last stage, and runs the ending: so each has the loss, and the
number by which gradients are scaled, as ranks without stages do.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.codegen.lower import Lowered, LoweredStage
from autopar.codegen.stage_programs import Crossing
from autopar.graph.graph import TensorType, info
from autopar.graph.tensor_form import TensorForm
from autopar.module.runner import Halves, Runner, Settlement, Setup, tangents_of
from autopar.module.turn_runner import InTurns
from autopar.module.waiting import Waiting
from autopar.runtime.transfers import Arrival, Way, added_up
from autopar.sharding.placement import local_shape
from autopar.stages.orders import Action, Order


class StageOnRank:
    """One stage, bound to this rank: its halves, and where its operands stand among those of the whole program."""

    def __init__(self, lowered: LoweredStage, runner: InStages) -> None:
        self.of = lowered.of
        self.number = lowered.of.stage
        self.joint = lowered.joint
        self.is_last = lowered.ending is not None
        program = lowered.of.program
        whole = runner.program
        is_first = lowered.joint is runner.joint
        self.halves = (
            runner.halves if is_first else Halves(lowered.joint, program, runner.axes, runner.setup.how.backend)
        )
        places = {n.name: i for i, n in enumerate(whole.fx.find_nodes(op="placeholder"))}
        first = len(program.inputs)
        tops = [n.name for n in program.fx.find_nodes(op="placeholder")]
        self.inputs = [places[name] for name in tops[:first] if name in places]
        self.held = [places[name] for name in tops[first:]]
        names = dict(enumerate(program.parameters, first))
        self.settlement = Settlement(self.halves, names)
        stored = dict(zip(program.parameters, self.held, strict=False))
        self.gets = [stored[name] for name in self.settlement.names]
        self.tangents = tangents_of(lowered.joint)
        # the place among the gradients of inputs of that of each arrival
        joint = lowered.joint
        of_inputs = [primal for i, primal in enumerate(joint.gradients) if i not in joint.waits]
        at = {primal: place for place, primal in enumerate(of_inputs)}
        self.back = [at.get(len(self.inputs) + i) for i in range(len(self.of.arrives))]


class StageSettlement(Settlement):
    """The settlements of all stages of a rank as one, with the sums over the stages that share a parameter."""

    def __init__(
        self, stages: Sequence[StageOnRank], sharing: Mapping[str, Any], lacking: Mapping[str, TensorType]
    ) -> None:
        self.stages = stages
        self.sharing = sharing  # parameter -> the group of ranks that store it, where several coordinates do
        # Parameters stored here whose gradient other coordinates alone have: here it is zeros, of one number until the
        # sum over coordinates.
        self.lacking = lacking
        self.names = [*(name for stage in stages for name in stage.settlement.names), *lacking]
        dtypes = [dtype for stage in stages for dtype in stage.settlement.waiting_dtypes]
        self.waiting_dtypes = [*dtypes, *(type_.torch_dtype for type_ in lacking.values())]

    def settle(self, totals: list[Tensor | None]) -> list[Tensor | None]:
        """Reduce the accumulated gradients, from a list that is emptied.

        A gradient that several stages have is given once.
        """
        found: list[Tensor | None] = []
        for stage in self.stages:
            count = len(stage.settlement.names)
            mine = totals[:count]
            del totals[:count]
            found += stage.settlement.settle(mine)
        for type_, total in zip(self.lacking.values(), totals, strict=True):
            found.append(None if total is None else total.expand(type_.shape))
        first = self._joined(found)
        for name, i in sorted(first.items()):
            gradient = found[i]
            if name in self.sharing and gradient is not None:
                found[i] = added_up(gradient.clone(), self.sharing[name], f"the gradient of {name}")
        return found

    def _joined(self, found: list[Tensor | None]) -> dict[str, int]:
        """Add up the gradients that stages of this rank have of one parameter; returns the place of each."""
        first: dict[str, int] = {}
        for i, name in enumerate(self.names):
            at = first.setdefault(name, i)
            gradient = found[i]
            before = found[at]
            if at != i and gradient is not None:
                found[at] = gradient if before is None else before + gradient
                found[i] = None
        return first


class _Step:
    """What this rank holds within one step."""

    def __init__(self, primals: list[Tensor], stages: Iterable[StageOnRank]) -> None:
        self.primals = primals
        self.saved: dict[tuple[int, int], list[Any]] = {}  # values between forward and backward, by stage and turn
        self.outputs: dict[int, list[Tensor]] = {}  # results of the last stage, by turn
        self.begun: dict[int, Sequence[Any]] = {}  # copies of parameters that all turns read, by stage
        self.context: dict[tuple[int, int], list[Any]] = {}  # values between the parts of backward, by stage and turn
        # Sums of gradients, by stage.
        self.totals: dict[int, list[Tensor | None]] = {each.number: [None] * len(each.joint.waits) for each in stages}
        self.here: dict[tuple[str, int, int], Tensor] = {}  # values between two stages of this rank


class InStages(InTurns):
    """Runs this rank's stages of one lowered program."""

    def __init__(self, lowered: Lowered, setup: Setup, waiting: Waiting) -> None:
        super().__init__(lowered, setup, waiting)
        pipeline = lowered.plan.pipeline
        assert pipeline is not None and lowered.staged is not None and setup.stages is not None
        self.line = setup.stages.line
        self.place = pipeline.place
        order = Order.of(pipeline.place, lowered.graph.turns, pipeline.orders).at(self.line.index)
        self.has_gradients = any(joint.differentiable for joint in lowered.joints)
        self.order = [action for action in order if self.has_gradients or action.kind == "F"]
        stored = setup.stages.stored_as(lowered.staged, self.place)
        self.line.open(ways_of(lowered.staged.crossings, self.place))
        stages = [StageOnRank(stage, self) for stage in lowered.stages]
        self.stages = {stage.number: stage for stage in stages}
        trained = {name: i for i, name in self.primals.names.items() if name in lowered.staged.trained}
        types = list(lowered.program.types.values())
        self.elsewhere = {i: types[i].torch_dtype for n, i in trained.items() if self.line.index not in stored[n]}
        shared = _shared(stored, self.line.index)
        lacks = _without_gradients(shared, stages) & trained.keys() if self.tangents else set()
        self.lacking = {i: types[i] for name, i in trained.items() if name in lacks}
        names = [self.primals.names[i] for i in self.lacking]
        sharing = {name: setup.storage[name].mesh.get_group(0) for name in shared}
        self.settlement = StageSettlement(stages, sharing, dict(zip(names, self.lacking.values(), strict=True)))
        coordinate = setup.mesh.get_coordinate()
        whole = zip(info(lowered.graph.output).outputs, self.parts, strict=True)
        self.shapes = [local_shape(type_.shape, lies, lowered.plan.mesh, coordinate) for type_, lies in whole]

    @property
    def gets(self) -> tuple[int, ...]:
        return (*(i for stage in self.stages.values() for i in stage.gets), *self.lacking, *self.elsewhere)

    @property
    def waits(self) -> tuple[int, ...]:
        return tuple(range(len(self.settlement.names)))

    def results(self, given: Iterable[Tensor]) -> Sequence[Tensor]:
        """Outputs, then what the ending saves for backward, then the gradients that turns have added up."""
        step = _Step(list(given), self.stages.values())
        run = {"F": self._forward, "B": self._backward, "I": self._inward, "W": self._weights}
        arrivals = collections.deque([self._expect(self.order[0])])
        for at, action in enumerate(self.order):
            self.line.let_go()
            if at + 1 < len(self.order):
                arrivals.append(self._expect(self.order[at + 1]))
            stage = self.stages[action.stage]
            self.turns.index = action.turn
            run[action.kind](step, stage, action.turn, arrivals.popleft())
        self.line.end()
        totals = [total for number in self.stages for total in step.totals.get(number, [])]
        device = self.setup.device
        totals += [torch.zeros((), dtype=type_.torch_dtype, device=device) for type_ in self.lacking.values()]
        return self._ended([step.outputs.get(turn, []) for turn in range(self.turns.size)], totals)

    # -- what travels

    def _expect(self, action: Action) -> list[Arrival | None]:
        """Begin to receive what an action reads; None for what another stage of this rank makes."""
        of = self.stages[action.stage].of
        if action.kind == "F":
            return [self._begin(c, self._way(c, action.stage)) for c in of.arrives]
        back = [c for c in of.leaves if c.type.requires_grad] if action.kind != "W" else []
        return [self._begin(c, self._way(c, reader, is_gradient=True)) for c in back for reader in c.readers]

    def _way(self, crossing: Crossing, reader: int, is_gradient: bool = False) -> Way:
        maker = self.place[crossing.source]
        other = self.place[reader]
        sender, receiver = (other, maker) if is_gradient else (maker, other)
        return Way(sender, receiver, crossing.source, reader, is_gradient)

    def _begin(self, crossing: Crossing, way: Way) -> Arrival | None:
        if way.sender == way.receiver:
            return None
        into = torch.empty(crossing.type.shape, dtype=crossing.type.torch_dtype, device=self.setup.device)
        return self.line.receive(into, way)

    def _hand(self, step: _Step, value: Tensor, crossing: Crossing, turn: int, way: Way) -> None:
        """Give a value, or its gradient, to a stage."""
        if way.sender == way.receiver:
            step.here[crossing.name, way.reader, turn] = value.clone()  # either stage may write over its own
        else:
            self.line.send(value, way)

    # -- actions

    def _forward(self, step: _Step, stage: StageOnRank, turn: int, arrivals: list[Arrival | None]) -> None:
        rows = [self._rows(step.primals[i], i) for i in stage.inputs]
        came = [
            step.here.pop((crossing.name, stage.number, turn)) if arrival is None else arrival.wait()
            for crossing, arrival in zip(stage.of.arrives, arrivals, strict=True)
        ]
        arrivals.clear()
        held = [step.primals[i] for i in stage.held]
        if stage.number not in step.begun:
            step.begun[stage.number] = stage.halves.begin(*rows, *came, *held)
        results = list(stage.halves.forward(*rows, *came, *held, *step.begun[stage.number]))
        outputs = results[: stage.joint.outputs]
        saved = results[stage.joint.outputs :]
        del results, rows, came
        for value, crossing in zip(outputs, stage.of.leaves, strict=False):
            for reader in crossing.readers:
                self._hand(step, value.detach(), crossing, turn, self._way(crossing, reader))
        if stage.is_last:
            left = outputs[len(stage.of.leaves) :]
            for at in self.written:
                left[at] = left[at].clone()
            step.outputs[turn] = left
            if self.has_gradients:
                saved.append(torch.ones_like(outputs[stage.joint.differentiable[-1]]))
        if self.has_gradients:
            step.saved[stage.number, turn] = saved

    def _backward(self, step: _Step, stage: StageOnRank, turn: int, arrivals: list[Arrival | None]) -> None:
        operands = [*step.totals[stage.number], *self._saved(step, stage, turn, arrivals)]
        found = list(stage.halves.half("hold", ())(operands))
        step.totals[stage.number] = [found[i] for i in stage.joint.waits]
        self._hand_back(step, stage, turn, [g for i, g in enumerate(found) if i not in stage.joint.waits])

    def _inward(self, step: _Step, stage: StageOnRank, turn: int, arrivals: list[Arrival | None]) -> None:
        assert stage.joint.parts is not None
        found = list(stage.halves.half("inward", ())(self._saved(step, stage, turn, arrivals)))
        count = stage.joint.parts.inputs
        step.context[stage.number, turn] = found[count:]
        self._hand_back(step, stage, turn, found[:count])

    def _weights(self, step: _Step, stage: StageOnRank, turn: int, arrivals: list[Arrival | None]) -> None:
        operands = [*step.totals[stage.number], *step.context.pop((stage.number, turn))]
        step.totals[stage.number] = list(stage.halves.half("weights", ())(operands))

    def _saved(self, step: _Step, stage: StageOnRank, turn: int, arrivals: list[Arrival | None]) -> list[Tensor]:
        """The operands of backward: what forward has saved, then the gradients of what has left the stage."""
        saved = step.saved.pop((stage.number, turn))
        seed = [saved.pop()] if stage.is_last else []
        return [*saved, *self._tangents(step, stage, turn, arrivals), *seed]

    def _hand_back(self, step: _Step, stage: StageOnRank, turn: int, gradients: Sequence[Tensor | None]) -> None:
        """Give the gradients of what has arrived to the stages that had made it."""
        for crossing, place in zip(stage.of.arrives, stage.back, strict=True):
            if crossing.type.requires_grad:
                gradient = None if place is None else gradients[place]
                if gradient is None:  # nothing behind it wants a gradient, and its stage waits for one
                    gradient = torch.zeros(
                        crossing.type.shape, dtype=crossing.type.torch_dtype, device=self.setup.device
                    )
                self._hand(step, gradient, crossing, turn, self._way(crossing, stage.number, is_gradient=True))

    def _tangents(self, step: _Step, stage: StageOnRank, turn: int, arrivals: list[Arrival | None]) -> list[Tensor]:
        """Gradients of what has left a stage: of each value the sum over the stages that read it."""
        came = iter(arrivals)
        forms = iter(stage.tangents)
        found = []
        for crossing in (c for c in stage.of.leaves if c.type.requires_grad):
            total: Tensor | None = None
            for reader in crossing.readers:
                arrival = next(came)
                of_one = step.here.pop((crossing.name, reader, turn)) if arrival is None else arrival.wait()
                total = of_one if total is None else total + of_one
            assert total is not None
            found.append(_as_traced(total, next(forms)))
        arrivals.clear()  # so that backward can free each gradient behind its last reader
        return found

    # -- the end of a step

    def _sums(self, left: list[list[Tensor]]) -> list[Tensor]:
        mine = super()._sums(left) if self.line.index == self.place[-1] else None
        types = self.ending.program.types.values()
        return [self._of_all(None if mine is None else mine[i], t.shape, t.torch_dtype) for i, t in enumerate(types)]

    def _output(self, place: int, at: int, left: list[list[Tensor]]) -> Tensor:
        mine = super()._output(place, at, left) if self.line.index == self.place[-1] else None
        type_ = info(self.graph.output).outputs[place]
        shape = list(self.shapes[place])
        name = self.graph.result_names[place]
        if name in self.rows_out:
            shape = list(type_.shape)
            shape[self.rows_out[name]] *= self.turns.size
        return self._of_all(mine, shape, type_.torch_dtype)

    def _of_all(self, value: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A value of the last stage on every rank."""
        if value is None:
            value = torch.empty(tuple(shape), dtype=dtype, device=self.setup.device)
        return self.line.of_all(value.contiguous(), self.place[-1])

    def gradients(self, given: list[Tensor | None], arrived: tuple[bool, ...], waits: bool) -> list[Tensor | None]:
        """Scaled gradients that turns have added up; empty ones of parameters that are elsewhere."""
        found = self._scaled(given, arrived, [True] * len(self.settlement.names), waits)
        dtypes = self.elsewhere.values()
        return [*found, *(None if waits else torch.empty(0, dtype=d, device=self.setup.device) for d in dtypes)]


def _shared(stored: Mapping[str, Sequence[int]], here: int) -> set[str]:
    """The parameters that a coordinate stores together with others."""
    return {name for name, at in stored.items() if len(at) > 1 and here in at}


def _without_gradients(names: set[str], stages: Iterable[StageOnRank]) -> set[str]:
    """Those of some parameters to which no stage of this rank gives a gradient."""
    return names.difference(*(stage.settlement.names for stage in stages))


def ways_of(crossings: Iterable[Crossing], place: Sequence[int]) -> set[Way]:
    """The ways that values take between coordinates, and gradients back."""
    found = set()
    for source, reader in {(crossing.source, reader) for crossing in crossings for reader in crossing.readers}:
        a = place[source]
        b = place[reader]
        if a != b:
            found |= {Way(a, b, source, reader, is_gradient=False), Way(b, a, source, reader, is_gradient=True)}
    return found


def _as_traced(gradient: Tensor, form: TensorForm) -> Tensor:
    """A gradient in the layout that backward was traced on."""
    return gradient if form.lies_like(gradient) else form.empty(str(gradient.device)).copy_(gradient)


def runner_of(lowered: Lowered, setup: Setup, waiting: Waiting) -> Runner:
    """The runner of a program on this rank: in stages, or in turns where it has an ending."""
    if lowered.stages:
        return InStages(lowered, setup, waiting)
    return Runner(lowered, setup, waiting) if lowered.ending is None else InTurns(lowered, setup, waiting)
