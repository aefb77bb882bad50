"""A profile of the machine: figures that fit what was measured, written, read, and used."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import autopar
from autopar import Cluster, DeviceMesh
from autopar.cli import main
from autopar.runtime import calibration
from autopar.runtime.calibration import COLLECTIVES, calibrate, fit
from autopar.runtime.collectives import STEPS
from autopar.sharding.costs import step_seconds
from tests.models import mlp_case


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_fit_finds_what_the_times_were_made_of(kind):
    rng = np.random.default_rng(0)
    for n, latency, wire in ((2, 1e-5, 1e9), (8, 3e-4, 2e11)):
        volume = {"all_gather": lambda w: (n - 1) / n * w, "reduce_scatter": lambda w: (n - 1) / n * w, "all_reduce": lambda w: 2 * (n - 1) / n * w, "all_to_all": lambda w: (n - 1) / n * w / n}[kind]
        times = {4**k * 4096: ((2 if kind == "all_reduce" else 1) * latency + volume(4**k * 4096) / wire) * (1 + 0.02 * rng.standard_normal()) for k in range(11)}
        assert fit(kind, n, times) == pytest.approx((latency, wire), rel=0.1)


def test_latency_that_does_not_show_is_not_negative():
    assert all(v > 0 for v in fit("all_gather", 2, {1000: 1e-6, 4000: 9e-6, 16000: 50e-6}))
    assert all(v > 0 for v in fit("all_gather", 2, {1000: 9e-6, 4000: 8e-6, 16000: 7e-6}))


def measured(rank):
    return calibrate(DeviceMesh((2, 2)), "cpu", "here", sizes=(4096, 65536), repetitions=3)


def test_every_axis_and_collective_is_measured_and_all_ranks_agree(processes):
    everyone = processes(4, measured)
    assert all(c == everyone[0] for c in everyone)
    assert {(m.kind, m.size, m.stride) for m in everyone[0].measured} == {(kind, 2, stride) for kind in COLLECTIVES for stride in (1, 2)}
    assert everyone[0].device.kernels == "cpu" and everyone[0].devices_per_node == 4


def test_a_slow_collective_shows(processes, monkeypatch):
    cluster = processes(2, slow_gather)[0]
    gather, exchange = ({m.kind: m for m in cluster.measured}[kind] for kind in ("all_gather", "all_to_all"))
    assert gather.latency_s > 0.05 > exchange.latency_s


def slow_gather(rank):
    swift = STEPS["all_gather"]

    def slow(*args):
        if rank == 1:                                          # the others wait for the slowest
            time.sleep(0.06)
        return swift(*args)

    calibration.STEPS = {**STEPS, "all_gather": slow}
    return calibrate(DeviceMesh(2), "cpu", "here", sizes=(4096, 16384), repetitions=3)


def test_the_command_writes_a_profile_that_plans_use(tmp_path, capsys):
    path = tmp_path / "mine.json"
    assert main(["calibrate", "--ranks", "2", "--largest", "65536", "--pairs", "-o", str(path)]) == 0
    said = capsys.readouterr().out
    assert "all_to_all" in said and "fastest links innermost: mesh (2,)" in said
    cluster = Cluster.of(str(path))
    assert json.loads(path.read_text())["measured"] and cluster.name == "mine"
    gather, = (m for m in cluster.measured if m.kind == "all_gather")
    assert step_seconds("all_gather", cluster.levels(DeviceMesh(2), 0, "all_gather"), 1e6, cluster.device) == pytest.approx(gather.latency_s + 0.5e6 / gather.bytes_per_s)
    assert cluster.levels(DeviceMesh(4), 0, "all_gather")[0][1] == cluster.links[0]      # nobody measured four
    model, batch = mlp_case()
    assert autopar.plan(model, batch, mesh=2, cluster=str(path)).cluster == "mine (CPU rank, 2 a node)"


def test_a_shape_that_cannot_be_read_is_a_letter(capsys):
    assert main(["calibrate", "--ranks", "2", "--mesh", "2,x"]) == 1
    assert "--mesh 2,x is not a shape" in capsys.readouterr().err
