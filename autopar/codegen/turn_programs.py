"""Cut the program of one micro-batch in three: a beginning that runs once, what every turn runs, and an ending.

    beginning   what is made of parameters alone (`space/beginning.py`): its results are operands of every turn
    turn        the rest, for each turn on its rows of the batch
    ending      runs once, on what the turns add up

Gradients go back into the beginning as into parameters: `hold` adds them up over turns before their reduction, and
`settle` reduces the sums once. The backward of what the beginning computes belongs to turns: it leaves the gradient of
T5's table, of some KiB, where the gradient of the bias, of all pairs of positions, would be held by all turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence, Set
from dataclasses import dataclass, replace

import torch.fx as fx

from autopar.codegen.halves import Joint
from autopar.codegen.joint import lower_jointly
from autopar.codegen.local import LocalProgram
from autopar.codegen.records import Records
from autopar.graph import walks
from autopar.graph.graph import Graph, Info, TensorType, info, op_name
from autopar.ops.entry import OPS, facts_of
from autopar.sharding.placement import Sharding
from autopar.space.parameter_values import ParameterValues


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The part of a program that runs once, before the first turn, and what is left for every turn, as code."""

    program: LocalProgram
    turn: LocalProgram  # the results of `program` are its first inputs


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """The part of a program that runs once, after the last turn.

    Its operands come from the turns: either a sum over all turns, or a value that every turn has alike.
    """

    program: LocalProgram
    joint: Joint
    sums: tuple[bool, ...]  # whether each operand is a sum over turns
    # Each result of the program: whether the ending gives it, and its index among the results of its part.
    results: tuple[tuple[bool, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class InParts:
    """The parts of a program, not yet lowered."""

    turn: LocalProgram  # the beginning and a turn: both are lowered together, as gradients go through both
    beginning: Beginning | None
    ending: LocalProgram  # program whose inputs are the last results of a turn
    crossing: tuple[fx.Node, ...]
    results: tuple[tuple[bool, int], ...]
    once: frozenset[str]  # names of the nodes of `turn` whose results no turn changes

    @property
    def seed(self) -> int:
        """Index of the result of a turn from which backward starts."""
        first = len(self.turn.fx.output_node().args[0]) - len(self.crossing)
        return first + next((i for i, node in enumerate(self.crossing) if info(node).outputs[0].requires_grad), 0)


def in_parts(program: LocalProgram, graph: Graph, regathered: Collection[str]) -> InParts:
    """Cut a program behind what is made of parameters alone, and behind the totals of its turns.

    Copies of `regathered` parameters are made in every turn.

    before    w = convert(p, "all_gather@dp", ...);  s = cross_entropy(mm(x, w), t);  u = total(s);
              loss = convert(u, "all_reduce@dp", ...);  return loss
    after     w = convert(p, "all_gather@dp", ...);  return w             # once
              s = cross_entropy(mm(x, w), t);  return s                   # in every turn
              loss = convert(u, "all_reduce@dp", ...);  return loss       # once, on the sum of them
    """
    behind: set[fx.Node] = set()
    for node in program.fx.nodes:
        if node.op == "call_function" and (node.target == OPS["total"] or not behind.isdisjoint(node.all_input_nodes)):
            behind.add(node)
    ends: list[fx.Node] = list(program.fx.output_node().args[0])
    before = [n for n in program.fx.nodes if n.op != "output" and n not in behind]
    crossing = _read_by(before, behind)
    first = [n for n in ends if n not in behind]
    last = [n for n in ends if n in behind]
    results = tuple((n in behind, (last if n in behind else first).index(n)) for n in ends)
    shardings = dict(zip(ends, program.outputs, strict=True))
    outputs = tuple(shardings[n] for n in first)
    once = _made_once(program, graph, regathered)
    return InParts(
        _part(program, before, (), [*first, *crossing], outputs),
        _beginning(program, before, [*first, *crossing], outputs, once),
        _part(program, behind, crossing, last, tuple(shardings[n] for n in last)),
        crossing,
        results,
        frozenset(n.name for n in once),
    )


def _beginning(
    program: LocalProgram,
    before: Sequence[fx.Node],
    ends: Sequence[fx.Node],
    outputs: tuple[Sharding, ...],
    once: Collection[fx.Node],
) -> Beginning | None:
    """The part that runs once and the other nodes `before` the ending; None where all belongs to turns."""
    later = [n for n in before if n not in once]
    left = _read_by([n for n in before if n in once], set(later), ends)
    if not left:
        return None
    first = walks.ancestors(left)
    turn = walks.ancestors(ends, left.__contains__)
    turn.update(n for n in later if n.op == "placeholder" and info(n).kind == "input")
    return Beginning(
        _part(program, first, (), left, ()),
        _part(program, turn, left, ends, outputs),
    )


def _made_once(program: LocalProgram, graph: Graph, regathered: Collection[str]) -> set[fx.Node]:
    """The nodes whose results no turn changes: copies that stay, and values computed of parameters alone."""
    values = ParameterValues.of(graph, "")
    computed = {info(n).key for n in values.computed}
    is_view = {info(n).key: facts_of(op_name(n)).free for n in values.owners if info(n).kind == "op"}

    def stays(node: fx.Node) -> bool:
        return node.op == "placeholder" and info(node).kind == "parameter" and info(node).key not in regathered

    def is_form(node: fx.Node) -> bool:
        return node.op == "call_function" and (info(node).kind == "conversion" or info(node).key in is_view)

    copies = walks.made_of_one(program.fx.nodes, stays, is_form)
    found = set[fx.Node]()
    for node in (n for n in program.fx.nodes if n.op == "call_function"):
        about = info(node)
        operands = node.all_input_nodes
        is_moved = not _shows_its_operand(node) if about.kind == "conversion" else not is_view.get(about.key, False)
        follows = about.kind in ("conversion", "part") and found.issuperset(operands)
        if about.key in computed or follows or (node in copies and (is_moved or found.issuperset(operands))):
            found.add(node)
    return found


def _shows_its_operand(conversion: fx.Node) -> bool:
    """Whether a conversion has neither steps nor a cast in forward, and is there for its gradient."""
    return not conversion.args[1] and len(conversion.args) < 5


def _read_by(nodes: Iterable[fx.Node], readers: Set[fx.Node], ends: Container[fx.Node] = ()) -> tuple[fx.Node, ...]:
    """Those of the nodes, in order, that one of these readers reads, or that are ends."""
    return tuple(n for n in nodes if n in ends or not readers.isdisjoint(n.users))


def _part(
    program: LocalProgram,
    nodes: Container[fx.Node],
    given: Sequence[fx.Node],
    ends: Sequence[fx.Node],
    outputs: tuple[Sharding, ...],
) -> LocalProgram:
    """The program of these nodes, with what it is `given` as first inputs, and `ends` as results.

    The total of a value is the value: a part behind totals is given the sums.
    """
    made = fx.Graph()
    copies = dict[fx.Node, fx.Node]()
    types = dict[str, TensorType]()
    for node in given:
        copies[node] = made.create_node("placeholder", node.name, name=node.name)  # `placeholder` changes capitals
        types[node.name] = info(node).outputs[0]
        copies[node].meta["info"] = Info(info(node).key, "input", info(node).outputs)
    names: dict[str, list[str]] = {"input": [n.name for n in given]}
    for node in program.fx.nodes:
        if node not in nodes or node in copies:
            continue
        if node.op == "placeholder":
            types[node.name] = program.types[node.name]
            names.setdefault(info(node).kind, []).append(_name_of(node))
        is_total = node.target == OPS["total"]
        copies[node] = copies[node.all_input_nodes[0]] if is_total else made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[n] for n in ends))
    inputs, parameters, buffers, key = (tuple(names.get(kind, ())) for kind in _PLACES)
    return replace(
        program,
        fx=made,
        inputs=inputs,
        parameters=parameters,
        buffers=buffers,
        types=types,
        outputs=outputs,
        is_random=bool(key),
    )


_PLACES = ("input", "parameter", "buffer", "random key")  # kinds of placeholders, in their order


def _name_of(placeholder: fx.Node) -> str:
    """The name by which a program lists a placeholder."""
    return str(placeholder.target) if info(placeholder).kind == "input" else info(placeholder).key


def lowered_ending(
    parts: InParts,
    local_type: Callable[[fx.Node], TensorType],
    device: str,
    gradients: bool = True,
    records: Records | None = None,
) -> Ending:
    """The ending with its forward and backward, lowered for values as this device has them."""
    types = {
        name: replace(type_, shape=local_type(node).shape)
        for (name, type_), node in zip(parts.ending.types.items(), parts.crossing, strict=True)
    }
    program = replace(parts.ending, types=types)
    wants = [gradients and info(n).outputs[0].requires_grad for n in program.fx.output_node().args[0]]
    joint = lower_jointly(program, [i for i, want in enumerate(wants) if want], device=device, records=records)
    sums = tuple(map(_is_added_up, parts.crossing))
    return Ending(program, joint, sums, parts.results)


def _is_added_up(node: fx.Node) -> bool:
    """Whether the node is the operand of a total."""
    return any(user.target == OPS["total"] for user in node.users)
