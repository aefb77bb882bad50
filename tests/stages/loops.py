"""A model in stages beside itself on one device, each with a loop's optimizer."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.stages.models import Decoder, case
from tests.stages.ranks import apart, made


class Speaker(Decoder):
    """A decoder that also gives logits, and nothing else without labels."""

    def forward(self, ids, labels=None):
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), "logits": logits}


def loss_of(found):
    return found["loss"] if isinstance(found, dict) else found


class Both:
    """A model in stages and the same one alone, and what is held against one another of them."""

    def __init__(self, name, shape=(2, 2), **how):
        self.alone, self.batch = case("decoder" if name == "speaker" else name)
        if name == "speaker":
            torch.manual_seed(0)
            self.alone = Speaker().double()
        self.spread = made(copy.deepcopy(self.alone), self.batch, shape, **how)

    @property
    def models(self):
        return self.spread, self.alone

    def backward(self, times=1):
        for model in self.models:
            model.zero_grad()
        for _ in range(times):
            for model in self.models:
                loss_of(model(**self.batch)).backward()

    def pairs(self, of=lambda p: p):
        there = dict(self.alone.named_parameters())
        for name, p in self.spread.named_parameters():
            yield name, of(p), of(there[name])

    def assert_alike(self, bar=1e-12, of=lambda p: p.detach()):
        wrong = {name: e for name, mine, right in self.pairs(of) if not (e := apart(mine, right)) < bar}
        assert not wrong, wrong

    def assert_copies_are_equal(self):
        """Ranks that hold the same part of a tied table hold the same bits."""
        for parameter in self.spread.parameters():
            everyone = [None] * dist.get_world_size()
            is_here = parameter.device_mesh.get_coordinate() is not None
            dist.all_gather_object(everyone, (tuple(parameter.device_mesh.mesh.shape), is_here, parameter.to_local()))
            held = [part.detach() for shape, here, part in everyone if here and len(shape) > 1]
            parts = {part.numpy().tobytes() for part in held}
            devices = [math.prod(shape[1:]) for shape, here, _ in everyone if here and len(shape) > 1]
            assert len(parts) <= max(devices, default=0), len(parts)
