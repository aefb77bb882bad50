"""Plans in a folder: the second start takes what the first has kept, and nothing that was asked otherwise or edited."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
import autopar.api
from autopar.letters import NotServed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


@pytest.fixture
def searches(monkeypatch):
    """The graphs that were searched, in a list that grows."""
    seen = []
    for name in ("plan_of", "plan_again"):
        search = getattr(autopar.api, name)
        monkeypatch.setattr(autopar.api, name, lambda *a, search=search, **k: seen.append(a[0]) or search(*a, **k))
    return seen


def start(folder, rows=4, **how):
    """The loss of a model that is made parallel; the same seed each time."""
    torch.manual_seed(0)
    model = autopar.autoparallelize(Net(), {"x": torch.randn(rows, 8)}, cache=folder, **how)
    forget_programs(folder)
    return model(torch.ones(rows, 8)).item()


def forget_programs(folder):
    """Leave nothing but plans in a folder: these tests are about plans."""
    for path in Path(folder or os.environ.get("AUTOPAR_CACHE", "")).glob("*.*"):
        if path.suffix != ".json":
            path.unlink()


def test_a_second_start_does_not_search(tmp_path, searches, monkeypatch):
    folder = tmp_path / "plans"
    first = start(folder)
    assert len(searches) == 1
    (kept,) = folder.iterdir()
    assert autopar.Plan.load(kept).mesh.size == 1  # a plan as any other
    assert start(folder) == first and len(searches) == 1
    monkeypatch.setenv("AUTOPAR_CACHE", str(folder))
    assert start(None) == first and len(searches) == 1
    start("")  # none, whatever the environment says
    assert len(searches) == 2 and list(folder.iterdir()) == [kept]


@pytest.mark.parametrize(
    "how",
    [
        {"rows": 8},
        {"memory_budget": "1GiB"},
        {"precision": "bf16"},
        {"recompute": "full"},
        {"optimizer": "sgd"},
        {"cluster": "h100-8x1"},
        {"constraints": {"up.weight": "R"}},
        {"outputs": "full"},
    ],
    ids=str,
)
def test_what_is_asked_otherwise_is_planned(how, tmp_path, searches):
    start(tmp_path)
    start(tmp_path, **how)
    assert len(searches) == 2 and len(list(tmp_path.iterdir())) == 2


def test_other_releases_and_rules_are_planned(tmp_path, searches, monkeypatch):
    start(tmp_path)
    monkeypatch.setattr("autopar.plan_cache.__version__", "0.2.0")
    start(tmp_path)
    assert len(searches) == 2
    monkeypatch.setattr("autopar.plan_cache.rules_of_users", lambda: (("mine", "b -> b"),))
    start(tmp_path)
    assert len(searches) == 3


def test_a_job_says_that_it_took_a_plan_and_why_not(tmp_path, monkeypatch, capsys):
    """Also where nobody has configured logging: planning again at each start must not look like reading."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    start(tmp_path)
    assert "autopar: kept the plan as " in capsys.readouterr().err
    start(tmp_path)
    assert "autopar: took the kept plan " in capsys.readouterr().err
    next(tmp_path.iterdir()).write_text("{")
    start(tmp_path)
    assert "autopar: the kept plan " in capsys.readouterr().err


def test_another_batch_of_a_trained_model_is_kept_too(tmp_path, searches):
    torch.manual_seed(0)
    for start in (1, 2):
        model = autopar.autoparallelize(Net(), {"x": torch.randn(4, 8)}, cache=tmp_path)
        forget_programs(tmp_path)
        model(torch.ones(4, 8)).backward()
        model(torch.ones(3, 8)).backward()
        assert len(searches) == 2, start


def test_an_edited_file_is_not_taken(tmp_path, searches, caplog):
    first = start(tmp_path)
    (kept,) = tmp_path.iterdir()
    as_written = kept.read_text()
    data = json.loads(as_written)
    kept.write_text(json.dumps(data | {"step_time_s": 1.0}))  # a plan that reads, and is legal
    assert start(tmp_path) == first and len(searches) == 2
    (said,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert str(kept) in said and "was changed since it was written" in said
    assert kept.read_text() == as_written  # and stands again
    kept.write_text("{")
    assert start(tmp_path) == first and len(searches) == 3


def test_a_plan_of_another_model_under_this_name_is_not_taken(tmp_path, searches, caplog):
    """Its content is what its name says, and the name was given by hand."""
    start(tmp_path / "a")
    start(tmp_path / "b", rows=8)
    (mine,), (other,) = ((tmp_path / name).iterdir() for name in "ab")
    mine.unlink()
    forged = mine.with_name(f"{mine.stem.partition('-')[0]}-{other.stem.partition('-')[2]}.json")
    forged.write_bytes(other.read_bytes())
    start(tmp_path / "a")
    assert len(searches) == 3 and "the plan was made for another graph" in caplog.text


def test_what_cannot_be_told_apart_is_not_kept(tmp_path, searches, caplog):
    for _ in range(2):
        start(tmp_path, recompute=lambda line, budget: ())
    assert len(searches) == 2 and not list(tmp_path.iterdir()) and "recompute= has no text" in caplog.text


def test_a_folder_that_cannot_be_is_a_letter_before_the_search(tmp_path, searches):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotServed, match="cannot be kept in"):
        start(tmp_path / "file")
    with pytest.raises(NotServed, match="is not a folder"):
        start(3)
    assert not searches
