"""Memory of models of other fields: scans, group norms, graph nets, experts by einsum, attention under masks.

    python -m benchmarks.memory_models [model ...]      fails where a prediction is off by more than the bar

What plans say they hold beside what the fuller of the first and the last rank holds, as `benchmarks/memory.py` counts
it, under presets, the free plan, and within shares of the free plan's own peak.

Letters of dims: B rows, T time, C channels, N states or nodes, E experts or edges, K places of an expert, H heads.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import autopar
from autopar.letters import BadPreset
from benchmarks import memory

UNDER, OVER = 0.01, 0.05  # the bar


class Trained(nn.Module):
    """Blocks with residual connections, then the mean square of the distance to a target."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, y: Tensor, **about: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x, **about)
        return CausalLMOutput(loss=F.mse_loss(x, y))


class Scan(nn.Module):
    """A selective state space, its states by cumulative sums of logarithms."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.step, self.read = nn.Linear(width, width), nn.Linear(width, 2 * states)
        self.decay = nn.Parameter(torch.zeros(width, states))

    def forward(self, x_BTC: Tensor) -> Tensor:
        u_BTC, gate_BTC = self.into(x_BTC).chunk(2, -1)
        step_BTC = F.softplus(self.step(u_BTC))
        write_BTN, read_BTN = self.read(u_BTC).chunk(2, -1)
        log_BTCN = torch.cumsum(step_BTC[..., None] * -torch.exp(self.decay), 1)
        given_BTCN = (step_BTC * u_BTC)[..., None] * write_BTN[:, :, None]
        states_BTCN = torch.cumsum(given_BTCN * torch.exp(-log_BTCN), 1) * torch.exp(log_BTCN)
        return self.out((states_BTCN * read_BTN[:, :, None]).sum(-1) * F.silu(gate_BTC))


class ChunkedScan(nn.Module):
    """A scan with heads in the form of products: decays between the places of a chunk are a lower triangle."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.decay = nn.Linear(width, heads)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x_BTC).chunk(3, -1))
        log_BHT = torch.cumsum(F.logsigmoid(self.decay(x_BTC)), 1).transpose(1, 2)
        decay_BHTT = torch.exp(torch.tril(log_BHT[..., :, None] - log_BHT[..., None, :]))
        scores_BHTT = torch.einsum("bthd,bshd->bhts", q, k) * torch.tril(decay_BHTT)
        return self.out(torch.einsum("bhts,bshd->bthd", scores_BHTT, v).flatten(2))


class GatedUnit(nn.Module):
    """A gated recurrence that a cumulative logarithm of sums computes for all times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.gate, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate = self.gate(x_BTC)
        keep = torch.cumsum(F.logsigmoid(-gate), 1)
        value = F.logsigmoid(gate) + F.logsigmoid(self.into(x_BTC))
        return self.out(torch.exp(keep + torch.logcumsumexp(value - keep, 1)))


class ConvGroup(nn.Module):
    """A convolution behind a group norm and silu."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(x)))


class Denoiser(nn.Module):
    """A small U-net: group norms, attention over the places of the lower level, a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.down = ConvGroup(width), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm, self.qkv = nn.GroupNorm(4, 2 * width), nn.Conv2d(2 * width, 6 * width, 1)
        self.up, self.last = (
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        low = self.down(skip)
        q, k, v = (t.flatten(2).transpose(1, 2)[:, None] for t in self.qkv(self.norm(low)).chunk(3, 1))
        low = low + F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).view_as(low)
        return self.last(torch.cat([self.up(F.silu(low)), skip], 1))


class Sums(nn.Module):
    """A graph net that sums messages of neighbours with index_add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(width, width), nn.Linear(2 * width, width)

    def forward(self, x_NC: Tensor, source: Tensor, target: Tensor) -> Tensor:
        message_EC = torch.tanh(self.message(x_NC))[source]
        summed_NC = torch.zeros_like(x_NC).index_add(0, target, message_EC)
        return torch.tanh(self.update(torch.cat([x_NC, summed_NC], -1)))


class EdgeNet(nn.Module):
    """A graph net whose messages are made of both ends of an edge, gated, and scattered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.gate, self.update = (nn.Linear(n * width, width) for n in (2, 2, 1))

    def forward(self, x_NC: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ends = torch.cat([x_NC[source], x_NC[target]], -1)
        message_EC = F.silu(self.message(ends)) * torch.sigmoid(self.gate(ends))
        summed_NC = torch.zeros_like(x_NC).scatter_add(0, target[:, None].expand_as(message_EC), message_EC)
        return self.update(F.silu(summed_NC))


class GraphAttention(nn.Module):
    """Attention over the edges of a graph, with a softmax by scattered sums."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.value = heads, nn.Linear(width, width)
        self.left, self.right = nn.Linear(width, heads), nn.Linear(width, heads)

    def forward(self, x_NC: Tensor, source: Tensor, target: Tensor) -> Tensor:
        value_NHC = self.value(x_NC).unflatten(-1, (self.heads, -1))
        score_EH = torch.exp(F.leaky_relu(self.left(x_NC)[source] + self.right(x_NC)[target]))
        total_NH = torch.zeros_like(value_NHC[..., 0]).index_add(0, target, score_EH)
        weight_EH = score_EH / total_NH[target]
        summed = torch.zeros_like(value_NHC).index_add(0, target, weight_EH[..., None] * value_NHC[source])
        return F.elu(summed.flatten(1))


class Experts(nn.Module):
    """All experts on all tokens, mixed by a softmax, in einsums."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.route = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.route(x).softmax(-1)
        inner = torch.tanh(torch.einsum("btc,eci->btei", x, self.up))
        return torch.einsum("btei,eic,bte->btc", inner, self.down, weights)


class Dispatched(nn.Module):
    """Experts with a capacity: tokens are dispatched and combined by einsums over one-hot numbers."""

    def __init__(self, width: int, experts: int, places: int) -> None:
        super().__init__()
        self.places, self.route = places, nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        odds_BTE = self.route(x).softmax(-1)
        best_BT = odds_BTE.argmax(-1)
        one_BTE = F.one_hot(best_BT, odds_BTE.shape[-1]).to(x.dtype)
        place_BTE = (one_BTE.cumsum(1) - 1) * one_BTE
        is_kept = (place_BTE < self.places).to(x.dtype) * one_BTE
        place_BTEK = F.one_hot(place_BTE.long().clamp(max=self.places - 1), self.places).to(x.dtype)
        sent_BTEK = is_kept[..., None] * place_BTEK
        given = torch.einsum("btek,btc->ebkc", sent_BTEK, x)
        inner = F.gelu(torch.einsum("ebkc,eci->ebki", given, self.up))
        made = torch.einsum("ebki,eic->ebkc", inner, self.down)
        return torch.einsum("btek,ebkc->btc", sent_BTEK * odds_BTE[..., None], made)


class Gated(nn.Module):
    """Two gated products, the second by einsum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Parameter(torch.randn(3 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.einsum("bti,ic->btc", F.silu(self.gate(x)) * self.up(x), self.down)


class Masked(nn.Module):
    """Attention under a mask that is given: truth values, or numbers with a slope for each head."""

    def __init__(self, width: int, heads: int, is_sloped: bool = False) -> None:
        super().__init__()
        self.heads, self.is_sloped = heads, is_sloped
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.slope = nn.Parameter(torch.full((heads, 1, 1), -0.1), requires_grad=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if self.is_sloped:
            mask = self.slope * mask.to(x.dtype)
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Biased(nn.Module):
    """Attention with a learned bias for each head and distance."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.o = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Embedding(2 * length, heads)

    def forward(self, x: Tensor, distance: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = self.bias(distance).permute(2, 0, 1)[None]
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def _rows(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape), "y": torch.randn(*shape)}


def scan() -> memory.Case:
    return Trained(*(Scan(64, 8) for _ in range(2))), _rows(8, 64, 64), {}


def chunked_scan() -> memory.Case:
    return Trained(*(ChunkedScan(64, 4) for _ in range(2))), _rows(8, 128, 64), {}


def gated_unit() -> memory.Case:
    return Trained(*(GatedUnit(128) for _ in range(3))), _rows(16, 128, 128), {}


def conv_group() -> memory.Case:
    return Trained(*(ConvGroup(32) for _ in range(3))), _rows(8, 32, 32, 32), {}


def denoiser() -> memory.Case:
    return Trained(Denoiser(32), Denoiser(32)), _rows(8, 32, 32, 32), {}


def _graph(nodes: int, edges: int, width: int) -> dict[str, Tensor]:
    ends = {name: torch.randint(0, nodes, (edges,)) for name in ("source", "target")}
    return {**_rows(nodes, width), **ends}


def sums() -> memory.Case:
    return Trained(*(Sums(64) for _ in range(3))), _graph(4096, 16384, 64), {}


def edge_net() -> memory.Case:
    return Trained(*(EdgeNet(64) for _ in range(2))), _graph(2048, 8192, 64), {}


def graph_attention() -> memory.Case:
    return Trained(*(GraphAttention(64, 4) for _ in range(2))), _graph(2048, 8192, 64), {}


def experts() -> memory.Case:
    return Trained(*(Experts(64, 8) for _ in range(2))), _rows(8, 64, 64), {}


def dispatched() -> memory.Case:
    return Trained(*(Dispatched(64, 4, 32) for _ in range(2))), _rows(8, 64, 64), {}


def gated() -> memory.Case:
    return Trained(*(Gated(128) for _ in range(3))), _rows(8, 128, 128), {}


def masked(is_sloped: bool = False) -> memory.Case:
    length = 512
    mask = torch.ones(length, length).tril().bool().expand(1, 1, length, length).contiguous()
    if is_sloped:
        mask = (torch.arange(length)[:, None] - torch.arange(length)).abs().float()
    return Trained(*(Masked(64, 8, is_sloped) for _ in range(3))), {**_rows(2, length, 64), "mask": mask}, {}


def sloped() -> memory.Case:
    return masked(is_sloped=True)


def biased() -> memory.Case:
    length = 128
    distance = torch.arange(length)[:, None] - torch.arange(length) + length
    return Trained(*(Biased(64, 8, length) for _ in range(2))), {**_rows(4, length, 64), "distance": distance}, {}


MODELS: dict[str, Callable[[], memory.Case]] = {
    "selective scan": scan,
    "scan in chunks": chunked_scan,
    "gated recurrence": gated_unit,
    "convolution and group norm": conv_group,
    "denoiser": denoiser,
    "graph, sums": sums,
    "graph, edges": edge_net,
    "graph, attention": graph_attention,
    "experts, all": experts,
    "experts, dispatched": dispatched,
    "gated products": gated,
    "attention, mask": masked,
    "attention, slopes": sloped,
    "attention, learned bias": biased,
}
PLANS: dict[str, tuple[tuple[int, ...], dict[str, Any], float | None]] = {
    "free": ((4,), {}, None),
    "dp": ((4,), {"parallel": "dp"}, None),
    "zero3": ((4,), {"parallel": "zero3"}, None),
    "megatron": ((4,), {"parallel": "megatron"}, None),
    "free at 80 %": ((4,), {}, 0.8),
    "free at 60 %": ((4,), {}, 0.6),
}


def compared(model: str, plan: str) -> tuple[autopar.Plan, int]:
    """A plan, and the most bytes that its first and its last rank hold in the third step."""
    mesh, how, share = PLANS[plan]
    pair = memory.Pair(MODELS[model], mesh, how)
    found = memory.planned(pair, share)
    return found, max(memory.run_plan(found, pair, rank).peaks[3] for rank in (0, found.mesh.size - 1))


def main(names: list[str]) -> None:
    print(f"torch {torch.__version__}; MiB in step 3, of the fuller of the first and the last rank\n")
    print("| model | plan | predicted | held | ratio | values recomputed | the plan's peak is at |")
    print("|---|---|---|---|---|---|---|")
    missed = []
    for model in names or MODELS:
        for name in PLANS:
            try:
                plan, held = compared(model, name)
            except (autopar.Infeasible, BadPreset) as e:
                print(f"| {model} | {name} | - | | | | {type(e).__name__} |", flush=True)
                continue
            ratio = plan.peak_bytes / held
            if not 1 - UNDER <= ratio <= 1 + OVER:
                missed.append(f"{model}, {name}: {ratio:.3f}")
            print(
                f"| {model} | {name} | {plan.peak_bytes / 2**20:.2f} | {held / 2**20:.2f} | {ratio:.3f} | "
                f"{len(plan.recomputed)} | {plan.peak_at} |",
                flush=True,
            )
    if missed:
        sys.exit(f"outside the bar: {missed}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    main(sys.argv[1:])
