"""A rule is a claim.

Every strategy of every rule is run on shards in one process, forward and backward, and recombined.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import autopar
from autopar.graph.graph import TensorType
from autopar.letters import BadRule
from autopar.ops.declare import WHOLE, users_rule
from autopar.ops.entry import FACTS, OPS, describe, exchanges_of, facts_of, rule_of, sends_along
from autopar.ops.exchange import Along, Exchange, messages_of, read_exchanges
from autopar.ops.local import OpCall, OpOnDevice
from autopar.runtime.rehearsal import AXIS, Rehearsal
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.notation import parse
from autopar.sharding.placement import flow
from autopar.sharding.strategies import Choice, Strategy, strategies_on_one_axis
from autopar.space.trial import CannotRun, tupled
from autopar.tracer import ColoTracer
from tests.ops.proof import prove, run_all, strategies_of, typed
from tests.ops.samples import OF_MODELS, OF_TORCH, OF_TURNS, SAMPLES, is_plain, normal, samples
from tests.tracer.cases import Of


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_op_of_the_vocabulary_has_a_rule(op):
    assert FACTS[op].rule is not None or op in ("mean", "tensor")  # one becomes a sum, the other is a literal


@pytest.mark.parametrize(
    "op", sorted(op for op in FACTS if FACTS[op].rule is not None and (op in SAMPLES or is_plain(op)))
)  # the others: tests/ops/test_every_function.py
def test_every_strategy_computes_what_the_op_computes(op):
    run_all(op)


# Other tests declare ops of their own while they run.
RULED = sorted(op for op, facts in FACTS.items() if facts.rule is not None and not users_rule(op))


def test_every_rule_is_tried():
    """An op without a sample would be collected by no test."""
    tried = {*SAMPLES, *OF_TORCH, *OF_MODELS, *OF_TURNS}
    missing = [op for op in RULED if op not in tried and not is_plain(op)]
    assert not missing, f"no test tries the rules of {missing}: give them calls in SAMPLES of tests/ops/samples.py"
    assert OF_TORCH.isdisjoint(SAMPLES)
    assert not [op for op in tried - SAMPLES.keys() if FACTS[op].serves], "what a form computes is tried on samples"


SENDING = sorted(op for op, facts in FACTS.items() if facts.serves and facts.form and SAMPLES.get(op))


def proofs(op):
    """Every sample and strategy of an op on two devices that no cut leaves without a part."""
    for arguments in samples(op):
        strategies, sizes = strategies_of(op, arguments)
        for strategy in strategies:
            if strategy.cut is None or all(sizes[f] >= 2 for f in strategy.cut.factors):
                yield arguments, strategy


@pytest.mark.parametrize("op", SENDING)
def test_an_entry_says_what_its_form_sends(op):
    """Plans are priced by it."""
    sends = False
    for arguments, strategy in proofs(op):
        outputs = tuple(TensorType.of(o) for o in tupled(OPS[op].run(arguments)))
        said = said_of(OpCall(op, typed(arguments), outputs), strategy)
        sent = prove(op, arguments, strategy, 2).messages
        assert all(of_way == said[way] for way, of_way in sent.items()), strategy
        sends = sends or any(map(any, said.values()))
    assert sends or not FACTS[op].exchanges or FACTS[op].exchanges == (0, 0)


def said_of(call, strategy):
    """The messages on two devices under a strategy, as the entry says them."""
    rule = rule_of(call.op, {**call.arguments, "outputs": call.outputs})
    along = Along(OpOnDevice.fullest(DeviceMesh((2,), (AXIS,)), Choice((strategy,))), AXIS)
    return messages_of(exchanges_of(call, along) if sends_along(call.op, rule, strategy.cut) else (), 2)


def sent_at_most(op):
    """The most messages of a form over the samples and strategies of its op."""
    most = 0
    for arguments, strategy in proofs(op):
        call = OpCall(op, typed(arguments), tuple(map(TensorType.of, tupled(OPS[op].run(arguments)))))
        most = max(most, sum(sum(of_way.values()) for of_way in said_of(call, strategy).values()))
    return most


@pytest.mark.parametrize("op, left_out", [(op, k) for op in SENDING for k in range(sent_at_most(op))])
def test_a_form_without_one_of_its_messages_is_caught(op, left_out, monkeypatch):
    sent = Counter()

    def alone(self, index, x, kind):
        sent[index] += 1
        return [x] if sent[index] == left_out + 1 else exchanged(self, index, x, kind)

    exchanged = Rehearsal.exchanged
    monkeypatch.setattr(Rehearsal, "exchanged", alone)
    with pytest.raises((AssertionError, CannotRun)):  # rows that did not come may be missed before they are compared
        for arguments, strategy in proofs(op):
            sent.clear()
            prove(op, arguments, strategy, 2)


@pytest.mark.parametrize(
    "serves, how, said",
    [
        ("^", dict(form=print), "all-reduce"),
        ("~", {}, "no local form"),
        ("~", dict(form=print), "counts positions"),
        ("*", dict(form=print, exchanges=(1, 0)), "along no mark"),
    ],
)
def test_an_entry_without_its_form_or_what_it_sends_is_an_error(serves, how, said):
    """Its communication would be free in every plan."""
    with pytest.raises(BadRule, match=said):
        describe("autopar_tests.summed", rule="n^ d -> d", serves=serves, **how)
    assert "autopar_tests.summed" not in FACTS


@pytest.mark.parametrize(
    "how, said", [({"kind": "broadcast"}, "did you mean|all_reduce"), ({"way": "back"}, "backward")]
)
def test_an_exchange_of_no_known_kind_is_an_error(how, said):
    with pytest.raises(BadRule, match=said):
        Exchange(**{"kind": "all_reduce", **how})


@pytest.mark.parametrize("said", [(1,), (1, 0, 0), (1, Exchange("all_gather")), "all_gather"])
def test_exchanges_that_are_neither_two_numbers_nor_values_are_an_error(said):
    with pytest.raises(BadRule, match="neither two numbers of all-reduces"):
        read_exchanges(said)


@pytest.mark.parametrize(
    "op, line, linear",
    [
        ("gelu", "... -> ...", "x"),
        ("add", "..., ... -> ...", "x, y"),
        ("linear", "... k, n k, n -> ... n", "x, y"),
        ("layer_norm", "... d, d, d -> ... d", ""),
        ("mul", "..., ... -> ...", "x+y"),
        ("grouped_mm", "s k, e! k n, e!, e! n -> s n", "x+u, y+u"),  # rows may be cut
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


@pytest.mark.parametrize("given, match", [({"linear": None}, "linear=None is not a text"), ({"text": 3}, "rule 3 is")])
def test_a_rule_that_is_not_text_is_a_letter(given, match):
    with pytest.raises(BadRule, match=match):
        autopar.rule("autopar_tests::looks_up", **{"text": "b -> b", **given})


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
    """An op with a rule of its owner is not opened into the ops that torch makes it of."""

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
        WHOLE.pop("kron", None)
