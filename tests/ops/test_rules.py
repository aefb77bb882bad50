"""A rule is a claim.

Every strategy of every rule is run on shards in one process, forward and backward, and recombined.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import autopar
from autopar.graph.graph import TensorType
from autopar.letters import BadRule
from autopar.ops.entry import FACTS, OPS, SHAPE, facts_of, rule_of
from autopar.sharding.notation import parse
from autopar.sharding.placement import R, every_part_holds_something, flow, part
from autopar.sharding.strategies import Strategy, strategies_on_one_axis
from autopar.space.bindings import without_numbers
from tests.ops.samples import SAMPLES, is_plain, normal, samples


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

    class Node:  # what tells a tensor from a number there
        meta = {}

    binding = without_numbers(binding, [Node() if isinstance(o, torch.Tensor) else o for o in operands])
    wants = [isinstance(o, torch.Tensor) and o.requires_grad for o in operands]
    return [
        s
        for s in strategies_on_one_axis(binding, wants, [o.requires_grad for o in outputs])
        if not (s.cut and (rule.masked & set(s.cut.factors) or binding.is_inside(s.cut)))
    ], binding.sizes


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_op_of_the_vocabulary_has_a_rule(op):
    assert FACTS[op].rule is not None or op in ("mean", "tensor")  # one becomes a sum, the other is a literal


def spread(tensor, placement, n):
    """What n devices hold of a tensor."""
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


def prove(op, arguments, strategy, n):
    """Run one strategy on n devices and compare every output and gradient with the whole op."""
    given = leaves(arguments)
    whole = {k: t.detach().requires_grad_(t.requires_grad) for k, t in given.items()}
    expected = tupled(OPS[op].run(with_leaves(arguments, whole)))
    cotangents = [torch.randn(e.shape, dtype=torch.float64).to(e.dtype) for e in expected]
    held = {k: spread(whole[k].detach(), f.value, n) for k, f in zip(given, strategy.operands)}
    pulled = [spread(c, f.gradient, n) for c, f in zip(cotangents, strategy.outputs)]
    local = [
        spread(e.detach(), f.value if not f.value.is_partial else R, n) for e, f in zip(expected, strategy.outputs)
    ]
    trained = [k for k in given if whole[k].requires_grad]
    outputs, gradients = [], []
    for i in range(n):
        mine = {k: held[k][i].clone().requires_grad_(k in trained) for k in given}
        here = with_leaves(arguments, mine)
        if shape := OPS[op].local(SHAPE):
            here[shape] = tuple(local[0][i].shape)
        if op == "split":
            here["sections"] = tuple(part_[i].shape[arguments.get("dim", 0)] for part_ in local)
        if op in ("conv1d", "conv2d", "conv3d") and arguments.get("groups", 1) > 1:
            here["groups"] = (
                here["input"].shape[here["input"].dim() - here["weight"].dim() + 1] // here["weight"].shape[1]
            )
        if op == "group_norm":
            here["num_groups"] = max(1, arguments["num_groups"] * here["input"].shape[1] // arguments["input"].shape[1])
        outputs.append(tupled(OPS[op].run(here)))
        if expected[0].requires_grad:
            gradients.append(
                torch.autograd.grad(
                    [o for o in outputs[-1] if o.requires_grad],
                    [mine[k] for k in trained],
                    [p[i] for p, o in zip(pulled, outputs[-1]) if o.requires_grad],
                    materialize_grads=True,
                )
            )
    coarsest = max(
        (torch.finfo(t.dtype).eps for t in (*given.values(), *expected) if t.is_floating_point()), default=0.0
    )
    close = {"rtol": 100 * coarsest, "atol": 100 * coarsest} if coarsest > 1e-9 else {"rtol": 1e-7, "atol": 1e-7}
    close["equal_nan"] = True
    for j, (e, f) in enumerate(zip(expected, strategy.outputs)):
        torch.testing.assert_close(
            gather([o[j].detach() for o in outputs], f.value),
            e.detach(),
            **close,
            msg=lambda m: f"{op} {strategy}: output\n{m}",
        )
    if gradients:
        flows = dict(zip(given, strategy.operands))
        for k, parts, e in zip(
            trained,
            zip(*gradients),
            torch.autograd.grad(
                [e for e in expected if e.requires_grad],
                [whole[k] for k in trained],
                [c for c, e in zip(cotangents, expected) if e.requires_grad],
                materialize_grads=True,
            ),
        ):
            torch.testing.assert_close(
                gather(list(parts), flows[k].gradient),
                e,
                **close,
                msg=lambda m, k=k: f"{op} {strategy}: gradient of {k}\n{m}",
            )


def run_all(op, count=None):
    for arguments, n in itertools.product(samples(op)[:count], (2, 3)):
        strategies, sizes = strategies_of(op, arguments)
        for strategy in strategies:
            if strategy.cut is None or all(
                sizes[f] % n == 0 if strategy.cut.even else every_part_holds_something(sizes[f], [n])
                for f in strategy.cut.factors
            ):
                prove(op, arguments, strategy, n)


@pytest.mark.parametrize(
    "op", sorted(op for op in FACTS if FACTS[op].rule is not None and (op in SAMPLES or is_plain(op)))
)  # the others: tests/ops/test_every_function.py
def test_every_strategy_computes_what_the_op_computes(op):
    run_all(op)


@pytest.mark.parametrize(
    "op, line, linear",
    [
        ("gelu", "... -> ...", "x"),
        ("add", "..., ... -> ...", "x, y"),
        ("linear", "... k, n k, n -> ... n", "x, y"),
        ("layer_norm", "... d, d, d -> ... d", ""),
        ("mul", "..., ... -> ...", "x+y"),
    ],
)
def test_a_wrong_rule_is_caught(op, line, linear, monkeypatch):
    monkeypatch.setattr(FACTS[op], "rule", parse(line, linear))
    with pytest.raises((AssertionError, RuntimeError)):
        run_all(op, 1)


def one_axis(line, linear, *shapes, out):
    binding = parse(line, linear).bind(shapes, [out])
    return set(strategies_on_one_axis(binding, [True] * len(shapes), [True]))


def written(text):
    return {Strategy.parse(s) for s in text.split("|")}


def test_mm_has_seven_strategies():
    assert one_axis("m k, k n -> m n", "x, y", (5, 4), (4, 6), out=(5, 6)) == written(
        "R, R -> R | R/P, R/P -> R/P | P, R/P -> P | R/P, P -> P | S(0), R/P -> S(0) | S(1), S(0) -> P | R/P, "
        "S(1) -> S(1)"
    )


def test_a_bias_is_a_sum_where_the_contraction_is_cut():
    found = one_axis("... k, n k, n -> ... n", "x+z, y+z", (5, 4), (6, 4), (6,), out=(5, 6))
    assert Strategy.parse("S(1), S(1), P -> P") in found
    assert not [s for s in found if s.operands[0] == flow(s.operands[0].value) and repr(s).startswith("S(1), S(1), R")]


def test_without_linear_no_operand_may_be_a_sum():
    assert one_axis("... -> ...", "", (5, 4), out=(5, 4)) == written(
        "R -> R | R/P -> R/P | S(0) -> S(0) | S(1) -> S(1)"
    )


def test_what_is_marked_stays_whole():
    assert one_axis("a b! -> a b!", "", (5, 4), out=(5, 4)) == written("R -> R | R/P -> R/P | S(0) -> S(0)")


def test_a_broadcast_dim_is_whole_where_the_other_is_cut():
    assert Strategy.parse("R/P, S(1) -> S(1)") in one_axis("..., ... -> ...", "x+y", (5, 1), (5, 4), out=(5, 4))


@pytest.mark.parametrize(
    "line, linear, match",
    [
        ("a b", "", "no arrow"),
        ("a a -> a", "", "twice"),
        ("a -> b", "", "output only"),
        ("a -> a", "y", "does not have"),
        ("a ? -> a", "", "not a dim"),
    ],
)
def test_a_line_that_cannot_be_read_is_a_letter(line, linear, match):
    with pytest.raises(BadRule, match=match):
        parse(line, linear)


@pytest.mark.parametrize("shapes, out", [([(5, 4)], (5, 4)), ([(5, 4), (3, 6)], (5, 6)), ([(5, 4, 2), (2, 6)], (5, 6))])
def test_a_call_that_does_not_fit_is_a_letter(shapes, out):
    with pytest.raises(BadRule):
        parse("m k, k n -> m n").bind(shapes, [out])


@pytest.mark.parametrize("line, mark", [("v~ d -> v d", "~"), ("n^ d -> d", r"\^"), ("d -> d b*", "[*]")])
def test_a_mark_without_a_local_form_is_a_letter(line, mark):
    """A user's op would run as it is on a part of what only a local form may cut."""
    with pytest.raises(BadRule, match=f"no local form for .*{mark}"):
        autopar.rule("autopar_tests::looks_up", line)
    assert facts_of("ops.autopar_tests.looks_up.default").rule is None


def test_more_operands_than_letters_are_one_sum():
    """Fifteen parts of sums that stand end to end are parts of a sum together, the last one too."""
    tensors = [normal(2, 3) for _ in range(20)]
    strategies, _ = strategies_of("cat", dict(tensors=tensors))
    together = [s for s in strategies if all(f.value.is_partial for f in s.outputs)]
    assert together and all(f.value.is_partial for s in together for f in s.operands)
    run_one = [s for s in strategies if s.cut is None]
    for strategy in run_one:
        prove("cat", dict(tensors=tensors), strategy, 2)


def test_a_users_rule_keeps_a_composite_whole():
    """What its owner has said how to cut is not opened into what torch makes it of."""
    from autopar.ops.declare import WHOLE
    from autopar.tracer import ColoTracer
    from tests.tracer.cases import Of

    def ops():
        return [
            n.target.name
            for n in ColoTracer().trace(Of(lambda m, x: torch.kron(x, x)), (torch.randn(2, 2),)).nodes
            if n.op == "call_function"
        ]

    assert "kron" not in ops()
    try:
        autopar.rule("kron", "a b, c d -> (a c) (b d)")
        assert "kron" in ops()
    finally:
        del FACTS["kron"]
        WHOLE.discard("kron")
