"""A strategy is run on shards in one process, forward and backward, and recombined to what the whole op gives.

Shards are pieces of one tensor; parts of sums are drawn.
"""

from __future__ import annotations

import itertools

import torch

from autopar.graph.graph import TensorType
from autopar.ops.entry import OPS, Op, facts_of, rule_of
from autopar.ops.local import OpCall, on_device
from autopar.sharding.placement import every_part_holds_something
from autopar.sharding.strategies import Strategy, strategies_on_one_axis
from autopar.space.bindings import without_numbers
from autopar.space.trial import Devices, Trial, tupled
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


def typed(value):
    """Arguments with types in the places of tensors."""
    if isinstance(value, dict):
        return {k: typed(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(typed, value))
    return TensorType.of(value) if isinstance(value, torch.Tensor) else value


def strategies_of(op, arguments, with_marks=True):
    """Strategies of a call, with or without those that a mark gives, and the sizes of its dims."""
    outputs = tupled(OPS[op].run(arguments))
    operands = OPS[op].operands(arguments)
    types = tuple(TensorType.of(o) for o in outputs)
    rule = rule_of(op, {**typed(arguments), "outputs": types})
    binding = rule.bind(
        [None if o is None else tuple(o.shape) if isinstance(o, torch.Tensor) else () for o in operands],
        [t.shape for t in types],
    )

    node = torch.fx.Graph().placeholder("tensor")  # what tells a tensor from a number there
    binding = without_numbers(binding, [node if isinstance(o, torch.Tensor) else o for o in operands])
    wants = [isinstance(o, torch.Tensor) and o.requires_grad for o in operands]
    strategies = strategies_on_one_axis(binding, wants, [o.requires_grad for o in outputs])
    marked = rule.masked | rule.inside
    return [s for s in strategies if with_marks or not s.cut or marked.isdisjoint(s.cut.factors)], binding.sizes


def trial_of(op, arguments, communicates=False):
    """The call as the package tries it: on a part in its local form, which sends messages if it `communicates`."""
    given = leaves(arguments)

    def filled(tensors):
        return with_leaves(arguments, dict(zip(given, tensors, strict=True)))

    def local(tensors, here):
        function, kwargs = on_device(OPS[op], here, call, filled(tensors))
        return function.run(kwargs) if isinstance(function, Op) else function(**kwargs)

    # whose samples draw nothing, or whose form is written out before it runs
    if (facts_of(op).draws and not facts_of(op).serves) or op == "added_up":
        return Trial(tuple(given.values()), lambda tensors: OPS[op].run(filled(tensors)))
    outputs = tuple(TensorType.of(o) for o in tupled(OPS[op].run(arguments)))
    call = OpCall(op, typed(arguments), outputs)
    tolerance = tolerance_of([*given.values(), *tupled(OPS[op].run(arguments))])
    return Trial(tuple(given.values()), lambda tensors: OPS[op].run(filled(tensors)), local, communicates, tolerance)


def tolerance_of(tensors) -> float:
    """The bound of an error, by the coarsest dtype among the tensors."""
    coarsest = max((torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()), default=0.0)
    return 100 * coarsest if coarsest > 1e-9 else 1e-7


def prove(op: str, arguments: dict, strategy: Strategy, n: int) -> Devices:
    """Run one strategy on n devices and compare every output and gradient with the whole op."""
    devices = Devices(trial_of(op, arguments, bool(facts_of(op).serves)), n)
    fault = devices.fault(strategy)
    assert fault is None, f"{op} {strategy} on {n} devices: {fault}"
    return devices


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
