"""Programs whose certificates are tested, and broken ones made of them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator

import torch

from autopar import Assume, DeviceMesh
from autopar.codegen.lower import lower
from autopar.request import Request
from autopar.runtime.collectives import BEGIN, PACK, STEPS
from autopar.search import plan_of
from tests.equality.matrix import made

MESH = DeviceMesh((2, 2), ("dp", "tp"))
BOTH = dict(tensor=2, data=dict(size=2, zero=3))
SEQUENCE = dict(tensor=dict(size=2, sequence=True), data=2)
_REDUCE, _SCATTER = STEPS["all_reduce"], STEPS["reduce_scatter"]
_BUCKETS = (STEPS["all_reduce_bucket"], PACK["all_reduce"])


@functools.cache
def traced(name, **how):
    model, batch, _ = made(name)
    return Request(mesh=MESH, memory_budget="inf", assume=Assume(no_padding=True), **how).trace(model, batch)


def lowered(name, preset, **how):
    """The program of the last device of a model under a preset."""
    request = Request(mesh=MESH, memory_budget="inf", assume=Assume(no_padding=True), parallel=preset, **how)
    graph = traced(name, **how)
    plan = plan_of(graph, request)
    return lower(request.as_planned(graph, plan), plan, (1, 1))


def broken(program, ways=None):
    """The same program with one of its reductions wrong, each of them in turn: where, how, and the program."""
    ways = _WAYS if ways is None else ways
    for what, joint in _broken(program.joint, ways) if not program.stages else ():
        yield what, dataclasses.replace(program, joint=joint)
    for place, stage in enumerate(program.stages):
        for what, joint in _broken(stage.joint, ways):
            stages = list(program.stages)
            stages[place] = dataclasses.replace(stage, joint=joint)
            yield what, dataclasses.replace(program, stages=tuple(stages))
    for what, joint in _broken(program.ending.joint, ways) if program.ending else ():
        yield f"ending {what}", dataclasses.replace(program, ending=dataclasses.replace(program.ending, joint=joint))


def _broken(joint, ways):
    halves = ("forward", "backward", *(("hold", "settle") if joint.waits else ()))
    for half in (*halves, "beginning") if joint.beginning else halves:
        graph = getattr(joint, half)
        for place, node in enumerate(graph.nodes):
            for how in ways.get(node.target, ()):
                made_ = copy.deepcopy(graph)
                for mine, theirs in zip(made_.nodes, graph.nodes, strict=True):
                    mine.meta = dict(theirs.meta)
                how(made_, list(made_.nodes)[place])
                yield f"{half} {node.name}: {how.__name__}", dataclasses.replace(joint, **{half: made_})


def dropped(graph, node):
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def doubled(graph, node):
    with graph.inserting_after(node):
        again = graph.call_function(_REDUCE, node.args)
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again)
    again.args = (node, *again.args[1:])


def over_another_axis(graph, node):
    other = next(axis for axis in MESH.axes if axis != node.args[1])
    node.args = (node.args[0], other, *node.args[2:])
    for user in list(node.users):
        if user.target in BEGIN.values():
            user.args = (user.args[0], other, *user.args[2:])


def not_reduced(graph, node):
    node.target = STEPS["slice"]


def one_left_out(graph, node):
    last = node
    while not any(user.target is operator.getitem for user in last.users):
        last = next(iter(last.users))
    part = next(user for user in last.users if user.target is operator.getitem)
    part.replace_all_uses_with(node.args[0][part.args[1]])


def cast_before(graph, node):
    """Summed in bfloat16, and cast behind the sum."""
    values = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    with graph.inserting_before(node):
        narrow = [graph.call_function(torch.ops.aten._to_copy.default, (v,), {"dtype": torch.bfloat16}) for v in values]
    for made_, value in zip(narrow, values, strict=True):
        made_.meta = dict(value.meta, val=value.meta["val"].to(torch.bfloat16))
    node.args = (narrow if isinstance(node.args[0], (list, tuple)) else narrow[0], *node.args[1:])


_WAYS = {
    _REDUCE: (dropped, doubled, over_another_axis),
    _SCATTER: (not_reduced, over_another_axis),
    **dict.fromkeys(_BUCKETS, (one_left_out, over_another_axis)),
    PACK["reduce_scatter"]: (over_another_axis,),
}
NARROWER = dict.fromkeys(
    (_SCATTER, *_BUCKETS, STEPS["reduce_scatter_bucket"], PACK["reduce_scatter"]), (cast_before,)
)  # ways that the dtype of a sum is wrong
