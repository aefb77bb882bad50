"""Backward of a micro-batch in two parts, so that earlier stages of a pipeline need not wait for all of it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch.fx as fx

from autopar.codegen.halves import Joint, Parts, extract
from autopar.codegen.joint_graph import RECOMPUTED
from autopar.graph import walks


def in_two_parts(joint: Joint) -> Parts:
    """Split `hold` by what the gradients of inputs are made of; every op is in one of the parts.

    The first part makes recomputed values, so that the second reads what it reads without recomputation. Where no
    input gets a gradient, the second has all ops.

    before    def hold(x, w, t):      u = mm(t, w);  v = mm(x, t);  return u, v
    after     def inward(x, w, t):    u = mm(t, w);  return u, x, t
              def weights(x, t):      v = mm(x, t);  return v
    """
    hold = joint.hold
    tops = hold.find_nodes(op="placeholder")
    calls = [n for n in hold.nodes if n.op == "call_function"]
    ends = list(hold.output_node().args[0])
    of_parameters = [ends[i] for i in joint.waits]
    of_inputs = [end for i, end in enumerate(ends) if i not in joint.waits]
    tangents = tops[len(tops) - len(joint.differentiable) :]
    again = _made_again(calls, tangents) if of_inputs else []
    first = walks.ancestors([*of_inputs, *again]).intersection(calls)
    # The parts of an op with several results live with it.
    first.update(n for n in calls if n.target is operator.getitem and n.args[0] in first)
    second = set(calls) - first
    read = {a for n in second for a in n.all_input_nodes}.union(of_parameters) - second
    crossing = [n for n in hold.nodes if n in read]
    inward = extract(hold, tops, first, [*of_inputs, *crossing])
    return Parts(inward, extract(hold, crossing, second, of_parameters), len(of_inputs))


def _made_again(calls: Iterable[fx.Node], tangents: Sequence[fx.Node]) -> list[fx.Node]:
    """The recomputed values of a backward: values of forward, which depend on no gradient."""
    gradients = set(tangents)
    for node in calls:
        if not gradients.isdisjoint(node.all_input_nodes):
            gradients.add(node)
    return [n for n in calls if n.meta.get(RECOMPUTED) and n not in gradients]
