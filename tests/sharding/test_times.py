"""The bars of `python -m benchmarks.times`, on the steps that it has checked in and on steps made up to miss them."""

from __future__ import annotations

import json

import pytest

from benchmarks.times import HERE, PLANS, Judged, missed


def measured():
    """Plans of each model as they were listed, with the seconds of their steps."""
    listed = json.loads((HERE / "times_plans.json").read_text())
    steps = iter(json.loads((HERE / "times_measured.json").read_text()))
    return {name: (plans, [next(steps) for _ in plans]) for name, plans in listed.items()}


def test_measured_steps_of_five_models_meet_every_bar():
    models = [Judged.of(name, *of) for name, of in measured().items()]
    assert len(models) == 5 and all(len(m.rows) == PLANS for m in models)
    assert missed(models) == []


def slower(plans, steps, chosen, factor):
    """The steps, those of some plans slower by a factor."""
    return [[s * factor if chosen(p) else s for s in of] for p, of in zip(plans, steps, strict=True)]


@pytest.mark.parametrize(
    "chosen, factor, what",
    [
        (lambda p: p.get("is_taken", False), 1.06, "GPT-2: the free plan is"),
        (lambda p: True, 1.16, "median error"),
        (lambda p: p["mesh"] == "2x2", 1.8, "steps within the printed intervals"),
        (lambda p: p.get("parallel") == "dp", 4.0, "GPT-2: Kendall"),
    ],
)
def test_steps_that_miss_a_bar_are_told(chosen, factor, what):
    models = [
        Judged.of(name, plans, slower(plans, steps, chosen, factor)) for name, (plans, steps) in measured().items()
    ]
    assert any(what in line for line in missed(models)), missed(models)
