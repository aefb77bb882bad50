"""`ParameterValues`: parameters and values handed on from one; these are gathered, and their gradients reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.ops.entry import facts_of
from autopar.space.beginning import computed_once
from autopar.space.setting import Setting


@dataclass(frozen=True, slots=True, eq=False)
class ParameterValues:
    """The values of a graph that are parameters or are handed on from one."""

    owners: Mapping[fx.Node, fx.Node]  # a parameter, or a parameter handed on -> that parameter
    casts: Mapping[fx.Node, fx.Node]  # the one cast of a parameter that nothing else reads -> that parameter
    cast_parameters: frozenset[fx.Node]
    computed: frozenset[fx.Node]  # ops that micro-batches compute once, of parameters alone (`beginning.py`)
    reduced_in: Mapping[fx.Node, int]  # cast -> itemsize of the parameter's dtype, if the gradient is reduced in it

    @staticmethod
    def of(graph: Graph, reduce: str) -> ParameterValues:
        """Read the parameter values of a graph, whose gradients are reduced in the dtype `reduce`."""
        casts = casts_of_parameters(graph)
        owners = _owners(graph)
        computed = computed_once(graph, owners)
        return ParameterValues(owners, casts, frozenset(casts.values()), computed, reduced_in(casts, reduce))

    def runs_once(self, setting: Setting) -> frozenset[fx.Node]:
        """The ops that run forward before the first micro-batch, unless a choice drops what they make.

        A copy of a parameter may be dropped where the setting lets parameters be gathered again: of a cast its own
        choice says so, of any other copy nothing does.
        """
        if setting.turns == 1:
            return frozenset()
        copies = {n for n, owner in self.owners.items() if n is not owner}
        return self.computed.union(self.casts if setting.regather else copies)

    def is_handed_on(self, value: fx.Node) -> bool:
        """Whether a value is a parameter behind ops that hand it on, other than a cast gathered itself."""
        return value in self.owners and value not in self.casts and value is not self.owners[value]


def _owners(graph: Graph) -> dict[fx.Node, fx.Node]:
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if info(node).kind == "parameter":
            found[node] = node
        elif info(node).kind == "op" and facts_of(op_name(node)).same:
            operands = node.all_input_nodes
            if operands and all(n in found for n in operands):
                found[node] = found[next(iter(operands))]
    return found


def casts_of_parameters(graph: Graph) -> dict[fx.Node, fx.Node]:
    """The parameter of each cast that is its parameter's only reader: there the cast is gathered."""
    found = {}
    for node in graph.nodes:
        if info(node).kind == "parameter":
            users = [u for u in node.users if u.op != "output"]
            if len(users) == 1 and info(users[0]).kind == "op" and op_name(users[0]) == "to":
                found[users[0]] = node
    return found


def reduced_in(casts: Mapping[fx.Node, fx.Node], dtype: str) -> dict[fx.Node, int]:
    """The parameter's itemsize, for each cast whose gradient is reduced in the parameter's dtype."""
    return {
        cast: type_of(parameter).itemsize
        for cast, parameter in casts.items()
        if type_of(parameter).dtype == dtype != type_of(cast).dtype
    }
