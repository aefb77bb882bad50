"""What a user may get wrong, each met by a letter on every rank before any of them waits for another.

Faults of ranks are in tests/runtime/test_faults.py, parts of batches in test_local_inputs.py.
"""

from __future__ import annotations

import copy
import io
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.letters import BadInput, BadPlan, BadWeights, Consumed, Disagreement, NotCaptured, NotServed
from autopar.testing import on_threads
from tests.models import eager_links, on_meta


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 8), nn.Linear(8, 2)

    def forward(self, x, scale=1.0):
        out = self.last(F.relu(self.first(x))) * scale
        return {"loss": out.pow(2).mean(), "logits": out}


class Named(Net):
    plan = "of action"


class Unmade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, x):
        return (x * self.weight).sum()


X = torch.randn(8, 4)


def make(model=None, **how):
    return autopar.autoparallelize(
        copy.deepcopy(model) if model is not None else Net(),
        (X,),
        **({} if "plan" in how else {"mesh": 2, "parallel": "dp"}) | how,
    )


def other_plan(**how):
    return autopar.plan(**{"model": Net(), "meta_inputs": (X,), "mesh": 2, **how})


def own_forward():
    model = Net()
    model.forward = lambda x: x.sum()
    return model


def checkpointed(**how):
    """A drawn model that backward runs again."""
    torch.utils.checkpoint.checkpoint(
        make(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))), X.clone().requires_grad_(), **how
    ).sum().backward()


def stepped_before():
    model = Net()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    autopar.autoparallelize(model, (X,), mesh=2)(X)["loss"].backward()
    stepper.step()


def other_parameters(shape):
    """In the place of those that are cut."""
    model = make(parallel="zero3")
    return torch.func.functional_call(model, {"first.weight": torch.zeros(shape)}, (X,))


def spread_before():
    other_plan(model=distribute_module(Net(), init_device_mesh("cpu", (2,))))


def twice_differentiated():
    model = make()
    loss = model(X)["loss"]
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def twice_differentiated_by_its_input():
    x = X.clone().requires_grad_()
    model = make(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), parallel=None)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def with_a_module_called_plan():
    model = nn.Linear(4, 4)
    model.plan = nn.Linear(4, 4)
    return model


def new_forward():
    model = make()
    model.forward = lambda x: x.sum()


def prepared(model, mixed=False):
    """The model as Accelerate and Fabric wrap it: with mixed precision a forward of their own, then DDP."""
    if mixed:
        forward = model.forward.__func__
        model.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(forward), model)
    return DistributedDataParallel(model)


def written_by_one(what):
    torch.save(what(make(parallel="zero3")), io.BytesIO())


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(X)["loss"].backward()
    optimizer.step()
    return optimizer.state_dict()


AROUND = {
    "in DDP": (lambda: DistributedDataParallel(make()), Consumed, "AutoparStrategy and the Trainers"),
    "DDP around what holds it": (
        lambda: DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), make())),
        Consumed,
        "DistributedDataParallel is put around",
    ),
    "prepared": (lambda: prepared(make()), Consumed, "model.no_sync"),
    "prepared for mixed precision": (lambda: prepared(make(), True), NotServed, "torch.autocast around the call"),
    "in FSDP": (
        lambda: FullyShardedDataParallel(make(), device_id=torch.device("cpu")),
        Consumed,
        "FullyShardedDataParallel is put around",
    ),
    "fully_shard": (
        lambda: fully_shard(make(), mesh=init_device_mesh("cpu", (2,))),
        Consumed,
        "fully_shard is put around",
    ),
    "fully_shard of a part": (
        lambda: fully_shard(make().first, mesh=init_device_mesh("cpu", (2,))),
        Consumed,
        "fully_shard is put around",
    ),
    "a forward set later": (new_forward, NotServed, "the forward of a parallel Net is replaced"),
    "a part called": (lambda: make().first(X), NotServed, "first, a part of a parallel model, is called by itself"),
    "a part called that is cut": (lambda: make(parallel="zero3").first(X), NotServed, "inside the model or in loss="),
    "a state dict written by a rank": (lambda: written_by_one(lambda m: m.state_dict()), NotServed, "StateDictOptions"),
    "its optimizer's": (lambda: written_by_one(stepped), NotServed, "of which it holds a part"),
    "a parameter written": (lambda: written_by_one(lambda m: m.first.weight), NotServed, r"\(4, 4\) of \(8, 4\)"),
}
WRONG = {
    **AROUND,
    "an input is missing": (lambda: make()(), BadInput, "missing"),
    "one has another name": (lambda: make()(y=X), BadInput, "missing"),
    "one too many": (lambda: make()(X, 1.0, 2.0), BadInput, "too many"),
    "the width is wrong": (lambda: make()(X[:, :3]), NotCaptured, r"raises RuntimeError.*\n *at .*in forward"),
    "text for a tensor": (lambda: make()("text"), NotCaptured, "raises TypeError"),
    "an argument of which nothing can be said": (lambda: make()(X, scale=lambda: 1), BadInput, "cannot be said"),
    "parallel twice": (lambda: make(make()), Consumed, "parallel already"),
    "parallel by another hand": (spread_before, Consumed, "spread over devices already"),
    "in a wrapper": (lambda: make(nn.DataParallel(Net())), Consumed, "inside a wrapper"),
    "a parameter that lies elsewhere": (
        lambda: other_parameters((8, 4)),
        NotServed,
        "the parameter first.weight lies as",
    ),
    "an input that is spread": (
        lambda: make()(distribute_tensor(X, init_device_mesh("cpu", (2,)))),
        BadInput,
        "is a DTensor",
    ),
    "written whole": (lambda: pickle.dumps(make()), NotServed, "not written whole"),
    "planned when parallel": (lambda: other_plan(model=make()), Consumed, "parallel already"),
    "a path for a plan": (lambda: make(plan="plan.json"), BadPlan, "is not a Plan"),
    "a plan and a mesh": (lambda: make(plan=other_plan(), mesh=2), BadPlan, "mesh"),
    "a plan of another model": (lambda: make(plan=other_plan(model=nn.Linear(4, 2))), BadPlan, "another graph"),
    "a plan of other sizes": (
        lambda: make(plan=other_plan(model=Net(4), meta_inputs=(X[:4],))),
        BadPlan,
        "another graph",
    ),
    "a plan of another mesh": (lambda: make(plan=other_plan(mesh=4)), Disagreement, "2 ranks"),
    "a mesh of too many": (lambda: make(mesh=4), Disagreement, "2 ranks"),
    "weights that are a number": (lambda: make(weights=3), BadWeights, "is not a path"),
    "weights that are not there": (lambda: make(weights="/nowhere/model.safetensors"), BadWeights, "nowhere"),
    "no such initialisation": (lambda: make(init="zeros"), NotServed, "init"),
    "no such backend": (lambda: make(compile="nothing"), NotServed, "not a backend"),
    "compile is a number": (lambda: make(compile=3), NotServed, "compile"),
    "no time at all": (lambda: make(timeout_s=-1), NotServed, "not a number of seconds"),
    "no such inputs": (lambda: make(inputs="mine"), NotServed, "inputs"),
    "padding": (lambda: make(pad_to=0), NotServed, "not a length"),
    "no such word for outputs": (lambda: make(outputs="some"), NotServed, "not known"),
    "no such output": (lambda: make(outputs=("hidden",)), NotServed, "no output 'hidden'"),
    "outputs are a number": (lambda: make(outputs=3), NotServed, "not known"),
    "an argument that nobody knows": (lambda: make(devices=2), NotServed, "devices"),
    "a gradient of gradients": (twice_differentiated, NotServed, "gradient of gradients"),
    "a gradient of an input's gradient": (twice_differentiated_by_its_input, NotServed, "gradient of gradients"),
    "a checkpoint around what draws": (lambda: checkpointed(use_reentrant=False), NotServed, "a second time"),
    "the older kind of it": (lambda: checkpointed(use_reentrant=True), NotServed, "a second time"),
    "a gradient beside the loss": (lambda: make()(X)["logits"].sum().backward(), NotServed, "lowered for the loss"),
    "a gradient kept beside the loss": (lambda: make()(X)["logits"].retain_grad(), NotServed, "does not pass it"),
    "a forward of the object": (
        lambda: autopar.autoparallelize(own_forward(), (X,), mesh=2),
        NotServed,
        "forward of its own",
    ),
    "an attribute of that name": (lambda: make(Named()), NotServed, "'plan'"),
    "a module of that name": (lambda: make(with_a_module_called_plan()), NotServed, "attribute 'plan'"),
    "an optimizer of before": (stepped_before, Consumed, "optimizer"),
    "nothing says how it begins": (lambda: make(on_meta(Unmade)), NotServed, "weight"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_a_letter_on_every_rank(name):
    use, letter, match = WRONG[name]

    def body(rank):
        with pytest.raises(letter, match=match):
            use()

    on_threads(2, body, timeout_s=30)


def test_there_are_more_than_twenty():
    assert len(WRONG) >= 20


def test_others_use_what_wrappers_and_pickle_are_for():
    """Models and DTensors that are nobody's but the caller's."""

    def body(rank):
        make()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("another",))
        buffer = io.BytesIO()
        torch.save(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), buffer)
        sharded = fully_shard(Net(), mesh=mesh)
        with pytest.raises(RuntimeError, match="got mixed"):
            distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) @ torch.ones(4, 4)
        return len(list(sharded.parameters())), copy.deepcopy(make(parallel="zero3")).first.weight.shape

    assert on_threads(2, body) == [(4, (8, 4))] * 2


def test_a_part_whose_forward_is_replaced_is_looked_at_again():
    model = Net().double()

    def twice(x):
        return 2 * type(model.first).forward(model.first, x)

    mine = autopar.autoparallelize(model, (X.double(),), mesh=1)
    before = mine(X.double())["logits"].detach()
    model.first.forward = twice
    expected = Net().double()
    expected.load_state_dict({n: p.detach().to_local() for n, p in mine.named_parameters()})
    first = expected.first.forward
    assert torch.allclose(before, expected(X.double())["logits"])
    expected.first.forward = lambda x: 2 * first(x)
    assert torch.allclose(mine(X.double())["logits"], expected(X.double())["logits"])


@pytest.mark.parametrize(
    "outputs, kinds",
    [("auto", (True, True)), ("full", (False, False)), ("sharded", (True, True)), (("logits",), (False, True))],
    ids=str,
)
def test_outputs_leave_as_they_are_asked_for(outputs, kinds):
    """Beside a loss: what is cut is a DTensor, unless it is to be whole."""
    model = Net().double()
    model.register_forward_hook(lambda m, args, out: {**out, "hidden": m.first(args[0])})
    expected = copy.deepcopy(model)(X.double())

    def body(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model),
            (X.double(),),
            mesh=2,
            constraints={"x": "S(0)", "last": "S(0)", "first": "S(0)"},
            cluster=eager_links(),
            outputs=outputs,
        )
        found = mine(X.double())
        found["loss"].backward()
        for name, is_cut in zip(("logits", "hidden"), kinds, strict=True):
            assert hasattr(found[name], "full_tensor") == is_cut and not hasattr(found["loss"], "full_tensor")
            whole = found[name].full_tensor() if is_cut else found[name]
            assert torch.allclose(whole, expected[name], atol=1e-12) and torch.allclose(found["loss"], expected["loss"])

    on_threads(2, body)
