"""Small models in which the errors of the gauntlet can happen, each with a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ops.attention import attend
from autopar.runtime.sees import Sees

Batch = dict[str, torch.Tensor]


class Attention(nn.Module):
    """Norms of each head's queries and keys, rotary positions made inside, fewer heads of keys than of queries."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 1, size: int = 4, has_norms: bool = True) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, size
        self.norm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(size) if has_norms else nn.Identity() for _ in range(2))
        self.o_proj = nn.Linear(heads * size, width, bias=False)

    def turned(self, x):
        """Rotary positions."""
        places = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
        angles = places.unsqueeze(-1) * torch.tensor([1.0, 0.1], dtype=x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (
            proj(h).unflatten(-1, (n, self.size)).transpose(1, 2)
            for proj, n in ((self.q_proj, self.heads), (self.k_proj, self.groups), (self.v_proj, self.groups))
        )
        h = self.attended(self.turned(self.q_norm(q)), self.turned(self.k_norm(k)), v)
        return x + self.o_proj(h.transpose(1, 2).flatten(2))

    def attended(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)


class Attends(nn.Module):
    """Attention and a loss."""

    def __init__(self, **how) -> None:
        super().__init__()
        self.block = Attention(**how)

    def forward(self, x, y):
        return F.mse_loss(self.block(x), y)


class Packed(Attention):
    """Attention in documents that share a row, of which some rows may not count; a sink for each head."""

    def __init__(self, sees: str = "right=0", has_sinks: bool = True) -> None:
        super().__init__(groups=2, has_norms=False)
        self.sees, self.told = sees, (None, None)
        self.sinks = nn.Parameter(torch.randn(self.heads)) if has_sinks else None

    def forward(self, x, y, documents=None, counts=None):
        self.told = documents, counts
        return F.mse_loss(super().forward(x), y)

    def attended(self, q, k, v):
        return attend(q, k, v, *self.told, self.sinks, self.sees)


class PackedPlainly(Packed):
    """The same, of all pairs of rows."""

    def attended(self, q, k, v):
        documents, counts = self.told
        sees, places = Sees.of(self.sees), torch.arange(q.shape[-2])
        before = places[:, None] - places
        seen = (before >= 0) & (before <= sees.band[0])
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None])
        if counts is not None:
            seen = seen & (counts[:, None, None] != 0)
        k, v = (x.repeat_interleave(self.heads // self.groups, 1) for x in (k, v))
        weights = (q @ k.mT / self.size**0.5).masked_fill(~seen, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            total = total + self.sinks[:, None, None].exp()
        return weights @ v / torch.where(total == 0, 1.0, total)


class Words(nn.Module):
    """Tokens in, tokens out: a table, a hidden layer, a head, and losses of the head's logits."""

    def __init__(self, words: int = 13, width: int = 8, tied: bool = False, losses: str = "smoothed") -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.losses = losses

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.hidden(self.table(ids)))).flatten(0, 1)
        targets = labels.flatten()
        loss = F.cross_entropy(logits, targets, label_smoothing=0.1 if "smoothed" in self.losses else 0.0)
        if "sums" in self.losses:  # a second reader of what the losses are made of: their log-sums stay small
            loss = loss + 0.1 * logits.logsumexp(-1).square().mean()
        return loss


class TwoHeads(nn.Module):
    """The next token and the one after it: the second loss has other targets and counts them itself."""

    def __init__(self, words: int = 13, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.heads = nn.ModuleList(nn.Linear(width, words, bias=False) for _ in range(2))

    def forward(self, ids, labels):
        h, total = self.table(ids), 0.0
        for shift, head in enumerate(self.heads):
            logits, targets = head(h), torch.roll(labels, -shift, 1)
            counts = (targets != -100).to(h.dtype)
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(counts)
            total = total + (losses * counts).sum() / counts.sum()
        return total


def tokens(rows: int = 4, length: int = 6, words: int = 13) -> Batch:
    """Tokens, of which rows have targets in unequal numbers, and parts of rows too."""
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, words, (rows, length), generator=made)
    labels = ids.roll(-1, 1).clone()
    labels[0, :5], labels[1, 3:], labels[2, 4:] = -100, -100, -100
    return {"ids": ids, "labels": labels}


class Experts(nn.Module):
    """A router, hidden layers of which each token takes shares, and a loss that wants experts to be used alike."""

    def __init__(self, width: int = 8, experts: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.before, self.router = nn.Linear(width, width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x, y):
        x = torch.tanh(self.before(x))
        shares = self.router(x).softmax(-1)
        kept = shares.topk(2, -1)
        gates = torch.zeros_like(shares).scatter(-1, kept.indices, kept.values)
        hidden = F.silu(torch.einsum("td,edf->etf", x, self.up))
        out = torch.einsum("etf,efd,te->td", hidden, self.down, gates)
        used = (gates > 0).to(x.dtype).mean(0)
        return F.mse_loss(out, y) + 0.1 * shares.shape[-1] * (used.detach() * shares.mean(0)).sum()


class Routed(nn.Module):
    """A router, and experts that have the rows which chose them; a loss that wants them to be used alike.

    A row goes to some experts, less those with a small share: their ids are past the last expert.
    """

    def __init__(
        self, width: int = 4, experts: int = 8, hidden: int = 4, slots: int = 2, is_skewed: bool = False
    ) -> None:
        super().__init__()
        self.slots = slots
        self.before, self.router = nn.Linear(width, width), nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)
        self.up_bias = nn.Parameter(torch.randn(experts, 2 * hidden))
        self.down_bias = nn.Parameter(torch.randn(experts, width))
        self.router.weight.data *= 8.0  # rows choose differently
        if is_skewed:  # almost all rows want the first two, and none the last
            self.router.bias.data[:2] += 4.0
            self.router.bias.data[-1] -= 9.0

    def forward(self, x, y):
        x = torch.tanh(self.before(x))
        shares = self.router(x).softmax(-1)
        weights, ids = shares.topk(self.slots, -1)
        ids = ids.masked_fill(weights < 0.12, shares.shape[-1])
        used = (shares >= weights[:, -1:]).to(x.dtype).mean(0)
        balance = 0.1 * shares.shape[-1] * (used.detach() * shares.mean(0)).sum()
        return F.mse_loss(self.mixed(x, ids, weights), y) + balance

    def mixed(self, x, ids, weights):
        return autopar.experts(x, ids, weights, self.up, self.down, self.up_bias, self.down_bias)


class Looped(Routed):
    """The same as a loop over experts."""

    def mixed(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            row, slot = torch.where(ids == e)
            gate, other = (x[row] @ self.up[e].T + self.up_bias[e]).chunk(2, -1)
            made = (F.silu(gate) * other) @ self.down[e].T + self.down_bias[e]
            out = out.index_add(0, row, made * weights[row, slot, None])
        return out


class Pictures(nn.Module):
    """A convolution, statistics of the batch, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.head(F.relu(self.norm(self.stem(x))).mean((2, 3))), y)


class Fused(nn.Module):
    """Queries, keys and values from one weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, y):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.mse_loss(self.out(torch.tanh(q) * torch.sigmoid(k) + v), y)


class Sinks(nn.Module):
    """A number for each head beside weights that are whole, and weights that are cut."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x, y):
        h = self.up(self.norm(x)).unflatten(-1, (self.sinks.shape[0], -1))
        return F.mse_loss(self.down(torch.tanh(h * self.sinks.unsqueeze(-1)).flatten(-2)), y)


class Tables(nn.Module):
    """Two parameters whose gradients are one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        return (x * (self.a + self.b)).sum()


class Scales(nn.Module):
    """Weights whose gradients are the rows of the input, added up: exact in eight bits, but for their sum."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (x * self.scale).sum()


class Drops(nn.Module):
    """Two layers with a dropout between them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, y):
        return F.mse_loss(self.down(F.dropout(torch.tanh(self.up(x)), 0.5)), y)


def drawn(*shape: int, names: str = "xy") -> Batch:
    """Inputs of these shapes in float64."""
    made = torch.Generator().manual_seed(1)
    return {name: torch.randn(*shape, generator=made, dtype=torch.float64) for name in names}
