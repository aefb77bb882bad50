"""A gradient stops at a copy where eager stops it, however the copy is spelled and wherever it is read."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from autopar.letters import NotCaptured
from autopar.tracer import ColoTracer
from tests.shares import diagonal
from tests.tracer.cases import check, traced
from tests.tracer.copies import READS, SPELLINGS, Copier
from tests.zoo.replay import compare, run

REFUSED_WRITES = re.compile("a value that carries a gradient|writes to the parameter scale|a view by expand")


def of_eager(model, x):
    """What eager gives; None where it refuses the program."""
    try:
        return run(model, model, (x,), {})
    except RuntimeError:
        return None


@pytest.mark.parametrize("of_parameter", [False, True], ids=["value", "parameter"])
@pytest.mark.parametrize("spelling, read", diagonal(list(SPELLINGS), list(READS), step=6))
def test_a_gradient_stops_at_a_copy_where_eager_stops_it(spelling, read, of_parameter):
    model, x = Copier(spelling, [read], of_parameter), torch.randn(8, 4)
    expected = of_eager(copy.deepcopy(model), x)
    try:
        graph = ColoTracer().trace(model, (x,))
    except NotCaptured as letter:
        is_write = read.startswith("written") and REFUSED_WRITES.search(letter.what)
        assert expected is None or is_write, letter
        return
    if expected is not None:
        compare(run(graph.module(model), model, (x,), {}), expected)


def test_a_detached_view_with_a_gradient_of_its_own_is_refused_once_its_memory_is_written():
    """Eager hands its gradient on as if nothing had been written: no value of a graph has both."""

    def behind(m, x):
        base = torch.zeros(4)
        view = base.detach()
        view.copy_((x @ m.weight).mean(0))
        base.add_(1)
        return (view * x).sum()

    with pytest.raises(NotCaptured, match=r"(?s)a gradient in the model and none in the graph.*through \.detach\(\)"):
        traced(behind)


def test_a_part_is_put_back_without_its_gradient():
    """`z[1:] += y` puts back what is there already; `z[1:] = z.data[1:]` takes the gradient away, or is refused."""

    def taken_away(m, x):
        z = x @ m.weight
        z[1:] = z.data[1:].clone()
        return (z**2).sum()

    def put_back(m, x):
        z = x @ m.weight
        z[1:] = z.data[1:]
        return (z**2).sum()

    check(taken_away)
    with pytest.raises(NotCaptured, match="through another view"):
        traced(put_back)


def test_a_linear_does_not_reach_past_a_view_under_no_grad():
    def flat(m, x):
        h = (x @ m.weight).view(2, 2, 4)
        with torch.no_grad():
            rows = h.view(4, 4)
        return (m.linear(rows).view(2, 2, 4) * h).sum()

    def blind_result(m, x):
        h = m.linear(x.view(4, 4))
        with torch.no_grad():
            seen = h.view(2, 2, 4)
        return (seen * h.view(2, 2, 4)).sum()

    check(flat)
    check(blind_result)


def test_functions_over_lists_are_calls_of_each():
    def lists(m, x):
        rows = (x @ m.weight).unbind(0)
        with torch.no_grad():
            torch._foreach_lerp_([m.mean], [x], 0.5)
            torch._foreach_maximum_([m.mean], [x])
        a = torch._foreach_add(rows, rows, alpha=2)
        b = torch._foreach_mul(a, [1.0, 2.0, 3.0, 4.0])
        c = torch._foreach_addcmul(b, a, rows, [1.0, 2.0, 3.0, 4.0])
        d = torch._foreach_addcdiv(c, a, torch._foreach_exp(rows), value=0.5)
        e = torch._foreach_add(torch._foreach_pow(2.0, rows), 1.0)
        torch._foreach_mul_(e, torch.tensor(2.0))
        made = (*a, *c, *d, *e, *torch._foreach_norm(d, 1), *torch._foreach_max(a), *copies(d))
        return sum(t.sum() for t in made) + m.mean.sum()

    copies = getattr(torch, "_foreach_clone", list)  # torch 2.11 has none
    check(lists)
    with pytest.raises(NotCaptured, match="addcmul of a list takes its scales") as letter:
        traced(lambda m, x: torch._foreach_addcmul([x], [x], [x], torch.ones(1))[0] @ m.weight)
    assert letter.value.at.startswith("test_copies.py:")
    with pytest.raises(NotCaptured, match="different lengths"):
        traced(lambda m, x: torch._foreach_add([x], [x, x])[0] @ m.weight)
