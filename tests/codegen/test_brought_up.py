"""Parameters that lie on the host: where they come up and their gradients go down, and broken programs of them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.certificate.host import check_travels
from autopar.codegen import brought_up
from autopar.codegen.joint_graph import BACK, OP
from autopar.codegen.lower import lower
from autopar.letters import NotCertified, NotServed
from autopar.runtime import host
from autopar.runtime.host import begin_to_host, begin_up, end_from_host, end_to_host
from autopar.runtime.host_step import HostSteps, Piece
from autopar.testing import on_processes
from autopar.tracer import ColoTracer
from tests.host import broken, first, planned, small_values_travel
from tests.models import mlp_case
from tests.training import whole


def lowered(how):
    model, batch = mlp_case()
    plan = planned(model, batch, how, "*")
    return lower(ColoTracer().trace(model, batch), plan, (0,) * len(plan.mesh.shape))


def on_host(program):
    first_one = len(program.program.inputs)
    return frozenset(range(first_one, first_one + len(program.program.parameters)))


@pytest.mark.parametrize("how", ["one device", "zero3"])
def test_a_part_comes_up_a_window_before_it_is_read_and_a_gradient_goes_down_behind_it(how):
    program = lowered(how)
    joint = program.joint
    names = {f"{node.name}" for node in joint.forward.find_nodes(op="placeholder")[1:]}
    comes = joint.forward.find_nodes(op="call_function", target=begin_up)
    assert len(comes) == len(program.program.parameters) and len(names) >= len(comes)
    for begun in comes:
        (end,) = begun.users
        assert end.target is end_from_host and end < min(end.users)
        computed = [n for n in joint.forward.nodes if begun < n < end and n.meta.get(OP)]
        block = min(end.users).meta.get(OP, "")
        assert computed or not block.startswith("blocks_1")
    again = joint.backward.find_nodes(op="call_function", target=begin_up)
    assert again and len(again) < len(comes)  # Biases are not read again.
    leaves = joint.backward.find_nodes(op="call_function", target=begin_to_host)
    results = joint.backward.output_node().args[0]
    assert len(leaves) == len(joint.gradients) == sum(node.target is end_to_host for node in results)
    for begun in leaves[:2]:
        (end,) = begun.users
        assert [n for n in joint.backward.nodes if begun < n < end and n.meta.get(BACK)]
    check_travels(joint, on_host(program))


def _comes_up_after_its_reader(graph):
    end = first(graph, end_from_host)
    max(end.users).append(end)


def _is_read_on_the_host(graph):
    begun = first(graph, begin_up)
    (end,) = begun.users
    min(end.users).replace_input_with(end, begun.args[0])


def _is_read_while_it_comes(graph):
    begun = first(graph, begin_up)
    (end,) = begun.users
    min(end.users).replace_input_with(end, begun)


def _comes_up_twice(graph):
    begun = first(graph, begin_up)
    with graph.inserting_after(begun):
        graph.call_function(begin_up, begun.args)


def _another_value_comes_up(graph):
    first(graph, begin_up).args = (graph.find_nodes(op="placeholder")[0], "cpu")


def _a_gradient_stays(graph):
    end = graph.output_node()
    gone = first(graph, end_to_host)
    end.args = (tuple(gone.args[0].args[0] if n is gone else n for n in end.args[0]),)


def _a_gradient_is_read_after_it_has_gone(graph):
    gone = first(graph, end_to_host)
    with graph.inserting_after(gone):
        graph.call_function(torch.ops.aten.neg.default, (gone.args[0].args[0],))


def _a_gradient_is_written_to_on_its_way(graph):
    begun = first(graph, begin_to_host)
    with graph.inserting_after(begun):
        graph.call_function(torch.ops.aten.mul_.Tensor, (begun.args[0], 2.0))


def _another_value_leaves(graph):
    begun = first(graph, begin_up)
    (end,) = begun.users
    with graph.inserting_after(end):
        graph.call_function(begin_to_host, (end,))


BOTH_HALVES = (
    _comes_up_after_its_reader,
    _is_read_on_the_host,
    _is_read_while_it_comes,
    _comes_up_twice,
    _another_value_comes_up,
)
BROKEN = [("forward", how) for how in BOTH_HALVES] + [
    ("backward", how)
    for how in (
        *BOTH_HALVES,
        _a_gradient_stays,
        _a_gradient_is_read_after_it_has_gone,
        _a_gradient_is_written_to_on_its_way,
        _another_value_leaves,
    )
]


def test_the_certificate_refuses_programs_that_break_the_order_of_parameters():
    program = lowered("zero3")
    for half, how in BROKEN:
        with pytest.raises(NotCertified, match="to the host and back in a wrong order"):
            check_travels(broken(program.joint, half, how), on_host(program))


def trained(plan, model, batch, steps=2, **how):
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan, **how)
    optimizer = autopar.optim.AdamW(mine.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        mine(**batch).backward()
        optimizer.step()
    return [whole(p.detach()).clone() for p in mine.parameters()]


def _up_too_late(patch):
    """What a copy brings is read before it ends: it ends behind all that the half runs."""
    patch.setattr(host.Transfer, "end", lambda self: self.arrives)


def _a_view_of_the_device_is_saved(patch):
    """Views of what has come up in forward are saved, and read in backward."""
    patch.setattr(brought_up, "_trips", lambda *a: [])


def _gone_before_it_is_copied(patch):
    """The memory of a gradient is used again before its copy has ended."""
    real = host.Transfer.end

    def end(self):
        if self.source is not None and host.HOST.holds(self.arrives):
            self.source.fill_(float("nan"))
        return real(self)

    patch.setattr(host.Transfer, "end", end)


def _stale_after_the_step(patch):
    """The CPUs step a copy of the parameter, so that what comes up next is that of the step before."""
    patch.setattr(Piece, "in_place", lambda self: replace(self, parameter=self.parameter.clone()).step_of_copy())
    patch.setattr(
        Piece, "step_of_copy", lambda self: self.step(self.parameter, self.gradient, self.states), raising=False
    )


def _stepped_on_a_device_too(patch):
    """The step of the CPUs runs, and that of devices behind it."""
    real = HostSteps.run

    def twice(self, parameters):
        pieces = list(parameters)
        real(self, pieces)
        real(self, pieces)

    patch.setattr(HostSteps, "run", twice)


@pytest.mark.parametrize(
    "how", [_up_too_late, _gone_before_it_is_copied, _stale_after_the_step, _stepped_on_a_device_too]
)
def test_a_broken_runtime_shows_in_the_numbers(how):
    model, batch = mlp_case()
    plan = planned(model, batch, "one device", "*")
    expected = trained(replace(plan, hosted=frozenset(), wholly_hosted=frozenset()), model, batch)
    with small_values_travel() as patch:
        right = trained(plan, model, batch)
        assert all(torch.equal(a, b) for a, b in zip(right, expected, strict=True))
        how(patch)
        wrong = trained(plan, model, batch)
        assert not all(torch.equal(a, b) for a, b in zip(wrong, expected, strict=True))


def test_a_saved_view_of_what_came_up_is_refused():
    model, batch = mlp_case()
    plan = planned(model, batch, "one device", "*")
    with small_values_travel() as patch:
        _a_view_of_the_device_is_saved(patch)
        with pytest.raises(NotCertified, match="saved on the device"):
            autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)


def test_a_model_that_was_moved_is_refused():
    model, batch = mlp_case()
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=planned(model, batch, "one device", "*"))
    mine.to("meta")
    with pytest.raises(NotServed, match="moved"):
        mine(**batch)


def in_processes(rank, model, batch, *plans):
    with small_values_travel():
        torch.manual_seed(0)
        return [trained(plan, model, batch, compile=how) for plan in plans for how in (False, "aot_eager")]


@pytest.mark.nightly
def test_processes_and_compiled_halves_too():
    model, batch = mlp_case()
    plan = planned(model, batch, "zero3", "*")
    alone = replace(plan, hosted=frozenset(), wholly_hosted=frozenset())
    for there, compiled, *expected in on_processes(2, in_processes, model, batch, plan, alone, timeout_s=150.0):
        for found, right in ((there, expected[0]), (compiled, expected[1])):
            assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
