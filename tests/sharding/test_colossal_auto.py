"""What Colossal-Auto is known to do, as facts that hold here too.

Its named strategies are all among ours, its conversions are never cheaper.

Its names read `output = input x weight`, a letter pair a dim, the weight as [in, out]: `S0S1 = S0R x RS1`. Where it
reduces at once, our output is P(sum).
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from autopar import Cluster, DeviceMesh, R, S
from autopar.graph.graph import TensorType
from autopar.ops.entry import OPS, rule_of
from autopar.sharding.convert import ShapeConsistencyManager, Step, steps_from
from autopar.sharding.layout import Layout
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import cross, strategies_on_one_axis, values
from autopar.space.bindings import without_numbers

MESH = DeviceMesh((2, 2))
MATMUL = [
    "S01R = S01R x RR",
    "RR = RS01 x S01R",
    "RS01 = RR x RS01",
    "RS1 = RS0 x S0S1",
    "RS0 = RS1 x S1S0",
    "RR = RS0 x S0R",
    "RR = RS1 x S1R",
    "RS0 = RR x RS0",
    "RS1 = RR x RS1",
    "S0S1 = S0R x RS1",
    "S1S0 = S1R x RS0",
    "S0R = S0S1 x S1R",
    "S1R = S1S0 x S0R",
    "RR = RR x RR",
]
CONV = [*MATMUL, "S0R = S0R x RR", "S1R = S1R x RR"]
BMM = [
    "Sb0Si1 = Sb0Si1 x Sb0",
    "Sb1Si0 = Sb1Si0 x Sb1",
    "Sb0Sj1 = Sb0R x Sb0Sj1",
    "Sb1Sj0 = Sb1R x Sb1Sj0",
    "Sb0R = Sb0Sk1 x Sb0Sk1",
    "Sb1R = Sb1Sk0 x Sb1Sk0",
    "Sb01 = Sb01 x Sb01",
]


def dims(text: str) -> list[tuple[int, ...]]:
    """`S01R` -> [(0, 1), ()]: the axes that cut each dim."""
    return [tuple(map(int, axes)) for axes in re.findall(r"R|S(\d*)", text)]


def lies(axes_of_dims, mesh=MESH) -> tuple:
    """The placement on each axis."""
    return tuple(next((S(d) for d, axes in enumerate(axes_of_dims) if a in axes), R) for a in range(len(mesh.shape)))


def choices_of(op, mesh=MESH, **arguments):
    """Value placements of operands and outputs of every choice, sums as R."""
    made = {
        k: torch.empty(v, device="meta") if isinstance(v, tuple) and k not in ("size", "normalized_shape") else v
        for k, v in arguments.items()
    }
    made = {
        k: v.to(torch.int64) if k == "input" and op == "embedding" else v.to(torch.bool) if k == "condition" else v
        for k, v in made.items()
    }
    out = OPS[op].run(made)
    operands = OPS[op].operands(made)
    types = {k: TensorType.of(v) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    binding = rule_of(op, {**types, "outputs": (TensorType.of(out),)}).bind(
        [None if o is None else tuple(o.shape) if isinstance(o, torch.Tensor) else () for o in operands],
        [tuple(out.shape)],
    )

    node = torch.fx.Graph().placeholder("tensor")  # what tells a tensor from a number there
    binding = without_numbers(binding, [node if isinstance(o, torch.Tensor) else o for o in operands])
    per_axis = strategies_on_one_axis(binding, [True] * len(operands), [True])
    found = set()
    for choice in cross(per_axis, binding.sizes, mesh):
        ends = [choice.operand(i) for i in range(len(choice.strategies[0].operands))] + [choice.output()]
        found.add(tuple(tuple(R if p.is_partial else p for p in values(f).placements) for f in ends))
    return found


def expected(name, leading, turned=True):
    """One of its names over `leading` batch dims: cut by batch, each of them in turn."""
    out, x, w = (dims(t) for t in re.fullmatch(r"(\S+) = (\S+) x (\S+)", name).groups())
    for place in range(leading) if x[0] else (0,):
        rows = [()] * leading
        rows[place] = x[0]
        yield lies([*rows, x[1]]), lies(w[::-1] if turned else w), lies([*rows, out[1]])


def test_linear_has_all_twenty_four_of_its_strategies_for_four_dims():
    ours = choices_of("linear", input=(4, 4, 4, 16), weight=(32, 16))
    theirs = [e for name in MATMUL for e in expected(name, 3)]
    assert len(theirs) == 24 and set(theirs) <= ours
    lacking = {
        (
            "batch on one axis, the weight whole on the other",
            (lies([(0,), (), (), ()]), lies([(), ()]), lies([(0,), (), (), ()])),
        )
    }
    assert all(e in ours and e not in theirs for _, e in lacking) and len(ours) > 24


@pytest.mark.parametrize(
    "op, arguments, names, leading, turned",
    [
        ("addmm", dict(mat1=(4, 8), mat2=(8, 16)), MATMUL, 1, False),
        ("conv2d", dict(input=(4, 4, 64, 64), weight=(16, 4, 3, 3)), CONV, 1, True),
        ("mm", dict(input=(4, 8), mat2=(8, 16)), MATMUL, 1, False),
    ],
)
def test_products_have_its_strategies(op, arguments, names, leading, turned):
    arguments = {"input": (4, 16), **arguments} if op == "addmm" else arguments
    ours = {c[-3:] for c in choices_of(op, **arguments)}
    assert {e for name in names for e in expected(name, leading, turned)} <= ours


def test_batched_products_have_its_strategies_and_are_cut_on_a_line_of_devices():
    ours = choices_of("matmul", input=(4, 8, 16), other=(4, 16, 8))
    for name in BMM:
        out, x, y = re.fullmatch(r"(\S+) = (\S+) x (\S+)", name).groups()
        letters = dict(re.findall(r"S([bijk])(\d+)", f"{out} {x} {y}"))
        axes = {k: tuple(map(int, v)) for k, v in letters.items()}
        b, i, j, k = (axes.get(c, ()) for c in "bijk")
        assert (lies([b, i, k]), lies([b, k, j]), lies([b, i, j])) in ours, name
    line = DeviceMesh((1, 4))
    cut = choices_of("matmul", mesh=line, input=(4, 8, 16), other=(4, 16, 8))
    assert any(S(0) in c[0] for c in cut) and any(
        S(1) in c[0] for c in cut
    )  # theirs cuts by the batch alone there, and by the axis of size one in its test


@pytest.mark.parametrize(
    "shapes",
    [
        ((8,), (8,)),
        ((4, 8), (8,)),
        ((4, 8), (8, 16)),
        ((8,), (8, 16)),
        ((8,), (4, 8, 16)),
        ((4, 8, 16), (16,)),
        ((4, 8, 16), (16, 32)),
        ((4, 8, 16), (1, 16, 32)),
        ((8, 16), (2, 4, 16, 32)),
        ((4, 8, 16), (2, 4, 16, 32)),
        ((1, 8, 16), (2, 4, 16, 32)),
        ((1, 4, 8, 16), (2, 4, 16, 32)),
        ((2, 1, 8, 16), (2, 4, 16, 32)),
        ((2, 4, 8, 16), (2, 4, 16, 32)),
    ],
    ids=str,
)
def test_every_pair_of_ranks_multiplies(shapes):
    for left, right, out in choices_of("matmul", input=shapes[0], other=shapes[1]):
        k_left, k_right = len(shapes[0]) - 1, max(0, len(shapes[1]) - 2)
        for a in range(2):  # a cut of the summed dim is one on both sides
            assert (left[a] == S(k_left)) == (right[a] == S(k_right)), (left, right, out)


def every_placement(count):
    return {tuple(p) for p in itertools.product([R, *(S(d) for d in range(count))], repeat=2)}


@pytest.mark.parametrize(
    "op, arguments, count, end",
    [
        ("add", dict(input=(4, 4), other=(4,)), 9, -1),
        ("pow", dict(input=(4, 4), exponent=2.0), 9, -1),
        ("where", dict(condition=(4, 4, 64, 64), input=(4, 1, 64, 64), other=(1, 4, 64, 64)), 25, -1),
        ("max_pool2d", dict(input=(4, 4, 64, 64), kernel_size=4, padding=1), 9, -1),
        ("layer_norm", dict(input=(4, 16), normalized_shape=(16,), weight=(16,), bias=(16,)), 4, 0),
    ],
)
def test_pointwise_ops_lie_in_every_way(op, arguments, count, end):
    ends = {c[end] for c in choices_of(op, **arguments)}
    assert len(ends) == count and ends == every_placement({9: 2, 25: 4, 4: 1}[count])


def test_embeddings_have_its_strategies_and_the_vocabulary_too():
    ours = choices_of("embedding", input=(4, 16, 16), weight=(16, 32))
    for tokens, width in [
        ((), ()),
        ((0,), ()),
        ((1,), ()),
        ((0,), (1,)),
        ((1,), (0,)),
        ((0, 1), ()),
        ((), (0,)),
        ((), (1,)),
        ((), (0, 1)),
    ]:
        for place in range(3):
            rows = [()] * 3
            rows[place] = tokens
            assert (lies(rows), lies([(), width]), lies([*rows, width])) in ours
    assert any(S(0) in c[1] for c in ours)  # theirs has no cut of the vocabulary


def test_batch_norm_is_cut_by_channel():
    ours = {
        c[0]
        for c in choices_of(
            "batch_norm",
            input=(4, 16, 64, 64),
            running_mean=(16,),
            running_var=(16,),
            weight=(16,),
            bias=(16,),
            training=True,
        )
    }
    assert {lies([(), axes]) for axes in ((0,), (1,), (), (0, 1))} <= ours


# -- conversions

FOUR = DeviceMesh((4, 4))
SHAPE = (64, 32, 16)


def sharding(text):
    return Sharding(lies([tuple(map(int, d[1:])) for d in text.split(", ")], FOUR))


@pytest.mark.parametrize(
    "source, kind, targets",
    [
        ("S0, S1, R", "all_gather", {"R, S1, R", "S0, R, R"}),
        ("S0, S1, R", "all_to_all", {"S01, R, R", "R, S1, S0", "S0, R, S1"}),
        ("S0, R, R", "slice", {"S01, R, R", "S0, S1, R", "S0, R, S1"}),
    ],
)
def test_one_step_reaches_what_its_one_step_reaches(source, kind, targets):
    before = Layout.of(SHAPE, sharding(source), FOUR)
    reached = {
        step.after(before, FOUR) for step in steps_from(before, [S(d) for d in range(3)], FOUR) if step.kind == kind
    }
    assert {Layout.of(SHAPE, sharding(t), FOUR) for t in targets} <= reached


def test_no_path_is_dearer_than_its_three_actions():
    manager = ShapeConsistencyManager(FOUR, Cluster.of("generic"))
    state, cost = Layout.of(SHAPE, sharding("R, S01, R"), FOUR), 0.0
    for step in (Step("all_gather", 1, 1), Step("all_to_all", 0, 1, 0), Step("slice", 1, 0)):
        cost += manager.step_seconds(step, state, 4)
        state = step.after(state, FOUR)
    assert state == Layout.of(SHAPE, sharding("S01, R, R"), FOUR)
    found = manager.path(SHAPE, 4, sharding("R, S01, R"), sharding("S01, R, R"))
    assert found.seconds <= cost + 1e-12


def test_ranks_have_its_coordinates():
    assert FOUR.coordinate(5) == (1, 1) and FOUR.coordinate(11) == (2, 3)
    assert [r for r in range(16) if FOUR.coordinate(r)[0] == FOUR.coordinate(2)[0]] == [0, 1, 2, 3]
