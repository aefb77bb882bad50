"""The certificate of emitted programs: right ones are typed, and one wrong reduction is refused, each in turn."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import Precision
from autopar.certificate import VARIABLE, Certificate, Interface, certify
from autopar.certificate.calls import TypedCall
from autopar.certificate.elementwise import as_parts
from autopar.certificate.readings import Wholes, regrouped
from autopar.certificate.rules import typed
from autopar.certificate.steps import after
from autopar.certificate.types import FREE, Refused, Type, axes_of, free, joined, lies_as, plain
from autopar.certificate.walk import _Walk
from autopar.codegen import joint, joint_passes
from autopar.codegen.lower import _interface, lower
from autopar.kernels import NAMES, rms_norm
from autopar.letters import NotCertified, NotServed
from autopar.request import Request
from autopar.runtime.collectives import STEPS
from autopar.search import plan_of
from autopar.sharding.placement import Placement, Sharding
from tests.certificate.made import BOTH, MESH, NARROWER, SEQUENCE, broken, lowered
from tests.fuzz.trial import drawn
from tests.random_plans import random_plan
from tests.shares import by_day, diagonal, one_in
from tests.stages.parted import lowered as parted

PRESETS = (None, "dp", "zero3", "megatron", "2d", BOTH, SEQUENCE)
KNOWN = 0.9  # of values and of ends, of these models


@pytest.mark.parametrize(
    ("name", "turns", "preset"),
    diagonal([("gpt2", 1), ("bert", 1), ("vit", 1), ("llama", 1), ("gpt2", 2), ("llama", 2)], PRESETS, 6),
    ids=str,
)
def test_programs_are_typed(name, turns, preset):
    found = lowered(name, preset, microbatches=turns).certified()
    assert not found.unforeseen and found.values > 400 and found.open <= (1 - KNOWN) * found.values, found
    assert bool(found.opened_by) == bool(found.open), found
    assert found.ends > 25 and found.open_ends <= (1 - KNOWN) * found.ends, found


@pytest.fixture
def with_kernels(monkeypatch):
    """Programs in which custom ops stand for kernels, as on a GPU."""
    monkeypatch.setenv("AUTOPAR_KERNELS", "ops")
    joint.LOWERED.clear()
    yield {"kernels": NAMES}
    joint.LOWERED.clear()


WITH_KERNELS = (("gpt2", "zero3"), ("gpt2", BOTH), ("llama", "megatron"), ("llama", BOTH))


@pytest.mark.parametrize(("name", "preset"), one_in(4, WITH_KERNELS, 1))
def test_programs_with_kernels_are_typed(name, preset, with_kernels):
    """As the ops are that each kernel stands for; of a cut vocabulary the loss alone is open, no gradient."""
    program = lowered(name, preset, **with_kernels)
    assert "one kernel" in str(program.program)
    found, plain = program.certified(), lowered(name, preset).certified()
    assert found.ends == plain.ends and found.open_ends == plain.open_ends
    wrong = [(what, one) for what, one in broken(program) if not what.startswith("forward")]
    for what, one in wrong[::3]:
        with pytest.raises(NotCertified):
            one.certified()
            pytest.fail(what)
    assert wrong


def test_a_kernel_that_needs_whole_rows_is_refused_others(with_kernels):
    graph = torch.fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "weight")]
    for node, shape in zip(given, ((4, 8), (8,)), strict=True):
        node.meta["val"] = torch.empty(shape)
    assert rms_norm.FAMILY.name == "rms_norm"  # its op is registered
    made = graph.call_function(torch.ops.autopar.rms_norm.default, (*given, 1e-6, True))
    made.meta["val"] = torch.empty(4, 8)
    graph.output((made,))
    interface = Interface({"dp": 2}, (), (), {}, {}, lambda node: "", {})

    def walked(x):
        return _Walk(graph, interface, Certificate()).run([x, Type(plain((8,)))])[0]

    assert walked(Type((((4, ("dp",)),), ((8, ()),)))).dims == (((4, ("dp",)),), ((8, ()),))
    with pytest.raises(NotCertified):
        walked(Type((((4, ()),), ((8, ()),)), sums=frozenset({"dp"})))


@pytest.mark.nightly
@pytest.mark.parametrize("preset", PRESETS, ids=str)
@pytest.mark.parametrize("name", ["qwen3", "t5", "whisper", "swin", "convnext", "resnet50", "clip"])
def test_no_program_of_the_matrix_is_refused(name, preset):
    """Not all is known of them: a local form, a dim of one row, or an op without a line opens an axis."""
    assert lowered(name, preset).certified().values > 300


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 2000, 100))
@pytest.mark.filterwarnings("ignore")
def test_no_random_plan_is_refused(first):
    """Random modules under random plans, whose parts are a few rows, or one; the fuzz shows that they are right."""
    for seed in range(first, first + 100):
        graph, plan = drawn(seed)
        for place in {(0,) * len(plan.mesh.shape), tuple(n - 1 for n in plan.mesh.shape)}:
            lower(graph, plan, place)


@pytest.mark.parametrize(
    ("preset", "turns"),
    by_day(
        [*((preset, 1) for preset in PRESETS[1:]), ("zero3", 2), ("2d", 2)],
        ("megatron", 1),
        (SEQUENCE, 1),
        ("zero3", 2),
    ),
    ids=str,
)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_one_wrong_reduction_is_refused(preset, turns, step):
    """Dropped, doubled, over another axis, or scattered without a sum, one at a time, in every half.

    Every third of them by day.
    """
    program, count = lowered("gpt2", preset, microbatches=turns), 0
    for what, wrong in itertools.islice(broken(program), 0, None, step):
        with pytest.raises(NotCertified):
            wrong.certified()
            pytest.fail(what)
        count += 1
    assert count >= 4 // step


@pytest.mark.parametrize("preset", by_day(["dp", "zero3", BOTH], "dp"), ids=str)
def test_a_gradient_is_summed_in_the_dtype_that_is_promised(preset):
    """A sum in bfloat16 of what has to be summed in float64 is refused, whatever is cast behind it."""
    program = lowered("gpt2", preset, precision=Precision("bfloat16", "float64"))
    gradients = [wrong for wrong in broken(program, NARROWER) if not wrong[0].startswith("forward")]
    for what, wrong in gradients:
        with pytest.raises(NotCertified, match="summed in torch"):
            wrong.certified()
            pytest.fail(what)
    assert len(gradients) >= 3


@pytest.fixture(scope="module")
def data_parallel():
    return lowered("gpt2", "dp")


def gradients_due(program, placement):
    """The certificate's `Interface` of a program, with another placement of all gradients."""
    interface = _interface(program.graph, program.plan, [program.program], program.rows)
    due = {i: Sharding((Placement.parse(placement),) * 2) for i, s in interface.gradients.items() if s is not None}
    return dataclasses.replace(interface, gradients=interface.gradients | due)


def test_what_is_due_as_a_part_of_a_sum_may_not_be_whole_nor_the_other_way(data_parallel):
    """With every gradient due as P(sum)@dp the program is refused; with no reduction left it is what is due."""
    parts = gradients_due(data_parallel, "P(sum)")
    with pytest.raises(NotCertified, match="it has to lie as P"):
        certify(data_parallel.joint, parts)
    joint = copy.copy(data_parallel.joint)
    unreduced = dataclasses.replace(joint, backward=joint.hold, waits=(), settled_from=())
    assert certify(unreduced, parts).ends > 25
    with pytest.raises(NotCertified, match="it has to lie as R"):
        certify(unreduced, gradients_due(data_parallel, "R"))


def test_a_settled_gradient_that_was_not_reduced_is_refused(data_parallel):
    """While micro-batches accumulate: one that `settle` hands on as it came, and one that it reduces twice."""
    joint = data_parallel.joint
    assert joint.waits
    for place, given in enumerate(joint.settled_from[:3]):
        settle = copy.deepcopy(joint.settle)
        for mine, theirs in zip(settle.nodes, joint.settle.nodes, strict=True):
            mine.meta = dict(theirs.meta)
        ends = list(settle.output_node().args[0])
        ends[place] = settle.find_nodes(op="placeholder")[given]
        settle.output_node().args = (tuple(ends),)
        wrong = dataclasses.replace(data_parallel, joint=dataclasses.replace(joint, settle=settle))
        with pytest.raises(NotCertified, match="the gradient of"):
            wrong.certified()
    swapped = dataclasses.replace(joint, hold=joint.backward)  # what has been reduced is reduced again
    with pytest.raises(NotCertified):
        dataclasses.replace(data_parallel, joint=swapped).certified()


dp, TWO = frozenset({"dp"}), ((2, ("dp",)),)
ROW, LINE = ((1, ("dp",)),), ((3, ()),)
LIES = [  # found, due, whether that is right
    (Type((LINE,), sums=dp), Type((LINE,)), False),
    (Type((LINE,)), Type((LINE,), sums=dp), False),
    (Type((LINE,), sums=dp), Type((LINE,), sums=dp), True),
    (Type((LINE,), most=dp), Type((LINE,)), False),
    (Type((LINE,), is_zero=True), Type((LINE,), sums=dp), True),
    (Type((LINE,), open=dp), Type((LINE,), sums=dp), True),
    (Type((TWO,)), Type((TWO,)), True),
    (Type((((2, ()),),)), Type((TWO,)), False),
    (Type((TWO,)), Type((((2, ()),),)), False),
    (Type((((2, FREE),),)), Type((TWO,)), True),
    (Type((ROW, LINE)), Type(((), LINE)), False),  # one row of a cut dim: its sum over the dim is due
    (Type((ROW, LINE)), Type(((), LINE), sums=dp), True),
    (Type(((), LINE)), Type((ROW, LINE)), False),
    (Type((ROW, (), LINE)), Type(((), ROW, LINE)), True),
]


@pytest.mark.parametrize(("found", "due", "right"), LIES, ids=str)
def test_an_end_lies_as_is_due(found, due, right):
    assert lies_as(found, due) is right


@pytest.mark.parametrize("turns", [4, 2])
def test_two_gradients_of_one_value_may_be_a_part_of_a_sum_and_a_single_row(turns):
    """A bias crosses to the next stage, and its gradients meet: where a device has one row, that is not summed."""
    for program in parted("biased", False, 2, 2, turns, axes=("pp", "dp"), parallel="dp"):
        assert not program.certified().left_open
        count = 0
        for what, wrong in broken(program):
            with pytest.raises(NotCertified):
                wrong.certified()
                pytest.fail(what)
            count += 1
        assert count >= 4
    row = Type((ROW, LINE))
    part = Type(((), LINE), sums=dp)
    whole = Type(((), LINE))
    assert as_parts([row, part]) == [part, part] and as_parts([row, row]) == [row, row]
    assert as_parts([whole, part]) == [whole, part]
    with pytest.raises(Refused):  # an op of the model, whose operand a device may have one row of several of
        typed(torch.ops.aten.add.Tensor, TypedCall((row, part), {}, ((1, 3),), dp))


def test_a_lowering_asks_for_a_certificate(monkeypatch):
    """Unless it is switched off: a conversion that is skipped is refused before the program runs."""
    passes = tuple(one for one in joint_passes.PASSES if one is not joint_passes.drop_noise)
    monkeypatch.setattr(joint_passes, "PASSES", (*passes, _sums_are_left_out))
    joint.LOWERED.clear()
    with pytest.raises(NotCertified, match="AUTOPAR_CERTIFICATE=off"):
        lowered("gpt2", "megatron")
    monkeypatch.setenv(VARIABLE, "off")
    joint.LOWERED.clear()
    with pytest.raises(NotCertified):
        lowered("gpt2", "megatron").certified()
    joint.LOWERED.clear()


def test_a_switch_that_says_neither_is_a_letter(monkeypatch):
    monkeypatch.setenv(VARIABLE, "false")
    with pytest.raises(NotServed, match="neither on nor off"):
        lowered("gpt2", "megatron")


def _sums_are_left_out(graph):
    for node in graph.graph.find_nodes(op="call_function", target=STEPS["all_reduce"]):
        node.replace_all_uses_with(node.args[0])


def test_a_letter_names_the_node_and_what_it_saw():
    _, wrong = next(broken(lowered("gpt2", "megatron")))
    with pytest.raises(NotCertified) as letter:
        wrong.certified()
    assert "P(sum)@tp" in str(letter.value) and "call_function" in letter.value.at


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up = nn.Parameter(torch.randn(10, 6)), nn.Linear(6, 12)

    def forward(self, x):
        return self.up(x @ self.table).cumsum(1).softmax(1).square().mean()


@pytest.mark.parametrize("preset", [None, "dp", "zero3"])
def test_uneven_parts_and_ops_without_a_line_are_let_pass(preset):
    request = Request(mesh=autopar.DeviceMesh((3,), ("dp",)), memory_budget="inf", parallel=preset)
    graph = request.trace(Odd(), {"x": torch.randn(9, 10)})
    assert lower(graph, plan_of(graph, request), (2,)).certified().values > 10


class Routed(nn.Module):
    """Rows that go where the largest of their numbers stand: by ops that the certificate has no line for."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.up(x)
        order = h.detach().amax(1).argsort()
        return self.down(torch.zeros_like(h).index_put((order,), h)).square().mean()


def test_what_is_left_untyped_is_said(caplog):
    """How many values and ends, and from which op on: in a line of the log, and in the text of the model's plan."""
    request = Request(mesh=autopar.DeviceMesh((2,)), memory_budget="inf", parallel="dp")
    graph = request.trace(Routed(), {"x": torch.randn(8, 8)})
    plan = plan_of(graph, request)
    with caplog.at_level("INFO", "autopar"):
        program = lower(graph, plan, (0,))
    found = program.certified()
    ends, values = f"{found.ends - found.open_ends} of {found.ends} outputs", f"{found.open} of {found.values} values"
    assert found.open and all(said in program.plan.untyped for said in (ends, values, "index_put"))
    assert program.plan.untyped in caplog.text and program.plan == plan and not plan.untyped
    assert all(f"untyped   the certificate types {ends}" in text for text in (str(program.plan), program.plan.table()))


def test_views_keep_what_is_cut():
    """Outer rows that are cut stay so; what is cut inside a dim is not confused with what is cut outside."""
    eight = ((8, ("tp",)),)
    assert regrouped((eight, *plain((4,))), (32,)) == ((((32, ("tp",)),),), frozenset())
    assert regrouped((((32, ("tp",)),),), (8, 4)) == ((eight, *plain((4,))), frozenset())
    inside = (((4, ()), (8, ("tp",))),)
    assert regrouped((*plain((4,)), eight), (32,)) == (inside, frozenset())
    assert regrouped(inside, (4, 8)) == ((*plain((4,)), eight), frozenset())
    assert regrouped((eight,), (3, 3))[1] == {"tp"}  # does not follow
    row = ((1, FREE),)  # a row that may be a part
    assert regrouped((row, *plain((4, 3))), (4, 3)) == (plain((4, 3)), frozenset(FREE))  # squeezed away: it is not lost
    assert regrouped((row, *plain((4, 3))), (1, 4, 3)) == ((row, *plain((4, 3))), frozenset())
    assert joined([(2, ("tp",)), (3, ()), (5, ())]) == ((30, ("tp",)),)
    assert Type((((4, FREE),),)).opened(["tp"]).open == {"tp"} and MESH.size == 4


def test_whole_shapes_tell_how_a_view_is_read():
    """Where one device's rows allow several readings: by the shapes of the op's values, and else not at all."""
    one, sizes = ((1, ("dp", "tp")),), {"dp": 2, "tp": 2}
    x, shape = (one, *plain((6, 16))), (1, 3, 2, 16)
    assert regrouped(x, shape)[1] == {"dp", "tp"}  # (4, 3, 2, 16), or (2, 6, 2, 16) as well
    first = (one, *plain((3, 2, 16)))
    assert regrouped(x, shape, Wholes([(4, 3, 2, 16)], frozenset(), sizes)) == (first, frozenset())
    assert regrouped(x, shape, Wholes([(4, 6, 16)], frozenset(), sizes)) == (first, frozenset())
    second = (((1, ("dp",)),), ((3, ("tp",)),), *plain((2, 16)))
    assert regrouped(x, shape, Wholes([(2, 6, 2, 16)], frozenset(), sizes)) == (second, frozenset())


def test_a_cut_of_several_rows_may_end_the_dim_before():
    """(6, 6) of what was (3, 12): three rows of each, cut otherwise. Both readings stay open."""
    x = (*plain((3,)), ((2, ("tp",)),), *plain((3,)))
    both = Wholes([(6, 6)], frozenset(), {"tp": 2})
    assert regrouped(x, (3, 6), both)[1] == {"tp"}
    assert regrouped(x, (3, 6), Wholes([(3, 12)], frozenset(), {"tp": 2}))[0][1] == ((6, ("tp",)),)


def test_rows_of_blocks_are_told_from_a_cut_of_the_next_dim_by_what_the_op_makes():
    """(32, 8) of what was (8, 4, 8), viewed back: one row of each block of two, or four rows of eight."""
    x, sizes = (((4, ()), (4, ("tp",))), *plain((8,))), {"tp": 2}
    blocks = (((4, ()), (1, ("tp",))), *plain((4, 8)))
    known = Wholes([(8, 4, 8)], frozenset(), sizes, inside=[(32, 8), (8, 4, 8)])
    assert regrouped(x, (4, 4, 8), known) == (blocks, frozenset())
    turned = Wholes([(4, 8, 8)], frozenset(), sizes, inside=[(32, 8), (4, 8, 8)])
    assert regrouped(x, (4, 4, 8), turned) == ((*plain((4,)), ((4, ("tp",)),), *plain((8,))), frozenset())


def test_what_is_repeated_is_a_part_or_a_whole():
    """Heads that are repeated for each query head, seen on the device that has one of them."""
    x = (((1, ("tp",)),), ((2, FREE),), *plain((16,)))
    assert regrouped(x, (2, 16))[1] == frozenset(FREE)
    assert regrouped(x, (1, 2, 16)) == (x, frozenset())
    heads = regrouped(x, (2, 16), Wholes([(4, 16), (2, 16)], frozenset(), {"tp": 2}))
    assert heads == ((((2, ("tp",)),), *plain((16,))), frozenset())


REPEATED, FOUR = ((1, FREE),), ((4, ()),)
REGROUPED = [  # one row a guard: dims, shape of the view, shapes of wholes, its dims, axes of which nothing is known
    ([REPEATED, FOUR, LINE], (4, 3), None, (FOUR, LINE), frozenset(FREE)),  # a repeated row is lost among others
    ([REPEATED, FOUR, LINE], (1, 4, 3), None, (REPEATED, FOUR, LINE), frozenset()),
    ([TWO, LINE], (0, 3), None, (((0, ()),), LINE), dp),  # no rows
    ([TWO, LINE], (5,), None, (((5, ()),),), dp),  # no view
    ([TWO, LINE], (2, 3), [(4, 3)], (TWO, LINE), frozenset()),
    ([FOUR, ROW], (4,), None, (((4, ()), (1, ("dp",))),), frozenset()),
    ([((4, ()), (1, ("dp",)))], (4, 1), [(4, 2)], (FOUR, ROW), frozenset()),
    ([((4, ()), (1, ("dp",)))], (4, 1), [(4, 2), (8, 1)], (((4, ()),), ROW), dp),  # a part of either
]


@pytest.mark.parametrize(("dims", "shape", "wholes", "expected", "lost"), REGROUPED, ids=str)
def test_a_view_is_read_as_far_as_it_follows(dims, shape, wholes, expected, lost):
    known = None if wholes is None else Wholes(wholes, frozenset(), {"dp": 2})
    found, unknown = regrouped(dims, shape, known)
    assert unknown == lost and (unknown or found == expected)


@pytest.mark.parametrize(
    ("op", "more", "refused"),
    [
        (torch.ops.aten.max_pool2d_with_indices.default, ([2, 2],), True),
        (torch.ops.aten.avg_pool2d.default, ([2, 2],), False),
        (torch.ops.aten.gelu.default, (), True),
        (torch.ops.aten.neg.default, (), False),
        (torch.ops.aten.constant_pad_nd.default, ([0, 1], -1.0), True),
        (torch.ops.aten.constant_pad_nd.default, ([0, 1], 0.0), False),
        (torch.ops.aten._softmax.default, (-1, False), True),
        (torch.ops.aten.amax.default, ([-1],), True),
        (torch.ops.aten.sum.dim_IntList, ([-1],), False),
    ],
    ids=str,
)
def test_a_part_of_a_sum_passes_ops_that_are_linear(op, more, refused):
    """As the op itself says: of two parts drawn at random, is what it makes of the sum the sum of what it makes?"""
    one, other = torch.randn(2, 2, 4, 4).double().unbind(0)
    one, other = one[None], other[None]
    results = [op(x, *more) for x in (one, other, one + other)]
    firsts = [r[0] if isinstance(r, tuple) else r for r in results]
    assert torch.allclose(firsts[0] + firsts[1], firsts[2]) != refused
    shapes = tuple(tuple(r.shape) for r in (results[0] if isinstance(results[0], tuple) else results[:1]))
    call = TypedCall((Type(plain(one.shape), sums=frozenset({"tp"})), *more), {}, shapes, frozenset({"tp"}))
    if refused:
        with pytest.raises(Refused):
            typed(op, call)
    else:
        assert typed(op, call).sums == {"tp"}


class Offset(nn.Module):
    """A number is added to a column, whose gradient is of one row that may be one of several."""

    def __init__(self):
        super().__init__()
        self.up, self.offset = nn.Linear(8, 1), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (self.up(x) + self.offset).square().mean()


def test_a_repeated_row_leaves_no_doubt_about_the_axes_that_cut_others():
    """The gradient of a number is unknown along one axis, and has to be summed over that of the batch."""
    request = Request(mesh=MESH, memory_budget="inf", parallel="2d")
    graph = request.trace(Offset(), {"x": torch.randn(8, 8)})
    program = lower(graph, plan_of(graph, request), (1, 1))
    assert program.certified().open_ends
    for what, wrong in broken(program):
        with pytest.raises(NotCertified):
            wrong.certified()
            pytest.fail(what)


@pytest.mark.parametrize("op", ["sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "logsumexp.default"])
def test_repeated_rows_are_reduced_beside_others_that_are_cut(op):
    """They may be all rows or a part along an axis that cuts none, as either of two devices has it."""
    name, overload = op.split(".")
    function = getattr(getattr(torch.ops.aten, name), overload)
    call = TypedCall((Type((TWO, ((3, FREE),))), [1]), {}, ((2,),), frozenset({"dp", "tp"}))
    made = typed(function, call)
    assert (made.dims, made.open, made.known) == ((TWO,), {"tp"}, {"dp", "tp"})


def test_repeated_rows_are_gathered_along_an_axis_of_which_nothing_is_known():
    """They stay as good a part along the other axis as they were."""
    x = Type(free((6, 1)), open=frozenset({"tp"}))
    gathered = after("all_gather", x, "tp", (1, 2, ()), (6, 2), False)
    assert gathered == Type(free((6, 2)))
    assert after("all_to_all", gathered, "dp", (1, 4, (), 0, 6, ()), (3, 4), False) == Type(free((3, 4)))


@pytest.mark.parametrize("places", [("tp",), ()])
def test_a_table_has_own_rows_where_their_places_alone_are_open(places):
    """Rows of which nothing is known are not those of a device, whose gradient would need no sum."""
    tp = frozenset({"tp"})
    gradient = Type((((8, ()),), ((4, ()),)), open=tp, places=frozenset(places))
    rows = Type((((8, ()),),), open=tp, places=frozenset(places))
    made = typed(
        torch.ops.aten.embedding_dense_backward.default, TypedCall((gradient, rows, 16, -1, False), {}, ((16, 4),), tp)
    )
    assert tuple(axes_of([made.dims[0]])) == places and made.open == tp.difference(places)


class Scanned(nn.Module):
    """A weight that is read through a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight, self.up = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x):
        return (self.up(x) @ self.function(self.weight)).square().mean()


def parallel_step(rank, model, batch, preset):
    """Loss and gradients of a step, certified."""
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel=preset, memory_budget="inf")
    loss = mine(**batch)
    loss.backward()
    return loss.detach(), {name: p.grad.full_tensor() for name, p in mine.named_parameters()}


@pytest.mark.parametrize("preset", ["dp", "zero3"])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(torch.linalg.matrix_exp, id="exp"),
        pytest.param(lambda w: w.logcumsumexp(0), id="scan"),
        pytest.param(lambda w: torch.copysign(w, w.roll(1, 0)), id="no gradient through a roll"),
        pytest.param(lambda w: w + nn.functional.layer_norm(w, (8,)).sign(), id="none through a norm"),
        pytest.param(lambda w: w + (w @ w.detach()).round(), id="none through a product"),
    ],
)
def test_a_part_of_a_sum_is_let_pass_where_no_step_is_linear_in_it(function, preset, threads):
    """A backward that is linear as a whole alone; and a sum with a gradient that is zero: a part as well as a whole."""
    torch.manual_seed(0)
    model, batch = Scanned(function).double(), {"x": torch.randn(8, 8).double()}
    expected = copy.deepcopy(model)
    right = expected(**batch)
    right.backward()
    loss, found = threads(2, parallel_step, model, batch, preset)[0]
    torch.testing.assert_close(loss, right.detach())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_of_two_gradients_one_that_is_zero_makes_nothing_zero():
    """The backward of a cell has the gradients of its output and of its state: the other one may be a part of a sum."""
    tp, rows = frozenset({"tp"}), Type(plain((4, 8)))
    gradients = Type(plain((4, 8)), is_zero=True), Type(plain((4, 8)), sums=tp)
    call = TypedCall((*gradients, rows, rows, Type(plain((4, 32))), True), {}, ((4, 32), (4, 8), (32,)), tp)
    made = typed(torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default, call)
    assert not any(t.is_zero for t in made)


class HeadNorm(nn.Module):
    """A norm of each head: of one head on a device the part of (rows, heads x width) looks as it did."""

    def __init__(self, heads):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, heads * 4), nn.LayerNorm(4), nn.Linear(heads * 4, 8)

    def forward(self, x):
        return self.down(self.norm(self.up(x).view(-1, 4)).view(len(x), -1)).pow(2).mean()


class SideBySide(nn.Module):
    """A mean of values side by side: the gradient of each is some of the rows of one that is the same everywhere."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        h = self.up(x)
        return torch.cat([h, h * 2]).mean()


class Regularised(nn.Module):
    """A layer that also sees constants, of which each device computes some rows, or one row that is repeated."""

    def __init__(self, added):
        super().__init__()
        self.added, self.layer, self.table = added, nn.Linear(8, 3), nn.Embedding(7, 8)
        self.query = nn.Parameter(torch.randn(1, 8))

    def forward(self, x):
        return self.layer(x).pow(2).mean() + 0.1 * self.layer(self.added(self, x)).pow(4).mean()


class OfAVector(nn.Module):
    """A matrix a row, times a vector: backward views a gradient twice, the second time as a column."""

    def __init__(self):
        super().__init__()
        self.up, self.vector = nn.Linear(8, 10), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return (self.up(x).view(-1, 2, 5) @ self.vector).tanh().square().mean()


ADDED = {
    "eye": lambda m, x: torch.eye(8, dtype=x.dtype),
    "table": lambda m, x: m.table(torch.arange(7)),
    "query": lambda m, x: m.query.expand(len(x), -1),
}
RIGHT = [
    ("heads", lambda: HeadNorm(2), "megatron", 12),
    ("heads", lambda: HeadNorm(2), 0, 12),
    ("side by side", SideBySide, 1, 12),
    ("side by side", SideBySide, 3, 12),
    ("a vector", OfAVector, 2, 12),
    ("a vector", OfAVector, 5, 12),
    *((name, lambda added=added: Regularised(added), "dp", 12) for name, added in ADDED.items()),
    *((name, lambda added=added: Regularised(added), "zero3", 12) for name, added in ADDED.items()),
    ("a query a device", lambda: Regularised(ADDED["query"]), "dp", 2),
    ("a query a device", lambda: Regularised(ADDED["query"]), "zero3", 2),
]


@pytest.mark.parametrize("made, chosen, rows", [case[1:] for case in RIGHT], ids=[f"{c[0]}, {c[2]}" for c in RIGHT])
def test_what_is_right_is_not_refused(made, chosen, rows, threads):
    """Under a preset, or a plan drawn by a seed."""
    torch.manual_seed(0)
    model, batch = made().double(), {"x": torch.randn(rows, 8).double()}
    expected = copy.deepcopy(model)
    right = expected(**batch)
    right.backward()

    def body(rank, how):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, **how)
        loss = mine(**batch)
        loss.backward()
        return loss.detach(), {n: p.grad.full_tensor() for n, p in mine.named_parameters() if p.grad is not None}

    how = {"mesh": 2, "parallel": chosen}
    if isinstance(chosen, int):
        how = {"plan": random_plan(model, batch, autopar.DeviceMesh((2,)), chosen)}
    for loss, found in threads(2, body, how):
        torch.testing.assert_close(loss, right.detach())
        for name, parameter in expected.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad)


LOSSES = {
    "mse": F.mse_loss,
    "smooth": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "of chances": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=y.abs()),
    "of logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
}


class Fitted(nn.Module):
    """A product that is added to a batch of values, behind one of the losses that take each value by itself."""

    def __init__(self, loss):
        super().__init__()
        self.loss, self.up = loss, nn.Linear(8, 8)

    def forward(self, x, y):
        return self.loss(torch.baddbmm(x, self.up(x), y), y)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_take_each_value_by_itself_are_typed(name):
    batch = {"x": torch.randn(8, 8, 8), "y": torch.randn(8, 8, 8)}
    request = Request(mesh=autopar.DeviceMesh((2,)), memory_budget="inf", parallel="dp")
    graph = request.trace(Fitted(LOSSES[name]), batch)
    program = lower(graph, plan_of(graph, request), (0,))
    assert not program.certified().open
    for what, wrong in broken(program):
        with pytest.raises(NotCertified):
            wrong.certified()
            pytest.fail(what)


@pytest.mark.filterwarnings("ignore")
def test_a_message_is_sent_when_all_of_it_is_made_though_another_has_moved_up():
    """Sums of numbers share messages: one that reads another's result was moved in front of what that one sends."""
    graph, plan = drawn(675)
    assert lower(graph, plan, (0, 0, 0)).joint.backward is not None
