"""Which nodes of a local program backward recomputes, and where: the values that the plan names, and views of them.

Set and order follow the plan, never the emitted nodes: with uneven parts one rank may read less than another, but all
must repeat the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from autopar.codegen.local import LocalProgram
from autopar.codegen.local_passes import is_kernel
from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name
from autopar.solver.plan import Plan
from autopar.space.passages import routes_of
from autopar.space.saved import kept_by, memories


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """Recomputed nodes of a local program by name, with the places in forward whose backward wants each of them.

    Backward goes through the places in reverse: a node is recomputed before the backward of the op at the place that
    wants it, and no later than the recomputed nodes that read it. A node that is made in passing is wanted at several
    places, the latest in forward first: once for the backward of a later segment, and once more for that of its own.
    """

    places: dict[str, int] = field(default_factory=dict)
    wanted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    exchanged: frozenset[str] = frozenset()  # conversions that some backward needs: every rank repeats them

    @property
    def key(self) -> Hashable:
        """A key that is equal where the same nodes are recomputed at the same places."""
        return tuple(sorted(self.wanted.items()))


NOTHING = Recomputed()


def recomputed_of(graph: Graph, plan: Plan, program: LocalProgram, device: str) -> Recomputed:
    """The nodes that make the values which the plan recomputes, with the places that want them.

    Ops that view the memory of a recomputed operand are included: where a kernel lays out that operand otherwise, the
    view is a copy. Routes are left out, whatever the plan names: made again, they might say that rows go elsewhere.
    """
    routes = routes_of(n for n in graph.nodes if info(n).kind == "op")
    recomputed = plan.recomputed.difference(info(op).key for op in routes)
    if not recomputed:
        return NOTHING
    kind = "cpu" if device == "cpu" else "cuda"
    views = _views(graph, kind)
    nodes = [n for n in program.fx.nodes if n.op == "call_function"]
    places = {node.name: place for place, node in enumerate(nodes)}
    found: dict[fx.Node, None] = {}
    for node in nodes:
        about = info(node)
        is_named = not recomputed.isdisjoint((about.key, *about.names))
        follows = about.kind == "part" or about.key in views
        if is_named or (follows and any(operand in found for operand in node.all_input_nodes)):
            found[node] = None
    keeps = _keeps(graph, kind)
    # A kernel recomputes its inner values from its operands, so its backward reads all of these.
    for kernel in filter(is_kernel, nodes):
        keeps[kernel.name] = {operand.name for operand in kernel.all_input_nodes}
    demands = _Demands(nodes, found, keeps, _Passing.of(graph, nodes, found, views, plan.passing))
    wanted = demands.places()
    exchanged = frozenset(n.name for n in wanted if info(n).kind == "conversion")
    return Recomputed(places, {n.name: tuple(wanted.get(n, [places[n.name]])) for n in found}, exchanged)


@dataclass(frozen=True, slots=True, eq=False)
class _Passing:
    """Values that are made in passing, and the times of ops; conversions and parts have the times of their ops."""

    times: Mapping[fx.Node, int]
    until: Mapping[fx.Node, int]  # a node is made in passing for the backward of ops later than this

    @staticmethod
    def of(
        graph: Graph,
        nodes: Sequence[fx.Node],
        found: Collection[fx.Node],
        views: Collection[str],
        passing: Mapping[str, str],
    ) -> _Passing:
        if not passing:
            return _Passing({}, {})
        ops = [n for n in graph.nodes if info(n).kind == "op"]
        at = {info(op).key: time for time, op in enumerate(ops)}
        times = dict[fx.Node, int]()
        time = len(at)
        for node in reversed(nodes):  # a node that is not an op of the graph has the time of the next op
            about = info(node)
            time = next((at[name] for name in (about.key, *about.names) if name in at), time)
            times[node] = time
        times |= {node: times[node.all_input_nodes[0]] for node in nodes if info(node).kind == "part"}
        until = dict[fx.Node, int]()
        for node in found:
            about = info(node)
            named = [at[passing[name]] for name in (about.key, *about.names) if name in passing]
            # A view and a part are made in passing exactly where their operand is.
            if not named and (about.kind == "part" or about.key in views):
                named = [until[operand] for operand in node.all_input_nodes if operand in until]
            if named:
                until[node] = min(named)
        return _Passing(times, until)

    def among(self, made: Iterable[fx.Node], op: fx.Node) -> Iterator[fx.Node]:
        """Nodes among `made` that were made in passing for the backward of `op`, and are dropped again."""
        for node in made if self.until else ():
            if self.times[op] > self.until.get(node, self.times[op]):
                yield node


@dataclass(frozen=True, slots=True, eq=False)
class _Demands:
    """Which recomputed values the backward of each op reads, from the last op to the first."""

    nodes: Sequence[fx.Node]
    found: Mapping[fx.Node, None]
    keeps: Mapping[str, Collection[str]]
    passing: _Passing

    def places(self) -> dict[fx.Node, list[int]]:
        """The places that want each node, the latest first; nodes that no backward needs are left out."""
        wanted: dict[fx.Node, list[int]] = {}
        there = set[fx.Node]()
        for place in range(len(self.nodes) - 1, -1, -1):
            op = self.nodes[place]
            made = list[fx.Node]()
            for node in self._asked(op):
                made += self._chain(node, there)
            for node in made:
                wanted.setdefault(node, []).append(place)
            there.difference_update(self.passing.among(made, op))
        return wanted

    def _asked(self, op: fx.Node) -> Iterator[fx.Node]:
        kept = self.keeps.get(op.name, ())
        for node in op.all_input_nodes:
            is_arrival = node in self.found and info(node).kind == "conversion" and op not in self.found
            if node in self.found and (_origin(node).name in kept or is_arrival):
                yield node
        if op in self.found and op.name in kept:
            yield op

    def _chain(self, node: fx.Node, there: set[fx.Node]) -> list[fx.Node]:
        """The nodes to recompute for one node, operands first, itself last; all are added to `there`."""
        made = list[fx.Node]()
        pending = [node]
        while pending:
            if pending[-1] in there:
                pending.pop()
                continue
            missing = [a for a in pending[-1].all_input_nodes if a in self.found and a not in there]
            if missing:
                pending += missing
            else:
                made.append(pending.pop())
                there.add(made[-1])
        return made


def _origin(node: fx.Node) -> fx.Node:
    """The value of the graph that a node is, or that conversions made it of."""
    while "info" in node.meta and info(node).kind == "conversion":
        node = node.all_input_nodes[0]
    return node


def _keeps(graph: Graph, kind: str) -> dict[str, set[str]]:
    """Names of the values that the backward of each op reads on a kind of device, by the op's name.

    A local program has no node for an identity: its readers read the operand.
    """
    found: dict[str, set[str]] = {}
    for op in graph.nodes:
        if info(op).kind == "op":
            values, _ = kept_by(op, kind, emitted=True)
            found[op.name] = {_behind(value).name for value in values}
    return found


def _behind(value: fx.Node) -> fx.Node:
    """The value that identities hand on."""
    while info(value).kind == "op" and op_name(value) == "identity":
        value = value.all_input_nodes[0]
    return value


def _views(graph: Graph, kind: str) -> set[str]:
    """Keys of the ops all of whose results share memory with an operand."""
    memory = memories(graph, kind)

    def is_view(op: fx.Node) -> bool:
        operands = {memory[a] for a in op.all_input_nodes}
        return all(memory[value] in operands for value in walks.results(op))

    return {info(op).key for op in graph.nodes if info(op).kind == "op" and is_view(op)}
