"""The kernels of one training step on one device, their seconds, and the bytes that a schedule of them holds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

FLOPS, BANDWIDTH, LAUNCH = 0.6 * 312e12, 0.8 * 1.555e12, 3e-6  # of an A100 in bfloat16, as far as kernels reach


@dataclass(frozen=True, slots=True)
class Op:
    """A kernel: its seconds, and the values that it reads and makes, by number."""

    node: str
    seconds: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    is_backward: bool


@dataclass(slots=True)
class Step:
    """Forward and backward of a model. Views are the values that they show."""

    ops: list[Op]
    size: np.ndarray  # bytes of each value; 0 of what is counted elsewhere: gradients of parameters
    inputs: tuple[int, ...]  # values that are there before, to the end
    tangent: int  # the gradient of the output: there from its first reader on
    gradients: frozenset[int]  # of what is trained: there to the end
    output: int
    graph: torch.fx.GraphModule
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        wanted, live = {*self.gradients, self.output}, set[int]()
        for i in reversed(range(len(self.ops))):
            if not wanted.isdisjoint(self.ops[i].makes):
                live.add(i)
                wanted.update(self.ops[i].reads)
        self.forward = [i for i in sorted(live) if not self.ops[i].is_backward]
        self.backward = [i for i in sorted(live) if self.ops[i].is_backward]

    def played(self, order: Sequence[int]) -> tuple[np.ndarray, float]:
        """Bytes at every op of a schedule, and its seconds. A value that is made again begins a life of its own."""
        lives = {v: [v, 0, len(order) - 1] for v in self.inputs}
        done, current = list(lives.values()), dict(lives)
        for place, i in enumerate(order):
            for v in self.ops[i].reads:
                if v == self.tangent and v not in current:
                    current[v] = [v, place, place]
                    done.append(current[v])
                current[v][2] = max(current[v][2], place)
            for v in self.ops[i].makes:
                current[v] = [v, place, place]
                done.append(current[v])
        for v in self.gradients:
            current[v][2] = len(order) - 1
        change = np.zeros(len(order) + 1)
        for v, first, last in done:
            change[first] += self.size[v]
            change[last + 1] -= self.size[v]
        return np.cumsum(change)[:-1], sum(self.ops[i].seconds for i in order)

    def without_waste(self, order: Sequence[int]) -> list[int]:
        """A schedule without the ops whose values nobody reads before they are made again."""
        wanted, kept = {*self.gradients, self.output}, list[int]()
        for i in reversed(order):
            if not wanted.isdisjoint(self.ops[i].makes):
                kept.append(i)
                wanted.difference_update(self.ops[i].makes)
                wanted.update(self.ops[i].reads)
        return kept[::-1]


def step_of(build: Callable[[], nn.Module], batch: Tensor, is_trained: bool) -> Step:
    """The step of a model in bfloat16 on fake tensors."""
    with torch.device("meta"):
        model = build().to(torch.bfloat16)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        tensors = {
            n: torch.empty(t.shape, dtype=t.dtype) for n, t in (*model.named_parameters(), *model.named_buffers())
        }
        trained = [n for n, _ in model.named_parameters()]
        given = torch.empty(batch.shape, dtype=batch.dtype)
        for t in (*(tensors[n] for n in trained), *([given] if is_trained else [])):
            t.requires_grad_()
        tangent = torch.empty_like(torch.func.functional_call(model, tensors, (given,)))

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> Any:  # by these names torch's partitioner knows them
        here, x = dict(zip(tensors, primals, strict=False)), primals[-1]
        out = torch.func.functional_call(model, here, (x,))
        wrt = [here[n] for n in trained] + ([x] if is_trained else [])
        return (out, *torch.autograd.grad(out, wrt, tangents[0]))

    graph = make_fx(joint, tracing_mode="fake")([*tensors.values(), given], [tangent])
    return _contracted(graph, len(tensors), is_trained)


def _contracted(graph: torch.fx.GraphModule, constants: int, is_trained: bool) -> Step:
    """The ops and values of a graph: values by the memory that they lie on, ops that compute."""
    number: dict[int, int] = {}  # of each storage; -1 of what parameters make alone
    held, ops, sizes = list[Any](), list[Op](), list[int]()
    nodes = list(graph.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    output, *gradients = pytree.tree_leaves(nodes[-1].args[0])
    forward_ends, late = nodes.index(output), {places[-1]}

    def new(t: Tensor) -> int:
        sizes.append(t.numel() * t.element_size())
        number[t.untyped_storage()._cdata] = len(sizes) - 1
        return len(sizes) - 1

    def values(node: Any) -> list[int]:
        tensors = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        return sorted({number[t.untyped_storage()._cdata] for t in tensors} - {-1})

    for place, node in enumerate(nodes):
        tensors = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        held += tensors  # their storages stay theirs
        if node.op == "placeholder":
            for t in tensors:
                if places.index(node) < constants:
                    number[t.untyped_storage()._cdata] = -1
                else:
                    new(t)
            continue
        if node.op == "get_attr":
            number.update({t.untyped_storage()._cdata: -1 for t in tensors})
        if node.op != "call_function":
            continue
        is_late = place > forward_ends or any(a in late for a in node.all_input_nodes)
        if is_late:
            late.add(node)
        reads = sorted({v for a in node.all_input_nodes for v in values(a)})
        fresh = [t for t in tensors if t.untyped_storage()._cdata not in number]
        if not fresh or node.target is operator.getitem:
            continue
        if len(fresh) == len(tensors) == len(reads) == 1 and _name(node) in ("view", "_unsafe_view", "detach", "alias"):
            number[fresh[0].untyped_storage()._cdata] = reads[0]
            continue
        if not reads and not is_late:
            number.update({t.untyped_storage()._cdata: -1 for t in fresh})
            continue
        seconds = _seconds(node, fresh)
        makes = tuple(new(t) for t in {t.untyped_storage()._cdata: t for t in fresh}.values())
        ops.append(Op(node.name, seconds, tuple(reads), makes, is_late))
    ends = [v for g in gradients for v in values(g)]
    size = np.array(sizes, float)
    size[[v for g in gradients[: len(gradients) - is_trained] for v in values(g)]] = 0.0
    inputs = [v for n in places[constants:-1] for v in values(n)]
    (out,), (tangent,) = values(output), values(places[-1])
    return Step(ops, size, tuple(inputs), tangent, frozenset(ends), out, graph)


def _name(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]


def _seconds(node: torch.fx.Node, made: Iterable[Tensor]) -> float:
    read = [t for a in node.all_input_nodes for t in pytree.tree_leaves(a.meta.get("val")) if isinstance(t, Tensor)]
    moved = sum(t.numel() * t.element_size() for t in (*read, *made))
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    args, kwargs = pytree.tree_map(
        lambda a: a.meta["val"] if isinstance(a, torch.fx.Node) else a, (node.args, node.kwargs)
    )
    flops = count(*args, **kwargs, out_val=node.meta["val"]) if count is not None else 0
    return max(flops / FLOPS, moved / BANDWIDTH) + LAUNCH
