"""A rule is a claim. Every strategy of every rule is run on shards in one process, forward and backward, and recombined."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.letters import BadRule
from autopar.sharding.notation import parse
from autopar.sharding.placement import R, flow, part
from autopar.sharding.rules import RULES, rule_of
from autopar.sharding.shardings import _without_numbers
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


def whole_numbers(high, *shape):
    return torch.randint(0, high, shape)


def ignoring(targets, *rows):
    targets[list(rows)] = -100
    return targets


SAMPLES |= {
    "matmul": [dict(input=normal(5, 4), other=normal(4, 7)), dict(input=normal(3, 1, 5, 4), other=normal(6, 4, 7))],
    "eq": [dict(input=whole_numbers(3, 5, 4), other=whole_numbers(3, 4)), dict(input=whole_numbers(3, 5, 4), other=1)],
    "dropout": [dict(input=normal(5, 4), p=0.0)],
    "softmax": [dict(input=normal(5, 4, 6), dim=1)],
    "rms_norm": [dict(input=normal(5, 4, 6), normalized_shape=(6,), weight=normal(6))],
    "embedding": [dict(input=whole_numbers(6, 5, 4), weight=normal(6, 8)), dict(input=whole_numbers(6, 5), weight=normal(6, 8), padding_idx=2),
                  dict(input=torch.tensor([1, 1, 1, 2, 2, 0]), weight=normal(6, 8), scale_grad_by_freq=True)],
    "cross_entropy": [dict(input=normal(6, 7), target=ignoring(whole_numbers(7, 6), 0, 1, 2), reduction="sum"), dict(input=normal(6, 7, 3), target=whole_numbers(7, 6, 3), reduction="sum"),
                      dict(input=normal(6, 7), target=whole_numbers(7, 6), weight=positive(7).detach(), reduction="sum", label_smoothing=0.1)],
    "scaled_dot_product_attention": [dict(query=normal(2, 6, 5, 4), key=normal(2, 6, 7, 4), value=normal(2, 6, 7, 3)), dict(query=normal(2, 6, 5, 4), key=normal(2, 6, 5, 4), value=normal(2, 6, 5, 4), is_causal=True),
                                     dict(query=normal(2, 6, 5, 4), key=normal(2, 6, 5, 4), value=normal(2, 6, 5, 4), attn_mask=normal(2, 1, 5, 5).detach()),
                                     dict(query=normal(2, 12, 5, 4), key=normal(2, 6, 5, 4), value=normal(2, 6, 5, 4), enable_gqa=True)],
    "view": [dict(input=normal(6, 4), size=s) for s in ((24,), (6, 2, 2), (6, 1, 4), (1, 6, 4), (3, 8), (4, 6))] + [dict(input=normal(6, 2, 12), size=s) for s in ((12, 12), (6, 24), (6, 2, 6, 2), (3, 2, 24))],
    "transpose": [dict(input=normal(5, 4, 6), dim0=-1, dim1=0)],
    "permute": [dict(input=normal(5, 4, 6), dims=(2, 0, 1))],
    "split": [dict(input=normal(5, 12), sections=(6, 6), dim=1), dict(input=normal(5, 24), sections=(12, 6, 6), dim=1)],
    "cat": [dict(tensors=[normal(5, 6), normal(5, 12)], dim=1)],
    "narrow": [dict(input=normal(5, 4), dim=1, start=1, length=2)],
    "select": [dict(input=normal(5, 4, 6), dim=1, index=2)],
    "pad": [dict(input=normal(5, 4), pad=(0, 1)), dict(input=normal(5, 4), pad=(1, 0), value=3.0)],
}
SAMPLES["ne"] = SAMPLES["eq"]


def samples(op):
    return SAMPLES.get(op, [dict(input=normal(5, 4))])


def leaves(arguments):
    """The tensors of a call by where they stand."""
    return {(k, i): t for k, v in arguments.items() for i, t in enumerate(v if isinstance(v, (list, tuple)) else [v]) if isinstance(t, torch.Tensor)}


def with_leaves(arguments, tensors):
    return {k: [tensors[k, i] for i in range(len(v))] if isinstance(v, list) else tensors.get((k, 0), v) for k, v in arguments.items()}


def tupled(result):
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def strategies_of(op, arguments):
    """Strategies with the cut of each; a cut behind a mask needs the local form, which other tests run."""
    typed_ = {k: [TensorType.of(t) for t in v] if isinstance(v, list) else TensorType.of(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    outputs = tupled(OPS[op].run(arguments))
    operands = OPS[op].operands(arguments)
    types = tuple(TensorType.of(o) for o in outputs)
    binding = rule_of(op, {**typed_, "outputs": types}).bind([None if o is None else tuple(o.shape) if isinstance(o, torch.Tensor) else () for o in operands], [t.shape for t in types])

    class Node:                                                # what tells a tensor from a number there
        meta = {}

    binding = _without_numbers(binding, [Node() if isinstance(o, torch.Tensor) else o for o in operands])
    wants = [isinstance(o, torch.Tensor) and o.requires_grad for o in operands]
    return [s for s in strategies_on_one_axis(binding, wants, [o.requires_grad for o in outputs]) if not (s.cut and MASKED.get(op) in s.cut.factors)], binding.sizes


MASKED = {"embedding": "v", "cross_entropy": "c"}


def spread(tensor, placement, n):
    """What n devices hold of a tensor."""
    if placement.is_shard:
        blocks = tensor.split(placement.blocks or tensor.shape[placement.dim], placement.dim)
        return [torch.cat([b.narrow(placement.dim, *part(b.shape[placement.dim], n, i)) for b in blocks], placement.dim) for i in range(n)]
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
        torch.testing.assert_close(other, parts[0])
    return parts[0]


def prove(op, arguments, strategy, n):
    """Run one strategy on n devices and compare every output and gradient with the whole op."""
    given = leaves(arguments)
    whole = {k: t.detach().requires_grad_(t.requires_grad) for k, t in given.items()}
    expected = tupled(OPS[op].run(with_leaves(arguments, whole)))
    cotangents = [torch.randn(e.shape, dtype=torch.float64).to(e.dtype) for e in expected]
    held = {k: spread(whole[k].detach(), f.value, n) for k, f in zip(given, strategy.operands)}
    pulled = [spread(c, f.gradient, n) for c, f in zip(cotangents, strategy.outputs)]
    local = [spread(e.detach(), f.value if not f.value.is_partial else R, n) for e, f in zip(expected, strategy.outputs)]
    trained = [k for k in given if whole[k].requires_grad]
    outputs, gradients = [], []
    for i in range(n):
        mine = {k: held[k][i].clone().requires_grad_(k in trained) for k in given}
        here = with_leaves(arguments, mine)
        if op == "view":
            here["size"] = tuple(local[0][i].shape)
        if op == "split":
            here["sections"] = tuple(part_[i].shape[arguments.get("dim", 0)] for part_ in local)
        outputs.append(tupled(OPS[op].run(here)))
        if expected[0].requires_grad:
            gradients.append(torch.autograd.grad(outputs[-1], [mine[k] for k in trained], [p[i] for p in pulled]))
    close = {"rtol": 1e-5, "atol": 1e-5} if op == "to" else {}            # float32 is one of its sides
    for j, (e, f) in enumerate(zip(expected, strategy.outputs)):
        torch.testing.assert_close(gather([o[j].detach() for o in outputs], f.value), e.detach(), **close, msg=lambda m: f"{op} {strategy}: output\n{m}")
    if gradients:
        flows = dict(zip(given, strategy.operands))
        for k, parts, e in zip(trained, zip(*gradients), torch.autograd.grad(expected, [whole[k] for k in trained], cotangents)):
            torch.testing.assert_close(gather(list(parts), flows[k].gradient), e, **close, msg=lambda m, k=k: f"{op} {strategy}: gradient of {k}\n{m}")


def run_all(op, count=None):
    for arguments, n in itertools.product(samples(op)[:count], (2, 3)):
        strategies, sizes = strategies_of(op, arguments)
        for strategy in strategies:
            if strategy.cut is None or not strategy.cut.even or all(sizes[f] % n == 0 for f in strategy.cut.factors):
                prove(op, arguments, strategy, n)


@pytest.mark.parametrize("op", sorted(RULES))
def test_every_strategy_computes_what_the_op_computes(op):
    run_all(op)


@pytest.mark.parametrize("op, line, linear", [
    ("gelu", "... -> ...", "x"), ("add", "..., ... -> ...", "x, y"), ("linear", "... k, n k, n -> ... n", "x, y"), ("layer_norm", "... d, d, d -> ... d", ""), ("mul", "..., ... -> ...", "x+y"),
])
def test_a_wrong_rule_is_caught(op, line, linear, monkeypatch):
    monkeypatch.setitem(RULES, op, parse(line, linear))
    with pytest.raises((AssertionError, RuntimeError)):
        run_all(op, 1)


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
