"""A strategy is run on shards in one process, forward and backward, and recombined to what the whole op gives.

Shards are pieces of one tensor; parts of sums are drawn.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from autopar.graph.graph import TensorType
from autopar.ops.entry import OPS, SHAPE, rule_of
from autopar.sharding.placement import R, every_part_holds_something, part
from autopar.sharding.strategies import Strategy, strategies_on_one_axis
from autopar.space.bindings import without_numbers
from tests.ops.samples import samples


def leaves(arguments):
    """The tensors of a call by where they stand."""
    return {
        (k, i): t
        for k, v in arguments.items()
        for i, t in enumerate(v if isinstance(v, (list, tuple)) else [v])
        if isinstance(t, torch.Tensor)
    }


def with_leaves(arguments, tensors):
    def rebuilt(k, v):
        return (
            type(v)(tensors.get((k, i), e) for i, e in enumerate(v))
            if isinstance(v, (list, tuple))
            else tensors.get((k, 0), v)
        )

    return {k: rebuilt(k, v) for k, v in arguments.items()}


def tupled(result):
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def strategies_of(op, arguments):
    """Strategies of a call and the sizes of its dims.

    Cuts behind a mask are left to tests/equality/test_local_forms.py.
    """

    def typed(v):
        return (
            type(v)(map(typed, v))
            if isinstance(v, (list, tuple))
            else TensorType.of(v)
            if isinstance(v, torch.Tensor)
            else v
        )

    typed_ = {k: typed(v) for k, v in arguments.items()}
    outputs = tupled(OPS[op].run(arguments))
    operands = OPS[op].operands(arguments)
    types = tuple(TensorType.of(o) for o in outputs)
    rule = rule_of(op, {**typed_, "outputs": types})
    binding = rule.bind(
        [None if o is None else tuple(o.shape) if isinstance(o, torch.Tensor) else () for o in operands],
        [t.shape for t in types],
    )

    node = torch.fx.Graph().placeholder("tensor")  # what tells a tensor from a number there
    binding = without_numbers(binding, [node if isinstance(o, torch.Tensor) else o for o in operands])
    wants = [isinstance(o, torch.Tensor) and o.requires_grad for o in operands]
    return [
        s
        for s in strategies_on_one_axis(binding, wants, [o.requires_grad for o in outputs])
        if not (s.cut and (rule.masked & set(s.cut.factors) or binding.is_inside(s.cut)))
    ], binding.sizes


def spread(tensor, placement, n):
    """Parts of a tensor as n devices hold them."""
    if placement.is_shard:
        blocks = tensor.split(placement.blocks or tensor.shape[placement.dim], placement.dim)
        return [
            torch.cat([b.narrow(placement.dim, *part(b.shape[placement.dim], n, i)) for b in blocks], placement.dim)
            for i in range(n)
        ]
    if placement.is_partial:
        parts = [torch.randn(tensor.shape, dtype=torch.float64).to(tensor.dtype) for _ in range(n - 1)]
        return [*parts, tensor - sum(parts)]
    return [tensor] * n


def gather(parts, placement, blocks_sizes=None):
    """The tensor that devices hold parts of; copies must agree."""
    if placement.is_shard and placement.blocks:
        n = len(parts)
        pieces = [p.split([b // n for b in placement.blocks], placement.dim) for p in parts]
        return torch.cat([pieces[i][b] for b in range(len(placement.blocks)) for i in range(n)], placement.dim)
    if placement.is_shard:
        return torch.cat(parts, placement.dim)
    if placement.is_partial:
        return sum(parts)
    for other in parts[1:]:
        torch.testing.assert_close(other, parts[0], equal_nan=True)
    return parts[0]


def local_arguments(op, arguments, here, shapes):
    """Arguments on one device: a shape or a number of groups that they name is that of the parts."""
    here = dict(here)
    if shape := OPS[op].local(SHAPE):
        here[shape] = tuple(shapes[0])
    if op == "split":
        here["sections"] = tuple(s[arguments.get("dim", 0)] for s in shapes)
    if op in ("conv1d", "conv2d", "conv3d") and arguments.get("groups", 1) > 1:
        channels = here["input"].shape[here["input"].dim() - here["weight"].dim() + 1]
        here["groups"] = channels // here["weight"].shape[1]
    if op == "group_norm":
        here["num_groups"] = max(1, arguments["num_groups"] * here["input"].shape[1] // arguments["input"].shape[1])
    return here


def pulled_back(outputs, tensors, cotangents):
    """Gradients of the tensors, zeros where there is none."""
    reached = [(o, c) for o, c in zip(outputs, cotangents) if o.requires_grad]
    return torch.autograd.grad([o for o, _ in reached], tensors, [c for _, c in reached], materialize_grads=True)


@dataclass(frozen=True)
class Whole:
    """A call of an op on one device: its tensors by place, its outputs, and gradients that arrive at them."""

    op: str
    arguments: dict
    tensors: dict
    outputs: tuple
    cotangents: list

    @classmethod
    def of(cls, op: str, arguments: dict) -> Whole:
        """Run the op."""
        tensors = {k: t.detach().requires_grad_(t.requires_grad) for k, t in leaves(arguments).items()}
        outputs = tupled(OPS[op].run(with_leaves(arguments, tensors)))
        cotangents = [torch.randn(o.shape, dtype=torch.float64).to(o.dtype) for o in outputs]
        return cls(op, arguments, tensors, outputs, cotangents)

    @property
    def trained(self) -> list:
        return [k for k, t in self.tensors.items() if t.requires_grad]

    def on_devices(self, strategy: Strategy, n: int) -> tuple[list, list]:
        """Outputs, and gradients of what trains, on each of n devices."""
        held = {k: spread(t.detach(), f.value, n) for (k, t), f in zip(self.tensors.items(), strategy.operands)}
        pulled = [spread(c, f.gradient, n) for c, f in zip(self.cotangents, strategy.outputs)]
        lies = [R if f.value.is_partial else f.value for f in strategy.outputs]
        local = [spread(o.detach(), placement, n) for o, placement in zip(self.outputs, lies)]
        outputs, gradients = [], []
        for i in range(n):
            mine = {k: parts[i].clone().requires_grad_(k in self.trained) for k, parts in held.items()}
            here = with_leaves(self.arguments, mine)
            here = local_arguments(self.op, self.arguments, here, [parts[i].shape for parts in local])
            outputs.append(tupled(OPS[self.op].run(here)))
            if self.outputs[0].requires_grad:
                own = [parts[i] for parts in pulled]
                gradients.append(pulled_back(outputs[-1], [mine[k] for k in self.trained], own))
        return outputs, gradients


def tolerance(tensors) -> dict:
    """Bounds of an error, by the coarsest dtype among the tensors."""
    coarsest = max((torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()), default=0.0)
    bound = 100 * coarsest if coarsest > 1e-9 else 1e-7
    return {"rtol": bound, "atol": bound, "equal_nan": True}


def prove(op: str, arguments: dict, strategy: Strategy, n: int) -> None:
    """Run one strategy on n devices and compare every output and gradient with the whole op."""
    whole = Whole.of(op, arguments)
    close = tolerance([*whole.tensors.values(), *whole.outputs])
    outputs, gradients = whole.on_devices(strategy, n)
    for j, (expected, f) in enumerate(zip(whole.outputs, strategy.outputs)):
        found = gather([o[j].detach() for o in outputs], f.value)
        torch.testing.assert_close(found, expected.detach(), **close, msg=lambda m: f"{op} {strategy}: output\n{m}")
    if not gradients:
        return
    flows = dict(zip(whole.tensors, strategy.operands))
    by_eager = pulled_back(whole.outputs, [whole.tensors[k] for k in whole.trained], whole.cotangents)
    for k, parts, expected in zip(whole.trained, zip(*gradients), by_eager):
        found = gather(list(parts), flows[k].gradient)
        torch.testing.assert_close(
            found, expected, **close, msg=lambda m, k=k: f"{op} {strategy}: gradient of {k}\n{m}"
        )


def run_all(op: str, count: int | None = None) -> None:
    """Prove every strategy of an op on its samples, on two and on three devices."""
    for arguments, n in itertools.product(samples(op)[:count], (2, 3)):
        strategies, sizes = strategies_of(op, arguments)
        for strategy in strategies:
            if strategy.cut is None or all(
                sizes[f] % n == 0 if strategy.cut.even else every_part_holds_something(sizes[f], [n])
                for f in strategy.cut.factors
            ):
                prove(op, arguments, strategy, n)
