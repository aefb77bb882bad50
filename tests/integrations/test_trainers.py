"""transformers' own Trainer on one device, and autopar's on two: the same weights, losses and checkpoints."""

from __future__ import annotations

import os

import pytest
import torch

from autopar.testing import on_processes
from tests.use.ranks import as_torchrun

pytest.importorskip("accelerate")
ROWS, STEPS = 16, 6  # of the batch of all ranks


def made(kind, folder, ranks, how, **more):
    from examples.huggingface_trainer import Counting, arguments, model

    rows = ROWS // ranks
    given = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "max_steps": STEPS, **how}
    return kind(
        model=model(), args=arguments(folder, **given), train_dataset=Counting(96), eval_dataset=Counting(40), **more
    )


def found_in(trainer):
    """Weights, the logged losses and norms, the loss of an evaluation, and predictions."""
    history = [(r["loss"], r["grad_norm"]) for r in trainer.state.log_history if "loss" in r]
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in trainer.model.named_parameters()}
    weights = {n: p.detach().clone() for n, p in whole.items()}
    predicted = torch.as_tensor(trainer.predict(trainer.eval_dataset).predictions)
    return weights, history, trainer.evaluate()["eval_loss"], predicted


def of_transformers(rank, folder, how):
    from transformers import Trainer

    trainer = made(Trainer, folder, 1, how)
    trainer.train()
    return found_in(trainer)


def of_autopar(rank, ranks, folder, how, planning, resume=None):
    from autopar.integrations.huggingface import Trainer

    if ranks > 1:
        as_torchrun(rank, ranks)
    trainer = made(Trainer, folder, ranks, how, planning=planning)
    trainer.train(resume_from_checkpoint=resume)
    return found_in(trainer)


def check_alike(found, right):
    (weights, history, evaluated, predicted), (others, told, alone, expected) = found, right
    torch.testing.assert_close(predicted, expected, rtol=2e-3, atol=2e-3)
    assert len(weights) > 20 and len(history) == len(told)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=2e-4, atol=2e-5, msg=name)
    for mine, theirs in zip(history, told, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3)
    assert evaluated == pytest.approx(alone, rel=1e-4)


@pytest.mark.timeout(300)
def test_training_is_that_of_one_device_and_goes_on_elsewhere(tmp_path):
    """With accumulation over micro-batches whose tokens differ in number, clipping, and a checkpoint in the middle."""
    how = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "save_steps": 3}
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    right = on_processes(1, of_transformers, one, how)[0]
    planning = {"parallel": "fsdp", "cluster": "generic"}
    found = on_processes(2, of_autopar, 2, two, how, planning, timeout_s=200)
    check_alike(found[0], right)
    assert found[0][1] == found[1][1]  # every rank logs the same
    assert set(os.listdir(f"{two}/checkpoint-3")) >= {"autopar", "model.safetensors", "config.json", "scheduler.pt"}
    resumed = on_processes(2, of_autopar, 2, three, how, {"parallel": "tp"}, f"{two}/checkpoint-3", timeout_s=200)
    check_alike(resumed[0], right)


def test_what_a_plan_decides_is_not_asked_twice(tmp_path):
    def body(how, planning=None):
        from autopar.integrations.huggingface import Trainer

        return made(Trainer, str(tmp_path), 1, how, planning=planning)

    from autopar.letters import NotServed

    for name, given in {"bf16": True, "label_smoothing_factor": 0.1, "torch_compile": True}.items():
        with pytest.raises(NotServed, match=name):
            body({name: given})
    trainer = body({"max_steps": 1})
    with pytest.raises(NotServed, match="not a checkpoint that this Trainer wrote"):
        trainer._load_from_checkpoint(str(tmp_path))
