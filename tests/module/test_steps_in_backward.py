"""Steps of the host while backward goes on: bit for bit those behind backward, or a letter."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.certificate.handed_over import OnHost, check_order
from autopar.codegen import handed_over, joint
from autopar.codegen.lower import lower
from autopar.letters import NotCertified, NotServed
from autopar.module.runner import Runner
from autopar.runtime import backward_steps
from autopar.runtime.backward_steps import hand_over
from autopar.runtime.host import HOST
from autopar.sharding.costs import DURING_BACKWARD
from autopar.testing import on_processes
from autopar.tracer import ColoTracer
from tests.host import CASES, broken, first, model_in, planned, small_values_travel, stepped
from tests.models import mlp_case
from tests.training import whole


def train(rank, model, batch, plan, during_backward):
    """Parameters and states after three steps, of the second of which a micro-batch waited for another."""
    torch.manual_seed(0)
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
    optimizer = autopar.optim.AdamW(mine.parameters(), lr=1e-2, during_backward=during_backward)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)
    stepped(mine, batch, optimizer, 1)
    scheduler.step()
    optimizer.zero_grad()
    with mine.no_sync():
        getattr(outputs := mine(**batch), "loss", outputs).backward()
    getattr(outputs := mine(**batch), "loss", outputs).backward()
    optimizer.step()
    scheduler.step()
    before = {name: whole(p.detach()).clone() for name, p in mine.named_parameters()}
    optimizer.zero_grad()
    getattr(outputs := mine(**batch), "loss", outputs).backward()
    behind = {name for name, p in mine.named_parameters() if not torch.equal(whole(p.detach()), before[name])}
    assert behind <= plan.hosted and bool(behind) == during_backward
    optimizer.step()
    found = {}
    for name, p in mine.named_parameters():
        found[name] = whole(p.detach()).clone()
        found |= {f"{name} {k}": whole(v).clone() for k, v in optimizer.state[p].items()}
    return found


def in_backward(plan, names, wholly):
    names = frozenset(names)
    return replace(plan, optimizer=DURING_BACKWARD, hosted=names, wholly_hosted=names if wholly else frozenset())


def is_same(found, right):
    assert found.keys() == right.keys()
    return not [k for k in right if not torch.equal(found[k], right[k])]


@pytest.mark.parametrize(("name", "how", "dtype"), [case for case in CASES if "turns" not in case.values[1]])
def test_training_is_that_of_steps_behind_backward(name, how, dtype, threads):
    """Where all states lie on the host, those of every second parameter, and all parameters themselves."""
    model, batch = model_in(name, dtype)
    plan = planned(model, batch, how)
    expected = threads(plan.mesh.size, train, model, batch, plan, False)
    with small_values_travel():
        for step, wholly in ((1, False), (2, False), (1, True)):
            there = in_backward(plan, list(plan.parameters)[::step], wholly)
            ranks = threads(plan.mesh.size, train, model, batch, there, True)
            assert all(is_same(*pair) for pair in zip(ranks, expected, strict=True))
    gc.collect()
    assert not HOST.bytes


def in_processes(rank, model, batch, plan, there):
    with small_values_travel():
        return train(rank, model, batch, plan, False), train(rank, model, batch, there, True)


@pytest.mark.nightly
@pytest.mark.parametrize("wholly", [False, True])
def test_processes_too(wholly):
    model, batch = model_in("decoder", "float32")
    plan = planned(model, batch, "zero3")
    there = in_backward(plan, plan.parameters, wholly)
    for right, found in on_processes(2, in_processes, model, batch, plan, there, timeout_s=150.0):
        assert is_same(found, right)


@pytest.fixture
def trained():
    """A model on one device after a backward that has stepped it, its batch and its optimizer."""
    model, batch = mlp_case()
    plan = in_backward(planned(model, batch, "one device"), ["head.weight", "blocks.0.up.weight"], False)
    mine = autopar.autoparallelize(model, batch, plan=plan)
    optimizer = autopar.optim.AdamW(mine.parameters(), lr=1e-2, during_backward=True)
    mine(**batch).backward()
    return mine, batch, optimizer


def test_what_comes_too_late_is_an_error(trained):
    """Whatever would have the step differ from that behind backward, before `step` changes anything."""
    mine, batch, optimizer = trained
    before = {name: whole(p.detach()).clone() for name, p in mine.named_parameters()}
    with pytest.raises(NotServed, match="second backward before"):
        mine(**batch).backward()
    for reading in (
        lambda: torch.nn.utils.clip_grad_norm_(mine.parameters(), 1e-3),
        lambda: mine.head.weight.grad,
    ):
        with pytest.raises(NotServed, match="gradient is read between"):
            reading()
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(NotServed, match="learning rate"):
        optimizer.step()
    assert all(torch.equal(whole(p.detach()), before[name]) for name, p in mine.named_parameters())
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    assert mine.head.weight.grad is None and mine.blocks[0].norm.weight.grad is not None


def test_gradients_that_are_not_the_models_alone_are_an_error(trained):
    mine, batch, optimizer = trained
    optimizer.step()
    optimizer.zero_grad()
    mine.head.weight.grad = torch.zeros_like(mine.head.weight)
    with pytest.raises(NotServed, match="adds to gradients"):
        mine(**batch).backward()
    optimizer.zero_grad()
    (mine(**batch) + mine.head.weight.to_local().square().sum()).backward()
    with pytest.raises(NotServed, match="from outside of the model"):
        optimizer.step()


def test_a_parameter_that_hooks_look_at_is_stepped_behind_backward(trained):
    mine, batch, optimizer = trained
    optimizer.step()
    optimizer.zero_grad()
    before = whole(mine.head.weight.detach()).clone()
    seen = []
    mine.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.detach()).clone()))
    mine(**batch).backward()
    assert torch.equal(seen[0], before)
    optimizer.step()
    assert not torch.equal(whole(mine.head.weight.detach()), before)


def test_options_that_exclude_each_other_are_errors():
    model, batch = mlp_case()
    plan = planned(model, batch, "one device", "*")
    mine = autopar.autoparallelize(model, batch, plan=plan)
    with pytest.raises(NotServed, match="norm of all gradients"):
        autopar.optim.AdamW(mine.parameters(), max_norm=1.0, during_backward=True)
    with pytest.raises(NotServed, match="behind backward"):
        autopar.optim.AdamW(mine.parameters(), during_backward=True)


def test_an_error_of_the_thread_is_that_of_backward(trained, monkeypatch):
    mine, batch, optimizer = trained
    optimizer.step()
    optimizer.zero_grad()

    def fails(coming):
        raise RuntimeError("the CPUs failed")

    monkeypatch.setattr(backward_steps, "_from_device", fails)
    with pytest.raises(RuntimeError, match="CPUs failed"):
        mine(**batch).backward()


DOUBLE = {"dtype": torch.float64}


def _handed_over_before_it_is_read(patch):
    """Parameters are stepped as backward begins to read them, by gradients of zeros."""
    real = handed_over.hand_over_gradients

    def too_early(program, primals, names):
        real(program, primals, names)
        readers = handed_over._readers_of_parameters(program)
        for final in program.backward.find_nodes(op="call_function", target=hand_over):
            if behind := readers.get(primals[final.args[1]]):
                with program.backward.inserting_before(min(behind)):
                    zeros = program.backward.call_function(torch.zeros, (list(final.meta["val"].shape),), DOUBLE)
                    program.backward.call_function(hand_over, (zeros, final.args[1]))
                final.replace_all_uses_with(final.args[0])
                program.backward.erase_node(final)

    patch.setattr(joint, "hand_over_gradients", too_early)


def _stepped_twice(patch):
    """Each gradient steps its parameter two times."""
    real = backward_steps.BackwardSteps.begin
    patch.setattr(backward_steps.BackwardSteps, "begin", lambda *given: [real(*given) for _ in range(2)])


def _never_brought_back(patch):
    """The stepped values stay on the host."""
    patch.setattr(backward_steps, "_from_device", lambda coming: coming.gradient.end_on_host())


def _stepped_by_a_part_of_the_gradient(patch):
    """A gradient of which another micro-batch waits is handed over."""
    real = Runner._held

    def held(self, given, arrived, waits):
        found = real(self, given, arrived, waits)
        for i, gradient in zip(self.gets, found, strict=True):
            if not waits and gradient is not None and i in self.primals.names:
                stepper = backward_steps.stepper_of(p := self.waiting.parameter(self.primals.names[i]))
                stepper.begin(p, gradient * 0.5)
                stepper.end()
        return found

    patch.setattr(Runner, "_held", held)
    patch.setattr(backward_steps.BackwardSteps, "taken_over", lambda self: self._stepped)
    patch.setattr(backward_steps, "_mark", lambda *a: None)


class AtOnce:
    """A pool of threads that runs what it is given at once: the earliest moment at which a step may come."""

    def submit(self, run, *given):
        run(*given)
        found = Future()
        found.set_result(None)
        return found


@pytest.mark.parametrize(
    "how", [_handed_over_before_it_is_read, _stepped_twice, _never_brought_back, _stepped_by_a_part_of_the_gradient]
)
def test_a_broken_step_shows_in_the_numbers(how, threads):
    model, batch = mlp_case()
    plan = planned(model, batch, "one device")
    there = in_backward(plan, plan.parameters, False)

    def run(rank, plan, during_backward):
        """Parameters after two steps, of the second of which a micro-batch has waited."""
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        optimizer = autopar.optim.AdamW(mine.parameters(), lr=1e-2, during_backward=during_backward)
        stepped(mine, batch, optimizer, 1)
        optimizer.zero_grad()
        with mine.no_sync():
            mine(**batch).backward()
        mine(**batch).backward()
        optimizer.step()
        return {name: whole(p.detach()).clone() for name, p in mine.named_parameters()}

    with small_values_travel() as patch:
        patch.setattr(backward_steps, "ThreadPoolExecutor", lambda *a: AtOnce())
        patch.setenv("AUTOPAR_CERTIFICATE", "off")
        right = run(0, plan, False)
        assert is_same(run(0, there, True), right)
        joint.LOWERED.clear()
        how(patch)
        assert not is_same(run(0, there, True), right)


def _is_read_behind(graph):
    parameter = [n for n in graph.find_nodes(op="placeholder") if n.name.startswith("primals") and n.users][-1]
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.neg.default, (parameter,))


def _is_not_final(graph):
    """The part of a sum is handed over, and the whole of it returned."""
    final = next(n for n in graph.find_nodes(op="call_function", target=hand_over) if n.args[0].all_input_nodes)
    final.replace_all_uses_with(final.args[0])
    final.args = (final.args[0].all_input_nodes[0], final.args[1])


def _is_of_another(graph):
    one, other = graph.find_nodes(op="call_function", target=hand_over)[:2]
    one.args = (one.args[0], other.args[1])


def _is_handed_over_twice(graph):
    final = first(graph, hand_over)
    with graph.inserting_after(final):
        graph.call_function(hand_over, final.args)


def _is_not_handed_over(graph):
    final = first(graph, hand_over)
    final.replace_all_uses_with(final.args[0])
    graph.erase_node(final)


def _is_written_to_behind(graph):
    final = first(graph, hand_over)
    with graph.inserting_after(final):
        graph.call_function(torch.ops.aten.mul_.Tensor, (final.args[0], 2.0))


@pytest.mark.parametrize("how", ["one device", "zero3"])
def test_the_certificate_refuses_what_is_handed_over_wrongly(how):
    model, batch = mlp_case()
    plan = planned(model, batch, how)
    plan = in_backward(plan, plan.parameters, False)
    program = lower(ColoTracer().trace(model, batch), plan, (0,) * len(plan.mesh.shape))
    names = dict(enumerate(program.program.parameters, len(program.program.inputs)))
    check_order(program.joint, OnHost(stepped=names))
    wrong = [_is_not_final, _is_of_another, _is_handed_over_twice, _is_not_handed_over, _is_written_to_behind]
    for how_broken in wrong + [_is_read_behind] * (how == "one device"):
        with pytest.raises(NotCertified, match="hands over a gradient to be stepped"):
            check_order(broken(program.joint, "backward", how_broken), OnHost(stepped=names))
    for half in ("hold", "settle"):
        with pytest.raises(NotCertified, match="not final"):
            check_order(replace(program.joint, **{half: program.joint.backward}), OnHost(stepped=names))
