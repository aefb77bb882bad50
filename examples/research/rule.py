"""A function of your own gets a sharding rule in one line: without it every device computes it whole."""

from __future__ import annotations

import torch
from torch import nn

import autopar


@torch.library.custom_op("research::swish_gate", mutates_args=())
def swish_gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A function that autopar does not know, with a backward of its own."""
    return a * torch.sigmoid(a) * b


@swish_gate.register_fake
def _(a, b):
    return torch.empty_like(a)


def backward(ctx, gradient):
    a, b = ctx.saved_tensors
    s = torch.sigmoid(a)
    return gradient * b * (s + a * s * (1 - s)), gradient * a * s


swish_gate.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(512, 2048), nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(swish_gate(self.a(x), self.b(x))).square().mean()


if __name__ == "__main__":
    batch = {"x": torch.empty(4096, 512, device="meta")}
    model, asked = Gated(), {"mesh": (2, 2), "cluster": "h100-8x1"}
    before = autopar.plan(model, batch, **asked)
    print("without a rule:", before.without_rule)
    # factors of the operands -> of the result; letters that are the same are cut together
    autopar.rule("research::swish_gate", "r c, r c -> r c", linear="y")
    after = autopar.plan(model, batch, **asked)
    print("with one:      ", after.explain("/ops.research.swish_gate.default").splitlines()[0])
    print(f"step {before.step_time_s * 1e6:.1f} us -> {after.step_time_s * 1e6:.1f} us")
    assert before.without_rule and not after.without_rule
