"""Examples of each trainer on two ranks beside the same example, with the trainer's own classes, on one device."""

from __future__ import annotations

import logging
import os
import warnings

import pytest
import torch

from autopar.letters import NotServed
from autopar.testing import on_processes
from tests import language
from tests.use.ranks import as_torchrun, check_alike, weights_of
from tests.zoo.families import extras, has_extras

RANKS = 2


# -- what a rank does: with the trainer's own classes where there is no plan


def fabric(rank, ranks, planning, folder, resume):
    from lightning.fabric import Fabric

    from autopar.integrations.fabric import AutoparStrategy
    from examples.fabric_loop import ROWS, train

    how = {"accelerator": "cpu", "devices": ranks}
    if planning is not None:
        how["strategy"] = AutoparStrategy((torch.empty(ROWS, 16),), **planning)
    made = Fabric(**how)
    made.launch()
    said, model = train(made, folder=folder, resume=resume and f"{resume}/1")
    return said, weights_of(model)


def lightning(rank, ranks, planning, folder, resume):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from autopar.integrations.lightning import AutoparStrategy
    from examples.lightning_trainer import train

    how = {"devices": ranks}
    if planning is not None:
        how["strategy"] = AutoparStrategy(**planning)
    module = train(folder, resume=f"{resume}/step=8.ckpt" if resume else None, **how)
    return module.said, weights_of(module)


def accelerate(rank, ranks, planning, folder, resume):
    from accelerate import Accelerator

    from autopar.integrations import accelerate as ours
    from examples.accelerate_loop import train

    how = {"cpu": True, "gradient_accumulation_steps": 2}
    if planning is None:
        made = Accelerator(**how)
    else:
        made = ours.Accelerator(**how, planning=planning, inputs=lambda batch: (batch[0],))
    said, model = train(made, folder=folder, resume=resume)
    return said, weights_of(model)


BODIES = {"fabric": fabric, "lightning": lightning, "accelerate": accelerate}


def on_rank(rank, name, ranks, planning, folder, resume):
    warnings.filterwarnings("ignore")
    as_torchrun(rank, ranks)
    return BODIES[name](rank, ranks, planning, folder, resume)


@pytest.mark.machines
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["fabric", "lightning", "accelerate"])
def test_two_ranks_train_as_one_device_and_go_on_under_another_plan(name, tmp_path):
    """Losses, norms, evaluations and weights, accumulated and clipped; a checkpoint in the middle is resumed."""
    one, two, three = (str(tmp_path / folder) for folder in ("one", "two", "three"))
    right = on_processes(1, on_rank, name, 1, None, one, "")[0]
    found = on_processes(RANKS, on_rank, name, RANKS, {"parallel": "tp"}, two, "", timeout_s=150)
    check_alike(found[0], right)
    assert found[0][0] == found[1][0] and len(found[0][0]) > 12  # every rank says the same
    resumed = on_processes(RANKS, on_rank, name, RANKS, {"parallel": "fsdp"}, three, two, timeout_s=150)
    if name == "lightning":  # reads rows of the epoch again that it was stopped in, on one device too
        right = on_processes(1, on_rank, name, 1, None, three + "1", one)[0]
    check_alike(resumed[0], right)
    assert os.listdir(two)


def test_what_cannot_be_done_is_a_letter():
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    from autopar.integrations import accelerate as ours
    from autopar.integrations.adapting import Moves
    from autopar.integrations.lightning import AutoparStrategy
    from examples.lightning_trainer import Classifier

    with pytest.raises(NotServed, match="mixed_precision beside a plan"):
        ours.Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(NotServed, match=r"split_batches=True.*does not read"):  # Batches would be larger, silently.
        ours.Accelerator(cpu=True, split_batches=True)
    assert ours.Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)).split_batches
    AcceleratorState._reset_state(reset_partial_state=True)
    made = ours.Accelerator(cpu=True)
    with pytest.raises(NotServed, match="no data loader is prepared with the model"):
        made.prepare(torch.nn.Linear(2, 2))
    moves, model = Moves(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moves.between(dict(model.named_parameters()), torch.nn.Linear(2, 2))
    with pytest.raises(NotServed, match="has made steps"):
        moves.move(optimizer)
    strategy = AutoparStrategy(part="nett", parallel="fsdp")
    strategy._lightning_module = Classifier()
    with pytest.raises(NotServed, match=r"(?s)part='nett'.*one of its parts: net"):
        strategy.parts  # noqa: B018
    strategy = AutoparStrategy((torch.empty(2, 2),), part=["net.0", "net.2"])
    strategy._lightning_module = Classifier()
    with pytest.raises(NotServed, match=r"AutoparStrategy\(batch\) beside 2 parts: net.0, net.2"):
        strategy._calls(None, strategy.parts)


def gan(rank, ranks, planning, folder, resume):
    """Two networks and two optimizers by hand, a step of each on every batch, and what they say."""
    import lightning.pytorch as pl
    from torch.nn import functional as F

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    nn = torch.nn

    class Pair(pl.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.maker = nn.Sequential(nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
            self.judge = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
            self.said = []

        def forward(self, noise):
            return self.maker(noise)

        def training_step(self, batch, index):
            (real,) = batch
            of_maker, of_judge = self.optimizers()
            noise = torch.randn(len(real), 8)
            with of_maker.toggle_model():
                loss = F.softplus(-self.judge(self(noise))).mean()
                self.log("maker", loss)
                of_maker.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(of_maker, 0.5, "norm")
                of_maker.step()
            with of_judge.toggle_model():
                false = F.softplus(self.judge(self(noise).detach())).mean()
                true = F.softplus(-self.judge(real)).mean()
                of_judge.zero_grad()
                self.manual_backward(false + true)
                of_judge.step()
            for scheduler in self.lr_schedulers():
                scheduler.step()
            self.said += [float(loss), float(false), float(true)]

        def configure_optimizers(self):
            found = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.maker, self.judge)]
            return found, [torch.optim.lr_scheduler.StepLR(optimizer, 3) for optimizer in found]

    pl.seed_everything(1, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(40, 16))
    module = Pair()
    how = {"devices": ranks}
    if planning is not None:
        from autopar.integrations.lightning import AutoparStrategy

        how["strategy"] = AutoparStrategy(**planning)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=3 if resume else 2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[pl.callbacks.ModelCheckpoint(folder, "end")], **how,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    trainer.fit(module, loader, ckpt_path=f"{resume}/end.ckpt" if resume else None)
    return module.said, weights_of(module)


BODIES["gan"] = gan


@pytest.mark.nightly
@pytest.mark.machines
@pytest.mark.timeout(400)
def test_two_networks_are_optimized_by_hand_as_on_one_device(tmp_path):
    """Each is a part of its own; noise and the order of rows are drawn as on one device, without another seed."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    right = on_processes(1, on_rank, "gan", 1, None, one, "")[0]
    found = on_processes(RANKS, on_rank, "gan", RANKS, {"parallel": "fsdp"}, two, "", timeout_s=150)
    check_alike(found[0], right)
    assert found[0][0] == found[1][0] and len(found[0][0]) == 30
    right = on_processes(1, on_rank, "gan", 1, None, one + "1", one)[0]
    found = on_processes(RANKS, on_rank, "gan", RANKS, {"parallel": "tp"}, two + "1", two, timeout_s=150)
    check_alike(found[0], right)
    assert len(found[0][0]) == 15


def dropping():
    nn = torch.nn
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(64), nn.Linear(64, 10))


def on_rank_with_dropout(rank, name, folder, resume):
    from examples import accelerate_loop, fabric_loop

    accelerate_loop.model = fabric_loop.model = dropping
    return *on_rank(rank, name, RANKS, {"parallel": "tp"}, folder, resume), float(torch.rand(()))


@pytest.mark.machines
@pytest.mark.timeout(300)
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_random_numbers_go_on_where_they_were(name, tmp_path):
    """A run with dropout that is resumed says, bit for bit, what the run says that was not stopped."""
    two, three = str(tmp_path / "two"), str(tmp_path / "three")
    whole, other = on_processes(RANKS, on_rank_with_dropout, name, two, "", timeout_s=150)
    assert whole[2] == other[2]  # what a script draws is alike on all ranks
    resumed = on_processes(RANKS, on_rank_with_dropout, name, three, two, timeout_s=150)[0]
    assert resumed[0] == whole[0][-len(resumed[0]) :] and len(resumed[0]) >= 8
    assert all(torch.equal(weight, whole[1][key]) for key, weight in resumed[1].items())


def saves(rank, folder):
    """As Accelerate's documentation saves, every rank makes the same calls."""
    from torch.utils.data import DataLoader

    from autopar.integrations import accelerate as ours

    as_torchrun(rank, RANKS)
    made = ours.Accelerator(cpu=True, planning={"parallel": "fsdp"})
    loader = DataLoader([{k: v[0] for k, v in language.drawn(1, 8, 40).items()} for _ in range(8)], batch_size=2)
    model = language.gpt2(1, 16, 40, 16, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule, loader = made.prepare(model, optimizer, schedule, loader)
    made.backward(model(**next(iter(loader))).loss)
    optimizer.step()
    schedule.step()
    assert len(loader) == 4 // RANKS and schedule.get_last_lr() == [0.1 * 0.5**RANKS]  # as docs/trainers.md says
    made.save_model(model, f"{folder}/model")
    made.unwrap_model(model).save_pretrained(
        f"{folder}/pretrained",
        is_main_process=made.is_main_process,
        save_function=made.save,
        state_dict=made.get_state_dict(model),
    )
    made.wait_for_everyone()
    return weights_of(model)


@pytest.mark.machines
@pytest.mark.timeout(400)
def test_the_saving_that_accelerate_documents_ends_on_every_rank(tmp_path):
    import safetensors.torch
    import transformers

    weights = on_processes(RANKS, saves, str(tmp_path), timeout_s=250)[0]
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "pretrained").state_dict()
    torch.testing.assert_close({n: read[n] for n in weights}, weights, rtol=0, atol=0)
    (file,) = (tmp_path / "model").iterdir()
    held = safetensors.torch.load_file(file)
    assert held and all(torch.equal(held[name], weights[name]) for name in held)


# -- PEFT needs no adapter


def lora(rank, planning, folder):
    import autopar
    from examples.peft_lora import batch, model, train

    net = model()
    if planning is not None:
        net = autopar.autoparallelize(net, batch(0), **planning)
    said = train(net)
    net.save_pretrained(folder)
    plain = autopar.gather(net, 0) if planning is not None else net
    if plain is None:
        return None
    weights = weights_of(plain)
    merged = plain.merge_and_unload()
    with torch.no_grad():
        logits = merged.eval()(input_ids=batch(9)["input_ids"]).logits
    return said, weights | {"logits of the merged model": logits}


@pytest.mark.machines
def test_adapters_of_peft_are_trained_saved_and_merged_as_on_one_device(tmp_path):
    from safetensors.torch import load_file

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    right = on_processes(1, lora, None, one)[0]
    found = on_processes(RANKS, lora, {"parallel": "fsdp"}, two, timeout_s=120)
    check_alike(found[0], right)
    assert found[1] is None
    mine, theirs = (load_file(f"{folder}/adapter_model.safetensors") for folder in (two, one))
    assert mine.keys() == theirs.keys() and len(mine) == 8  # adapters alone
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=2e-5, msg=name)


def timm_loop(rank, planning):
    import autopar

    extras()
    from examples.timm_loop import ROWS, SIZE, model, train

    torch.set_default_dtype(torch.float64)  # in float32 batch norm makes much of another order of sums
    net = model()
    if planning is not None:
        net = autopar.autoparallelize(net, (torch.empty(ROWS, 3, SIZE, SIZE),), outputs="full", **planning)
    said, average = train(net)
    return said, weights_of(net) | {f"average {n}": w for n, w in weights_of(average).items()}


@pytest.mark.nightly
@pytest.mark.machines
@pytest.mark.skipif(not has_extras(), reason="timm is not installed beside the tests: make test does")
def test_the_loop_of_timm_is_that_of_one_device():
    right = on_processes(1, timm_loop, None)[0]
    found = on_processes(RANKS, timm_loop, {"parallel": "fsdp"}, timeout_s=150)
    check_alike(found[0], right)
