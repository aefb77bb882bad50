"""Wrap the ops of an emitted half in torch.profiler ranges that carry the plan's names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch.fx as fx
from torch.autograd.profiler import record_function

from autopar.codegen.joint_graph import BACK, OP, RECOMPUTED
from autopar.runtime.collectives import BEGIN, STEPS
from autopar.solver.profiled import MESSAGES, Range

_MOVES = frozenset((*(call for name, call in STEPS.items() if name not in ("slice", "lodge")), *BEGIN.values()))


def begin(name: str) -> record_function:
    """Open a profiler range."""
    opened = record_function(name)
    opened.__enter__()
    return opened


def end(opened: record_function) -> None:
    """Close a profiler range."""
    opened.__exit__(None, None, None)


def with_ranges(half: fx.Graph, part: str, places: Mapping[str, str]) -> fx.Graph:
    """Copy of a half in which every run of ops of one site is a profiler range.

    before    a = mm(x, w);  b = add(a, c);  d = all_reduce(b, axis)
    after     r = begin("up/linear, forward");  a = mm(x, w);  b = add(a, c);  end(r);  ...

    `places` gives the plan's name of each op of the local program; `part` is "forward" or "backward".
    """
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for of, run in itertools.groupby(list(half.nodes), lambda node: _range_of(node, part, places)):
        opened = made.call_function(begin, (str(of),)) if of is not None else None
        for node in run:
            copies[node] = made.node_copy(node, copies.__getitem__)
        if opened is not None:
            made.call_function(end, (opened,))
    return made


def _range_of(node: fx.Node, part: str, places: Mapping[str, str]) -> Range | None:
    if node.op != "call_function":
        return None
    op = node.meta.get(BACK) or node.meta.get(OP, "")
    again = part == "backward" and bool(node.meta.get(RECOMPUTED)) and BACK not in node.meta
    return Range(places.get(op, op or MESSAGES), "recompute" if again else part, node.target in _MOVES)
