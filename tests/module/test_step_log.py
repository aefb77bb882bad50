"""Lines about steps: on rank 0 alone, with figures that a clock on the wall and a count by hand give."""

from __future__ import annotations

import copy
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.letters import NotServed
from autopar.module import step_log
from autopar.testing import on_threads
from tests.models import eager_links

WORDS, WIDTH = 24, 8


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), ids.flatten())


torch.manual_seed(0)
MODEL = Speaker()
IDS = torch.randint(0, WORDS, (4, 6))
# Ends of nine steps: the fifth had an evaluation in it.
ENDS = [100.0, 101.0, 103.0, 103.5, 203.5, 205.5, 206.0, 206.5, 207.0]


@pytest.fixture
def clock(monkeypatch):
    """A clock of each log that shows these times, one after the other."""

    def on(device):
        times = itertools.chain(ENDS, itertools.count(1000.0))
        return step_log._Moments(lambda: next(times), lambda first, last: last - first)

    monkeypatch.setattr(step_log._Moments, "on", staticmethod(on))


class Board:
    """As a SummaryWriter of TensorBoard."""

    def __init__(self) -> None:
        self.rows = {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.rows[tag, global_step] = scalar_value


def trained(rank, boards, calls, accumulation, steps=9):
    """What the log of a loop returned at each step, and how many programs the model has."""
    model = autopar.autoparallelize(
        copy.deepcopy(MODEL), (IDS,), mesh=2, parallel="dp", cluster=eager_links(), accumulation=accumulation
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = autopar.log(model, every=3, start=30, writer=boards[rank])
    found = []
    for step in range(steps):
        ids = IDS if step < 6 else IDS[:2]  # batches of half the rows at the end
        for _ in range(calls):
            loss = model(ids)
            (loss / calls).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(ids)  # no call of training
        found.append(log.step(loss=loss, norm=norm))
    log.remove()
    return found, loss.item(), len(model._autopar.programs)


def test_figures_are_those_by_hand_and_rank_0_alone_says_them(clock, caplog):
    boards = [Board(), Board()]
    with caplog.at_level(logging.INFO, "autopar"):
        (found, *_), (other, *_) = on_threads(2, trained, boards, 2, 2)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("step ")]
    assert (
        [r and r.step for r in found]
        == [None, None, 33, None, None, 36, None, None, 39]
        == [r and r.step for r in other]
    )
    first, second, third = filter(None, found)
    assert first.rates.step_s == 1.0  # between the first two ends: the first step has no beginning
    assert second.rates.step_s == 2.0  # the median of 2, 0.5 and the 100 s of an evaluation
    assert third.rates.step_s == 0.5
    assert len(lines) == 3 and boards[1].rows == {}
    tokens = 2 * IDS.numel()  # of two calls
    for reached, at, of in ((first, 1.0, tokens), (second, 2.0, tokens), (third, 0.5, tokens // 2)):
        flops = 3 * 2 * of * WIDTH * WORDS  # of the one product: forward and two of backward
        peak = 2 * eager_links().device.rate("float32")
        assert reached.rates.per_s_device == pytest.approx(of / at / 2)
        assert reached.rates.mfu == pytest.approx(flops / at / peak)
        assert f"{of / at / 2:.1f} tokens/s a device" in lines[(reached.step - 33) // 3]
    assert third.values["loss"] != second.values["loss"] and found[-1].values["norm"] > 0
    assert boards[0].rows["autopar/loss", 36] == second.values["loss"]
    assert boards[0].rows["autopar/step_s", 36] == 2.0
    assert "expected" in lines[1] and second.expected.step_s > 0
    assert "expected" not in lines[2] and third.expected is None  # half of the rows were not planned


def test_steps_of_other_calls_are_not_held_against_the_plan(clock, caplog):
    with caplog.at_level(logging.INFO, "autopar"):
        (found, _, programs), _ = on_threads(2, trained, [None, None], 3, 1, 6)
    reached = found[5]
    assert reached.expected is None and reached.rates.per_s_device == pytest.approx(3 * IDS.numel() / 2.0 / 2)
    hints = [r.getMessage() for r in caplog.records if "a step made 3 calls" in r.getMessage()]
    assert len(hints) == 1 and hints[0].endswith("accumulation=3 would say")
    assert programs == 2  # the log's hook asks for no other program: with gradients, and without


@pytest.mark.parametrize(("share", "hints"), [(1.0, 0), (100.0, 1)])
def test_steps_far_from_the_plan_are_told_of_once(share, hints, monkeypatch, caplog):
    model = autopar.autoparallelize(copy.deepcopy(MODEL), (IDS,), mesh=1)
    times = (share * model.plan.expected_s * step for step in itertools.count())
    moments = step_log._Moments(lambda: next(times), lambda first, last: last - first)
    monkeypatch.setattr(step_log._Moments, "on", staticmethod(lambda device: moments))
    with caplog.at_level(logging.INFO, "autopar"):
        log = logged(model, 8)
    assert log.last.is_as_expected is not bool(hints) and log.last.rates.step_s == pytest.approx(
        share * model.plan.expected_s
    )
    assert sum("autopar calibrate" in r.getMessage() for r in caplog.records) == hints


def logged(model, steps):
    log = autopar.log(model, every=2)
    for _ in range(steps):
        model(IDS).backward()
        log.step()
    return log


def test_a_line_is_printed_where_nobody_configured_logging(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("autopar"), "propagate", False)
    logged(autopar.autoparallelize(copy.deepcopy(MODEL), (IDS,), mesh=1), 2)
    assert "autopar: step 2: " in capsys.readouterr().err


def test_a_run_of_wandb_has_its_own_axis_of_steps():
    defined, rows = [], []
    run = SimpleNamespace(log=rows.append, define_metric=lambda name, step_metric: defined.append((name, step_metric)))
    reached = SimpleNamespace(step=7, figures=lambda: {"loss": 2.0})
    step_log._write_to(run)(reached)
    assert defined == [("autopar/*", "autopar/step")] and rows == [{"autopar/step": 7, "autopar/loss": 2.0}]


def test_what_cannot_be_logged_is_a_letter():
    model = autopar.autoparallelize(copy.deepcopy(MODEL), (IDS,), mesh=1)
    with pytest.raises(NotServed, match="is not parallel"):
        autopar.log(MODEL)
    with pytest.raises(NotServed, match="every=0"):
        autopar.log(model, every=0)
    with pytest.raises(NotServed, match="neither a SummaryWriter"):
        autopar.log(model, writer="runs/")
    with pytest.raises(NotServed, match=r"loss=.* is not a number"):
        autopar.log(model, every=1).step(loss=torch.zeros(2))
