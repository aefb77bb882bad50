"""Emitted programs under a checker of another project: sound ones are taken, each broken collective is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch

from autopar.runtime.collectives import all_reduce
from tests.certificate.made import broken
from tests.shares import by_day
from tests.torch_releases import IS_2_11
from tests.witness.adapter import Refusal, witness
from tests.witness.made import MODELS, PLANS, lowered

pytestmark = pytest.mark.skipif(IS_2_11, reason="the checker knows no padding and no einsum of torch 2.11")

# programs of which every value and every end has a type there
WHOLE = {
    *(("mlp", plan) for plan in PLANS),
    *(("gpt2", plan) for plan in ("dp", "zero3")),
    *(("vit", plan) for plan in ("free", "dp", "zero3", "tensor", "tensor and zero3")),
    *(("llama", plan) for plan in ("free", "dp", "zero3", "tensor", "tensor and zero3")),
}


TURNS, AGAIN = {"microbatches": 2}, {"recompute": "full"}
WAYS = ({}, TURNS, AGAIN, TURNS | AGAIN)


def programs():
    """Every model under every plan.

    By day one model in turns with what is recomputed, under every fourth plan; as they are one under every plan, the
    others under every sixth.
    """
    for (i, name), (k, plan), how in itertools.product(enumerate(MODELS), enumerate(PLANS), WAYS):
        is_by_day = (
            (name == "llama" and k % 4 == 0)
            if how == TURNS | AGAIN
            else not how and (name == "mlp" or (i + k) % 6 == 0)
        )
        if not (name == "mlp" and "recompute" in how):  # of which nothing is worth it
            yield pytest.param(name, plan, how, marks=() if is_by_day else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "plan", "how"), programs(), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_program_is_taken(name, plan, how):
    found = witness(lowered(name, plan, **how))
    is_vit_in_turns = name == "vit" and "microbatches" in how  # the gradient of its class token has no type
    # a floor under what the witness follows at all: least of a LLaMA under hsdp, 64 of 644
    least = 0.98 if is_vit_in_turns and plan in ("free", "dp") else 0.08
    assert found.typed > least * found.values
    if (name, plan) in WHOLE and not is_vit_in_turns:
        assert (found.typed, found.ends_typed) == (found.values, found.ends) and not found.unsaid
    elif plan != "free":  # which may cut what nothing of the checker says, or not
        assert found.unsaid


@pytest.mark.parametrize("plan", by_day(["dp", "zero3", "tensor", "tensor and zero3"], "dp", "tensor"))
@pytest.mark.filterwarnings("ignore")
def test_what_is_cast_is_taken(plan):
    found = witness(lowered("llama", plan, precision="bf16"))
    if "tensor" in plan:
        assert found.unsaid["a part of a sum that is rounded"] and found.typed > 0.4 * found.values
    else:
        assert (found.typed, found.ends_typed) == (found.values, found.ends)


@pytest.mark.parametrize(
    ("name", "plan", "how", "step"),
    [
        ("mlp", "tensor and zero3", {}, 1),
        ("mlp", "hsdp", {}, 1),
        ("llama", "tensor", {}, 10),
        pytest.param("llama", "tensor", {}, 1, marks=pytest.mark.nightly),
        pytest.param("llama", "tensor and zero3", TURNS | AGAIN, 1, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_broken_collective_is_refused(name, plan, how, step):
    """Left out, done twice, over another axis, scattered without a sum: in forward and in backward, each of them.

    Of the breaks of a large program every tenth by day.
    """
    program = lowered(name, plan, **how)
    sound = witness(program)
    assert sound.typed == sound.values
    count = 0
    for what, wrong in itertools.islice(broken(program), 0, None, step):
        with pytest.raises(Refusal):
            witness(wrong)
            pytest.fail(what)
        count += 1
    assert count > 1


def narrowed(program):
    """The same with a sum that is rounded to bfloat16 before it is added, one after the other."""
    for half in ("forward", "backward"):
        graph = getattr(program.joint, half)
        for place, found in enumerate(graph.nodes):
            if found.target is all_reduce:
                made = copy.deepcopy(graph)
                for mine, theirs in zip(made.nodes, graph.nodes, strict=True):
                    mine.meta = dict(theirs.meta)
                node = list(made.nodes)[place]
                with made.inserting_before(node):
                    cast = made.call_function(
                        torch.ops.aten._to_copy.default, (node.args[0],), {"dtype": torch.bfloat16}
                    )
                cast.meta["val"] = node.args[0].meta["val"].to(torch.bfloat16)
                node.args = (cast, *node.args[1:])
                yield dataclasses.replace(program, joint=dataclasses.replace(program.joint, **{half: made}))


@pytest.mark.filterwarnings("ignore")
def test_a_sum_that_is_rounded_before_it_is_added_is_refused():
    programs = list(narrowed(lowered("llama", "tensor")))
    assert len(programs) > 5
    for program in programs:
        with pytest.raises(Refusal, match="_to_copy"):
            witness(program)
