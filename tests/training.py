"""One training run, the same code for the single-device model and the parallel one, and what it leaves to compare."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import autopar
from autopar.testing import Equality, Unequal
from tests.models import eager_links, mean_square
from tests.oracle import PermutedSums

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}
STEPS = 10


def whole(tensor):
    """A DTensor put together from what the ranks hold, by torch.chunk alone; copies must be equal.

    Not by full_tensor(): on threads it caches one rank's plan for uneven parts in the process, where other ranks find
    it, and torch 2.11 refuses it where a dim is cut by blocks.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if dist.get_backend() == "fake":  # LocalTensors: nobody to ask
        return tensor.full_tensor()
    local = tensor.to_local().detach()
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial("sum"):  # torch 2.14 leaves sums of products pending
            local = local.clone()
            dist.all_reduce(local, group=tensor.device_mesh.get_group(axis))
    held = [places_on(tensor, rank) for rank in range(dist.get_world_size())]
    shapes = [tuple(map(len, places)) for places in held]
    if tuple(local.shape) != shapes[dist.get_rank()]:
        raise Unequal(f"a part of shape {tuple(local.shape)} where {shapes[dist.get_rank()]} is expected")
    message = local.new_zeros(max(map(math.prod, shapes)))
    message[: local.numel()] = local.flatten()
    messages = [torch.empty_like(message) for _ in held]
    dist.all_gather(messages, message)
    result, written = local.new_empty(tensor.shape), torch.zeros(tensor.shape, dtype=torch.bool)
    for places, shape, message in zip(held, shapes, messages, strict=True):
        part, index = message[: math.prod(shape)].view(shape), index_of(places)
        one, other = result[index], part
        if not bool(((one == other) | (one.isnan() & other.isnan()) | ~written[index]).all()):
            raise Unequal("copies differ between ranks")
        result[index], written[index] = part, True
    return result


def places_on(tensor: DTensor, rank: int):
    """The indices that a rank holds, of each dim."""
    mesh = tensor.device_mesh
    coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
    places = [torch.arange(n) for n in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if not (placement.is_replicate() or placement.is_partial()):
            blocks = places[placement.dim].chunk(getattr(placement, "split_factor", 1))
            pieces = [block.chunk(mesh.size(axis)) for block in blocks]
            places[placement.dim] = torch.cat(
                [p[coordinate[axis]] if coordinate[axis] < len(p) else p[0][:0] for p in pieces]
            )
    return places


def index_of(places):
    """An index of a tensor's elements: slices, for they make no table of places, or a grid where blocks are cut."""
    ends = [(int(p[0]), int(p[-1]) + 1) if len(p) else (0, 0) for p in places]
    if all(stop - start == len(p) for (start, stop), p in zip(ends, places, strict=True)):
        return tuple(slice(*end) for end in ends)
    return torch.meshgrid(*places, indexing="ij")


def call(model, batch, loss: str):
    """The loss of one step: computed by the model, by `loss=`, or outside."""
    if loss == "inside":
        return model(**batch)
    if loss == "callable":
        return (
            model(x=batch["x"])[0]
            if isinstance(model, autopar.module.ParallelModule)
            else mean_square(model(batch["x"]), {})
        )
    return F.mse_loss(model(x=batch["x"]), batch["y"])


def train(model, batch, optimizer: str, loss: str = "inside", steps: int = STEPS):
    """Losses of every step, gradients of the first, parameters after the last."""
    parameters = dict(model.named_parameters())
    stepper = OPTIMIZERS[optimizer](parameters.values())
    losses, gradients = {}, {}
    for step in range(steps):
        stepper.zero_grad()
        value = call(model, batch, loss)
        value.backward()
        losses[f"loss.{step}"] = value.detach()
        if step == 0:
            gradients = {n: whole(p.grad).detach().clone() for n, p in parameters.items() if p.grad is not None}
        stepper.step()
    return losses, gradients, {n: whole(p).detach().clone() for n, p in parameters.items()}


def results(model, loss):
    """The loss and the gradients that it leaves, which are then forgotten."""
    loss.backward()
    found = {
        "loss": loss.detach(),
        **{n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None},
    }
    model.zero_grad()
    return found


def train_parallel(rank, model, batch, plan, runs):
    """Every (optimizer, loss, dtype) of `runs` under one plan for each dtype."""
    results = []
    for optimizer, loss, dtype in runs:
        mine, inputs = copies(model, batch, dtype, keep=rank is None)
        given = inputs if loss == "inside" else {"x": inputs["x"]}
        how = {"loss": mean_square} if loss == "callable" else {}
        parallel = autopar.autoparallelize(mine, given, plan=plan[loss, dtype], **how)
        results.append(train(parallel, inputs, optimizer, loss))
    return results


def copies(model, batch, dtype, keep=False):
    dtype = getattr(torch, dtype)
    if keep:  # one tensor for all ranks: torch's deepcopy does not know it
        return (model if next(model.parameters()).dtype == dtype else model.to(dtype)), {
            k: v.to(dtype) for k, v in batch.items()
        }
    return copy.deepcopy(model).to(dtype), {k: v.to(dtype) for k, v in batch.items()}


def eager(model, batch, optimizer, loss, dtype, permuted=None):
    mine, inputs = copies(model, batch, dtype)
    with contextlib.nullcontext() if permuted is None else PermutedSums(permuted):
        return train(mine, inputs, optimizer, loss)


@dataclass(frozen=True)
class Reference:
    """What one device leaves of a run: computed once, for all ranks are held against it."""

    in_float64: tuple
    own: tuple | None = None  # in float32, as are the permuted
    permuted: tuple = ()

    @classmethod
    def of(cls, model, batch, optimizer, loss, dtype) -> Reference:
        exact = eager(model, batch, optimizer, loss, "float64")
        if dtype == "float64":
            return cls(exact)
        seeds = range(5 if optimizer == "adamw" else 0)
        return cls(
            exact,
            eager(model, batch, optimizer, loss, "float32"),
            tuple(eager(model, batch, optimizer, loss, "float32", seed) for seed in seeds),
        )

    def check(self, what, actual):
        """Equality as the contract defines it, for losses, gradients and parameters."""
        for i, (part, tolerance) in enumerate(zip(("losses", "gradients", "parameters"), (1e-9, 1e-9, 1e-8))):
            (
                Equality.in_float64(f"{what}: {part}", actual[i], self.in_float64[i], tolerance)
                if self.own is None
                else Equality.in_float32(
                    f"{what}: {part}",
                    actual[i],
                    self.own[i],
                    self.in_float64[i],
                    [p[i] for p in self.permuted] if part != "gradients" else (),
                )
            ).check()


def lora_steps(model, batch):
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    assert (
        all((p.grad is not None) == p.requires_grad for p in model.parameters())
        and len(optimizer.state) == len(trains) == 8
    )
    return {n: whole(p).detach().clone() for n, p in model.named_parameters()}


def lora_on_ranks(rank, model, batch, how):
    """Steps under a preset, or under a plan."""
    how = dict(plan=how) if isinstance(how, autopar.Plan) else dict(mesh=2, parallel=how, cluster=eager_links())
    mine = autopar.autoparallelize(model, batch, **how)
    assert (
        mine.plan.memory["optimizer states"]
        <= 2 * 8 * sum(p.numel() for p in mine.parameters() if p.requires_grad) + 64
    )
    return lora_steps(mine, batch)
