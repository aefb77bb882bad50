"""Write the graph of one micro-batch: the batch of a call passes in turns through one program.

    before    x: f32[8, 64] = input x;  h = linear(x, w);  e = mse_loss(h, y);  s = sum(e);  loss = div(s, 512)
    after     x: f32[2, 64] = input x             # of every turn its rows
              h = linear(x, w);  e = mse_loss(h, y);  s = sum(e);  loss = total(div(s, 512))

A walk in program order gives each value its placement on the axis of time (`time_axis.py`). Values that depend on
inputs alone are also made whole, where an op needs all rows: the count of all targets, say, by which every turn divides
its sum. So the mean is that of the batch, never one of means. What turns add up is a `total`; ops behind it run once,
after the last turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name, rows_of_batch, type_of
from autopar.graph.verify import verify
from autopar.letters import NotServed
from autopar.ops.entry import OPS
from autopar.passes import run_passes
from autopar.sharding.notation import public_name
from autopar.sharding.placement import P, Placement, R, S, flow
from autopar.sharding.strategies import Strategy
from autopar.tracer.passes import drop_dead, one_name_per_fan_out
from autopar.turns.time_axis import WHOLE, OnTime, early_gradient_in_float16, strategy_in_turns
from autopar.turns.writer import ALL, EVERYWHERE, Value, Writer

_AS_A_BATCH = "microbatches=1, and accumulation= of calls with fewer rows"


def in_micro_batches(graph: Graph, turns: int, keeps_outputs: bool, even_one: bool = False) -> Graph:
    """The graph of one of `turns` micro-batches of the same batch.

    A single one is left as it was unless `even_one`: then its loss is the sum of one turn. Outputs beside a loss that
    are rows of a micro-batch leave it only where `keeps_outputs`. A letter names an op that cannot run on some of the
    rows, as it depends on all of them, such as batch norm in training. A graph keeps those that were made of it: a
    search asks for them again and again.
    """
    if turns == 1 and not even_one:
        return graph
    made: dict[tuple[int, bool], Graph] = graph.fx.__dict__.setdefault("_autopar_turns", {})
    if (turns, keeps_outputs) not in made:
        found = (_MicroBatch if turns > 1 else _WholeBatch)(graph, turns, keeps_outputs).run()
        run_passes("graph", (drop_dead, one_name_per_fan_out), found, verify)
        found.fx.__dict__.pop("_autopar_keys", None)
        made[turns, keeps_outputs] = found
    return made[turns, keeps_outputs]


class _MicroBatch(Writer):
    """Writes the graph of one micro-batch."""

    total = "total"

    def __init__(self, graph: Graph, turns: int, keeps_outputs: bool) -> None:
        super().__init__(graph, turns)
        self.keeps_outputs = keeps_outputs
        self.strategies: dict[tuple[int, tuple[OnTime, ...]], Strategy | None] = {}  # Calls that are alike share one.
        self.rows = rows_of_batch(graph)

    def run(self) -> Graph:
        """The whole graph: inputs and parameters, ops, outputs."""
        _check(self.graph, self.turns, self.rows)
        tops = [n for n in self.graph.nodes if n.op in ("placeholder", "get_attr")]
        for node in tops:
            self._top(node)
        for node in self.graph.nodes:
            if node.op == "call_function":
                self.part(node) if info(node).kind == "part" else self._op(node)
        return self._ended()

    # -- inputs and parameters

    def _top(self, node: fx.Node) -> None:
        about = info(node)
        if about.kind != "input":
            made = self.copy(node)
            wants = about.outputs[0].requires_grad
            lies = OnTime(WHOLE if wants else EVERYWHERE, not wants and about.kind == "buffer", of_batch=False)
            self.values[node] = Value(lies, made, made)
            return
        type_ = about.outputs[0]
        if type_.shape[:1] != (self.rows,):
            made = self.copy(node)
            self.values[node] = Value(OnTime(EVERYWHERE, True, of_batch=False), made, made)
            return
        turn = self.copy(node, replace(type_, shape=(self.rows // self.turns, *type_.shape[1:])))
        whole = self.fx.create_node("placeholder", str(node.target), name=f"{node.name}_whole")
        whole.meta["info"] = replace(about, key=f"{about.key}{ALL}")
        self.values[node] = Value(OnTime(flow(S(0)), True, of_batch=True), turn, whole)

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
        alike = self.bindings.kinds[node], tuple(lies)
        if alike not in self.strategies:
            rule = self.bindings.rules[node]
            self.strategies[alike] = strategy_in_turns(node, rule, operands, lies, self.turns, self.rows)
        strategy = self.strategies[alike]
        of_inputs = all(g.lies.of_inputs for g in given) and not any(t.requires_grad for t in info(node).outputs)
        if strategy is None and of_inputs:
            strategy = _whole_everywhere(len(operands), len(info(node).outputs))
        if strategy is None:
            self._after(node, operands)
            return
        turn = self.emit(node, operands, strategy)
        is_whole = all(f.value == R for f in strategy.outputs)
        whole = None
        if of_inputs:
            whole = turn if is_whole else self.emit(node, operands, None)
        self.flows[node] = strategy.outputs
        first = strategy.outputs[0]
        self.values[node] = Value(OnTime(first, of_inputs, any(g.of_batch for g in lies)), turn, whole)

    def share(self, whole: fx.Node, wanted: Placement) -> fx.Node:
        """The share of a turn of a whole value: its rows, or its part of a sum."""
        about = info(whole)
        type_ = type_of(whole)
        if wanted.is_partial:
            return self.emitted("once", whole, about, type_, turns=self.turns)
        shape = tuple(n // self.turns if d == wanted.dim else n for d, n in enumerate(type_.shape))
        size = wanted.blocks[0] if wanted.blocks else type_.shape[wanted.dim]
        made = replace(type_, shape=shape)
        return self.emitted("turn", whole, about, made, dim=wanted.dim, turns=self.turns, size=size)

    # -- behind the last turn

    def _after(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Write an op that runs once, on sums of turns and on values that all turns have."""
        taken = [self._added_up(n, node) for n in operands]
        turn = iter(taken)
        made = self.fx.create_node(
            "call_function", node.target, (), dict(fx.map_arg(dict(node.kwargs), lambda n: next(turn))), name=node.name
        )
        made.meta["info"] = info(node)
        self.values[node] = Value(OnTime(EVERYWHERE, False, of_batch=True), made, None, is_after=True)

    def _added_up(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        value = self.values[node]
        if value.is_after:
            return value.turn
        if value.lies.is_added and not type_of(node).shape:
            total = self.add_up(value.turn)
            self.values[node] = Value(OnTime(EVERYWHERE, False, of_batch=True), total, None, is_after=True)
            return total
        if value.whole is not None and not type_of(node).requires_grad:
            return value.whole
        raise NotServed(
            f"{op_name(reader)} {self._why_all_rows(reader)}, and a micro-batch has some of them",
            at=info(reader).source,
            seen=f"{node.name}: {type_of(node)}",
            advice=self._said_of_rule(reader) + _AS_A_BATCH,
        )

    def _why_all_rows(self, reader: fx.Node) -> str:
        """Why an op needs all rows of a batch, as far as is known."""
        operands = [self.values[n] for n in reader.all_input_nodes]
        if any(value.is_after or value.lies.is_added for value in operands):
            return "takes a sum over all rows of a batch"
        if self._lacks_rule(reader):
            return "has no sharding rule, so it may look at all rows of a batch"
        return "looks at all rows of a batch"

    def _lacks_rule(self, reader: fx.Node) -> bool:
        return reader.op == "call_function" and self.bindings.rules[reader] is None

    def _said_of_rule(self, reader: fx.Node) -> str:
        """The rule with which micro-batches would pass an op that has none, or ""."""
        if not self._lacks_rule(reader):
            return ""
        name = public_name(op_name(reader))
        return f"autopar.rule({name!r}, LINE), where its rows are computed each by itself: docs/rules.md; or "

    # -- outputs

    def _ended(self) -> Graph:
        """The graph with the outputs that leave a micro-batch, or exist after the last."""
        sources = list(self.graph.output.args[0])
        count = len(self.graph.output_names)
        results = [self._output(i, source) for i, source in enumerate(sources[:count])]
        results += [self._update(i, source) for i, source in enumerate(sources[count:])]
        self._check_totals()
        lies = zip(self.graph.output_names, (self.values[source].lies for source in sources), strict=False)
        rows = [(name, one.flow.value.dim) for name, one in lies if one.is_cut] if self.keeps_outputs else []
        made = self.ended(results, turns=self.turns, in_turns=self._in_turns(), rows_out=tuple(rows))
        self._drop_what_is_whole_in_vain()
        return made

    def _output(self, place: int, source: fx.Node) -> fx.Node | None:
        """An output as it leaves; None where it is rows that are not kept."""
        value = self.values[source]
        if place in self.graph.differentiable and value.lies.flow == WHOLE:  # independent of rows: one turn adds it
            return self.add_up(self.taken(source, flow(P())))
        if value.lies.is_added and place not in self.graph.differentiable and type_of(source).requires_grad:
            type_ = replace(type_of(source), requires_grad=False)  # backward starts from the loss alone
            return self.add_up(self.emitted("detach", value.turn, info(source), type_))
        if value.lies.is_added:
            return self._added_up(source, self.graph.output)
        return None if value.lies.is_cut and not self.keeps_outputs else value.turn

    def _update(self, place: int, source: fx.Node) -> fx.Node:
        """The new value of a buffer, which every turn makes alike."""
        value = self.values[source]
        if value.whole is not None:
            return value.whole
        if value.lies.flow.value != R or value.is_after:
            raise NotServed(
                f"{self.graph.updates[place][1]} is written from all rows of a batch, and a micro-batch has some of "
                "them",
                at=info(walks.origin(source, lambda n: op_name(n) == "identity")).source,
                advice=_AS_A_BATCH,
            )
        return value.turn

    def _drop_what_is_whole_in_vain(self) -> None:
        """Remove whole values that nothing reads, even random ones: their rows are drawn instead."""
        for node in reversed(list(self.fx.nodes)):
            is_unread = not node.users and node.op != "output"
            is_again = node.op == "call_function" or info(node).key.endswith(ALL)
            if is_unread and is_again and (info(node).random < 0 or info(node).key.endswith(ALL)):
                self.fx.erase_node(node)

    def _check_totals(self) -> None:
        """Raise a letter where gradients go through more than one of the turns' sums."""
        totals = [n for n in self.fx.find_nodes(op="call_function", target=OPS["total"]) if type_of(n).requires_grad]
        if len(totals) > 1:
            raise NotServed(
                "the loss is not a sum over rows: it is computed from several sums over a batch, and gradients of a "
                "micro-batch need all of them at once",
                at=info(totals[-1]).source,
                seen=", ".join(info(n.all_input_nodes[0]).key for n in totals),
                advice=_AS_A_BATCH,
            )

    def _in_turns(self) -> tuple[str, ...]:
        """Names of the inputs of which a turn takes its rows."""
        found = {info(v.turn).key for n, v in self.values.items() if n.op == "placeholder" and v.lies.is_cut}
        return tuple(sorted(found))


class _WholeBatch(_MicroBatch):
    """Copies a graph whose one turn has all rows, so that every op may look at all of them."""

    def run(self) -> Graph:
        """The graph with a total of its loss, from which the backward of a turn starts."""
        _check(self.graph, self.turns, self.rows)
        made: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and info(node).kind == "op" and op_name(node) == "identity":
                made[node] = made[node.all_input_nodes[0]]  # names are given anew
            elif node.op != "output":
                made[node] = self.fx.node_copy(node, made.__getitem__)
        sources = list(self.graph.output.args[0])
        count = len(self.graph.output_names)
        results = [self._left(i, source, made[source]) for i, source in enumerate(sources[:count])]
        return self.ended([*results, *(made[source] for source in sources[count:])], turns=1)

    def _left(self, place: int, source: fx.Node, made: fx.Node) -> fx.Node | None:
        """An output as it leaves; None where it is rows that are not kept."""
        if place in self.graph.differentiable:
            return self.add_up(made)
        is_rows = type_of(source).shape[:1] == (self.rows,)
        return None if is_rows and not self.keeps_outputs else made


def _check(graph: Graph, turns: int, rows: int) -> None:
    """Raise a letter where a graph cannot run in so many turns of a batch of so many rows."""
    if rows % turns:
        raise NotServed(
            f"microbatches={turns} do not share the {rows} rows of a batch evenly",
            advice=f"a divisor of {rows}",
        )
    if (half := early_gradient_in_float16(graph)) is not None:
        raise NotServed(
            "gradients of float16 need the scale of the loss before they are made, and those of micro-batches are "
            "made in forward",
            at=info(half).source,
            seen=f"{half.name}: {type_of(half)}",
            advice="bfloat16, or microbatches=1",
        )
    if wants := [name for name, n in graph.inputs.items() if type_of(n).requires_grad]:
        raise NotServed(
            f"the input {wants[0]} wants a gradient, which micro-batches give only to parameters",
            advice="detach() of the input; or microbatches=1, without stages, and accumulation=",
        )
    if graph.loss is None or graph.backward_from:
        raise NotServed(
            "micro-batches run forward and backward in one call, from one loss, and there is none, or gradients "
            "arrive beside it",
            seen=f"outputs: {', '.join(graph.output_names)}; outputs={graph.backward_from}",
            advice='loss=, or labels among the inputs; outputs="auto"; torch.no_grad() around calls that train nothing',
        )


def _whole_everywhere(operands: int, outputs: int) -> Strategy:
    return Strategy((EVERYWHERE,) * operands, (EVERYWHERE,) * outputs)
