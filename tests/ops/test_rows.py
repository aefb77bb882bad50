"""Rules made of rows say the same however a call names its dims."""

from __future__ import annotations

import pytest

from autopar.graph.graph import TensorType
from autopar.ops.entry import rule_of
from autopar.ops.rows import Row, along, removed, resized


def typed(*shape):
    return TensorType(shape, "float64")


X = typed(5, 4, 6)
ROW = Row.of(X)
PLACES = TensorType((3,), "int64")


def line(rule, *outputs, **arguments):
    return rule({"outputs": outputs or (X,), "input": X, **arguments}).text.split(" -> ")


@pytest.mark.parametrize(
    "changed, letters",
    [
        (ROW.whole(-1), "a0 a1 a2!"),
        (ROW.whole([0, -1]), "a0! a1 a2!"),
        (ROW.whole(), "a0! a1! a2!"),
        (ROW.whole(()), "a0 a1 a2"),
        (ROW.marked(1, "^"), "a0 a1^ a2"),
        (ROW.resized(range(-2, 0), "in"), "a0 in1! in2!"),
        (ROW.replaced(-3, "p|q"), "p|q a1 a2"),
        (ROW.without((1, -1)), "a0"),
        (ROW.without(None), ""),
        (ROW.insert(0, "new!"), "new! a0 a1 a2"),
        (ROW.insert(-1, "new!"), "a0 a1 a2 new!"),
        (ROW.insert(-2, "new!"), "a0 a1 new! a2"),
        (ROW.last(typed(4, 6)), "a1 a2"),
        (ROW.last(typed()), ""),
        (Row.of(typed()).whole(-1), ""),
    ],
)
def test_a_row_is_changed_at_dims_that_count_from_either_end(changed, letters):
    assert str(changed) == letters


@pytest.mark.parametrize("dim", [1, -2, (1,), [-2]])
@pytest.mark.parametrize(
    "rule, before, after",
    [
        (along(), "a0 a1! a2", "a0 a1! a2"),
        (resized(), "a0 in1! a2", "a0 out1! a2"),
        (removed("^"), "a0 a1^ a2", "a0 a2"),
    ],
)
def test_a_dim_is_the_same_however_it_is_named(rule, before, after, dim):
    assert line(rule, dim=dim) == line(rule, dims=dim) == [before, after]
    assert line(rule, X, X, dim=dim) == [before, f"{after}, {after}"]


def test_a_call_that_names_no_dim_means_the_default():
    assert line(along()) == ["a0! a1! a2!", "a0! a1! a2!"]
    assert line(along(-1)) == line(along(-1), dim=None) == ["a0 a1 a2!", "a0 a1 a2!"]
    assert line(resized((-2, -1)))[1] == "a0 out1! out2!"
    assert line(removed("!", 0))[1] == "a1 a2"
    assert line(along(-1), input=typed()) == ["", ""]


def test_reduced_dims_of_size_one_are_no_factors():
    assert line(removed(""), dim=(0, -1), keepdim=True) == ["a0 a1 a2", "1 a1 1"]
    assert line(removed("!"), keepdim=True)[1] == "1 1 1"


@pytest.mark.parametrize(
    "op, arguments, out, text",
    [
        ("sum", dict(input=X, dim=(0, -1), keepdim=True), (1, 4, 1), "a0 a1 a2 -> 1 a1 1"),
        ("stack", dict(tensors=[X, X], dim=-1), (5, 4, 6, 2), "a0 a1 a2, a0 a1 a2 -> a0 a1 a2 new!"),
        ("split", dict(input=X, sections=(2, 4), dim=-1), (5, 4, 2), "a0 a1 p0|p1 -> a0 a1 p0, a0 a1 p1"),
        ("diagonal", dict(input=X, dim1=-2, dim2=-1), (5, 4), "a0 a1! a2! -> a0 diagonal!"),
        ("diag_embed", dict(input=X, dim1=0, dim2=-1), (6, 5, 4, 6), "a0 a1 a2! -> d0! a0 a1 d3!"),
        ("pad", dict(input=X, pad=(0, 0, 1, -1)), (5, 4, 6), "a0 in1! a2 -> a0 out1! a2"),
        ("quantile", dict(input=X, q=typed(3), dim=-1), (3, 5, 4), "a0 a1 a2!, q! -> q! a0 a1"),
        ("addmm", dict(input=typed(), mat1=typed(5, 4), mat2=typed(4, 7)), (5, 7), ", m k, k n -> m n"),
        ("index", dict(input=X, index=(2, None, slice(0, 2))), (1, 2, 6), "in0! in1! a2, , ,  -> new0! out1! a2"),
        ("index", dict(input=X, index=[PLACES, PLACES]), (3, 6), "in0! in1! a2, i0, i0 -> i0 a2"),
        ("index", dict(input=X, index=[PLACES, 1]), (3, 6), None),
    ],
)
def test_rules_of_calls_with_rare_arguments(op, arguments, out, text):
    rule = rule_of(op, {**arguments, "outputs": (typed(*out),)})
    assert (rule and rule.text) == text
