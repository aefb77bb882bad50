"""Random modules under random legal plans: a few by day, two thousand nightly.

And the first hundred notice each broken compiler.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from autopar.certificate import steps
from autopar.certificate.calls import RULES
from autopar.certificate.types import Type, plain
from autopar.letters import NotCertified
from tests.fuzz.trial import fuzz, kills
from tests.mutants import GPT2_MUTANTS, MUTANTS
from tests.random_plans import NoneUneven
from tests.shares import one_in

COUNT, OF_ALL, UNEVEN, AT_ONCE = 12, 2, 2, 2
NOTICED_BY = 100  # modules


@pytest.mark.parametrize("first", one_in(COUNT, range(0, COUNT, AT_ONCE)))
def test_random_modules_compute_the_same(first):
    for seed in range(first, first + AT_ONCE):
        fuzz(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(COUNT, 2000, 50))
def test_two_thousand_compute_the_same(first):
    for seed in range(first, first + 50):
        fuzz(seed)


@pytest.mark.parametrize("first", range(0, OF_ALL, AT_ONCE))
@pytest.mark.filterwarnings("ignore")
def test_random_modules_of_all_of_torch_compute_the_same(first):
    """Half of their steps are calls of any function of torch, with or without a rule."""
    for seed in range(first, first + AT_ONCE):
        fuzz(seed, of_all=True)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(OF_ALL, 2000, 31))
@pytest.mark.filterwarnings("ignore")
def test_two_thousand_of_all_of_torch_compute_the_same(first):
    for seed in range(first, first + 31):
        fuzz(seed, of_all=True)


def fuzz_uneven(seeds):
    """Each of these seeds of which an uneven plan is drawn; returns how many those are."""
    ran = 0
    for seed in seeds:
        with contextlib.suppress(NoneUneven):
            fuzz(seed, uneven=True)
            ran += 1
    return ran


@pytest.mark.parametrize("first", range(0, UNEVEN, AT_ONCE))
def test_random_modules_of_uneven_parameters_compute_the_same(first):
    """On two and three ranks, under plans that also recompute; certified."""
    assert fuzz_uneven(range(first, first + AT_ONCE))


def test_a_view_that_two_ops_share_is_not_refused():
    """Its shape is one that the second op makes inside."""
    assert fuzz_uneven([146]) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(UNEVEN, UNEVEN + 400, 25))
def test_three_hundred_of_uneven_parameters_compute_the_same(first):
    assert fuzz_uneven(range(first, first + 25)) >= 15


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_beside_a_value_in_one_matrix_is_not_refused():
    """The backward of matrix_exp is that of a block matrix; its gradient may be a part of a sum."""
    fuzz(740, of_all=True)


KILLED_BY = {  # python -m tests.fuzz mutants: the first of the hundred that notices it
    "a reduction is dropped": 0,
    "a reduce-scatter forgets to reduce": 0,
    "an axis is swapped": 16,
    "a mean is divided by the local count": 0,
    "a bias is added once per device": 1,
    "a reduction's gradient is reduced again": 14,
    "a lodged value is kept by every rank": 0,
    "the vocabulary is not masked": 20,
    "gathered parts are out of order": 0,
    "every device counts the log-sum": 5,
    "the sum of exponentials is not reduced": 5,
    "ignored targets count": 5,
    "draws go by the place in the part": 0,
    "every random op draws the same": 1,
    "a fused weight is cut straight through": 0,
}  # not by any of them: a buffer handed out twice, gelu called linear; tests/equality/test_mutants.py notices those


@pytest.mark.parametrize("name", one_in(len(KILLED_BY), KILLED_BY))
def test_broken_compilers_are_noticed_by_the_hundred(name):
    assert KILLED_BY[name] < NOTICED_BY and kills((MUTANTS | GPT2_MUTANTS)[name], [KILLED_BY[name]]) is not None


# a rule of the certificate that is misread, or a conversion that it skips, and a seed whose programs it then refuses
MISREAD = {
    "a sum over a cut dim is whole": ("rule", "aten.sum.dim_IntList", lambda x: replace(x, sums=frozenset()), 0),
    "a transpose keeps the dims": ("rule", "aten.t.default", lambda x: replace(x, dims=x.dims[::-1]), 0),
    "a cast is whole": ("rule", "aten._to_copy.default", lambda x: Type(plain(x.shape)), 5),
    "a gathered value stays cut": ("step", "all_gather", lambda x, axis, *more: x, 0),
    "a sum is not taken": ("step", "all_reduce", lambda x, axis: x, 0),
    "what is cut stays whole": ("step", "slice", lambda x, axis, *more, **how: x, 0),
}


@pytest.mark.parametrize("name", one_in(2, MISREAD))
def test_a_misread_rule_of_the_certificate_refuses_what_is_right(name, monkeypatch):
    kind, key, misread, seed = MISREAD[name]
    if kind == "rule":
        sound = RULES[key]
        monkeypatch.setitem(RULES, key, lambda call: misread(sound(call)))
    else:
        monkeypatch.setitem(steps._STEPS, key, misread)
    with pytest.raises(NotCertified):
        fuzz(seed)
