"""TRL's SFTTrainer on one device, and autopar's on two: the same weights, losses, norms, entropies and accuracies.

TRL and what it needs take 285 MB: `pip install "trl>=1.16,<1.17"` before, or the test is skipped.
"""

from __future__ import annotations

import pytest

from autopar.testing import on_processes
from tests.use.ranks import as_torchrun, check_alike, weights_of

pytest.importorskip("trl")
KEYS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def rows(count):
    """Prompts, whose tokens are not asked for, and what follows them; of odd lengths."""
    found = []
    for start in range(count):
        ids = [3 + (start + j) % 61 for j in range(9 + start % 5)]
        given = 2 + start % 3
        found.append({"input_ids": [*ids, 1], "labels": [-100] * given + [*ids[given:], 1]})
    return found


def sft(rank, ranks, planning, folder):
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
    from trl import SFTConfig

    as_torchrun(rank, ranks)
    if planning is None:
        from trl import SFTTrainer
    else:
        from autopar.integrations.trl import SFTTrainer
    words = {f"w{i}": i + 3 for i in range(61)} | {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=1))
    args = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=8 // ranks,
        per_device_eval_batch_size=8 // ranks,
        max_steps=4,
        learning_rate=3e-3,
        logging_steps=1,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        max_length=16,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        data_seed=1,
        dataset_kwargs={"skip_prepare_dataset": True},
    )

    def data(count):
        return Dataset(InMemoryTable(pyarrow.Table.from_pylist(rows(count))), fingerprint=str(count))

    more = {} if planning is None else {"planning": planning}
    trainer = SFTTrainer(
        model, args=args, train_dataset=data(64), eval_dataset=data(20), processing_class=tokens, **more
    )
    trainer.train()
    found = trainer.evaluate()
    said = [record[key] for record in trainer.state.log_history if "loss" in record for key in KEYS]
    return [*said, found["eval_loss"], found["eval_mean_token_accuracy"]], weights_of(trainer.model)


@pytest.mark.machines
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", ["fsdp", "tp"])
def test_two_ranks_tune_as_one_device(parallel, tmp_path):
    right = on_processes(1, sft, 1, None, str(tmp_path / "one"))[0]
    found = on_processes(2, sft, 2, {"parallel": parallel}, str(tmp_path / "two"), timeout_s=150)
    check_alike(found[0], right)
    assert len(found[0][0]) == 4 * len(KEYS) + 2
