"""`Traffic`: the tensors that an op's kernels read and write, alone or in one kernel with neighbouring ops.

Where torch.compile makes the code, ops that only read and write are fused: a chain of them reads what enters it, writes
what leaves it, and starts once. An end of a chain is a product, an op that torch.compile does not know, an input, an
output, and what is kept for backward. Ops in whose place a kernel of autopar's stands are a chain that is written by
hand: its backward makes once more what lies inside. Conversions between ops are not seen: they end chains too, where a
plan has any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.fx as fx

from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.kernels import backend
from autopar.kernels.family import Family
from autopar.kernels.patterns import Match, readers
from autopar.ops.entry import Line, facts_of
from autopar.space.kernel_sites import KernelSites
from autopar.space.saved import kept_by


class Traffic(NamedTuple):
    """The tensors that an op's kernels move, as (index, how often), with outputs counted after operands."""

    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]  # the sum over all backward kernels
    gradients: int  # how many kernels those are
    starts: bool = True  # whether a kernel starts with it, in forward and in backward
    starts_back: bool = True


def alone(node: fx.Node, given: Sequence[fx.Node], kernels: str) -> Traffic:
    """The traffic of an op that runs in kernels of its own.

    Its backward reads the gradients of outputs and what was kept, and writes the gradient of each operand. An op whose
    gradients are kernels of their own reads the former for each.
    """
    outputs, count, facts = info(node).outputs, len(given), facts_of(op_name(node))
    forward = [(k, float(facts.reads) if k == 0 else 1.0) for k in range(count + len(outputs))]
    trained = [k for k, n in enumerate(given) if type_of(n).requires_grad]
    if not trained:
        return Traffic(tuple(forward), (), 1)
    many = len(trained) if facts.spreads else 1
    kept = kept_by(node, kernels)[0]
    back = [(k, 1.0) for k in trained]
    back += [(count + k, float(many)) for k, t in enumerate(outputs) if t.requires_grad]
    back += [(k, 1.0) for k, n in enumerate(given) if n in kept]
    back += [(count, 1.0)] if node in kept else []
    return Traffic(tuple(forward), tuple(back), many)


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """The fused chains of ops in a graph whose code torch.compile makes."""

    kernels: str
    kept: frozenset[fx.Node]  # values that backward reads

    @staticmethod
    def of(graph: Graph, kernels: str) -> Chains:
        return Chains(kernels, frozenset(n for node in graph.nodes for n in kept_by(node, kernels)[0]))

    def traffic(self, node: fx.Node, given: Sequence[fx.Node]) -> Traffic:
        """The traffic of an op, without what stays inside of a chain."""
        eager = alone(node, given, self.kernels)
        if not is_fused(node):
            return eager
        count = len(given)
        enters = [not is_fused(_shown(n)) for n in given]
        leaves = node in self.kept or any(not is_fused(u) for u in _users(node))
        ends = any(not is_fused(u) for u in _users(node))

        def moves(end: int, stays: bool) -> bool:
            return enters[end] if end < count else stays

        forward = tuple((k, n) for k, n in eager.forward if moves(k, leaves))
        kept = {k for k, n in enumerate(given) if n in kept_by(node, self.kernels)[0]}
        back = tuple((k, n) for k, n in eager.backward if k in kept or moves(k, ends))
        return Traffic(forward, back, eager.gradients, leaves, any(enters))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The share of one op in the traffic of a kernel of autopar's that stands for several ops."""

    enters: frozenset[fx.Node]  # values that the kernel reads and that this op is the first to read
    needed: frozenset[fx.Node]  # values in `enters` that the kernel's backward reads again
    written: frozenset[fx.Node]  # values in `enters` that get gradients of their own
    leaves: tuple[float, float]  # how often its result moves in forward, and that or its gradient in backward
    last: fx.Node  # the op whose result is the last one: where the kernel runs
    is_last: bool
    is_kept: bool  # whether the kernel's backward reads its result
    is_inner: bool  # whether its result stays inside the kernel
    over: fx.Node | None  # the value over which the kernel can write its gradient

    def kept(self, op: fx.Node) -> list[fx.Node]:
        """Values kept for backward at this op: operands that its kernel's backward reads, maybe its result."""
        return [n for n in op.all_input_nodes if behind_fan_outs(n) in self.needed] + ([op] if self.is_kept else [])

    def traffic(self, given: Sequence[fx.Node]) -> Traffic:
        sources = [behind_fan_outs(n) for n in given]
        first = [k for k, n in enumerate(sources) if n in self.enters and n not in sources[:k]]
        written, read = self.leaves
        forward = [(k, 1.0) for k in first] + [(len(given), written)]
        back = [(k, 1.0) for k in first if sources[k] in self.written]
        back += [(k, 1.0) for k in first if sources[k] in self.needed] + [(len(given), read)]
        return Traffic(tuple(forward), tuple(back), 1, self.is_last, self.is_last)


def groups_of(sites: KernelSites, kind: str) -> dict[fx.Node, Group]:
    """The ops that kernels of a kind of device stand for, with their shares in its traffic."""
    return {op: share for family, found in sites.counted for op, share in _shares(family, found, kind)}


def relieved_of(sites: KernelSites) -> frozenset[fx.Node]:
    """The products whose bias gets its gradient from a kernel behind them."""
    return frozenset(family.product(found) for family, found in sites.counted if family.product is not None)


def held_by_kernels(sites: KernelSites, kind: str) -> dict[fx.Node, Group]:
    """The ops that run in one kernel where memory is concerned; none on a CPU, which runs them one by one."""
    return groups_of(sites, kind) if backend.is_traced(kind) else {}


def _shares(family: Family, found: Match, kernels: str) -> Iterator[tuple[fx.Node, Group]]:
    inside, results = set(found.nodes), set(found.results)
    needed, seen = _needed(family, found, kernels), set[fx.Node]()
    for op in sorted(inside):
        enters = {behind_fan_outs(n) for n in op.all_input_nodes} - inside - seen
        seen |= enters
        written = {n for n in enters if type_of(n).requires_grad}
        if op_name(op) == "add" and op is found.result:  # the gradient that comes is that of its operands
            written = set()
        elif op_name(op) == "add" and len({type_of(n).shape for n in written}) == 1:  # one gradient serves both
            written = {min(written)}
        has_gradient = op is found.result or not inside.issuperset(readers(op))
        leaves = (1.0, float(has_gradient) + float(op in needed)) if op in results else (0.0, 0.0)
        yield (
            op,
            Group(
                frozenset(enters),
                frozenset(enters & needed),
                frozenset(written),
                leaves,
                found.result,
                is_last=op is found.result,
                is_kept=op in results and op in needed,
                is_inner=op not in results,
                over=behind_fan_outs(found[family.over]) if family.over else None,
            ),
        )


def _needed(family: Family, found: Match, kernels: str) -> set[fx.Node]:
    """The values that a kernel's backward reads: kept ones, and those from which it recomputes others."""
    if family.keeps is not None:
        return set(map(behind_fan_outs, family.keeps(found)))
    needed = set[fx.Node]()
    for op in sorted(found.nodes, reverse=True):
        values, makes = kept_by(op, kernels)
        makes = () if info(op).random >= 0 else makes  # a mask by position is made again
        if makes or (op in needed and op not in found.results[:-1]):
            values = [*values, *op.all_input_nodes]
        needed.update(map(behind_fan_outs, values))
    return needed


def behind_fan_outs(node: fx.Node) -> fx.Node:
    """The value behind a chain of identities (fan-outs)."""
    while info(node).kind == "op" and op_name(node) == "identity":
        node = node.kwargs["input"]
    return node


def is_fused(node: fx.Node) -> bool:
    """Whether torch.compile fuses a node with its neighbours."""
    if info(node).kind != "op":
        return False
    facts = facts_of(op_name(node))
    is_known = facts.rule is not None and isinstance(facts.keeps, Line)
    return is_known and facts.flops is None and not facts.windows and info(node).random < 0


def _shown(node: fx.Node) -> fx.Node:
    """The node whose memory a chain of views shares."""
    while info(node).kind in ("op", "part") and node.all_input_nodes:
        if info(node).kind == "op" and not facts_of(op_name(node)).free:
            break
        node = next(iter(node.all_input_nodes))
    return node


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The ops that read a value, directly or through views."""
    for user in node.users:
        if info(user).kind == "part" or (info(user).kind == "op" and facts_of(op_name(user)).free):
            yield from _users(user)
        else:
            yield user
