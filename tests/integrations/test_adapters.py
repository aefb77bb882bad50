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
@pytest.mark.parametrize("name", BODIES)
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

    from autopar.integrations import accelerate as ours
    from autopar.integrations.adapting import Moves
    from autopar.integrations.lightning import AutoparStrategy
    from examples.lightning_trainer import Classifier

    with pytest.raises(NotServed, match="mixed_precision beside a plan"):
        ours.Accelerator(cpu=True, mixed_precision="bf16")
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
        strategy.parallel  # noqa: B018


def dropping():
    nn = torch.nn
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(64), nn.Linear(64, 10))


def on_rank_with_dropout(rank, name, folder, resume):
    from examples import accelerate_loop, fabric_loop

    accelerate_loop.model = fabric_loop.model = dropping
    return on_rank(rank, name, RANKS, {"parallel": "tp"}, folder, resume)


@pytest.mark.machines
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_random_numbers_go_on_where_they_were(name, tmp_path):
    """A run with dropout that is resumed says, bit for bit, what the run says that was not stopped."""
    two, three = str(tmp_path / "two"), str(tmp_path / "three")
    whole = on_processes(RANKS, on_rank_with_dropout, name, two, "", timeout_s=150)[0]
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
    model, loader = made.prepare(language.gpt2(1, 16, 40, 16, dropout=0.0), loader)
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
