"""The models that tests train, and the plans they are pinned to."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from autopar import Cluster, DeviceMesh


class FunctionModel(nn.Module):
    """A function of the model and its input, with a weight, and buffers for running statistics."""

    def __init__(self, function, *shape) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(*shape).double())
        self.register_buffer("mean", torch.zeros(shape[-1]).double())
        self.register_buffer("var", torch.ones(shape[-1]).double())

    def forward(self, x):
        return self.function(self, x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    """Residual blocks and a head; with a target it returns its own loss."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x, y=None):
        for block in self.blocks:
            x = block(x)
        out = self.head(x)
        return out if y is None else F.mse_loss(out, y)


class LlamaBlock(nn.Module):
    """A LLaMA-like block: separate q, k, v and gate, up."""

    def __init__(self, width: int = 32, heads: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width, bias=bias)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (w(h).view(*h.shape[:2], self.heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.o(a)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """One such block and a loss."""

    def __init__(self, **how) -> None:
        super().__init__()
        self.block = LlamaBlock(**how)

    def forward(self, x):
        x = self.block(x)
        return (x * x).sum()


LLAMA_MEGATRON = {
    "x": "R",
    "*.q.weight": "S(0)",
    "*.k.weight": "S(0)",
    "*.v.weight": "S(0)",
    "*.o.weight": "S(1)",
    "*.gate.weight": "S(0)",
    "*.up.weight": "S(0)",
    "*.down.weight": "S(1)",
    "*norm*": "R",
    "*.o": "R",
    "*.bias": "R; P(sum)",
    "block": "R",
}
LLAMA_SEQUENCE = {**LLAMA_MEGATRON, "x": "S(1)", "*.o": "S(1)", "block": "S(1)"}


def mlp_case(width: int = 16, batch: int = 8, seed: int = 0):
    """A model and a batch, in float64; the parameters are far from symmetric points."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MLP(width).double()
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
        return model, {"x": torch.randn(batch, width).double(), "y": torch.randn(batch, width).double()}


def batch_of(rows: int, width: int = 16, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch of so many rows for `mlp_case`, the same on every rank."""
    made = torch.Generator().manual_seed(seed)
    return {k: torch.randn(rows, width, generator=made, dtype=torch.float64) for k in ("x", "y")}


def on_meta(build):
    """A model that is built without values."""
    with torch.device("meta"):
        return build()


def still(model: nn.Module) -> nn.Module:
    """The model without its dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def mean_square(outputs, inputs):
    """The loss of the mode `callable`: it closes over nothing."""
    return (
        F.mse_loss(outputs, torch.zeros_like(outputs))
        if not isinstance(inputs, dict) or "y" not in inputs
        else F.mse_loss(outputs, inputs["y"])
    )


def eager_links(name: str = "generic") -> Cluster:
    """A cluster whose links and launches cost next to nothing, so that small models are worth cutting."""
    cluster = Cluster.of(name)
    links = tuple(replace(link, latency_s=1e-12, bytes_per_s=1e13) for link in cluster.links)
    return replace(cluster, name="eager-links", links=links, device=replace(cluster.device, launch_s=1e-12))


def mlp_pins(kind: str, mesh: DeviceMesh) -> dict[str, str]:
    """Experts' plans as constraints: points of the space that the free search also sees."""
    everywhere = ", ".join(f"S(0)@{a}" for a in mesh.axes)
    inner, outer = mesh.axes[-1], mesh.axes[:-1]
    rows = ", ".join(f"S(0)@{a}" for a in outer) or "R"
    return {
        "free": {},
        "dp": {"x": everywhere, "y": everywhere, "*.weight": "R", "*.bias": "R"},
        "megatron": {
            "x": rows,
            "y": rows,
            "*.up.weight": f"S(0)@{inner}",
            "*.up.bias": f"S(0)@{inner}",
            "*.down.weight": f"S(1)@{inner}",
            "*.down.bias": f"R; P(sum)@{inner}",
            "*.norm.*": "R",
            "head.*": "R",
            "*.up": ", ".join(filter(None, [rows.replace("R", ""), f"S(1)@{inner}"])),
            "blocks.*": rows,
            "head": rows,
        },
        "sharded": {"x": everywhere, "y": everywhere, "*": f"{everywhere}; R; regathered"},
    }[kind]


class Plain(nn.Module):
    """What a user may write: tied weights, writes in place and by index, a counter, attention, a checkpoint, no_grad,
    branches on shapes.
    """

    def __init__(self, words: int = 128, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True, dropout=0.1)
        self.feed = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(width, width)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, y):
        self.steps += 1
        h = self.embed(x)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        h = h + torch.utils.checkpoint.checkpoint(self.feed, h, use_reentrant=False)
        shifted = torch.zeros_like(h)
        shifted[:, 1:] = h[:, :-1]
        shifted[:, 0] = 1.0
        q, k = shifted.chunk(2, dim=-1)
        with torch.no_grad():
            scale = q.abs().mean()
        out = torch.cat([k, q / scale], -1)
        if x.shape[1] > 4:
            out.mul_(0.5)
        logits = self.head(out)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


class LoRA(nn.Module):
    """A frozen weight and a small correction that trains."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.randn(rank, base.in_features, dtype=torch.float64) * 0.1),
            nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float64)),
        )

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


def lora_case():
    model, batch = mlp_case()
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LoRA(block.up), LoRA(block.down)
    return model, batch


def peaks(name):
    """A cluster of which nobody measured what kernels and collectives reach."""
    cluster = Cluster.of(name)
    device = replace(cluster.device, reached_bytes_per_s=0.0, products=None, attention=(), passes=())
    links = tuple(replace(k, hop_s=0.0, reached=(), falls=(), doubling=()) for k in cluster.links)
    return replace(cluster, device=device, links=links, hidden=1.0, variation=0.0)
