"""Trainers with a model in stages: four ranks, of which two pairs have different stages, beside one device."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.testing import on_processes
from tests.use.ranks import as_torchrun, check_alike, weights_of

RANKS = 4
ROWS = 16  # of a batch, on all ranks together
STAGES = {"mesh": autopar.DeviceMesh((2, 2), ("pp", "dp")), "parallel": "zero1", "microbatches": 2}
OTHER = {"mesh": autopar.DeviceMesh((4, 1), ("pp", "dp")), "microbatches": 4}


class Net(nn.Module):
    """Returns its loss, as a model in stages has to; first and last block share a weight."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.randn(16, 16) / 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x, y=None):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x + x @ self.shared if layer in (self.layers[0], self.layers[-1]) else x
        logits = self.head(x)
        return {"logits": logits} if y is None else {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def data():
    return TensorDataset(torch.randn(88, 16), torch.randint(0, 10, (88,)))


def named(batch):
    return {"x": batch[0], "y": batch[1]}


def accelerate(ranks, planning, folder, resume):
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from autopar.integrations import accelerate as ours

    how = {"cpu": True, "gradient_accumulation_steps": 2}
    made = Accelerator(**how) if planning is None else ours.Accelerator(**how, planning=planning, inputs=named)
    set_seed(1)
    rows, net = data(), Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 * ranks, 0.5)
    loaders = (DataLoader(rows, ROWS // ranks, shuffle=is_first) for is_first in (True, False))
    net, optimizer, schedule, loader, valid = made.prepare(net, optimizer, schedule, *loaders)
    if resume:
        made.load_state(resume)
    said = []
    for epoch in range(1 if resume else 0, 2):
        net.train()
        for x, y in loader:
            with made.accumulate(net):
                loss = net(x, y)["loss"]
                made.backward(loss)
                said.append(float(made.gather(loss.detach()).mean()))
                if made.sync_gradients:
                    said.append(float(made.clip_grad_norm_(net.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            outs = [made.gather_for_metrics((net(x)["logits"], y)) for x, y in valid]
        said.append(sum(float((out.argmax(-1) == y).sum()) for out, y in outs) / sum(len(y) for _, y in outs))
        if folder and epoch == 0:
            made.save_state(folder)
    return said, weights_of(made.unwrap_model(net))


def fabric(ranks, planning, folder, resume):
    from lightning.fabric import Fabric

    from autopar.integrations.fabric import AutoparStrategy

    how = {"accelerator": "cpu", "devices": ranks}
    if planning is not None:
        batch = torch.empty(ROWS, 16), torch.empty(ROWS, dtype=torch.long)
        how["strategy"] = AutoparStrategy(batch, **planning)
    made = Fabric(**how)
    made.launch()
    made.seed_everything(1, verbose=False)
    rows, plain = data(), Net()
    net, optimizer = made.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    loader = made.setup_dataloaders(DataLoader(rows, ROWS))
    state = {"model": net, "optimizer": optimizer, "epoch": 0}
    if resume:
        made.load(f"{resume}/1", state)
    said = []
    for epoch in range(int(state["epoch"]), 2):
        net.train()
        for i, (x, y) in enumerate(loader):
            waits = i % 2 == 0
            with made.no_backward_sync(net, enabled=waits):
                loss = net(x, y)["loss"] / 2
                made.backward(loss)
            said.append(float(made.all_reduce(loss.detach())))
            if not waits:
                said.append(float(made.clip_gradients(net, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        with torch.inference_mode():
            right = sum((net(x)["logits"].argmax(-1) == y).sum() for x, y in loader)
        said.append(float(made.all_reduce(right, reduce_op="sum")) / len(rows))
        state["epoch"] = epoch + 1
        if folder:
            made.save(f"{folder}/{epoch + 1}", state)
    return said, weights_of(net.module)


def lightning(ranks, planning, folder, resume):
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.said = []

        def training_step(self, batch, index):
            loss = self.net(*batch)["loss"]
            self.said.append(float(loss.detach()))
            return loss

        def validation_step(self, batch, index):
            self.log("valid", self.net(*batch)["loss"], sync_dist=True)

        def on_validation_epoch_end(self):
            self.said.append(float(self.trainer.callback_metrics["valid"]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    how = {"devices": ranks}
    if planning is not None:
        from autopar.integrations.lightning import AutoparStrategy

        how["strategy"] = AutoparStrategy(**planning)
    pl.seed_everything(1, verbose=False)
    rows, module = data(), Module()
    saves = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[saves],
        logger=False, enable_progress_bar=False, enable_model_summary=False, **how,
    )  # fmt: skip
    loaders = (DataLoader(rows, 8, shuffle=is_first) for is_first in (True, False))
    trainer.fit(module, *loaders, ckpt_path=f"{resume}/step=4.ckpt" if resume else None)
    return module.said, weights_of(module)


LONG = functools.partial(pytest.param, marks=pytest.mark.nightly)
BODIES = {"accelerate": accelerate, "fabric": fabric, "lightning": lightning}


def on_rank(rank, name, ranks, planning, folder, resume):
    as_torchrun(rank, ranks)
    return BODIES[name](ranks, planning, folder, resume)


@pytest.mark.machines
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [LONG("accelerate"), LONG("fabric"), LONG("lightning")])
def test_four_ranks_in_stages_train_as_one_device_and_go_on_in_others(name, tmp_path):
    one, two, three = (str(tmp_path / folder) for folder in ("one", "two", "three"))
    right = on_processes(1, on_rank, name, 1, None, one, "")[0]
    found = on_processes(RANKS, on_rank, name, RANKS, STAGES, two, "", timeout_s=150)
    check_alike(found[0], right)
    assert all(said == found[0][0] for said, _ in found) and len(found[0][0]) > 12
    if name == "lightning":  # reads rows of the epoch again that it was stopped in, on one device too
        right = on_processes(1, on_rank, name, 1, None, three + "1", one)[0]
    check_alike(on_processes(RANKS, on_rank, name, RANKS, OTHER, three, two, timeout_s=150)[0], right)


def test_a_loss_that_the_loop_computes_is_a_letter_that_says_where_it_belongs():
    with pytest.raises(autopar.NotServed, match=r"(?s)from one loss, and there is none.*loss=, or labels among"):
        autopar.plan(Net(), {"x": torch.empty(ROWS, 16)}, **STAGES)
