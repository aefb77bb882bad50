"""The universe of strategies of every op, found by running it on every assignment of R, S(d) and P(sum), without asking
a rule.

What a rule gives must be in it; what is in it and no rule gives is listed here, with the reason.
"""

from __future__ import annotations

import re

import pytest

from autopar.ops.entry import FACTS
from autopar.sharding.notation import parse
from autopar.sharding.placement import every_part_holds_something
from autopar.sharding.strategies import Strategy
from autopar.space.discovery import universe
from tests.ops.proof import strategies_of, trial_of
from tests.ops.samples import SAMPLES, is_plain, samples

DEVICES = (2, 3)
UNTRIED = {
    "weight_norm": "its kernel reads beyond operands whose shapes do not go together",
    "attention": "six operands are placed in more ways than can be tried; those of its rule are proved",
    "experts": "seven operands are placed in more ways than can be tried; those of its rule are proved",
    "grouped_mm": "no kernel in float64, in which all strategies are tried; those of its rule are proved in float32",
}
SLOW = {
    "batch_norm_updating",
    "instance_norm_updating",
    "bilinear",
    "conv3d",
    "conv_transpose3d",
    "lstm_cell",
    "scaled_dot_product_attention",
}  # many operands, or many strategies: nightly

# right, and not given: (pattern of ops, pattern of the strategy, why)
MISSING = [
    (
        r".*",
        r"P\(sum\)/P\(sum\)",
        "a sum whose gradient is also left a sum: P(sum)/R followed by nothing costs the same, and the flows of "
        "an edge stay three",
    ),
    (
        r"ceil|floor|round|trunc|sign|sgn|angle|isneginf|isposinf|div",
        r".*",
        "the gradient is zero, and zero lies in every way",
    ),
    (
        r"masked_fill|nan_to_num",
        r".*P\(sum\).*",
        "true of these values alone: -inf + -inf is -inf, and nothing here is nan",
    ),
    (
        r"batch_norm.*|instance_norm.*",
        r".*P\(sum\).*",
        "linear in weight and bias together, or in input, mean and bias together: nobody holds statistics as "
        "parts of sums",
    ),
    (
        r"binary_cross_entropy_with_logits|cross_entropy|nll_loss",
        r".*P\(sum\).*",
        "linear in class weights or weights of elements: nobody holds these as parts of sums",
    ),
    (
        r"scaled_dot_product_attention",
        r".*S\(3\) -> S\(3\)",
        "the width of values: attention kernels want queries, keys and values of one width",
    ),
    (
        r"zeros|full_like|zeros_like|ones_like|isfinite|isinf|isnan",
        r".*",
        "the operand's values, or its shape, do not matter",
    ),
    (r"all|any|argmax|argmin|topk|sort", r".*", "true of these values alone"),
    (r"copy", r".*", "what is overwritten does not matter, and its gradient is zero"),
]


def values_of(strategy: Strategy) -> str:
    """The strategy without the gradients of what has none."""
    return re.sub(r"/P\(sum\)", "", repr(strategy)) if "P(sum)/" not in repr(strategy) else repr(strategy)


def compare(op, most=None):
    """Strategies that only the rule has on some number of devices, and those that it lacks on all."""
    wrong, missing = [], []
    for arguments in samples(op)[:most]:
        universes = [universe(trial_of(op, arguments), (n,)) for n in DEVICES]
        flows_back = any(f.gradient.is_partial for found in universes for s in found for f in (*s.operands, *s.outputs))
        name = repr if flows_back else values_of  # no gradient: only values are compared
        strategies, sizes = strategies_of(op, arguments, with_marks=False)
        strategies = [s for s in strategies if "blocks" not in repr(s)]
        known: set[str] = set()
        for n, found in zip(DEVICES, universes, strict=True):
            ours = [
                s
                for s in strategies
                if s.cut is None
                or all(
                    sizes[f] % n == 0 if s.cut.even else every_part_holds_something(sizes[f], [n])
                    for f in s.cut.factors
                )
            ]
            wrong += [s for s in ours if name(s) not in set(map(name, found))]
            known |= set(map(name, ours))
        missing += [s for s in set.intersection(*universes) if name(s) not in known]
    return wrong, missing


def reason(op, strategy):
    return next(
        (why for ops, pattern, why in MISSING if re.fullmatch(ops, op) and re.search(pattern, repr(strategy))), None
    )


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=pytest.mark.nightly) if op in SLOW else op
        for op in sorted(op for op in FACTS if FACTS[op].rule is not None)
        if op not in UNTRIED and (op in SAMPLES or is_plain(op))
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_rule_gives_what_is_right_and_says_what_it_lacks(op):
    wrong, missing = compare(op)
    assert not wrong
    assert not [s for s in missing if reason(op, s) is None]


@pytest.mark.parametrize(
    "op, line, linear",
    [
        ("matmul", "... m k, ... k n -> ... m n", "x+y"),
        ("add", "..., ... -> ...", "x, y"),
        ("gelu", "... -> ...", "x"),
        ("softmax", "a b c -> a b c", ""),
        ("cumsum", "a b c -> a b c", "x"),
        ("layer_norm", "... d, d, d -> ... d", ""),
        ("gather", "a d, a e -> a e", "x"),
        ("conv1d", "n c! s, o! c! k!, o! -> n o! s", ""),
        ("max_pool1d", "n c s! -> n c t!", "x"),
        ("amax", "a b c -> a c", ""),
    ],
)
def test_a_wrong_rule_of_each_family_is_caught(op, line, linear, monkeypatch):
    monkeypatch.setattr(FACTS[op], "rule", parse(line, linear))
    wrong, _ = compare(op, most=1)
    assert wrong
