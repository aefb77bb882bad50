"""Let parameters that lie on the host come up before they are read, and let their gradients go down.

Each half that reads one brings it up anew, and drops it behind its last reader. When follows from the windows of the
plan (`space/schedule.py`), as its bytes do there. A gradient goes down in the backward that reduces it; that of
micro-batches which wait for others stays, and goes down once it is settled (`module/runner.py`).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

import torch.fx as fx

from autopar.codegen.buffers import buffer_of
from autopar.codegen.halves import Joint
from autopar.codegen.joint_graph import OP
from autopar.codegen.offloaded import (
    Coming,
    Offloaded,
    Trip,
    called,
    come_back,
    save_owners,
    starts,
    with_its_parts,
)
from autopar.graph.graph import Graph, info
from autopar.letters import NotServed
from autopar.runtime.host import begin_to_host, begin_up, end_from_host, end_to_host
from autopar.solver.plan import Plan
from autopar.space.parameter_values import casts_of_parameters
from autopar.space.schedule import schedule_of


def coming_of(graph: Graph, plan: Plan) -> dict[str, Coming]:
    """The parameters of a plan that lie on the host and that ops read, by name."""
    if not plan.wholly_hosted:
        return {}
    if plan.pipeline is not None:
        raise NotServed(
            "the plan has parameters on the host and a pipeline, whose stages hold several micro-batches at a time",
            advice='constraints={"*": "*; *; *; *; host"} for states alone, or a plan of one stage',
        )
    ops = [n for n in graph.nodes if info(n).kind == "op"]
    schedule = schedule_of(ops, plan.window_bytes)
    gathered = _gathered(graph, plan)
    back = 2 * len(ops) - 1
    found = {}
    for name in plan.wholly_hosted:
        if (reading := schedule.reading(graph.parameters[name])) is not None:
            first, last = reading
            again = back - schedule.comes_up_again(last, name in gathered)
            found[name] = Coming(schedule.comes_up(first, name in gathered), again, back - 1 - schedule.is_down(first))
    return found


def _gathered(graph: Graph, plan: Plan) -> set[str]:
    """The parameters of which conversions make other forms, or casts do."""
    converted = {c.source for c in plan.conversions if c.forward}
    cast = set(casts_of_parameters(graph).values())
    return {name for name, node in graph.parameters.items() if node in cast or name in converted}


def bring_up(joint: Joint, primals: Mapping[str, str], offloaded: Offloaded) -> None:
    """Let parts come up from the host in each half, and gradients go down in backward.

    `primals` are the names of the placeholders of parameters, by the names of these.

    before    def forward(x, p):        y = relu(x);  w = all_gather(p);  z = mm(y, w);  return z, y, p
              def backward(y, p, g):    w = all_gather(p);  d = mm(g, w);  e = reduce_scatter(mm(y, g));  return d, e
    after     def forward(x, p):        p_comes = begin_up(p, "cuda");  y = relu(x);  p_here = end_from_host(p_comes);
                                        w = all_gather(p_here);  z = mm(y, w);  return z, y, p
              def backward(y, p, g):    p_comes = begin_up(p, "cuda");  p_here = end_from_host(p_comes);
                                        w = all_gather(p_here);  d = mm(g, w);  e = reduce_scatter(mm(y, g));
                                        e_leaves = begin_to_host(e);  e_host = end_to_host(e_leaves);  return d, e_host
    """
    coming = {primals[name]: when for name, when in offloaded.parameters.items() if name in primals}
    if not coming:
        return
    trips = _trips(joint, coming)
    save_owners(joint, trips)
    for half in (joint.backward, joint.hold):
        come_back(half, trips, offloaded, begin_up)
    for half in (joint.forward, joint.beginning):
        if half is not None:
            kept = joint.outputs if half is joint.forward else 0
            _in_forward(half, coming, offloaded, kept)
    names = [node.name for node in joint.forward.find_nodes(op="placeholder")]
    downs = {place: coming[names[i]].down for place, i in enumerate(joint.gradients) if names[i] in coming}
    _go_down(joint.backward, downs, offloaded)
    for half in (joint.forward, joint.backward, joint.hold, joint.beginning):
        if half is not None:
            half.lint()


def _trips(joint: Joint, coming: Mapping[str, Coming]) -> list[Trip]:
    """The parameters that backward reads, with the saved values that show them."""
    given = {node for node in joint.forward.find_nodes(op="placeholder") if node.name in coming}
    shown: dict[fx.Node, dict[int, fx.Node]] = {}
    results = joint.forward.output_node().args[0]
    for place, node in enumerate(results[joint.outputs :]):
        if (owner := buffer_of(node)) in given:
            shown.setdefault(owner, {})[place] = node
    return [Trip(owner, places, -1, coming[owner.name].again) for owner, places in shown.items()]


def _in_forward(graph: fx.Graph, coming: Mapping[str, Coming], offloaded: Offloaded, outputs: int) -> None:
    """Bring each part up before its first reader; behind the `outputs`, parts are saved as they lie."""
    firsts = {}
    for node in reversed(graph.nodes):
        if node.meta.get(OP) in offloaded.times:
            firsts[offloaded.times[node.meta[OP]]] = node
    times = sorted(firsts)
    end = graph.output_node()
    for part in [n for n in graph.find_nodes(op="placeholder") if n.name in coming]:
        readers = [user for user in part.users if user is not end]
        if not readers and part not in end.args[0][:outputs]:
            continue
        next_op = bisect.bisect_left(times, coming[part.name].ahead)
        begin = [firsts[times[next_op]]] if next_op < len(times) else []
        first = min([*readers, end])
        with graph.inserting_before(min([first, *begin])):
            comes = called(graph, begin_up, (part, part.meta["val"].device.type), f"{part.name}_comes")
        with graph.inserting_before(first):
            here = called(graph, end_from_host, (comes,), f"{part.name}_here")
        comes.meta["val"] = here.meta["val"] = part.meta["val"]
        for reader in readers:
            if reader is not comes:
                reader.replace_input_with(part, here)
        left = end.args[0]
        end.args = (tuple(here if n is part and i < outputs else n for i, n in enumerate(left)),)


def _go_down(backward: fx.Graph, downs: Mapping[int, int], offloaded: Offloaded) -> None:
    """Copy gradients, by their places among the results, to the host, where they are given."""
    end = backward.output_node()
    results = list(end.args[0])
    begun = starts(backward, offloaded.times)
    times = sorted(begun)
    for place, op in downs.items():
        made = results[place]  # It has memory of its own (`buffers.py: own`).
        if made is None:
            continue
        others = [user for user in made.users if user is not end]
        with backward.inserting_after(with_its_parts(max([made, *others]))):
            leaves = called(backward, begin_to_host, (made,), f"{made.name}_leaves")
        before = bisect.bisect_right(times, op) - 1
        last = begun[times[before]] if before >= 0 else end
        with backward.inserting_before(last if leaves < last else leaves.next):
            host = called(backward, end_to_host, (leaves,), f"{made.name}_host")
        leaves.meta["val"] = host.meta["val"] = made.meta["val"]
        results[place] = host
    end.args = (tuple(results),)
