"""transformers' own Trainer on one device, and autopar's on two: the same weights, losses and checkpoints."""

from __future__ import annotations

import os

import pytest
import torch

import autopar
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
    """Weights; the logged losses, norms and learning rates; the loss of an evaluation, and predictions."""
    history = [(r["loss"], r["grad_norm"], r["learning_rate"]) for r in trainer.state.log_history if "loss" in r]
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in trainer.model.named_parameters()}
    weights = {n: p.detach().clone() for n, p in whole.items()}
    predicted = torch.as_tensor(trainer.predict(trainer.eval_dataset).predictions)
    return weights, history, trainer.evaluate()["eval_loss"], predicted


def of_transformers(rank, folder, how, resume=None):
    from transformers import Trainer

    trainer = made(Trainer, folder, 1, how)
    trainer.train(resume_from_checkpoint=resume)
    return found_in(trainer)


def of_autopar(rank, ranks, folder, how, planning, resume=None):
    from autopar.integrations.huggingface import Trainer

    if ranks > 1:
        as_torchrun(rank, ranks)
    trainer = made(Trainer, folder, ranks, how, planning=planning)
    trainer.train(resume_from_checkpoint=resume)
    return found_in(trainer)


def of_autopar_twice(rank, first, second):
    """Two trainers one after the other: processes take longer to import than to train."""
    return of_autopar(rank, *first), of_autopar(rank, *second)


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
    migrates = (2, three + "1", how, {"parallel": "tp"}, f"{one}/checkpoint-3")
    (found, migrated), (other, _) = on_processes(2, of_autopar_twice, (2, two, how, planning), migrates, timeout_s=200)
    check_alike(found, right)
    check_alike(migrated, right)
    assert found[1] == other[1]  # every rank logs the same
    assert set(os.listdir(f"{two}/checkpoint-3")) >= {"autopar", "model.safetensors", "config.json", "scheduler.pt"}
    resumed = on_processes(2, of_autopar, 2, three, how, {"parallel": "tp"}, f"{two}/checkpoint-3", timeout_s=200)
    check_alike(resumed[0], right)
    back = on_processes(1, of_transformers, three + "2", how, f"{two}/checkpoint-3")[0]
    check_alike(back, right)


def of_choices(rank, ranks, kind, folder, how, scaler=False):
    """The losses and learning rates that a trainer logs, its evaluations, its best checkpoint, and the plan."""
    if kind == "transformers":
        from transformers import Trainer
    else:
        from autopar.integrations.huggingface import Trainer

        as_torchrun(rank, ranks)
    trainer = made(Trainer, folder, ranks, {**how, "per_device_eval_batch_size": 20 // ranks})  # no odd last batch
    if scaler:  # Accelerate has one on GPUs alone
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        trainer.accelerator.native_amp = True
    trainer.train()
    log = trainer.state.log_history
    said = [
        record[key] for record in log for key in ("loss", "learning_rate", "grad_norm", "eval_loss") if key in record
    ]
    scale = trainer.accelerator.scaler.get_scale() if scaler else 0
    best = os.path.basename(trainer.state.best_model_checkpoint or "")
    return [*said, trainer.evaluate()["eval_loss"]], scale, best, getattr(trainer.model, "plan", None)


def smoothed(outputs, labels, num_items_in_batch=None):
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, wanted, label_smoothing=0.2, reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_best_model_smoothed_labels_and_compiled_programs_are_those_of_one_device(tmp_path):
    """The best is that of the first evaluation, as greater is better here."""
    how = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    how |= {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}
    how |= dict.fromkeys(("eval_strategy", "save_strategy"), "steps") | dict.fromkeys(("eval_steps", "save_steps"), 2)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    right = on_processes(1, of_choices, 1, "transformers", one, how)[0]
    how["torch_compile_backend"] = "aot_eager"
    for said, _, best, plan in on_processes(2, of_choices, 2, "ours", two, how, timeout_s=200):
        assert said == pytest.approx(right[0], rel=1e-4) and len(said) > 20
        assert said[-1] == pytest.approx(said[6], rel=1e-6) and best == right[2] == "checkpoint-2"
        assert plan is not None


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_is_that_of_the_plan(dtype, tmp_path):
    """Losses differ from autocast's by what rounding does; learning rates and the scale of gradients are equal."""
    name, rel, has_scaler = {"bfloat16": ("bf16", 1e-2, False), "float16": ("fp16", 2e-3, True)}[dtype]
    how = {name: True, "gradient_accumulation_steps": 2, "max_steps": 4, "save_strategy": "no"}
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    right = on_processes(1, of_choices, 1, "transformers", one, how, has_scaler)[0]
    said, scale, _, plan = on_processes(2, of_choices, 2, "ours", two, how, has_scaler, timeout_s=200)[0]
    assert said == pytest.approx(right[0], rel=rel) and said[1:12:3] == right[0][1:12:3] and scale == right[1]
    assert plan.precision == (dtype, "float32")


def test_what_a_plan_decides_is_not_asked_twice(tmp_path):
    def body(how, planning=None, **more):
        from autopar.integrations.huggingface import Trainer

        return made(Trainer, str(tmp_path), 1, how, planning=planning, **more)

    from autopar.letters import NotServed

    for name, given in {"torch_compile_mode": "reduce-overhead", "auto_find_batch_size": True}.items():
        with pytest.raises(NotServed, match=name):
            body({name: given})
    with pytest.raises(NotServed, match=r"(?s)bf16=True.* beside a plan of another precision.*float16"):
        body({"bf16": True, "max_steps": 1}, {"precision": "fp16"}).train()
    trainer = body({"bf16": True, "torch_compile_backend": "aot_eager"})
    assert trainer._planning_of_arguments() == {"compile": "aot_eager", "precision": autopar.Precision("bfloat16")}
    trainer = body({"fp16": True, "max_steps": 1})
    assert not trainer._planning_of_arguments()  # on a CPU; so does Accelerate
    with pytest.raises(NotServed, match=r"has no optimizer\.pt"):
        trainer._load_from_checkpoint(str(tmp_path))


def test_a_loss_of_the_users_is_planned_with_the_model(tmp_path):
    """It is the model's own afterwards: the numbers of a step with a loss function of the user's are those of one."""
    from transformers import Trainer

    from autopar.integrations import huggingface

    how = {"max_steps": 2, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    said, lines = [], huggingface.LogSteps(every=1)
    for kind, callbacks in ((Trainer, []), (huggingface.Trainer, [lines])):
        trainer = made(kind, str(tmp_path), 1, how, compute_loss_func=smoothed, callbacks=callbacks)
        trainer.train()
        said.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert said[0] == pytest.approx(said[1], rel=1e-5) and len(said[0]) == 2
    assert lines.log.last.step == 2 and lines.log.last.rates.workload.tokens == 2 * ROWS * 16  # of two micro-batches


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_training_in_stages_is_that_of_one_device_and_goes_on_there(tmp_path):
    how = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "save_steps": 3}
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    right = on_processes(1, of_transformers, one, how)[0]
    mesh = autopar.DeviceMesh((2, 2), ("pp", "tp"))
    planning = {"mesh": mesh, "microbatches": 2, "cluster": "generic", "memory_budget": "inf"}
    found, *_, other = on_processes(4, of_autopar, 4, two, how, planning, timeout_s=300)
    check_alike(found, right)
    assert found[1] == other[1]
    back = on_processes(1, of_transformers, two + "1", how, f"{two}/checkpoint-3")[0]
    check_alike(back, right)


def of_evaluations(rank, ranks, kind, folder):
    """The losses of evaluations between steps, and the tokens that the model draws and finds best in each."""
    import transformers

    from autopar.integrations import huggingface

    class Generates(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **how):
            ids = torch.arange(1, 9).reshape(2, 4)
            how = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
            tokens.append(model.eval().generate(ids, do_sample=False, **how))
            torch.manual_seed(state.global_step)
            tokens.append(model.generate(ids, do_sample=True, temperature=2.0, **how))

    tokens = []
    as_torchrun(rank, ranks)
    of = transformers.Trainer if kind == "transformers" else huggingface.Trainer
    how = {"eval_strategy": "steps", "eval_steps": 3}
    planning = {} if kind == "transformers" else {"planning": {"parallel": "zero3", "cluster": "generic"}}
    trainer = made(of, folder, ranks, how, callbacks=[Generates()], **planning)
    trainer.train()
    return [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line], tokens


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_evaluations_generate(tmp_path):
    """In a callback between steps of training, which goes on as if nothing had been generated."""
    losses, right = on_processes(1, of_evaluations, 1, "transformers", str(tmp_path / "one"))[0]
    for found, tokens in on_processes(2, of_evaluations, 2, "ours", str(tmp_path / "two"), timeout_s=200):
        assert found == pytest.approx(losses, rel=1e-4) and len(found) == 2
        assert all(map(torch.equal, tokens, right)) and len(tokens) == 4
