"""Rewrite the local program before it is differentiated: passes with a before and an after, in the order of PASSES."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.fx as fx

from autopar import kernels
from autopar.codegen.local import LocalProgram
from autopar.graph.graph import info
from autopar.kernels.family import Family
from autopar.kernels.patterns import Match, called
from autopar.letters import BadPlan


def drop_unread_ops(program: LocalProgram) -> None:
    """Remove ops that nothing reads, such as casts that conversions have taken over; random ops stay.

    before    w = to(p, bfloat16);  v = convert(p, "all_gather(0:64)@dp", ..., "bfloat16");  y = mm(x, v)
    after     v = convert(p, "all_gather(0:64)@dp", ..., "bfloat16");  y = mm(x, v)
    """
    for node in program.fx.nodes:
        about = info(node) if node.op == "call_function" else None
        if about is not None and about.kind == "op" and about.random < 0 and not node.users:
            program.fx.erase_node(node)


def use_kernels(program: LocalProgram) -> None:
    """Replace the groups of ops that the plan fuses by kernels.

    before    a = silu(g);  y = mul(a, u)                         s = add(x, r);  y = rms_norm(s, w)
    after     y = gated(g, u, 0)                                  f = add_rms_norm(x, r, w);  s = f[0];  y = f[1]
    """
    for family, found, arguments in list(_groups(program)):
        node = found.result
        results = found.results
        if family.product is not None and family.prepare is not None:
            family.prepare(found)
            product = family.product(found).name
            left = f"the gradient of its bias is that of {family.name}"
            program.notes[product] = "; ".join(filter(None, (left, program.notes.get(product, ""))))
        said = f"one kernel, in the place of {', '.join(map(called, found.nodes))}"
        program.notes[node.name] = "; ".join(filter(None, (said, program.notes.get(node.name, ""))))
        if len(results) == 1:
            node.target = family.call
            node.args = ()
            node.kwargs = dict(arguments)
        else:
            with program.fx.inserting_before(node):
                made = program.fx.create_node("call_function", family.call, (), dict(arguments))
            about = [info(result) for result in results]
            types = tuple(t for one in about for t in one.outputs)
            names = tuple(name for one in about for name in (one.key, *one.names))
            made.meta["info"] = replace(about[-1], outputs=types, names=names)
            program.notes[made.name] = program.notes.pop(node.name)
            for place, result in enumerate(results):
                if result is not node:
                    node.prepend(result)
                result.target = operator.getitem
                result.args = (made, place)
                result.kwargs = {}
                result.meta["info"] = replace(about[place], kind="part", module=about[-1].module)
        for op in reversed([n for n in found.nodes if n not in results]):
            program.fx.erase_node(op)


def _groups(program: LocalProgram) -> Iterator[tuple[Family, Match, Mapping[str, Any]]]:
    """The groups of ops that the plan fuses, with the arguments of their kernels' calls."""
    calls = [node for node in reversed(program.fx.nodes) if node.op == "call_function" and info(node).kind == "op"]
    for family in kernels.families(set(program.fused.values())):
        for node in calls:
            name = info(node).key
            if program.fused.get(name) != family.name:
                continue
            found = family.find(node)
            if found is None:
                raise BadPlan(
                    f"the plan has a kernel of {family.name} in the place of {name}, and its program other ops",
                    advice="plan again",
                )
            match, arguments = found
            about = [info(result) for result in match.results]
            if len({program.recomputed.isdisjoint((one.key, *one.names)) for one in about}) > 1:
                raise BadPlan(
                    f"the plan has a kernel of {family.name} in the place of {name}, recomputes some of its results, "
                    "and saves others",
                    advice="plan.recomputing(...), under which kernels stand where they can",
                )
            yield family, match, arguments


def is_kernel(node: fx.Node) -> bool:
    """Whether this node of a local program is a fused kernel."""
    is_here = node.op == "call_function" and getattr(node.target, "__module__", "").startswith(kernels.__name__)
    return is_here and node.target.__name__ in kernels.NAMES


PASSES: tuple[Callable[[LocalProgram], None], ...] = (drop_unread_ops, use_kernels)


def verify(program: LocalProgram, after: str) -> None:
    """Raise unless operands stand before their readers and every node except the output has an `Info`."""
    seen: set[fx.Node] = set()
    for node in program.fx.nodes:
        assert seen.issuperset(node.all_input_nodes), (after, node)
        assert node.op == "output" or info(node), (after, node)
        seen.add(node)
