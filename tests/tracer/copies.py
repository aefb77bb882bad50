"""Spellings of a copy at which gradients stop, or through which they flow, and ways to read what was copied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Backwardless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return None


class Unmarked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        copied = x.clone()
        ctx.mark_non_differentiable(copied)
        return copied, x * 2

    @staticmethod
    def backward(ctx, first, second):
        return second * 2


class Tripled(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def _zeros(*shape):
    return torch.zeros(*(shape or (WIDTH,)))


def _then(value, *_):
    """The first, after the rest was done."""
    return value


def _written(target, write):
    write(target)
    return target


@torch.no_grad()
def _decorated(s):
    return _zeros().copy_(s)


@torch.no_grad()
def _with_a_region(s):
    with torch.enable_grad():
        return s * 1


def _switched(s):
    torch.set_grad_enabled(False)
    t = s[:]
    torch.set_grad_enabled(True)
    return t


def _flows_into_a_fresh_one(s):
    with torch.no_grad():
        t = _zeros()
        with torch.enable_grad():
            t.copy_(s)
    return t


def _in_inference_mode(s):
    with torch.inference_mode():
        t = s.clone()
    return t.clone()


def _a_view_in_inference_mode(s):
    with torch.inference_mode():
        return s[:]


def _read_before_and_after(s):
    t = _zeros(2, WIDTH)
    row, other = t[0], t.view(-1)[:WIDTH]
    with torch.no_grad():
        row.copy_(s)
        _ = other * 2  # read under no_grad at first
    return other


def _a_view_first_read_blind(s):
    h = s * 1
    v = h[:]
    h.mul_(2)
    with torch.no_grad():
        _ = v * 1
    return v


def _past_a_view(s):
    t = _zeros(2, WIDTH)
    d = t.detach()
    d[0] = s
    return t[0]


def _of_its_own_history(s):
    d = _zeros().detach()
    d.copy_(s)
    return d


def _teacher(m, s):
    with torch.no_grad():
        m.mean.mul_(0.5).add_(s, alpha=0.5)
    return m.mean


def _codebook(m, s):
    m.mean.data.copy_(s)
    return s + (m.mean - s).detach()


def _no_grad(function):
    def call(m, s):
        with torch.no_grad():
            return function(m, s)

    return call


_BLIND = {
    "buffer.copy_(s)": lambda m, s: m.mean.copy_(s),
    "buffer[:] = s": lambda m, s: _then(m.mean, m.mean.__setitem__(slice(None), s)),
    "buffer[...] = s": lambda m, s: _then(m.mean, m.mean.__setitem__(..., s)),
    "buffer.add_(s)": lambda m, s: m.mean.add_(s),
    "buffer.lerp_(s)": lambda m, s: m.mean.lerp_(s, 0.25),
    "buffer = average": lambda m, s: _then(setattr(m, "mean", m.mean * 0.5 + s), 0) or m.mean,
    "empty.copy_(s)": lambda m, s: torch.empty(WIDTH).copy_(s),
    "double.copy_(s)": lambda m, s: _zeros().double().copy_(s).float(),
    "rows.copy_(s)": lambda m, s: _zeros(2, WIDTH).copy_(s)[1],
    "zeros[1:3] = s": lambda m, s: _written(_zeros(), lambda t: t.__setitem__(slice(1, 3), s[1:3])),
    "zeros.view().copy_(s)": lambda m, s: _written(_zeros(), lambda t: t.view(2, 2).copy_(s.view(2, 2))),
    "zeros[mask] = number": lambda m, s: _written(s * 1, lambda t: t.__setitem__(t.detach() > 0, 2.0)),
    "zeros.scatter_": lambda m, s: _zeros().scatter_(0, torch.arange(WIDTH), s),
    "zeros.index_copy_": lambda m, s: _zeros().index_copy_(0, torch.arange(WIDTH), s),
    "out=buffer": lambda m, s: torch.add(m.mean, s, out=m.mean),
    "out=empty": lambda m, s: torch.mul(s, 2, out=torch.empty(WIDTH)),
    "s[:]": lambda m, s: s[:],
    "s[...]": lambda m, s: s[...],
    "s[None][0]": lambda m, s: s[None][0],
    "s.clone()": lambda m, s: s.clone(),
    "s.view()": lambda m, s: s.view(WIDTH),
    "s.view_as()": lambda m, s: s.view_as(s),
    "s.reshape()": lambda m, s: s.reshape(2, 2).reshape(WIDTH),
    "s.expand()": lambda m, s: s.expand(WIDTH),
    "s.contiguous()": lambda m, s: s.contiguous(),
    "s.to(dtype)": lambda m, s: s.to(torch.float32),
    "s.double().float()": lambda m, s: s.double().float(),
    "s + 0": lambda m, s: s + 0,
    "sum([s])": lambda m, s: sum([s]),
    "cat([s])": lambda m, s: torch.cat([s]),
    "cat of chunks": lambda m, s: torch.cat(s.chunk(2)),
    "stack([s])[0]": lambda m, s: torch.stack([s])[0],
    "atleast_1d(s)": lambda m, s: torch.atleast_1d(s),
    "broadcast_tensors": lambda m, s: torch.broadcast_tensors(s, _zeros())[0],
    "dropout(s, 0)": lambda m, s: F.dropout(s, 0.0),
    "where(True, s)": lambda m, s: torch.where(s == s, s, _zeros()),
    "linear(s)": lambda m, s: F.linear(s.view(1, WIDTH), m.weight).view(WIDTH),
    "a Function": lambda m, s: Tripled.apply(s),
    "two of a Function": lambda m, s: Unmarked.apply(s)[1],
    "vmap": lambda m, s: torch.vmap(lambda v: v * 1)(s),
    "a checkpoint": lambda m, s: checkpoint(lambda v: v * 1, s, use_reentrant=False),
    "a loss": lambda m, s: s + F.mse_loss(s, m.mean) + F.l1_loss(s, m.mean),
}
SPELLINGS = {
    **{f"no_grad: {name}": _no_grad(function) for name, function in _BLIND.items()},
    **{f"with gradient: {name}": function for name, function in _BLIND.items() if name != "out=buffer"},
    "buffer.data.copy_(s)": lambda m, s: _then(m.mean, m.mean.data.copy_(s)),
    "buffer.data[:] = s": lambda m, s: _then(m.mean, m.mean.data.__setitem__(slice(None), s)),
    "buffer.data.add_(s)": lambda m, s: _then(m.mean, m.mean.data.add_(s)),
    "buffer.data[1:3].copy_(s)": lambda m, s: _then(m.mean, m.mean.data[1:3].copy_(s[1:3])),
    "buffer.data.view()[0] = s": lambda m, s: _then(m.mean, m.mean.data.view(2, 2).__setitem__(0, s[:2])),
    "buffer.detach().lerp_(s)": lambda m, s: _then(m.mean, m.mean.detach().lerp_(s, 0.5)),
    "zeros.detach().copy_(s)": lambda m, s: _written(_zeros(), lambda t: t.detach().copy_(s)),
    "zeros.data.copy_(s)": lambda m, s: _written(_zeros(), lambda t: t.data.copy_(s)),
    "detached.copy_(s)": lambda m, s: _of_its_own_history(s),
    "past a view": lambda m, s: _past_a_view(s),
    "s.detach()": lambda m, s: s.detach(),
    "s.data": lambda m, s: s.data,
    "s.detach()[:]": lambda m, s: s.detach()[:],
    "s.data.clone()": lambda m, s: s.data.clone(),
    "decorated": lambda m, s: _decorated(s),
    "decorated, with a region": lambda m, s: _with_a_region(s),
    "switched": lambda m, s: _switched(s),
    "into a fresh one": lambda m, s: _flows_into_a_fresh_one(s),
    "inference_mode": lambda m, s: _in_inference_mode(s),
    "a view in inference_mode": lambda m, s: _a_view_in_inference_mode(s),
    "another view, read blind": lambda m, s: _read_before_and_after(s),
    "a view first read blind": lambda m, s: _a_view_first_read_blind(s),
    "a teacher": _teacher,
    "a codebook": _codebook,
    "a Function without backward": lambda m, s: Backwardless.apply(s),
    "not differentiable": lambda m, s: Unmarked.apply(s)[0],
    "requires_grad_": lambda m, s: s.detach().requires_grad_() * 2,
    "foreach copy": _no_grad(lambda m, s: _then(m.mean, torch._foreach_copy_([m.mean], [s]))),
    "foreach average": _no_grad(lambda m, s: _then(m.mean, torch._foreach_lerp_([m.mean], [s], 0.5))),
}


def _then_written(t, write):
    write(t)
    return t


def _blind(function):
    with torch.no_grad():
        return function()


READS = {
    "multiplied": lambda m, s, t: t,
    "a part": lambda m, s, t: t[1:3].sum() + t.view(2, 2)[0].sum(),
    "beside its source": lambda m, s, t: t * s,
    "added to its source": lambda m, s, t: s + t,
    "copied again": lambda m, s, t: _zeros().copy_(t),
    "under no_grad": lambda m, s, t: _blind(lambda: t * 2),
    "written under no_grad": lambda m, s, t: _then_written(t, lambda t: _blind(lambda: t.mul_(2))),
    "written with a gradient": lambda m, s, t: _then_written(t, lambda t: t.add_(s)),
    "written in part": lambda m, s, t: _then_written(t, lambda t: t[:2].mul_(s[:2])),
    "written behind": lambda m, s, t: _then_written(t, lambda t: t.detach().mul_(2)),
    "the buffer": lambda m, s, t: m.mean + t.detach(),
    "returned": lambda m, s, t: t,
}


class Copier(nn.Module):
    """Copies a value or a parameter by one spelling, and reads the copy in some ways."""

    def __init__(self, spelling, reads, of_parameter=False):
        super().__init__()
        self.spelling, self.reads, self.of_parameter = spelling, reads, of_parameter
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mean", torch.rand(WIDTH))

    def forward(self, x):
        h = (x @ self.weight).tanh()
        s = self.scale if self.of_parameter else h.mean(0)
        copied = SPELLINGS[self.spelling](self, s)
        found = [READS[read](self, s, copied) for read in self.reads]
        loss = sum((h * one - x).pow(2).mean() for one in found)
        return (loss, copied) if "returned" in self.reads else loss
