"""What the local forms of a program send, held against what their ops' entries say: by that, plans were priced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autopar.codegen.joint_graph import BACK, CONVERT, CONVERTED, OP, JointGraph
from autopar.graph.graph import Graph, call_of, info, type_of
from autopar.graph.nodes import tensor_operands
from autopar.ops.declare import users_rule
from autopar.ops.entry import exchanges_of
from autopar.ops.exchange import BACKWARD, FORWARD, Messages, is_said, messages_of, misfit
from autopar.sharding.convert import LocalStep
from autopar.sharding.costs import LOCAL
from autopar.sharding.mesh import DeviceMesh

SentByOps = Mapping[str, Mapping[str, Messages]]  # op of the local program -> mesh axis -> messages


def sent_by_ops(joint: JointGraph) -> SentByOps:
    """The messages of all ops that send any, as traced: before passes join them or drop unread ones."""
    ran_back = {node.meta[BACK] for node in joint.graph.nodes if BACK in node.meta}
    found: dict[str, dict[str, dict[str, Counter[str]]]] = {}
    for node in joint.graph.find_nodes(op="call_function", target=CONVERT):
        if node.meta.get(CONVERTED):
            continue
        op, way = (node.meta[BACK], BACKWARD) if BACK in node.meta else (node.meta[OP], FORWARD)
        for step in LocalStep.parse_all(node.args[1]):
            if step.kind not in LOCAL:
                ways = (FORWARD, BACKWARD) if op in ran_back else (FORWARD,)
                messages = found.setdefault(op, {}).setdefault(step.axis, {w: Counter() for w in ways})
                messages[way][step.kind.removesuffix("_max")] += 1
    return found


def check_exchanges(graph: Graph, mesh: DeviceMesh, sent: SentByOps) -> None:
    """Raise where an op's local form sends other messages along an axis than its entry says."""
    for node in graph.nodes:
        for axis, messages in sent.get(node.name, {}).items():
            call = call_of(node)
            n = mesh.shape[mesh.axis(axis)]
            said = messages_of(exchanges_of(call), n)
            if not is_said(messages, said, map(type_of, tensor_operands(node))):
                at = "\n".join(filter(None, (users_rule(call.op), call.source)))
                raise misfit(call.op, messages, said, at, f"{info(node).key} on {n} devices of {axis}")
