"""Make a program for a new situation: capture, plan and lower again, or lower the other half of a known plan."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn

from autopar.graph.calls import Call
from autopar.graph.graph import Graph
from autopar.letters import NotServed
from autopar.module.attributes import Sight
from autopar.module.situation import Situation
from autopar.progress import shown, tell
from autopar.solver.figures import between
from autopar.solver.plan import Plan

if TYPE_CHECKING:
    from autopar.module.state import ModelState, SituatedProgram

_WHY = {  # A difference of situations -> what it says of a call.
    "arguments": "with such arguments",
    "train and eval": "in this mode",
    "parameters that train": "with these parameters trained",
    "autocast": "under this autocast",
    "attributes or hooks of modules": "since modules were changed",
}


def lower_again(
    state: ModelState, model: nn.Module, situation: Situation, grad: bool, call: Call, cut: Collection[str]
) -> SituatedProgram:
    """A program for a new situation, where ranks pass rows of inputs `cut`; parameters keep their storage."""
    start = time.perf_counter()
    name = state.original.__name__
    known = next((p for p in state.programs if state.fits(p, situation) and _serves(state, p, grad)), None)
    if known is not None:  # the same graph, the other half
        graph = known.lowered.graph
        plan = known.lowered.plan
        sight = known.sight
    else:
        graph, plan, sight = _captured(state, model, call, grad)
        for program in state.programs:
            is_alike = program.situation.but_for(situation.said) == situation
            if not is_alike or program.lowered.graph.digest != graph.digest:
                continue
            # The graph is the same in the new situation, and so is the plan.
            program.situation = situation
            program.sight = sight
            graph = program.lowered.graph
            plan = program.lowered.plan
            if program.has_gradients == grad:
                took = time.perf_counter() - start
                with shown():
                    tell("looked at %s again, whose modules say something else: nothing changes (%.1f s)", name, took)
                return program
    if late := [name for name in graph.parameters if name not in state.setup.storage]:
        raise NotServed(
            f"the parameter {late[0]} was not there when the model was made parallel",
            advice="parameters that are there, and tied, as they were: autoparallelize after they are set",
        )
    lowered = state.lowered(graph, plan, grad, state.rows(graph, situation.structure, cut))
    program = state.keep(situation, grad, lowered, sight)
    if known is None:
        took = time.perf_counter() - start
        differences = [_differences(state, program, before) for before in state.programs[:-1]]
        nearest = min(differences, key=len) if differences else ["of its kind"]
        with shown():
            what = "planned and lowered %s again in %.1f s, at its first call %s; expected %s a step"
            tell(what, name, took, ", ".join(nearest), between(*plan.step_interval_s))
            _hint_at_rows(state, program)
    return program


def _differences(state: ModelState, program: SituatedProgram, before: SituatedProgram) -> list[str]:
    """Names for a program's kind of call against that of an earlier one, as in "without gradients"."""
    differs = state.caller.differs(program.situation, before.situation, before.sight)
    grad = program.has_gradients
    said = [] if before.has_gradients == grad else ["with gradients" if grad else "without gradients"]
    for what, now in differs.items():
        words = _WHY.get(what, f"with {what}")
        said.append(f"{words} ({now})" if now else words)
    return said


def _hint_at_rows(state: ModelState, program: SituatedProgram) -> None:
    """Say so where the first call has the rows of all ranks, and the plan was made for those of one."""
    parts, first = state.parts, state.programs[0].situation
    if parts is None or state.made > 2 or program.situation.structure != first.structure:
        return
    leaves = zip(program.situation.leaves, first.leaves, strict=True)
    rows = {(now[0][0], then[0][0]) for now, then in leaves if isinstance(now[0], torch.Size) and now[0] != then[0]}
    if rows and all(now == parts.count * then for now, then in rows):
        now, then = min(rows)
        what = "the batch of all ranks has %d rows, and the plan was made for %d: pass autoparallelize a batch of all"
        tell(what, now, then)


def _serves(state: ModelState, program: SituatedProgram, grad: bool) -> bool:
    """Whether the plan of a program also serves calls with gradients, or without.

    A plan in turns serves no call without gradients; the plan of a call without gradients, which has no turns, may not
    fit in memory with them. Stages have an order for one of both.
    """
    plan = program.lowered.plan
    if plan.pipeline is not None:
        return program.has_gradients == grad
    if not program.lowered.graph.has_gradients:
        return not grad
    if program.has_gradients:
        return grad or plan.microbatches == plan.chunks == 1
    return not grad or plan.peak_bytes <= state.first.plan.budget


def _captured(state: ModelState, model: nn.Module, call: Call, grad: bool) -> tuple[Graph, Plan, Sight]:
    """The graph of a call, its plan, and what the capture read of the modules."""
    attributes = state.caller.attributes
    with attributes.reads() as read, state.as_before(model), torch.inference_mode(False), torch.enable_grad():
        # the graph is also that of a later call with gradients
        graph, plan = state.replan(model, call, state.first.plan, read, is_trial=False, has_gradients=grad)
    return graph, plan, attributes.sight(read, graph.idle)
