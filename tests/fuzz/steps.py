"""The steps that a random module is made of.

A step is made on the values of the steps before it: it says which of them it reads, and gives a function of all values
and the ids. What it cannot be made on, it refuses by None.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

SIZES = (2, 3, 4, 6, 8)
ODD_SIZES = (2, 3, 3, 5, 7)  # of which two or three devices have unequal parts, some of one row or of none


def has_dims(v):
    return v.dim() > 0


def unary(function, fits=has_dims):
    """A step on one value; `function(model, value)` gives what is done, or None."""

    def make(m, values):
        i = m.pick(values, fits)
        done = None if i is None else function(m, values[i])
        return None if done is None else ([i], lambda vs, ids: done(vs[i]))

    return make


def of_rank(*ranks):
    return lambda v: v.dim() in ranks


def dim_of(m, v):
    return m.rng.randrange(v.dim())


def pointwise(m, v):
    return m.rng.choice(
        [
            F.gelu,
            torch.tanh,
            F.silu,
            F.relu,
            torch.sigmoid,
            torch.sin,
            lambda x: x * 0.5 + 1,
            lambda x: x.clone().mul_(0.5).add_(1),
            lambda x: -x,
            lambda x: x.pow(2) * 0.1,
            F.softplus,
            lambda x: x.abs().clamp(0.1, 2),
            lambda x: torch.where(x > 0, x, x * 0.1),
            lambda x: x.detach().tanh() + x,
            lambda x: x.masked_fill(x > 1, 0.3),
            F.hardtanh,
        ]
    )


def reduced(m, v):
    d, keep = dim_of(m, v), m.rng.random() < 0.5
    kind = m.rng.choice(
        [
            torch.sum,
            torch.mean,
            torch.amax,
            torch.logsumexp,
            torch.var,
            lambda x, d, keepdim: x.norm(dim=d, keepdim=keepdim),
            lambda x, d, keepdim: x.max(d, keepdim=keepdim)[0],
        ]
    )
    return None if v.shape[d] < 2 or v.dim() < 2 else lambda x: kind(x, d, keepdim=keep)


def along(m, v):
    d = dim_of(m, v)
    kind = m.rng.choice(
        [
            torch.softmax,
            torch.log_softmax,
            torch.cumsum,
            lambda x, d: x.flip(d),
            lambda x, d: x.roll(1, d),
            lambda x, d: x - x.mean(d, keepdim=True),
            lambda x, d: x.sort(d)[0],
            lambda x, d: x / (x.norm(dim=d, keepdim=True) + 1),
        ]
    )
    return lambda x: kind(x, d)


def moved(m, v):
    if v.dim() < 2:
        return None
    if m.rng.random() < 0.5:
        a, b = m.rng.sample(range(v.dim()), 2)
        return lambda x: x.transpose(a, b)
    order = m.rng.sample(range(v.dim()), v.dim())
    return lambda x: x.permute(order)


def reshaped(m, v):
    d = dim_of(m, v)
    factors = [k for k in range(2, v.shape[d]) if v.shape[d] % k == 0]
    if factors and v.dim() < 5 and m.rng.random() < 0.5:
        k = m.rng.choice(factors)
        return m.rng.choice(
            [lambda x: x.unflatten(d, (k, -1)), lambda x: x.reshape(*x.shape[:d], -1, k, *x.shape[d + 1 :])]
        )
    if d + 1 < v.dim():
        return m.rng.choice(
            [lambda x: x.flatten(d, d + 1), lambda x: x.contiguous().view(*x.shape[:d], -1, *x.shape[d + 2 :])]
        )
    return m.rng.choice([lambda x: x.unsqueeze(d), lambda x: x[None], lambda x: x.reshape(-1)]) if v.dim() < 5 else None


def taken(m, v):
    d = dim_of(m, v)
    n = v.shape[d]
    if n < 2:
        return None
    a = m.rng.randrange(n - 1)
    name, index = f"index{len(m._buffers)}", torch.tensor([m.rng.randrange(n) for _ in range(m.rng.choice(m.sizes))])
    m.register_buffer(name, index)
    return m.rng.choice(
        [
            lambda x: x.narrow(d, a, n - a),
            lambda x: x.chunk(2, d)[0],
            lambda x: x.chunk(2, d)[-1],
            lambda x: x.select(d, a),
            lambda x: x.index_select(d, m.get_buffer(name)),
            lambda x: x.split([a + 1, n - a - 1], d)[1],
            lambda x: x[(slice(None),) * d + (slice(a, None, 2),)],
            lambda x: x.unbind(d)[a],
        ]
    )


def grown(m, v):
    d = dim_of(m, v)
    return (
        m.rng.choice(
            [
                lambda x: torch.cat([x, x * 2], d),
                lambda x: torch.stack([x, x.tanh()], d),
                lambda x: F.pad(x, (1, 2)),
                lambda x: x.unsqueeze(d).expand(*x.shape[:d], 3, *x.shape[d:]),
                lambda x: x.repeat_interleave(2, d),
                lambda x: torch.cat([x.narrow(d, 0, 1), x], d),
            ]
        )
        if v.dim() < 5
        else None
    )


def written(m, v):
    n = v.shape[-1]
    value = m.parameter(n)

    def first(x):
        y = x.clone()
        y[..., 0] = 0.5
        return y

    def shifted(x):
        y = torch.zeros_like(x)
        y[..., 1:] = x[..., :-1]
        return y + value()

    def row(x):
        y = x * 1
        y[0] = value()
        return y

    return m.rng.choice([first, shifted] + ([row] if v.dim() > 1 else []))


def linear(m, v):
    done = m.linear(v.shape[-1], m.rng.choice(m.sizes))
    return done


def tied(m, values):
    """An embedding, and its weight again as a head."""
    width = m.rng.choice(m.sizes)
    table = m.parameter(7, width)
    i = m.pick(values, lambda v: v.shape[-1] == width)
    padding = m.rng.choice([None, 3])
    if i is None:
        return [], lambda vs, ids: F.embedding(ids, table(), padding_idx=padding)
    return (
        [i],
        lambda vs, ids: (
            F.linear(vs[i], table()).sum(-1, keepdim=True) + F.embedding(ids, table(), padding_idx=padding).mean()
        ),
    )


def normed(m, v):
    n = v.shape[-1]
    weight, bias = m.parameter(n), m.parameter(n)
    return (
        m.rng.choice(
            [
                lambda x: F.layer_norm(x, (n,), weight(), bias()),
                lambda x: F.rms_norm(x, (n,), weight()),
                lambda x: F.layer_norm(x, (n,)),
            ]
        )
        if n > 1
        else None
    )


def over_channels(m, v):
    c = v.shape[1]
    weight, bias, name = m.parameter(c), m.parameter(c), f"mean{len(m._buffers)}"
    if v.numel() // c < 2:
        return None
    if m.rng.random() < 0.5:
        groups = m.rng.choice([k for k in range(1, c + 1) if c % k == 0])
        return (
            (lambda x: F.group_norm(x, groups, weight(), bias()))
            if v.dim() > 2 and v[0].numel() // groups > 1
            else None
        )
    m.register_buffer(name, torch.zeros(c, dtype=torch.float64))
    m.register_buffer(name + "v", torch.ones(c, dtype=torch.float64))
    return lambda x: F.batch_norm(x, getattr(m, name), getattr(m, name + "v"), weight(), bias(), training=True)


def convolved(m, v):
    c, out = v.shape[1], m.rng.choice(m.sizes)
    groups = m.rng.choice([k for k in range(1, c + 1) if c % k == 0 and out % k == 0])
    kernel, how = (
        (3,) * (v.dim() - 2),
        {"padding": m.rng.choice([1, 2]), "stride": m.rng.choice([1, 2]), "groups": groups},
    )
    weight = m.parameter(out, c // groups, *kernel)
    return lambda x: (F.conv1d if x.dim() == 3 else F.conv2d)(x, weight(), **how)


def pooled(m, v):
    if v.shape[-1] < 2:
        return None
    return (
        (lambda x: F.avg_pool1d(x, 2)) if v.dim() == 3 else (lambda x: F.max_pool2d(x, 2)) if v.shape[-2] > 1 else None
    )


def attention(m, v):
    width, heads, length = v.shape[-1], m.rng.choice([1, 2, 4]), v.shape[1]
    few = m.rng.choice([h for h in (1, 2, 4) if heads % h == 0])
    size = m.rng.choice([2, 4])
    q, k, o = m.linear(width, heads * size), m.linear(width, 2 * few * size), m.linear(heads * size, width)
    mask = m.rng.choice([None, "causal", "bool", "float"])
    bias = (
        m.parameter(heads, length, length)
        if mask == "float"
        else lambda: torch.arange(length)[:, None] >= torch.arange(length) - 1
    )
    dropped = m.rng.choice([0.0, 0.0, 0.2])

    def done(x):
        queries = q(x).unflatten(-1, (heads, size)).transpose(1, 2)
        keys, values = (t.unflatten(-1, (few, size)).transpose(1, 2) for t in k(x).chunk(2, -1))
        how = {} if mask is None else {"is_causal": True} if mask == "causal" else {"attn_mask": bias()}
        out = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropped, enable_gqa=few != heads, **how)
        return x + o(out.transpose(1, 2).flatten(2))

    return done


def binary(m, values):
    """Two values that go together, or a value and a parameter that is broadcast."""
    i = m.pick(values)
    j = (
        m.pick(values, lambda v: np.broadcast_shapes(v.shape, values[i].shape) is not None)
        if all(s in (1, t) for v in values for s, t in zip(v.shape[::-1], values[i].shape[::-1]))
        else i
    )
    kind = m.rng.choice(
        [
            torch.add,
            torch.mul,
            torch.sub,
            lambda a, b: a / (b * b + 1),
            torch.maximum,
            lambda a, b: torch.where(a > b, a, b * 2),
            lambda a, b: a.addcmul(a, b, value=0.3),
            lambda a, b: torch.lerp(a, b, 0.3),
        ]
    )
    if i == j:
        shape = [n if m.rng.random() < 0.6 else 1 for n in values[i].shape][m.rng.randrange(values[i].dim()) :]
        p = m.parameter(*shape)
        return [i], lambda vs, ids: kind(vs[i], p())
    return [i, j], lambda vs, ids: kind(vs[i], vs[j])


def multiplied(m, values):
    i = m.pick(values, lambda v: v.dim() in (2, 3))
    if i is None:
        return None
    kind = m.rng.choice(
        [
            lambda a, b: a @ b.transpose(-1, -2),
            lambda a, b: torch.einsum("...ij,...kj->...ik", a, b),
            lambda a, b: torch.einsum("...ij,...ik->...jk", a, b),
            lambda a, b: a.transpose(-1, -2) @ b,
        ]
    )
    j = m.pick(values, lambda v: v.shape == values[i].shape)
    return [i, j], lambda vs, ids: kind(vs[i], vs[j]) * 0.3


def gathered(m, values):
    i = m.pick(values, lambda v: v.dim() >= 2 and v.shape[0] == values[0].shape[0])
    return (
        None
        if i is None
        else (
            [i],
            lambda vs, ids: vs[i].gather(
                1, (ids[:, :1] % vs[i].shape[1]).view(-1, *[1] * (vs[i].dim() - 1)).expand(-1, 1, *vs[i].shape[2:])
            ),
        )
    )


def dropped(m, v):
    return lambda x: F.dropout(x, 0.3, True)


def forked(m, v):
    a, b = m.linear(v.shape[-1], v.shape[-1]), m.linear(v.shape[-1], v.shape[-1])
    return lambda x: x + F.silu(a(x)) * b(x)


STEPS = {
    "linear": unary(linear),
    "linear too": unary(linear),
    "gated": unary(forked),
    "attention": unary(attention, of_rank(3)),
    "tied": tied,
    "norm": unary(normed),
    "channels": unary(over_channels, of_rank(2, 3, 4)),
    "conv": unary(convolved, of_rank(3, 4)),
    "pool": unary(pooled, of_rank(3, 4)),
    "pointwise": unary(pointwise, lambda v: True),
    "reduce": unary(reduced),
    "along": unary(along),
    "move": unary(moved),
    "reshape": unary(reshaped),
    "reshape too": unary(reshaped),
    "take": unary(taken),
    "grow": unary(grown),
    "write": unary(written),
    "binary": binary,
    "matmul": multiplied,
    "gather": gathered,
    "dropout": unary(dropped, lambda v: True),
}
