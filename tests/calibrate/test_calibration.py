"""A profile of the machine: figures that fit what was measured, written, read, and used."""

from __future__ import annotations

import functools
import io
import json
import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, DeviceMesh
from autopar.calibrate import collectives, host, steps
from autopar.calibrate.calibration import Alone, calibrate, merged
from autopar.calibrate.collectives import KINDS, fit
from autopar.calibrate.stages import Stages
from autopar.calibrate.steps import line
from autopar.calibrate.workloads import WORKLOADS, traced
from autopar.cli import main
from autopar.runtime.collectives import STEPS
from autopar.sharding.cluster import Measured, Timed
from autopar.sharding.costs import OPTIMIZERS, collective_seconds, measured_seconds
from autopar.sharding.host import Host
from autopar.solver import solve
from autopar.solver.budget import Budgeted
from autopar.solver.plan_of_choices import plan_of
from autopar.space.constraints import Preset
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer
from tests.models import eager_links, mlp_case


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_finds_what_the_times_were_made_of(kind):
    rng = np.random.default_rng(0)
    for n, latency, wire in ((2, 1e-5, 1e9), (8, 3e-4, 2e11)):
        volume = {
            "all_gather": lambda w: (n - 1) / n * w,
            "reduce_scatter": lambda w: (n - 1) / n * w,
            "all_reduce": lambda w: 2 * (n - 1) / n * w,
            "all_to_all": lambda w: (n - 1) / n * w / n,
            "uneven_all_to_all": lambda w: (n - 1) / n * w / n,
        }[kind]
        times = {
            4**k * 4096: (latency + volume(4**k * 4096) / wire) * (1 + 0.02 * rng.standard_normal()) for k in range(11)
        }
        assert fit(kind, n, times) == pytest.approx((latency, wire), rel=0.1)


def test_latency_that_does_not_show_is_not_negative():
    assert all(v > 0 for v in fit("all_gather", 2, {1000: 1e-6, 4000: 9e-6, 16000: 50e-6}))
    assert all(v > 0 for v in fit("all_gather", 2, {1000: 9e-6, 4000: 8e-6, 16000: 7e-6}))


def stopped_and_asked_again(rank, path):
    said = io.StringIO()

    def none(tick):
        raise AssertionError("it was measured before")

    first = Stages(path, "as asked", said).run("one", 2, lambda tick: [tick() or 1.0, 2.0])
    again = Stages(path, "as asked", said).run("one", 2, none)
    other = Stages(path, "otherwise", said).run("one", 1, lambda tick: [3.0])
    Stages(path, "otherwise", said).end()
    return first, again, other, said.getvalue()


@pytest.mark.nightly
def test_a_calibration_goes_on_behind_the_stage_that_had_ended(processes, tmp_path):
    path = tmp_path / "here.json.part"
    everyone = processes(2, stopped_and_asked_again, path)
    assert all(result[:3] == ([1.0, 2.0], [1.0, 2.0], [3.0]) for result in everyone)
    assert "measured before" in everyone[0][3] and not everyone[1][3] and not path.exists()


def test_what_was_measured_takes_the_place_of_what_a_file_had_of_the_same_and_leaves_the_rest():
    base, curve = Cluster.of("h100-8x4"), ((1.0, 1e-6), (2.0, 2e-6))
    one, other = (Measured(kind, 8, 1, 1e-5, 1e11, curve) for kind in ("all_gather", "all_reduce"))
    before = replace(
        base, measured=(one, replace(other, latency_s=1.0)), timed=(Timed("relu", "float32", curve, curve),)
    )
    found = replace(base, measured=(other,), timed=(), hidden=0.5, sources=(("measured", "here"),))
    both = merged(before, found)
    assert both.measured == (one, other) and both.timed == before.timed and both.hidden == 0.5
    assert both.device == base.device and dict(both.sources).keys() == {*dict(base.sources), "measured"}


def briefly():
    """Let this process time collectives for milliseconds, and a step of few ops: figures do not matter."""
    collectives.timed = functools.partial(collectives.timed, lasts=4e-3)
    steps.Reference = functools.partial(steps.Reference, blocks=1)


def measured(rank):
    briefly()
    return calibrate(
        DeviceMesh((2, 2)),
        "cpu",
        "here",
        sizes=(4096, 16384),
        repetitions=1,
        workloads=[w for w in WORKLOADS if w.name == "relu"],
    )


def test_every_axis_and_collective_is_measured_and_all_ranks_agree(processes):
    everyone = processes(4, measured)
    assert all(c == everyone[0] for c in everyone)
    assert {(m.kind, m.size, m.stride) for m in everyone[0].measured} == {
        (kind, 2, stride) for kind in KINDS for stride in (1, 2)
    }
    assert everyone[0].device.kernels == "cpu" and everyone[0].devices_per_node == 4
    assert everyone[0].host.down_bytes_per_s > 0 < everyone[0].host.adamw_params_per_s
    of_a_file = Cluster.of("h100-4x1")
    assert "Azure" in dict(of_a_file.sources)["host"] and "Azure" not in str(merged(of_a_file, everyone[0]).sources)
    assert [t.op for t in everyone[0].timed] == ["relu", *(f"optimizer {name}" for name in OPTIMIZERS)]
    assert (
        all(seconds > 0 for t in everyone[0].timed for _, seconds in (*t.forward, *t.backward))
        and 0 <= everyone[0].hidden <= 1
    )


def test_the_host_is_measured_and_is_in_the_profile(processes, tmp_path):
    everyone = processes(2, host_with_slow_ways)
    assert everyone[0] == everyone[1]
    usual, slow = everyone[0]
    # A copy of memory to memory: between what a disk and what a cache would give, on any machine of these years.
    assert all(1e8 < rate < 1e12 for rate in (usual.down_bytes_per_s, usual.up_bytes_per_s, usual.both_bytes_per_s))
    assert usual.latency_s < 1e-3 and 1e6 < usual.adamw_params_per_s < 1e11
    assert usual.bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # One rank waits 2 ms and 2 ns a byte for a copy down: all find a start and a rate near these, and the other way as
    # it was; both ways together take what a copy down takes, in which twice the bytes pass.
    assert slow.latency_s == pytest.approx(2e-3, rel=0.3) and slow.down_bytes_per_s == pytest.approx(5e8, rel=0.3)
    assert slow.up_bytes_per_s > 2 * slow.down_bytes_per_s and 6e8 < slow.both_bytes_per_s < 1.3e9
    cluster = replace(Cluster.of("h100-4x1"), host=slow)
    cluster.save(tmp_path / "mine.json")
    assert Cluster.of(tmp_path / "mine.json").host == slow and merged(Cluster.of("h100"), cluster).host == slow
    assert merged(cluster, replace(cluster, host=None)).host == slow


def host_with_slow_ways(rank):
    def measured():
        return host.of_host("cpu", 2, 3, Stages(out=io.StringIO()))

    swift = host.WAYS["down"]

    def slow(size, device):
        run = swift(size, device)

        def wait():
            end = time.perf_counter() + (2e-3 + 2e-9 * size) * (rank == 1)
            run()
            while time.perf_counter() < end:
                time.sleep(1e-4)

        return wait

    usual = measured()
    host.WAYS["down"] = host._down = slow
    return usual, measured()


def test_a_slow_collective_shows(processes, monkeypatch):
    cluster = processes(2, slow_gather)[0]
    gather, exchange = ({m.kind: m for m in cluster.measured}[kind] for kind in ("all_gather", "all_to_all"))
    assert gather.latency_s > 0.05 > exchange.latency_s


def test_parts_of_unlike_lengths_come_back_as_they_went():
    for n, rows in ((2, 7), (3, 64), (8, 1)):
        sent = [collectives.unlike_lengths(rank, n, rows) for rank in range(n)]
        assert all(sum(of) == rows for of in sent) and sent == [list(of) for of in zip(*sent, strict=True)]
        assert rows < n * n or all(len(set(of)) == n for of in sent)


def test_rows_that_travel_cost_what_uneven_messages_were_measured_to_take(processes):
    """A slow `all_to_all` of parts of unlike lengths makes experts dearer, and nothing else slow does."""
    cluster = processes(2, slow_rows)[0]
    even, uneven = ({m.kind: m for m in cluster.measured}[kind] for kind in ("all_to_all", "uneven_all_to_all"))
    assert uneven.latency_s > 0.05 > even.latency_s
    without = replace(cluster, measured=tuple(m for m in cluster.measured if m is not uneven))
    slow, usual = (_seconds_of_experts(of) for of in (cluster, without))
    assert slow > usual + 7 * 0.05  # rows, routes and results; and four ways back


def slow_rows(rank):
    briefly()
    swift = collectives.Wire.rows

    def slow(*args):
        if rank == 1:
            time.sleep(0.06)
        return swift(*args)

    collectives.Wire.rows = slow
    return calibrate(DeviceMesh(2), "cpu", "here", sizes=(4096, 16384), repetitions=3, workloads=())


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 12, 8))
        self.down = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2)
        return autopar.experts(x, ids, weights, self.up, self.down).square().mean()


def _seconds_of_experts(cluster):
    """Seconds of experts whose rows travel between two devices."""
    plan = autopar.plan(_Experts(), (torch.randn(16, 8),), mesh=2, cluster=cluster, parallel={"experts": 2})
    assert "rows travel" in str(plan)
    return plan.step_time_s


def slow_gather(rank):
    briefly()
    swift = STEPS["all_gather"]

    def slow(*args):
        if rank == 1:  # the others wait for the slowest
            time.sleep(0.06)
        return swift(*args)

    collectives.STEPS = {**STEPS, "all_gather": slow}
    return calibrate(DeviceMesh(2), "cpu", "here", sizes=(4096, 16384), repetitions=3, workloads=())


def test_collectives_of_two_axes_share_what_their_turn_takes_longer(monkeypatch):
    """Where ranks share cores; elsewhere they are timed in rows, without work between."""
    given = {5: [2.0, 3.0, 4.0, 2.5, 10.0], 3: [1.0, 2.0, 0.5]}  # with work alone and a turn, and without
    monkeypatch.setattr(collectives, "timed", lambda rows, *_: given[len(rows)])
    asked = [[print, print], [print]]
    assert collectives._in_a_step(asked, "cpu", 1, print) == [2.0, 4.0, 0.5]  # of the turn 6 s, of both alone 1 and 2
    assert collectives._in_rows(asked, "cpu", 1, print) == [1.0, 2.0, 0.5]


def test_the_command_writes_a_profile_that_plans_use(tmp_path, capsys):
    path = tmp_path / "mine.json"
    assert main(["calibrate", "--ranks", "2", "--largest", "4096", "--pairs", "--without-ops", "-o", str(path)]) == 0
    said = capsys.readouterr().out
    assert "all_to_all" in said and "fastest links innermost: mesh (2,)" in said
    cluster = Cluster.of(str(path))
    assert json.loads(path.read_text())["measured"] and cluster.name == "mine"
    (gather,) = (m for m in cluster.measured if m.kind == "all_gather")
    (few, soon), (many, late) = gather.times[0], gather.times[-1]
    of_bytes = [
        collective_seconds("all_gather", cluster.levels(DeviceMesh(2), 0, "all_gather"), n)
        for n in (1, few, many, 10 * many)
    ]
    assert of_bytes == pytest.approx([soon, soon, late, 10 * late])
    assert cluster.levels(DeviceMesh(4), 0, "all_gather")[0][1] == cluster.links[0]  # nobody measured four
    model, batch = mlp_case()
    assert autopar.plan(model, batch, mesh=2, cluster=str(path)).cluster == "mine (CPU rank, 2 a node)"


def test_a_shape_that_cannot_be_read_is_a_letter(capsys):
    assert main(["calibrate", "--ranks", "2", "--mesh", "2,x"]) == 1
    assert "--mesh 2,x is not a shape" in capsys.readouterr().err


def busy(seconds):
    """A call that keeps its core so long."""

    def call(x):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return x + 1

    return call


def alone(rank):
    """Times of calls of one and four milliseconds, and how crowded the machine was."""
    timer = Alone("cpu", 5)
    times = [timer(lambda s=s: busy(s)(torch.ones(4))) for s in (1e-3, 4e-3)]
    return times, timer.crowding


def test_a_rank_that_waits_for_its_core_is_not_slower_itself(processes):
    for times, crowding in processes(4, alone):
        assert times == pytest.approx([1e-3, 4e-3], rel=0.5) and crowding > 0.9


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_a_workload_is_the_call_and_its_gradients(workload):
    """Beside eager and its autograd: what is timed is all of it, and nothing else."""
    for device in ("cpu", "cuda"):  # more than one point on each curve, ascending
        curves = {}
        for size in workload.sizes_on(device):
            curves.setdefault(workload.at(size, device), []).append(workload.amount(size))
        assert all(len(amounts) > 1 and amounts == sorted(set(amounts)) for amounts in curves.values())
    function, operands = workload.call((workload.sizes or workload.on_gpu)[1])
    pictures = [isinstance(x, nn.Buffer) for x in operands]  # nothing needs their gradient
    xs = [x.clone().requires_grad_(x.is_floating_point() and not p) for x, p in zip(operands, pictures, strict=True)]
    if workload.name.endswith(" cut") and "cross" in workload.name:  # the exchanges of an axis of one device
        expected = nn.functional.cross_entropy(*xs, reduction="sum")
    elif workload.name == "batch_norm_updating cut":
        expected = nn.functional.batch_norm(xs[0], None, None, *xs[1:], training=True)
    elif workload.name == "dropout":
        pytest.skip("draws of its own")
    else:
        expected = function(*xs)
    results = expected if isinstance(expected, (tuple, list)) else [expected]
    torch.manual_seed(0)
    run = traced((function, operands), True)
    torch.manual_seed(0)
    arriving = [torch.randn(r.shape) for r in results]
    gradients = torch.autograd.grad(results, [x for x in xs if x.requires_grad], arriving)
    found = run()  # what it makes besides is held until it has ended
    expected = [*results, *gradients]
    torch.testing.assert_close(list(found)[: len(expected)], expected, rtol=1e-4, atol=3e-5, check_dtype=False)


def machine(ranks):
    """A machine of so many ranks, whose ops and collectives have one curve."""
    curve = ((1.0, 1e-6), (1e6, 1e-3))
    found = tuple(Measured(kind, ranks, 1, 1e-5, 1e9, curve) for kind in KINDS)
    timed = tuple(Timed(op, "float32", curve, curve) for op in ("linear", "relu", "add", "sum", "optimizer adamw"))
    return replace(Cluster.of("generic"), measured=found, timed=timed, hidden=0.0)


def test_what_a_step_took_by_the_sum_of_its_ops_is_in_all_of_them(tmp_path):
    """Of ops and optimizers alike; collectives are measured with all ranks running, and take what they took."""
    alone = machine(2)
    replace(alone, together=1.5).save(tmp_path / "slowed.json")
    slowed = Cluster.of(tmp_path / "slowed.json")
    assert slowed.together == 1.5 and merged(alone, slowed).together == 1.5
    model, batch = Two(), {"x": torch.randn(4, 8)}
    fast, slow = (autopar.plan(model, batch, mesh=2, cluster=c, memory_budget="inf") for c in (alone, slowed))
    ops = sum(decision.seconds for decision in fast.decisions.values())
    assert 0 < ops < fast.step_time_s and slow.parameters == fast.parameters
    assert slow.step_time_s == pytest.approx(fast.step_time_s + 0.5 * ops)
    for wrong in (-1.0, 0.0, float("nan")):
        replace(alone, together=wrong).save(tmp_path / "wrong.json")
        with pytest.raises(autopar.letters.BadCluster, match="together"):
            Cluster.of(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    ("few", "many", "expected"),
    [
        ((0.05, 0.08), (0.25, 0.29), (1.05, 0.0275)),
        ((0.05, 0.06), (0.25, 0.30), (1.2, 0.0)),
        ((0.05, 0.05), (0.25, 0.30), (1.2, 0.0)),  # the line would begin under nothing
        ((0.05, 0.30), (0.25, 0.30), (0.5, 0.175)),  # a step that does not grow with its ops: noise, half is believed
    ],
)
def test_steps_of_two_sizes_say_what_grows_with_ops_and_what_does_not(few, many, expected):
    assert line(*few, *many) == pytest.approx(expected)


def test_what_a_step_takes_whatever_its_ops_do_is_in_no_op_and_in_every_plan(tmp_path):
    """Also in the bound, in the words of the plan and in its sources; and nothing that is chosen changes."""
    alone = machine(4)
    replace(alone, step_s=0.02).save(tmp_path / "later.json")
    later = Cluster.of(tmp_path / "later.json")
    assert later.step_s == 0.02 and merged(alone, later).step_s == 0.02
    model, batch = Two(), {"x": torch.randn(8, 8)}
    for how in ({"memory_budget": "inf"}, {"memory_budget": 3000}, {"microbatches": 2, "memory_budget": "inf"}):
        one, other = (autopar.plan(model, batch, mesh=4, cluster=c, **how) for c in (alone, later))
        assert {n: d.choice for n, d in other.decisions.items()} == {n: d.choice for n, d in one.decisions.items()}
        assert other.step_time_s == pytest.approx(one.step_time_s + 0.02)
        assert other.lower_bound_s == pytest.approx(one.lower_bound_s + 0.02)
        assert sum(other.sources.values()) == pytest.approx(sum(one.sources.values()) + 0.02)
    assert "20.00 ms of a step itself" in other.table() and "% of a step itself" in str(other)
    assert "of a step itself" not in str(one)
    assert "20000.0 us, measured on the machine" in other.explain("out.out")
    for wrong in (-1.0, float("inf"), float("nan")):
        replace(alone, step_s=wrong).save(tmp_path / "wrong.json")
        with pytest.raises(autopar.letters.BadCluster, match="step_s"):
            Cluster.of(tmp_path / "wrong.json")


def test_seconds_between_what_was_measured():
    curve = ((10, 1.0), (1000, 100.0), (10_000, 200.0))
    assert measured_seconds(curve, [0, 10, 100, 1000, 10_000, 30_000]) == pytest.approx([1, 1, 10, 100, 200, 600])


def flat(op, seconds, back=0.0, per=1e18):
    return Timed(op, "float32", ((per, seconds),), ((per, back or 1e-9),))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        h = self.up(x)
        return self.down(h + h.relu()).sum()


def test_what_was_measured_is_what_is_priced():
    """By hand: an op by its table, of a product a gradient an operand, of a bias a sum, of two uses an addition."""
    timed = (
        flat("linear", 5.0, 7.0),
        flat("relu", 11.0, 13.0),
        flat("add", 17.0, 19.0),
        flat("sum", 23.0, 29.0),
        flat("sum over rows", 31.0),
        flat("optimizer adamw", 37.0),
        flat("clone", 1.0),
        flat("copy turned", 1.0),
    )
    model, batch = Two(), {"x": torch.randn(4, 8)}
    cluster = replace(eager_links(), name="measured", timed=timed, hidden=0.0)
    plan = autopar.plan(model, batch, mesh=1, cluster=cluster, memory_budget="inf")
    seconds = {name: d.seconds for name, d in plan.decisions.items() if d.seconds}
    assert seconds.pop("up/linear") == pytest.approx(5 + 7 + 31)  # the input has no gradient
    assert seconds.pop("down/linear") == pytest.approx(5 + 2 * 7)
    assert sum(v for k, v in seconds.items() if "/linear:shared" in k) == pytest.approx(17)
    assert sum(d.seconds for d in plan.decisions.values() if d.op == "add") == pytest.approx(17 + 2 * 19)
    assert sum(d.seconds for d in plan.decisions.values() if d.kind == "parameter") == pytest.approx(3 * 37)
    assert plan.step_time_s == pytest.approx(5 + 7 + 31 + 5 + 14 + 11 + 13 + 17 + 17 + 38 + 23 + 29 + 3 * 37)


class Calls(nn.Module):
    """One call of a workload as a model.

    Its first operand is the input, of the others those of floating point are parameters.
    """

    def __init__(self, function, operands):
        super().__init__()
        self.function, self.count = function, len(operands)
        for i, x in enumerate(operands[1:], 1):
            if x.is_floating_point() and not isinstance(x, nn.Buffer):
                self.register_parameter(f"p{i}", nn.Parameter(x))
            else:
                self.register_buffer(f"p{i}", x)

    def forward(self, x):
        return self.function(x, *(getattr(self, f"p{i}") for i in range(1, self.count)))


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "matmul",
        "scaled_dot_product_attention causal",
        "conv2d",
        "tanh",
        "add",
        "layer_norm",
        "softmax",
        "cat",
    ],
)
def test_an_op_is_priced_by_the_amount_by_which_it_was_measured(name):
    """On a machine that takes a second for each unit of an amount, forward takes what the workload says that it is."""
    (workload,) = (w for w in WORKLOADS if w.name == name)
    size = workload.sizes[1]
    second = ((1.0, 1.0), (1e15, 1e15))
    timed = tuple(
        Timed(op, "float32", second if op == name else ((1.0, 1e-12),), ((1.0, 1e-12),))
        for op in {name, "add", "sum", "sum over rows", "clone", "copy turned"}
    )
    function, operands = workload.call(size)
    graph = ColoTracer().trace(Calls(function, operands), (operands[0],))
    space = shardings(graph, Setting(DeviceMesh(1), replace(eager_links(), timed=timed)))
    assert sum(
        float(s.seconds[0]) for s in space.sites if s.op == name.split()[0] and s.seconds[0] > 1e-3
    ) == pytest.approx(workload.amount(size), rel=1e-6)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(
    "name", sorted(w.name for w in WORKLOADS if w.at(w.on_gpu[-1], "cuda") and " cut" not in w.name)
)
def test_an_op_is_priced_by_the_second_size_by_which_it_was_measured(name, place):
    """On a GPU that takes as many seconds as the second size of a curve, a call takes what its workload says.

    Sums over rows are those of a bias.
    """
    (workload,) = (w for w in WORKLOADS if w.name == name)
    size, op = workload.on_gpu[place], name.partition(" ")[0]
    sizes = sorted({workload.at(s, "cuda") for s in workload.on_gpu})
    timed = [Timed(name, "float32", ((1.0, at), (1e18, at)), ((1e18, 1e-12),), at) for at in sizes]
    timed += [
        Timed(other, "float32", ((1e18, 1e-12),), ((1e18, 1e-12),)) for other in {op, "linear", "add", "clone"} - {name}
    ]
    with torch.device("meta"):
        function, operands = workload.call(size)
        if name == "sum over rows":
            operands = operands[0].new_empty(size[0], 8), nn.Buffer(operands[0].new_empty(size[1], 8)), operands[0][0]
            function, op = nn.functional.linear, "linear"
        if op == "batch_norm_updating":
            kept = nn.Buffer(torch.zeros_like(operands[1])), nn.Buffer(torch.zeros_like(operands[1]))
            operands, op = (operands[0], *kept, *operands[1:]), "batch_norm"
            function = lambda x, m, v, w, b: nn.functional.batch_norm(x, m, v, w, b, training=True)  # noqa: E731
        graph = ColoTracer().trace(Calls(function, operands), (operands[0],))
    machine = replace(eager_links(), timed=tuple(timed))
    machine = replace(machine, device=replace(machine.device, kernels="cuda"))
    space = shardings(graph, Setting(DeviceMesh(1), machine))
    slowest = max(float(s.seconds[0]) for s in space.sites if s.op.startswith(op))
    assert slowest == pytest.approx(workload.at(size, "cuda"), rel=1e-6)


def test_a_step_of_adamw_is_priced_by_its_own_table_alone():
    model, batch = mlp_case()
    cluster = replace(eager_links(), timed=(flat("add", 1.0), flat("optimizer adamw", 3.0)))
    graph = ColoTracer().trace(model.float(), {k: v.float() for k, v in batch.items()})
    parameters = [s for s in shardings(graph, Setting(DeviceMesh(1), cluster, "adamw")).sites if s.kind == "parameter"]
    assert all(s.seconds == pytest.approx(3.0) for s in parameters)
    before = [
        s.seconds for s in shardings(graph, Setting(DeviceMesh(1), eager_links(), "sgd")).sites if s.kind == "parameter"
    ]
    assert all(
        (a.seconds == b).all()
        for a, b in zip(
            (s for s in shardings(graph, Setting(DeviceMesh(1), cluster, "sgd")).sites if s.kind == "parameter"),
            before,
        )
    )


@pytest.mark.parametrize("hidden", [0.0, 0.25, 1.0])
def test_only_the_measured_share_is_hidden(hidden):
    """The same plan of several windows on two machines."""
    with torch.device("meta"):
        model, x = (
            nn.Sequential(*(nn.Sequential(nn.Linear(2600, 2600), nn.ReLU()) for _ in range(3))),
            torch.zeros(512, 2600),
        )
    graph = ColoTracer().trace(model, (x,))
    full, part = (
        shardings(
            graph,
            Setting(DeviceMesh(4), replace(Cluster.of("l4-4x1"), hidden=h)),
            preset=Preset(dict.fromkeys(graph.parameters, "S(0); R")),
        )
        for h in (1.0, hidden)
    )
    plan = solve(full)
    picked = [s.choices.index(plan.decisions[s.name].choice) for s in full.sites]
    assert full.hidden(picked) > 1e-6
    assert plan_of(part, Budgeted(part).point(picked), 0.0).step_time_s == pytest.approx(
        plan.step_time_s + (1 - hidden) * full.hidden(picked)
    )
    assert part.hidden(picked) == pytest.approx(hidden * full.hidden(picked))


def test_a_profile_is_read_as_it_was_written(tmp_path):
    cluster = replace(
        eager_links(),
        name="kept",
        timed=(Timed("relu", "float32", ((1.0, 2.0), (3.0, 4.0)), ((1.0, 5.0),), at=64.0),),
        hidden=0.5,
        measured=(Measured("all_gather", 2, 1, 1e-3, 1e9, ((8.0, 1e-3), (64.0, 2e-3))),),
        host=Host("slot", 25e9, 24e9, 1e-5, 2**40, 36e9, 1.5e9),
    )
    cluster.save(tmp_path / "kept.json")
    assert Cluster.of(tmp_path / "kept.json") == cluster


def test_a_gradient_takes_the_way_that_it_is_priced_by():
    """A gradient alone would be scattered and gathered where small messages are dear.

    With others in a bucket it is reduced at once.
    """
    curves = {
        "all_reduce": ((8.0, 10.0), (2.0**20, 10.0)),
        "reduce_scatter": ((8.0, 5.0), (2.0**20, 5.0)),
        "all_gather": ((8.0, 2.0), (2.0**20, 2.0)),
    }
    cluster = replace(
        eager_links(),
        timed=(flat("linear", 1e-6),),
        measured=tuple(Measured(kind, 2, 1, 1e-3, 1e9, curve) for kind, curve in curves.items()),
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plan = autopar.plan(
        model,
        (torch.randn(8, 64),),
        mesh=2,
        cluster=cluster,
        parallel="dp",
        memory_budget="inf",
        loss=lambda out, x: out.sum(),
    )
    backward = {c.source: [s.kind for s in c.backward] for c in plan.conversions if c.source in plan.parameters}
    assert backward["0.bias"] == backward["2.bias"] == ["all_reduce"]  # a small share of a bucket
