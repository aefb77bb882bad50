"""Random models with regions in which gradients stop, and their graphs run node by node.

`Drawn` is made of what passes of the tracer rewrite; any step may stand under no_grad or in inference_mode, and its
result may be detached.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from autopar.graph.graph import Graph, bind_inputs, info, op_name, run
from autopar.graph.held import tensor_of
from autopar.turns.writer import ALL

ROWS, WIDTH, CLASSES = 8, 4, 3


def _written(target, write):
    write(target)
    return target


def _into_buffer(m, vector):
    m.mean.copy_(vector)
    return m.mean * 1


def _by_three_dims(m, v):
    """As a model flattens tokens for a linear."""
    flat = v.view(2, 4, WIDTH).view(ROWS, WIDTH)
    return F.linear(flat, m.square, m.bias).view(2, 4, WIDTH).view(ROWS, WIDTH)


def _by_blind_rows(m, v):
    """The same, where only the linear knows a gradient."""
    rows = v.view(2, 4, WIDTH)
    with torch.no_grad():
        flat = rows.view(ROWS, WIDTH)
    return F.linear(flat, m.square, m.bias).view(2, 4, WIDTH).view(ROWS, WIDTH)


ONE = {
    "tanh": lambda m, v: v.tanh(),
    "neg": lambda m, v: -v,
    "neg neg": lambda m, v: v.neg().neg(),
    "linear": lambda m, v: F.linear(v, m.square, m.bias),
    "flat linear": _by_three_dims,
    "blind flat linear": _by_blind_rows,
    "addmm": lambda m, v: torch.addmm(m.bias, v, m.square),
    "same view": lambda m, v: v.view(ROWS, WIDTH),
    "whole": lambda m, v: v[:],
    "all": lambda m, v: v[...],
    "dims": lambda m, v: v[:, None][:, 0],
    "plus 0": lambda m, v: v + 0,
    "sum of one": lambda m, v: sum([v]),
    "cat of one": lambda m, v: torch.cat([v, v[:, :0]], 1),
    "clone": lambda m, v: v.clone(),
    "contiguous": lambda m, v: v.contiguous(),
    "cast": lambda m, v: v.double().to(torch.float32),
    "same cast": lambda m, v: v.to(v.dtype),
    "dropout": lambda m, v: F.dropout(v, 0.0),
    "expand": lambda m, v: v.expand(ROWS, WIDTH),
    "mean": lambda m, v: v - v.mean(-1, keepdim=True),
    "copy": lambda m, v: torch.zeros_like(v).copy_(v),
    "write": lambda m, v: _written(torch.zeros_like(v), lambda t: t.__setitem__(slice(None), v)),
    "write a part": lambda m, v: _written(v * 1, lambda t: t.__setitem__((slice(None), slice(1, 3)), v[:, :2])),
    "write through a view": lambda m, v: _written(torch.zeros_like(v), lambda t: t.view(-1).copy_(v.reshape(-1))),
    "write behind": lambda m, v: _written(torch.zeros_like(v), lambda t: t.detach().copy_(v)),
    "composite": lambda m, v: torch.atleast_2d(v) * 2,
    "normalize": lambda m, v: F.normalize(v + 2),
    "chunks": lambda m, v: torch.cat(v.chunk(2, 1)[::-1], 1),
    "loss": lambda m, v: v + F.mse_loss(v, torch.ones_like(v), reduction="none"),
    "scale": lambda m, v: v * m.scale,
    "buffer": lambda m, v: v * _into_buffer(m, m.scale),
}
TWO = {
    "add": torch.add,
    "mul": torch.mul,
    "where": lambda v, w: torch.where(v > 0, v, w),
    "broadcast": lambda v, w: torch.broadcast_tensors(v, w)[0] + w,
    "ranking": lambda v, w: F.margin_ranking_loss(v, w, torch.ones_like(v), reduction="none"),
    "lerp": lambda v, w: torch.lerp(v, w, 0.3),
}


class Drawn(nn.Module):
    """Steps on rows, each with gradients or without, and a loss of what no step has read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        for name, shape in (("square", (WIDTH, WIDTH)), ("bias", (WIDTH,)), ("scale", (WIDTH,))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=numbers)))
        self.head = nn.Parameter(torch.randn(CLASSES, WIDTH, generator=numbers))
        self.register_buffer("mean", torch.zeros(WIDTH))
        count = dice.randint(4, 10)
        self.steps = [self._drawn(dice, place + 1) for place in range(count)]
        read = {place for _, places, _, _ in self.steps for place in places}
        self.ends = sorted(set(range(1, count + 1)) - read)
        self.reduction = dice.choice(("mean", "sum"))
        self.classifies = dice.random() < 0.5
        self.batch = {
            "x": torch.randn(ROWS, WIDTH, generator=numbers),
            "y": torch.randint(0, CLASSES, (ROWS,), generator=numbers),
        }

    @staticmethod
    def _drawn(dice, before):
        is_of_two = dice.random() < 0.3
        name = dice.choice(list(TWO if is_of_two else ONE))
        places = [max(dice.randrange(before), dice.randrange(before)) for _ in range(1 + is_of_two)]
        region = dice.choices(("", "no_grad", "inference", "nested"), (60, 25, 8, 7))[0]
        return name, places, region, dice.choices(("", "detach", "data"), (84, 8, 8))[0]

    def step(self, name, operands):
        return ONE[name](self, *operands) if name in ONE else TWO[name](*operands)

    def forward(self, x, y):
        values = [x @ self.square]
        for name, places, region, after in self.steps:
            operands = [values[place] for place in places]
            if region == "no_grad":
                with torch.no_grad():
                    made = self.step(name, operands)
            elif region == "inference":
                with torch.inference_mode():
                    made = self.step(name, operands)
                made = made.clone()
            elif region == "nested":
                with torch.no_grad(), torch.enable_grad():
                    made = self.step(name, operands)
            else:
                made = self.step(name, operands)
            values.append({"detach": made.detach(), "data": made.data}.get(after, made))
        loss = (x * self.scale).mean()
        for end in self.ends:
            loss = loss + F.mse_loss(values[end] * self.bias, x, reduction=self.reduction)
        if self.classifies:
            loss = loss + F.cross_entropy(values[-1] @ self.head.t(), y)
        return loss


def gradients(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    """The loss, and the gradient of each parameter that gets one."""
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    named = {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True) if g is not None}
    return {"loss": loss.detach(), **named}


class InTurns:
    """Runs a graph node by node, each turn and chunk after the other, and adds up what they have."""

    def __init__(self, graph: Graph, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        self.graph, self.model = graph, model
        self.inputs = bind_inputs(graph, (), batch)
        self.known: dict[tuple, torch.Tensor] = {}

    def loss(self) -> torch.Tensor:
        return self.value(self.graph.output.args[0][self.graph.loss], (0, 0))

    def value(self, node, now):
        """What a node has in a turn and a chunk."""
        if (node, now) not in self.known:
            self.known[node, now] = self._made(node, *now)
        return self.known[node, now]

    def _made(self, node, turn, chunk):
        name = op_name(node)
        if node.op == "get_attr":
            held = tensor_of(self.model, str(node.target))
            return held if isinstance(held, nn.Parameter) else held.clone()
        if node.op == "placeholder":
            given = self.inputs[node.target]
            is_cut = info(node).key in self.graph.in_turns and not info(node).key.endswith(ALL)
            return given.chunk(self.graph.turns)[turn] if is_cut else given
        if name == "total":
            return sum(self.value(node.kwargs["input"], (k, 0)) for k in range(self.graph.turns))
        if name == "added_up":
            return sum(self.value(node.kwargs["input"], (turn, k)) for k in range(self.graph.chunks))
        if name in ("turn", "chunk", "once"):
            whole = self.value(node.kwargs["input"], (turn, chunk))
            if name == "once":
                return whole if turn == 0 else torch.zeros_like(whole)
            count = node.kwargs["turns" if name == "turn" else "chunks"]
            dim, part = node.kwargs["dim"], node.kwargs["size"] // count
            blocks = whole.split(node.kwargs["size"], dim)
            place = turn if name == "turn" else chunk
            return torch.cat([block.narrow(dim, place * part, part) for block in blocks], dim)
        return run(node, {n: self.value(n, (turn, chunk)) for n in node.all_input_nodes})
