"""A LightningModule whose network runs in parallel.

pip install lightning
torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.lightning import AutoparStrategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10))
        self.said: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.said.append(float(loss))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("valid", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.said.append(float(self.trainer.callback_metrics["valid"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(folder: str, resume: str | None = None, **how: Any) -> Classifier:
    """The module after three epochs of eleven batches, two to a step; a checkpoint every four steps."""
    pl.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(88, 16), torch.randint(0, 10, (88,)))
    module = Classifier()
    saves = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[saves],
        logger=False, enable_progress_bar=False, enable_model_summary=False, **how,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 8, shuffle=True), DataLoader(data, 8), ckpt_path=resume)
    return module


if __name__ == "__main__":
    print(train("checkpoints", strategy=AutoparStrategy(parallel="fsdp"), devices=2).said[-3:])
