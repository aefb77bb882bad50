"""`Writer`: rewrites a graph so that some of its ops run on the rows of one turn.

Each value of the graph has its placement on the axis of time (`time_axis.py`), the node that a turn has, and, where it
depends on inputs alone, the node that is all of it. An op asks for its operands as its strategy takes them: a whole
value is cut for it, once for all ops that take it so.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.fx as fx

from autopar.graph.graph import Graph, Info, Leaf, TensorType, call_of, fresh_key, info, type_of
from autopar.graph.kept import NotKept
from autopar.ops.entry import OPS, SHAPE, SIZES
from autopar.ops.local import local_output, local_sizes
from autopar.runtime.collectives import TIME
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Flow, Placement, R, flow
from autopar.sharding.strategies import Choice, Strategy
from autopar.space.bindings import Bindings
from autopar.turns.time_axis import OneTurn, OnTime

EVERYWHERE = flow(R)  # flow of a whole value without a gradient, which every turn has
ALL = ":whole"  # suffix of the name of a value that a turn also has whole


@dataclass(slots=True)
class Value:
    """A value of the graph as it is written: as a turn has it, and whole."""

    lies: OnTime
    turn: fx.Node  # the value in a turn, placed as the flow says
    whole: fx.Node | None = None  # the full value, where one is written
    is_after: bool = False  # is it made of what all turns have added up?


class Writer(abc.ABC):
    """Writes a graph node by node, in order."""

    total: ClassVar[str]  # the op that adds up what turns have

    def __init__(self, graph: Graph, turns: int) -> None:
        self.graph = graph
        self.turns = turns
        self.bindings = Bindings.of(graph, strict=False)
        self.fx = fx.Graph()
        self.values: dict[fx.Node, Value] = {}
        self.shares: dict[tuple[fx.Node, Placement], fx.Node] = {}  # a turn's part of a whole value
        self.flows: dict[fx.Node, tuple[Flow, ...]] = {}  # flows of the results of ops with several

    def copy(self, node: fx.Node, type_: TensorType | None = None) -> fx.Node:
        """Copy an input, a parameter or a buffer, with another type where one is given."""
        made = self.fx.create_node(node.op, node.target, node.args, node.kwargs, name=node.name)
        made.meta["info"] = info(node) if type_ is None else replace(info(node), outputs=(type_,))
        return made

    def emit(self, node: fx.Node, operands: Sequence[fx.Node], strategy: Strategy | None) -> fx.Node:
        """Write the op on operands as its strategy takes them; without a strategy, on whole ones."""
        about = info(node)
        kwargs = dict(node.kwargs)
        outputs = about.outputs
        random = about.random
        if strategy is None:
            taken = [self.values[n].whole for n in operands]
        else:
            taken = [self.taken(n, f) for n, f in zip(operands, strategy.operands, strict=True)]
        in_time = ("", 1)
        if strategy is not None and strategy.cut is not None:
            here = OneTurn(DeviceMesh((self.turns,), (TIME,)), Choice((strategy,)))
            call = call_of(node)
            for marker, local in ((SHAPE, local_output), (SIZES, local_sizes)):
                if (name := node.target.local(marker)) is not None:
                    kwargs[name] = local(here, call)
            outputs = tuple(replace(t, shape=local_output(here, call, i)) for i, t in enumerate(outputs))
            if random >= 0:
                in_time = (repr(strategy), self.turns)
        turn = iter(taken)
        arguments = fx.map_arg(kwargs, lambda n: next(turn))
        made = self.fx.create_node("call_function", node.target, (), dict(arguments), name=node.name)
        key = about.key if strategy is not None else fresh_key(self.fx, f"{about.key}{ALL}")
        made.meta["info"] = replace(about, key=key, outputs=outputs, in_time=in_time)
        return made

    def taken(self, node: fx.Node, wanted: Flow) -> fx.Node:
        """A value in the placement in which an op takes it."""
        value = self.values[node]
        if value.lies.flow.value == wanted.value:
            return value.turn
        whole = value.turn if value.lies.flow.value == R else value.whole
        assert whole is not None
        if wanted.value == R:
            return whole
        key = (whole, wanted.value)
        if key not in self.shares:
            self.shares[key] = self.share(whole, wanted.value)
        return self.shares[key]

    def emitted(self, name: str, of: fx.Node, about: Info, type_: TensorType, **arguments: Any) -> fx.Node:
        """Write an op on the axis of time, of one value, in that value's module."""
        made = self.fx.create_node("call_function", OPS[name], (), {"input": of, **arguments}, name=f"{of.name}_{name}")
        key = fresh_key(self.fx, f"{about.module}/{name}")
        made.meta["info"] = Info(key, "op", (type_,), about.module, about.source)
        return made

    def part(self, node: fx.Node) -> None:
        """Write one of the results of an op with several."""
        producer, place = node.args
        assert isinstance(producer, fx.Node)
        value = self.values[producer]
        made = self._taking(node, value.turn)
        if value.is_after:
            self.values[node] = replace(value, turn=made)
            return
        whole = made if value.whole is value.turn else None
        if value.whole is not None and whole is None:
            whole = self._taking(node, value.whole, ALL)
        flows = self.flows[producer]
        self.values[node] = Value(replace(value.lies, flow=flows[int(str(place))]), made, whole)

    def _taking(self, node: fx.Node, producer: fx.Node, suffix: str = "") -> fx.Node:
        place = int(str(node.args[1]))
        made = self.fx.create_node("call_function", operator.getitem, (producer, place), name=node.name)
        about = info(node)
        key = fresh_key(self.fx, f"{about.key}{suffix}") if suffix else about.key
        made.meta["info"] = replace(about, key=key, outputs=(info(producer).outputs[place],))
        return made

    def add_up(self, node: fx.Node) -> fx.Node:
        """Write the sum over turns of a number that each has."""
        return self.emitted(self.total, node, info(node), type_of(node))

    @abc.abstractmethod
    def share(self, whole: fx.Node, wanted: Placement) -> fx.Node:
        """The share of a turn of a whole value: its rows, or its part of a sum."""

    def ended(self, results: Sequence[fx.Node | None], **facts: Any) -> Graph:
        """The graph with these results in the places of its own; None where an output is not kept."""
        graph = self.graph
        names = self.graph.output_names
        types = info(graph.output).outputs
        kept = [i for i, node in enumerate(results) if node is not None]
        leaves = [Leaf(kept.index(i)) if i in kept else NotKept(name) for i, name in enumerate(names)]
        self.fx.output(tuple(results[i] for i in kept))
        self.fx.output_node().meta["info"] = replace(
            info(graph.output),
            outputs=tuple(replace(type_of(results[i]), requires_grad=types[i].requires_grad) for i in kept),
        )
        return replace(
            graph,
            fx=self.fx,
            output_leaves=tuple(leaves[v.position] if isinstance(v, Leaf) else v for v in graph.output_leaves),
            output_names=tuple(name for i, name in enumerate(names) if i in kept),
            **facts,
        )
