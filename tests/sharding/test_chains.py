"""A shard that goes through views, turns, splits and joins by the rules is the shard of the result."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.graph.graph import TensorType
from autopar.ops.entry import OPS, rule_of
from autopar.sharding.placement import P, R, S
from autopar.sharding.strategies import strategies_on_one_axis
from autopar.space import trial

SIZES = (2, 3, 4, 6, 12)

RANDOM = torch.Generator().manual_seed(0)


def spread(tensor, placement, n):
    return trial.spread(tensor, placement, n, RANDOM)


@st.composite
def another_shape(draw, shape):
    """The same number of elements, in other dims."""
    rest, made = math.prod(shape), []
    while rest > 1 and len(made) < 4:
        n = draw(st.sampled_from([d for d in (1, *SIZES, rest) if rest % d == 0]))
        made.append(n)
        rest //= n
    return tuple(made) + ((rest,) if rest > 1 or not made else ())


@st.composite
def chains(draw):
    """A start, a dim of it that is cut, and a few ops."""
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    start, cut, ops = shape, draw(st.integers(0, len(shape) - 1)), []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["view", "transpose", "permute", "split and cat", "stack and unbind", "narrow"]))
        if kind == "view":
            shape = draw(another_shape(shape))
            ops.append(("view", {"size": shape}))
        elif kind in ("transpose", "permute") and len(shape) > 1:
            order = draw(st.permutations(range(len(shape))))
            shape = tuple(shape[d] for d in order)
            ops.append(("permute", {"dims": tuple(order)}))
        elif kind == "split and cat":
            dim = draw(st.integers(0, len(shape) - 1))
            if shape[dim] % 2 == 0:
                ops.append(("split", {"sections": (shape[dim] // 2,) * 2, "dim": dim}))
                ops.append(("cat", {"dim": dim}))
        elif kind == "narrow" and shape[-1] > 2:
            shape = (*shape[:-1], shape[-1] - 1)
            ops.append(("narrow", {"dim": len(shape) - 1, "start": 1, "length": shape[-1]}))
    return start, cut, ops


def strategy_of(op, arguments, operands, outputs, placements):
    types = tuple(TensorType.of(o) for o in outputs)
    named = {"tensors": [TensorType.of(t) for t in operands]} if op == "cat" else {"input": TensorType.of(operands[0])}
    binding = rule_of(op, {**arguments, **named, "outputs": types}).bind(
        [tuple(t.shape) for t in operands], [t.shape for t in types]
    )
    fitting = [
        s
        for s in strategies_on_one_axis(binding, [True] * len(operands), [True] * len(outputs))
        if tuple(f.value for f in s.operands) == placements
    ]
    return next(
        (
            s
            for s in fitting
            if s.cut is None or not s.cut.even or all(binding.sizes[f] % 2 == 0 for f in s.cut.factors)
        ),
        None,
    )


@settings(max_examples=300, deadline=None)
@given(chains(), st.booleans())
def test_a_shard_stays_a_shard_of_the_result(chain, summed):
    shape, cut, ops = chain
    whole = [torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)]
    placement = [P() if summed else S(cut)]
    if not summed and shape[cut] % 2:
        return
    parts = [[p] for p in spread(whole[0], placement[0], 2)]
    for op, arguments in ops:
        key = "tensors" if op == "cat" else "input"
        outputs = OPS[op].run({key: whole if op == "cat" else whole[0], **arguments})
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        strategy = strategy_of(op, arguments, whole, outputs, tuple(placement))
        if strategy is None:  # the rule does not carry this cut: a conversion would come here
            return
        flows = [f.value for f in strategy.outputs]
        made = []
        for i in range(2):
            local = dict(arguments)
            if op == "view":
                local["size"] = tuple(spread(outputs[0], flows[0], 2)[i].shape)
            if op == "split":
                local["sections"] = tuple(
                    spread(o, f, 2)[i].shape[arguments["dim"]] for o, f in zip(outputs, flows, strict=True)
                )
            result = OPS[op].run({key: parts[i] if op == "cat" else parts[i][0], **local})
            made.append(list(result) if isinstance(result, tuple) else [result])
        whole, placement, parts = outputs, flows, made
    for value, lies, mine in zip(whole, placement, zip(*parts, strict=True), strict=True):
        if lies.is_partial:
            torch.testing.assert_close(sum(mine), value)
        elif lies != R:
            for a, b in zip(mine, spread(value, lies, 2), strict=True):
                assert torch.equal(a, b)
