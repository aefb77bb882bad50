"""Raise an error where an output of a padded call depends on the padding, and name the first op that mixes it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.graph.graph import Graph, info, op_name
from autopar.letters import Letter, NotServed
from autopar.module.reach.by_rule import by_rule
from autopar.module.reach.moves import moved, view
from autopar.module.reach.numbers import where
from autopar.module.reach.pairs import OpPair, same_words, type_of_output
from autopar.module.reach.rows import attention, described_attention, loss_of_classes, running, softmax
from autopar.module.reach.values import Reach, Unclear, exact_shape, given_value, is_padded, is_plain, number, unknown
from autopar.ops.entry import Op, facts_of

_ADVICE = (
    "zeros for what is hidden before a sum (x * mask), masked_fill(mask == 0, -inf) before a softmax or a "
    "maximum, the sum of the mask in place of the length, targets of -100; "
    "all from a mask among the inputs whose 0 means hidden; or pad_to=None"
)

# Functions that carry reach through an op, by the `reach` of its entry.
TRANSFERS: dict[str, Callable[[OpPair], Reach | list[Reach]]] = {
    "": by_rule,
    "moved": moved,
    "view": view,
    "choice": where,
    "softmax": softmax,
    "running": running,
    "classes": loss_of_classes,
    "attention": attention,
    "described attention": described_attention,
}


def check_reach(exact: Graph, longer: Graph, fills: Mapping[str, float]) -> None:
    """Raise an error where an output depends on padding.

    `fills` gives the padding of inputs, by their names in the graph; 0 for others.
    """
    first, second = list(exact.nodes), list(longer.nodes)
    if [_kind(n) for n in first] != [_kind(n) for n in second]:
        raise NotServed("with pad_to the model would run other ops at another length", advice="pad_to=None")
    with torch.device("cpu"):  # whatever the caller's default is
        reaches = _walked(first, second, fills)
    for name, value in zip(longer.output_names, longer.output.args[0], strict=False):
        reach = reaches[value]
        is_scattered = not all(is_plain(factors) for factors in reach.dims)
        if reach.is_reached or is_scattered:
            culprit = _first_reached(value, reaches) if reach.is_reached else value
            raise NotServed(
                f"with pad_to the model would compute something else: output {name!r} depends on the padding",
                at=info(culprit).source,
                seen=f"{op_name(culprit)}: {_why(culprit, first[second.index(culprit)], reaches)}",
                advice=_ADVICE,
            )


def _walked(first: Sequence[fx.Node], second: Sequence[fx.Node], fills: Mapping[str, float]) -> dict[fx.Node, Reach]:
    """The reach of each value of the longer program."""
    reaches: dict[fx.Node, Reach] = {}
    parts: dict[fx.Node, list[Reach]] = {}
    for here, node in zip(first, second, strict=True):
        kind = info(node).kind
        if kind == "op":
            operands = [_operand(n, reaches) for n in node.target.operands(node.kwargs)]
            parts[node] = _reached(OpPair(node, here, operands, reaches))
            reaches[node] = parts[node][0]
        elif kind == "part":
            reaches[node] = parts[node.args[0]][node.args[1]]
        elif kind != "output":
            fill = fills.get(info(node).key, 0.0) if kind == "input" else None
            reaches[node] = given_value(here, node, fill)
    return reaches


def _operand(value: Any, reaches: Mapping[fx.Node, Reach]) -> Reach | None:
    if isinstance(value, fx.Node):
        return reaches[value]
    return number(value) if isinstance(value, (int, float)) else None


def _kind(node: fx.Node) -> Any:
    return node.op, info(node).kind, op_name(node), [(len(t.shape), t.dtype) for t in info(node).outputs]


def _first_reached(value: fx.Node, reaches: Mapping[fx.Node, Reach]) -> fx.Node:
    """The first op on the way to a value whose output padding reaches, but none of its operands."""
    while befores := [n for n in value.all_input_nodes if reaches[n].is_reached]:
        value = befores[0]
    return value


def _why(culprit: fx.Node, exact: fx.Node, reaches: Mapping[fx.Node, Reach]) -> str:
    if not same_words(exact, culprit) and isinstance(culprit.target, Op) and not facts_of(culprit.target.name).sized:
        return "it is given the length itself, which padding changes"
    padded = [n for n in culprit.all_input_nodes if bool(reaches[n].pad.any())]
    if not padded:
        return "its numbers depend on the length"
    named = [f"{n} ({', '.join(map(str, info(n).outputs))})" for n in padded]
    return f"it mixes what stands in padding with the rest, in {', '.join(named)}"


def _reached(pair: OpPair) -> list[Reach]:
    """The reach of each output of an op; all of it where the op is unclear and meets padding."""
    try:
        return _transferred(pair)
    except (Unclear, Letter, RuntimeError, ValueError, IndexError, TypeError):
        # The transfer function does not foresee such arguments, so nothing is known about the results.
        outputs = range(len(info(pair.node).outputs))
        given = [pair.reaches[n] for n in pair.node.all_input_nodes]
        is_met = any(bool(r.pad.any()) or is_padded(r.dims) for r in given)
        is_met = is_met or any(is_padded(pair.dims(i)) for i in outputs)
        is_clean = not is_met and isinstance(pair.node.target, Op) and same_words(pair.exact, pair.node)
        return [unknown(pair.dims(i), type_of_output(pair, i), pad=not is_clean) for i in outputs]


def _transferred(pair: OpPair) -> list[Reach]:
    """Each output's reach by the op's transfer function or rule; raises `Unclear` where neither tells."""
    op = pair.node.target
    if not isinstance(op, Op):
        raise Unclear
    if not facts_of(op.name).sized and not same_words(pair.exact, pair.node):
        raise Unclear
    found = TRANSFERS[facts_of(op.name).reach](pair)
    found = found if isinstance(found, list) else [found]
    shapes = [(exact_shape(r), tuple(r.shape)) for r in found]
    if shapes != [(e.shape, n.shape) for e, n in zip(info(pair.exact).outputs, info(pair.node).outputs, strict=True)]:
        raise Unclear
    return found
