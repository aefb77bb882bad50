"""Perplexity and tokens inside Lightning's evaluation, on two ranks as on one device."""

from __future__ import annotations

import logging
import math
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from autopar.testing import on_processes
from tests.use.ranks import as_torchrun

pytest.importorskip("lightning")


def of_evaluations(rank, ranks, planning):
    """Perplexities, and the tokens that were generated in each evaluation: greedy, and drawn."""
    import lightning.pytorch as pl
    import transformers

    from autopar.integrations.lightning import AutoparStrategy

    class Speaker(pl.LightningModule):
        def __init__(self):
            super().__init__()
            sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
            self.net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
            self.tokens = []
            self.perplexities = []

        def training_step(self, batch, index):
            return self.net(input_ids=batch, labels=batch).loss

        def validation_step(self, batch, index):
            self.log("loss", self.net(input_ids=batch, labels=batch).loss, sync_dist=True)
            how = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
            self.tokens.append(self.net.generate(batch[:, :4], do_sample=False, **how))
            torch.manual_seed(self.global_step)
            self.tokens.append(self.net.generate(batch[:, :4], do_sample=True, **how))

        def on_validation_epoch_end(self):
            self.perplexities.append(math.exp(self.trainer.callback_metrics["loss"]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    as_torchrun(rank, ranks)
    pl.seed_everything(1, verbose=False)
    module = Speaker()
    how = {"strategy": AutoparStrategy(**planning)} if planning else {}
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, **how,
    )  # fmt: skip
    rows = torch.randint(1, 96, (8, 8))
    trainer.fit(module, DataLoader(rows, 4), DataLoader(rows[:4], 4))
    return module.perplexities, module.tokens


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_evaluations_of_lightning_generate():
    right, due = on_processes(1, of_evaluations, 1, None)[0]
    assert len(right) == 2 and len(due) == 4
    for found, tokens in on_processes(2, of_evaluations, 2, {"parallel": "zero3"}, timeout_s=200):
        assert found == pytest.approx(right, rel=1e-4)
        assert all(map(torch.equal, tokens, due))
