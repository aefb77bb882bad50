"""Split the program of one micro-batch in two: what every turn runs, and the ending, which runs once on their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from autopar.codegen.halves import Joint
from autopar.codegen.joint import lower_jointly
from autopar.codegen.local import LocalProgram
from autopar.graph.graph import Info, TensorType, info
from autopar.ops.entry import OPS
from autopar.sharding.placement import Sharding


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
class InTwo:
    """The two parts of a program, not yet lowered."""

    turn: LocalProgram
    ending: LocalProgram  # program whose inputs are the last results of a turn
    crossing: tuple[fx.Node, ...]
    results: tuple[tuple[bool, int], ...]

    @property
    def seed(self) -> int:
        """Index of the result of a turn from which backward starts."""
        first = len(self.turn.fx.output_node().args[0]) - len(self.crossing)
        return first + next(i for i, node in enumerate(self.crossing) if info(node).outputs[0].requires_grad)


def in_two(program: LocalProgram) -> InTwo:
    """Cut a program behind the totals of its turns.

    before    s = cross_entropy(x, t);  u = total(s);  loss = convert(u, "all_reduce@dp", ...);  return loss
    after     s = cross_entropy(x, t);  return s                          # in every turn
              loss = convert(u, "all_reduce@dp", ...);  return loss       # once, on the sum of them
    """
    behind: set[fx.Node] = set()
    for node in program.fx.nodes:
        if node.op == "call_function" and (node.target == OPS["total"] or not behind.isdisjoint(node.all_input_nodes)):
            behind.add(node)
    ends: list[fx.Node] = list(program.fx.output_node().args[0])
    crossing = tuple(
        dict.fromkeys(a for n in program.fx.nodes if n in behind for a in n.all_input_nodes if a not in behind)
    )
    first = [n for n in ends if n not in behind]
    last = [n for n in ends if n in behind]
    results = tuple((n in behind, (last if n in behind else first).index(n)) for n in ends)
    shardings = dict(zip(ends, program.outputs, strict=True))
    return InTwo(
        _turn(program, behind, [*first, *crossing], tuple(shardings[n] for n in first)),
        _ending(program, behind, crossing, last, tuple(shardings[n] for n in last)),
        crossing,
        results,
    )


def _turn(
    program: LocalProgram, behind: set[fx.Node], ends: Sequence[fx.Node], outputs: tuple[Sharding, ...]
) -> LocalProgram:
    """The program of every turn: all nodes except those `behind`, with these ends."""
    made = fx.Graph()
    copies = dict[fx.Node, fx.Node]()
    for node in program.fx.nodes:
        if node.op != "output" and node not in behind:
            copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[n] for n in ends))
    return replace(program, fx=made, outputs=outputs)


def _ending(
    program: LocalProgram,
    behind: set[fx.Node],
    crossing: Sequence[fx.Node],
    ends: Sequence[fx.Node],
    outputs: tuple[Sharding, ...],
) -> LocalProgram:
    """The program that runs once: the nodes `behind`, with `crossing` as inputs."""
    made = fx.Graph()
    copies = dict[fx.Node, fx.Node]()
    types: dict[str, TensorType] = {}
    for node in crossing:
        given = copies[node] = made.placeholder(node.name)
        types[given.name] = info(node).outputs[0]
        given.meta["info"] = Info(info(node).key, "input", info(node).outputs)
    for node in program.fx.nodes:
        if node in behind:
            is_total = node.target == OPS["total"]
            copies[node] = copies[node.all_input_nodes[0]] if is_total else made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[n] for n in ends))
    names = tuple(types)
    return LocalProgram(made, names, (), (), types, outputs, False, program.notes)


def lowered_ending(parts: InTwo, local_type: Callable[[fx.Node], TensorType], device: str) -> Ending:
    """The ending with its forward and backward, lowered for values as this device has them."""
    types = {
        name: replace(type_, shape=local_type(node).shape)
        for (name, type_), node in zip(parts.ending.types.items(), parts.crossing, strict=True)
    }
    program = replace(parts.ending, types=types)
    wants = [info(n).outputs[0].requires_grad for n in program.fx.output_node().args[0]]
    joint = lower_jointly(program, [i for i, want in enumerate(wants) if want], device=device)
    sums = tuple(map(_is_added_up, parts.crossing))
    return Ending(program, joint, sums, parts.results)


def _is_added_up(node: fx.Node) -> bool:
    """Whether the node is the operand of a total."""
    return any(user.target == OPS["total"] for user in node.users)
