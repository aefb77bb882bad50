"""The messages of local forms in a joint graph by hand: counted by op, axis and direction."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.fx as fx

from autopar.codegen.exchanges import sent_by_ops
from autopar.codegen.joint_graph import BACK, CONVERT, CONVERTED, OP, JointGraph
from autopar.ops.exchange import BACKWARD, FORWARD


def joint_of(*steps):
    """A joint graph that makes these steps, each with its marks."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for text, marks in steps:
        graph.call_function(CONVERT, (x, text, "", [4])).meta.update(marks)
    graph.call_function(torch.relu, (x,)).meta[OP] = "relu"
    graph.output(())
    return JointGraph(graph, [x], [], [], [], [], (), 1)


def test_messages_are_those_of_their_op_along_each_axis():
    sent = sent_by_ops(
        joint_of(
            ("all_reduce_max@dp; all_reduce_max@tp", {OP: "norm"}),
            ("all_reduce@dp", {OP: "norm"}),
            ("all_gather(0:8)@dp", {OP: "loss"}),
        )
    )
    assert sent == {
        "norm": {"dp": {FORWARD: Counter(all_reduce=2)}, "tp": {FORWARD: Counter(all_reduce=1)}},
        "loss": {"dp": {FORWARD: Counter(all_gather=1)}},
    }


def test_backward_counts_apart_and_only_where_it_runs():
    sent = sent_by_ops(joint_of(("all_reduce@dp", {OP: "norm"}), ("reduce_scatter(0:8)@dp", {BACK: "norm"})))
    assert sent == {"norm": {"dp": {FORWARD: Counter(all_reduce=1), BACKWARD: Counter(reduce_scatter=1)}}}
    silent = sent_by_ops(joint_of(("all_reduce@dp", {OP: "norm"}), ("slice(0:8)@dp", {BACK: "norm"})))
    assert silent == {"norm": {"dp": {FORWARD: Counter(all_reduce=1), BACKWARD: Counter()}}}


@pytest.mark.parametrize(
    "text, marks",
    [
        ("slice(0:8)@dp", {OP: "norm"}),  # sends nothing
        ("lodge@dp", {OP: "norm"}),
        ("all_reduce@dp", {OP: "norm:shared", CONVERTED: True}),  # a conversion, which edges pay for
    ],
)
def test_what_is_no_message_of_a_form_is_not_counted(text, marks):
    assert not sent_by_ops(joint_of((text, marks)))
