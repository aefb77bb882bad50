"""Questions about values: answered where the answer is certain or declared, an error elsewhere."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from autopar.graph.graph import Assume
from autopar.letters import NotCaptured
from autopar.tracer import ColoTracer
from tests.tracer.cases import check, traced


def test_what_depends_on_no_input_is_computed():
    graph = check(
        lambda m, x: (
            (x @ m.weight).sum()
            * (2 if (torch.arange(4).cumsum(0) >= 0).all() else 3)
            * torch.linspace(0, 1, 3).tolist()[1]
        )
    )
    assert {a.split(", at")[0] for a in graph.assumptions} == {
        "a condition is True: it depends on no input",
        *(f"a value is {v}: it depends on no input" for v in (0.0, 0.5, 1.0)),
    }
    assert all("test_questions_of_values.py:" in a for a in graph.assumptions)


def test_what_is_known_needs_no_assumption():
    def guarded(m, x):
        mask = torch.full((4, 4), float("-inf")).triu(1)
        return x @ m.weight * (2 if torch.isinf(mask).any() else 1)

    graph = check(guarded, Assume(finite=True))
    assert "depends on no input" in graph.assumptions[0]


def test_a_uniform_draw_against_a_bound_it_cannot_cross_is_proved():
    graph = check(lambda m, x: (x @ m.weight).sum() if torch.rand([]) < 0.0 else (x * m.weight).sum())
    assert "whatever is drawn" in graph.assumptions[0]
    with pytest.raises(NotCaptured, match="random numbers"):
        traced(lambda m, x: (x @ m.weight).sum() if torch.rand([]) < 0.5 else x.sum())


def test_an_empty_draw_proves_nothing():
    with pytest.raises(NotCaptured, match="random numbers"):
        traced(lambda m, x: x @ m.weight if (torch.rand((0,)) < 1.0).any() else x)


def asks(m, x):
    return (x @ m.weight).sum() if x.sum() > -1e9 else -x


def test_the_caller_may_answer_a_branch_by_its_line():
    line = f"test_questions_of_values.py:{asks.__code__.co_firstlineno + 1}"
    with pytest.raises(NotCaptured, match=r"value of a tensor.*input x") as letter:
        traced(asks)
    assert f'Assume(branches={{"{line}": True}})' in letter.value.advice
    graph = check(asks, Assume(branches={line: True}))
    assert graph.assumptions == (f"a condition is True, as declared, at {line}, in asks",)


def refuses(y):
    if torch.isnan(y).any() or y.abs().max() > 1e9:
        raise ValueError("values that nobody wants")


def checks_values(m, x):
    y = x @ m.weight
    refuses(y)
    assert not torch.isinf(y).any()
    assert (
        torch.isfinite(y)
        .all()
    ), "in several lines"  # fmt: skip
    if (y > 1e9).all():
        what = "too large"
        raise ValueError(what)
    elif not y.shape:
        return y
    if y.isfinite().all():
        y = y * 2
    else:
        raise ValueError
    return y.sum()


def test_a_check_that_raises_is_answered_by_what_goes_on():
    graph = check(checks_values)
    found = [a.split(", at")[0].rpartition(" ")[2] for a in graph.assumptions if "is not made" in a]
    assert found == ["False", "False", "True", "False", "True"]


def caught(m, x):
    try:
        refuses(x @ m.weight)
    except ValueError:
        return x.sum()
    return (x @ m.weight).sum()


def suppressed(m, x):
    with contextlib.suppress(ValueError):
        refuses(x @ m.weight)
    return (x @ m.weight).sum()


def ends_a_loop(m, x):
    if x.sum() > 0:
        raise StopIteration
    return (x @ m.weight).sum()


def both_ways(m, x):
    if x.sum() > 1e9 or not x.sum() > -1e9:
        raise ValueError
    return (x @ m.weight).sum()


@pytest.mark.parametrize("model", [caught, suppressed, ends_a_loop, both_ways])
def test_what_may_go_on_either_way_is_a_letter(model):
    with pytest.raises(NotCaptured, match="value of a tensor"):
        traced(model)


def test_a_branch_that_is_never_asked_is_a_letter():
    with pytest.raises(NotCaptured, match=r"nowhere.py:1 was never asked"):
        traced(lambda m, x: x @ m.weight, assume=Assume(branches={"nowhere.py:1": True}))


def test_values_are_finite_where_declared():
    def guarded(m, x):
        h = x @ m.weight
        return h.sum() if torch.isfinite(h).all() and not torch.isnan(h).any() else h.clamp(-1, 1).sum()

    with pytest.raises(NotCaptured, match="value of a tensor"):
        traced(guarded)
    assert all("values are finite (declared)" in a for a in check(guarded, Assume(finite=True)).assumptions)


def test_only_attention_masks_are_masks():
    class Masked(nn.Module):
        def forward(self, x, bool_masked_pos):
            return x if bool_masked_pos.all() else -x

    with pytest.raises(NotCaptured, match="bool_masked_pos"):
        ColoTracer().trace(
            Masked(),
            {"x": torch.randn(2, 3), "bool_masked_pos": torch.ones(2, 3, dtype=torch.bool)},
            assume=Assume(no_padding=True),
        )


def test_layer_drop_is_a_letter():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                if torch.rand([]) > 0.1:
                    x = layer(x)
            return x

    with pytest.raises(NotCaptured, match="random numbers"):
        ColoTracer().trace(Drops(), (torch.randn(2, 4),))


def test_checks_of_values_by_torch_are_not_made():
    """As transformers makes them, for one of the tokens of images in a text."""

    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(10, 8)

        def forward(self, ids):
            torch._check_tensor_all(ids < 10, lambda: "no such word")
            return self.e(ids).sum()

    graph = ColoTracer().trace(Checked(), (torch.randint(0, 10, (4, 6)),))
    assert any("torch._check_tensor_all" in line for line in graph.assumptions)


def test_a_hook_that_keeps_nothing_is_served_beside_a_loss_that_is_added_to_in_place():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            h = self.a(x)
            loss = self.b(h.relu()).pow(2).mean()
            loss += 0.1 * h.pow(2).mean()
            return loss

    model, seen = Added(), []
    model.a.register_forward_hook(lambda module, args, out: seen.append(1))
    ColoTracer().trace(model, (torch.randn(4, 8),))
    held = model.b.register_forward_hook(lambda module, args, out: seen.append(out))
    with pytest.raises(NotCaptured, match="keeps a tensor"):
        ColoTracer().trace(model, (torch.randn(4, 8),))
    held.remove()
