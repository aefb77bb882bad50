"""A plan file is not believed: edited at random it computes what eager does, or is a letter."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import DeviceMesh, Plan, Precision, api
from autopar.letters import BadPlan, BadSharding, Letter
from autopar.sharding.strategies import Choice, Strategy, gradients, values
from autopar.testing import on_threads
from autopar.tracer import ColoTracer
from tests.models import eager_links
from tests.random_plans import random_plan_of
from tests.training import whole

FEW, MANY = 16, 1000  # random edits in `make test`, and in `make nightly`


class Small(nn.Module):
    """A tied embedding, attention over a fused projection, a norm, and a loss.

    Parameters of several kinds in few ops.
    """

    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.out, self.norm = (
            nn.Embedding(12, 8),
            nn.Linear(8, 24),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
        )

    def forward(self, ids, labels):
        x = self.table(ids)
        q, k, v = (t.view(*ids.shape, 2, 4).transpose(1, 2) for t in self.qkv(x).split(8, -1))
        x = self.norm(
            x
            + F.gelu(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)))
        )
        return F.cross_entropy((x @ self.table.weight.t()).flatten(0, 1), labels.flatten())


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x, y):
        return F.mse_loss(self.norm(x + self.down(F.gelu(self.up(x)))), y)


@functools.cache
def small():
    torch.manual_seed(0)
    return Small().double(), {"ids": torch.randint(0, 12, (4, 4)), "labels": torch.randint(0, 12, (4, 4))}


@functools.cache
def rows():
    torch.manual_seed(0)
    return Rows().double(), {"x": torch.randn(8, 8, dtype=torch.float64), "y": torch.randn(8, 8, dtype=torch.float64)}


GRID = DeviceMesh((2, 2), ("dp", "tp"))
CASES = {
    "rows, dp": (rows, dict(mesh=2, parallel="dp")),
    "rows, megatron": (rows, dict(mesh=2, parallel="megatron")),
    "rows, zero3 of two": (rows, dict(mesh=2, parallel="zero3", accumulation=2)),
    "rows, zero3 and tensor": (rows, dict(mesh=GRID, parallel={"tensor": 2, "data": {"size": 2, "zero": 3}})),
    "small, zero3 and tensor": (small, dict(mesh=GRID, parallel={"tensor": 2, "data": {"size": 2, "zero": 3}})),
    "small, random": (small, 3),
    "small, random on a grid": (small, 5),
}


@functools.cache
def made(case):
    """The model, its batch, a plan of it, and what eager computes."""
    build, how = CASES[case]
    model, batch = build()
    if isinstance(how, int):
        plan = random_plan_of(
            ColoTracer().trace(copy.deepcopy(model), batch),
            GRID if "grid" in case else DeviceMesh(2),
            np.random.default_rng(how),
        )
    else:
        plan = autopar.plan(copy.deepcopy(model), batch, cluster=eager_links(), **how)
    return model, batch, plan, step(copy.deepcopy(model), batch)


def step(model, batch):
    loss = model(**batch)
    loss.backward()
    return {"loss": loss.detach(), **{n: whole(p.grad).clone() for n, p in model.named_parameters()}}


def differs(one, other):
    """The first of the values that is not the same in both."""
    size = math.sqrt(sum(float(g.square().sum()) for g in other.values()))
    return next(
        (
            n
            for n in other
            if one[n].shape != other[n].shape
            or not float((one[n] - other[n]).norm()) <= 1e-9 * max(float(other[n].norm()), 1e-3 * size)
        ),
        None,
    )


def outcome(case, text, folder):
    """The end of a file that is read and run: "right", "letter", or what is wrong with it."""
    model, batch, plan, expected = made(case)
    (folder / "plan.json").write_text(text)
    try:
        edited = Plan.load(folder / "plan.json")
        str(edited), edited.constraints(), edited.diff(plan), edited.explain(next(iter(edited.decisions), "nothing"))
        models = [copy.deepcopy(model) for _ in range(plan.mesh.size)]
        found = on_threads(
            plan.mesh.size, lambda rank: step(autopar.autoparallelize(models[rank], batch, plan=edited), batch)
        )
    except Letter:
        return "letter"
    except Exception as e:
        return f"raw: {type(e).__name__}: {str(e)[:200]}"
    wrong = [name for one in found if (name := differs(one, expected))]
    return f"wrong: {wrong[0]}" if wrong else "right"


# -- edits

ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    10**9,
    10**400,
    -(2**70),
    0.5,
    -1e-9,
    1e308,
    math.inf,
    math.nan,
    "",
    "R",
    "P(sum)",
    "S(0)",
    "S(9)",
    "S(0, blocks=(2, 2))",
    "all_reduce@0",
    "all_reduce@dp",
    "slice(0)@0",
    "S(0), R/P(sum) -> S(0)",
    "op",
    "x",
    " ",
    "@",
    "é\x00",
    "9" * 5000,
    [],
    [1],
    ["R", "R"],
    [[]],
    {},
    {"op": "gelu"},
]


def places(data, path=()):
    """Every place in a tree of JSON."""
    yield path
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield from places(data[key], (*path, key))


def at(data, path):
    return functools.reduce(lambda found, key: found[key], path, data)


def put(data, path, value):
    at(data, path[:-1])[path[-1]] = value


def like(data, path):
    """The places that stand where this one does, in entries of the same kind."""
    return [
        p
        for p in places(data)
        if len(p) == len(path) and p[0] == path[0] and p != path and (len(p) < 3 or p[2:] == path[2:])
    ]


def edited(plan, rng):
    """The text of a file that differs from the plan's in one place, or in two, and what was done."""
    data = json.loads(json.dumps(plan.to_dict()))
    done = [change(data, plan, rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    text = json.dumps(data)
    return (text[: rng.randrange(len(text))], "cut short") if rng.random() < 0.01 else (text, "; ".join(done))


def change(data, plan, rng):
    section = rng.choice(
        ["decisions"] * 4
        + ["conversions"] * 4
        + ["mesh", "regathered", "scattered", "precision", "accumulation", "window_bytes", "optimizer", "", ""]
    )
    path = rng.choice([p for p in places(data) if p and (p[0] == section or not section)] or [("mesh",)])
    value = at(data, path)
    kind = rng.choice(
        (
            "odd",
            "odd",
            "other",
            "other",
            "swap",
            "drop",
            "twice",
            "short",
            "turned",
            "scaled",
            "strategy",
            "strategy",
            "strategy",
            "emptied",
            "renamed",
        )
    )
    if kind == "odd":
        put(data, path, rng.choice(ODD))
    elif kind in ("other", "swap") and (others := like(data, path)):
        other = rng.choice(others)
        theirs = copy.deepcopy(at(data, other))
        if kind == "swap":
            put(data, other, copy.deepcopy(value))
        put(data, path, theirs)
        return f"{kind} {path} {other}"
    elif kind == "drop":
        del at(data, path[:-1])[path[-1]]
    elif kind == "twice" and isinstance(at(data, path[:-1]), list):
        at(data, path[:-1]).append(copy.deepcopy(value))
    elif kind == "short" and isinstance(value, (str, list)) and value:
        put(data, path, value[: rng.randrange(len(value))])
    elif kind == "turned" and isinstance(value, list):
        put(data, path, rng.sample(value, len(value)))
    elif kind == "scaled" and isinstance(value, (int, float)):
        put(data, path, rng.choice((value * 2, -value, value * 10**30, value + 1)))
    elif kind == "strategy":
        return another_strategy(data, plan, rng)
    elif kind == "emptied" and (way := rng.choice(data["conversions"] or [None])):
        way[rng.choice(("forward", "backward"))] = []
    elif kind == "renamed" and isinstance(at(data, path[:-1]), dict):
        at(data, path[:-1])[f"{path[-1]}2"] = at(data, path[:-1]).pop(path[-1])
    return f"{kind} {path}"


def another_strategy(data, plan, rng):
    """Run a site as some other does, or as nobody can, and make all that the file says beside it follow.

    It agrees with itself, legal or not.
    """
    space, axes = plan.search.counted.space, range(len(plan.mesh.shape))
    if set(data["decisions"]) != set(plan.decisions) or "conversions" not in data:
        return "nothing"
    k = rng.randrange(len(space.sites))
    site = space.sites[k]
    own = plan.decisions[site.name].choice.strategies[0]
    flows = ["R", "R/P(sum)", "P(sum)", "P(sum)/P(sum)", *(f"S({d})" for d in range(3)), "S(0)/R"]
    free = [
        Choice(
            tuple(
                Strategy.parse(
                    ", ".join(rng.choice(flows) for _ in own.operands)
                    + " -> "
                    + ", ".join(rng.choice(flows) for _ in own.outputs)
                )
                for _ in axes
            )
        )
    ]
    choice = rng.choice([*rng.choices(site.choices, k=2), *free])
    picks = {s.name: d.choice for s, d in zip(space.sites, (plan.decisions[s.name] for s in space.sites))} | {
        site.name: choice
    }
    conversions = []
    for e in space.edges:
        source, target = (space.sites[i].name for i in (e.source, e.target))
        ports = [
            p
            for p in range(len(picks[source].strategies[0].outputs))
            if e.given[0]
            and all(
                f in {s.choices[i].output(p) for s in (space.sites[e.source],) for i in range(len(s.choices))}
                for f in e.given
            )
        ]
        given, taken = picks[source].output(ports[0] if ports else 0), picks[target].operand(e.operand)
        value, gradient = (values(given), values(taken)), (gradients(taken), gradients(given))
        with contextlib.suppress(BadSharding):
            ways = [
                space.conversions.path(e.type.shape, e.type.itemsize, *value).steps,
                space.conversions.path(e.type.shape, e.type.itemsize, *gradient).steps if e.type.requires_grad else (),
            ]
            if any(ways):
                said = [[s.text(plan.mesh.axes) for s in way] for way in ways]
                shown = [[s.text(plan.mesh.axes) for s in ends] for ends in (value, gradient)]
                conversions.append(
                    {
                        "source": source,
                        "target": target,
                        "operand": e.operand,
                        "value": shown[0],
                        "gradient": shown[1] if e.type.requires_grad else None,
                        "forward": said[0],
                        "backward": said[1],
                        "seconds": 0.0,
                    }
                )
    with contextlib.suppress(TypeError, KeyError, AttributeError):
        data["decisions"][site.name]["choice"] = [repr(s) for s in choice.strategies]
        data["conversions"] = conversions
    return f"{site.name} runs as {choice}"


def look(seeds, folder):
    """Edits by their numbers; the letters, and those that are right."""
    found = {"right": 0, "letter": 0}
    for seed in seeds:
        rng = random.Random(seed)
        case = rng.choice(list(CASES))
        text, what = edited(made(case)[2], rng)
        came = outcome(case, text, folder)
        assert came in found, (seed, case, what, came)
        found[came] += 1
    return found


def test_a_plan_that_was_edited_at_random_is_right_or_a_letter(tmp_path):
    found = look(range(FEW), tmp_path)
    assert found["right"] > FEW // 12 and found["letter"] > FEW // 3, found


@pytest.mark.nightly
def test_a_thousand_plans_that_were_edited_at_random_are_right_or_a_letter(tmp_path):
    found = look(range(FEW, FEW + MANY), tmp_path)
    assert found["right"] > MANY // 12 and found["letter"] > MANY // 3, found


# -- one by one


def edit(case, change):
    data = json.loads(json.dumps(made(case)[2].to_dict()))
    change(data)
    return Plan.from_dict(data)


def without_conversion(data):
    """The loss is summed over rows: without this each rank has its own."""
    data["conversions"] = [c for c in data["conversions"] if c["source"] != "/sum"]


def decided(name, *choice):
    return lambda data: data["decisions"][name].update(choice=list(choice))


def first(way, value):
    def change(data):
        next(c for c in data["conversions"] if c[way])[way] = value

    return change


WRONG = {
    "a conversion is gone": ("rows, dp", without_conversion, "does not bring the value from /sum"),
    "a conversion does nothing": ("rows, dp", first("forward", []), "does not bring the value"),
    "a gradient is not reduced": ("rows, dp", first("backward", []), "does not bring the gradient"),
    "a gradient is reduced twice": (
        "rows, dp",
        first("backward", ["all_reduce@0", "all_reduce@0"]),
        "does not bring the gradient",
    ),
    "a step that cannot follow": ("rows, dp", first("backward", ["all_gather(7)@0"]), "does not bring the gradient"),
    "a sum through gelu": (
        "rows, dp",
        decided("/gelu", "P(sum) -> P(sum)"),
        "runs /gelu as P\\(sum\\) -> P\\(sum\\), which gelu cannot",
    ),
    "an op that is not there": (
        "rows, dp",
        lambda d: d["decisions"].update({"/gelu2": d["decisions"].pop("/gelu")}),
        "decides nothing for /gelu",
    ),
    "one op too many": (
        "rows, dp",
        lambda d: d["decisions"].update({"/gelu2": d["decisions"]["/gelu"]}),
        "which the model does not have",
    ),
    "another op": (
        "rows, dp",
        lambda d: d["decisions"]["/gelu"].update(op="relu"),
        "is the op relu, and it is the op gelu",
    ),
    "another mesh": ("rows, zero3 and tensor", lambda d: d["mesh"].update(shape=[4, 1]), "cannot on mesh"),
    "another size": (
        "rows, dp",
        lambda d: d["parameter_bytes"].update({"up.bias": 4}),
        "another model: parameter up.bias",
    ),
    "gathered again though it is whole": (
        "rows, dp",
        lambda d: d.update(regathered=["up.weight"]),
        "up.weight is regathered",
    ),
    "reduced in each of one": ("rows, dp", lambda d: d.update(scattered=["up.weight"]), "up.weight is scattered"),
}
NO_PLAN = {
    "another arity": (decided("up.bias", "S(2) -> S(2)"), "another number of operands"),
    "two strategies on one axis": (decided("up.bias", "-> R", "-> R"), "2 strategies on a mesh of 1 axes"),
    "a huge number": (lambda d: d.update(window_bytes=10**400), "bits is not a whole number"),
    "an infinite number": (lambda d: d.update(step_time_s=math.inf), "not a finite number"),
    "a truth for a number": (lambda d: d.update(accumulation=True), "not a whole number"),
    "a text for a number": (lambda d: d["decisions"]["/gelu"].update(seconds="1"), "at decisions./gelu.seconds"),
    "three ends of a conversion": (
        lambda d: d["conversions"][0]["value"].append("R"),
        "2 entries, at conversions.0.value",
    ),
    "a source of nothing": (lambda d: d.update(sources={"guess": 1.0}), "whose source is guess"),
    "kernels that are not known": (lambda d: d.update(kernels=["rms"]), "'rms' names no kernels, at kernels.0"),
    "a text for a list": (lambda d: d.update(regathered="up.weight"), "not a list"),
    "ranks of a huge mesh": (
        lambda d: d.update(mesh={"shape": [10**12], "axes": ["0"], "ranks": [0, 1]}),
        "do not stand",
    ),
    "twice": (lambda d: d["conversions"].append(d["conversions"][0]), "converts a value twice"),
    "a conversion to nowhere": (
        lambda d: d["conversions"][0].update(target="nowhere"),
        "decides nothing for one of them",
    ),
    "an operand that is not there": (lambda d: d["conversions"][0].update(operand=7), "converts operand 7"),
    "other ends than decided": (
        lambda d: d["conversions"][0].update(value=["R", "S(1)"]),
        "something else than its decisions",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_contradiction_is_a_letter_before_anything_is_lowered(what):
    case, change, words = WRONG[what]
    model, batch, plan, _ = made(case)
    plan.validate(model, batch)
    with pytest.raises(BadPlan, match=words):
        edit(case, change).validate(model, batch)
    with pytest.raises(BadPlan, match=words):
        on_threads(
            plan.mesh.size, lambda rank: autopar.autoparallelize(copy.deepcopy(model), batch, plan=edit(case, change))
        )


class ReadTwice(nn.Module):
    """A weight that two ops read: its gradients of both are added before they are reduced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x, y):
        return F.mse_loss(self.linear(x) + self.linear.weight.sum(), y)


def test_a_gradient_that_would_be_reduced_in_the_computing_dtype_is_a_letter():
    model, batch = ReadTwice(), {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}
    plan = autopar.plan(model, batch, mesh=2, parallel="dp", precision=Precision("bfloat16", "float32"))
    data = json.loads(json.dumps(plan.to_dict()))
    Plan.from_dict(data).validate(model, batch)
    # summed at each reader behind the cast, where it was summed once before the cast
    for name in ("linear/to", "linear/to:shared"):
        data["decisions"][name]["choice"] = ["R -> R"]
    once = next(c for c in data["conversions"] if c["target"] == "linear/to")
    data["conversions"].remove(once)
    for target, operand in (("linear/linear", 1), ("/sum", 0)):
        data["conversions"].append(once | {"source": "linear/to:shared", "target": target, "operand": operand})
    with pytest.raises(BadPlan, match=r"reduces the gradient from linear/to:shared to operand .* in bfloat16"):
        Plan.from_dict(data).validate(model, batch)


@pytest.mark.parametrize("what", NO_PLAN)
def test_what_contradicts_itself_is_no_plan(what):
    change, words = NO_PLAN[what]
    with pytest.raises(Letter, match=words):
        edit("rows, dp", change)


def test_a_file_that_says_a_thing_twice_is_no_plan(tmp_path):
    text = json.dumps(made("rows, dp")[2].to_dict())
    (tmp_path / "plan.json").write_text(text[:-1] + ', "accumulation": 3}')
    with pytest.raises(BadPlan, match="cannot be read"):
        Plan.load(tmp_path / "plan.json")


def test_without_inputs_a_plan_knows_how_parameters_may_lie():
    def change(data):
        data["decisions"]["down.weight"]["choice"] = ["-> S(5)"]
        data["conversions"] = [c for c in data["conversions"] if c["source"] != "down.weight"]

    with pytest.raises(BadPlan, match="cannot lie so"):
        edit("rows, dp", change).validate(rows()[0])


class Scan(nn.Module):
    """An op that autopar has no rule for, and one of the user's own."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 12), nn.BatchNorm1d(12)

    def forward(self, x):
        h = self.norm(self.up(x))
        return {"logs": torch.logcumsumexp(h, 1), "norms": torch.renorm(h, 2, 0, 1.0), "loss": h.square().mean()}


def scan():
    return Scan().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}


def single(build):
    model, batch = build()
    return copy.deepcopy(model).float(), {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


KEPT = {
    "constraints": (rows, dict(mesh=2, constraints={"up.weight": "S(0); *", "x": "S(0)"})),
    "regathered, by constraint": (rows, dict(mesh=2, constraints={"*.weight": "S(0); R; regathered"})),
    "zero2 of three": (small, dict(mesh=2, parallel="zero2", accumulation=3)),
    "2d": (small, dict(mesh=(2, 2), parallel="2d")),
    "sequence": (small, dict(mesh=GRID, parallel={"tensor": {"size": 2, "sequence": True}, "data": 2})),
    "mixed": (lambda: single(small), dict(mesh=2, precision=Precision("bfloat16", "float32"), parallel="dp")),
    "mixed, zero3, two": (
        lambda: single(small),
        dict(mesh=(2, 2), precision=Precision("bfloat16", "bfloat16"), parallel="zero3", accumulation=2),
    ),
    "a tight budget": (rows, dict(mesh=2, memory_budget=7_500)),
    "bytes of an optimizer": (rows, dict(mesh=2, optimizer=12)),
    "no rule, a buffer, three outputs": (scan, dict(mesh=2)),
    "no rule, and gradients at an output": (scan, dict(mesh=2, outputs=("logs",))),
    "four devices in another order": (rows, dict(mesh=DeviceMesh((2, 2), ("a", "b"), ranks=(0, 2, 1, 3)))),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_plan_that_was_saved_is_still_one(name, tmp_path):
    build, how = KEPT[name]
    model, batch = build()
    plan = autopar.plan(model, batch, **{"cluster": eager_links(), "memory_budget": "inf", **how})
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    again.save(tmp_path / "again.json")
    assert again == plan and (tmp_path / "plan.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    again.validate(model, batch, outputs=how.get("outputs", "auto"))


@pytest.mark.parametrize("seed", range(8))
def test_any_plan_of_the_space_is_one(seed):
    model, batch = (small, rows, scan)[seed % 3]()
    plan = random_plan_of(
        ColoTracer().trace(model, batch), DeviceMesh((2, 2) if seed % 2 else (3,)), np.random.default_rng(seed)
    )
    Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).validate(model, batch)


def test_a_plan_that_was_just_made_is_not_checked(monkeypatch):
    model, batch = rows()
    monkeypatch.setattr(api, "check_plan", lambda graph, plan: pytest.fail("checked"))
    on_threads(1, lambda rank: autopar.autoparallelize(copy.deepcopy(model), batch, mesh=1))
