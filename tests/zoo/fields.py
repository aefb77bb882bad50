"""Small models as audio, geometry, tabular data, density estimation, physics, control, finance and medicine write them.

`FIELDS` maps a name to a `Field`: how the model is made, and the batch that its forward takes by name. Every forward
returns a scalar loss. Sizes are small and some of them odd; nothing here is written with a compiler in mind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Field:
    """A model and a batch for it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


FIELDS: dict[str, Field] = {}


def field(name: str, **inputs: Callable[[], Tensor]):
    """Register a class of modules under a name, with what makes each of its inputs."""

    def register(build):
        FIELDS[name] = Field(build, lambda: {key: make() for key, make in inputs.items()})
        return build

    return register


def normal(*shape):
    return lambda: torch.randn(shape, dtype=torch.float64)


def uniform(*shape):
    return lambda: torch.rand(shape, dtype=torch.float64)


def whole_numbers(below, *shape):
    return lambda: torch.randint(0, below, shape)


def coins(*shape):
    return lambda: torch.randint(0, 2, shape).double()


def weights(*shape):
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))


def mlp(*widths, act=nn.Tanh):
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


# -- audio ------------------------------------------------------------------------------------------------------------


@field("audio: spectrogram classifier", wave=normal(6, 160), label=whole_numbers(5, 6))
class Spectrogram(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.mel = weights(10, 17)
        self.conv = nn.Conv1d(10, 12, 3, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, wave, label):
        spectrum = torch.stft(wave, 32, hop_length=16, window=self.window, return_complex=True)
        mel = torch.matmul(self.mel.exp(), spectrum.abs().pow(2)).clamp(min=1e-5).log()
        mel = (mel - mel.mean(-1, keepdim=True)) / (mel.std(-1, keepdim=True) + 1e-5)
        return F.cross_entropy(self.head(F.relu(self.conv(mel)).amax(-1)), label)


@field("audio: gated dilated convolutions", codes=whole_numbers(16, 4, 20))
class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 16, 1) for _ in range(3))
        self.out = nn.Conv1d(8, 16, 1)

    def forward(self, codes):
        x, total = self.embed(codes[:, :-1]).transpose(1, 2), 0
        for gate, skip in zip(self.gates, self.skips):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            residual, s = skip(torch.tanh(a) * torch.sigmoid(b)).split(8, dim=1)
            x, total = x + residual, total + s
        return F.cross_entropy(self.out(F.relu(total)), codes[:, 1:])


@field("audio: speech separation by masks", mixture=normal(4, 64), sources=normal(4, 2, 64))
class Separation(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv1d(1, 12, 8, stride=4, bias=False)
        self.norm = nn.GroupNorm(1, 12)
        self.inner = nn.Conv1d(12, 12, 3, padding=2, dilation=2, groups=12)
        self.act = nn.PReLU()
        self.mask = nn.Conv1d(12, 24, 1)
        self.decode = nn.ConvTranspose1d(12, 1, 8, stride=4, bias=False)

    def forward(self, mixture, sources):
        code = F.relu(self.encode(mixture[:, None]))
        mask = torch.sigmoid(self.mask(self.act(self.inner(self.norm(code))))).view(4, 2, 12, -1)
        found = self.decode((mask * code[:, None]).flatten(0, 1)).view(4, 2, -1)
        found, sources = (x - x.mean(-1, keepdim=True) for x in (found, sources))
        scale = (found * sources).sum(-1, keepdim=True) / sources.square().sum(-1, keepdim=True)
        noise = found - scale * sources
        ratio = (scale * sources).square().sum(-1) / (noise.square().sum(-1) + 1e-8)
        return -10 * torch.log10(ratio + 1e-8).mean()


@field(
    "audio: keyword spotting with a GRU",
    frames=normal(6, 9, 13),
    lengths=lambda: torch.tensor([9, 4, 7, 1, 9, 2]),
    label=whole_numbers(3, 6),
)
class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(13)
        self.rnn = nn.GRU(13, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, frames, lengths, label):
        x = self.norm(frames.transpose(1, 2)).transpose(1, 2)
        out, _ = self.rnn(x)
        valid = (torch.arange(frames.shape[1])[None] < lengths[:, None]).unsqueeze(-1)
        pooled = (out * valid).sum(1) / lengths[:, None]
        last = out.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, 16)).squeeze(1)
        return F.cross_entropy(self.head(pooled + last), label, label_smoothing=0.1)


# -- point clouds and graphs ------------------------------------------------------------------------------------------


@field("points: PointNet", points=normal(8, 11, 3), label=whole_numbers(4, 8))
class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.turn = nn.Linear(8, 9)
        self.features = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 1))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))

    def forward(self, points, label):
        turn = self.turn(self.align(points.transpose(1, 2)).max(dim=2)[0]).view(-1, 3, 3)
        turn = turn + torch.eye(3, dtype=points.dtype)
        x = self.features(torch.bmm(points, turn).transpose(1, 2))
        loose = (torch.eye(3, dtype=points.dtype) - torch.bmm(turn, turn.transpose(1, 2))).norm(dim=(1, 2)).mean()
        return F.cross_entropy(self.head(torch.max(x, 2).values), label) + 0.01 * loose


@field("points: convolution over nearest neighbours", points=normal(4, 9, 3), label=whole_numbers(3, 4, 9))
class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge = nn.Conv2d(6, 8, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(16, 3)

    def forward(self, points, label):
        nearest = torch.cdist(points, points).topk(4, largest=False).indices
        rows = torch.arange(points.shape[0]).view(-1, 1, 1)
        around = points[rows, nearest]
        centre = points.unsqueeze(2).expand_as(around)
        edges = torch.cat([around - centre, centre], -1).permute(0, 3, 1, 2)
        local = F.leaky_relu(self.norm(self.edge(edges)), 0.2).max(-1)[0]
        both = torch.cat([local, local.max(-1, keepdim=True)[0].repeat(1, 1, local.shape[-1])], 1)
        return F.cross_entropy(self.head(both.transpose(1, 2)).flatten(0, 1), label.flatten())


@field("points: autoencoder under the Chamfer distance", points=normal(6, 10, 3))
class Chamfer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = mlp(3, 16, 8, act=nn.ReLU)
        self.decode = mlp(8, 16, 7 * 3, act=nn.ReLU)

    def forward(self, points):
        code = self.encode(points).max(1).values
        made = self.decode(code).reshape(-1, 7, 3)
        distance = (points[:, :, None] - made[:, None]).square().sum(-1)
        return distance.min(2).values.mean() + distance.min(dim=1)[0].mean() + 1e-2 * made.abs().sum((1, 2)).mean()


@field(
    "graphs: convolution",
    x=normal(12, 6),
    edges=whole_numbers(12, 2, 30),
    label=lambda: torch.tensor([0, 1, 2, -1, 1, -1, -1, 2, 0, 0, -1, 1]),
)
class GraphConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)

    def spread(self, x, source, target):
        degree = torch.ones(x.shape[0], dtype=x.dtype).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        scale = degree.rsqrt()
        message = x[source] * (scale[source] * scale[target]).unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, target, message) + x / degree[:, None]

    def forward(self, x, edges, label):
        source, target = edges
        h = F.dropout(F.relu(self.spread(self.first(x), source, target)), 0.2, self.training)
        return F.cross_entropy(self.spread(self.second(h), source, target), label, ignore_index=-1)


@field("graphs: attention by scattered softmax", x=normal(10, 4), edges=whole_numbers(10, 2, 24), y=normal(10))
class GraphAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(4, 2 * 6, bias=False)
        self.left, self.right = weights(2, 6), weights(2, 6)
        self.head = nn.Linear(12, 1)

    def forward(self, x, edges, y):
        source, target = edges[0], edges[1]
        h = self.value(x).view(-1, 2, 6)
        score = F.leaky_relu((h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target], 0.2)
        place = target[:, None].expand_as(score)
        top = torch.full((10, 2), -1e9, dtype=x.dtype).scatter_reduce(0, place, score.detach(), "amax")
        top = top.gather(0, place)
        weight = (score - top).exp()
        total = torch.zeros(10, 2, dtype=x.dtype).scatter_add(0, place, weight)
        weight = weight / (total.gather(0, place) + 1e-9)
        out = torch.zeros(10, 2, 6, dtype=x.dtype).index_add(0, target, weight[..., None] * h.index_select(0, source))
        return F.smooth_l1_loss(self.head(F.elu(out.flatten(1))).squeeze(-1), y)


@field("chemistry: energies of molecules", kinds=whole_numbers(5, 4, 7), places=normal(4, 7, 3), energy=normal(4))
class Molecules(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 8, padding_idx=0)
        self.register_buffer("centres", torch.linspace(0, 3, 6))
        self.filters = nn.ModuleList(mlp(6, 8, 8, act=nn.Softplus) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = mlp(8, 5, 1, act=nn.SiLU)

    def forward(self, kinds, places, energy):
        atom = kinds != 0
        between = places[:, :, None] - places[:, None]
        distance = (between.square().sum(-1) + 1e-12).sqrt()
        pair = atom[:, :, None] & atom[:, None, :] & ~torch.eye(7, dtype=torch.bool)
        cut = 0.5 * (torch.cos(distance.clamp(max=3.0) * math.pi / 3) + 1) * pair
        basis = torch.exp(-4 * (distance.unsqueeze(-1) - self.centres) ** 2)
        h = self.embed(kinds)
        for make, update in zip(self.filters, self.updates):
            h = h + update(torch.einsum("bijc,bij,bjc->bic", make(basis), cut, h))
        return F.mse_loss((self.head(h).squeeze(-1) * atom).sum(1), energy)


# -- tabular data and recommendation ----------------------------------------------------------------------------------


def with_gaps(*shape):
    """Numbers of which some are missing."""

    def make():
        x = torch.randn(shape, dtype=torch.float64)
        return x.masked_fill(torch.rand(shape) < 0.2, float("nan"))

    return make


@field("tabular: transformer over features", numbers=with_gaps(6, 5), kinds=whole_numbers(4, 6, 3), y=normal(6))
class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift, self.missing = weights(5, 8), weights(5, 8), weights(5, 8)
        self.embed = nn.Embedding(12, 8)
        self.register_buffer("offsets", torch.arange(3) * 4)
        self.cls = weights(8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, numbers, kinds, y):
        gone = torch.isnan(numbers).unsqueeze(-1)
        known = torch.nan_to_num(numbers).unsqueeze(-1) * self.scale + self.shift
        tokens = torch.cat([torch.where(gone, self.missing, known), self.embed(kinds + self.offsets)], 1)
        tokens = torch.cat([self.cls.expand(len(tokens), 1, -1), tokens], dim=1)
        return F.huber_loss(self.head(self.block(tokens)[:, 0]).squeeze(1), y, delta=0.7)


@field("tabular: oblivious trees", x=normal(10, 6), y=whole_numbers(2, 10))
class Trees(nn.Module):
    def __init__(self):
        super().__init__()
        self.choose = weights(6, 5, 3)
        self.threshold, self.log_heat = weights(5, 3), nn.Parameter(torch.zeros(5, 3))
        self.leaves = weights(5, 8, 2)
        self.register_buffer("paths", torch.tensor([[leaf >> d & 1 for d in range(3)] for leaf in range(8)]).float())

    def forward(self, x, y):
        feature = torch.einsum("bf,ftd->btd", x, self.choose.softmax(0))
        right = torch.sigmoid((feature - self.threshold) * torch.exp(-self.log_heat))
        sides = torch.stack([1 - right, right], -1)
        paths = F.one_hot(self.paths.long(), 2).to(x.dtype)
        reach = torch.einsum("btds,lds->btld", sides, paths).prod(-1)
        return F.nll_loss(F.log_softmax(torch.einsum("btl,tlc->bc", reach, self.leaves), -1), y)


@field("recommendation: factorisation machine", ids=whole_numbers(30, 10, 4), values=uniform(10, 4), click=coins(10))
class FactorisationMachine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.factors = nn.Embedding(30, 1), nn.Embedding(30, 6)
        self.bias = nn.Parameter(torch.zeros(1))
        self.deep = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, ids, values, click):
        v = self.factors(ids) * values[..., None]
        pairs = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(-1)
        logit = self.bias + (self.linear(ids).squeeze(-1) * values).sum(1) + pairs + self.deep(v.flatten(1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logit, click, pos_weight=torch.tensor(2.0, dtype=v.dtype))


@field(
    "recommendation: bags of items",
    history=whole_numbers(20, 18),
    starts=lambda: torch.tensor([0, 3, 3, 9, 12, 17]),
    liked=whole_numbers(20, 6),
    other=whole_numbers(20, 6, 3),
)
class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 7, mode="mean")
        self.items = nn.Embedding(20, 7)
        self.bias = nn.Embedding(20, 1)

    def forward(self, history, starts, liked, other):
        user = F.normalize(self.bag(history, starts), dim=-1)
        good = (user * self.items(liked)).sum(-1) + self.bias(liked).squeeze(-1)
        bad = torch.bmm(self.items(other), user.unsqueeze(-1)).squeeze(-1) + self.bias(other).squeeze(-1)
        return -F.logsigmoid(good[:, None] - bad).mean() + 1e-3 * self.items.weight.pow(2).sum()


# -- densities and codes ----------------------------------------------------------------------------------------------


@field("density: mixture of normals", x=normal(12, 3), y=normal(12, 2))
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(3, 12, 12)
        self.mix, self.mean, self.spread = nn.Linear(12, 4), nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x, y):
        h = torch.tanh(self.body(x))
        mean, spread = self.mean(h).view(-1, 4, 2), F.softplus(self.spread(h)).view(-1, 4, 2) + 1e-3
        each = -0.5 * ((y[:, None] - mean) / spread) ** 2 - spread.log() - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(F.log_softmax(self.mix(h), dim=-1) + each.sum(-1), dim=-1).mean()


@field("density: coupling layers", x=normal(8, 5))
class Couplings(nn.Module):
    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(mlp(5, 8, 10) for _ in range(3))
        self.register_buffer("masks", torch.tensor([[1.0, 0, 1, 0, 1], [0, 1, 0, 1, 0], [1, 1, 0, 0, 1]]))

    def forward(self, x):
        log_det = x.new_zeros(x.shape[0])
        for net, mask in zip(self.nets, self.masks):
            s, t = net(x * mask).chunk(2, dim=-1)
            s = torch.tanh(s) * (1 - mask)
            x = x * mask + (1 - mask) * (x * s.exp() + t)
            log_det += s.sum(-1)
        return -(-0.5 * (x**2 + math.log(2 * math.pi)).sum(-1) + log_det).mean()


@field("density: triangular and dense flows", x=normal(6, 4))
class Triangular(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))
        self.lower, self.upper, self.log_diagonal = weights(4, 4), weights(4, 4), weights(4)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        x = x @ self.dense.t()
        lower = torch.tril(self.lower, -1) + torch.eye(4, dtype=x.dtype)
        upper = torch.triu(self.upper, 1) + torch.diag(self.log_diagonal.exp())
        z = F.linear(torch.asinh(x), lower @ upper, self.shift)
        x = torch.linalg.solve_triangular(lower, z.t(), upper=False).t()
        log_det = torch.slogdet(self.dense)[1] + self.log_diagonal.sum()
        return 0.5 * x.square().sum(-1).mean() - log_det + 0.1 * z.abs().mean()


@field("density: variational autoencoder", x=uniform(8, 12))
class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = mlp(12, 10, 6, act=nn.ELU), mlp(3, 10, 12, act=nn.ELU)

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, -1)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        missed = F.binary_cross_entropy(torch.sigmoid(self.decode(z)), x, reduction="sum") / x.shape[0]
        return missed - 0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()


@field("codes: quantised autoencoder with running codebook", x=normal(6, 3, 8))
class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Conv1d(3, 4, 4, 2, 1), nn.ConvTranspose1d(4, 3, 4, 2, 1)
        self.register_buffer("codes", torch.randn(7, 4))
        self.register_buffer("counts", torch.ones(7))
        self.register_buffer("sums", torch.randn(7, 4))

    def forward(self, x):
        z = self.encode(x).permute(0, 2, 1)
        flat = z.reshape(-1, 4)
        place = torch.cdist(flat, self.codes).argmin(-1)
        chosen = F.embedding(place, self.codes).view_as(z)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(place, 7).to(flat.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ flat, alpha=0.1)
                self.codes.copy_(self.sums / (self.counts + 1e-5).unsqueeze(1))
        straight = z + (chosen - z).detach()
        return F.mse_loss(self.decode(straight.transpose(1, 2)), x) + 0.25 * F.mse_loss(z, chosen.detach())


@field("codes: categories by Gumbel's trick", x=uniform(8, 9))
class Gumbel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = mlp(9, 12, 12, act=nn.ReLU), nn.Linear(12, 9)

    def forward(self, x):
        logits = self.encode(x).view(-1, 3, 4)
        drawn = torch.rand_like(logits).clamp(1e-9, 1 - 1e-9)
        soft = F.softmax((logits - torch.log(-torch.log(drawn))) / 0.7, -1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        code = hard - soft.detach() + soft
        q = F.softmax(logits, -1)
        divergence = (q * (torch.log(q + 1e-20) - math.log(1 / 4))).sum((1, 2)).mean()
        return F.mse_loss(self.decode(code.flatten(1)), x) + 0.1 * divergence


@field("codes: capsules", image=normal(4, 1, 9, 9), label=whole_numbers(3, 4))
class Capsules(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2)
        self.route = weights(3, 32, 5, 4)

    @staticmethod
    def squash(x):
        size = x.square().sum(-1, keepdim=True)
        return x * size / (1 + size) / (size + 1e-9).sqrt()

    def forward(self, image, label):
        parts = self.squash(self.conv(image).view(image.shape[0], -1, 4))
        votes = torch.einsum("kpij,bpj->bkpi", self.route, parts)
        logits = torch.zeros_like(votes[..., 0])
        for turn in range(3):
            whole = self.squash((logits.softmax(1)[..., None] * votes).sum(2))
            if turn < 2:
                logits = logits + torch.matmul(votes, whole.unsqueeze(-1)).squeeze(-1)
        length = (whole.square().sum(-1) + 1e-9).sqrt()
        one = F.one_hot(label, 3).to(length.dtype)
        return (one * F.relu(0.9 - length) ** 2 + 0.5 * (1 - one) * F.relu(length - 0.1) ** 2).sum(1).mean()


# -- physics ----------------------------------------------------------------------------------------------------------


@field("physics: neural differential equation", start=normal(6, 2), path=normal(4, 6, 2))
class Differential(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = mlp(3, 8, 2)

    def slope(self, t, y):
        return self.field(torch.cat([y**3, torch.full_like(y[:, :1], t)], -1))

    def forward(self, start, path):
        y, seen, h = start, [], 0.1
        for step in range(4):
            t = step * h
            a = self.slope(t, y)
            b = self.slope(t + h / 2, y + h / 2 * a)
            c = self.slope(t + h / 2, y + h / 2 * b)
            d = self.slope(t + h, y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
            seen.append(y)
        return (torch.stack(seen) - path).abs().mean()


@field("physics: Hamiltonian by leapfrog", q=normal(6, 3), p=normal(6, 3), q_end=normal(6, 3), p_end=normal(6, 3))
class Hamiltonian(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 10), weights(10)
        self.log_mass = nn.Parameter(torch.zeros(3))

    def force(self, q):
        return -((1 - torch.tanh(self.inner(q)) ** 2) * self.outer) @ self.inner.weight

    def energy(self, q, p):
        return torch.tanh(self.inner(q)) @ self.outer + 0.5 * (p * p * torch.exp(-self.log_mass)).sum(-1)

    def forward(self, q, p, q_end, p_end):
        before = self.energy(q, p)
        for _ in range(4):
            p = p + 0.05 * self.force(q)
            q = q + 0.1 * p * torch.exp(-self.log_mass)
            p = p + 0.05 * self.force(q)
        drift = (self.energy(q, p) - before).pow(2).mean()
        return F.mse_loss(torch.cat([q, p], 1), torch.cat([q_end, p_end], 1)) + drift


@field("physics: residuals of Burgers' equation", inside=uniform(14, 2), edge=uniform(6, 1))
class Burgers(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(2, 12, 12, 1)
        self.viscosity = nn.Parameter(torch.tensor(0.1))

    def forward(self, inside, edge):
        h = 0.05
        dt, dx = torch.tensor([h, 0.0], dtype=inside.dtype), inside.new_tensor([0.0, h])
        u, before, after = (self.net(inside + s * dt) for s in (0, -1, 1))
        left, right = self.net(inside - dx), self.net(inside + dx)
        u_x, u_xx = (right - left) / (2 * h), (right - 2 * u + left) / h**2
        residual = (after - before) / (2 * h) + u * u_x - F.softplus(self.viscosity) * u_xx
        walls = self.net(F.pad(edge, (0, 1), value=1.0)) - self.net(F.pad(edge, (0, 1), value=-1.0))
        begin = self.net(F.pad(edge, (1, 0))) + torch.sin(math.pi * edge)
        return residual.square().mean() + walls.square().mean() + begin.square().mean()


@field("physics: Fourier operator", field=normal(4, 16, 1), target=normal(4, 16, 1))
class FourierOperator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.down = nn.Linear(2, 6), nn.Linear(6, 1)
        self.spectral = nn.ParameterList(weights(6, 6, 5, 2) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv1d(6, 6, 1) for _ in range(2))

    def forward(self, field, target):
        grid = torch.linspace(0, 1, 16, dtype=field.dtype).view(1, 16, 1).expand(4, 16, 1)
        x = self.lift(torch.cat([field, grid], -1)).transpose(1, 2)
        for spectral, local in zip(self.spectral, self.local):
            modes = torch.fft.rfft(x)[..., :5]
            mixed = torch.einsum("bim,iom->bom", modes, torch.view_as_complex(spectral))
            x = F.gelu(torch.fft.irfft(F.pad(mixed, (0, 4)), n=16) + local(x))
        error = (self.down(x.transpose(1, 2)) - target).flatten(1)
        return (error.norm(dim=1) / target.flatten(1).norm(dim=1)).mean()


@field("physics: diffusion on a torus", heat=normal(4, 8, 8), later=normal(4, 8, 8))
class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.conductivity = nn.Parameter(torch.randn(8, 8) * 0.1)
        self.source = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")

    def forward(self, heat, later):
        k = torch.sigmoid(self.conductivity)
        for _ in range(3):
            flow = sum(k * (heat.roll(s, d) - heat) for s in (1, -1) for d in (1, 2))
            heat = heat + 0.2 * flow + 0.1 * torch.sin(self.source(heat.unsqueeze(1)).squeeze(1))
        rough = (k.diff(dim=0).abs().sum() + torch.diff(k, dim=1).abs().sum()) / 64
        return torch.nn.functional.mse_loss(heat, later) + 1e-2 * rough


@field("physics: representation by sines", places=uniform(20, 2), colour=uniform(20, 3))
class Sines(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("directions", torch.randn(2, 6))
        self.layers = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 3)

    def forward(self, places, colour):
        turned = 2 * math.pi * places @ self.directions
        x = torch.cat([turned.sin(), turned.cos()], dim=-1)
        for layer in self.layers:
            x = torch.sin(3.0 * layer(x))
        mse = F.mse_loss(torch.sigmoid(self.head(x)), colour)
        return 10 * torch.log10(mse)


@field("control: Kalman filter", seen=normal(4, 5, 2))
class Kalman(nn.Module):
    def __init__(self):
        super().__init__()
        self.move, self.look = nn.Parameter(0.7 * torch.eye(3) + 0.1 * torch.randn(3, 3)), weights(2, 3)
        self.log_noise, self.log_error = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))

    def forward(self, seen):
        mean = seen.new_zeros(seen.shape[0], 3)
        cov = torch.eye(3, dtype=seen.dtype).expand(seen.shape[0], 3, 3)
        noise, error, loss = torch.diag(self.log_noise.exp()), torch.diag_embed(self.log_error.exp()), 0.0
        for t in range(seen.shape[1]):
            mean, cov = mean @ self.move.T, self.move @ cov @ self.move.mT + noise
            missed = (seen[:, t] - mean @ self.look.T).unsqueeze(-1)
            spread = self.look @ cov @ self.look.mT + error
            root = torch.linalg.cholesky(spread)
            white = torch.linalg.solve_triangular(root, missed, upper=False)
            loss = loss + 0.5 * white.square().sum((1, 2)) + root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            gain = torch.linalg.solve(spread, self.look @ cov).mT
            mean = mean + (gain @ missed).squeeze(-1)
            cov = cov - gain @ self.look @ cov
        return loss.mean()


# -- reinforcement learning -------------------------------------------------------------------------------------------


@field(
    "control: PPO",
    state=normal(12, 5),
    action=whole_numbers(4, 12),
    old=lambda: -torch.rand(12).double() - 1,
    gain=normal(12),
    value=normal(12),
)
class PPO(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(5, 16, 16)
        self.actor, self.critic = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, state, action, old, gain, value):
        h = self.body(state).tanh()
        log_p = self.actor(h).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        ratio = (log_p.gather(1, action.unsqueeze(1)).squeeze(1) - old).exp()
        normed = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy = torch.max(-normed * ratio, -normed * ratio.clamp(0.8, 1.2)).mean()
        now, target = self.critic(h).flatten(), gain + value
        near = value + (now - value).clamp(-0.2, 0.2)
        return policy + 0.25 * torch.maximum((now - target) ** 2, (near - target) ** 2).mean() - 0.01 * entropy


@field(
    "control: double dueling DQN",
    state=normal(8, 4),
    action=whole_numbers(3, 8, 1),
    reward=normal(8),
    after=normal(8, 4),
    done=coins(8),
    weight=uniform(8),
)
class DuelingDQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = (nn.ModuleList([mlp(4, 12, 12, act=nn.ReLU), nn.Linear(12, 4)]) for _ in range(2))
        self.target.requires_grad_(False)

    @staticmethod
    def values(net, x):
        value, gain = net[1](F.relu(net[0](x))).split([1, 3], dim=-1)
        return value + gain - gain.mean(-1, keepdim=True)

    def forward(self, state, action, reward, after, done, weight):
        with torch.no_grad():
            best = self.values(self.online, after).argmax(1, keepdim=True)
            future = self.values(self.target, after).gather(1, best).squeeze(1)
            target = reward + 0.99 * future * (1 - done)
        now = self.values(self.online, state).gather(1, action)[:, 0]
        return (weight * F.smooth_l1_loss(now, target, reduction="none")).mean()


@field(
    "control: distributional RL",
    state=normal(6, 4),
    action=whole_numbers(3, 6),
    reward=normal(6),
    after=normal(6, 4),
    done=lambda: torch.tensor([0, 1, 0, 0, 1, 0]).bool(),
)
class Distributional(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(4, 12, 3 * 11, act=nn.ReLU)
        self.register_buffer("support", torch.linspace(-2, 2, 11))

    def forward(self, state, action, reward, after, done):
        rows = torch.arange(6)
        with torch.no_grad():
            p = self.net(after).view(6, 3, 11).softmax(-1)
            p = p[rows, (p * self.support).sum(-1).argmax(1)]
            moved = (reward[:, None] + 0.9 * (~done).double()[:, None] * self.support).clamp(-2, 2)
            place = (moved + 2) / 0.4
            low, high = place.floor().long().clamp(0, 10), place.ceil().long().clamp(0, 10)
            low = torch.where((low == high) & (high > 0), low - 1, low)
            high = torch.where(low == high, high + 1, high)
            target = torch.zeros_like(p)
            base = (rows * 11)[:, None]
            target.view(-1).index_add_(0, (low + base).view(-1), (p * (high - place)).view(-1))
            target.view(-1).index_add_(0, (high + base).view(-1), (p * (place - low)).view(-1))
        log_p = self.net(state).view(6, 3, 11).log_softmax(-1)[rows, action]
        return -(target * log_p).sum(1).mean()


@field(
    "control: recurrent actor and critic",
    states=normal(4, 6, 3),
    actions=whole_numbers(2, 4, 6),
    rewards=normal(4, 6),
    dones=coins(4, 6),
)
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 6, batch_first=True)
        self.actor, self.critic = nn.Linear(6, 2), nn.Linear(6, 1)

    def forward(self, states, actions, rewards, dones):
        h, _ = self.rnn(states)
        value = self.critic(h).squeeze(-1)
        late, gains, old = torch.zeros(4, dtype=states.dtype), [], value.detach()
        for t in reversed(range(6)):
            after = old[:, t + 1] if t < 5 else torch.zeros_like(late)
            error = rewards[:, t] + 0.9 * after * (1 - dones[:, t]) - old[:, t]
            late = error + 0.9 * 0.95 * (1 - dones[:, t]) * late
            gains.insert(0, late)
        gain = torch.stack(gains, 1)
        log_p = -F.cross_entropy(self.actor(h).flatten(0, 1), actions.flatten(), reduction="none").view(4, 6)
        return -(log_p * gain).mean() + 0.5 * F.mse_loss(value, gain + old)


@field("control: soft actor critic", state=normal(6, 4), action=normal(6, 2), target=normal(6))
class SoftActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = mlp(4, 10, 4, act=nn.ReLU)
        self.critics = nn.ModuleList(mlp(6, 10, 1, act=nn.ReLU) for _ in range(2))
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, state, action, target):
        mean, log_std = self.actor(state).chunk(2, -1)
        std = log_std.clamp(-5, 2).exp()
        raw = mean + std * torch.randn(mean.shape, dtype=mean.dtype)
        log_p = (-0.5 * ((raw - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        log_p = log_p - (2 * (math.log(2) - raw - F.softplus(-2 * raw))).sum(-1)
        q = torch.min(*(c(torch.cat([state, raw.tanh()], -1)).squeeze(-1) for c in self.critics))
        now = torch.stack([c(torch.cat([state, action], -1)).squeeze(-1) for c in self.critics])
        actor = (self.log_alpha.exp().detach() * log_p - q).mean()
        return actor - (self.log_alpha * (log_p + 2).detach()).mean() + ((now - target) ** 2).mean(1).sum()


# -- finance, forecasting and medicine --------------------------------------------------------------------------------


@field("finance: portfolio by Sharpe's ratio", returns=normal(12, 7, 5))
class Portfolio(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(5, 8, batch_first=True, nonlinearity="relu")
        self.head = nn.Linear(8, 5)

    def forward(self, returns):
        past, last = returns[:, :-1], returns[:, -1]
        weight = F.softmax(self.head(self.rnn(past)[0][:, -1]), dim=-1)
        centred = past - past.mean(1, keepdim=True)
        cov = torch.matmul(centred.transpose(1, 2), centred) / (past.shape[1] - 1)
        risk = torch.einsum("bi,bij,bj->b", weight, cov, weight).sqrt()
        gain = (weight * last).sum(-1)
        turnover = (weight[1:] - weight[:-1]).abs().sum(-1)
        return -gain.mean() / (gain.std(unbiased=False) + 1e-6) + 0.1 * risk.mean() + 0.05 * turnover.mean()


@field("finance: options under a learned volatility", spot=uniform(10, 6), strike=uniform(6), time=uniform(6))
class Options(nn.Module):
    def __init__(self):
        super().__init__()
        self.smile = mlp(2, 8, 1, act=nn.Softplus)
        self.rate = nn.Parameter(torch.tensor(0.02))

    @staticmethod
    def below(x):
        return 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def forward(self, spot, strike, time):
        spot, strike, time = spot + 0.5, strike + 0.5, time + 0.1
        money = torch.log(spot / strike)
        features = torch.stack((money, time.expand_as(money)), dim=-1)
        sigma = 0.1 + F.softplus(self.smile(features)).squeeze(-1)
        d1 = (money + (self.rate + 0.5 * sigma**2) * time) / (sigma * time.sqrt())
        d2 = d1 - sigma * torch.sqrt(time)
        call = spot * self.below(d1) - strike * torch.exp(-self.rate * time) * self.below(d2)
        paid = F.relu(spot * 1.05 - strike)
        arbitrage = F.relu(-(call[1:] - call[:-1]) * torch.sign(spot[1:] - spot[:-1])).sum()
        return (call - paid).square().mean() + arbitrage


@field("finance: volatility with heavy tails", returns=normal(8, 8))
class Volatility(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor([-2.0, -1.0, 1.0]))
        self.tail = nn.Parameter(torch.tensor(1.5))
        self.mean = nn.Linear(1, 1)

    def forward(self, returns):
        error = returns[:, 1:] - self.mean(returns[:, :-1, None]).squeeze(-1)
        omega, (alpha, beta, _) = F.softplus(self.raw[0]), F.softmax(F.pad(self.raw[1:], (0, 1)), 0)
        variance, path = error.var(dim=1), []
        for t in range(error.shape[1]):
            path.append(variance)
            variance = omega + alpha * error[:, t] ** 2 + beta * variance
        variance, nu = torch.stack(path, 1), 2 + F.softplus(self.tail)
        log_p = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * torch.log((nu - 2) * math.pi * variance)
        return -(log_p - (nu + 1) / 2 * torch.log1p(error**2 / ((nu - 2) * variance))).sum(1).mean()


@field("forecasting: quantiles of a decomposed series", series=normal(6, 15, 2), future=normal(6, 4, 2))
class Quantiles(nn.Module):
    def __init__(self):
        super().__init__()
        self.trend, self.season = nn.Linear(15, 12), nn.Linear(15, 12)
        self.scale, self.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
        self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9]))

    def forward(self, series, future):
        mean, std = series.mean(1, keepdim=True).detach(), (series.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        x = ((series - mean) / std * self.scale + self.shift).transpose(1, 2)
        smooth = F.avg_pool1d(F.pad(x, (2, 2), mode="replicate"), kernel_size=5, stride=1)
        raw = (self.trend(smooth) + self.season(x - smooth)).unflatten(-1, (4, 3))
        rising = torch.cat([raw[..., :1], F.softplus(raw[..., 1:])], -1).cumsum(-1).transpose(1, 2)
        found = (rising - self.shift[:, None]) / self.scale[:, None] * std[..., None] + mean[..., None]
        missed = future.unsqueeze(-1) - found
        return torch.maximum(self.levels * missed, (self.levels - 1) * missed).mean()


@field("forecasting: alignment by dynamic programming", x=normal(4, 3, 3), y=normal(4, 4, 3))
class SoftAlignment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = mlp(3, 8, 4)

    def forward(self, x, y):
        cost = (self.embed(x)[:, :, None] - self.embed(y)[:, None]).square().sum(-1)
        far = torch.full_like(cost[:, 0, 0], 1e4)
        above = [torch.zeros_like(far)] + [far] * y.shape[1]
        for i in range(x.shape[1]):
            row = [far]
            for j in range(y.shape[1]):
                three = torch.stack([above[j], above[j + 1], row[j]], -1)
                row.append(cost[:, i, j] - 0.5 * torch.logsumexp(-three / 0.5, -1))
            above = row
        return above[-1].mean()


@field("medicine: survival under proportional hazards", x=normal(12, 6), time=uniform(12), event=coins(12))
class Survival(nn.Module):
    def __init__(self):
        super().__init__()
        self.risk = nn.Sequential(nn.Linear(6, 8), nn.SELU(), nn.AlphaDropout(0.0), nn.Linear(8, 1, bias=False))

    def forward(self, x, time, event):
        risk = self.risk(x).squeeze(-1)
        order = time.argsort(descending=True)
        risk, event = risk[order], event[order]
        loss = -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum().clamp(min=1)
        late = torch.sort(time)[0]
        pairs = (late[:, None] < late[None]).to(x.dtype) * torch.sigmoid(risk[None] - risk[:, None])
        return loss + 0.1 * pairs.sum() / pairs.numel()


# -- architectures ----------------------------------------------------------------------------------------------------


@field("architecture: hypernetwork", task=normal(6, 4), x=normal(6, 7, 3), y=normal(6, 7))
class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = mlp(4, 10, 3 * 6 + 6 + 6 + 1)

    def forward(self, task, x, y):
        first, bias, second, last = self.make(task).split([18, 6, 6, 1], -1)
        h = torch.sin(torch.baddbmm(bias.unsqueeze(1), x, first.view(-1, 3, 6)))
        return F.l1_loss(torch.einsum("bnh,bh->bn", h, second) + last, y)


@field("architecture: memory that is written", x=normal(4, 5, 6), place=whole_numbers(8, 4, 5), y=normal(4, 5, 6))
class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = weights(8, 6)
        self.key, self.value, self.gate = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x, place, y):
        memory, read = self.start.expand(x.shape[0], 8, 6), []
        for t in range(x.shape[1]):
            match = F.cosine_similarity(self.key(x[:, t]).unsqueeze(1), memory, dim=-1)
            read.append(torch.bmm((5 * match).softmax(-1).unsqueeze(1), memory).squeeze(1))
            where = place[:, t].view(-1, 1, 1).expand(-1, 1, 6)
            share = torch.sigmoid(self.gate(x[:, t])).unsqueeze(1)
            new = torch.lerp(memory.gather(1, where), self.value(x[:, t])[:, None], share)
            memory = memory.scatter(1, where, new)
        return F.mse_loss(torch.stack(read, dim=1), y)


@field("architecture: matching by optimal transport", left=normal(4, 5, 3), right=normal(4, 7, 3))
class Transport(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.spare = nn.Parameter(torch.tensor(0.5))

    def forward(self, left, right):
        a, b = (F.normalize(self.embed(x), dim=-1) for x in (left, right))
        edge = F.pad(torch.zeros(5, 7, dtype=a.dtype), (0, 1, 0, 1), value=1.0)
        scores = F.pad(a @ b.mT, (0, 1, 0, 1)) + self.spare * edge
        log_a, log_b = torch.zeros(6, dtype=a.dtype), torch.zeros(8, dtype=a.dtype)
        log_a[-1], log_b[-1] = math.log(7), math.log(5)
        u, v = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[:, 0])
        for _ in range(4):
            u = log_a - torch.logsumexp(scores + v.unsqueeze(1), dim=2)
            v = log_b - torch.logsumexp(scores + u.unsqueeze(2), dim=1)
        plan = scores + u[:, :, None] + v[:, None]
        moved = plan.exp()[:, :-1, :-1] * torch.cdist(left, right)
        return moved.sum((1, 2)).mean() - plan.diagonal(dim1=1, dim2=2).mean()


@field("architecture: piecewise linear features", x=uniform(10, 4), y=normal(10))
class Splines(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("knots", torch.linspace(0, 1, 7))
        self.heights = weights(4, 7, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x, y):
        place = torch.bucketize(x, self.knots[1:-1], right=True)
        low, high = self.knots[place], self.knots[place + 1]
        share = ((x - low) / (high - low)).unsqueeze(-1)
        feature = torch.arange(4)
        value = self.heights[feature, place] * (1 - share) + self.heights[feature, place + 1] * share
        bent = self.heights.diff(n=2, dim=1).pow(2).mean()
        return F.mse_loss(self.head(torch.tanh(value.sum(1))).squeeze(-1), y) + 0.1 * bent


@field("architecture: attention with relative places", x=normal(4, 9, 8), y=normal(4, 9, 8))
class Relative(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.table = nn.Embedding(7, 2)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25]))

    def forward(self, x, y):
        q, k, v = self.qkv(x).view(4, 9, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        away = torch.arange(9)[None] - torch.arange(9)[:, None]
        bias = self.table(away.clamp(-3, 3) + 3).permute(2, 0, 1) - self.slopes.view(-1, 1, 1) * away.abs()
        score = (q @ k.transpose(-2, -1)) / math.sqrt(4) + bias
        score = score.masked_fill(away > 0, float("-inf"))
        mixed = F.dropout(score.softmax(-1), 0.1, self.training) @ v
        return F.mse_loss(x + self.out(mixed.transpose(1, 2).reshape(4, 9, 8)), y)


@field(
    "architecture: two towers and triplets",
    left=normal(8, 6),
    right=normal(8, 6),
    same=lambda: torch.tensor([1, -1, 1, 1, -1, 1, -1, -1]),
)
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.GELU(), nn.Linear(10, 4))
        self.heat = nn.Parameter(torch.tensor(1.0))

    def forward(self, left, right, same):
        a, b = self.tower(left), self.tower(right)
        scores = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T * self.heat.exp()
        own = F.cross_entropy(scores, torch.arange(8)) + F.cross_entropy(scores.t(), torch.arange(8))
        return own + F.cosine_embedding_loss(a, b, same, margin=0.2) + F.triplet_margin_loss(a, b, b.roll(1, 0))


# -- vision, geometry, statistics, language -------------------------------------------------------------------------


@field("vision: spatial transformer", image=normal(4, 2, 8, 6), label=whole_numbers(3, 4))
class SpatialTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.where, self.conv, self.head = nn.Linear(96, 6), nn.Conv2d(2, 6, 3), nn.Linear(6, 3)

    def forward(self, image, label):
        turn = self.where(image.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=image.dtype)
        grid = F.affine_grid(turn, list(image.shape), align_corners=False)
        seen = F.grid_sample(image, grid, align_corners=False, padding_mode="border")
        small = F.interpolate(seen, scale_factor=0.5, mode="bilinear", align_corners=False)
        x = F.adaptive_avg_pool2d(F.relu(self.conv(seen)), 1).flatten(1)
        return F.cross_entropy(self.head(x), label) + small.square().mean()


@field("vision: patches that are folded back", image=normal(4, 2, 8, 8))
class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms = weights(9, 18)

    def forward(self, image):
        patches = F.unfold(image, 3, padding=1, stride=1)
        sparse = F.softshrink(self.atoms @ patches, 0.3)
        count = F.fold(F.unfold(torch.ones_like(image), 3, padding=1), (8, 8), 3, padding=1)
        back = F.fold(self.atoms.t() @ sparse, (8, 8), 3, padding=1) / count
        return F.mse_loss(back, image) + 0.1 * sparse.abs().mean()


@field("vision: teacher that is averaged", x=normal(8, 6), view=normal(8, 6))
class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(6, 5)
        self.register_buffer("weight", torch.randn(5, 6))
        self.register_buffer("centre", torch.zeros(1, 5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.randn(12, 5))

    def forward(self, x, view):
        with torch.no_grad():
            self.weight.lerp_(self.student.weight, 0.1)
            target = F.linear(view, self.weight)
            sharp = F.softmax((target - self.centre) / 0.1, -1)
            self.centre.mul_(0.9).add_(target.mean(0, keepdim=True) * 0.1)
            self.steps += 1
            self.queue = torch.cat([target, self.queue[:-8]])
        out = self.student(x)
        other = (F.normalize(out, dim=1) @ F.normalize(self.queue, dim=1).t() / 0.5).logsumexp(1)
        return -(sharp * F.log_softmax(out, -1)).sum(-1).mean() + 0.1 * other.mean()


@field("geometry: rotations and rigid motions", source=normal(6, 5, 3), target=normal(6, 5, 3))
class Rigid(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = mlp(3, 6, 4)
        self.weight = nn.Linear(4, 1)

    def forward(self, source, target):
        w = self.weight(self.embed(source)).softmax(1)
        a, b = source - (w * source).sum(1, keepdim=True), target - (w * target).sum(1, keepdim=True)
        axis = torch.linalg.cross(a, b).mul(w).sum(1)
        quaternion = F.normalize(torch.cat([torch.ones_like(axis[:, :1]), axis], -1), dim=-1)
        r, i, j, k = torch.unbind(quaternion, -1)
        rows = (
            1 - 2 * (j * j + k * k),
            2 * (i * j - k * r),
            2 * (i * k + j * r),
            2 * (i * j + k * r),
            1 - 2 * (i * i + k * k),
            2 * (j * k - i * r),
            2 * (i * k - j * r),
            2 * (j * k + i * r),
            1 - 2 * (i * i + j * j),
        )
        turn = torch.stack(rows, -1).unflatten(-1, (3, 3))
        volume = torch.linalg.det(turn + 0.1 * torch.eye(3, dtype=turn.dtype))
        return ((a @ turn.mT - b).norm(dim=-1) * w.squeeze(-1)).sum(1).mean() + 0.1 * volume.mean()


@field("statistics: whitening and spectra", x=normal(10, 5), y=normal(10))
class Whitening(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 4)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))

    def forward(self, x, y):
        z = self.net(x)
        z = z - z.mean(0)
        cov = z.T @ z / (len(z) - 1) + 1e-3 * torch.eye(4, dtype=z.dtype)
        values, vectors = torch.linalg.eigh(cov)
        white = z @ vectors @ torch.diag(values.rsqrt()) @ vectors.mT
        off = cov - torch.diag(torch.diagonal(cov))
        return F.mse_loss(self.head(white).squeeze(1), y) + off.pow(2).sum() / 4 + F.relu(1 - z.std(0)).mean()


@field("statistics: Gaussian process", x=normal(8, 3), y=normal(8), at=normal(6, 3), found=normal(6))
class GaussianProcess(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 2)
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.tensor(-1.0))

    def kernel(self, a, b):
        a, b = (self.embed(v) / self.log_scale.exp() for v in (a, b))
        return torch.exp(-0.5 * (a.pow(2).sum(-1, keepdim=True) + b.pow(2).sum(-1)[None] - 2 * a @ b.T).clamp_min(0))

    def forward(self, x, y, at, found):
        k = self.kernel(x, x) + (self.log_noise.exp() + 1e-6) * torch.eye(8, dtype=x.dtype)
        root = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y[:, None], root)
        fit = 0.5 * (y @ alpha.squeeze(1)) + root.diag().log().sum()
        return fit / 8 + F.mse_loss((self.kernel(at, x) @ alpha).squeeze(-1), found)


@field("statistics: robust regression", x=normal(10, 4), y=normal(10))
class Robust(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(4, 8, 1)
        self.tau = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, y):
        error = y - self.net(x).squeeze(-1)
        middle = error.detach().median()
        spread = (error - middle).abs().detach().quantile(0.75) + 1e-3
        worst = error.abs().topk(4).values.mean() + error.abs().kthvalue(5)[0]
        z = error / spread
        tukey = torch.where(z.abs() <= 2, 1 - (1 - (z / 2) ** 2) ** 3, torch.ones_like(z))
        expectile = (torch.sigmoid(self.tau) - (error < 0).to(error.dtype)).abs() * error**2
        return tukey.mean() + 0.1 * worst + expectile.mean() + 0.1 * torch.cummax(z, 0)[0].mean()


@field("language: Bayesian linear layers with memory cells", ids=whole_numbers(11, 4, 6))
class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, max_norm=None)
        self.cell = nn.LSTMCell(6, 6)
        self.mean, self.rho = weights(11, 6), nn.Parameter(torch.full((11, 6), -3.0))

    def forward(self, ids):
        h = c = torch.zeros(ids.shape[0], 6, dtype=self.mean.dtype)
        logits = []
        w = self.mean + F.softplus(self.rho) * torch.randn_like(self.mean)
        for t in range(ids.shape[1] - 1):
            h, c = self.cell(self.embed(ids[:, t]), (h, c))
            logits.append(F.linear(h, w))
        kl = (0.5 * (F.softplus(self.rho) ** 2 + self.mean**2) - F.softplus(self.rho).log() - 0.5).sum()
        missed = F.cross_entropy(torch.stack(logits, dim=1).transpose(1, 2), ids[:, 1:], reduction="sum")
        return missed / ids.numel() + 1e-3 * kl


@field("biology: hidden Markov chain", seen=whole_numbers(6, 4, 7), lengths=lambda: torch.tensor([7, 5, 2, 6]))
class HiddenMarkov(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.move, self.emit = weights(3), weights(3, 3), weights(3, 6)

    def forward(self, seen, lengths):
        move, emit = self.move.log_softmax(-1), self.emit.log_softmax(-1)
        alpha = self.start.log_softmax(0) + emit[:, seen[:, 0]].t()
        for t in range(1, seen.shape[1]):
            new = torch.logsumexp(alpha.unsqueeze(2) + move, 1) + emit.t()[seen[:, t]]
            alpha = torch.where((t < lengths)[:, None], new, alpha)
        return -(alpha.logsumexp(-1) / lengths).mean()


@field("physics: images by two-dimensional transforms", image=normal(4, 6, 8), mask=coins(4, 6, 8))
class Filters(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = weights(6, 5, 2)
        self.gain = nn.Parameter(torch.ones(6, 8))

    def forward(self, image, mask):
        k = torch.fft.rfft2(image, norm="ortho") * torch.complex(self.filter[..., 0], self.filter[..., 1])
        back = torch.fft.irfft2(k, s=(6, 8), norm="ortho")
        full = torch.fft.fftshift(torch.fft.fft2(back * self.gain), dim=(-2, -1))
        consistency = torch.view_as_real(full)[..., 0] * mask
        return (back - image).abs().mean() + 1e-2 * consistency.pow(2).mean() + 1e-2 * full.angle().cos().mean()


@field(
    "graphs: pooling of batches of graphs",
    x=normal(14, 4),
    edges=whole_numbers(14, 2, 20),
    label=whole_numbers(2, 4),
    graph=lambda: torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]),
)
class GraphPooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.eps = nn.Parameter(torch.zeros(1))
        self.head = nn.Bilinear(8, 8, 2)

    def forward(self, x, edges, label, graph):
        around = torch.zeros_like(x).scatter_add(0, edges[1].unsqueeze(-1).expand(-1, 4), x[edges[0]])
        h = self.mix((1 + self.eps) * x + around)
        place = graph[:, None].expand_as(h)
        mean = h.new_zeros(4, 8).scatter_reduce(0, place, h, "mean", include_self=False)
        top = h.new_zeros(4, 8).scatter_reduce(0, place, h, "amax", include_self=False)
        count = F.one_hot(graph, 4).sum(0).to(h.dtype)
        return F.cross_entropy(self.head(mean, top) / count.log1p()[:, None], label)


@field(
    "language: pointer with masks",
    x=normal(4, 7, 6),
    target=whole_numbers(3, 4),
    gone=lambda: torch.arange(7)[None] >= torch.tensor([[7], [3], [5], [6]]),
)
class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True, dropout=0.0)
        self.query, self.norm = weights(6), nn.LayerNorm(6)

    def forward(self, x, target, gone):
        mixed, weight = self.attend(x, x, x, key_padding_mask=gone)
        score = (self.norm(x + mixed) @ self.query).masked_fill(gone, torch.finfo(x.dtype).min)
        entropy = -(weight * weight.clamp_min(1e-9).log()).sum(-1)
        hit = (score.argmax(-1) == target).float().mean().detach()
        return F.cross_entropy(score, target) + 0.01 * (entropy * ~gone).sum() / (~gone).sum() + 0 * hit
