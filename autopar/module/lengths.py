"""Calls of a model with `pad_to`: pad lengths to the next multiple, and test each new kind of call once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.codegen.local_inputs import least_and_most
from autopar.letters import Disagreement, NotServed
from autopar.module.attributes import Sight
from autopar.module.padding import (
    Bucket,
    Kind,
    Padding,
    Results,
    check,
    cut_back,
    cuts_of,
    filled,
    fills_of,
    gradients_of,
    shapes_of,
)
from autopar.module.reach import check_reach
from autopar.module.reads import Reads
from autopar.module.runner import Runner
from autopar.module.state import ModelState, SituatedProgram
from autopar.module.waiting import Waiting
from autopar.runtime.agreement import agree
from autopar.runtime.private import unwatched
from autopar.runtime.random import RandomState
from autopar.runtime.world import all_ranks_hold

Leaves = dict[str, Any]  # leaves of a call by name


def padded(
    state: ModelState, padding: Padding, model: nn.Module, leaves: list[Any], structure: Any
) -> tuple[list[Any], Bucket | None]:
    """A call's leaves padded to the next multiple, and its bucket, which is None if nothing is padded."""
    caller = state.caller
    name = state.original.__name__
    named = dict(zip(caller.names(structure), leaves, strict=True))
    shapes = shapes_of(named)
    least, most = least_and_most(shapes, state.setup.device)
    if state.parts is None and least != most:
        raise Disagreement(
            "ranks pass sequences of different lengths",
            seen=f"here {shapes}",
            advice='the same batch on every rank, or inputs="local"',
        )
    how = caller.situation(leaves, structure).kind(state.parts is None)
    bucket = padding.bucket(least, most, how)
    if not bucket.moved:
        return leaves, None
    sight = bucket.kind.sight
    if sight is None or bucket.is_ambiguous or not caller.attributes.same_but(sight):
        agree((name, bucket.key), f"calls {name} with lengths that it has not padded before")
        with unwatched(), caller.attributes.reads() as read:
            kind = _tried(state, model, named, structure, bucket, read)
        padding.known[bucket.key] = replace(kind, sight=caller.attributes.sight(read))
    bucket.kind = padding.known[bucket.key]
    return filled(named, bucket.shapes, bucket.kind.fills), bucket


def _tried(state: ModelState, model: nn.Module, named: Leaves, structure: Any, bucket: Bucket, read: Reads) -> Kind:
    """Run a call unpadded and padded, forward and backward, without dropout; raise if results differ."""
    names = list(named)
    waiting = Waiting(model, state.setup.storage)
    with torch.inference_mode(False), torch.enable_grad():
        short = _trial(state, model, filled(named, bucket.here, {}), structure, waiting, read)
        long = _trial(state, model, filled(named, bucket.longer, {}), structure, waiting, read)
        exact, longer = short.lowered.graph, long.lowered.graph
        if exact.updates:
            raise NotServed(
                f"with pad_to the padding would enter the buffer {exact.updates[0][1]}, which the model writes",
                advice="pad_to=None",
            )
        called = {key: names[place] for key, place in zip(exact.inputs, short.places, strict=True)}
        kind = Kind(fills_of(exact, called), cuts_of(exact, longer, bucket))
        check_reach(exact, longer, {key: kind.fills.get(name, 0) for key, name in called.items()})
        results = []
        for program, shapes, cuts in ((short, bucket.here, ()), (long, bucket.longer, kind.cuts)):
            given = [_usable(leaf) for leaf in filled(named, shapes, kind.fills)]
            outputs, _ = program.run(model, [given[place] for place in program.places], RandomState(0))
            results.append(_results(model, exact.differentiable, cut_back(exact, outputs, cuts, bucket.here)))
    check(exact, results[0], results[1], state.setup.device)
    return kind


def _trial(
    state: ModelState, model: nn.Module, leaves: list[Any], structure: Any, waiting: Waiting, read: Reads
) -> SituatedProgram:
    """A program for a call without dropout, which the model does not keep."""
    leaves, cut = state.of_all(leaves, structure)
    with state.as_before(model):
        call = state.caller.call(leaves, structure)
        graph, plan = state.replan(model, call, state.first.plan, read, is_trial=True, has_gradients=True)
    lowered = state.lowered(graph, plan, True, state.rows(graph, structure, cut))
    all_ranks_hold("programs", (plan.digest, plan.mesh, lowered.joint.collectives))
    setup = replace(state.setup, how=replace(state.setup.how, backend=None))
    situation = state.caller.situation(leaves, structure)
    places = state.caller.places(graph)
    sight = Sight(state.caller.attributes.now())
    return SituatedProgram(situation, True, lowered, Runner(lowered, setup, waiting), places, sight, 0)


def _usable(leaf: Any) -> Any:
    """The leaf, or a copy that autograd can save where it was made under inference_mode."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf


def _results(model: nn.Module, differentiable: tuple[int, ...], outputs: list[Any]) -> Results:
    """Outputs, and gradients of the parameters that train."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return outputs, gradients_of([outputs[i] for i in differentiable], trained)
