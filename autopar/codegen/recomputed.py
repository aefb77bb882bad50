"""What backward makes again of a local program, and when: what the plan names, and the views of it.

The set and the order are those of the plan, never of the emitted nodes: parts are uneven, so that a rank may read less
than another, and all must repeat the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch.fx as fx

from autopar.codegen.local import LocalProgram
from autopar.graph import walks
from autopar.graph.graph import Graph, info
from autopar.solver.plan import Plan
from autopar.space.saved import kept_by, memories


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """Nodes of a local program by name: the places of all in forward, and where what comes again is wanted.

    Backward goes through the places in reverse: a node comes again before the backward of the op at the place that
    wants it. None is wanted before the places of its readers.
    """

    places: dict[str, int] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    exchanged: frozenset[str] = frozenset()  # conversions that some backward needs: every rank repeats them

    @property
    def key(self) -> Hashable:
        """Equal where the same comes again at the same places."""
        return tuple(sorted(self.wanted.items()))


NOTHING = Recomputed()


def recomputed_of(graph: Graph, plan: Plan, program: LocalProgram, device: str) -> Recomputed:
    """The nodes that make the values which the plan recomputes.

    An op that shows its operand's memory follows it: a kernel may lay out that operand so that showing it takes a copy.
    """
    if not plan.recomputed:
        return NOTHING
    views, nodes = _views(graph), [n for n in program.fx.nodes if n.op == "call_function"]
    places = {node.name: place for place, node in enumerate(nodes)}
    found: dict[fx.Node, None] = {}
    for node in nodes:
        about = info(node)
        is_named = not plan.recomputed.isdisjoint((about.key, *about.names))
        follows = about.kind == "part" or about.key in views
        if is_named or (follows and any(operand in found for operand in node.all_input_nodes)):
            found[node] = None
    keeps = _keeps(graph, device)
    wanted: dict[str, int] = {}
    needed: set[fx.Node] = set()
    for node in reversed(found):
        reads = [places[node.name]]  # its own backward may read it
        if node.name in keeps.get(node.name, ()):
            needed.add(node)
        for user in (u for u in node.users if u.op == "call_function"):
            is_kept = node.name in keeps.get(user.name, ()) or (info(node).kind == "conversion" and user not in found)
            if is_kept:
                reads.append(places[user.name])
            if user in needed:
                reads.append(wanted[user.name])
            if is_kept or user in needed:
                needed.add(node)
        wanted[node.name] = max(reads)
    exchanged = frozenset(n.name for n in needed if info(n).kind == "conversion")
    return Recomputed(places, wanted, exchanged)


def _keeps(graph: Graph, device: str) -> dict[str, set[str]]:
    """The operands that the backward of each op reads, by the names of nodes."""
    kind = "cpu" if device == "cpu" else "cuda"
    ops = [n for n in graph.nodes if info(n).kind == "op"]
    return {op.name: {value.name for value in kept_by(op, kind, emitted=True)[0]} for op in ops}


def _views(graph: Graph) -> set[str]:
    """The ops all of whose results lie on the memory of an operand."""
    memory = memories(graph)
    ops = [n for n in graph.nodes if info(n).kind == "op"]
    return {
        info(op).key
        for op in ops
        if all(any(memory[value] == memory[a] for a in op._input_nodes) for value in walks.results(op))
    }
