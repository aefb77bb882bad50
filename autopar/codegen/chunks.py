"""Write out a region of the joint graph once for each chunk of its rows, forward and backward of a chunk together.

    before    c = chunk(x, 1, 2, 64);  z = mm(c, w);  s = loss(z);  u = added_up(s);  ...
              d = seed(g);  e = loss_backward(d, z);  f = mm(e, w.T);  dx = unchunk(f, 1, 2, 64);  dw = mm(c.T, e)
    after     c = slice(x, 1, 0, 32);  z = mm(c, w);  s = loss(z);  e = loss_backward(1, z);  f = mm(e, w.T);
              h = mm(c.T, e)
              c1 = slice(x, 1, 32, 64);  ...  u = add(s, s1);  k = cat([f, f1], 1);  h = add_(h, h1)
              ...
              dx = mul(k, g);  dw = mul(h, g)

Gradients are linear in the one that arrives at the sum, so they are computed in forward for a gradient of 1, and
backward multiplies them by the one that has arrived.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from autopar.codegen.buffers import read_instead
from autopar.codegen.joint_graph import BACK, EARLY, OP, REGION, JointGraph
from autopar.codegen.local import LocalProgram
from autopar.graph import walks
from autopar.runtime.chunks import added_up, chunk
from autopar.runtime.private import TO_COPY

_ATEN = torch.ops.aten
CHUNK = torch.ops.autopar.chunk.default
UNCHUNK = torch.ops.autopar.unchunk.default
ADDED_UP = torch.ops.autopar.added_up.default
SEED = torch.ops.autopar.seed.default
_HALF = (torch.bfloat16, torch.float16)


def mark_region(joint: JointGraph, program: LocalProgram) -> None:
    """Note on each chunked sum the names of the ops of the local program that run once per chunk."""
    for total in joint.graph.find_nodes(op="call_function", target=ADDED_UP):
        total.meta[REGION] = _region_of(program)


def _region_of(program: LocalProgram) -> frozenset[str]:
    """Names of a local program's nodes that run once per chunk: those between `chunk` and `added_up`."""
    found: set[fx.Node] = set()
    for node in program.fx.nodes:
        if node.target is chunk or (node.target is not added_up and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
        if node.op == "output":
            found.discard(node)
    behind = walks.ancestors(n for n in program.fx.nodes if n.target is added_up)
    return frozenset(n.name for n in found & behind)


def write_out_chunks(joint: JointGraph) -> None:
    """Run a region once for each chunk of its rows, forward and backward of a chunk together.

    before    c = chunk(x, 0, 2, 8);  s = loss(c);  u = added_up(s);  d = seed(g);  e = loss_backward(d, c);
              dx = unchunk(e, 0, 2, 8)
    after     c = slice(x, 0, 0, 4);  s = loss(c);  e = loss_backward(1, c);  c1 = slice(x, 0, 4, 8);  ...
              u = add(s, s1);  k = cat([e, e1]);  dx = mul(k, g)
    """
    totals = list(joint.graph.find_nodes(op="call_function", target=ADDED_UP))
    if totals:
        _Region.of(joint, totals).write_out(joint)
    joint.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    joint.read_output()


@dataclass(slots=True, eq=False)
class _Region:
    """The nodes that are copied once per chunk, in order, the sums that end them, and the seed of their backward."""

    totals: list[fx.Node]
    forward: list[fx.Node]
    backward: list[fx.Node]
    seed: fx.Node | None
    chunks: int
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)  # running totals over chunks
    rows: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # rows of each chunk, concatenated in the end

    @staticmethod
    def of(joint: JointGraph, totals: list[fx.Node]) -> _Region:
        forward: dict[fx.Node, None] = {}
        backward: dict[fx.Node, None] = {}
        seeds = list(joint.graph.find_nodes(op="call_function", target=SEED))
        region = totals[0].meta[REGION]
        late = set(joint.tangents)  # depends on the gradient that arrives, or on all chunks, so it is computed once
        for node in joint.graph.nodes:
            if node.op != "call_function" or node in totals:
                continue
            varies = any(a in forward or a in backward for a in node.all_input_nodes)
            is_whole = any(a in late or a.target is UNCHUNK for a in node.all_input_nodes)
            if node.target is CHUNK or (varies and node.meta.get(OP) in region):
                forward[node] = None
            elif node.target is SEED or (varies and not is_whole and _comes_of(node, region, backward)):
                backward[node] = None
            elif is_whole or varies:
                # A conversion behind a chunk's gradient runs once for all chunks, and so do its readers.
                late.add(node)
        outside = (u for n in forward for u in n.users if u not in forward and u not in backward and u not in totals)
        assert not any(u in late for u in outside), "rows of a chunk are read behind all chunks"
        chunks = {int(str(n.args[2])) for n in forward if n.target is CHUNK}
        assert len(chunks) == 1 and len(seeds) <= 1, (chunks, seeds)
        return _Region(totals, list(forward), list(backward), seeds[0] if seeds else None, chunks.pop())

    def write_out(self, joint: JointGraph) -> None:
        """Copy the region once per chunk before the first sum; replace sums and gradients by totals."""
        graph = joint.graph
        inside = {*self.forward, *self.backward}
        place_of_all = self.totals[0]
        # The seed's operand arrives only in backward, so it cannot move.
        reading = [n for n in (*self.forward, *self.backward) if n.target is not SEED]
        _move_before(place_of_all, (a for n in reading for a in n.all_input_nodes if a not in inside))
        ends = [n for n in self.backward if not inside.issuperset(n.users)]
        numbers = [n for total in self.totals for n in total.all_input_nodes]
        for place in range(self.chunks):
            with graph.inserting_before(place_of_all):
                copies = self._copies(graph, place)
                for number in numbers:
                    self._add(graph, number, copies[number])
                for end in ends:
                    if end.target is UNCHUNK:
                        self.rows.setdefault(end, []).append(copies[end])
                    else:
                        self._add(graph, end, copies[end])
        for total, number in zip(self.totals, numbers, strict=True):
            read_instead(total, self.sums.pop(number))
        with graph.inserting_before(place_of_all):
            made = {end: self._whole(graph, end) for end in ends}
        for end, whole in made.items():
            whole.meta[EARLY] = True
            self._scale(graph, end, whole, inside)

    def _copies(self, graph: fx.Graph, place: int) -> dict[fx.Node, fx.Node]:
        """Copy the region for the chunk at `place`; returns the copy of each node."""
        copies: dict[fx.Node, fx.Node] = {}
        for node in (*self.forward, *self.backward):
            if node.target is CHUNK:
                copies[node] = _rows(graph, node, place)
            elif node.target is SEED:
                copies[node] = _one(graph, node)
            elif node.target is UNCHUNK:
                copies[node] = copies[node.all_input_nodes[0]]
            else:
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
                for key in (OP, BACK):  # without these marks no copy is recomputed
                    copies[node].meta.pop(key, None)
        return copies

    def _add(self, graph: fx.Graph, end: fx.Node, value: fx.Node) -> None:
        """Add the value of one chunk to the running total of `end`; half precision is summed in float32."""
        given = value.meta["val"]
        if end not in self.sums:
            if given.dtype in _HALF:
                value = _cast(graph, value, torch.float32)
            self.sums[end] = value
            return
        before = self.sums[end]
        in_place = given.dim() > 0 and all(s or n == 1 for s, n in zip(given.stride(), given.shape, strict=True))
        target = _ATEN.add_.Tensor if in_place else _ATEN.add.Tensor
        made = self.sums[end] = graph.call_function(target, (before, value))
        made.meta["val"] = before.meta["val"]

    def _whole(self, graph: fx.Graph, end: fx.Node) -> fx.Node:
        """The gradient `end` over all chunks: the total, or the rows concatenated.

        The gradient that arrives at the sum is taken to be 1.
        """
        if end.target is UNCHUNK:
            return _side_by_side(graph, end, self.rows[end])
        value = self.sums[end]
        dtype = end.meta["val"].dtype
        return value if value.meta["val"].dtype == dtype else _cast(graph, value, dtype)

    def _scale(self, graph: fx.Graph, end: fx.Node, whole: fx.Node, inside: set[fx.Node]) -> None:
        """Multiply a gradient of the region by the one that has arrived, for all readers outside the region."""
        assert self.seed is not None
        with graph.inserting_before(end):
            scaled = graph.call_function(_ATEN.mul.Tensor, (whole, self.seed.args[0]))
        scaled.meta.update({key: end.meta[key] for key in (BACK,) if key in end.meta})
        scaled.meta["val"] = end.meta["val"]
        read_instead(end, scaled, except_for=inside)


def _comes_of(node: fx.Node, region: frozenset[str], backward: Iterable[fx.Node]) -> bool:
    """Whether a node belongs to the backward of an op of the region, or takes one result of such a node."""
    is_part = node.target is operator.getitem and node.args[0] in backward
    return is_part or node.meta.get(BACK) in region


def _move_before(place: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Move nodes and their ancestors in front of `place`, where they stand behind it."""
    late = [n for n in walks.ancestors(nodes) if n.op == "call_function" and place < n]
    for node in sorted(late):
        place.prepend(node)


def _call(graph: fx.Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Append a call of `target`, with its value on fake tensors in `meta`."""
    made = graph.call_function(target, args, kwargs)
    values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    made.meta["val"] = target(*values[0], **values[1])
    return made


def _rows(graph: fx.Graph, node: fx.Node, place: int) -> fx.Node:
    """Slice the rows of chunk `place` out of every block of `size` rows, as a contiguous tensor."""
    x, dim, chunks, size = node.args
    assert isinstance(x, fx.Node) and isinstance(dim, int) and isinstance(chunks, int) and isinstance(size, int)
    shape = list(x.meta["val"].shape)
    step = size // chunks
    blocks = shape[dim] // size
    value = x
    along = dim
    if blocks > 1:
        value = _call(graph, _ATEN.view.default, x, [*shape[:dim], blocks, size, *shape[dim + 1 :]])
        along = dim + 1
    value = _call(graph, _ATEN.slice.Tensor, value, along, place * step, (place + 1) * step)
    value = _call(graph, _ATEN.clone.default, value, memory_format=torch.contiguous_format)
    return _call(graph, _ATEN.view.default, value, list(node.meta["val"].shape)) if blocks > 1 else value


def _side_by_side(graph: fx.Graph, node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
    """Concatenate the rows of all chunks in their original order."""
    _, dim, chunks, size = node.args
    assert isinstance(dim, int) and isinstance(chunks, int) and isinstance(size, int)
    shape = list(node.meta["val"].shape)
    step = size // chunks
    blocks = shape[dim] // size
    if blocks == 1:
        return _call(graph, _ATEN.cat.default, list(parts), dim)
    apart = [_call(graph, _ATEN.reshape.default, p, [*shape[:dim], blocks, step, *shape[dim + 1 :]]) for p in parts]
    return _call(graph, _ATEN.reshape.default, _call(graph, _ATEN.cat.default, apart, dim + 1), shape)


def _one(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A gradient of ones in the place of the seed."""
    like = node.meta["val"]
    made = graph.call_function(
        _ATEN.full.default, (list(like.shape), 1.0), {"dtype": like.dtype, "device": like.device}
    )
    made.meta["val"] = like
    return made


def _cast(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return _call(graph, TO_COPY, value, dtype=dtype)
