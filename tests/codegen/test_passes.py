"""The runner of passes: AUTOPAR_PRINT prints a graph before and after one of them, at every stage."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.codegen import joint, joint_passes, local_passes, lower, schedule
from autopar.codegen.buffer_reuse import write_over
from autopar.codegen.half import Half
from autopar.letters import NotServed
from autopar.passes import pass_names, run_passes
from autopar.runtime import collectives
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


def entropies(then):
    """A half of logits and the gradient that a kernel gives of them; `then` says what stands behind them."""
    from autopar.kernels import cross_entropy  # noqa: F401 - its ops

    graph, aten = torch.fx.Graph(), torch.ops.aten
    x, w, dy, target, lse = (graph.placeholder(n) for n in ("x", "w", "dy", "target", "lse"))
    made = graph.call_function(aten.mm.default, (x, w))
    logits = graph.call_function(aten.view.default, (made, [2, 4, 8]))
    for node, shape in ((x, (8, 4)), (w, (4, 8)), (made, (8, 8)), (logits, (2, 4, 8))):
        node.meta["val"] = torch.empty(shape, device="meta")
    begun = graph.call_function(collectives.BEGIN["all_reduce"], ([made], "dp")) if then == "travels" else None
    operand = {"is given": x, "is a view": logits}.get(then, made)
    back = graph.call_function(torch.ops.autopar.cross_entropy_backward.default, (operand, dy, target, lse, -100, 0.0))
    results = [back]
    if then == "a view is read":
        results.append(graph.call_function(aten.sum.default, (logits,)))
    if then == "leaves":
        results.append(logits)
    if begun is not None:
        results.append(graph.call_function(collectives.finish, (begun,)))
    graph.output(tuple(results))
    half = Half(graph, {}, is_backward=False)
    write_over(half)
    return [str(n.target) for n in graph.nodes if "cross_entropy" in str(n.target)]


@pytest.mark.parametrize("then", ["is read by nobody", "is a view", "is given", "a view is read", "leaves", "travels"])
def test_a_gradient_takes_a_memory_that_nothing_needs(then):
    kept = then in ("is given", "a view is read", "leaves", "travels")
    assert entropies(then) == [f"autopar.cross_entropy_backward{'' if kept else '_'}.default"]
