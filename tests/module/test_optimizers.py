"""Every optimizer of torch, and what stands around optimizers, on parameters that are cut.

The step that one device would make of the same parameters and gradients, or a letter.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.letters import Letter, NotServed
from autopar.module.optimizers import take_parts
from autopar.testing import Equality, on_processes
from tests.models import eager_links
from tests.shares import by_day
from tests.training import whole

FORMS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "autopar AdamW": lambda p: autopar.optim.AdamW(p, lr=0.1),
    "autopar AdamW clipped": lambda p: autopar.optim.AdamW(p, lr=0.1, max_norm=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p, lr=0.1, foreach=False)
        for name in ("Adafactor", "Rprop", "ASGD", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop")
    },
    **{
        f"{name} foreach": lambda p, name=name: getattr(torch.optim, name)(p, lr=0.1, foreach=True)
        for name in ("Adafactor", "Rprop", "ASGD", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop")
    },
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9),
    "NAdam decoupled": lambda p: torch.optim.NAdam(p, lr=0.1, decoupled_weight_decay=True, weight_decay=0.1),
}
LETTERS = {
    "Adafactor": "AdamW",
    "Adafactor foreach": "AdamW",
    "Rprop": "RMSprop",
    "Rprop foreach": "RMSprop",
    "LBFGS": 'parallel="dp"',
    "SGD fused": "foreach=True",
    "Adagrad fused": "foreach=True",
}
AS_TORCH = {"SparseAdam": "does not support dense gradients"}  # on one device, too


def averaged(parameters: list[Any], decay: float | None) -> list[torch.Tensor]:
    """Averages that AveragedModel holds after two updates."""
    model = nn.ParameterList(parameters)
    average = None if decay is None else torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
    for factor in (2.0, 0.5):
        with torch.no_grad():
            for p in parameters:
                p.mul_(factor)
        mean.update_parameters(model)
    return [whole(p.detach()) for p in mean.module]


def scheduled(parameters: list[Any]) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.3)]
    for _ in range(3):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def scaled(parameters: list[Any]) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(parameters, lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    scaler.step(optimizer)
    scaler.update()


def clipped(parameters: list[Any], kind: float, foreach: bool | None = None) -> list[torch.Tensor]:
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, 0.01, kind, foreach=foreach)
    return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm, *(whole(p.grad) for p in parameters)]


AROUND: dict[str, Callable[[list[Any]], list[torch.Tensor] | None]] = {
    "clip by norm": lambda p: clipped(p, 2.0),
    "clip by norm in a loop": lambda p: clipped(p, 2.0, False),
    "clip by the largest": lambda p: clipped(p, float("inf")),
    "clip by the sum": lambda p: clipped(p, 1.0),
    "clip by value": lambda p: torch.nn.utils.clip_grad_value_(p, 0.01),
    "loss scaling": scaled,
    "schedules": scheduled,
    "an average": lambda p: averaged(p, None),
    "a running average": lambda p: averaged(p, 0.9),
}


class Net(nn.Module):
    """A head cut by blocks, as a fused QKV is, and other parameters cut unevenly or whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head, self.gain = (
            nn.Linear(6, 5),
            nn.LayerNorm(5),
            nn.Linear(5, 12),
            nn.Parameter(torch.tensor(1.5)),
        )

    def forward(self, x):
        q, k, v = self.head(self.norm(torch.tanh(self.first(x)))).split(4, -1)
        return (q.softmax(-1) * k * self.gain + v).pow(2).mean()


STORED = {
    "first.weight": "S(0); *",
    "first.bias": "S(0); *",
    "head.weight": "S(0, blocks=(4,4,4)); *",
    "head.bias": "S(0); *",
    "norm.weight": "S(0); *",
}


def parameters_after(parameters: dict[str, Any], form: str, before: Callable[[], None]) -> dict[str, torch.Tensor]:
    given = list(parameters.values())
    if form in AROUND:
        before()
        found = AROUND[form](given) or []
        return {
            **{n: whole(p.detach()).clone() for n, p in parameters.items()},
            **{str(i): t.detach() for i, t in enumerate(found)},
        }
    optimizer = FORMS[form](given)
    for _ in range(3):
        before()
        optimizer.step(*[lambda: torch.ones(())] if form == "LBFGS" else [])
    return {n: whole(p.detach()).clone() for n, p in parameters.items()}


def on_ranks(rank, model, x, dtype):
    """Parameters after a step of every form, beside those of one device with the same gradients; or the letter."""
    mine = autopar.autoparallelize(
        copy.deepcopy(model).to(dtype), (x.to(dtype),), mesh=2, cluster=eager_links(), constraints=STORED
    )
    mine(x.to(dtype)).backward()
    parameters = dict(mine.named_parameters())
    assert {str(p.placements) for p in parameters.values()} == {
        "(Replicate(),)",
        "(Shard(dim=0),)",
        "(_StridedShard(dim=0, sf=3),)",
    }
    start, gradients = (
        {n: (p.grad if g else p).detach().clone() for n, p in parameters.items()} for g in (False, True)
    )
    whole_start, whole_gradients = ({n: whole(t) for n, t in of.items()} for of in (start, gradients))
    results = {}
    for form in (*FORMS, *AROUND):
        with torch.no_grad():
            for n, p in parameters.items():
                p.copy_(start[n])

        def give(to: dict[str, Any], of: dict[str, torch.Tensor]) -> None:
            for n, p in to.items():
                p.grad = of[n].clone()

        alone = {n: nn.Parameter(t.clone()) for n, t in whole_start.items()}
        rounds = torch.Tensor.bfloat16  # Muon iterates in bfloat16, whose rounding hides much
        torch.Tensor.bfloat16 = (lambda self: self) if dtype == torch.float64 else rounds
        try:
            found: Any = parameters_after(parameters, form, lambda give=give: give(parameters, gradients))
            results[form] = found, parameters_after(alone, form, lambda give=give, to=alone: give(to, whole_gradients))
        except Exception as e:
            same = all(torch.equal(p.detach().to_local(), start[n].to_local()) for n, p in parameters.items())
            results[form] = isinstance(e, Letter), f"{type(e).__name__}: {e}", same
        torch.Tensor.bfloat16 = rounds
    return results


@functools.cache
def outcomes(dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    return on_processes(2, on_ranks, Net(), torch.randn(4, 6), dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("form", [*FORMS, *AROUND])
def test_it_makes_the_step_of_one_device_or_is_a_letter(form, dtype):
    for results in outcomes(dtype):
        outcome = results[form]
        if form in LETTERS or form in AS_TORCH:
            is_letter, text, is_unchanged = outcome
            assert is_letter == (form in LETTERS) and (LETTERS | AS_TORCH)[form] in text and is_unchanged, text
        else:
            assert len(outcome) == 2, outcome
            rounding = 1e-8 if dtype == torch.float64 else 2**-3 if form == "Muon" else 2**-8
            Equality.in_float64(form, *outcome, rounding).check()


def test_every_optimizer_of_torch_is_tried():
    classes = {
        name
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer"} == {form.split()[0] for form in FORMS} - {"autopar"}


def like(module, name):
    """A class that says it is of another project, which need not be installed."""
    return type(name, (torch.optim.SGD,), {"__module__": module})


@pytest.mark.parametrize(
    "build",
    [
        transformers.optimization.Adafactor,
        like("bitsandbytes.optim.adamw", "PagedAdamW8bit"),
        type("Mine", (like("bitsandbytes.optim.lion", "Lion8bit"),), {}),
        like("torchao.optim.adam", "AdamW4bit"),
    ],
    ids=lambda c: c.__name__,
)
def test_optimizers_of_others_that_fail_in_mid_step_are_letters(build):
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    mine = autopar.autoparallelize(Net().double(), (x,), mesh=1)
    try:
        optimizer = build(mine.parameters())
        mine(x).backward()
        before = {name: p.detach().clone() for name, p in mine.named_parameters()}
        with pytest.raises(NotServed, match=r"torchao\.optim\.AdamW8bit|torch\.optim\.Adafactor"):
            optimizer.step()
        assert all(torch.equal(before[name].to_local(), p.to_local()) for name, p in mine.named_parameters())
        like("torchao.optim.adam", "AdamW8bit")(mine.parameters()).step()  # serves, so that nothing refuses it
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "build", by_day([torch.optim.Adafactor, torch.optim.LBFGS], torch.optim.Adafactor), ids=lambda c: c.__name__
)
def test_where_parameters_are_whole_they_serve(build):
    """Adafactor and LBFGS, on a mesh of one."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(4, 6, dtype=torch.float64)
    expected = copy.deepcopy(model)
    mine = autopar.autoparallelize(model, (x,), mesh=1)
    try:
        for one in (mine, expected):
            optimizer = build(one.parameters(), lr=0.1)

            def closure(one=one, optimizer=optimizer):
                optimizer.zero_grad()
                loss = one(x)
                loss.backward()
                return loss

            for _ in range(3):
                optimizer.step(closure)
        found = {n: p.detach().to_local() for n, p in mine.named_parameters()}
        Equality.in_float64(
            build.__name__, found, {n: p.detach() for n, p in expected.named_parameters()}, 1e-8
        ).check()
    finally:
        torch.distributed.destroy_process_group()


class Uneven(nn.Module):
    """Parameters that are cut unevenly, by blocks, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Linear(6, 10), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return (self.last(gate.sigmoid() * up) * self.scale).pow(2).mean()


@pytest.mark.parametrize(
    "name", by_day(["AdamW", "AdamW foreach", "SGD nesterov", "autopar AdamW"], "AdamW", "autopar AdamW")
)
def test_states_of_one_device_are_loaded_on_a_mesh(name, threads):
    """Whole tensors, of which each rank takes its part; the step after is that of one device."""
    torch.manual_seed(3)
    model, batch = Uneven().double(), {"x": torch.randn(8, 6, dtype=torch.float64)}
    optimizer = FORMS[name](list(model.parameters()))

    def steps(model, optimizer, count):
        for _ in range(count):
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, 2)
    expected = {n: p.detach() for n, p in model.named_parameters()}

    def body(rank, parallel):
        mine = autopar.autoparallelize(Uneven().double(), batch, mesh=2, parallel=parallel, cluster=eager_links())
        again = FORMS[name](list(mine.parameters()))
        mine.load_state_dict(saved[0])
        again.load_state_dict(copy.deepcopy(saved[1]))
        steps(mine, again, 2)
        return {n: whole(p.detach()) for n, p in mine.named_parameters()}

    near = 1e-6 if name == "autopar AdamW" else 1e-9  # whose states are float32
    for parallel in ("zero3", "dp"):
        for result in threads(2, body, parallel):
            Equality.in_float64(f"{name} under {parallel}", result, expected, near).check()


def test_whole_states_are_cut_where_they_are(threads):
    """Each rank takes its part of its own states: all have loaded the same, and nothing is sent."""

    def body(rank):
        model = autopar.autoparallelize(
            nn.Linear(4, 4), {"input": torch.zeros(2, 4)}, mesh=2, parallel="zero3", cluster=eager_links()
        )
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            optimizer.state[p] = {"exp_avg": torch.full(p.shape, float(rank))}
        take_parts(optimizer)
        return [state["exp_avg"].to_local() for state in optimizer.state.values()]

    for rank, parts in enumerate(threads(2, body)):
        assert all((part == rank).all() and part.numel() for part in parts)
