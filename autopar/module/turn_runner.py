"""Run a program in turns: some rows of a batch at a time, forward and backward of each turn together.

    forward     the beginning, once: what is made of parameters alone, which all turns read. Then every turn: the
                outputs of its rows, and the gradients of what it adds to the loss; these are added up. Then the
                ending, once, on what the turns have added up.
    backward    the gradient of the loss goes back through the ending, to one number, and scales what is added up:
                gradients are linear in it

So activations live for one turn, nothing is computed twice, and the loss is that of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from autopar.codegen.lower import Lowered
from autopar.graph.graph import info
from autopar.module.runner import Halves, Runner, Setup, tangents_of
from autopar.module.storage import dtensor_of
from autopar.module.waiting import Waiting
from autopar.runtime.collectives import TIME, Turns
from autopar.sharding.placement import R, Sharding


class InTurns(Runner):
    """Runs one lowered program on this rank, once for each turn of its batch."""

    def __init__(self, lowered: Lowered, setup: Setup, waiting: Waiting) -> None:
        assert lowered.ending is not None
        self.turns = Turns(lowered.graph.turns)
        super().__init__(lowered, setup, waiting)
        ending = self.ending = lowered.ending
        self.end = Halves(ending.joint, ending.program, self.axes, setup.how.backend)
        self.outputs = len(ending.results)
        self.differentiable = self._differentiable()
        both = lowered.program.outputs, ending.program.outputs
        self.parts = tuple(both[is_last][place] for is_last, place in ending.results)
        self.rows_out = dict(lowered.graph.rows_out)
        count = len(self.graph.output_names)
        self.written = [at for is_last, at in ending.results[count:] if not is_last]  # new values of buffers
        replicated = Sharding((R,) * setup.mesh.ndim)
        named = zip(self.graph.result_names, self.parts, strict=True)
        self.shardings = tuple(replicated if name in self.rows_out else lies for name, lies in named)
        self.tangents = tangents_of(ending.joint)
        self.primals.kept = []  # backward runs inside forward, so later writes to parameters are no error
        self.in_turns = [name in lowered.graph.in_turns for name in lowered.graph.inputs]

    def _axes(self) -> dict[str, Any]:
        return {**super()._axes(), TIME: self.turns}

    def _differentiable(self) -> tuple[int, ...]:
        """Indices of the results that gradients arrive at."""
        places = {place: i for i, (is_last, place) in enumerate(self.ending.results) if is_last}
        return tuple(places[place] for place in self.ending.joint.differentiable)

    def results(self, given: Iterable[Tensor]) -> Sequence[Tensor]:
        """Outputs, then what the ending saves for backward, then the gradients that turns have added up."""
        primals = list(given)
        totals: list[Tensor | None] = [None] * len(self.joint.waits)
        left: list[list[Tensor]] = []
        begun = self.halves.begin(*primals)
        for turn in range(self.turns.size):
            self.turns.index = turn
            mine = [self._rows(x, i) for i, x in enumerate(primals)]
            results = list(self.halves.forward(*mine, *begun))
            outputs = results[: self.joint.outputs]
            saved = results[self.joint.outputs :]
            del results, mine
            for at in self.written:  # backward may recompute, and update statistics once more in the same memory
                outputs[at] = outputs[at].clone()
            left.append(outputs)
            saved.append(torch.ones_like(outputs[self.joint.differentiable[0]]))
            totals = self.halves.hold(totals, saved, (True,))
        return self._ended(left, totals)

    def _rows(self, primal: Tensor, place: int) -> Tensor:
        """The rows of an input that belong to the current turn."""
        if place >= len(self.in_turns) or not self.in_turns[place]:
            return primal
        count = primal.shape[0] // self.turns.size
        return primal.narrow(0, self.turns.index * count, count)

    def _ended(self, left: list[list[Tensor]], totals: list[Tensor | None]) -> list[Tensor]:
        """Results of the ending, and of the turns: rows concatenated, other results of the last turn."""
        last = list(self.end.forward(*self._sums(left)))
        outputs = [
            last[at] if is_last else self._output(place, at, left)
            for place, (is_last, at) in enumerate(self.ending.results)
        ]
        present = [total for total in totals if total is not None]
        return [*outputs, *last[self.ending.joint.outputs :], *present]

    def _sums(self, left: list[list[Tensor]]) -> list[Tensor]:
        """The operands of the ending."""
        sums = self.ending.sums
        columns = zip(*[outputs[len(outputs) - len(sums) :] for outputs in left], strict=True)
        return [_added_up(each) if is_sum else each[-1] for is_sum, each in zip(sums, columns, strict=True)]

    def _output(self, place: int, at: int, left: list[list[Tensor]]) -> Tensor:
        """An output of the turns: its rows in each, or what the last one has."""
        name = self.graph.result_names[place]
        if name in self.rows_out:
            return torch.cat([self._whole(place, o[at]) for o in left], self.rows_out[name])
        return left[-1][at]

    def _whole(self, place: int, output: Tensor) -> Tensor:
        """One turn's rows of an output in full, gathered from all devices."""
        if all(p.is_replicated for p in self.parts[place].placements):
            return output
        shape = info(self.graph.output).outputs[place].shape
        spread = dtensor_of(output, self.setup.mesh, self.parts[place], shape)
        return spread.redistribute(placements=[Replicate()] * self.setup.mesh.ndim).to_local()

    def gradients(self, given: list[Tensor | None], arrived: tuple[bool, ...], waits: bool) -> list[Tensor | None]:
        """The gradients that turns have added up, times the gradient that goes back through the ending."""
        return self._scaled(given, arrived, [n is not None for n in self.joint.hold.output_node().args[0]], waits)

    def _scaled(
        self, given: list[Tensor | None], arrived: tuple[bool, ...], has: Sequence[bool], waits: bool
    ) -> list[Tensor | None]:
        """The sums of turns, where there is one, times the gradient of the ending's operand."""
        saved = len(list(self.ending.joint.forward.output_node().args[0])) - self.ending.joint.outputs
        held = given[saved : saved + sum(has)]
        first = [*given[:saved], *given[saved + sum(has) :]]
        given.clear()
        (scale,) = self.end.half("backward", arrived)(first)
        assert scale is not None
        held.reverse()
        found = [_last_scaled(held, scale) if is_there else None for is_there in has]
        self.waiting.add(self, self._taken_out(found))
        return found if waits else self._with_others(self._with_settled(found))


def _last_scaled(totals: list[Tensor], scale: Tensor) -> Tensor:
    """The last of the totals, which leaves the list, times the scale."""
    total = totals.pop()
    return total * scale.to(total.dtype)


def _added_up(values: Sequence[Tensor]) -> Tensor:
    """Sum over turns, in single precision at least."""
    wide = torch.promote_types(values[0].dtype, torch.float32) if values[0].is_floating_point() else values[0].dtype
    return torch.stack([value.to(wide) for value in values]).sum(0).to(values[0].dtype)
