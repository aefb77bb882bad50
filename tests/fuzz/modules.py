"""Random small modules: a list of steps, each drawn from STEPS and made on what the steps before it made."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from tests.fuzz.functions import of_torch
from tests.fuzz.steps import SIZES, STEPS
from tests.oracle import ByPosition

MEMBERS = 2000  # elements of a value, at most


class Drawn(nn.Module):
    """`forward` runs the steps; whatever no step has read counts in the loss."""

    def __init__(self, seed: int, of_all: bool = False, sizes: Sequence[int] = SIZES) -> None:
        super().__init__()
        self.rng, self.sizes = random.Random(seed), sizes
        self.generator = torch.Generator().manual_seed(seed)
        self.steps, self.names, self.called = [], [], []  # called: which functions of torch
        rows, length, width = (self.rng.choice(sizes) for _ in range(3))
        self.batch = {
            "x": self.drawn(rows, length, width),
            "ids": torch.randint(0, 7, (rows, length), generator=self.generator),
            "target": torch.randint(0, 2, (rows,), generator=self.generator).index_fill(0, torch.tensor(0), 1),
        }
        values = [self.batch["x"]]
        for _ in range(self.rng.randint(3, 9)):
            name = "torch" if of_all and self.rng.random() < 0.5 else self.rng.choice(list(STEPS))
            made = of_torch(self, values) if name == "torch" else STEPS[name](self, values)
            if made is None:
                continue
            read, step = made
            with torch.no_grad(), ByPosition(seed) as numbers:  # any module of this seed is the same
                numbers.next_step()
                value = step(values, self.batch["ids"])
            if value.numel() in range(1, MEMBERS) and value.isfinite().all() and value.abs().max() < 1e3:
                values.append(value)
                self.steps.append((read, step))
                self.names.append(name)
        unread = set(range(1, len(values))) - {i for read, _ in self.steps for i in read}
        self.ends = sorted(unread) or [0]
        for i in self.ends:
            self.register_buffer(f"w{i}", self.drawn(*values[i].shape))
        self.classify = (
            self.linear(values[self.ends[-1]].shape[-1], self.rng.choice((2, 3, 4, 6)))
            if values[self.ends[-1]].dim() == 2 and values[self.ends[-1]].shape[0] == rows
            else None
        )
        for name, buffer in self.named_buffers():
            if name.startswith("mean"):
                buffer.fill_(float(name.endswith("v")))
        del self.rng, self.generator

    # -- what steps are made with

    def drawn(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def parameter(self, *shape):
        name = f"p{len(self._parameters)}"
        self.register_parameter(name, nn.Parameter(self.drawn(*shape) * 0.5, requires_grad=self.rng.random() > 0.1))
        return lambda: self._parameters[name]

    def linear(self, inner, outer):
        weight, bias = self.parameter(outer, inner), self.parameter(outer) if self.rng.random() < 0.5 else lambda: None
        return lambda x: F.linear(x, weight(), bias())

    def pick(self, values, fits=lambda v: True):
        """The place of a value that fits; the newest are likelier."""
        found = [i for i, v in enumerate(values) if fits(v)]
        return None if not found else max(self.rng.choice(found), self.rng.choice(found))

    def forward(self, x, ids, target):
        values = [x]
        for _, step in self.steps:
            values.append(step(values, ids))
        loss = sum((values[i] * self.get_buffer(f"w{i}")).mean() for i in self.ends)
        if self.classify is not None:
            loss = loss + F.cross_entropy(self.classify(values[self.ends[-1]]), torch.where(target > 0, target, -100))
        return {"loss": loss, "last": values[self.ends[-1]]}
