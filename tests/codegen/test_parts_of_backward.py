"""Backward in two parts: together they are the whole, no op runs twice, and the second holds what it reads alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from torch.fx import map_arg
from torch.utils.flop_counter import flop_registry

from autopar.codegen.buffers import buffer_of, shows
from autopar.letters import NotCertified
from autopar.runtime.collectives import STEPS
from tests.stages.parted import lowered

CASES = ("decoder", "encoder and decoder", "unet", "twice")


def flops(graph):
    """Floating-point operations by torch's own formulas, from shapes."""
    total = 0
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if node.op == "call_function" and packet in flop_registry:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            total += flop_registry[packet](*args, **kwargs, out_val=node.meta["val"])
    return total


def computing(graph):
    """Names of the ops that compute or communicate."""
    return {n.name for n in graph.nodes if n.op == "call_function" and not shows(n)}


def joints(name, is_parted, **how):
    return [joint for program in lowered(name, is_parted, **how) for joint in program.joints]


@pytest.mark.parametrize("name", CASES)
def test_the_parts_have_the_flops_of_the_whole(name):
    whole, parted = joints(name, False), joints(name, True)
    assert all(joint.parts is None for joint in whole)
    inward = [flops(joint.parts.inward) for joint in parted]
    weights = [flops(joint.parts.weights) for joint in parted]
    assert [a + b for a, b in zip(inward, weights, strict=True)] == [flops(joint.backward) for joint in whole]
    assert inward[0] == 0 and min(inward[1:]) > 0 and min(weights) > 0
    if name == "unet":
        assert sum(weights) >= 0.4 * sum(flops(joint.hold) for joint in whole)


@pytest.mark.parametrize("how", [{}, {"recompute": "full"}], ids=["saved", "recomputed"])
@pytest.mark.parametrize("name", CASES)
def test_every_op_is_in_one_part(name, how):
    for joint in joints(name, True, **how):
        inward, weights = computing(joint.parts.inward), computing(joint.parts.weights)
        assert not inward & weights and inward | weights == computing(joint.hold)
        assert all(top.users for top in joint.parts.weights.find_nodes(op="placeholder"))  # nothing is held unread
        results = joint.parts.inward.output_node().args[0]
        held = [n.name for n in joint.parts.weights.find_nodes(op="placeholder")]
        assert [n.name for n in results[joint.parts.inputs :]] == held


def test_a_sum_begins_in_memory_of_its_own():
    """What is sent back may still be on its way when the next gradient is added to it."""
    last = joints("places", True, turns=4)[-1]
    results = last.hold.output_node().args[0]
    assert len({buffer_of(n) for n in results}) == len(results) == 4


@pytest.mark.parametrize(
    ("name", "calls"), [("frozen first", [(0, 0), (0, 1)]), ("frozen last", [(0, 1), (1, 0)])], ids=str
)
def test_a_part_is_empty_where_nobody_waits_for_it(name, calls):
    """Nothing wants a gradient of what a frozen first stage gives, or of the parameters of a frozen last one."""
    parts = [joint.parts for joint in joints(name, True, turns=4)]
    found = [(bool(flops(each.inward)), bool(flops(each.weights))) for each in parts]
    assert found == [tuple(map(bool, has)) for has in calls]
    assert not (parts[0] if name == "frozen first" else parts[1]).weights.find_nodes(op="placeholder")


def test_weights_read_the_same_with_and_without_recomputation():
    """The first part makes recomputed values, so that the ops of the second stay as they are."""
    for saved, again in zip(joints("decoder", True), joints("decoder", True, recompute="full"), strict=True):
        if saved.parts.inputs:
            counts = [sorted(str(n.target) for n in j.parts.weights.nodes if not shows(n)) for j in (saved, again)]
            assert counts[0] == counts[1]
        assert len(computing(again.hold)) > len(computing(saved.hold))


def without_sums(graph):
    """Copies of a graph, each without one of its sums over devices, by its name."""
    for name in [n.name for n in graph.find_nodes(op="call_function", target=STEPS["all_reduce"])]:
        wrong = copy.deepcopy(graph)
        (node,) = (n for n in wrong.nodes if n.name == name)
        node.replace_all_uses_with(node.args[0])
        wrong.erase_node(node)
        yield name, wrong


def with_sums(graph):
    """Copies of a graph, each with one of its results summed over devices, by the result's name."""
    results = graph.output_node().args[0]
    for k, value in enumerate(results):
        wrong = copy.deepcopy(graph)
        out = wrong.output_node()
        with wrong.inserting_before(out):
            more = wrong.call_function(STEPS["all_reduce"], (out.args[0][k], "tp"))
        more.meta["val"] = value.meta["val"]
        out.args = ((*out.args[0][:k], more, *out.args[0][k + 1 :]),)
        yield value.name, wrong


def refused(program, part, wrongs, names):
    """Which of `names` are refused where they are made wrong in a part of backward, or in the whole."""
    (stage,) = program.stages
    joint, found = stage.joint, set()
    for name, wrong in wrongs(getattr(joint if part == "hold" else joint.parts, part)):
        if name in names:
            changed = {"hold": wrong} if part == "hold" else {"parts": replace(joint.parts, **{part: wrong})}
            try:
                replace(program, stages=(replace(stage, joint=replace(joint, **changed)),)).certified()
            except NotCertified:
                found.add(name)
    return found


@pytest.mark.parametrize("name", ["decoder", pytest.param("encoder and decoder", marks=pytest.mark.nightly)])
def test_what_is_refused_in_backward_is_refused_in_its_parts(name):
    """Sums over devices that are left out of a part, and such that are done before their time."""
    *_, last = lowered(name, True, devices=2, parallel="megatron")
    hold = last.stages[0].joint.hold
    ends = [n.name for n in hold.output_node().args[0]][::4]
    for wrongs, names in ((without_sums, computing(hold)), (with_sums, ends)):
        of_whole, *of_parts = (refused(last, part, wrongs, names) for part in ("hold", "inward", "weights"))
        assert of_whole and of_whole == of_parts[0] | of_parts[1] & set(names), (of_whole, of_parts)
        assert all(of_parts) or wrongs is without_sums  # weights are cut: no sum makes their gradients
