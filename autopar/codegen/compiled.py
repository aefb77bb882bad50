"""Compile an emitted half by torch.compile, except for its collectives: each run of ops between them is one module.

Collectives stay in the outer graph and are called as before.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from autopar.codegen.halves import extract
from autopar.kernels.buffer_reuse import pure
from autopar.runtime.private import OpOverload
from autopar.runtime.random import IN_TORCH_OPS

_WORTH = 2  # ops, from which on a run of them is compiled


def compile_between_collectives(module: fx.GraphModule, backend: str) -> fx.GraphModule:
    """Replace every run of torch's own ops in a half by one compiled call.

    before    a = mm(x, w);  b = gelu(a);  c = all_reduce(b, axis);  d = mul(c, c);  e = add(d, c)
    after     b = run_0(x, w)[0];  c = all_reduce(b, axis);  e = run_1(c)[0]
    """
    source, made = module.graph, fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    held: dict[str, object] = {str(n.target): getattr(module, str(n.target)) for n in source.find_nodes(op="get_attr")}
    run: list[fx.Node] = []

    def close() -> None:
        """Write the collected run as one call, or as it is where it is too short."""
        if len(run) < _WORTH:
            for node in run:
                copies[node] = made.node_copy(node, copies.__getitem__)
        else:
            inside = set(run)
            operands = [a for n in run for a in n.all_input_nodes if a not in inside]
            inputs = list(dict.fromkeys(operands))
            outputs = [n for n in run if not inside.issuperset(n.users)]
            name = f"run_{len(held)}"
            part = fx.GraphModule({}, extract(source, inputs, inside, outputs))
            for node in part.graph.nodes:
                node.target = IN_TORCH_OPS.get(node.target, pure(node.target))  # a compiler plans memory itself
            part.recompile()
            held[name] = torch.compile(part, backend=backend, fullgraph=True, dynamic=False)
            called = made.call_module(name, tuple(copies[i] for i in inputs))
            for k, node in enumerate(outputs):
                copies[node] = made.call_function(operator.getitem, (called, k))
        run.clear()

    for node in source.nodes:
        is_op = isinstance(node.target, OpOverload) and node.op == "call_function"
        if is_op or (node.target is operator.getitem and node.args[0] in run):
            run.append(node)
        else:
            close()
            copies[node] = made.node_copy(node, copies.__getitem__)
    return fx.GraphModule(held, made)
