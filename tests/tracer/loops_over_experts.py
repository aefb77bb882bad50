"""Loops over experts as users write them: each chooses the rows of an expert by a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, INNER, EXPERTS, TOP = 8, 12, 4, 2


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Dividing(Expert):
    """Finite for rows that are chosen: where x[0] is zero, so is what it divides by."""

    def forward(self, x):
        first = x[:, :1]
        return super().forward(x) / (first * first).sqrt() + self.up(x).sum(-1, keepdim=True).exp().log()


class Overflowing(Expert):
    """Finite for rows of zeros alone."""

    def forward(self, x):
        return super().forward(x) + (x[:, :1] * 1e200).square()


class Loop(nn.Module):
    """A router and experts; `way` is the loop over them."""

    def __init__(self, way, expert=Expert, top=TOP):
        super().__init__()
        self.way = way
        self.top = top
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x, push):
        scores = self.router(x) + push
        weights, ids = scores.softmax(-1).topk(self.top, -1)
        return self.way(self, x, weights / weights.sum(-1, keepdim=True), ids)


def where_and_index_add(m, x, weights, ids):
    """Mixtral as it was first."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        top, token = torch.where(mask[e])
        chosen = x[None, token].reshape(-1, x.shape[-1])
        y = m.experts[e](chosen) * weights[token, top, None]
        out.index_add_(0, token, y.to(x.dtype))
    return out


def index_put(m, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, top = (ids == e).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        out = out.index_put(
            (token,), weights[token, top].unsqueeze(-1) * expert(x.index_select(0, token)), accumulate=True
        )
    return out


def written_at_places(m, x, weights, ids):
    """mistral-inference."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, nth = torch.where(ids == e)
        out[token] += weights[token, nth, None] * expert(x[token])
    return out


def written_under_a_mask(m, x, weights, ids):
    out = x.clone()
    for e, expert in enumerate(m.experts):
        mask = ids[:, 0] == e
        if mask.nonzero().shape[0] > 0:
            out[mask] = expert(x[mask]) * weights[mask, :1]
    return out


def scattered(m, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        at = torch.nonzero(ids == e)
        token, nth = at[:, 0], at[:, 1]
        y = F.dropout(expert(x[token]), 0.5, False) * weights[token, nth].view(-1, 1)
        out = out.scatter_add(0, token.unsqueeze(1).expand(-1, HIDDEN), y)
    return out


def over_what_is_hit(m, x, weights, ids):
    """transformers, with a sentinel."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(ids, EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in hit:
        e = e[0]
        if e == EXPERTS:
            continue
        top, token = torch.where(mask[e])
        out.index_add_(0, token, m.experts[e](x[token]) * weights[token, top, None])
    return out


def over_a_list_of_what_is_hit(m, x, weights, ids):
    """Switch as it was, with a mask of its own in which an expert may be hit by few."""
    counts = F.one_hot(ids[:, 0], EXPERTS).sum(0)
    out = torch.zeros_like(x)
    for e in torch.nonzero(counts > 1, as_tuple=True)[0].tolist():
        token = (ids[:, 0] == e).nonzero().squeeze(-1)
        out[token] = m.experts[e](x[token]) * weights[token, :1]
    return out


def in_two_dims(m, x, weights, ids):
    """A batch of sequences, chosen by a mask over both."""
    x, ids, weights = (t.unflatten(0, (2, -1)) for t in (x, ids, weights))
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (ids == e).any(-1)
        share = torch.where(ids == e, weights, 0).sum(-1)
        out[mask] = out[mask] + expert(x[mask]) * share[mask].unsqueeze(1)
    return out.flatten(0, 1)


WAYS = (
    where_and_index_add,
    index_put,
    written_at_places,
    written_under_a_mask,
    scattered,
    over_what_is_hit,
    over_a_list_of_what_is_hit,
    in_two_dims,
)


TOKENS = 12
ROUTES = {
    "random": torch.zeros(EXPERTS),
    "all to one": torch.tensor([0.0, 50.0, 0.0, 0.0]),
    "one without rows": torch.tensor([0.0, 0.0, -50.0, 0.0]),
}


def run(module, x, push, direction):
    x = x.detach().clone().requires_grad_()
    out = module(x=x, push=push)
    parameters = dict(getattr(module, "model", module).named_parameters())
    found = torch.autograd.grad(out, [x, *parameters.values()], direction, allow_unused=True)
    zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(found, [x, *parameters.values()], strict=True)]
    return {"out": out.detach(), "x": zeros[0], **dict(zip(parameters, zeros[1:], strict=True))}


def case(way, expert=Expert):
    torch.manual_seed(0)
    model = Loop(way, expert).double()
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    return model, x, torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
