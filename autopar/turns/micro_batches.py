"""The graph of one micro-batch: the batch of a call passes in turns through one program.

    before    x: f32[8, 64] = input x;  h = linear(x, w);  e = mse_loss(h, y);  s = sum(e);  loss = div(s, 512)
    after     x: f32[2, 64] = input x             # of every turn its rows
              h = linear(x, w);  e = mse_loss(h, y);  s = sum(e);  loss = total(div(s, 512))

A walk in the order of the program gives each value its placement on the axis of time (`time_axis.py`): what a turn has
rows of is made of its rows, and what is made of inputs alone is also made whole, where an op asks for all of it - the
count of all targets, say, by which every turn divides its sum. So the mean is that of the batch, never one of means.
What turns add up is a `total`; the ops behind it run once, after the last turn.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, Info, Leaf, TensorType, call_of, fresh_key, info, op_name, type_of
from autopar.graph.kept import NotKept
from autopar.graph.verify import verify
from autopar.letters import NotServed
from autopar.ops.entry import OPS, SHAPE, SIZES
from autopar.ops.local import Here, OpCall, local_output
from autopar.passes import run_passes
from autopar.runtime.collectives import TIME
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Flow, P, Placement, R, S, flow
from autopar.sharding.strategies import Choice, Strategy
from autopar.space.bindings import Bindings
from autopar.tracer.passes import drop_dead, one_name_per_fan_out
from autopar.turns.time_axis import WHOLE, OneTurn, OnTime, strategy_in_turns

_EVERYWHERE = flow(R)  # of what has no gradient: every turn has all of it
_WHOLE = ":whole"  # behind the name of a value of which a turn also has all
_AS_A_BATCH = "microbatches=1, and accumulation= of calls with fewer rows"


def in_micro_batches(graph: Graph, turns: int, keeps_outputs: bool) -> Graph:
    """The graph of one of so many micro-batches of the same batch.

    Outputs beside a loss that are rows of a micro-batch leave it only where they are to be kept. A letter names the op
    that cannot run on some of the rows: one that looks at all of them, such as batch norm in training.
    """
    if turns == 1:
        return graph
    made = _MicroBatch(graph, turns, keeps_outputs).run()
    run_passes("graph", (drop_dead, one_name_per_fan_out), made, verify)
    made.fx.__dict__.pop("_autopar_keys", None)
    return made


def rows_of_batch(graph: Graph) -> int:
    """The rows of the batch: the first dim of the first input that has one."""
    return next((type_of(n).shape[0] for n in graph.inputs.values() if type_of(n).shape), 1)


@dataclass(slots=True)
class _Value:
    """A value of the graph in that of a micro-batch: as its turns have it, and all of it."""

    lies: OnTime
    turn: fx.Node  # as the flow says
    whole: fx.Node | None = None  # where it is made of inputs alone
    is_after: bool = False  # is it made of what all turns have added up?


class _MicroBatch:
    """Writes the graph of one micro-batch, node by node, in the order of the graph."""

    def __init__(self, graph: Graph, turns: int, keeps_outputs: bool) -> None:
        self.graph = graph
        self.turns = turns
        self.keeps_outputs = keeps_outputs
        self.rows = rows_of_batch(graph)
        self.bindings = Bindings.of(graph, strict=False)
        self.fx = fx.Graph()
        self.values: dict[fx.Node, _Value] = {}
        self.taken: dict[tuple[fx.Node, Placement], fx.Node] = {}  # shares of whole values
        self.flows: dict[fx.Node, tuple[Flow, ...]] = {}  # of ops with several results

    def run(self) -> Graph:
        """The whole graph: inputs and parameters, ops, outputs."""
        if self.rows % self.turns:
            raise NotServed(
                f"microbatches={self.turns} do not share the {self.rows} rows of a batch evenly",
                advice=f"a divisor of {self.rows}",
            )
        if wants := [name for name, n in self.graph.inputs.items() if type_of(n).requires_grad]:
            raise NotServed(
                f"the input {wants[0]} wants a gradient, which micro-batches give only to parameters",
                advice=_AS_A_BATCH,
            )
        if self.graph.loss is None or self.graph.backward_from:
            raise NotServed(
                "micro-batches run forward and backward in one call, from one loss, and there is none, or gradients "
                "arrive beside it",
                seen=f"outputs: {', '.join(self.graph.output_names)}; outputs={self.graph.backward_from}",
                advice='loss=, or labels among the inputs; outputs="auto"',
            )
        tops = [n for n in self.graph.nodes if n.op in ("placeholder", "get_attr")]
        for node in tops:
            self._top(node)
        for node in self.graph.nodes:
            if node.op == "call_function":
                self._part(node) if info(node).kind == "part" else self._op(node)
        return self._ended()

    # -- inputs and parameters

    def _top(self, node: fx.Node) -> None:
        about = info(node)
        if about.kind != "input":
            made = self._copy(node)
            wants = about.outputs[0].requires_grad
            lies = OnTime(WHOLE if wants else _EVERYWHERE, not wants and about.kind == "buffer")
            self.values[node] = _Value(lies, made, made)
            return
        type_ = about.outputs[0]
        if type_.shape[:1] != (self.rows,):
            made = self._copy(node)
            self.values[node] = _Value(OnTime(_EVERYWHERE, True), made, made)
            return
        turn = self._copy(node, replace(type_, shape=(self.rows // self.turns, *type_.shape[1:])))
        whole = self.fx.create_node("placeholder", str(node.target), name=f"{node.name}_whole")
        whole.meta["info"] = replace(about, key=f"{about.key}{_WHOLE}")
        self.values[node] = _Value(OnTime(flow(S(0)), True), turn, whole)

    def _copy(self, node: fx.Node, type_: TensorType | None = None) -> fx.Node:
        made = self.fx.create_node(node.op, node.target, node.args, node.kwargs, name=node.name)
        made.meta["info"] = info(node) if type_ is None else replace(info(node), outputs=(type_,))
        return made

    # -- ops

    def _op(self, node: fx.Node) -> None:
        operands = self.bindings.tensors[node]
        if op_name(node) == "identity":  # names are given anew
            self.values[node] = self.values[operands[0]]
            return
        given = [self.values[n] for n in operands]
        if any(g.is_after for g in given):
            self._after(node, operands)
            return
        lies = [g.lies for g in given]
        strategy = strategy_in_turns(node, self.bindings.rules[node], operands, lies, self.turns, self.rows)
        of_inputs = all(g.lies.of_inputs for g in given) and not any(t.requires_grad for t in info(node).outputs)
        if strategy is None and of_inputs:
            strategy = _whole_everywhere(len(operands), len(info(node).outputs))
        if strategy is None:
            self._after(node, operands)
            return
        turn = self._emit(node, operands, strategy)
        is_whole = all(f.value == R for f in strategy.outputs)
        whole = None
        if of_inputs:
            whole = turn if is_whole else self._emit(node, operands, None)
        self.flows[node] = strategy.outputs
        first = strategy.outputs[0]
        self.values[node] = _Value(OnTime(first, of_inputs), turn, whole)

    def _emit(self, node: fx.Node, operands: Sequence[fx.Node], strategy: Strategy | None) -> fx.Node:
        """The op on what its strategy takes; without one, on the whole."""
        about, kwargs = info(node), dict(node.kwargs)
        outputs, random = about.outputs, about.random
        if strategy is None:
            taken = [self.values[n].whole for n in operands]
        else:
            taken = [self._taken(n, f) for n, f in zip(operands, strategy.operands, strict=True)]
        in_time = ("", 1)
        if strategy is not None and strategy.cut is not None:
            here = OneTurn(DeviceMesh((self.turns,), (TIME,)), Choice((strategy,)))
            call = call_of(node)
            for marker, local in ((SHAPE, local_output), (SIZES, _local_sizes)):
                if (name := node.target.local(marker)) is not None:
                    kwargs[name] = local(here, call)
            outputs = tuple(replace(t, shape=local_output(here, call, i)) for i, t in enumerate(outputs))
            if random >= 0:
                in_time = (repr(strategy), self.turns)
        turn = iter(taken)
        arguments = fx.map_arg(kwargs, lambda n: next(turn))
        made = self.fx.create_node("call_function", node.target, (), dict(arguments), name=node.name)
        key = about.key if strategy is not None else fresh_key(self.fx, f"{about.key}{_WHOLE}")
        made.meta["info"] = replace(about, key=key, outputs=outputs, in_time=in_time)
        return made

    def _taken(self, node: fx.Node, wanted: Flow) -> fx.Node:
        """A value in the placement that an op takes it in."""
        value = self.values[node]
        if value.lies.flow.value == wanted.value:
            return value.turn
        whole = value.turn if value.lies.flow.value == R else value.whole
        assert whole is not None
        if wanted.value == R:
            return whole
        key = (whole, wanted.value)
        if key not in self.taken:
            self.taken[key] = self._share(whole, wanted.value)
        return self.taken[key]

    def _share(self, whole: fx.Node, wanted: Placement) -> fx.Node:
        """The share of a turn of a whole value: its rows, or its part of the sum."""
        about, type_ = info(whole), type_of(whole)
        if wanted.is_partial:
            return self._emitted("once", whole, about, type_, turns=self.turns)
        shape = tuple(n // self.turns if d == wanted.dim else n for d, n in enumerate(type_.shape))
        return self._emitted("turn", whole, about, replace(type_, shape=shape), dim=wanted.dim, turns=self.turns)

    def _emitted(self, name: str, of: fx.Node, about: Info, type_: TensorType, **arguments: Any) -> fx.Node:
        """An op on the axis of time, of one value, in that value's module."""
        made = self.fx.create_node("call_function", OPS[name], (), {"input": of, **arguments}, name=f"{of.name}_{name}")
        key = fresh_key(self.fx, f"{about.module}/{name}")
        made.meta["info"] = Info(key, "op", (type_,), about.module, about.source)
        return made

    def _part(self, node: fx.Node) -> None:
        """One of the results of an op with several."""
        producer, place = node.args
        assert isinstance(producer, fx.Node)
        value = self.values[producer]
        made = self._taking(node, value.turn)
        if value.is_after:
            self.values[node] = replace(value, turn=made)
            return
        whole = made if value.whole is value.turn else None
        if value.whole is not None and whole is None:
            whole = self._taking(node, value.whole, _WHOLE)
        flows = self.flows[producer]
        self.values[node] = _Value(OnTime(flows[int(str(place))], value.lies.of_inputs), made, whole)

    def _taking(self, node: fx.Node, producer: fx.Node, suffix: str = "") -> fx.Node:
        place = int(str(node.args[1]))
        made = self.fx.create_node("call_function", operator.getitem, (producer, place), name=node.name)
        about = info(node)
        key = fresh_key(self.fx, f"{about.key}{suffix}") if suffix else about.key
        made.meta["info"] = replace(about, key=key, outputs=(info(producer).outputs[place],))
        return made

    # -- behind the last turn

    def _after(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """An op that runs once, on what turns have added up and on what all of them have."""
        taken = [self._added_up(n, node) for n in operands]
        turn = iter(taken)
        made = self.fx.create_node(
            "call_function", node.target, (), dict(fx.map_arg(dict(node.kwargs), lambda n: next(turn))), name=node.name
        )
        made.meta["info"] = info(node)
        self.values[node] = _Value(OnTime(_EVERYWHERE, False), made, None, is_after=True)

    def _added_up(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        value = self.values[node]
        if value.is_after:
            return value.turn
        if value.lies.is_added and not type_of(node).shape:
            total = self._total(value.turn)
            self.values[node] = _Value(OnTime(_EVERYWHERE, False), total, None, is_after=True)
            return total
        if value.whole is not None and not type_of(node).requires_grad:
            return value.whole
        raise NotServed(
            f"{op_name(reader)} looks at all rows of a batch, and a micro-batch has some of them",
            at=info(reader).source,
            seen=f"{node.name}: {type_of(node)}",
            advice=_AS_A_BATCH,
        )

    def _total(self, node: fx.Node) -> fx.Node:
        return self._emitted("total", node, info(node), type_of(node))

    # -- outputs

    def _ended(self) -> Graph:
        """The graph with the outputs that leave a micro-batch, or are there after the last."""
        graph = self.graph
        results: list[fx.Node] = []
        names: list[str] = []
        types: list[TensorType] = []
        rows_out: list[tuple[str, int]] = []
        leaves: dict[int, Any] = {}
        count = len(graph.output_names)
        for i, (source, name) in enumerate(zip(graph.output.args[0], graph.result_names, strict=True)):
            value = self.values[source]
            if i >= count:
                if value.lies.flow.value != R or value.is_after:
                    raise NotServed(
                        f"{graph.updates[i - count][1]} is written from all rows of a batch, and a micro-batch has "
                        "some of them",
                        at=info(walks.origin(source, lambda n: op_name(n) == "identity")).source,
                        advice=_AS_A_BATCH,
                    )
                results.append(value.turn)
                types.append(info(graph.output).outputs[i])
                continue
            node = value.turn
            if i in graph.differentiable and value.lies.flow == WHOLE:  # of no row
                node = self._total(self._taken(source, flow(P())))
            elif value.lies.is_added and not value.is_after:
                node = self._added_up(source, graph.output)
            elif value.lies.is_cut:
                if not self.keeps_outputs:
                    leaves[i] = NotKept(name)
                    continue
                rows_out.append((name, value.lies.flow.value.dim))
            leaves[i] = Leaf(len(names))
            names.append(name)
            results.append(node)
            types.append(replace(type_of(node), requires_grad=info(graph.output).outputs[i].requires_grad))
        self._check_totals()
        self.fx.output(tuple(results))
        self.fx.output_node().meta["info"] = replace(info(graph.output), outputs=tuple(types))
        made = replace(
            graph,
            fx=self.fx,
            output_leaves=tuple(leaves[v.position] if isinstance(v, Leaf) else v for v in graph.output_leaves),
            output_names=tuple(names),
            turns=self.turns,
            rows_out=tuple(rows_out),
        )
        self._drop_what_is_whole_in_vain()
        return replace(made, in_turns=self._in_turns())

    def _drop_what_is_whole_in_vain(self) -> None:
        """Whole values that nobody asked for leave, draws among them: their rows are drawn."""
        for node in reversed(list(self.fx.nodes)):
            is_unread = not node.users and node.op != "output"
            is_again = node.op == "call_function" or info(node).key.endswith(_WHOLE)
            if is_unread and is_again and (info(node).random < 0 or info(node).key.endswith(_WHOLE)):
                self.fx.erase_node(node)

    def _check_totals(self) -> None:
        """Raise a letter where gradients go through more than one of the numbers that turns add up."""
        totals = [n for n in self.fx.find_nodes(op="call_function", target=OPS["total"]) if type_of(n).requires_grad]
        if len(totals) > 1:
            raise NotServed(
                "the loss is no sum over rows: it is computed from several sums over a batch, and gradients of a "
                "micro-batch need all of them at once",
                at=info(totals[-1]).source,
                seen=", ".join(info(n.all_input_nodes[0]).key for n in totals),
                advice=_AS_A_BATCH,
            )

    def _in_turns(self) -> tuple[str, ...]:
        found = {info(v.turn).key for n, v in self.values.items() if n.op == "placeholder" and v.lies.is_cut}
        return tuple(sorted(found))


def _local_sizes(here: Here, call: OpCall) -> tuple[int, ...]:
    dim = call.arguments.get("dim", 0)
    return tuple(local_output(here, call, i)[dim] for i in range(len(call.outputs)))


def _whole_everywhere(operands: int, outputs: int) -> Strategy:
    return Strategy((_EVERYWHERE,) * operands, (_EVERYWHERE,) * outputs)
