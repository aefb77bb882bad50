"""`SFTTrainer`: TRL's SFTTrainer, with a model that runs in parallel.

    trainer = SFTTrainer(model, args=SFTConfig(...), train_dataset=data, planning={"parallel": "fsdp"})

TRL puts a fused head into the model, which needs one whole weight. Here the same numbers are computed by plain ops
inside the model's class, and the plan cuts the head as it does for any loss. Written for TRL 1.16.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import trl
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from autopar.integrations import huggingface
from autopar.letters import NotServed

_IGNORED = -100


class SFTTrainer(huggingface.Trainer, trl.SFTTrainer):
    """TRL's SFTTrainer; `planning` are arguments of `autopar.autoparallelize`."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        model = self.model
        _with_plain_head(model.get_base_model() if hasattr(model, "get_base_model") else model)

        self.planning = {"outputs": "full", **self.planning}

    def _put_loss_into_model(self) -> None:
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise NotServed(
                "label_smoothing_factor or compute_loss_func of an SFTTrainer, whose loss is made of its fused head",
                advice="autopar.integrations.huggingface.Trainer, which serves both",
            )

    def _as_called(self, batch: Any) -> Any:
        return {**batch, "use_cache": False, "fused_lm_head": True}


def _with_plain_head(model: nn.Module) -> None:
    """Let `forward(fused_lm_head=True)` of the model's class return what TRL's own does, by plain ops."""
    model.__dict__.pop("forward", None)  # TRL's
    cls = type(model)

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return cls.forward(self, *args, labels=labels, **kwargs)
        logits = cls.forward(self, *args, **kwargs).logits[:, :-1].float()
        wanted = labels[:, 1:]
        is_wanted = wanted != _IGNORED
        of_words = torch.log_softmax(logits, -1)
        chosen = of_words.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(of_words.exp() * of_words).sum(-1).detach()
        return FusedCausalLMOutput(
            log_probs=chosen.masked_fill(~is_wanted, 0),
            entropy=entropy.masked_fill(~is_wanted, 0),
            is_top1=(logits.argmax(-1) == wanted) & is_wanted,
            label_mask=is_wanted,
        )

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
