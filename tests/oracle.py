"""What single-device eager is held to when the program is random or casts.

Function modes that share no code with autopar.

ByPosition(seed)    dropout, attention dropout, rand and bernoulli_ draw what numpy says, from the published definition
                    of the bits
PermutedSums(seed)  every product of matrices adds its terms in another order
InFloat64()         casts to float32 inside a model become float64, so that a float64 model stays one
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


def murmur_finalizer(h):
    """fmix32 of MurmurHash3, as published."""
    h = np.asarray(h, dtype=np.uint64) & 0xFFFFFFFF
    h ^= h >> np.uint64(16)
    h = h * np.uint64(0x85EBCA6B) & np.uint64(0xFFFFFFFF)
    h ^= h >> np.uint64(13)
    h = h * np.uint64(0xC2B2AE35) & np.uint64(0xFFFFFFFF)
    return h ^ (h >> np.uint64(16))


def bits(seed: int, step: int, op: int, shape) -> np.ndarray:
    """32 random bits for a whole tensor, element by element of their row and column."""
    key = (seed + step * 0x9E3779B97F4A7C15) % 2**64
    mask = 0xFFFFFFFF
    op_key = int(murmur_finalizer(int(murmur_finalizer((key & mask) ^ (op * 0x85EBCA77 & mask))) ^ (key >> 32)))
    columns = shape[-1] if shape else 1
    rows = int(np.prod(shape[:-1], dtype=np.int64)) if shape else 1
    row = np.arange(rows, dtype=np.uint64)
    row_key = murmur_finalizer(murmur_finalizer((row >> np.uint64(32)) ^ np.uint64(op_key)) ^ (row & np.uint64(mask)))
    column = np.arange(columns, dtype=np.uint64) * np.uint64(0x9E3779B9)
    return murmur_finalizer(row_key[:, None] + column[None, :]).reshape(shape)


def kept(seed: int, step: int, op: int, p: float, shape) -> np.ndarray:
    """The elements that survive."""
    return bits(seed, step, op, shape).astype(np.uint32).astype(np.int32).astype(np.int64) >= int(p * 2**32) - 2**31


class ByPosition(TorchFunctionMode):
    """One forward after another: call `next_step()` before each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.step, self.op = seed, -1, 0

    def next_step(self) -> None:
        self.step, self.op = self.step + 1, 0

    def drop(self, x, p):
        mask = torch.from_numpy(kept(self.seed, self.step, self.op, p, tuple(x.shape)))
        self.op += 1
        return x * mask / (1 - p)

    def uniform(self, shape):
        drawn = torch.from_numpy(bits(self.seed, self.step, self.op, tuple(shape)).astype(np.float64) / 2.0**32)
        self.op += 1
        return drawn

    def drawn(self, kind, shape, a=0.0, b=1.0):
        """Numbers of a distribution, one random op."""

        def uniform(stream=0):
            return bits(self.seed, self.step, self.op + (stream << 24), tuple(shape)) / 2.0**32

        def normal(stream=0):
            return np.sqrt(-2 * np.log1p(-uniform(stream))) * np.cos(2 * np.pi * uniform(stream + 1))

        def gamma(alpha):
            """The first of twelve tries that Marsaglia and Tsang's squeeze keeps.

            Below one, of one more and brought down.
            """
            tries = [(normal(3 * k), 1 - uniform(3 * k + 2)) for k in range(12)]
            made = np.empty(alpha.shape)
            for at in np.ndindex(alpha.shape):
                d = (alpha[at] + 1 if alpha[at] < 1 else alpha[at]) - 1 / 3
                made[at] = d
                for x, u in ((x[at], u[at]) for x, u in tries):
                    v = (1 + x / math.sqrt(9 * d)) ** 3
                    if v > 0 and math.log(u) < 0.5 * x * x + d - d * v + d * math.log(v):
                        made[at] = d * v
                        break
            return np.where(alpha < 1, made * (1 - uniform(36)) ** (1 / alpha), made)

        def poisson(rate):
            """The least count up to which the probabilities add up to more than a uniform draw."""
            made, draw = np.zeros(rate.shape), uniform()
            for at in np.ndindex(rate.shape):
                probability = total = math.exp(-rate[at])
                while total <= draw[at] and rate[at]:
                    made[at] += 1
                    probability *= rate[at] / made[at]
                    total += probability
            return made

        def permutation():
            first, second = (
                bits(self.seed, self.step, self.op + (k << 24), tuple(shape)).astype(np.int64) for k in (0, 1)
            )
            return np.lexsort((second, np.where(first >= 2**31, first - 2**32, first)))

        kinds = {
            "uniform": lambda: uniform() * (b - a) + a,
            "normal": lambda: normal() * b + a,
            "exponential": lambda: -np.log1p(-uniform()) / a,
            "whole": lambda: np.floor(uniform() * (b - a)) + a,
            "gamma": lambda: gamma(a),
            "poisson": lambda: poisson(a),
            "permutation": permutation,
        }
        made = torch.from_numpy(np.asarray(kinds[kind]()))
        self.op += 1
        return made

    def categories(self, weights, draws):
        """Places drawn from each row by its weights, with replacement."""
        edges = weights.double().numpy().cumsum(-1)
        places = self.uniform((*weights.shape[:-1], draws)).numpy() * edges[..., -1:]
        return torch.from_numpy((edges[..., None, :] <= places[..., :, None]).sum(-1))

    def normal(self, mean=0.0, std=1.0, size=None, **how):
        shape = (
            size
            if size is not None
            else torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, torch.Tensor)))
        )
        a, b = (x.detach().numpy() if isinstance(x, torch.Tensor) else x for x in (mean, std))
        return self.drawn("normal", shape, a, b)

    def recurrent(self, function, input, hx, params, biases, layers, dropout, train, both, batch_first):
        """A layer at a time; between them time comes first, then the batch."""
        states, many = (hx, True) if isinstance(hx, (tuple, list)) else ((hx,), False)
        x, each, ends = input.transpose(0, 1) if batch_first else input, len(params) // layers, []
        for layer in range(layers):
            here = tuple(s.chunk(layers)[layer].contiguous() for s in states)
            x, *after = function(
                x.contiguous(),
                here if many else here[0],
                params[layer * each :][:each],
                biases,
                1,
                0.0,
                train,
                both,
                False,
            )
            ends.append(after)
            x = self.drop(x, dropout) if layer + 1 < layers else x
        return (x.transpose(0, 1) if batch_first else x), *map(torch.cat, zip(*ends))

    def attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (torch.stack([x] * groups, -3).flatten(-4, -3) for x in (key, value))
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * (scale or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            scores = scores + attn_mask
        elif attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a query that sees nothing
        return torch.einsum("bhqk,bhkd->bhqd", self.drop(weights, dropout_p), value)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.dropout:
            p, training = (
                kwargs.get("p", args[1] if len(args) > 1 else 0.5),
                kwargs.get("training", args[2] if len(args) > 2 else True),
            )
            return self.drop(args[0], p) if training and p > 0 else args[0]
        if function is F.scaled_dot_product_attention and kwargs.get("dropout_p", 0.0) > 0:
            return self.attention(*args, **kwargs)
        if function is torch.rand:
            return self.uniform(args[0] if isinstance(args[0], (tuple, list)) else args)
        if function is torch.Tensor.bernoulli_:
            return args[0].copy_(self.uniform(args[0].shape) < args[1])
        if function is torch.randn:
            return self.drawn("normal", args[0] if isinstance(args[0], (tuple, list)) else args)
        if function is torch.normal:
            return self.normal(*args, **kwargs)
        if function in (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_):
            name, numbers = function.__name__.strip("_"), (*args[1:], *kwargs.values())
            return args[0].copy_(
                self.drawn(name, args[0].shape, *(numbers or ((1.0,) if name == "exponential" else ())))
            )
        if function is torch.bernoulli:
            return (self.uniform(args[0].shape) < args[0].detach()).to(args[0].dtype)
        if function is torch.multinomial:
            return self.categories(args[0].detach(), args[1])
        if function in (torch.randint, torch.randint_like):
            *bounds, size = (
                (*args, *(kwargs[k] for k in ("size",) if k in kwargs))
                if function is torch.randint
                else (*args[1:], args[0].shape)
            )
            low, high = bounds if len(bounds) == 2 else (0, bounds[0])
            return self.drawn("whole", size, low, high).to(
                args[0].dtype if function is torch.randint_like else torch.int64
            )
        if function is torch.randperm:
            return self.drawn("permutation", (args[0],))
        if function is torch.poisson:
            return self.drawn("poisson", args[0].shape, args[0].detach().numpy())
        if function is F.rrelu and kwargs["training"]:
            return args[0] * torch.where(
                args[0] > 0, 1.0, self.drawn("uniform", args[0].shape, kwargs["lower"], kwargs["upper"])
            )
        if function is torch._standard_gamma:
            return Sampled.apply(args[0], self.drawn("gamma", args[0].shape, args[0].detach().numpy()))
        if function is torch._sample_dirichlet:
            parts = self.drawn("gamma", args[0].shape, args[0].detach().numpy())
            return parts / parts.sum(-1, keepdim=True)
        if function in (torch.lstm, torch.gru) and args[5] and args[6]:
            return self.recurrent(function, *args)
        return function(*args, **kwargs)


class Sampled(torch.autograd.Function):
    """A gamma variate, with the gradient that torch gives it."""

    @staticmethod
    def forward(ctx, alpha, sample):
        ctx.save_for_backward(alpha, sample)
        return sample.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch._standard_gamma_grad(*ctx.saved_tensors), None


class PermutedSums(TorchFunctionMode):
    """Terms of a product and, for the gradient of a weight, rows of its input are taken in a random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def product(self, x, w):
        rows = x.flatten(0, -2)
        k, r = (torch.randperm(n, generator=self.generator) for n in (rows.shape[1], rows.shape[0]))
        return (rows[r][:, k] @ w[k])[r.argsort()].unflatten(0, x.shape[:-1])

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear:
            y = self.product(args[0], args[1].t())
            return y + args[2] if len(args) > 2 and args[2] is not None else y
        if function is torch.addmm:
            return self.product(args[1], args[2]) + args[0]
        return function(*args, **kwargs)


class InFloat64(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            return args[0].double()
        return function(
            *[torch.float64 if a is torch.float32 else a for a in args],
            **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()},
        )
