"""A rule is a claim. Every strategy of every rule is run on shards in one process, forward and backward, and recombined."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.letters import BadRule
from autopar.sharding.notation import parse
from autopar.sharding.placement import flow, part
from autopar.sharding.rules import RULES, rule_of
from autopar.sharding.strategies import Strategy, strategies_on_one_axis
from autopar.tracer.graph import TensorType
from autopar.tracer.vocabulary import OPS


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def positive(*shape):
    return (torch.rand(*shape, dtype=torch.float64) + 0.5).requires_grad_()


SAMPLES = {
    "linear": [dict(input=normal(5, 7, 4), weight=normal(6, 4), bias=normal(6)), dict(input=normal(5, 4), weight=normal(6, 4))],
    "mm": [dict(input=normal(5, 4), mat2=normal(4, 7))],
    "add": [dict(input=normal(5, 4), other=normal(5, 4)), dict(input=normal(5, 4), other=normal(4), alpha=0.5), dict(input=normal(5, 4), other=2.0), dict(input=normal(5, 1), other=normal(5, 4))],
    "mul": [dict(input=normal(5, 4), other=normal(5, 1)), dict(input=normal(5, 4), other=2.0)],
    "div": [dict(input=normal(5, 4), other=positive(4)), dict(input=normal(5, 4), other=positive(4), rounding_mode="floor")],
    "pow": [dict(input=positive(5, 4), exponent=2), dict(input=positive(5, 4), exponent=positive(5, 4))],
    "to": [dict(input=normal(5, 4), dtype=torch.float32), dict(input=normal(5, 4), dtype=torch.int64)],
    "sum": [dict(input=normal(5, 4)), dict(input=normal(5, 4, 3), dim=1), dict(input=normal(5, 4, 3), dim=(0, -1), keepdim=True)],
    "layer_norm": [dict(input=normal(5, 4, 6), normalized_shape=(6,), weight=normal(6), bias=normal(6)), dict(input=normal(5, 4, 6), normalized_shape=(4, 6))],
    "mse_loss": [dict(input=normal(5, 4), target=normal(5, 4), reduction="none")],
    **{op: [dict(input=positive(5, 4))] for op in ("log", "sqrt", "rsqrt")},
}
SAMPLES["sub"] = SAMPLES["add"]


def samples(op):
    return SAMPLES.get(op, [dict(input=normal(5, 4))])


def strategies_of(op, arguments):
    typed = {k: TensorType.of(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    operands = OPS[op].operands(arguments)
    out = OPS[op].run(arguments)
    binding = rule_of(op, {**typed, "outputs": (TensorType.of(out),)}).bind([None if o is None else tuple(o.shape) if isinstance(o, torch.Tensor) else () for o in operands], [tuple(out.shape)])
    from autopar.sharding.shardings import _without_numbers

    class Node:                                                # what tells a tensor from a number there
        meta = {}

    binding = _without_numbers(binding, [Node() if isinstance(o, torch.Tensor) else o for o in operands])
    return strategies_on_one_axis(binding, [isinstance(o, torch.Tensor) for o in operands], [out.requires_grad])


def spread(tensor, placement, n):
    """What n devices hold of a tensor."""
    if placement.is_shard:
        return [tensor.narrow(placement.dim, *part(tensor.shape[placement.dim], n, i)) for i in range(n)]
    if placement.is_partial:
        parts = [torch.randn_like(tensor) for _ in range(n - 1)]
        return [*parts, tensor - sum(parts)]
    return [tensor] * n


def gather(parts, placement):
    """The tensor that devices hold parts of; copies must agree."""
    if placement.is_shard:
        return torch.cat(parts, placement.dim)
    if placement.is_partial:
        return sum(parts)
    for other in parts[1:]:
        torch.testing.assert_close(other, parts[0])
    return parts[0]


def prove(op, arguments, strategy, n):
    """Run one strategy on n devices and compare output and every gradient with the whole op."""
    names = [k for k, v in arguments.items() if isinstance(v, torch.Tensor)]
    whole = {k: arguments[k].detach().requires_grad_() for k in names}
    expected = OPS[op].run({**arguments, **whole})
    cotangent = torch.randn(expected.shape, dtype=torch.float64).to(expected.dtype)
    held = {k: spread(whole[k].detach(), f.value, n) for k, f in zip(names, strategy.operands)}
    outputs, gradients = [], []
    for i, grad in enumerate(spread(cotangent, strategy.outputs[0].gradient, n)):
        mine = {k: held[k][i].clone().requires_grad_() for k in names}
        outputs.append(OPS[op].run({**arguments, **mine}))
        if expected.requires_grad:
            gradients.append(torch.autograd.grad(outputs[-1], list(mine.values()), grad))
    close = {"rtol": 1e-5, "atol": 1e-5} if op == "to" else {}            # float32 is one of its sides
    torch.testing.assert_close(gather([o.detach() for o in outputs], strategy.outputs[0].value), expected.detach(), **close, msg=lambda m: f"{op} {strategy}: output\n{m}")
    if expected.requires_grad:
        for k, f, parts, e in zip(names, strategy.operands, zip(*gradients), torch.autograd.grad(expected, list(whole.values()), cotangent)):
            torch.testing.assert_close(gather(list(parts), f.gradient), e, **close, msg=lambda m, k=k: f"{op} {strategy}: gradient of {k}\n{m}")


@pytest.mark.parametrize("op", sorted(RULES))
def test_every_strategy_computes_what_the_op_computes(op):
    for arguments, n in itertools.product(samples(op), (2, 3)):
        for strategy in strategies_of(op, arguments):
            prove(op, arguments, strategy, n)


@pytest.mark.parametrize("op, line, linear", [
    ("gelu", "... -> ...", "x"), ("add", "..., ... -> ...", "x, y"), ("linear", "... k, n k, n -> ... n", "x, y"), ("layer_norm", "... d, d, d -> ... d", ""), ("mul", "..., ... -> ...", "x+y"),
])
def test_a_wrong_rule_is_caught(op, line, linear, monkeypatch):
    monkeypatch.setitem(RULES, op, parse(line, linear))
    with pytest.raises((AssertionError, RuntimeError)):
        for arguments, n in itertools.product(samples(op)[:1], (2, 3)):
            for strategy in strategies_of(op, arguments):
                prove(op, arguments, strategy, n)


def one_axis(line, linear, *shapes, out):
    binding = parse(line, linear).bind(shapes, [out])
    return set(strategies_on_one_axis(binding, [True] * len(shapes), [True]))


def written(text):
    return {Strategy.parse(s) for s in text.split("|")}


def test_mm_has_seven_strategies():
    assert one_axis("m k, k n -> m n", "x, y", (5, 4), (4, 6), out=(5, 6)) == written(
        "R, R -> R | R/P, R/P -> R/P | P, R/P -> P | R/P, P -> P | S(0), R/P -> S(0) | S(1), S(0) -> P | R/P, S(1) -> S(1)")


def test_a_bias_is_a_sum_where_the_contraction_is_cut():
    found = one_axis("... k, n k, n -> ... n", "x+z, y+z", (5, 4), (6, 4), (6,), out=(5, 6))
    assert Strategy.parse("S(1), S(1), P -> P") in found
    assert not [s for s in found if s.operands[0] == flow(s.operands[0].value) and repr(s).startswith("S(1), S(1), R")]


def test_without_linear_no_operand_may_be_a_sum():
    assert one_axis("... -> ...", "", (5, 4), out=(5, 4)) == written("R -> R | R/P -> R/P | S(0) -> S(0) | S(1) -> S(1)")


def test_what_is_marked_stays_whole():
    assert one_axis("a b! -> a b!", "", (5, 4), out=(5, 4)) == written("R -> R | R/P -> R/P | S(0) -> S(0)")


def test_a_broadcast_dim_is_whole_where_the_other_is_cut():
    assert Strategy.parse("R/P, S(1) -> S(1)") in one_axis("..., ... -> ...", "x+y", (5, 1), (5, 4), out=(5, 4))


@pytest.mark.parametrize("line, linear, match", [
    ("a b", "", "no arrow"), ("a a -> a", "", "twice"), ("a -> b", "", "output only"), ("a -> a", "y", "does not have"), ("a ? -> a", "", "not a dim"),
])
def test_a_line_that_cannot_be_read_is_a_letter(line, linear, match):
    with pytest.raises(BadRule, match=match):
        parse(line, linear)


@pytest.mark.parametrize("shapes, out", [([(5, 4)], (5, 4)), ([(5, 4), (3, 6)], (5, 6)), ([(5, 4, 2), (2, 6)], (5, 6))])
def test_a_call_that_does_not_fit_is_a_letter(shapes, out):
    with pytest.raises(BadRule):
        parse("m k, k n -> m n").bind(shapes, [out])
