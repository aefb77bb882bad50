"""`autopar.save` and `autopar.load`: a run goes on under another plan, on other ranks and without autopar's, as if it
had never stopped; a folder is complete or does not count; torch.save writes what any process reads, or nothing.
"""

from __future__ import annotations

import copy
import io
import os
import shutil
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import autopar
from autopar.letters import BadWeights, NotServed
from autopar.module.checkpoint_folder import BesideWriter, checkpoints, make_room, writer_over
from autopar.testing import on_processes, on_threads

STEPS = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8, bias=False)
        self.unused = nn.Parameter(torch.ones(3))  # Adam has no state of it

    def forward(self, x):
        return (x + self.head(self.norm(self.down(torch.relu(self.up(x)))))).square().mean()


def batch(step):
    return {"x": torch.randn(16, 8, generator=torch.Generator().manual_seed(step))}


def begun(how):
    """A model with optimizer and schedule; `how` is None for plain ones, else arguments of autoparallelize."""
    torch.manual_seed(0)
    model = Net()
    if how is not None:
        model = autopar.autoparallelize(model, batch(0), **how)
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n[:2] == "up") == is_up]} for is_up in (True, False)
    ]
    groups[0]["weight_decay"] = 0.3
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)


def trained(run, first, last):
    model, optimizer, scheduler = run
    found = []
    for step in range(first, last):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found.append(loss.item())
    return found


def part(rank, folder, how, last, wait):
    """A job that goes on where the folder is, saves after each step, and stops."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = begun(how)
        start = autopar.load(folder, *run)
        found = []
        for step in range(start.step, last):
            found += trained(run, step, step + 1)
            seen = {"rows": 16 * step, 7: torch.ones(2)}
            autopar.save(folder, *run, step=step + 1, keep=2, wait=wait or step + 1 == last, seen=seen)
    return start, found


def test_a_run_goes_on_under_other_plans_and_on_one_device(tmp_path):
    """fsdp on 4 ranks, tp on 2, plain on one, fsdp on 2: each goes on with the losses of one that never stopped.

    Some of them write in the background.
    """
    expected = trained(begun(None), 0, STEPS)
    folder = str(tmp_path)
    found = []
    for ranks, how, last in ((4, {"parallel": "fsdp"}, 3), (2, {"parallel": "tp"}, 4)):
        start, losses = on_processes(ranks, part, folder, how, last, ranks == 2)[0]
        assert start.step == len(found)
        found += losses
    run = begun(None)
    start = autopar.load(folder, *run)
    assert not dist.is_initialized() and start.step == 4 and start.path == tmp_path / "step-4"
    assert start.more["seen"]["rows"] == 48 and torch.equal(start.more["seen"][7], torch.ones(2))
    found += trained(run, 4, 5)
    autopar.save(folder, *run, step=5, keep=2, wait=False)
    again = begun(None)
    assert autopar.load(folder, *again).step == 5  # waits for what is written, too
    assert list(checkpoints(tmp_path)) == [4, 5]
    found += on_processes(2, part, folder, {"parallel": "fsdp"}, 6, True)[1][1]
    assert found == pytest.approx(expected, rel=1e-5)
    left = dict(again[0].named_parameters())
    trained(again, 5, 6)
    one = begun(None)
    autopar.load(folder, *one)
    assert all(torch.allclose(p, left[n], rtol=1e-5, atol=1e-6) for n, p in one[0].named_parameters())


def test_torch_reads_the_folder_and_random_numbers_go_on(tmp_path):
    """By torch's names; dropout draws what it would have drawn; no step is made to save or to load an optimizer."""

    def body(rank):
        model = autopar.autoparallelize(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)),
            (torch.ones(4, 4),),
            mesh=2,
            parallel="fsdp",
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 4))
        autopar.save(tmp_path, model, optimizer, step=0, ema=copy.deepcopy(model))
        assert not optimizer.state
        expected = model(torch.ones(4, 4)).detach()
        plain, average = autopar.gather(model), copy.deepcopy(model)
        with torch.no_grad():
            for p in (*model.parameters(), *average.parameters()):
                p.zero_()
        torch.manual_seed(1)
        assert autopar.load(tmp_path, model, optimizer, ema=average).more == {}
        for mine in (model, average):
            found = mine(torch.ones(4, 4)).detach()
            assert torch.equal(
                getattr(found, "full_tensor", lambda: found)(), getattr(expected, "full_tensor", lambda: expected)()
            )
        return plain.state_dict()

    expected, _ = on_threads(2, body)
    read = {"model": {name: torch.zeros_like(p) for name, p in expected.items()}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(read, checkpoint_id=tmp_path / "step-0")
    assert all(torch.equal(p, expected[name]) for name, p in read["model"].items())


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.NAdam(ps, lr=0.1),
        lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=2),
        lambda ps: torch.optim.Adafactor(ps, lr=0.1),
        lambda ps: autopar.optim.AdamW(ps, lr=0.1),
    ],
    ids=["SGD", "momentum", "NAdam", "LBFGS", "Adafactor", "autopar"],
)
def test_states_of_other_optimizers(make, tmp_path):
    """Saved by a parallel model and by a plain one, loaded by either: the next step is the one that was not stopped."""

    def stepped(model, optimizer, x, times):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(times):
            optimizer.step(closure)

    x = torch.linspace(-1, 1, 32).view(8, 4).double()
    first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def model_of(is_parallel):
        model = copy.deepcopy(first)
        return autopar.autoparallelize(model, (x,), mesh=1, outputs="full") if is_parallel else model

    def whole(model):
        return [getattr(p.detach(), "full_tensor", p.detach)() for p in model.parameters()]

    for saves in (True, False):
        one = model_of(saves)
        optimizer = make(one.parameters())
        stepped(one, optimizer, x, 2)
        folder = tmp_path / str(saves)
        autopar.save(folder, one, optimizer, step=2)
        stepped(one, optimizer, x, 2)
        for loads in (True, False):
            other = model_of(loads)
            after = make(other.parameters())
            assert autopar.load(folder, other, after).step == 2
            stepped(other, after, x, 2)
            for p, q in zip(whole(one), whole(other), strict=True):
                torch.testing.assert_close(
                    p, q, rtol=1e-7, atol=1e-9
                )  # torch reads NAdam's products in another precision


def test_a_folder_is_complete_or_does_not_count(tmp_path, monkeypatch):
    """A job is killed while ranks write, while rank 0 puts the folder in its place, while it deletes an old one."""
    model = nn.Linear(2, 2)
    for step in (1, 2):
        autopar.save(tmp_path, model, step=step)
    make_room(tmp_path / "step-3")
    (tmp_path / ".step-3.new" / "__0_0.distcp").write_bytes(b"half")
    assert autopar.load(tmp_path, model).step == 2

    def renaming(path, to):
        if path.name.endswith(".new"):
            raise KeyboardInterrupt
        os.rename(path, to)

    delete = shutil.rmtree

    def deleting(path):
        if path.name.startswith("step"):
            (path / "__0_0.distcp").unlink()
            raise KeyboardInterrupt
        delete(path)

    for of, killed in (("Path.rename", renaming), ("shutil.rmtree", deleting)):  # the same step, once more
        with torch.no_grad():
            model.weight.add_(1)
        with monkeypatch.context() as patched, pytest.raises(BadWeights, match="KeyboardInterrupt"):
            patched.setattr(f"autopar.module.checkpoint_folder.{of}", killed)
            autopar.save(tmp_path, model, step=2)
        read = nn.Linear(2, 2)
        assert autopar.load(tmp_path, read).step == 2 and torch.equal(read.weight, model.weight)
    lone = BesideWriter(tmp_path / "step-3", make_room(tmp_path / "step-3"), b"", None)
    lone.ranks = 2  # whose process group is destroyed while it is written in the background
    with pytest.raises(NotServed, match="step-3 was still being written when the process group was destroyed"):
        lone.finish(None, [[]])
    autopar.save(tmp_path, model, step=4, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-4"]
    autopar.save(tmp_path, model, step=3, keep=1)  # going on from before: what was just written stays
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"]
    assert autopar.load(tmp_path / "step-3", model).step == 3


@pytest.mark.parametrize("is_parallel", [False, True])
def test_what_is_written_in_the_background_is_what_was_there(is_parallel, tmp_path, monkeypatch):
    model = begun({"mesh": 1} if is_parallel else None)[0]
    goes_on, write = threading.Event(), dcp.FileSystemWriter.write_data
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", lambda *args: goes_on.wait(60) and write(*args))
    expected = copy.deepcopy(model.state_dict())
    autopar.save(tmp_path, model, step=1, wait=False)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert not checkpoints(tmp_path)
    goes_on.set()
    assert autopar.load(tmp_path, model).step == 1
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_a_folder_is_written_over_without_a_warning(tmp_path):
    """As adapters of trainers write it."""

    def body(rank, number):
        tensor = torch.full((2,), number)
        dcp.save({"x": tensor}, storage_writer=writer_over(tmp_path))
        dcp.load(read := {"x": torch.zeros(2)}, checkpoint_id=tmp_path)
        return read["x"].tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert [on_threads(2, body, number) for number in (1.0, 2.0)] == [[[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2]


def fails_on_rank_1(rank, folder):
    model = autopar.autoparallelize(nn.Linear(4, 4), (torch.ones(2, 4),), parallel="fsdp")
    autopar.save(folder, model, step=1)
    if rank == 1:
        dcp.FileSystemWriter.write_data = lambda *args: os.fspath(None)
    autopar.save(folder, model, step=2, wait=False)
    with pytest.raises(BadWeights, match=r"step-2 could not be written\n *with *rank 1: TypeError"):
        autopar.load(folder, model)
    return autopar.load(folder, model).step


def test_an_error_of_one_rank_in_the_background_is_raised_on_all(tmp_path):
    assert on_processes(2, fails_on_rank_1, str(tmp_path)) == [1, 1]


def saves_alone(rank, folder):
    model = autopar.autoparallelize(nn.Linear(4, 4), (torch.ones(2, 4),), parallel="fsdp")
    with pytest.raises(autopar.AutoparError, match=r"rank 0 calls autopar\.save"):
        if rank == 0:
            autopar.save(folder, model, step=1)
        for _ in range(2):
            model(torch.ones(3 if rank else 2, 4))


def test_a_rank_that_saves_alone_is_named_on_all(tmp_path):
    on_processes(2, saves_alone, str(tmp_path), timeout_s=60)


def other_groups(model):
    return torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1)


WRONG = {
    "another model": (lambda f, m: autopar.load(f, nn.Linear(2, 3)), "weight has another shape than the model's"),
    "more parameters": (lambda f, m: autopar.load(f, nn.Sequential(m)), "lacks 0.bias, 0.weight"),
    "fewer": (lambda f, m: autopar.load(f, nn.Linear(2, 2, bias=False)), "has beside the model's bias"),
    "no optimizer": (lambda f, m: autopar.load(f, m, torch.optim.SGD(m.parameters())), "has no optimizer"),
    "no scaler": (lambda f, m: autopar.load(f, m, scaler=torch.amp.GradScaler("cpu")), "has no scaler"),
    "a value for an object": (lambda f, m: autopar.load(f, m, epoch=0), r"autopar.load\(...\).more\['epoch'\]"),
    "no such step": (lambda f, m: autopar.load(f / "step-9", m), "step-9 is not a complete checkpoint\n.*step-1"),
    "a step of no run": (lambda f, m: autopar.load(f / "b" / "step-3", m), "not a complete checkpoint\n.*none"),
    "no folder": (lambda f, m: autopar.save("", m, step=1), "was given no folder"),
    "in other groups": (
        lambda f, m: autopar.load(f, m, other_groups(m)) if autopar.save(
            f, m, torch.optim.SGD([{"params": [m.bias]}, {"params": [m.weight]}], lr=0.1), step=2
        ) else autopar.load(f, m, torch.optim.SGD(m.parameters())),
        "parameters of one group of the optimizer in 2 groups",
    ),
    "an object store": (lambda f, m: autopar.save("s3://bucket/run", m, step=1), "not a folder of a file system"),
    "half a step": (lambda f, m: autopar.save(f, m, step=0.5), "not a number of steps"),
    "none kept": (lambda f, m: autopar.save(f, m, step=1, keep=0), "not a number of checkpoints"),
    "a function": (lambda f, m: autopar.save(f, m, step=1, decay=lambda x: x), "cannot write what it was given"),
    "an optimizer of others": (
        lambda f, m: autopar.save(f, m, torch.optim.SGD(nn.Linear(2, 2).parameters()), step=1),
        "a parameter that is not the model's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_a_letter_and_nothing_is_read(name, tmp_path):
    use, match = WRONG[name]
    model = nn.Linear(2, 2)
    autopar.save(tmp_path, nn.Linear(2, 2), step=1, epoch=3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((BadWeights, NotServed), match=match):
        use(tmp_path, model)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert 1 in checkpoints(tmp_path)


@pytest.mark.parametrize("what", ["model", "optimizer", "both", "wrapped"])
def test_torch_save_of_parts_is_refused_before_a_file_is_opened(what, tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save({"good": 1}, path)

    def body(rank):
        model = autopar.autoparallelize(Net(), batch(0), mesh=2, parallel="fsdp")
        optimizer = torch.optim.AdamW(model.parameters())
        model(**batch(0)).backward()
        optimizer.step()
        value = {
            "model": {"model": model.state_dict(), "iter_num": 3},
            "optimizer": {"optimizer": optimizer.state_dict()},
            "both": [model.state_dict(), optimizer.state_dict()],
            "wrapped": {"ema": torch.optim.swa_utils.AveragedModel(model)},
        }[what]
        if rank == 0:  # nanoGPT's habit
            with pytest.raises(NotServed, match=r"autopar\.save\(folder") as met:
                torch.save(value, path)
            if what == "optimizer":
                assert "exp_avg" in met.value.seen and "get_optimizer_state_dict" in met.value.advice
        return torch.load(path)

    assert on_threads(2, body)[0] == {"good": 1}


def test_torch_save_writes_whole_tensors_as_plain_ones(tmp_path):
    """Under a plan that copies parameters a script for DDP saves as before: plain processes and any plan load it."""

    def body(rank, parallel):
        model = autopar.autoparallelize(Net(), batch(0), mesh=2, parallel=parallel)
        optimizer = torch.optim.AdamW(model.parameters())
        if parallel == "fsdp":
            read = torch.load(tmp_path / "ckpt.pt")
            model.load_state_dict(read["model"])
            optimizer.load_state_dict(read["optimizer"])
        else:
            trained((model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)), 0, 1)
            copied = copy.copy(model.up.weight)
            assert type(copied) is type(model.up.weight) and hasattr(copied, "placements")
            if rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
                torch.save(model.up.weight, parameter := io.BytesIO())
                assert type(torch.load(io.BytesIO(parameter.getvalue()))) is nn.Parameter
            dist.barrier()
        return trained((model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)), 1, 3)

    torch.manual_seed(3)
    expected = on_threads(2, body, "dp")[0]
    read = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert all(type(t) is torch.Tensor for t in read["model"].values())
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    assert trained((model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)), 1, 3) == pytest.approx(expected)
    assert on_threads(2, body, "fsdp")[1] == pytest.approx(expected)
