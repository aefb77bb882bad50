"""The runner of passes: AUTOPAR_PRINT prints a graph before and after one of them, at every stage."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.codegen import joint, joint_passes, local_passes, lower, schedule
from autopar.letters import NotServed
from autopar.passes import pass_names, run_passes
from autopar.tracer import ColoTracer
from tests.models import MLP, eager_links


def lowered():
    """An MLP with cut parameters, lowered anew."""
    joint.LOWERED.clear()
    model, batch = MLP(16, 2), {k: torch.randn(8, 16) for k in ("x", "y")}
    how = dict(parallel="zero3", precision=autopar.Precision("bfloat16", "float32"))
    plan = autopar.plan(model, batch, mesh=2, cluster=eager_links(), **how)
    return lower(ColoTracer().trace(model, batch, precision=how["precision"]), plan, (0,))


@pytest.mark.parametrize(
    "name, stage, before, after",
    [
        ("means_are_sums", "graph", "mean", "sum"),
        ("drop_unread_ops", "local graph", "_to = to(", "convert("),
        ("write_out_conversions", "joint graph", "ops.autopar.convert", "all_gather("),
        ("gather_ahead", "half", "= autopar_runtime_collectives_all_gather(", "begin_all_gather("),
    ],
)
def test_a_pass_is_printed_before_and_after(name, stage, before, after, monkeypatch, capsys):
    monkeypatch.setenv("AUTOPAR_PRINT", name)
    lowered()
    printed = capsys.readouterr().err
    first, second = printed.split(f"-- before {name} ({stage})\n")[1].split(f"-- after {name} ({stage})\n")[:2]
    assert before in first and after in second and first != second
    assert printed.count("-- before") == printed.count(f"-- before {name} ")  # no other pass is


def test_a_name_of_no_pass_is_an_error_that_lists_the_names(monkeypatch):
    monkeypatch.setenv("AUTOPAR_PRINT", "drop_trips")
    with pytest.raises(NotServed, match="AUTOPAR_PRINT=drop_trips names no pass") as letter:
        ColoTracer().trace(MLP(16, 1), {k: torch.randn(8, 16) for k in ("x", "y")})
    for stage, names in pass_names().items():
        assert f"{stage}: {', '.join(names)}" in str(letter.value)
    assert pass_names()["local graph"] == ["drop_unread_ops", "use_kernels"] and len(pass_names()) == 4


def test_a_pass_that_breaks_a_graph_is_named():
    def lose_a_node(graph):
        graph.pop()

    def verify(graph, after):
        assert graph, after

    with pytest.raises(AssertionError, match="lose_a_node"):
        run_passes("list", (lose_a_node,), [1], verify)


def test_every_pass_of_lowering_says_what_it_does_before_and_after():
    for one in (*local_passes.PASSES, *joint_passes.PASSES, *schedule.PASSES):
        assert "before    " in one.__doc__ and "after     " in one.__doc__, one.__name__
