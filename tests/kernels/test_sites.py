"""Which kernels take whose place in unmodified models, and that they compute what stood there."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
import transformers as hf

import autopar
from autopar.codegen.local import local_program
from autopar.codegen.local_passes import use_kernels
from autopar.graph.graph import run, type_of
from autopar.kernels import NAMES, families, groups, places
from autopar.letters import BadPlan
from autopar.tracer import ColoTracer
from tests.kernels.sites import SITES, counts, program_of
from tests.language import drawn, llama
from tests.shares import one_in

LLAMA_LIKE = {"rms_norm": 1, "add_rms_norm": 4, "rotary_pair": 2, "gated": 2}
EXPECTED = {
    "gpt2": {"layer_norm": 1, "add_layer_norm": 4, "bias_gelu": 2, "dropout": 5},
    "llama": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "rms_norm": 5},
    "llama, eager": LLAMA_LIKE,  # its attention is one op
    "gemma2": {**LLAMA_LIKE, "rms_norm": 5},
    "phi3": LLAMA_LIKE,
    "olmo2": {**LLAMA_LIKE, "rms_norm": 8, "add_rms_norm": 1},
    "gpt_neox": {"layer_norm": 3, "add_layer_norm": 2, "rotary_pair": 2, "bias_gelu": 2},
    "bert": {"layer_norm": 2, "add_layer_norm": 4, "dropout": 5, "bias_gelu": 3},
    "t5 1.1": {"rms_norm": 2, "add_rms_norm": 10, "gated": 4, "dropout": 18},
}


@pytest.mark.parametrize("name", one_in(2, SITES))
def test_sites_of_a_model(name):
    build, config = SITES[name]
    torch.manual_seed(0)
    program = program_of(build(config).train(), drawn(4, 16, 128))
    for family in families(NAMES):
        for node in program.fx.nodes:
            if node.op == "call_function" and (place := family.find(node)):
                check_on_random_values(family, *place)
    use_kernels(program)
    assert counts(program) == {**EXPECTED[name], "cross_entropy": 1}
    assert str(program).count("# one kernel, in the place of") == 1 + sum(EXPECTED[name].values())


def check_on_random_values(family, found, arguments):
    """A group's own ops, one after the other, and the call in their place give the same bits."""
    dice = torch.Generator().manual_seed(1)
    values = {n: drawn_as(type_of(n), dice) for n in arguments.values() if isinstance(n, fx.Node)}
    env = dict(values)
    for node in sorted(found.nodes):
        env[node] = run(node, env)
    given = {k: values[v] if isinstance(v, fx.Node) else v for k, v in arguments.items()}
    made = family.call(**given)
    for result, one in zip(found.results, made if isinstance(made, tuple) else (made,), strict=True):
        assert torch.equal(env[result], one), result


def drawn_as(type_, dice):
    """Numbers, or places of columns."""
    if type_.dtype == "int64":
        return torch.randint(0, 128, type_.shape, generator=dice)
    return torch.randn(type_.shape, generator=dice).to(type_.torch_dtype)


def test_a_value_that_others_read_stays():
    """The sum of squares of a norm leaves the model: there is no kernel that gives it."""

    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16))

        def forward(self, x):
            squares = x.pow(2).mean(-1, keepdim=True)
            return self.weight * (x * torch.rsqrt(squares + 1e-6)), squares

    program = program_of(Norm(), {"x": torch.randn(4, 16)})
    use_kernels(program)
    assert counts(program) == {}


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),  # along the rows
        lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 8 + 1e-6)),  # half of the mean
        lambda self, x: self.weight * (x * torch.rsqrt(x.abs().pow(2).mean(-1, keepdim=True) + 1e-6)),  # of another
        lambda self, x: self.weight[0] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),  # one number
    ],
)
def test_what_only_looks_like_a_norm_stays(forward):
    model = type("Norm", (torch.nn.Module,), {"forward": forward})()
    model.weight = torch.nn.Parameter(torch.ones(16))
    program = program_of(model, {"x": torch.randn(4, 16)})
    use_kernels(program)
    assert counts(program) == {}


class Layer(torch.nn.Module):
    """A gelu behind a product."""

    def __init__(self, forward, bias=True):
        super().__init__()
        self.inner, self.how = torch.nn.Linear(16, 32, bias), forward

    def forward(self, x):
        return self.how(self.inner(x))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_product_leaves_the_gradient_of_its_bias_to_the_gelu(approximate):
    model = Layer(lambda h: torch.nn.functional.gelu(h, approximate=approximate))
    program = program_of(model, {"x": torch.randn(4, 16)})
    use_kernels(program)
    assert counts(program) == {"bias_gelu": 1}
    assert "# the gradient of its bias is that of bias_gelu" in str(program)


@pytest.mark.parametrize(
    "forward, bias",
    [
        (lambda h: torch.nn.functional.gelu(h) + h, True),  # the bias has a gradient by another way
        (lambda h: (torch.nn.functional.gelu(h), h), True),
        (torch.nn.functional.gelu, False),
        (lambda h: torch.nn.functional.gelu(h.view(-1, 8)), True),  # other rows than those of the bias
        (lambda h: torch.nn.functional.gelu(h.to(torch.bfloat16)), True),
    ],
)
def test_a_gelu_that_is_not_all_of_its_product_stays(forward, bias):
    program = program_of(Layer(forward, bias), {"x": torch.randn(4, 16)})
    use_kernels(program)
    assert counts(program) == {} and "bias_gelu" not in str(program)


def test_numbers_are_no_rows():
    """A gate of one number by another has no last dim."""

    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * (torch.nn.functional.silu(self.gate) * self.up)

    program = program_of(Gate(), {"x": torch.randn(4, 16)})
    use_kernels(program)
    assert counts(program) == {}


def test_a_norm_whose_width_is_cut_stays():
    """A conversion stands between the sum and the mean: the plan keeps what it is, op by op."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = hf.models.llama.modeling_llama.LlamaRMSNorm(4096)

        def forward(self, x):
            return self.norm(x)

    model, batch = Model(), {"x": torch.empty(8192, 4096, device="meta")}
    pins = {"x": "S(1)@0", "norm": "S(1)@0"}
    plan = autopar.plan(model, batch, mesh=(2,), constraints=pins, memory_budget="inf", kernels="rms_norm")
    program = local_program(ColoTracer().trace(model, batch), plan, (0,))
    use_kernels(program)
    assert counts(program) == {} and "all_reduce" in str(program)


def test_kernels_are_named_or_none():
    model, batch = llama(), drawn(4, 64, 256)
    for wrong in ("rms", 3, ["gated", "rms"], [[]], None):
        with pytest.raises(autopar.NotServed, match="names no kernels"):
            autopar.plan(model, batch, mesh=(1,), kernels=wrong)
    with pytest.raises(autopar.NotServed, match="did you mean 'layer_norm'"):
        autopar.plan(model, batch, mesh=(1,), kernels=("rms_norm", "layer_nrom"))
    plan = autopar.plan(model, batch, mesh=(1,), kernels=("gated", "rms_norm"), memory_budget="inf")
    assert plan.kernels == ("rms_norm", "gated") and autopar.Plan.from_dict(plan.to_dict()) == plan
    with pytest.raises(BadPlan, match="names no kernels"):
        autopar.Plan.from_dict({**plan.to_dict(), "kernels": ["rms"]})
    assert autopar.plan(model, batch, mesh=(1,), kernels=False, memory_budget="inf").kernels == ()
    said = dict(autopar.plan(model, batch, mesh=(1,), cluster="h100-1x8", memory_budget="inf").defaults)
    assert "measured" in said["kernels"]


@pytest.mark.parametrize("blind", [False, True])
def test_ops_at_which_a_gradient_stops_are_in_no_group(blind):
    """A norm whose scale is a constant of backward: a kernel would hand a gradient on through the scale."""

    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.weight = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            h = self.inner(x)
            with torch.set_grad_enabled(not blind):
                scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
            return (self.weight * (h * scale)).sum()

    graph = ColoTracer().trace(Norm(), (torch.randn(4, 8),))
    found = [family.name for family, _ in groups(places(graph.nodes, NAMES))]
    assert found == ([] if blind else ["rms_norm"])
