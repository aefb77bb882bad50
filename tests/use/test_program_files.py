"""Programs in files: a start that takes one traces, searches and lowers nothing; what does not fit never runs."""

from __future__ import annotations

import hashlib
import json
import logging
import runpy
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
import autopar.api
from autopar import DeviceMesh
from autopar.cli import main
from autopar.codegen import joint
from autopar.letters import BadPlan, BadProgram
from autopar.module.likeness import likeness_of, said_of
from autopar.module.sources import sources_of
from autopar.tracer import ColoTracer
from tests.models import eager_links
from tests.shares import by_day


class Net(nn.Module):
    def __init__(self, width=32, scale=1.0):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.scale, self.unread = scale, 0

    def forward(self, x):
        return (x + self.scale * self.down(torch.relu(self.up(x)))).square().mean()


@pytest.fixture
def work(monkeypatch):
    """Names of what was done, in a list that grows: traces, searches, lowerings."""
    done = []
    for home, name in ((ColoTracer, "trace"), (autopar.api, "plan_of"), (autopar.api, "plan_again"), (joint, "_lower")):
        does = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, does=does, name=name, **k: done.append(name) or does(*a, **k))
    return done


def batch(rows=4):
    return {"x": torch.ones(rows, 8)}


def made(*given, **how):
    torch.manual_seed(0)
    net = Net(*given)
    net.unread = torch.randint(1000, ()).item()
    return autopar.autoparallelize(net, batch(), **how)


def steps(model, count=3):
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(count):
        loss = model(**batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start(folder, **how):
    joint.LOWERED.clear()
    return steps(made(cache=folder, **how))


def kept(folder):
    """What the folder has, by kind."""
    return {path.suffix: path for path in folder.iterdir() if path.suffix != ".autopar"}


def compiled(path, **how):
    return autopar.plan(Net(), batch(), mesh=1, cluster=eager_links(), **how).compile(path)


def rewritten(path, change):
    """Write a file again after a change of its content, with the digest of what it holds then."""
    mark, _, content = path.read_bytes().split(b"\n", 2)
    data = json.loads(zlib.decompress(content))
    change(data)
    content = zlib.compress(json.dumps(data).encode())
    path.write_bytes(b"\n".join((mark, hashlib.sha256(content).hexdigest().encode(), content)))


def test_a_second_start_traces_searches_and_lowers_nothing(tmp_path, work):
    first = start(tmp_path)
    assert set(work) == {"trace", "plan_of", "_lower"} and kept(tmp_path).keys() == {".graph", ".json", ".halves"}
    work.clear()
    assert start(tmp_path) == first and not work


def test_a_program_is_compiled_and_taken(tmp_path, work):
    path = compiled(tmp_path / "net.autopar")
    joint.LOWERED.clear()
    work.clear()
    model = made(program=path)
    assert steps(model) == steps(made(mesh=1, cluster=eager_links()))
    assert model.plan.mesh.size == 1 and work == ["trace", "plan_of"]  # of the second, in a process that has lowered it


STALE = {
    "torch": lambda patch: patch.setattr(torch, "__version__", "3.0"),
    "passes": lambda patch: patch.setattr("autopar.program_file._own_files", lambda: "others"),
    "rules": lambda patch: patch.setattr("autopar.program_file.rules_of_users", lambda: (("mine", "b -> b"),)),
}


CHANGES = ["torch", "passes", "rules", "width", "scale", "rows", "eval", "loss"]


@pytest.mark.parametrize("what", by_day(CHANGES, "torch", "scale", "loss"))
def test_what_has_changed_since_is_a_letter_and_is_traced_anew(what, tmp_path, work, monkeypatch, caplog):
    path = compiled(tmp_path / "net.autopar")
    start(tmp_path)
    graph = kept(tmp_path)[".graph"]
    work.clear()
    if what in STALE:
        STALE[what](monkeypatch)
    model = Net(*{"width": (16,), "scale": (32, 2.0)}.get(what, ())).train(what != "eval")
    given = batch(8 if what == "rows" else 4)
    how = {"loss": lambda outputs, inputs: outputs} if what == "loss" else {}
    with pytest.raises(BadProgram, match="the program was made of"):
        autopar.autoparallelize(model, given, program=path, **how)
    assert not work
    autopar.autoparallelize(model, given, cache=tmp_path, **how)
    assert "trace" in work
    if what == "scale":  # It is read, and so decides; nothing else can tell.
        (said,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
        assert str(graph) in said and "attributes" in said


def test_an_edited_file_never_runs(tmp_path, work):
    path = compiled(tmp_path / "net.autopar")
    whole = path.read_bytes()
    work.clear()
    for place in range(0, len(whole), len(whole) // 45):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BadProgram):
            made(program=path)
    path.write_bytes(b"")
    with pytest.raises(BadProgram, match="does not read as a program"):
        made(program=path)
    assert not work


def test_a_file_whose_digest_was_made_anew_is_read_with_care(tmp_path):
    """Names that are not of the table of functions, types and counts that do not fit."""
    path = compiled(tmp_path / "net.autopar", parallel="dp")

    def halves(data):
        (one,) = data["halves"].values()
        return one

    forward = ["placeholder", "x); import os #", 0, [], {}, None, 0]
    edits = [
        lambda data: halves(data)["graphs"]["forward"].insert(0, forward),
        lambda data: halves(data)["targets"].__setitem__(-1, "os.system"),
        lambda data: halves(data)["targets"].__setitem__(-1, "aten.no_such_op.default"),
        lambda data: halves(data)["forms"].__setitem__(0, [[8], [1], "os", "cpu"]),
        lambda data: halves(data)["graphs"]["forward"].pop(3),
        lambda data: halves(data)["graphs"].pop("backward"),
        lambda data: halves(data)["graphs"]["forward"][0].__setitem__(0, "get_attr"),
        lambda data: halves(data).__setitem__("outputs", -1),
        lambda data: data["plan"].pop("decisions"),
        lambda data: data["capture"].__setitem__("graph", data["capture"]["graph"][:-5]),
        lambda data: data.pop("halves"),
    ]
    whole = path.read_bytes()
    for edit in edits:
        path.write_bytes(whole)
        rewritten(path, edit)
        joint.LOWERED.clear()
        with pytest.raises(BadProgram):
            made(program=path)
    path.write_bytes(whole)
    rewritten(path, lambda data: None)
    assert steps(made(program=path))


def test_a_plan_of_a_file_is_not_compiled(tmp_path):
    plan = autopar.plan(Net(), batch(), mesh=1)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(BadPlan, match=r"only a plan that autopar\.plan has made"):
        autopar.Plan.load(tmp_path / "plan.json").compile(tmp_path / "net.autopar")
    with pytest.raises(BadPlan, match="program= is given, and so is mesh"):
        made(program=tmp_path / "net.autopar", mesh=DeviceMesh((1,)))


FAST = False


def other_forward(self, x):
    return self.up(x).square().mean() * (2 if FAST else 1)


def third_forward(self, x):
    return self.up(x).mean()


class Configured(Net):
    """Reads a setting and a table of its own."""

    def __init__(self, table=(1, 2), kinds=("a", "b"), last=0):
        super().__init__()
        self.config = SimpleNamespace(factor=1.0)
        self.options = {"first": [1, 2], "second": (3, 4), "third": [5, last]}
        self.table = np.asarray(table)
        self.kinds = set(kinds)

    def forward(self, x):
        return super().forward(x) * self.config.factor * float(self.table.sum()) * len(self.kinds)


def test_what_a_capture_depends_on_is_told_apart(monkeypatch):
    """By methods that were put there, globals that they read, arrays, sets and settings."""

    def told(model=None):
        model = model or Net()
        reads = {(0, "", "table"), (0, "", "kinds"), (0, "", "options"), (0, "config", "factor")}
        parts = likeness_of(model, batch()), said_of(model, reads), sources_of(model)
        return repr(parts)

    first = told()
    found = [first]
    for forward in (other_forward, third_forward):
        monkeypatch.setattr(Net, "forward", forward)
        found.append(told())
    monkeypatch.setattr(Net, "forward", other_forward)
    monkeypatch.setitem(globals(), "FAST", True)
    found.append(told())
    monkeypatch.undo()
    found += [
        told(Configured()),
        told(Configured((1, 3))),
        told(Configured(kinds=("a", "c"))),
        told(Configured().eval()),
        told(Configured(last=1)),
    ]
    other = Configured()
    other.config.factor = 2.0
    found.append(told(other))
    assert len(set(found)) == len(found) and told() == first
    assert told(Configured(kinds=("b", "a"))) == told(Configured())


TRAIN = """
import torch, autopar

SCALE = 3

def doubled(x):
    return SCALE * x

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return doubled(self.linear(x)).square().mean()

def build():
    return Net(), {"x": torch.ones(4, 8)}

if __name__ == "__main__":
    model, batch = build()
    loss = autopar.autoparallelize(model, batch, program="net.autopar")(**batch)
"""


def test_the_command_line_compiles_for_a_script(tmp_path, monkeypatch, capsys):
    """Whose classes are of another module's name when it runs itself; a script may change around its model."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train_of_a_script.py"
    script.write_text(TRAIN)
    assert main(["compile", f"{script}:build", "--mesh", "1", "--quiet", "-o", "net.autopar"]) == 0
    assert "for 1 ranks" in capsys.readouterr().out
    script.write_text(TRAIN + "    print(loss.item())  # a comment\n")
    runpy.run_path(str(script), run_name="__main__")
    script.write_text(TRAIN.replace("SCALE = 3", "SCALE = 4"))
    with pytest.raises(BadProgram, match=r"source train_of_a_script\.SCALE differs"):
        runpy.run_path(str(script), run_name="__main__")


class Deep(nn.Module):
    """Blocks whose inner width four devices do not share evenly."""

    def __init__(self):
        super().__init__()
        inner = (nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Dropout(0.1), nn.Linear(9, 8)) for _ in range(4))
        self.blocks = nn.ModuleList(inner)

    def forward(self, x):
        y = x
        for block in self.blocks:
            y = y + block(y)
        return (y - 1).square().mean()


X = torch.arange(64, dtype=torch.float64).view(8, 8) / 64
WAYS = {
    "uneven parts": (dict(mesh=(2, 2), constraints={"*.0.weight": "S(0)@1"}), {}),
    "own rows": (dict(mesh=4, parallel="dp"), {"inputs": "local"}),
    "micro-batches": (dict(mesh=4, parallel="zero2", microbatches=2), {}),
    "stages": (dict(mesh=4, pipeline=2, microbatches=2), {}),
    "torch.compile": (dict(mesh=4, parallel="zero3"), {"compile": "aot_eager"}),
}


def trained(rank, how):
    """Losses of three steps, and how many halves were lowered."""
    joint.LOWERED.clear()
    before = joint.trace
    count = []
    joint.trace = lambda *given: count.append(1) or before(*given)
    torch.manual_seed(0)
    model = autopar.autoparallelize(Deep().double(), {"x": X}, **how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = model(x=X[2 * rank : 2 * rank + 2] if how.get("inputs") == "local" else X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    joint.trace = before
    return losses, len(count)


def taken_and_made(rank, how, own, path):
    if rank == 0:
        autopar.plan(Deep().double(), {"x": X}, **how).compile(path, inputs=own.get("inputs", "global"))
    dist.barrier()
    return trained(rank, {"program": path, **own}), trained(rank, {**how, **own})


@pytest.mark.machines
@pytest.mark.parametrize("way", ["uneven parts", *(pytest.param(w, marks=pytest.mark.nightly) for w in [*WAYS][1:])])
def test_every_rank_takes_its_program_of_one_file(way, tmp_path, processes):
    """Bitwise what ranks train that lower it; of one file, whatever parts or stages they have."""
    how, own = WAYS[way]
    for (losses, lowered), (expected, _) in processes(4, taken_and_made, how, own, tmp_path / "deep.autopar"):
        assert losses == expected and lowered == 0
