"""Loops over experts become one op, which computes the rows that each expert gets.

    before    y0 = linear(relu(linear(where(any(eq(ids, 0), 1), x, 0), up0)), down0)
              a0 = zeros_like(x) + sum(where(eq(ids, 0), weights * y0, 0), 1)
              y1 = ...;  a1 = a0 + sum(where(eq(ids, 1), weights * y1, 0), 1)
    after     a1 = experts(x, ids, weights, stack([up0, up1]), stack([down0, down1]), body="relu")

A loop is folded only if every round of it is read (`expert_rounds.py`), all rounds are equal but for the number of the
expert and its matrices, and nothing else reads what is between. Everything else stays as it is.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.graph.nodes import is_value
from autopar.ops.entry import OPS
from autopar.ops.experts import imbalance_here
from autopar.tracer.alike import Numbers
from autopar.tracer.choices import Choice, Masks
from autopar.tracer.chosen import OF_CHOSEN_ROWS
from autopar.tracer.expert_matrices import matrices_of
from autopar.tracer.expert_rounds import Reading
from autopar.tracer.expert_values import Parts, Value, in_both_orders, parts_of
from autopar.tracer.folded_values import Rows, body_of
from autopar.tracer.named_dims import LAYOUTS, Atom, Unread, flat
from autopar.tracer.rewriting import emit, forward_past

_ZEROS = ("zeros", "zeros_like")
_BEFORE = "_autopar_before_folds"  # The graph's own dict holds the nodes that it had.


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of a loop does; rounds are equal if they differ by expert and matrices alone."""

    choice: Choice
    parts: Parts
    rows: tuple[Atom, ...]  # dims of rows, as they lie in the result
    adds: bool  # Else it takes the place of what was there before.
    end: fx.Node = field(compare=False)
    before: fx.Node | None = field(compare=False)

    @property
    def expert(self) -> int:
        assert self.choice.expert is not None
        return self.choice.expert

    @property
    def slots(self) -> tuple[Atom, ...]:
        return tuple(atom for atom in flat(self.choice.at) if atom not in self.rows)

    @property
    def input(self) -> Value:
        """The rows, before they are chosen."""
        return next(one for one in self.parts.down.walk() if one.op == "leaf")


def loops_over_experts_are_folded(graph: Graph) -> None:
    """Replace loops over experts by the op that computes chosen rows alone; see above."""
    names = {op_name(node) for node in graph.nodes}
    if "where" not in names or not names & {"eq", "one_hot"}:
        return
    rounds = _Rounds(Numbers(graph))
    nodes = list(graph.nodes)
    gone: set[fx.Node] = set()
    for node in reversed(nodes):
        if op_name(node) in ("add", "where", "sum") and node not in gone:
            gone |= _replaced(rounds.loop(node), rounds.numbers)
    if gone:
        graph.fx.__dict__[_BEFORE] = frozenset(nodes)


def without_folded(graph: Graph) -> Graph:
    """The graph without what it says of chosen rows where a loop over experts was that is folded."""
    before = graph.fx.__dict__.pop(_BEFORE, None)
    if before is None:
        return graph
    ops = (node for node in graph.nodes if node in before and info(node).kind == "op")
    left = {info(node).source for node in ops if op_name(node) not in LAYOUTS}

    def holds(line: str) -> bool:
        return not line.startswith(OF_CHOSEN_ROWS) or line.rpartition(", at ")[2] in left

    return replace(graph, assumptions=tuple(filter(holds, graph.assumptions)))


def _replaced(rounds: Sequence[Round], numbers: Numbers) -> set[fx.Node]:
    """Replace a loop by one op; the nodes that are read no more, none where it stays."""
    gone = _unread_without(rounds) if rounds else set()
    if not gone:
        return gone
    try:
        folded = _folded(rounds, numbers)
    except Unread:
        return set()
    return gone if forward_past(rounds[-1].end, folded) else set()


@dataclass(slots=True)
class _Rounds:
    """The rounds of loops, each read once."""

    numbers: Numbers
    known: dict[fx.Node, Round | None] = field(default_factory=dict)

    def loop(self, end: fx.Node) -> list[Round]:
        """The rounds that end here, in the order of the program; none where nothing can be folded."""
        rounds: list[Round] = []
        experts: set[int] = set()
        node: fx.Node | None = end
        while node is not None and (found := self.round(node)) is not None:
            if found.expert in experts or (rounds and found != rounds[0]):
                break
            rounds.insert(0, found)
            experts.add(found.expert)
            node = found.before
        if not rounds or experts != set(range(min(experts), min(experts) + len(experts))):
            return []
        slots = math.prod(atom.size for atom in rounds[0].slots)
        return rounds if slots < len(rounds) else []  # Else a row may go to all experts, and nothing is saved.

    def round(self, node: fx.Node) -> Round | None:
        """The round that ends with a node."""
        if node not in self.known:
            self.known[node] = None
            for before, added, condition in _ends(node):
                with contextlib.suppress(Unread):
                    masks = Masks.of(condition, self.numbers)
                    self.known[node] = _read(node, before, added, masks, self.numbers)
                    break
        return self.known[node]


def _ends(node: fx.Node) -> Iterator[tuple[fx.Node | None, fx.Node, fx.Node]]:
    """The values that a round may begin with and add, and the condition under which it does."""
    how: Any = node.kwargs
    if op_name(node) == "add" and "alpha" not in how:
        for before, added in in_both_orders(node):
            if is_value(before) and is_value(added) and (chosen := _chosen(added)):
                yield before, added, chosen.kwargs["condition"]
    elif op_name(node) == "where" and is_value(how["other"]):
        if is_value(how["input"]):
            yield how["other"], node, how["condition"]
    elif op_name(node) in ("where", "sum") and (chosen := _chosen(node)):
        yield None, node, chosen.kwargs["condition"]


def _chosen(node: Any) -> fx.Node | None:
    """The `where` that gives zero to what is not chosen, behind layouts, casts and a sum."""
    while op_name(node) in LAYOUTS or op_name(node) in ("to", "sum"):
        node = node.kwargs["input"]
    is_chosen = op_name(node) == "where" and not is_value(node.kwargs["other"]) and node.kwargs["other"] == 0
    return node if is_chosen else None


def _read(node: fx.Node, before: fx.Node | None, added: fx.Node, masks: Masks, numbers: Numbers) -> Round:
    """The round of a node that adds or puts a value into what was before."""
    result = type_of(node)
    for one in filter(None, (before, added)):
        if (type_of(one).shape, type_of(one).dtype) != (result.shape, result.dtype):
            raise Unread("a result of another form")
    is_placed = added is node and before is not None
    value, met = _onto(_without_casts(Reading(masks, numbers, before).value(added)))
    *outer, last = value.dims
    rows = flat(tuple(outer))
    if met not in ((None, (*rows, *last)) if is_placed else (None,)):
        raise Unread("rows and columns lie otherwise")
    slots = frozenset(flat(masks.choice.at)) - set(rows)
    found = Round(
        masks.choice,
        parts_of(value, frozenset(rows), slots),
        rows,
        adds=met is not None or not is_placed,
        end=node,
        before=before,
    )
    _check_dims(found, last)
    if value.op != "slots" or is_placed:
        _check_places(node if is_placed else _chosen(added), masks, rows)
    is_once = not found.parts.per_slot or (value.op == "slots" and is_placed)
    if slots and (not found.adds or (is_once and not _is_distinct(found))):
        raise Unread("a row may be put in its place twice")
    if result.dtype != type_of(found.input.leaf).dtype:
        raise Unread("a result of another dtype")
    return found


def _check_dims(one: Round, last: Sequence[Atom]) -> None:
    """Raise where a round's rows are not those of its ids, or come from several values."""
    if len(last) != 1 or last[0].name != "o" or set(one.rows) - set(flat(one.choice.at)):
        raise Unread("columns of something else")
    if len({value for value in one.parts.down.walk() if value.op == "leaf"}) != 1:
        raise Unread("several values of rows")
    at = one.input.said[1]
    if set(flat(at)) - set(one.rows) != set(at[-1]) or len(at[-1]) != 1:
        raise Unread("rows of something else")


def _without_casts(value: Value) -> Value:
    """The value before it is cast to the dtype of the result."""
    while value.op == "to":
        value = value.given[0]
    return value


def _onto(value: Value) -> tuple[Value, tuple[Atom, ...] | None]:
    """The value that is added to rows which are read and put back, and their dims; else the value alone."""
    if value.op == "slots" and value.given[0].op == "onto":
        inner = value.given[0]
        return replace(value, given=inner.given), inner.said
    if value.op == "onto":
        return value.given[0], value.said
    return value, None


def _check_places(node: Any, masks: Masks, rows: Sequence[Atom]) -> None:
    """Raise where a mask chooses something else than rows."""
    if set(flat(masks.dims(node.kwargs["condition"]))) != set(rows):
        raise Unread("a mask of something else than rows")


def _is_distinct(one: Round) -> bool:
    """Whether the ids of a row are different: they are the places of its largest scores."""
    node: Any = one.choice.ids
    while op_name(node) in ("view", "identity", "to", "contiguous", "clone"):
        node = node.kwargs["input"]
    if node.target is not operator.getitem or node.args[1] != 1 or op_name(node.args[0]) != "topk":
        return False
    shape = type_of(node).shape
    is_last = node.args[0].kwargs.get("dim", -1) % len(shape) == len(shape) - 1
    return is_last and one.slots == flat(one.choice.at)[-1:] and one.slots[0].size == shape[-1]


def _unread_without(rounds: Sequence[Round]) -> set[fx.Node]:
    """The nodes that nothing reads once a loop is replaced; none where its products are read elsewhere."""
    end = rounds[-1].end
    products = {value.leaf for one in rounds for value in one.parts.down.walk() if value.op == "linear"}
    gone = {end}
    node = end
    first = min(products)
    while node is not first:
        node = node.prev
        if node.op == "call_function" and info(node).random < 0 and node.users and gone.issuperset(node.users):
            gone.add(node)
    return gone if products <= gone else set()


def _folded(rounds: Sequence[Round], numbers: Numbers) -> fx.Node:
    """The value of a loop, by one op for all rounds."""
    end = rounds[-1].end
    by_expert = sorted(rounds, key=lambda each: each.expert)
    one = by_expert[0]
    result = type_of(end)
    with end.graph.inserting_before(end):
        rows = Rows(end, one.rows, one.slots)
        body, layout = body_of(one.parts.down.given[0])
        ids = rows.ids(one.choice, one.expert)
        given = dict(
            input=rows.columns(one.input),
            ids=ids,
            weights=rows.weights(one.parts.weights, result.torch_dtype),
            **matrices_of(end, [each.parts.down for each in by_expert], numbers),
        )
        how = dict(body=body, layout=layout, imbalance=imbalance_here())
        made = emit(end, "experts", type_of(given["input"]), **OPS["experts"].bind((), {**given, **how}))
        made = rows.as_before(made, result.shape)
        before = rounds[0].before
        if before is None or op_name(before) in _ZEROS:
            return made
        if one.adds:
            return emit(end, "add", result, input=before, other=made)
        return emit(
            end, "where", result, condition=rows.chosen(ids, len(rounds), result.shape), input=made, other=before
        )
