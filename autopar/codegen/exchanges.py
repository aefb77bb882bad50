"""What the local forms of a program send, held against what their ops' entries say: by that, plans were priced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch.fx as fx

from autopar.codegen.joint_graph import BACK, CONVERT, CONVERTED, OP, JointGraph
from autopar.graph.graph import Graph, call_of, info, type_of
from autopar.graph.nodes import tensor_operands
from autopar.ops.declare import users_rule
from autopar.ops.entry import exchanges_of, rule_of, sends_along
from autopar.ops.exchange import BACKWARD, FORWARD, Along, Messages, is_said, messages_of, misfit
from autopar.ops.local import OpOnDevice
from autopar.runtime.wires import EXCHANGING, sent_by
from autopar.sharding.convert import LocalStep
from autopar.sharding.costs import LOCAL
from autopar.solver.plan import Plan

SentByOps = Mapping[str, Mapping[str, Messages]]  # op of the local program -> mesh axis -> messages


def sent_by_ops(joint: JointGraph) -> SentByOps:
    """The messages of all ops that send any, as traced: before passes join them or drop unread ones."""
    ran_back = {node.meta[BACK] for node in joint.graph.nodes if BACK in node.meta}
    found: dict[str, dict[str, dict[str, Counter[str]]]] = {}
    for node in joint.graph.nodes:
        for axis, kind, count in _sent(node):
            op, way = (node.meta[BACK], BACKWARD) if BACK in node.meta else (node.meta[OP], FORWARD)
            ways = (FORWARD, BACKWARD) if op in ran_back else (FORWARD,)
            messages = found.setdefault(op, {}).setdefault(axis, {w: Counter() for w in ways})
            messages[way][kind] += count
    return found


def _sent(node: fx.Node) -> Iterator[tuple[str, str, int]]:
    """The messages of one node that belongs to an op: axis, kind and number."""
    if node.target is CONVERT and not node.meta.get(CONVERTED):
        for step in LocalStep.parse_all(node.args[1]):
            if step.kind not in LOCAL:
                yield step.axis, step.kind.removesuffix("_max"), 1
    elif node.target in EXCHANGING:
        yield from sent_by(node.target, node.args)


def check_exchanges(graph: Graph, plan: Plan, sent: SentByOps) -> None:
    """Raise where an op's local form sends other messages along an axis than its entry says.

    Where it sends any, an axis along which what it reduces is cut, and that it leaves out, is one of them.
    """
    mesh = plan.mesh
    for node in graph.nodes:
        by_axis = sent.get(node.name, {})
        silent = {way: Counter[str]() for ways in by_axis.values() for way in ways}
        for axis in {**by_axis, **dict.fromkeys(_marked(node, plan) if by_axis else ())}:
            messages = by_axis.get(axis, silent)
            call = call_of(node)
            n = mesh.shape[mesh.axis(axis)]
            here = OpOnDevice.fullest(mesh, plan.decisions[info(node).key].choice)
            said = messages_of(exchanges_of(call, Along(here, axis)), n)
            if not is_said(messages, said, map(type_of, tensor_operands(node))):
                at = "\n".join(filter(None, (users_rule(call.op), call.source)))
                raise misfit(call.op, messages, said, at, f"{info(node).key} on {n} devices of {axis}")


def _marked(node: fx.Node, plan: Plan) -> list[str]:
    """The axes along which the plan cuts what the op's local form counts or reduces."""
    call = call_of(node)
    rule = rule_of(call.op, {**call.arguments, "outputs": call.outputs})
    strategies = plan.decisions[info(node).key].choice.strategies
    marked = [rule is not None and sends_along(call.op, rule, s.cut) for s in strategies]
    return [axis for axis, is_marked in zip(plan.mesh.axes, marked, strict=True) if is_marked]
