"""Programs of mixtures of experts are typed on every axis, and no wrong reduction passes."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from autopar import Assume, DeviceMesh
from autopar.certificate.calls import TypedCall
from autopar.certificate.rules import typed
from autopar.certificate.types import Refused, Type, plain
from autopar.codegen.lower import lower
from autopar.letters import NotCertified
from autopar.request import Request
from autopar.search import plan_of
from autopar.tracer import ColoTracer
from tests.certificate.made import broken
from tests.routed import ROWS as ROWS_GIVEN
from tests.routed import WIDTH, I, M, Routed, T, planned, scores
from tests.shares import one_in
from tests.zoo.experts import FAMILIES, VOCABULARY

WITH_AUXILIARY_LOSS = ("Mixtral", "Qwen3Moe", "Olmoe", "GptOss")
NAMES = (*WITH_AUXILIARY_LOSS, "DeepseekV3", "Glm4Moe")
MESHES = {"4": DeviceMesh((4,)), "2x2": DeviceMesh((2, 2), ("dp", "tp"))}


@functools.cache
def traced(name: str, mesh: str):
    how = {"output_router_logits": True} if name in WITH_AUXILIARY_LOSS else {}
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4)
    model = FAMILIES[name].build(dtype=torch.float32, **sizes, **how)
    ids = torch.randint(VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(0))
    request = Request(mesh=MESHES[mesh], memory_budget="inf", assume=Assume(no_padding=True))
    return request.trace(model, {"input_ids": ids, "labels": ids})


def lowered(name: str, mesh: str, preset: str | None):
    """The program of the last device."""
    request = Request(mesh=MESHES[mesh], memory_budget="inf", assume=Assume(no_padding=True), parallel=preset)
    graph = traced(name, mesh)
    plan = plan_of(graph, request)
    return lower(request.as_planned(graph, plan), plan, tuple(n - 1 for n in MESHES[mesh].shape))


@pytest.mark.parametrize(
    ("name", "mesh", "preset"), one_in(11, itertools.product(NAMES, MESHES, ("dp", "zero3", None)), 1)
)
def test_programs_of_experts_are_typed_on_every_axis(name, mesh, preset):
    found = lowered(name, mesh, preset).certified()
    assert found.values > 400 and not found.open and not found.open_ends and not found.unforeseen, found.left_open


@pytest.mark.parametrize(
    ("name", "preset"), one_in(4, [("DeepseekV3", "dp"), ("Mixtral", "zero3"), ("Mixtral", "dp"), ("GptOss", "dp")])
)
def test_a_wrong_reduction_is_refused(name, preset):
    """Of the gradients of experts and routers, and of the counts of the loss that balances loads."""
    wrong = list(broken(lowered(name, "2x2", preset)))
    for what, program in wrong[:: 1 + len(wrong) // 24]:
        with pytest.raises(NotCertified):
            program.certified()
            pytest.fail(what)
    assert wrong


@pytest.mark.parametrize("kind, cuts", [("behind", (T, M)), ("slope", (M, I))], ids=str)
def test_experts_that_read_parameters(kind, cuts):
    rows = torch.randn(ROWS_GIVEN, WIDTH).double()
    batch = {"x": rows, "scores": scores("random")}
    model = Routed(True, kind)
    plan = planned(model, batch, MESHES["2x2"], cuts)
    program = lower(ColoTracer().trace(model, batch), plan, (1, 1))
    found = program.certified()
    assert not found.open and found.ends > 5
    wrong = list(broken(program))
    for what, other in wrong[:: 1 + len(wrong) // 12]:
        with pytest.raises(NotCertified):
            other.certified()
            pytest.fail(what)
    assert wrong


ATEN = torch.ops.aten
ROWS = ((6, ("dp",)),)  # six local rows of a dim that an axis cuts
WHOLE = Type(plain((6, 4)))
CUT = Type((ROWS, ((4, ()),)))
PART = Type(plain((6, 4)), sums=frozenset({"dp"}))
PLACES = Type((ROWS, ((2, ()),)))
ZEROS = Type(plain((6, 4)), is_zero=True)


def made(op, *args, shape=(6, 4), **more):
    found = typed(op, TypedCall(args, more, (shape,), frozenset({"dp"})))
    return str(found)


def test_counts_of_a_part_are_parts_of_counts():
    assert made(ATEN.histc.default, Type((ROWS,)), 4, 0, 4, shape=(4,)) == "P(sum)@dp"
    assert made(ATEN.histc.default, Type(plain((6,))), 4, 0, 4, shape=(4,)) == "R"
    assert made(ATEN.histc.default, Type((ROWS,)), 4, shape=(4,)) == "unknown@dp"  # ranges follow a part's entries
    with pytest.raises(Refused):
        made(ATEN.histc.default, PART, 4, 0, 4, shape=(4,))


def test_what_is_put_at_places():
    number, rows = ATEN.scatter.value, ATEN.scatter_add.default
    assert made(number, CUT, 1, PLACES, 1.0) == "S(0)@dp"
    assert made(number, CUT, 0, PLACES, 1.0) == "unknown@dp"  # places among rows that an axis cuts
    assert made(number, PART, 1, Type(plain((6, 2))), 0) == "P(sum)@dp"
    with pytest.raises(Refused):  # each device's part would have the number
        made(number, PART, 1, Type(plain((6, 2))), 1.0)
    with pytest.raises(Refused):
        made(number, WHOLE, 1, PLACES, 1.0)
    few = Type(plain((6, 2)), sums=frozenset({"dp"}))
    assert made(rows, ZEROS, 1, Type(plain((6, 2))), few) == "P(sum)@dp"
    with pytest.raises(Refused):  # added to what each device has whole
        made(rows, WHOLE, 1, Type(plain((6, 2))), few)


def test_runs_of_blocks():
    blocks = Type((((2, ()), (3, ("dp",))),))  # three local rows of each of two blocks
    assert made(ATEN.slice.Tensor, blocks, 0, 3, 6, shape=(3,)) == "S(0)@dp"
    assert made(ATEN.slice.Tensor, blocks, 0, 1, 4, shape=(3,)) == "unknown@dp"
    assert made(ATEN.slice.Tensor, blocks, 0, 0, 6, 2, shape=(3,)) == "unknown@dp"
