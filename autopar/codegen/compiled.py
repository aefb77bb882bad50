"""Compile an emitted half by torch.compile, except for its collectives: each run of ops between them is one module.

Collectives stay in the outer graph and are called as before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from autopar.codegen.accumulated import add_up
from autopar.codegen.freeing_calls import from_a_list
from autopar.codegen.halves import extract
from autopar.kernels.buffer_reuse import pure
from autopar.runtime.private import FREEING, TRACING, OpOverload, clean_room, compiled_freeing
from autopar.runtime.random import IN_TORCH_OPS

_WORTH = 2  # A run of at least this many ops is compiled.
_AUTOCAST = ("cpu", "cuda")  # kinds of devices that may cast


class CompiledRun(torch.nn.Module):
    """A run of ops as a backend compiles it in its first call; its operands come in a list that it empties.

    So each operand ends where the compiled code has read it last. What is called with operands as arguments holds all
    of them until it returns: a backward would hold all that forward has saved.
    """

    def __init__(self, part: fx.GraphModule, backend: str) -> None:
        super().__init__()
        self.part = part
        self.backend = backend
        self._call: Callable[[list[Tensor]], Sequence[Tensor]] | None = None

    def forward(self, given: list[Tensor]) -> Sequence[Tensor]:
        if any(map(torch.is_autocast_enabled, _AUTOCAST)):  # a backward inside of it: each op is cast, as eager's is
            found: Sequence[Tensor] = self.part(*given)
            return found
        if self._call is None:
            with TRACING, clean_room():
                self._call = self._call or self._compiled(given)
        return self._call(given)

    def _compiled(self, given: list[Tensor]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        if self.backend in FREEING:
            return compiled_freeing(from_a_list(_copied(self.part)), self.backend, given)
        called: Callable[..., Sequence[Tensor]] = torch.compile(
            self.part, backend=self.backend, fullgraph=True, dynamic=False
        )
        return lambda given: called(*given)


def _copied(part: fx.GraphModule) -> fx.GraphModule:
    """A copy, for a rewriting that may be broken off."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(part.graph, {}))
    return fx.GraphModule(part, graph)


def as_list(*values: Tensor) -> list[Tensor]:
    """A list of operands, which alone keeps them once their variables end."""
    return [*values]


def compile_between_collectives(module: fx.GraphModule, backend: str) -> fx.GraphModule:
    """Replace every run of torch's own ops in a half by one compiled call.

    Additions to the sums of micro-batches cut no run: they come behind the run that makes their gradients.

    before    a = mm(x, w);  b = gelu(a);  c = all_reduce(b, axis);  d = mul(c, c);  e = add(d, c)
    after     b = run_0([x, w])[0];  c = all_reduce(b, axis);  e = run_1([c])[0]
    """
    source = module.graph
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    held: dict[str, object] = {str(n.target): getattr(module, str(n.target)) for n in source.find_nodes(op="get_attr")}
    run: list[fx.Node] = []
    additions: list[fx.Node] = []

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
            held[name] = CompiledRun(part, backend)
            given = made.call_function(as_list, tuple(copies[i] for i in inputs))  # The list alone holds them.
            called = made.call_module(name, (given,))
            for k, node in enumerate(outputs):
                copies[node] = made.call_function(operator.getitem, (called, k))
        for node in additions:
            copies[node] = made.node_copy(node, copies.__getitem__)
        run.clear()
        additions.clear()

    for node in source.nodes:
        is_op = isinstance(node.target, OpOverload) and node.op == "call_function"
        if is_op or (node.target is operator.getitem and node.args[0] in run):
            run.append(node)
        elif node.target is add_up:
            additions.append(node)
        else:
            close()
            copies[node] = made.node_copy(node, copies.__getitem__)
    return fx.GraphModule(held, made)
