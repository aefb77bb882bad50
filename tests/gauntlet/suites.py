"""Small suites: each plans a model, and gives a check that its training is that of one device.

A suite is prepared by the sound compiler, and once; its check lowers and runs again, so that what is broken in between
shows. It raises Unequal (or a letter) as soon as something differs.
"""

from __future__ import annotations

import copy
import functools
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar import DeviceMesh, Plan, Precision, S
from autopar.codegen import joint
from autopar.runtime import collectives
from autopar.runtime.collectives import Axis
from autopar.sharding.placement import R
from autopar.solver import solve
from autopar.space import timeline
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.testing import Equality, Unequal, on_processes, on_threads
from autopar.tracer import ColoTracer
from tests.gauntlet import models
from tests.gauntlet.models import Batch, drawn, tokens
from tests.models import LLAMA_SEQUENCE, Llama, eager_links, lora_case, mlp_case, mlp_pins, on_meta
from tests.ops.proof import run_all
from tests.oracle import ByPosition
from tests.routed import E, I, M, T, cut_of
from tests.stages.models import case
from tests.training import whole

Check = Callable[[], None]
SEED = 1234567
TWO, FOUR = DeviceMesh((2,), ("tp",)), DeviceMesh((2, 2), ("dp", "tp"))
DATA = DeviceMesh((2,), ("dp",))
THREE = DeviceMesh((3,), ("tp",))


def step(model: nn.Module, batch: Batch, steps: int = 1) -> dict[str, torch.Tensor]:
    """Losses, gradients of the last step, parameters and buffers after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for k in range(steps):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        found[f"loss {k}"] = loss.detach()
        optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = whole(parameter.grad).clone()
        found[name] = whole(parameter.detach()).clone()
    return found | {name: buffer.double() for name, buffer in model.named_buffers()}


def alike(found: Mapping, expected: Mapping, tolerance: float = 1e-9) -> None:
    """Raise Unequal unless one is the other."""
    Equality.in_float64("one device and several", found, expected, tolerance).check()


def trained(
    model: nn.Module,
    batch: Batch,
    mesh: DeviceMesh,
    pins: Mapping[str, str] | None = None,
    body: Callable[..., dict] = step,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    **how,
) -> Check:
    """The check that several devices leave what one device leaves of a run."""
    plan = change(autopar.plan(model, batch, mesh=mesh, cluster=eager_links(), constraints=pins, **how))
    return under(plan, model, batch, body)


def under(
    plan: Plan, model: nn.Module, batch: Batch, body: Callable[..., dict] = step, on_one: nn.Module | None = None
) -> Check:
    """The same under a plan; `on_one` is the model on one device, where that is another."""
    expected = body(copy.deepcopy(on_one or model), batch)

    def on_rank(rank: int) -> dict:
        return body(autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan), batch)

    def check() -> None:
        joint.LOWERED.clear()
        for found in on_threads(plan.mesh.size, on_rank):
            alike(found, expected)

    return check


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """A model in float64, the same in every run, whose parameters are far from symmetric points."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double()
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
        return model


# -- plans of an MLP, of a LLaMA block, of a Qwen block


def mlp() -> Check:
    """Columns, then rows, cut on one axis; the batch on the other."""
    model, batch = mlp_case(8)
    return trained(model, batch, FOUR, mlp_pins("megatron", FOUR))


def mlp_by_rows() -> Check:
    """Every parameter whole, rows cut on both axes."""
    model, batch = mlp_case(8)
    return trained(model, batch, FOUR, mlp_pins("dp", FOUR))


def mlp_sharded() -> Check:
    """Every parameter cut on both axes, two steps."""
    model, batch = mlp_case(8)
    return trained(model, batch, FOUR, mlp_pins("sharded", FOUR), functools.partial(step, steps=2))


def sequence() -> Check:
    """A LLaMA block whose norms see a part of the sequence."""
    return trained(made(lambda: Llama(width=16, bias=True)), drawn(1, 4, 16, names="x"), TWO, LLAMA_SEQUENCE)


_BY_HEADS = {
    "x": "R",
    "y": "R",
    "*.q_proj.weight": "S(0)",
    "*.k_proj.weight": "R",
    "*.v_proj.weight": "R",
    "*.o_proj.weight": "S(1)",
    "*norm*": "R",
    "*.o_proj": "R",
    "block": "R",
}


def grouped_heads() -> Check:
    """Query heads are cut, the one head of keys and values is not; each head has norms of its own."""
    return trained(made(models.Attends), drawn(2, 6, 16), TWO, _BY_HEADS)


def positions() -> Check:
    """Rotary positions of a cut sequence, and causal attention of a part of the queries."""
    return _attention(made(models.Attends), drawn(1, 7, 16), 2)


def exchanged_heads() -> Check:
    """The sequence is cut but in attention, which has whole sequences of some heads."""
    return _attention(made(lambda: models.Attends(groups=4, has_norms=False)), drawn(1, 6, 16), 1)


def _attention(model: nn.Module, batch: Batch, dim: int) -> Check:
    """A cut sequence, with attention that is cut by heads (1) or by queries, of which each has all keys (2)."""
    pins = {"x": "S(1)", "y": "S(1)", "*proj": "S(1)", "*.weight": "R", "block": "S(1)"}

    def is_there(choice) -> bool:
        return choice.operand(0)[0].value == S(dim) and choice.operand(1)[0].value == (S(1) if dim == 1 else R)

    return under(planned(model, batch, TWO, pins, "scaled_dot_product_attention", is_there), model, batch)


def ring() -> Check:
    """Keys of a cut sequence go round three devices, and rows are dealt: the last see most."""
    model = made(lambda: models.Attends(groups=2, has_norms=False))
    return under(_long(model, drawn(2, 12, 16), "scaled_dot_product_attention"), model, drawn(2, 12, 16))


def window() -> Check:
    """The same where a row sees five keys before it, and each head has a sink."""
    return _packed(drawn(2, 12, 16), sees="left=5 right=0")


def documents() -> Check:
    """The same where two rows of a batch have documents of their own, and rows are dealt by the work that these are."""
    ends = torch.tensor([[0] * 3 + [1] * 4 + [2] * 5, [0] * 7 + [1] * 5])
    return _packed(drawn(2, 12, 16) | {"documents": ends})


def padded() -> Check:
    """The same where the first rows of a batch do not count, so that some see nothing."""
    counts = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
    return _packed(drawn(2, 12, 16) | {"documents": torch.zeros_like(counts), "counts": counts}, has_sinks=False)


def _packed(batch: Batch, **how) -> Check:
    model = made(lambda: models.Packed(**how))
    return under(_long(model, batch, "attention"), model, batch, on_one=made(lambda: models.PackedPlainly(**how)))


def _long(model: nn.Module, batch: Batch, op: str) -> Plan:
    pins = {"x": "S(1)", "y": "S(1)"} | {name: "R" for name, _ in model.named_parameters()}

    def is_there(choice) -> bool:
        return choice.operand(0)[0].value == S(2) == choice.operand(1)[0].value

    return planned(model, batch, THREE, pins, op, is_there)


def planned(
    model: nn.Module, batch: Batch, mesh: DeviceMesh, pins: dict[str, str], op: str, is_there: Callable
) -> Plan:
    """The best plan of those in which all ops of one kind run as they have to."""
    generic = eager_links()
    cluster = replace(generic, device=replace(generic.device, kernels="cpu"))
    space = shardings(ColoTracer().trace(model, batch), Setting(mesh, cluster), pins)
    sites = []
    for site in space.sites:
        elsewhere = [site.op == op and not is_there(choice) for choice in site.choices]
        sites.append(replace(site, seconds=np.where(elsewhere, np.inf, site.seconds)))
    return solve(replace(space, sites=tuple(sites)))


# -- words


_VOCABULARY = {"ids": "R", "labels": "R", "table.weight": "S(0)@tp", "head.weight": "S(0)@tp", "hidden*": "R"}


def vocabulary() -> Check:
    """Thirteen words on two devices, smoothed targets, and a second loss of the same logits."""
    return trained(made(lambda: models.Words(losses="smoothed and sums")), tokens(), TWO, _VOCABULARY)


def contracted() -> Check:
    """What goes into a gelu is a sum that was completed."""
    model, batch = mlp_case(8)
    pins = {"x": "S(1)", "y": "R", "*.up.weight": "S(1)", "blocks.*.up": "R", "*.up.bias": "R; P(sum)", "head": "R"}
    return trained(model, batch, TWO, pins)


def tied_by_rows() -> Check:
    """One weight for both ends, whole, of which each device sees other rows."""
    pins = {"ids": "S(0)", "labels": "S(0)", "*.weight": "R", "*.bias": "R"}
    return trained(made(lambda: models.Words(tied=True)), tokens(), TWO, pins)


def counted_by_rows() -> Check:
    """A mean over targets that rows have in unequal numbers."""
    pins = {"ids": "S(0)", "labels": "S(0)", "*.weight": "R", "*.bias": "R"}
    return trained(made(lambda: models.Words(losses="")), tokens(), TWO, pins)


def two_counts() -> Check:
    """Two losses, each with targets and a count of its own, of a cut sequence."""
    pins = {"ids": "S(1)", "labels": "S(1)", "*.weight": "R"}
    return trained(made(models.TwoHeads), tokens(), TWO, pins)


def head_in_chunks() -> Check:
    """The head passes in chunks of rows, and rows are cut."""
    pins = {"ids": "S(0)", "labels": "S(0)", "*.weight": "R", "*.bias": "R"}
    return trained(made(lambda: models.Words(losses="")), tokens(), TWO, pins, chunks=2)


def turns() -> Check:
    """The batch passes in four turns."""
    return trained(made(lambda: models.Words(losses="")), tokens(), DeviceMesh((1,)), microbatches=4)


# -- experts, pictures, one weight for three, adapters


def experts() -> Check:
    """The hidden layers of all experts are cut, the router is whole; rows are cut on the other axis."""
    pins = {
        "x": "S(0)@dp",
        "y": "S(0)@dp",
        "router.weight": "R",
        "router": "S(0)@dp",
        "up": "S(2)@tp",
        "down": "S(1)@tp",
    }
    return trained(made(models.Experts), drawn(8, 8), FOUR, pins)


def _seven() -> Batch:
    drawn_ = torch.randn(7, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return {"x": drawn_.double(), "y": torch.arange(7) % 3}


def pictures() -> Check:
    """Statistics of a batch of which one device has four pictures, the other three."""
    pins = {"x": "S(0)", "y": "S(0)", "stem": "S(0)", "norm": "S(0)", "*.weight": "R", "*.bias": "R"}
    return trained(made(models.Pictures), _seven(), TWO, pins)


def pictures_made_again() -> Check:
    """Everything is recomputed in backward, and statistics move once."""
    return _everything_again(trained, made(models.Pictures), _seven(), DeviceMesh((1,)))


def _everything_again(prepare: Callable[..., Check], *given, **how) -> Check:
    """A suite whose plan recomputes every op."""

    def again(plan: Plan) -> Plan:
        ops = [name for name, d in plan.decisions.items() if d.kind == "op"]
        return plan.recomputing([*ops, *(c.name for c in plan.conversions)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "SMALL", 0)
        check = prepare(*given, **how, change=again)

    def small_too() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timeline, "SMALL", 0)
            check()

    return small_too


def made_again() -> Check:
    """Parts of a sequence that are gathered in forward are gathered again in backward, on a mesh of two axes."""
    pins = dict.fromkeys(("*.q.weight", "*.k.weight", "*.v.weight", "*.gate.weight", "*.up.weight"), "S(0)@tp")
    pins |= dict.fromkeys(("*.o.weight", "*.down.weight"), "S(1)@tp") | {"*norm*": "R"}
    pins |= dict.fromkeys(("x", "*.o", "block"), "S(0)@dp, S(1)@tp")
    return _everything_again(trained, made(lambda: Llama(width=16)), drawn(2, 4, 16, names="x"), FOUR, pins)


def drops() -> Check:
    """Dropout of cut rows, made again in backward."""

    def drawing(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        if hasattr(model, "random_state"):
            model.random_state.seed = SEED
            return step(model, batch)
        with ByPosition(SEED) as numbers:
            numbers.next_step()
            return step(model, batch)

    pins = {"x": "S(0)", "y": "S(0)", "*.weight": "R", "*.bias": "R"}
    return _everything_again(trained, made(models.Drops), drawn(8, 8), TWO, pins, drawing)


def fused() -> Check:
    """Queries, keys and values in one weight, of each of which a device has a part."""
    pins = {
        "x": "R",
        "y": "R",
        "qkv.weight": "S(0, blocks=(8, 8, 8))",
        "qkv.bias": "S(0, blocks=(8, 8, 8))",
        "out.weight": "S(1)",
    }
    return trained(made(models.Fused), drawn(4, 8), TWO, pins)


def adapters() -> Check:
    """A factor of an adapter is whole, and sees a part of the rows."""
    model, batch = lora_case()
    for name, p in model.named_parameters():  # the second factor begins at zero, and the first would not train
        if name.endswith(".b"):
            p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)).double()
    return trained(model, batch, TWO, {"x": "S(0)", "y": "S(0)", "*.a": "R", "*.b": "R"})


# -- experts as one op, of which devices have some each


def _routed(mesh: DeviceMesh, *cuts: str, body: Callable[..., dict] = step, **how) -> Callable[..., Check]:
    """A suite in which experts are cut as said, axis by axis; one device runs a loop over experts."""

    def prepare(change: Callable[[Plan], Plan] = lambda plan: plan) -> Check:
        model, one, batch = made(lambda: models.Routed(**how)), made(lambda: models.Looped(**how)), drawn(24, 4)
        return under(change(routed_plan(model, batch, mesh, cuts)), model, batch, body, one)

    return prepare


def routed_plan(model: nn.Module, batch: Batch, mesh: DeviceMesh, cuts: tuple[str, ...]) -> Plan:
    """The best plan in which experts are cut as said, axis by axis; devices store the experts that they have."""
    by_rows, own = (
        ", ".join(f"S(0)@{axis}" for axis, cut in zip(mesh.axes, cuts, strict=True) if cut in those)
        for those in ((T, M), (E, M))
    )
    pins = {"x": by_rows or "R", "y": by_rows or "R", "*.bias": "R", "*.weight": "R"}
    if own and I not in cuts:
        pins |= dict.fromkeys(("up", "down", "*_bias"), own)
    return planned(model, batch, mesh, pins, "experts", lambda c: tuple(map(cut_of, c.strategies)) == cuts)


def travelling() -> Check:
    """Rows go to the devices of their experts."""
    return _routed(TWO, M)()


def travelling_clipped() -> Check:
    """Gradients are clipped by their norm, to which the experts of all devices add once."""
    return _routed(TWO, M, body=_clips)()


def travelling_by_rows() -> Check:
    """The same on one axis, where rows are cut on two."""
    return _routed(FOUR, T, M)()


def travelling_in_rounds() -> Check:
    """Most rows want the first device: they travel in several rounds, and are computed in chunks."""
    return _routed(TWO, M, slots=1, is_skewed=True)()


def travelling_again() -> Check:
    """Rows travel, and all that may be is recomputed in backward."""
    return _everything_again(_routed(TWO, M))


def cut_inside() -> Check:
    """The hidden rows of all experts are cut, gates and what they multiply alike."""
    return _routed(TWO, I)()


def left_out() -> Check:
    """Each device leaves the experts of others out, and results are summed."""
    return _routed(TWO, E)()


# -- several calls and optimizer steps


def tables() -> Check:
    """Two backwards into gradients that are one value."""

    def twice(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        found = {}
        for k in range(2):
            loss = model(**batch)
            loss.backward()
            found[f"loss {k}"] = loss.detach()
        return found | {n: whole(p.grad).clone() for n, p in model.named_parameters()}

    return trained(made(models.Tables), drawn(8, 4, names="x"), FOUR, {"*": "R"}, twice)


def waiting() -> Check:
    """Two micro-batches wait for one reduction, on a data axis of one device."""
    return _waiting(DeviceMesh((1, 2), ("dp", "tp")))


def waiting_by_rows() -> Check:
    """The same where rows are cut."""
    return _waiting(FOUR)


def _waiting(mesh: DeviceMesh) -> Check:

    def in_two(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        quiet = getattr(model, "no_sync", None)
        found = {}
        for k in range(2):
            half = {name: value.chunk(2)[k] for name, value in batch.items()}
            if quiet is not None and k == 0:
                with quiet():
                    loss = model(**half)
                    loss.backward()
            else:
                loss = model(**half)
                loss.backward()
            found[f"loss {k}"] = loss.detach()
        return found | {n: whole(p.grad).clone() for n, p in model.named_parameters()}

    model, batch = mlp_case(8)
    half = {name: value.chunk(2)[0] for name, value in batch.items()}
    pins = mlp_pins("megatron", FOUR if mesh.size == 4 else TWO)
    plan = autopar.plan(model, half, mesh=mesh, cluster=eager_links(), constraints=pins)
    expected = in_two(copy.deepcopy(model), batch)

    def check() -> None:
        joint.LOWERED.clear()
        for found in on_threads(
            mesh.size, lambda rank: in_two(autopar.autoparallelize(copy.deepcopy(model), half, plan=plan), batch)
        ):
            alike(found, expected)

    return check


def clipped() -> Check:
    """Gradients are clipped by their norm, to which whole and cut ones add once; one has a number for each head."""

    pins = {
        "x": "R",
        "y": "R",
        "up.weight": "S(0)",
        "up.bias": "S(0)",
        "sinks": "S(0)",
        "down.weight": "S(1)",
        "norm.*": "R",
    }
    return trained(made(models.Sinks), drawn(4, 8), TWO, pins, _clips)


def _clips(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model(**batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return {"norm": whole(norm.detach())}


def other_starts() -> Check:
    """Ranks come with other values, and rank 0's count."""
    model, batch = mlp_case(8)
    plan = autopar.plan(model, batch, mesh=TWO, cluster=eager_links(), parallel="dp")
    expected = step(copy.deepcopy(model), batch)

    def on_rank(rank: int) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model)
        for p in own.parameters():
            p.data += rank
        return step(autopar.autoparallelize(own, batch, plan=plan), batch)

    def check() -> None:
        joint.LOWERED.clear()
        for found in on_threads(2, on_rank):
            alike(found, expected)

    return check


def drawn_in_place() -> Check:
    """Initial values that each rank draws for its part are those of one device."""
    batch = drawn(4, 16)

    def values(rank: int, mesh: DeviceMesh, parallel: str | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        model = on_meta(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
        mine = autopar.autoparallelize(
            model, (batch["x"].float(),), mesh=mesh, parallel=parallel, init="counter", loss=_squares
        )
        return {n: whole(p.detach()).double() for n, p in mine.named_parameters()}

    (expected,) = on_threads(1, values, DeviceMesh((1,)), None)

    def check() -> None:
        joint.LOWERED.clear()
        for found in on_threads(2, values, TWO, "zero3"):
            alike(found, expected)

    return check


def _squares(outputs, inputs):
    return outputs.square().mean()


# -- dtypes


def reduced_in_float32() -> Check:
    """Parts of a gradient that bfloat16 holds, and whose sum it does not: one and a thousandth."""
    cases = []
    for mesh, pins in ((DATA, {"x": "S(0)"}), (TWO, {"x": "S(1)"}), (DATA, {"x": "S(0)", "scale": "S(0); R"})):
        model = models.Scales()
        x = torch.full((2, 2, 8), 2.0**-10)
        x[0, 0] = 1.0
        batch = {"x": x}
        plan = autopar.plan(
            model, batch, mesh=mesh, cluster=eager_links(), constraints=pins, precision=Precision("bfloat16", "float32")
        )
        cases.append((model, batch, plan))

    def on_rank(rank: int, model: nn.Module, batch: Batch, plan: Plan) -> torch.Tensor:
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        mine(**batch).backward()
        return whole(mine.scale.grad).double()

    def check() -> None:
        joint.LOWERED.clear()
        for model, batch, plan in cases:
            parts = batch["x"].chunk(2, 1 if plan.mesh.axes == ("tp",) else 0)  # each rank's, in eight bits
            expected = sum(part.double().sum((0, 1)).bfloat16().double() for part in parts)
            for found in on_threads(2, on_rank, model, batch, plan):
                alike({"gradient": found}, {"gradient": expected}, 1e-7)

    return check


def waits_in_float32() -> Check:
    """Many small gradients are added to a large one, which eight bits would not notice."""
    model = models.Scales()
    large, small = ({"x": torch.full((2, 2, 8), value)} for value in (1.0, 2.0**-9))
    plan = autopar.plan(
        model,
        large,
        mesh=DATA,
        cluster=eager_links(),
        constraints={"x": "S(0)"},
        precision=Precision("bfloat16", "bfloat16"),
    )

    def on_rank(rank: int) -> torch.Tensor:
        mine = autopar.autoparallelize(copy.deepcopy(model), large, plan=plan)
        with mine.no_sync():
            for batch in (large, *[small] * 7):
                mine(**batch).backward()
        (held,) = mine._autopar.waiting.of.values()
        return torch.stack([h for h in held if h is not None])[0].double()

    def check() -> None:
        joint.LOWERED.clear()
        for found in on_threads(2, on_rank):
            alike({"what waits": found}, {"what waits": torch.full((8,), 2 + 7 * 2.0**-8).double()}, 1e-7)

    return check


# -- steps by themselves, and rules


def strided() -> Check:
    """Every reduction of values that do not lie in memory order."""

    def on_rank(rank: int) -> dict[str, torch.Tensor]:
        axis = Axis("tp", 2, rank, torch.distributed.group.WORLD)
        x = (torch.arange(12).double().view(3, 4) + 100 * rank).t()
        found = {
            "all_reduce": collectives.STEPS["all_reduce"](x, axis),
            "all_reduce_bucket": collectives.STEPS["all_reduce_bucket"]([x, x], axis)[1],
            "all_reduce_max": collectives.STEPS["all_reduce_max"](x, axis),
            "all_gather": collectives.STEPS["all_gather"](x, axis, 0, 8),
        }
        scattered = collectives.STEPS["reduce_scatter"](x, axis, 0, 4)
        there = x.contiguous()
        collectives.STEPS["all_reduce"](there, axis)
        found["given"] = there - 100 * rank
        return found | {"reduce_scatter": collectives.STEPS["all_gather"](scattered, axis, 0, 4)}

    x = torch.arange(12).double().view(3, 4).t()
    both = 2 * x + 100
    expected = {
        "all_reduce": both,
        "all_reduce_bucket": both,
        "all_reduce_max": x + 100,
        "all_gather": torch.cat([x, x + 100]),
        "reduce_scatter": both,
        "given": x,
    }

    def check() -> None:
        for found in on_threads(2, on_rank):
            alike(found, expected)

    return check


def rule_of(op: str) -> Callable[[], Check]:
    """The proof of a rule: every strategy computes what the op computes."""

    def prepare() -> Check:
        def check() -> None:
            try:
                run_all(op)
            except (AssertionError, RuntimeError) as e:
                raise Unequal(str(e)) from e

        return check

    return prepare


# -- real processes: what is planted is planted in them


def under_way(plant: Callable | None = None) -> Check:
    """Two gloo processes, of which one is late: what is read before its collective has ended is wrong."""
    model, batch = mlp_case(16)
    plan = autopar.plan(model, batch, mesh=DATA, cluster=eager_links(), parallel="dp")
    expected = step(copy.deepcopy(model), batch)

    def check() -> None:
        for found in on_processes(2, _late, model, batch, plan, plant):
            alike(found, expected)

    return check


def _late(rank: int, model: nn.Module, batch: Batch, plan: Plan, plant: Callable | None) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = mine(**batch)
        if rank == 1:
            time.sleep(0.3)
        loss.backward()
        gradients = {f"gradient of {n}": p.grad.to_local().clone() for n, p in mine.named_parameters()}
        time.sleep(0.6)  # nothing is under way any more
        torch.optim.SGD(mine.parameters(), lr=0.1).step()
    return {"loss 0": loss.detach()} | gradients | {n: p.detach().to_local() for n, p in mine.named_parameters()}


def overflow(plant: Callable | None = None) -> Check:
    """Two gloo processes, of which one finds an infinite gradient: both leave that step out."""
    model, batch = mlp_case(8)
    pins = {"x": "R", "y": "R", "*.up.weight": "S(0)", "*.down.weight": "S(1)", "*norm*": "R", "head.*": "R"}
    plan = autopar.plan(model, batch, mesh=TWO, cluster=eager_links(), constraints=pins)
    expected = {n: p.detach() for n, p in model.named_parameters()}

    def check() -> None:
        for found in on_processes(2, _overflows, model, batch, plan, plant):
            alike(found, expected)

    return check


def _overflows(rank: int, model: nn.Module, batch: Batch, plan: Plan, plant: Callable | None) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        scaler.scale(mine(**batch)).backward()
        if rank == 1:
            mine.blocks[0].up.weight.grad.to_local()[-1, -1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        return {n: whole(p.detach()).clone() for n, p in mine.named_parameters()}


def stages(plant: Callable | None = None, schedule: str = "1f1b") -> Check:
    """Two gloo processes, a stage of a language model on each: they share its table, and clip by one norm."""
    model, batch = case("decoder")
    mesh = DeviceMesh((2,), ("pp",))
    plan = autopar.plan(model, batch, mesh=mesh, microbatches=4, pipeline={"schedule": schedule})
    expected = clipped_step(copy.deepcopy(model), batch)

    def check() -> None:
        for found in on_processes(2, _in_stages, model, batch, plan, plant):
            alike(found, expected)

    return check


def parted_stages(plant: Callable | None = None) -> Check:
    """The same with backward in two parts."""
    return stages(plant, "zero-bubble")


def _in_stages(
    rank: int, model: nn.Module, batch: Batch, plan: Plan, plant: Callable | None
) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        return clipped_step(autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan), batch)


def clipped_step(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """The loss, gradients that are clipped, and parameters after a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    gradients = {f"gradient of {n}": in_full(p.grad) for n, p in model.named_parameters()}
    optimizer.step()
    return {"loss": loss.detach(), **gradients, **{n: in_full(p.detach()) for n, p in model.named_parameters()}}


def in_full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def resumed(plant: Callable | None = None) -> Check:
    """Saved by two processes with a weight cut by blocks, loaded into a used model on one, and a step after it."""
    model, batch = made(models.Fused), drawn(4, 8)
    pins = {"x": "R", "y": "R", "qkv.*": "S(0, blocks=(8, 8, 8))", "out.weight": "S(1)"}
    plan = autopar.plan(model, batch, mesh=TWO, cluster=eager_links(), constraints=pins)
    expected = _adam(copy.deepcopy(model), batch, 3)[0]

    def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            on_processes(2, _saves, model, batch, plan, folder, plant)
            alike(_goes_on(model, batch, folder), expected, 1e-8)

    return check


def _adam(model: nn.Module, batch: Batch, steps: int) -> tuple[dict, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    return {n: whole(p.detach()).clone() for n, p in model.named_parameters()}, optimizer


def _saves(rank: int, model: nn.Module, batch: Batch, plan: Plan, folder: str, plant: Callable | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        of_model, of_optimizer = get_state_dict(mine, _adam(mine, batch, 2)[1])
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=str(Path(folder) / "at 2"))


def _goes_on(model: nn.Module, batch: Batch, folder: str) -> dict[str, torch.Tensor]:
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=1)
    optimizer = _adam(mine, batch, 1)[1]
    of_model, of_optimizer = get_state_dict(mine, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=str(Path(folder) / "at 2"))
    load_state(mine, optimizer, of_model, of_optimizer)
    optimizer.zero_grad()
    mine(**batch).backward()
    optimizer.step()
    return {n: whole(p.detach()).clone() for n, p in mine.named_parameters()}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, of_model: dict, of_optimizer: dict) -> None:
    """Put what was loaded back."""
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


IN_RANKS = (
    "under_way",
    "overflow",
    "resumed",
    "stages",
    "parted_stages",
)  # their processes know nothing of what is patched here


@functools.cache
def prepared(name: str) -> Check:
    """The check of a suite by its name, prepared once."""
    return suite_of(name)()


def suite_of(name: str) -> Callable[..., Check]:
    """A suite by its name; "rule of <op>" is the proof of a rule."""
    return rule_of(name.removeprefix("rule of ")) if name.startswith("rule of ") else globals()[name]
