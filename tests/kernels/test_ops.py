"""The custom op of each family is one node, wherever torch looks at it."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.kernels.cases import CASES, results
from tests.shares import one_in

NAMES = [
    "rms_norm, odd columns",
    "layer_norm, odd columns",
    "add_rms_norm",
    "add_layer_norm",
    "masked_softmax",
    "masked_softmax, capped",
    "gated by silu",
    "bias_gelu",
    "gelu_tanh",
    "rotary",
    "rotary_pair, fewer keys",
    "cross_entropy, some ignored",
    "cross_entropy, smoothed",
]


def _op(case):
    return getattr(torch.ops.autopar, case.family.name).default


@pytest.mark.parametrize("name", one_in(2, NAMES, 1))
def test_what_torch_is_told_of_an_op_is_right(name, as_ops):
    case = CASES[name]
    operands = case.operands(torch.float32)
    torch.library.opcheck(_op(case), (*operands, *case.besides(operands[0])))


@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_forward_and_backward_are_one_node_each(name, as_ops):
    torch.compiler.reset()
    case = CASES[name]
    operands = case.operands(torch.float32)
    wanted = [x for x in operands if x.requires_grad]

    def step(*given):
        return torch.autograd.grad(total(case.call(*given)), wanted_of(given))

    def wanted_of(given):
        return [x for x in given if x.requires_grad]

    traced = make_fx(step, tracing_mode="fake")(*operands)
    targets = [str(n.target) for n in traced.graph.nodes if "autopar" in str(n.target)]
    assert targets == [f"autopar.{case.family.name}.default", f"autopar.{case.family.name}_backward.default"]
    exported = torch.export.export(_Module(case), tuple(x.detach() for x in operands))
    assert [str(n.target) for n in exported.graph.nodes if "autopar" in str(n.target)] == targets[:1]
    compiled = torch.compile(case.call, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(total(compiled(*operands)), wanted)
    for one, other in zip(found, torch.autograd.grad(total(case.call(*operands)), wanted), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_the_gradient_of_a_sum_passes_on_where_its_norm_is_not_read(name, as_ops):
    case = CASES[name]
    operands = case.operands(torch.float32)
    sum_, _ = case.call(*operands)
    gradient = torch.randn(sum_.shape)
    *of_operands, of_weight = torch.autograd.grad(sum_, operands[:3], gradient, allow_unused=True)
    assert all(torch.equal(one, gradient) for one in of_operands) and of_weight is None


def total(made):
    """The sum of all results."""
    return sum(y.sum() for y in made) if isinstance(made, tuple) else made.sum()


class _Module(torch.nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case = case

    def forward(self, *operands):
        return self.case.call(*operands)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_reference_is_its_ops_bit_for_bit(name, dtype, as_ops):
    """Values and gradients of the custom op on a CPU are those that autograd gives for its ops.

    Where a vocabulary is cut the rows are read once for all that is asked of them, in another order than the ops'; of a
    softmax the rounded result is kept.
    """
    case = CASES[name]
    operands = case.operands(dtype)
    found, plain = results(case.call, operands, dtype), results(case.reference, operands, dtype)
    for one, other in zip(found, plain, strict=True):
        is_near = case.family.name in ("cross_entropy_part", "masked_softmax")
        bits = torch.finfo(one.dtype).eps if is_near and one.numel() else 0.0
        torch.testing.assert_close(
            one, other, rtol=2 * bits, atol=bits * max(1.0, float(other.abs().max()) if bits else 0)
        )
