"""Small models with what makes stages hard: tied tables, skips, an encoder that every decoder block reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0, has_memory: bool = False) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.cross = nn.Linear(width, width, bias=False) if has_memory else None
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, bias=None, memory=None):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores if bias is None else scores + bias
        x = x + self.dropout(self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)))
        if self.cross is not None and memory is not None:
            x = x + self.cross(memory).mean(1, keepdim=True)
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


def _loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Decoder(nn.Module):
    """A language model whose head is its table, so that the first and the last stage share a parameter."""

    def __init__(self, layers: int = 4, width: int = 16, vocabulary: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        x = self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return _loss(self.head(self.norm(x)), labels)


class EncoderDecoder(nn.Module):
    """One table for encoder, decoder and head; biases that depend on parameters alone; every decoder block reads the
    encoder's output."""

    def __init__(self, layers: int = 2, width: int = 16, vocabulary: int = 24) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.bias = nn.Embedding(8, 2)
        self.encoder = nn.ModuleList(Block(width) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(width, has_memory=True) for _ in range(layers))

    def forward(self, ids, labels):
        n = ids.shape[1]
        away = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs().clamp(max=7)
        bias = self.bias(away).permute(2, 0, 1)[None]
        memory = self.table(ids)
        for block in self.encoder:
            memory = block(memory, bias)
        x = self.table(labels.clamp(min=0).roll(1, 1))
        for block in self.decoder:
            x = block(x, bias, memory)
        return _loss(F.linear(x, self.table.weight), labels)


class UNet(nn.Module):
    """Convolutions with a skip from every block down to one up."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width * 2**i, width * 2 ** (i + 1), 3, padding=1) for i in range(2))
        self.up = nn.ModuleList(nn.Conv2d(width * 2 ** (i + 2), width * 2**i, 3, padding=1) for i in (1, 0))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x, y):
        x, skips = self.first(x), []
        for conv in self.down:
            x = F.silu(conv(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = F.silu(conv(torch.cat([x, skips.pop()], 1)))
        return ((self.last(x) - y) ** 2).mean()


class Twice(nn.Module):
    """A weight that is used twice on a path, within one stage, and one that all stages share."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(width, width) / width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(layer(x)) + x @ self.shared)
        return ((x - y) ** 2).mean()


class Again(nn.Module):
    """A block that runs once more behind the others, and a norm that all of them share."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(layers))
        for block in self.blocks:
            block[1] = self.blocks[0][1]

    def forward(self, x, y):
        for block in (*self.blocks, self.blocks[0]):
            x = torch.tanh(block(x)) + x
        return ((x - y) ** 2).mean()


def case(name: str):
    """A model in double precision, and a batch of eight rows whose targets are ignored unequally often."""
    torch.manual_seed(0)
    if name == "unet":
        return UNet().double(), {"x": torch.randn(8, 2, 8, 8).double(), "y": torch.randn(8, 1, 8, 8).double()}
    if name in ("twice", "again"):
        model = Twice() if name == "twice" else Again()
        return model.double(), {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 8).double()}
    model = {"decoder": Decoder, "encoder and decoder": EncoderDecoder}[name]().double()
    ids, labels = torch.randint(24, (8, 12)), torch.randint(24, (8, 12))
    for row in range(8):
        labels[row, :row] = -100
    return model, {"ids": ids, "labels": labels}
