"""Placements of values on the axis of time, whose "devices" are the turns of one device.

    S(0)      each turn has its own rows of the value
    R         each turn has the whole value, which is in memory all the while
    P(sum)    the value is the sum over turns: it is added up

Rules, strategies and gradients are those of any axis. What differs is that no turn sees what another one has: nothing
is converted along this axis. Only a value that depends on inputs alone is available in any placement, as every turn has
the inputs; and a number that the turns add up is whole after the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from autopar.graph.graph import Graph, TensorType, call_of, info, op_name, type_of
from autopar.graph.nodes import wants_gradient
from autopar.ops.entry import facts_of
from autopar.runtime.collectives import TIME
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.notation import Binding
from autopar.sharding.placement import Flow, P, Placement, R, Sharding, flow
from autopar.sharding.strategies import Choice, Strategy, replicated, strategies_on_one_axis, values

WHOLE = Flow(R, P())  # The full value in every turn; the turns' gradients are added up.
ADDED = flow(P())  # The turns' values are added up.


def early_gradient_in_float16(graph: Graph) -> fx.Node | None:
    """The first op with a float16 gradient, or None where there is none.

    Such a gradient needs the scale of the loss before it is made, and turns scale gradients after.
    """
    return next((n for n in graph.nodes if info(n).kind == "op" and _has_gradient_in_float16(n)), None)


def _has_gradient_in_float16(node: fx.Node) -> bool:
    return any(t.dtype == "float16" and t.requires_grad for t in info(node).outputs)


@dataclass(frozen=True, slots=True)
class OnTime:
    """The placement of a value on the axis of time, and whether every turn can also have all of it."""

    flow: Flow
    of_inputs: bool  # is it made of inputs and constants alone, without a gradient?
    of_batch: bool  # does it depend on the rows of the batch? A table of as many rows does not

    @property
    def is_cut(self) -> bool:
        return self.flow.value.is_shard

    @property
    def is_added(self) -> bool:
        return self.flow.value.is_partial


@dataclass(frozen=True, slots=True)
class OneTurn:
    """The first turn as the one device of a mesh, for a local form that asks where a part lies."""

    mesh: DeviceMesh
    choice: Choice
    coordinate: tuple[int, ...] = (0,)
    random_key: None = None

    def lies(self, operand: int) -> Sharding:
        return values(self.choice.operand(operand))

    def leaves(self, output: int = 0) -> Sharding:
        return values(self.choice.output(output))


def strategy_in_turns(
    node: fx.Node,
    binding: Binding | None,
    operands: Sequence[fx.Node],
    given: Sequence[OnTime],
    turns: int,
    rows: int = 0,
    cut: Placement | None = None,
) -> Strategy | None:
    """The strategy by which an op runs in turns on operands that lie so; None where there is none.

    A whole operand may be taken as rows of it, or as a number that one turn adds to a sum; one that depends on inputs
    alone may be taken in any placement. Preferred are results that are cut as an operand of the batch is, or in as many
    rows as the batch has, if they are available whole too; else whole ones; then the fewest changes of operands. With
    `cut` the result must be cut so.
    """
    of_inputs = all(g.of_inputs for g in given) and not any(t.requires_grad for t in info(node).outputs)
    has_rows = of_inputs and info(node).outputs[0].shape[:1] == (rows,)
    should_be_cut = has_rows or any(g.is_cut and g.of_batch for g in given)
    best = None
    cost = (True, len(given) * 2 + 1)
    for strategy in _strategies(node, binding, operands, given):
        if cut is not None and strategy.outputs[0].value != cut:
            continue
        changes = _changes(strategy, given, operands, turns)
        if changes is None or not _adds_up(strategy, info(node).outputs):
            continue
        results = [f.value for f in strategy.outputs]
        is_other = all(r == R for r in results) if should_be_cut else any(r.is_shard for r in results)
        if (is_other, changes) < cost and _runs_in_turns(node, binding, strategy, turns):
            best = strategy
            cost = (is_other, changes)
    return best


def _strategies(
    node: fx.Node, binding: Binding | None, operands: Sequence[fx.Node], given: Sequence[OnTime]
) -> tuple[Strategy, ...]:
    gives = [t.requires_grad for t in info(node).outputs]
    if binding is None:
        return replicated(len(operands), [type_of(n).requires_grad for n in operands], gives)
    wants = list(map(wants_gradient, node.target.operands(node.kwargs)))
    return strategies_on_one_axis(binding, wants, gives, _blocks(binding, given))


def _blocks(binding: Binding, given: Sequence[OnTime]) -> dict[str, set[tuple[int, ...]]]:
    """The blocks in which operands are cut, by factor."""
    found: dict[str, set[tuple[int, ...]]] = {}
    rows = [row for row in binding.operands if row is not None]
    for row, lies in zip(rows, given, strict=True):
        placement = lies.flow.value
        if placement.is_shard and placement.blocks and row[placement.dim].factor:
            found.setdefault(row[placement.dim].factor, set()).add(placement.blocks)
    return found


def _changes(strategy: Strategy, given: Sequence[OnTime], operands: Sequence[fx.Node], turns: int) -> int | None:
    """Weighted number of operands that are taken otherwise than they lie; None where one cannot be."""
    count = 0
    for taken, lies, node in zip(strategy.operands, given, operands, strict=True):
        if taken.value == lies.flow.value and (taken.gradient == lies.flow.gradient or not type_of(node).requires_grad):
            continue
        if not lies.of_inputs and lies.flow.value != R:
            return None
        if taken.value == R and not lies.of_inputs:  # only the gradient differs, and nothing converts that
            return None
        if taken.value.is_shard and not _is_even(taken.value, type_of(node).shape, turns):
            return None
        count += 1 if lies.of_inputs else 2
    return count


def _is_even(placement: Placement, shape: tuple[int, ...], turns: int) -> bool:
    """Whether all turns get parts of one size of every block, and blocks have one size."""
    blocks = placement.blocks or (shape[placement.dim],)
    return len(set(blocks)) == 1 and blocks[0] % turns == 0


def _adds_up(strategy: Strategy, outputs: Sequence[TensorType]) -> bool:
    """Whether gradients of whole results are added up: a turn has only its part of them."""
    return all(
        f.gradient.is_partial or f.value != R or not t.requires_grad
        for f, t in zip(strategy.outputs, outputs, strict=True)
    )


def _runs_in_turns(node: fx.Node, binding: Binding | None, strategy: Strategy, turns: int) -> bool:
    """Whether turns get parts of one size, on which the op itself computes, or draws, its part."""
    if strategy.cut is None or binding is None:
        return True
    if binding.is_inside(strategy.cut) or any(binding.sizes[f] % turns for f in strategy.cut.factors):
        return False
    if info(node).random >= 0:  # an op draws by position from the start of its part, so parts are single blocks
        return not any(f.value.blocks for f in (*strategy.operands, *strategy.outputs))
    facts = facts_of(op_name(node))
    if facts.form is None:
        return True
    here = OneTurn(DeviceMesh((turns,), (TIME,)), Choice((strategy,)))
    return facts.form(here, call_of(node), dict(node.kwargs)) is None
